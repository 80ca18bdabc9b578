"""`webhookd publish`: the bytes that were given, once; one event, or a file of them."""

import asyncio
import json
import os

from tests.flow.conftest import MakeApi
from tests.support.flow import Flow
from tests.support.shell import Shell

PAYLOAD = '{ "n":1.0,  "big": 1e400, "name" : "é\\u0000" }'


async def payload_of(flow: Flow, event_id: int) -> str:
    """As the database has it."""
    found: str = await flow.daemon.fetchval("select payload from webhookd.events where id = $1", event_id)
    return found


async def test_a_payload_arrives_byte_for_byte(cli: Shell, flow: Flow) -> None:
    """As an argument, from a file, from stdin and from a shell's <(…): nothing of it changes."""
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


async def test_a_key_makes_it_one_event(cli: Shell, flow: Flow) -> None:
    """Again with the same key: the same id, and `duplicate`; with other content: refused, exit 1."""
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


async def test_what_cannot_be_a_payload_is_a_usage_error(lonely: Shell) -> None:
    """Missing, a directory, without end, not JSON, or two values: exit 2 in one line, and nobody is asked."""
    for payload, told in (
        ("@missing", "No such file"),
        ("@.", "Is a directory"),
        ("@/dev/zero", "is larger than"),
        ("{", "not JSON"),
        ('1, "idempotency_key": "mine"', "not JSON"),
    ):
        ran = await lonely.run("publish", "order.created", payload)
        assert (ran.exit_code, ran.out) == (2, ""), ran
        assert told in ran.error
    assert (await lonely.run("publish", "order.created")).exit_code == 2
    assert (await lonely.run("publish", "--batch", "missing")).exit_code == 2


async def test_a_file_of_events_goes_in_requests_that_the_daemon_takes(
    make_api: MakeApi, flow: Flow, lonely: Shell
) -> None:
    """More than a request holds, and than its body may be: all are there once, in order."""
    api = await make_api(api={"max_payload_bytes": 20_000})
    cli = lonely.having(WEBHOOKD_URL=f"http://127.0.0.1:{api.daemon.port}")
    events = [{"event_type": "a", "payload": {"n": n}, "idempotency_key": f"k{n}"} for n in range(1200)]
    lines = [json.dumps(event) for event in events]
    (cli.folder / "events.jsonl").write_text("\n\n".join(lines))
    told = (await cli.done("publish", "--batch", "events.jsonl", "--json")).documents
    assert [event["duplicate"] for event in told] == [False] * 1200
    numbers = await flow.daemon.fetch("select (payload::json->>'n')::int from webhookd.events order by id")
    assert [number for (number,) in numbers] == list(range(1200))
    again = await cli.done("publish", "--batch", "-", given="\n".join(lines).encode())
    assert again.out == "published 1200 events, 1200 of them duplicates, to line 1200\n"

    broken = await cli.run("publish", "--batch", "-", given="\n".join([*lines, "{"]).encode())
    assert (broken.exit_code, "line 1201 is not JSON" in broken.error) == (1, True)
    assert broken.out.startswith("published 1000 events")
    refused = await cli.run("publish", "--batch", "-", given=b'{"event_type": "a b", "payload": 1}')
    assert (refused.exit_code, refused.out) == (1, "published nothing\n")
    assert "lines 1 to 1: " in refused.error


async def test_an_interrupted_file_says_how_far_it_came(cli: Shell) -> None:
    """Ctrl-C while it waits for more lines: exit 130, and the summary."""
    with cli.on_terminal("publish", "--batch", "-") as terminal:
        await terminal.shows("events")
        terminal.interrupt()
        assert await asyncio.wait_for(terminal.ended(), 30) == 130
        assert "published nothing" in terminal.written
