"""`webhookd listen` beside `webhookd serve --local`: the first delivery, and what a receiver here sees."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
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

# The daemon trusts and allows nothing but by --local.
NOTHING_ALLOWED = {"allow_networks": [], "ca_file": ""}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Give the folder that daemon and receivers share."""
    return tmp_path / "data"


@pytest.fixture
def serve_local(make_daemon: MakeDaemon, session: aiohttp.ClientSession, data_dir: Path) -> ServeLocal:
    """Give a way to start `webhookd serve --local`."""

    async def serve() -> Client:
        daemon = make_daemon(delivery=NOTHING_ALLOWED, retry=PATIENT, database={"data_dir": str(data_dir)})
        return Client(session, await daemon.start("--local"))

    return serve


@pytest.fixture
def make_listener(tmp_path: Path, data_dir: Path) -> Iterator[MakeListener]:
    """Give a way to make receivers; the end of the test stops them."""
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
    """Every subscription there is."""
    rows: list[dict[str, Any]] = (await api.get("/v1/subscriptions")).body["items"]
    return rows


def refusal(listener: ListenerProcess) -> str:
    """The one line that it ended with, beside where it listened."""
    lines = [line for line in listener.told().splitlines() if line.startswith("webhookd: ")]
    assert len(lines) == 1, listener.told()
    assert "Traceback" not in listener.told()
    return lines[0]


async def test_the_first_delivery(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """Three commands, and an event arrives, verified; Ctrl-C is an ordinary end, and nothing goes on."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json")
    assert f"webhookd publish {EVENT_TYPE}" in listener.told()
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


async def test_what_is_suggested_works(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """Nobody can publish what webhookd alone tells: of that, a job is what makes something arrive."""
    api = await serve_local()
    await api.patch("/v1/job-substrate", {"enabled": True})
    listener = await make_listener(api.daemon).start("dot.job.enqueued", "--port=0", "--json")
    assert "Now, elsewhere: webhookd jobs enqueue greet\n" in listener.told()
    assert "webhookd publish" not in listener.told()
    job = {"kind": "greet", "executor": "external_worker", "idempotency_key": "1"}
    assert (await api.post("/v1/jobs", job)).status == 201
    [arrival] = await listener.deliveries(1)
    assert (arrival["event_type"], arrival["payload"]["job_kind"]) == ("dot.job.enqueued", "greet")
    both = await make_listener(api.daemon).start("dot.job.enqueued", EVENT_TYPE, "--port=0")
    assert f"webhookd publish {EVENT_TYPE} " in both.told()


async def test_a_person_sees_each_arrival(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """Without --json: a line with what it is, and the payload below it, indented."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0")
    event = await api.event(payload={"order": 7}, correlation_id="c-1")
    printed = await listener.has_printed('"order": 7')
    [line] = [line for line in printed.splitlines() if "evt_" in line]
    assert line.split(" ", 1)[1] == (
        f"✓ signature {EVENT_TYPE}  evt_{event.body['id']}  attempt 1  correlation c-1  → 200"
    )
    assert '    {\n      "order": 7\n    }\n' in printed


async def test_a_second_start_takes_up_its_subscription(
    serve_local: ServeLocal, make_listener: MakeListener, flow: Flow
) -> None:
    """The same row with a new secret; what a pause held arrives, also after the first was killed."""
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
    # It is printed before it is answered.
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    second.stop()
    third = await make_listener(api.daemon).start(EVENT_TYPE, port, "--json")
    await api.event(payload={"number": 2})
    [arrival] = await third.deliveries(1)
    assert (arrival["payload"], arrival["signature"]) == ({"number": 2}, "verified")
    assert len(await subscriptions(api)) == 1


async def test_another_subscription_of_the_same_url_is_left_alone(
    serve_local: ServeLocal, make_listener: MakeListener
) -> None:
    """One that a person made has a secret that others know: it is not rotated."""
    api = await serve_local()
    port = free_port()
    url = f"https://127.0.0.1:{port}/"
    made = await api.post("/v1/subscriptions", {"event_type": EVENT_TYPE, "callback_url": url})
    assert made.status == 201
    await make_listener(api.daemon).start(EVENT_TYPE, f"--port={port}")
    assert len(await subscriptions(api)) == 2
    unchanged = (await api.get(f"/v1/subscriptions/{made.body['id']}")).body
    assert unchanged["updated_at"] == made.body["updated_at"]


async def test_failures_to_see_retries(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """The first two attempts are refused, the third is taken: the daemon's delivery has the same three."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json", "--fail=2")
    # Soon, and not after the second that a person is given to see it.
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


async def test_several_event_types(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """A subscription for each, each with its secret; one named twice is one. --keep leaves them active."""
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
    assert [row["active"] for row in await subscriptions(api)] == [True, True]


async def test_a_reload_keeps_local(serve_local: ServeLocal, make_listener: MakeListener) -> None:
    """It came by an option, which is not in the file that is read again."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0", "--json")
    assert await api.daemon.reload()
    await api.event()
    await listener.deliveries(1)


# What goes wrong, in one line.


async def test_a_daemon_that_is_not_local_is_explained(
    make_daemon: MakeDaemon, make_listener: MakeListener
) -> None:
    """With the command to start it by; and no subscription is left behind."""
    daemon = await make_daemon(delivery=NOTHING_ALLOWED).start()
    listener = make_listener(daemon)
    listener.launch(EVENT_TYPE, "--port=0")
    assert await listener.ended() == 1
    assert "start it with `webhookd serve --local`" in refusal(listener)
    assert daemon.get_json("/v1/subscriptions")["items"] == []


