"""Events stored together: /v1/events/batch, and single posts that share a commit."""

import asyncio
import json

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.database import Database
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

# For longer than a group waits: so it waits alone.
WAITS_ALONE = """
    select exists (select from pg_stat_activity where application_name = 'webhookd'
        and wait_event_type = 'Lock' and clock_timestamp() - query_start > interval '300 ms')
"""


async def test_a_batch_is_all_or_nothing(api: Client, flow: Flow) -> None:
    """Ids in order, a key twice is a duplicate; one bad event and nothing is stored."""
    one = {"event_type": EVENT_TYPE, "payload": 1, "idempotency_key": "k"}
    answer = await api.post("/v1/events/batch", {"events": [one, one, {"event_type": "b", "payload": None}]})
    assert answer.status == 202
    ids = [event["id"] for event in answer.body["events"]]
    assert [event["duplicate"] for event in answer.body["events"]] == [False, True, False]
    assert ids[0] == ids[1] != ids[2]

    new = {"event_type": EVENT_TYPE, "payload": 1}
    for events, told in (
        ([new, one | {"payload": 2}], (409, "idempotency_conflict")),
        ([new, new | {"event_type": "a..b"}], (422, "invalid_request")),
        ([new, new | {"event_type": "dot.job.x"}], (422, "invalid_request")),
        ([new, new | {"more": 1}], (422, "unknown_field")),
        ([], (422, "invalid_request")),
    ):
        assert (await api.post("/v1/events/batch", {"events": events})).told == told
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 2


async def test_each_event_of_a_batch_may_be_as_deep_as_one_alone(api: Client, flow: Flow) -> None:
    """How many brackets all of them have together says nothing."""

    def nested(depth: int) -> bytes:
        return b'{"event_type": "a", "payload": %s}' % (b"[" * depth + b"]" * depth)

    for deep in (nested(501), nested(2000), b'{"event_type": "a", "payload": %s' % (b"[" * 2000)):
        body = b'{"events": [%s, %s]}' % (nested(1), deep)
        answer = await api.send(body, "/v1/events/batch")
        assert answer.told == (400, "too_deep")
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 0
    body = b'{"events": [%s]}' % b", ".join([nested(500)] * 2)
    assert (await api.send(body, "/v1/events/batch")).status == 202


async def test_a_batch_has_a_thousand_events_at_most(make_api: MakeApi) -> None:
    """1,000 are taken, 1,001 are not."""
    api = await make_api()
    events = [{"event_type": "a", "payload": number} for number in range(1001)]
    assert (await api.post("/v1/events/batch", {"events": events})).told == (422, "batch_too_large")
    answer = await api.post("/v1/events/batch", {"events": events[:1000]})
    assert len({event["id"] for event in answer.body["events"]}) == 1000


async def test_concurrent_posts_share_commits(api: Client, flow: Flow) -> None:
    """100 posts at once: each is stored once, in fewer commits than posts, with bad ones among them."""
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


async def test_one_members_conflict_spoils_no_other(api: Client, flow: Flow) -> None:
    """In a group that the database refuses, each is answered for itself."""
    await api.event(idempotency_key="taken", payload=1)
    asked = [api.event(idempotency_key="taken", payload=2), *(api.event(payload=n) for n in range(50))]
    answers = await asyncio.gather(*asked)
    assert answers[0].told == (409, "idempotency_conflict")
    assert {answer.status for answer in answers[1:]} == {202}
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 51


async def test_a_key_of_an_open_transaction_holds_up_nobody_else(
    api: Client, flow: Flow, database: Database
) -> None:
    """Its own post waits, then is told 503 in time; the others of its group are stored meanwhile."""
    application = await database.connect("application")
    transaction = application.transaction()
    await transaction.start()
    await application.fetchval("select webhookd.publish('a', '1', 'held')")
    stored = 0
    waits = False
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        # It waits for a second: who took as long to ask for the others has seen nothing, and asks again.
        while not waits:
            # The first goes alone; those that come while it is stored are a group.
            others = [asyncio.create_task(api.event()) for _ in range(10)]
            held = asyncio.create_task(api.event(event_type="a", payload=1, idempotency_key="held"))
            others += [asyncio.create_task(api.event()) for _ in range(10)]
            assert {answer.status for answer in await asyncio.gather(*others)} == {202}
            stored += len(others)
            waits = not held.done()
            assert (await held).told == (503, "unavailable")
    await transaction.commit()
    again = await api.event(event_type="a", payload=1, idempotency_key="held")
    assert (again.status, again.body["duplicate"]) == (202, True)
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == stored + 1


async def test_a_key_that_is_freed_in_time_is_waited_for(api: Client, database: Database) -> None:
    """The application's transaction rolls back: the post that waited for it is the first."""
    application = await database.connect("application")
    observer = await database.connect("superuser")
    freed = False
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        # It waits for a second: who looked or freed it later was too late, and tries again.
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
            assert freed or answer.told == (503, "unavailable")
    assert (answer.status, answer.body["duplicate"]) == (202, False)
