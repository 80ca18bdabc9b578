"""`webhookd publish`: one event, or a file of events, byte for byte and without duplicates."""

import asyncio
import json
import os

from tests.flow.conftest import MakeApi
from tests.support.flow import Flow
from tests.support.shell import Shell

PAYLOAD = '{ "n":1.0,  "big": 1e400, "name" : "é\\u0000" }'


async def payload_of(flow: Flow, event_id: int) -> str:
    """The payload as the database stores it."""
    found: str = await flow.daemon.fetchval("select payload from webhookd.events where id = $1", event_id)
    return found


async def test_payload_is_stored_byte_for_byte(cli: Shell, flow: Flow) -> None:
    """From an argument, a file, stdin and a FIFO like a shell's <(…)."""
    (cli.folder / "payload.json").write_text(f"{PAYLOAD}\n", "utf-8")
    ids = [
        int((await cli.done("publish", "order.created", PAYLOAD)).out),
        int((await cli.done("publish", "order.created", "@payload.json")).out),
        int((await cli.done("publish", "order.created", "-", given=PAYLOAD.encode())).out),
    ]
    os.mkfifo(cli.folder / "fifo")
    ran, _ = await asyncio.gather(
        cli.done("publish", "order.created", "@fifo", "--json"),
        asyncio.to_thread((cli.folder / "fifo").write_text, PAYLOAD, "utf-8"),
    )
    [shown] = ran.documents
    assert (shown["event_type"], shown["duplicate"]) == ("order.created", False)
    assert [await payload_of(flow, event_id) for event_id in [*ids, shown["id"]]] == [PAYLOAD] * 4


async def test_idempotency_key_prevents_a_second_event(cli: Shell, flow: Flow) -> None:
    """The same content prints the same id and `duplicate`; other content is rejected with exit 1."""
    words = (
        "publish",
        "order.created",
        '{"n": 1}',
        "--idempotency-key",
        "-; drop",
        "--correlation-id",
        "c 1",
    )
    first = (await cli.done(*words)).out.strip()
    assert (await cli.done(*words)).out.split() == [first, "duplicate"]
    row = await flow.daemon.fetchrow("select idempotency_key, correlation_id from webhookd.events")
    assert row is not None
    assert tuple(row) == ("-; drop", "c 1")
    refused = await cli.run("publish", "order.created", "2", "--key", "-; drop")
    assert (refused.exit_code, refused.out) == (1, "")
    assert "(idempotency_conflict)" in refused.error


async def test_invalid_payload_is_a_usage_error(lonely: Shell) -> None:
    """A missing file, a directory, an endless device, not JSON, two values: exit 2 without a request."""
    for payload, message in (
        ("@missing", "No such file"),
        ("@.", "Is a directory"),
        ("@/dev/zero", "is larger than"),
        ("{", "not JSON"),
        ('1, "idempotency_key": "mine"', "not JSON"),
    ):
        ran = await lonely.run("publish", "order.created", payload)
        assert (ran.exit_code, ran.out) == (2, ""), ran
        assert message in ran.error
    assert (await lonely.run("publish", "order.created")).exit_code == 2
    assert (await lonely.run("publish", "--batch", "missing")).exit_code == 2


async def test_file_is_split_into_requests_that_the_daemon_accepts(
    make_api: MakeApi, flow: Flow, lonely: Shell
) -> None:
    """More events and bytes than a request may have: all are published once, in order."""
    api = await make_api(api={"max_payload_bytes": 20_000})
    cli = lonely.having(WEBHOOKD_URL=f"http://127.0.0.1:{api.daemon.port}")
    events = [{"event_type": "a", "payload": {"n": n}, "idempotency_key": f"k{n}"} for n in range(1200)]
    lines = [json.dumps(event) for event in events]
    (cli.folder / "events.jsonl").write_text("\n\n".join(lines))
    published = (await cli.done("publish", "--batch", "events.jsonl", "--json")).documents
    assert [event["duplicate"] for event in published] == [False] * 1200
    numbers = await flow.daemon.fetch("select (payload::json->>'n')::int from webhookd.events order by id")
    assert [number for (number,) in numbers] == list(range(1200))
    again = await cli.done("publish", "--batch", "-", given="\n".join(lines).encode())
    assert again.out == "published 1200 events, 1200 of them duplicates, up to line 1200\n"

    broken = await cli.run("publish", "--batch", "-", given="\n".join([*lines, "{"]).encode())
    assert (broken.exit_code, "line 1201 is not JSON" in broken.error) == (1, True)
    assert broken.out.startswith("published 1000 events")
    refused = await cli.run("publish", "--batch", "-", given=b'{"event_type": "a b", "payload": 1}')
    assert (refused.exit_code, refused.out) == (1, "published nothing\n")
    assert "lines 1 to 1: " in refused.error


async def test_interrupted_batch_prints_its_summary(cli: Shell) -> None:
    """Ctrl-C while it reads stdin: exit 130 and the summary."""
    with cli.on_terminal("publish", "--batch", "-") as terminal:
        await terminal.shows("events")
        terminal.interrupt()
        assert await asyncio.wait_for(terminal.ended(), 30) == 130
        assert "published nothing" in terminal.written