async def test_a_daemon_of_another_authority_is_explained(
    make_daemon: MakeDaemon, make_listener: MakeListener
) -> None:
    """It may dial this machine, and does not trust the receiver: its subscription is paused again."""
    daemon = await make_daemon(delivery={"ca_file": ""}).start()
    listener = make_listener(daemon)
    listener.launch(EVENT_TYPE, "--port=0")
    assert await listener.ended() == 1
    assert "does not trust this machine's authority" in refusal(listener)
    [row] = daemon.get_json("/v1/subscriptions")["items"]
    assert (row["active"], row["verified"]) == (False, False)


async def test_a_daemon_that_went_away_leaves_a_line(
    serve_local: ServeLocal, make_listener: MakeListener
) -> None:
    """What could not be paused is named at the end."""
    api = await serve_local()
    listener = await make_listener(api.daemon).start(EVENT_TYPE, "--port=0")
    api.daemon.stop()
    listener.interrupt()
    assert await listener.ended() == 69
    assert "subscription 1 could not be paused" in refusal(listener)


async def test_no_daemon_is_explained(make_listener: MakeListener) -> None:
    """As for every command."""
    listener = make_listener()
    listener.launch(EVENT_TYPE, "--port=0")
    assert await listener.ended() == 69
    assert "no daemon at" in refusal(listener)


async def test_a_port_that_is_taken_is_explained(make_listener: MakeListener) -> None:
    """With the option that chooses another."""
    first = await make_listener().start("--port=0")
    second = make_listener()
    second.launch(f"--port={first.url.rstrip('/').rpartition(':')[2]}")
    assert await second.ended() == 1
    assert "--port chooses another one" in refusal(second)


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
def test_a_bad_option_is_refused(arguments: list[str]) -> None:
    """Before anything is done."""
    told = CliRunner().invoke(commands, ["listen", *arguments])
    assert told.exit_code == 2
    assert f"{arguments[0].partition('=')[0]}" in told.stderr.splitlines()[-1]


# By itself, without event types: any sender's requests. These need no daemon.


async def test_a_signature_is_verified_by_a_given_secret(make_listener: MakeListener, tmp_path: Path) -> None:
    """By those of the file; what another secret signed, or nobody did, is refused with the reason."""
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


async def test_a_challenge_is_answered(make_listener: MakeListener) -> None:
    """With the challenge as JSON; but not for somebody who cannot sign."""
    secret = make_secret()
    challenge = b'{"type":"webhookd.verification","challenge":"abc"}'
    listener = await make_listener(WEBHOOKD_SECRET=secret).start("--port=0", "--json", "--status=500")
    assert listener.send(challenge, secret) == (200, b'{"challenge":"abc"}')
    assert listener.send(challenge, make_secret()) == (401, b"")


async def test_a_duplicate_is_marked(make_listener: MakeListener) -> None:
    """One that was taken and comes again; a retry of one that was refused is none."""
    listener = await make_listener().start("--port=0", "--json", "--fail=1")
    assert [listener.send(b"{}")[0] for _ in range(3)] == [500, 200, 200]
    assert [line["duplicate"] for line in listener.lines()] == [False, False, True]
    assert [line["signature"] for line in listener.lines()] == ["not_checked"] * 3
    assert "Nothing is verified" in listener.told()


HOSTILE = "\x1b]0;owned\x07\u202e\u2028\u009b31m"


async def test_hostile_bytes_cannot_steer_a_terminal(make_listener: MakeListener) -> None:
    """Of a payload that is JSON, of one that is none, and of a header."""
    listener = await make_listener().start("--port=0")
    for body in (b'{"a": "%s"}' % HOSTILE.replace("\x1b", "").replace("\x07", "").encode(), HOSTILE.encode()):
        assert listener.send(body, webhook_event_type="a\x1b[31m\x9bx")[0] in (200, 400)
        assert listener.send(body + b"\xff\xfe\x00", webhook_correlation_id="\xc2\x9b1m\xff")[0] == 200
    printed = listener.printed()
    assert "correlation \\x9b1m?" in printed
    assert not set(printed) & (set(HOSTILE) - set("]0;owned31m") | {"\xad", "\x00"})


async def test_a_large_payload_is_cut(make_listener: MakeListener) -> None:
    """For a person; how large it was is said. Deep nesting does not make it larger than it was."""
    listener = await make_listener().start("--port=0")
    assert listener.send(b"[%s1]" % (b"1," * 1000))[0] == 200
    assert listener.send(b'"%s"' % (b"x" * 1_000_000))[0] == 200
    assert listener.send(b"[" * 500 + b"1," * 100_000 + b"1" + b"]" * 500)[0] == 200
    assert "[" * 500 in listener.printed()
    assert "2,003 bytes in all" in listener.printed()
    assert "1,000,002 bytes in all" in listener.printed()
    assert len(listener.printed()) < 20_000


async def test_a_body_has_a_bound(make_listener: MakeListener) -> None:
    """No more than the largest payload there can be is read."""
    listener = await make_listener().start("--port=0", "--json")
    assert listener.send(b"x" * (8 * 1024 * 1024 + 1))[0] == 413
    assert listener.send(b"{}")[0] == 200
