"""`webhookd dead-letters`: show, and requeue by id or by filter; a filter without --yes only counts."""

import asyncio
import signal
from typing import Self

from aiohttp import web

from tests.support.api import Client
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.shell import Shell
from tests.support.waiting import until, until_true

DEAD_LETTERS = "select count(*) = $1 from webhookd.dead_letters"
REQUEUED = "select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null"


class HangsAtTheSecondBatch:
    """A proxy before a daemon that never answers the second batch of a requeue."""

    def __init__(self, api: Client) -> None:
        self._api = api
        self.batches = 0

    async def __aenter__(self) -> Self:
        application = web.Application()
        application.add_routes([web.post("/v1/dead-letters/requeue", self._requeue)])
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _requeue(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.batches += not body["dry_run"]
        if self.batches == 2:
            await asyncio.Event().wait()
        answer = await self._api.post(request.path, body)
        return web.json_response(answer.body, status=answer.status)


async def make_dead_letters(api: Client, flow: Flow, endpoint: Endpoint, count: int) -> None:
    """Let this many deliveries fail permanently."""
    await api.subscribe(endpoint, max_attempts=1)
    endpoint.answer(500)
    events = [{"event_type": "order.created", "payload": n} for n in range(count)]
    for start in range(0, count, 1000):
        assert (await api.post("/v1/events/batch", {"events": events[start : start + 1000]})).status == 202
    await until(flow.daemon, DEAD_LETTERS, count)


async def test_requeue_by_id(api: Client, cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """A second requeue prints the first one's delivery; an unknown id is exit 1, the others are requeued."""
    await make_dead_letters(api, flow, endpoint, 3)
    shown = (await cli.done("dead-letters", "show", "1")).out
    assert "HTTP_500" in shown
    assert ["requeued", "no"] in [line.split() for line in shown.splitlines()]
    endpoint.answer(200)
    ran = await cli.run("dead-letters", "requeue", "1", "99", "2")
    assert ran.exit_code == 1
    assert [line.rpartition(" ")[0] for line in ran.out.splitlines()] == [
        "dead letter 1: requeued as delivery",
        "dead letter 99: rejected: dead letter 99 does not exist",
        "dead letter 2: requeued as delivery",
    ]
    again = await cli.done("dead-letters", "requeue", "2", "3", "--json")
    assert [row.get("code") for row in again.documents] == ["already_requeued", None]
    listed = (await cli.done("dead-letters", "list", "--json")).documents
    assert [row["id"] for row in listed] == [3, 2, 1]
    assert all(row["requeued_saga_id"] for row in listed)
    assert (await cli.done("dead-letters", "list", "--failed-after", "0s")).out == ""


async def test_requeue_by_filter(api: Client, cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """The dry run prints the command to use, exit 1; interrupted, exit 130; repeated, it is completed."""
    await make_dead_letters(api, flow, endpoint, 1100)
    dry = await cli.run("dead-letters", "requeue", "--error-code", "HTTP_500", "--failed-after", "2h")
    assert (dry.exit_code, dry.out) == (1, "1100 match, 1100 would be requeued, 0 skipped\n")
    command = dry.err.strip().partition("To requeue them: webhookd ")[2].split()
    assert command[-1] == "--yes"
    assert await flow.daemon.fetchval(REQUEUED) == 0
    none = await cli.done("dead-letters", "requeue", "--error-code", "x'; --", "--yes", "--json")
    assert none.documents == [
        {"matched": 0, "requeued": 0, "skipped": 0, "payload_removed": 0, "dry_run": False}
    ]

    endpoint.answer(200)
    async with HangsAtTheSecondBatch(api) as before:
        with cli.having(WEBHOOKD_URL=before.url).start(*command) as interrupted:
            await until_true(lambda: before.batches == 2)
            interrupted.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(interrupted.communicate)
    assert (interrupted.returncode, err.strip()) == (130, b"")
    assert out == b"1000 match, 1000 requeued, 0 skipped\n"
    assert await flow.daemon.fetchval(REQUEUED) == 1000

    with cli.on_terminal(*command) as terminal:
        assert await terminal.ended() == 0
    assert "requeue" in terminal.written
    assert "1100/1100" in terminal.written
    assert await flow.daemon.fetchval(REQUEUED) == 1100
    done = await cli.done("dead-letters", "requeue", "--all")
    assert "1100 match, 0 would be requeued, 1100 skipped" in done.out
