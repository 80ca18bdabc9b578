"""`webhookd deliveries`: lists several pages, explains a delivery, and escapes what endpoints send."""

from tests.support.api import Client
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.shell import Shell
from tests.support.waiting import until

ENDED = """
    select count(*) = $1 from webhookd.webhook_delivery_sagas where status in ('Completed', 'DeadLettered')
"""
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\x00 é".encode()


async def test_delivery_is_explained(api: Client, cli: Shell, endpoint: Endpoint, flow: Flow) -> None:
    """Each attempt is shown with its escaped response, an event with every subscription to its type."""
    await api.subscribe(endpoint, max_attempts=2)
    await flow.subscribe(verified=False)
    endpoint.answer(500, HOSTILE)
    event_id = (await api.event(payload={"n": 1})).body["id"]
    await until(flow.daemon, ENDED, 1)

    with cli.on_terminal("deliveries", "show", "1") as terminal:
        assert await terminal.ended() == 0
    assert "DeadLettered" in terminal.written
    # The table wraps a long response, at a place that depends on the width of the durations.
    shown = "".join(terminal.written.split())
    assert shown.count(r"\x1b]0;owned\x07\x1b[2J") == 2
    assert r"\u202eevil\x00é" in shown
    for character in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x00", "\x9b"):
        assert character not in terminal.written

    plain = await cli.done("deliveries", "show", "1")
    assert [row[4] for row in plain.rows if row[:1] in (["1"], ["2"])] == ["HTTP_500"] * 2
    [document] = (await cli.done("deliveries", "show", "1", "--json")).documents
    assert [attempt["error_code"] for attempt in document["attempts"]] == ["HTTP_500", "HTTP_500"]

    shown = (await cli.done("deliveries", "show", "--event", f"evt_{event_id}")).out
    assert "subscription 1  DeadLettered" in shown
    assert "subscription 2  not_routed" in shown
    assert "not verified when the event was routed" in shown
    assert '{"n": 1}' in shown


async def test_moved_delivery_shows_both_addresses(
    api: Client, cli: Shell, endpoint: Endpoint, flow: Flow
) -> None:
    """One address is a field; several are a column of the attempts."""
    subscription_id = (await api.subscribe(endpoint, max_attempts=1000))["id"]
    # The old address fails until the end, so that the delivery cannot finish before the move.
    endpoint.answer(500, path="/hook")
    await api.event()
    await until(flow.daemon, "select max(attempt_count) >= $1 from webhookd.webhook_delivery_sagas", 1)
    old, new = endpoint.url("/hook"), endpoint.url("/moved")
    assert ["to", old] in (await cli.done("deliveries", "show", "1")).rows
    await api.patch(f"/v1/subscriptions/{subscription_id}", {"callback_url": new})
    assert (await api.post(f"/v1/subscriptions/{subscription_id}/verify")).status == 200
    await until(flow.daemon, ENDED, 1)
    rows = (await cli.done("deliveries", "show", "1")).rows
    assert "to" in next(row for row in rows if row[:1] == ["#"])
    assert [old in row for row in rows if row[:1] == ["1"]] == [True]
    assert new in rows[-1]
    [delivery] = (await api.get("/v1/events/1")).body["deliveries"]
    assert delivery["callback_url"] == new


async def test_deliveries_are_listed_up_to_the_limit(
    api: Client, cli: Shell, endpoint: Endpoint, flow: Flow
) -> None:
    """With filters, a limit, or all pages; a reader that closes the pipe ends it without a message."""
    await api.subscribe(endpoint)
    endpoint.answer(200)
    events = [{"event_type": "order.created", "payload": n} for n in range(600)]
    assert (await api.post("/v1/events/batch", {"events": events})).status == 202
    await until(flow.daemon, ENDED, 600)
    everything = (await cli.done("deliveries", "list", "--all")).rows
    assert everything[0][:2] == ["id", "event"]
    assert [row[0] for row in everything[1:]] == [str(number) for number in range(600, 0, -1)]
    assert {row[3] for row in everything[1:]} == {"Completed"}
    assert len((await cli.done("deliveries", "list")).rows) == 51
    some = await cli.done("deliveries", "list", "--limit", "501", "--status", "Completed", "--json")
    assert [row["id"] for row in some.documents] == list(range(600, 99, -1))
    assert (await cli.done("deliveries", "list", "--subscription", "2", "--json")).out == ""
    [row] = (await cli.done("deliveries", "list", "--event", "7", "--json")).documents
    assert row["event_id"] == 7

    with cli.start("deliveries", "list", "--all", "--json") as reading:
        assert reading.stdout is not None
        assert reading.stderr is not None
        reading.stdout.readline()
        reading.stdout.close()
        assert reading.stderr.read() == b""
    assert reading.returncode == 1


async def test_completed_delivery_shows_no_error(
    api: Client, cli: Shell, endpoint: Endpoint, flow: Flow
) -> None:
    """The failed attempt keeps its error and the explanation names it; the delivery itself has none."""
    await api.subscribe(endpoint, base_delay_seconds=1)
    endpoint.answer(500)
    event_id = (await api.event()).body["id"]
    await until(flow.daemon, "select max(attempt_count) = $1 from webhookd.webhook_delivery_sagas", 1)
    endpoint.answer(200)
    await until(flow.daemon, ENDED, 1)
    [row] = (await cli.done("deliveries", "list")).rows[1:]
    assert (row[3], row[-1]) == ("Completed", "-")
    shown = (await cli.done("deliveries", "show", "1")).out
    facts, _, attempts = shown.partition("Attempts")
    assert "HTTP_500" in attempts
    event = (await cli.done("deliveries", "show", "--event", str(event_id))).out
    assert not any(line.startswith("error") for line in (facts + event).splitlines())
