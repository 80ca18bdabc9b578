"""The queries of the invariants: each finds its violation and accepts what only looks like one."""

from datetime import timedelta

import pytest

from tests.support.flow import ADDRESS, Flow
from tests.support.invariants import AUDIT, INVARIANTS, RETENTION, broken_invariants, broken_rows
from tests.support.publisher import Publisher
from tests.support.traffic import record
from webhookd.core.states import SagaStatus
from webhookd.deliveries import sagas, subscriptions

RECEIPT = """
    insert into public.receipts (saga_id, response_status, received_at, body, verifies)
    select id, 200, $1, '{}', true from webhookd.webhook_delivery_sagas
"""
LATE = "I6 a request came after its saga was Completed, and neither a lease nor an answer was lost"
NOT_ROUTED = (
    "I2 a routed event lacks a saga, or has two, for a subscription that was active and verified since"
)
# Of the Completed saga; the placeholders are filled in twice.
RESEND = """
    insert into webhookd.webhook_delivery_sagas (event_id, subscription_id, resent_from, status)
    values ({{event}}, {{subscription}}, {{completed}}, '{status}')
"""
# Of its event only.
REPLAY = """
    insert into public.replays
    select {subscription}, true, created_at, created_at + interval '1 us', created_at, 'infinity'
    from webhookd.events where id = {event}
"""
STATES = {
    "completed": SagaStatus.COMPLETED,
    "dead_lettered": SagaStatus.DEAD_LETTERED,
    "in_progress": SagaStatus.IN_PROGRESS,
}
# For each query, by the start of its name, one violation that the product never causes.
PLANTED = {
    "I1 an event that was acknowledged to a client": "delete from webhookd.events where id = {event}",
    "I1 an endpoint got an event": "update public.receipts set saga_id = null where saga_id = {completed}",
    "I1 an idempotency key": """
        drop index webhookd.uniq_event_idempotency_key;
        update webhookd.events set idempotency_key = 'the same'
    """,
    "I1 a resend": "insert into public.resends values ({completed}, {in_progress})",
    "I2 a routed event": "delete from webhookd.webhook_delivery_sagas where id = {completed}",
    "I2 a pair": """
        drop index webhookd.uniq_saga_event_subscription;
        insert into webhookd.webhook_delivery_sagas (event_id, subscription_id)
        select event_id, subscription_id from webhookd.webhook_delivery_sagas where id = {completed}
    """,
    "I2 a replayed event": f"""
        {REPLAY};
        delete from webhookd.webhook_delivery_sagas where id = {{completed}}
    """,
    "I2 a saga was created": """
        insert into public.holds
        select subscription_id, 'disabled', created_at - interval '1 us', created_at + interval '1 us'
        from webhookd.webhook_delivery_sagas where id = {completed}
    """,
    "I2 a saga for a subscription": """
        insert into webhookd.webhook_delivery_sagas (event_id, subscription_id) values ({event}, {unverified})
    """,
    "I3": "update webhookd.webhook_delivery_sagas set status = 'Pending' where id = {completed}",
    "I4": "update webhookd.webhook_delivery_sagas set attempt_count = 7 where id = {completed}",
    "I5 a saga InProgress": "delete from webhookd.webhook_delivery_jobs where saga_id = {in_progress}",
    "I5 the job of a saga": """
        update webhookd.webhook_delivery_sagas set job_id = job_id + 1 where id = {completed}
    """,
    "I5 an attempt was started": """
        insert into public.holds
        select subscription_id, 'paused', created_at - interval '1 us', created_at + interval '1 us'
        from webhookd.webhook_delivery_jobs where saga_id = {completed}
    """,
    "I5 an attempt has": "update webhookd.webhook_delivery_jobs set attempt = 2 where saga_id = {completed}",
    "I6": """
        update public.receipts set received_at = received_at + interval '1 minute'
        where saga_id = {completed}
    """,
    "I7": "update public.receipts set response_status = 500 where saga_id = {completed}",
    "I8 dead letters": "delete from webhookd.dead_letters where saga_id = {dead_lettered}",
    "I8 a snapshot": """
        update webhookd.dead_letters set payload_snapshot = '{{ }}' where saga_id = {dead_lettered}
    """,
    "I9": "insert into public.receipts select * from public.receipts where saga_id = {completed}",
    "I10 a body": "update public.receipts set body = '{{ }}' where saga_id = {completed}",
    "I10 a payload": "update public.client set payload = '{{ }}' where event_id = {event}",
    "address:": "update public.receipts set address = 'https://new.example/' where saga_id = {completed}",
    "resend: a saga has": f"""
        drop index webhookd.uniq_saga_resend;
        {RESEND.format(status="Pending")};
        {RESEND.format(status="Pending")}
    """,
    "resend: a resent saga": """
        insert into webhookd.webhook_delivery_sagas (event_id, subscription_id, resent_from)
        values ({event}, {subscription}, {in_progress})
    """,
    "replay: a delivery": f"""
        {REPLAY};
        {RESEND.format(status="Completed")};
        {RESEND.format(status="Completed")}
    """,
    "replay: a finished": f"""
        {REPLAY};
        update public.replays set started_at = now() + interval '6 s'
    """,
    "retention: a delivery": """
        insert into public.removed_webhook_delivery_sagas
        select s.* from webhookd.webhook_delivery_sagas s where s.id = {in_progress}
    """,
    "retention: an attempt": """
        insert into public.removed_webhook_delivery_jobs
        select j.* from webhookd.webhook_delivery_jobs j where j.saga_id = {in_progress}
    """,
    "retention: an event": "delete from webhookd.events where id = {event}",
    "retention: a removed subscription": """
        update webhookd.delivery_stats set subscription_id = 999 where subscription_id <> 0
    """,
    "stats: the numbers": """
        update webhookd.delivery_stats set durations[1] = durations[1] + 1
        where subscription_id = 0 and delivered > 0
    """,
    "retention: a row": """
        insert into public.removed_events select e.* from webhookd.events e where e.id = {event};
        insert into public.removed_events select e.* from webhookd.events e where e.id = {event}
    """,
}


