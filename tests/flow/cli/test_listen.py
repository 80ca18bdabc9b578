"""Tests of `webhookd listen` with `webhookd serve --local`: deliveries, errors, and use without a daemon."""

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from tests.flow.conftest import PATIENT, MakeDaemon
from tests.support.api import Client
from tests.support.daemon import DaemonProcess
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.listener import ListenerProcess
from tests.support.postgres import free_port
from tests.support.waiting import until
from tests.unit.outbound.test_signatures import make_secret
from webhookd.cli.main import commands

MakeListener = Callable[..., ListenerProcess]
ServeLocal = Callable[[], Awaitable[Client]]

# Only --local makes the daemon trust and allow anything on this machine.
RESPONDED = """
    select exists (select from webhookd.webhook_delivery_jobs
                   where response_status = $1 and response_excerpt = $2)
"""
NOTHING_ALLOWED = {"allow_networks": [], "ca_file": ""}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The folder that daemon and receivers share."""
    return tmp_path / "data"


@pytest.fixture
def serve_local(make_daemon: MakeDaemon, session: aiohttp.ClientSession, data_dir: Path) -> ServeLocal:
    """A function that starts `webhookd serve --local`."""

    async def serve() -> Client:
        daemon = make_daemon(delivery=NOTHING_ALLOWED, retry=PATIENT, database={"data_dir": str(data_dir)})
        return Client(session, await daemon.start("--local"))

    return serve


@pytest.fixture
def make_listener(tmp_path: Path, data_dir: Path) -> Iterator[MakeListener]:
    """A function that creates receivers, which the end of the test stops."""
    made: list[ListenerProcess] = []

    def make(daemon: DaemonProcess | None = None, **environment: str) -> ListenerProcess:
        port = free_port() if daemon is None else daemon.port
        environment = {"WEBHOOKD_URL": f"http://127.0.0.1:{port}"} | environment
        made.append(ListenerProcess(tmp_path / f"listener{len(made)}", data_dir, environment))
        return made[-1]

    yield make
    for listener in made:
        listener.stop()


async def subscriptions(api: Client) -> list[dict[str, Any]]:
    """All subscriptions."""
    rows: list[dict[str, Any]] = (await api.get("/v1/subscriptions")).body["items"]
    return rows


def refusal(listener: ListenerProcess) -> str:
    """Its only error line."""
    lines = [line for line in listener.stderr().splitlines() if line.startswith("webhookd: ")]
    assert len(lines) == 1, listener.stderr()
    assert "Traceback" not in listener.stderr()
    return lines[0]


async def test_first_delivery(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """Three commands deliver a verified event; Ctrl-C exits with 0 and pauses the subscription."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json")
    assert f"webhookd publish {EVENT_TYPE}" in listener.stderr()
    event = await api.event(payload={"order": 7}, correlation_id="c-1")
    [arrival] = await listener.deliveries(1)
    assert arrival.pop("received_at").endswith("Z")
    assert arrival == {
        "method": "POST",
        "path": "/",
        "event_type": EVENT_TYPE,
        "webhook_id": f"evt_{event.body['id']}",
        "attempt": "1",
        "correlation_id": "c-1",
        "signature": "verified",
        "problem": None,
        "duplicate": False,
        "challenge": False,
        "answered": 200,
        "payload": {"order": 7},
    }
    listener.interrupt()
    assert await listener.ended() == 0
    [row] = await subscriptions(api)
    assert (row["active"], row["verified"]) == (False, True)
    assert api.daemon.logged("delivery.local")


