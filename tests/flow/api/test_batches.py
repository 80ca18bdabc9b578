"""/v1/events/batch, and single events that share a commit."""

import asyncio
import json

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.database import Database
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

# Longer than a group waits for a lock, so this event waits alone.
WAITS_ALONE = """
    select exists (select from pg_stat_activity where application_name = 'webhookd'
        and wait_event_type = 'Lock' and clock_timestamp() - query_start > interval '300 ms')
"""


async def test_batch_stores_all_events_or_none(api: Client, flow: Flow) -> None:
    """Ids are in order and a repeated key is a duplicate; with one bad event nothing is stored."""
    event = {"event_type": EVENT_TYPE, "payload": 1, "idempotency_key": "k"}
    answer = await api.post(
        "/v1/events/batch", {"events": [event, event, {"event_type": "b", "payload": None}]}
    )
    assert answer.status == 202
    ids = [event["id"] for event in answer.body["events"]]
    assert [event["duplicate"] for event in answer.body["events"]] == [False, True, False]
    assert ids[0] == ids[1] != ids[2]

    new = {"event_type": EVENT_TYPE, "payload": 1}
    for events, expected in (
        ([new, event | {"payload": 2}], (409, "idempotency_conflict")),
        ([new, new | {"event_type": "a..b"}], (422, "invalid_request")),
        ([new, new | {"event_type": "dot.job.x"}], (422, "invalid_request")),
        ([new, new | {"more": 1}], (422, "unknown_field")),
        ([], (422, "invalid_request")),
    ):
        assert (await api.post("/v1/events/batch", {"events": events})).problem == expected
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 2


async def test_nesting_limit_applies_to_each_event_of_a_batch(api: Client, flow: Flow) -> None:
    """The total number of brackets in a batch does not count."""

    def nested(depth: int) -> bytes:
        return b'{"event_type": "a", "payload": %s}' % (b"[" * depth + b"]" * depth)

    for deep in (nested(501), nested(2000), b'{"event_type": "a", "payload": %s' % (b"[" * 2000)):
        body = b'{"events": [%s, %s]}' % (nested(1), deep)
        answer = await api.send(body, "/v1/events/batch")
        assert answer.problem == (400, "too_deep")
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 0
    body = b'{"events": [%s]}' % b", ".join([nested(500)] * 2)
    assert (await api.send(body, "/v1/events/batch")).status == 202


async def test_batch_has_at_most_1000_events(make_api: MakeApi) -> None:
    """1,000 events are accepted, 1,001 are rejected."""
    api = await make_api()
    events = [{"event_type": "a", "payload": number} for number in range(1001)]
    assert (await api.post("/v1/events/batch", {"events": events})).problem == (422, "batch_too_large")
    answer = await api.post("/v1/events/batch", {"events": events[:1000]})
    assert len({event["id"] for event in answer.body["events"]}) == 1000


async def test_concurrent_events_share_commits(api: Client, flow: Flow) -> None:
    """100 concurrent events are stored once each, in fewer commits, with bad requests among them."""
    good = [api.event(payload={"n": number}) for number in range(100)]
    bad = [api.event(event_type="a..b"), api.event(idempotency_key="k"), api.event(idempotency_key="k")]
    answers = await asyncio.gather(*good, *bad)
    assert [answer.status for answer in answers] == [202] * 100 + [422, 202, 202]
    ids = [answer.body["id"] for answer in answers[:100]]
    assert len(set(ids)) == 100
    rows = await flow.daemon.fetch("select id, payload, xmin::text from webhookd.events order by id")
    numbers = {row["id"]: json.loads(row["payload"]).get("n") for row in rows}
    assert [numbers[event_id] for event_id in ids] == list(range(100))
    assert len(rows) == 101
    assert len({row["xmin"] for row in rows}) < len(rows)


async def test_conflict_affects_no_other_event_of_the_group(api: Client, flow: Flow) -> None:
    """If the database refuses a group, each of its events gets its own response."""
    await api.event(idempotency_key="taken", payload=1)
    requests = [api.event(idempotency_key="taken", payload=2), *(api.event(payload=n) for n in range(50))]
    answers = await asyncio.gather(*requests)
    assert answers[0].problem == (409, "idempotency_conflict")
    assert {answer.status for answer in answers[1:]} == {202}
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 51


async def test_key_locked_by_a_transaction_delays_no_other_event(
    api: Client, flow: Flow, database: Database
) -> None:
    """The event with the locked key gets 503 in time; the others of its group are stored."""
    application = await database.connect("application")
    transaction = application.transaction()
    await transaction.start()
    await application.fetchval("select webhookd.publish('a', '1', 'held')")
    stored = 0
    waits = False
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        # The event waits for a second. If the others took as long, nothing was shown: try again.
        while not waits:
            # The first is stored alone; those that arrive meanwhile form a group.
            others = [asyncio.create_task(api.event()) for _ in range(10)]
            held = asyncio.create_task(api.event(event_type="a", payload=1, idempotency_key="held"))
            others += [asyncio.create_task(api.event()) for _ in range(10)]
            assert {answer.status for answer in await asyncio.gather(*others)} == {202}
            stored += len(others)
            waits = not held.done()
            assert (await held).problem == (503, "unavailable")
    await transaction.commit()
    again = await api.event(event_type="a", payload=1, idempotency_key="held")
    assert (again.status, again.body["duplicate"]) == (202, True)
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == stored + 1


async def test_event_waits_for_a_locked_key(api: Client, database: Database) -> None:
    """When the other transaction rolls back, the waiting event is stored as the first."""
    application = await database.connect("application")
    observer = await database.connect("superuser")
    freed = False
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        # The event waits for a second. If the lock was released later, try again.
        while not freed:
            seen = False
            transaction = application.transaction()
            await transaction.start()
            await application.fetchval("select webhookd.publish('a', '1', 'held')")
            held = asyncio.create_task(api.event(event_type="a", payload=1, idempotency_key="held"))
            while not (seen or held.done()):
                await asyncio.wait({held}, timeout=POLL_INTERVAL_SECONDS)
                seen = await observer.fetchval(WAITS_ALONE)
            await transaction.rollback()
            answer = await held
            freed = seen and answer.status != 503
            assert freed or answer.problem == (503, "unavailable")
    assert (answer.status, answer.body["duplicate"]) == (202, False)