async def test_slow_transaction_does_not_backdate_a_completion(flow: Flow) -> None:
    """A transaction that began before the request stamps its own start time, which proves nothing."""
    await flow.superuser.execute(AUDIT)
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    [lease] = await flow.claim()
    reporting = Flow(flow.superuser, flow.superuser)
    async with flow.daemon.transaction():
        began = await flow.daemon.fetchval("select now()")
        received_at = await flow.superuser.fetchval("select clock_timestamp()")
        await flow.superuser.execute(RECEIPT, received_at)
        await reporting.report(lease)
        await flow.apply()
    stamped = await flow.superuser.fetchval("select result_applied_at from webhookd.webhook_delivery_jobs")
    assert stamped == began < received_at
    assert await broken_invariants(flow.superuser) == []


async def test_request_after_the_end_is_found(flow: Flow) -> None:
    """A second request for a finished delivery is found if every lease was kept and answered."""
    await flow.superuser.execute(AUDIT)
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.attempt(200)
    finished_at = await flow.superuser.fetchval("select finished_at from webhookd.webhook_delivery_jobs")
    await flow.superuser.execute(RECEIPT, finished_at - timedelta(seconds=1))
    assert await broken_invariants(flow.superuser) == []
    await flow.superuser.execute(RECEIPT, finished_at + timedelta(seconds=1))
    assert LATE in await broken_invariants(flow.superuser)


async def test_expired_lease_explains_one_late_request(flow: Flow) -> None:
    """One expired lease explains one late request, not a second."""
    names = await three_sagas(flow)
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_jobs set lease_resets = 1 where saga_id = $1", names["completed"]
    )
    late = "insert into public.receipts select * from public.receipts where saga_id = $1 limit 1"
    await flow.superuser.execute(PLANTED["I6"].format(**names))
    assert LATE not in await broken_invariants(flow.superuser)
    await flow.superuser.execute(late, names["completed"])
    assert LATE in await broken_invariants(flow.superuser)


async def test_request_without_an_attempt_is_found(flow: Flow) -> None:
    """A request for a saga without attempts is one request too many."""
    names = await three_sagas(flow)
    await flow.superuser.execute(
        "delete from webhookd.webhook_delivery_jobs where saga_id = $1", names["completed"]
    )
    assert "I9" in [name.split()[0] for name in await broken_invariants(flow.superuser)]