async def test_suggested_command_works(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """For reserved event types, which only webhookd publishes, it suggests to enqueue a job."""
    api = await serve_local()
    await api.patch("/v1/job-substrate", {"enabled": True})
    listener = await make_listener(api.daemon).start("dot.job.enqueued", "--port=0", "--json")
    assert "Next, in another terminal: webhookd jobs enqueue greet\n" in listener.stderr()
    assert "webhookd publish" not in listener.stderr()
    job = {"kind": "greet", "executor": "external_worker", "idempotency_key": "1"}
    assert (await api.post("/v1/jobs", job)).status == 201
    [arrival] = await listener.deliveries(1)
    assert (arrival["event_type"], arrival["payload"]["job_kind"]) == ("dot.job.enqueued", "greet")
    both = await make_listener(api.daemon).start("dot.job.enqueued", EVENT_TYPE, "--port=0")
    assert f"webhookd publish {EVENT_TYPE} " in both.stderr()


async def test_arrival_as_text(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """Without --json: a line with the headers, and the indented payload below it."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0")
    event = await api.event(payload={"order": 7}, correlation_id="c-1")
    printed = await listener.prints('"order": 7')
    [line] = [line for line in printed.splitlines() if "evt_" in line]
    assert line.split(" ", 1)[1] == (
        f"✓ signature {EVENT_TYPE}  evt_{event.body['id']}  attempt 1  correlation c-1  → 200"
    )
    assert '    {\n      "order": 7\n    }\n' in printed


async def test_second_start_resumes_its_subscription(
    serve_local: ServeLocal, make_listener: MakeListener, flow: Flow
) -> None:
    """The same row with a new secret; held deliveries arrive, also after the first receiver was killed."""
    api = await serve_local()
    port = f"--port={free_port()}"
    first = await make_listener(api.daemon).start(EVENT_TYPE, port, "--json", "--status=503")
    await api.event(payload={"number": 1})
    await first.deliveries(1)
    first.interrupt()
    assert await first.ended() == 0
    second = await make_listener(api.daemon).start(EVENT_TYPE, port, "--json")
    [retried] = await second.deliveries(1)
    assert (retried["payload"], retried["signature"]) == ({"number": 1}, "verified")
    # It prints an arrival before it answers.
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    second.stop()
    third = await make_listener(api.daemon).start(EVENT_TYPE, port, "--json")
    await api.event(payload={"number": 2})
    [arrival] = await third.deliveries(1)
    assert (arrival["payload"], arrival["signature"]) == ({"number": 2}, "verified")
    assert len(await subscriptions(api)) == 1


async def test_other_subscription_of_the_same_url_is_not_changed(
    serve_local: ServeLocal, make_listener: MakeListener
) -> None:
    """A subscription created by a person keeps its secret."""
    api = await serve_local()
    port = free_port()
    url = f"https://127.0.0.1:{port}/"
    made = await api.post("/v1/subscriptions", {"event_type": EVENT_TYPE, "callback_url": url})
    assert made.status == 201
    await make_listener(api.daemon).start(EVENT_TYPE, f"--port={port}")
    assert len(await subscriptions(api)) == 2
    unchanged = (await api.get(f"/v1/subscriptions/{made.body['id']}")).body
    assert unchanged["updated_at"] == made.body["updated_at"]


async def test_fail_option_causes_retries(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """The first two attempts fail, the third is accepted."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json", "--fail=2")
    # Shorten the delay of one second, which is meant for a person.
    [row] = await subscriptions(api)
    assert row["base_delay_seconds"] == 1.0
    await api.patch(f"/v1/subscriptions/{row['id']}", {"base_delay_seconds": 0.05})
    await api.event()
    arrivals = await listener.deliveries(3)
    assert [(it["attempt"], it["answered"], it["duplicate"]) for it in arrivals] == [
        ("1", 500, False),
        ("2", 500, False),
        ("3", 200, False),
    ]


class Application:
    """A local HTTP application that answers with the given status, and keeps what it got."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.requests: list[tuple[web.Request, bytes]] = []

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        self.requests.append((request, await request.read()))
        return web.Response(status=self.status, body=b"from the application")


async def test_forward_passes_request_and_answer_on(
    serve_local: ServeLocal, make_listener: MakeListener, flow: Flow
) -> None:
    """The application gets the signed bytes; its 201 completes the delivery, its 500 is retried."""
    api = await serve_local()
    async with Application(201) as application:
        words = (EVENT_TYPE, "--port=0", "--json", "--forward", application.url)
        listener = await make_listener(api.daemon).start(*words)
        [row] = await subscriptions(api)
        await api.patch(f"/v1/subscriptions/{row['id']}", {"base_delay_seconds": 0.05})
        event = await api.event(payload={"order": 7})
        [arrival] = await listener.deliveries(1)
        assert (arrival["answered"], arrival["signature"]) == (201, "verified")
        [(request, body)] = application.requests
        assert (request.method, request.path, json.loads(body)) == ("POST", "/hook", {"order": 7})
        assert request.headers["webhook-id"] == f"evt_{event.body['id']}"
        assert request.headers["webhook-signature"].startswith("v1,")
        await until(flow.daemon, RESPONDED, 201, b"from the application")

        application.status = 500
        await api.event(payload={"order": 8})
        [_, failed, *_] = await listener.deliveries(2)
        assert (failed["answered"], failed["duplicate"]) == (500, False)
        await until(flow.daemon, RESPONDED, 500, b"from the application")
        application.status = 200
        await until(flow.daemon, "select bool_and(status = 'Completed') from webhookd.webhook_delivery_sagas")
        assert not any(line["duplicate"] for line in listener.lines()), "a failed one is no duplicate"


async def test_forward_to_nothing_is_a_bad_gateway(
    serve_local: ServeLocal, make_listener: MakeListener, flow: Flow
) -> None:
    """The delivery is retried, and the listener says why."""
    api = await serve_local()
    url = f"http://127.0.0.1:{free_port()}/hook"
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json", "--forward", url)
    await api.event()
    [failed, *_] = await listener.deliveries(1)
    assert failed["answered"] == 502
    assert f"cannot forward to {url}" in listener.stderr()
    await until(flow.daemon, RESPONDED, 502, b"")
    await until(flow.daemon, "select final_error_code = 'HTTP_502' from webhookd.webhook_delivery_sagas")


async def test_several_event_types(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """One subscription for all of them. --keep leaves it enabled."""
    api = await serve_local()
    listener = make_listener(api.daemon)
    await listener.start(EVENT_TYPE, "user.left", EVENT_TYPE, "--port=0", "--json", "--keep")
    await api.event()
    await api.event(event_type="user.left")
    arrivals = await listener.deliveries(2)
    assert {(it["event_type"], it["signature"]) for it in arrivals} == {
        (EVENT_TYPE, "verified"),
        ("user.left", "verified"),
    }
    listener.interrupt()
    assert await listener.ended() == 0
    [row] = await subscriptions(api)
    assert (row["active"], row["event_types"]) == (True, [EVENT_TYPE, "user.left"])


async def test_reload_keeps_local(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """The option --local stays in force although the reloaded file does not contain it."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json")
    assert await api.daemon.reload()
    await api.event()
    await listener.deliveries(1)


# Errors: one line each.


async def test_daemon_without_local_is_explained(
    make_daemon: MakeDaemon, make_listener: MakeListener
) -> None:
    """With the command to start it; no subscription is created."""
    daemon = await make_daemon(delivery=NOTHING_ALLOWED).start()
    listener = make_listener(daemon)
    listener.launch(EVENT_TYPE, "--port=0")
    assert await listener.ended() == 1
    assert "start it with `webhookd serve --local`" in refusal(listener)
    assert daemon.get_json("/v1/subscriptions")["items"] == []


async def test_daemon_with_another_certificate_is_explained(
    make_daemon: MakeDaemon, make_listener: MakeListener
) -> None:
    """It may connect to this machine but does not trust the receiver; the subscription is disabled again."""
    daemon = await make_daemon(delivery={"ca_file": ""}).start()
    listener = make_listener(daemon)
    listener.launch(EVENT_TYPE, "--port=0")
    assert await listener.ended() == 1
    assert "does not trust this machine's local certificate" in refusal(listener)
    [row] = daemon.get_json("/v1/subscriptions")["items"]
    assert (row["active"], row["verified"]) == (False, False)


async def test_stopped_daemon_is_reported_at_the_end(
    serve_local: ServeLocal, make_listener: MakeListener
) -> None:
    """With the subscription that could not be disabled."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0")
    api.daemon.stop()
    listener.interrupt()
    assert await listener.ended() == 69
    assert "subscription 1 could not be disabled" in refusal(listener)


async def test_missing_daemon_is_explained(make_listener: MakeListener) -> None:
    """With the same message as in every other command."""
    listener = make_listener()
    listener.launch(EVENT_TYPE, "--port=0")
    assert await listener.ended() == 69
    assert "no daemon at" in refusal(listener)


async def test_port_in_use_is_explained(make_listener: MakeListener) -> None:
    """With one hint: the option of `listen`, not the setting of the daemon's address."""
    first = await make_listener().start("--port=0")
    port = first.url.rstrip("/").rpartition(":")[2]
    second = make_listener()
    second.launch(f"--port={port}")
    assert await second.ended() == 1
    reason = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert refusal(second) == f"webhookd: {reason}; choose another port with --port"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--secret=whsec_abc"],
        ["--secret-file=nowhere"],
        ["--port=65536"],
        ["--status=99"],
        ["--delay=nan"],
        ["--fail=-1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_invalid_option_is_refused(arguments: list[str]) -> None:
    """Before it starts."""
    result = CliRunner().invoke(commands, ["listen", *arguments])
    assert result.exit_code == 2
    assert f"{arguments[0].partition('=')[0]}" in result.stderr.splitlines()[-1]


# Without event types: requests of any sender. These tests need no daemon.


async def test_signature_is_verified_with_a_given_secret(make_listener: MakeListener, tmp_path: Path) -> None:
    """Requests signed with another secret, or not at all, are refused with the reason."""
    secret, other = make_secret(), make_secret()
    (tmp_path / "secrets").write_text(f"{other}\n{secret}\n")
    listener = await make_listener().start("--port=0", "--json", f"--secret-file={tmp_path / 'secrets'}")
    assert listener.send(b"{}", secret)[0] == 200
    assert listener.send(b"{}", make_secret())[0] == 401
    assert listener.send(b"{}")[0] == 401
    verified, forged, unsigned = listener.lines()
    assert (verified["signature"], verified["problem"]) == ("verified", None)
    assert (forged["signature"], unsigned["signature"]) == ("refused", "refused")
    assert "no signature matches" in forged["problem"]
    assert "not signed" in unsigned["problem"]


async def test_challenge_is_answered(make_listener: MakeListener) -> None:
    """As JSON; a challenge without a valid signature is refused."""
    secret = make_secret()
    challenge = b'{"type":"webhookd.verification","challenge":"abc"}'
    listener = await make_listener(WEBHOOKD_SECRET=secret).start("--port=0", "--json", "--status=500")
    assert listener.send(challenge, secret) == (200, b'{"challenge":"abc"}')
    assert listener.send(challenge, make_secret()) == (401, b"")


async def test_duplicate_is_marked(make_listener: MakeListener) -> None:
    """A message that was accepted and comes again; the retry of a failed one is not a duplicate."""
    listener = await make_listener().start("--port=0", "--json", "--fail=1")
    assert [listener.send(b"{}")[0] for _ in range(3)] == [500, 200, 200]
    assert [line["duplicate"] for line in listener.lines()] == [False, False, True]
    assert [line["signature"] for line in listener.lines()] == ["not_checked"] * 3
    assert "Signatures are not verified" in listener.stderr()


HOSTILE = "\x1b]0;owned\x07\u202e\u2028\u009b31m"


async def test_control_characters_are_escaped(make_listener: MakeListener) -> None:
    """In JSON payloads, in other payloads and in headers."""
    listener = await make_listener().start("--port=0")
    for body in (b'{"a": "%s"}' % HOSTILE.replace("\x1b", "").replace("\x07", "").encode(), HOSTILE.encode()):
        assert listener.send(body, webhook_event_type="a\x1b[31m\x9bx")[0] in (200, 400)
        assert listener.send(body + b"\xff\xfe\x00", webhook_correlation_id="\xc2\x9b1m\xff")[0] == 200
    printed = listener.stdout()
    assert "correlation \\x9b1m?" in printed
    assert not set(printed) & (set(HOSTILE) - set("]0;owned31m") | {"\xad", "\x00"})


async def test_large_payload_is_shortened(make_listener: MakeListener) -> None:
    """The text form shows its size; deep nesting does not enlarge it."""
    listener = await make_listener().start("--port=0")
    assert listener.send(b"[%s1]" % (b"1," * 1000))[0] == 200
    assert listener.send(b'"%s"' % (b"x" * 1_000_000))[0] == 200
    assert listener.send(b"[" * 500 + b"1," * 100_000 + b"1" + b"]" * 500)[0] == 200
    assert "[" * 500 in listener.stdout()
    assert "2,003 bytes in total" in listener.stdout()
    assert "1,000,002 bytes in total" in listener.stdout()
    assert len(listener.stdout()) < 20_000


async def test_body_size_is_limited(make_listener: MakeListener) -> None:
    """A body larger than any payload is refused with 413."""
    listener = await make_listener().start("--port=0", "--json")
    assert listener.send(b"x" * (8 * 1024 * 1024 + 1))[0] == 413
    assert listener.send(b"{}")[0] == 200