async def test_move_does_not_hide_a_missing_saga(flow: Flow) -> None:
    """A moved subscription stays active and verified; a disabled one is not required to get the event."""
    names = await three_sagas(flow)
    subscription_id = names["subscription"]
    await subscriptions.update(flow.daemon, subscription_id, {"callback_url": f"{ADDRESS}/new"})
    await flow.verify(subscription_id)
    assert await broken_invariants(flow.superuser) == []
    await flow.superuser.execute(PLANTED["I2 a routed event"].format(**names))
    assert NOT_ROUTED in await broken_invariants(flow.superuser)
    for active in (False, True):
        await subscriptions.update(flow.daemon, subscription_id, {"active": active})
    assert NOT_ROUTED not in await broken_invariants(flow.superuser)


async def test_two_resends_of_a_pair_break_nothing(flow: Flow) -> None:
    """A resend of the first saga and a resend of its first resend can live at the same time."""
    await flow.superuser.execute(AUDIT)
    first = await flow.saga_in(SagaStatus.COMPLETED)
    second = (await sagas.resend(flow.daemon, first)).saga_id
    await flow.attempt(200)
    for saga_id in (second, first):
        assert (await sagas.resend(flow.daemon, saga_id)).created
    await flow.superuser.execute(
        """
        insert into public.receipts (saga_id, response_status, received_at, body, verifies)
        select saga_id, 200, finished_at, '{}', true from webhookd.webhook_delivery_jobs
        """
    )
    assert await broken_invariants(flow.superuser) == []


async def test_requests_are_recorded_with_their_attempt(flow: Flow) -> None:
    """A resent saga has the event, subscription and attempt number of the one that it repeats."""
    await flow.superuser.execute(AUDIT)
    first = await flow.saga_in(SagaStatus.COMPLETED)
    between = await flow.superuser.fetchval("select clock_timestamp()")
    second = (await sagas.resend(flow.daemon, first)).saga_id
    await flow.attempt(200)
    after = await flow.superuser.fetchval("select clock_timestamp()")
    [pair] = await flow.superuser.fetch(
        "select distinct event_id, subscription_id from webhookd.webhook_delivery_sagas"
    )
    receipts = [
        (*pair, attempt, 200, time, b"{}", True, None)
        for attempt, time in ((1, after), (1, between), (2, after))
    ]
    await record(flow.superuser, Publisher([]), receipts)
    rows = await flow.superuser.fetch("select saga_id from public.receipts")
    assert [row["saga_id"] for row in rows] == [second, first, None]


@pytest.mark.parametrize("name", [*INVARIANTS, *RETENTION])
async def test_each_query_finds_its_planted_violation(name: str, flow: Flow) -> None:
    """A query that never finds anything proves nothing; it returns exactly the planted rows."""
    names = await three_sagas(flow)
    assert await broken_invariants(flow.superuser) == []
    [planted] = [statement for beginning, statement in PLANTED.items() if name.startswith(f"{beginning} ")]
    await flow.superuser.execute(planted.format(**names))
    assert name in await broken_invariants(flow.superuser)
    assert len((await broken_rows(flow.superuser))[name]) in {1, 2}


async def three_sagas(flow: Flow) -> dict[str, int]:
    """Create a Completed, a DeadLettered and an InProgress saga with their receipts, and drop all guards."""
    await flow.superuser.execute(AUDIT)
    subscription_id = await flow.subscribe()
    names = {"unverified": await flow.subscribe("order.other", verified=False)}
    names["subscription"] = subscription_id
    for name, status in STATES.items():
        names[name] = await flow.saga_in(status, subscription_id=subscription_id)
    await flow.superuser.execute(
        """
        insert into public.receipts (saga_id, response_status, received_at, body, verifies)
        select saga_id, response_status, finished_at, '{}', true
        from webhookd.webhook_delivery_jobs where finished_at is not null
        """
    )
    await flow.superuser.execute(
        "insert into public.client select id, idempotency_key, payload from webhookd.events"
    )
    names["event"] = await flow.superuser.fetchval(
        "select event_id from webhookd.webhook_delivery_sagas where id = $1", names["completed"]
    )
    for table in ("webhook_delivery_sagas", "webhook_delivery_jobs", "dead_letters", "events"):
        await flow.superuser.execute(f"alter table webhookd.{table} disable trigger all")
    await flow.superuser.execute("alter table webhookd.webhook_delivery_sagas enable always trigger zz_audit")
    return names
