"""Retention in the database: which events are removed, what is kept, and that only one role can remove."""

from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.support.catalog import refusal
from tests.support.flow import POLICY
from tests.support.sweeps import HOLDER, MONTH, let_pass, rows, sweep
from webhookd.core.errors import Refusal, Refused
from webhookd.core.settings import RetentionSettings
from webhookd.core.states import SagaStatus
from webhookd.db.connection import translated
from webhookd.db.paging import Page
from webhookd.deliveries import dead_letters, reads, router, sagas, subscriptions
from webhookd.retention import queries

if TYPE_CHECKING:
    from tests.support.database import Database
    from tests.support.flow import Flow

PENDING, IN_PROGRESS, PENDING_RETRY, COMPLETED, DEAD_LETTERED = SagaStatus
PAYLOADS = RetentionSettings(payloads_days=30, dead_letters_days=90)
SECRET = '{"name": "Ada"}'


async def publish_labelled(flow: "Flow", payload: str = SECRET) -> int:
    """Publish an event with labels and a key."""
    event_id: int = await flow.daemon.fetchval(
        """select webhookd.publish('order.created', $1::text, idempotency_key => 'key-1', tenant => '',
           labels => '{"region": "eu", "plan": "free"}')""",
        payload,
    )
    return event_id


async def replay(flow: "Flow", subscription_id: int) -> int:
    """Deliver past events to a subscription; returns the number of new deliveries."""
    now = await flow.daemon.fetchval("select now()")
    what = router.Replay(
        subscription_id,
        now - timedelta(days=1),
        now + timedelta(days=1),
        None,
        include_all=False,
        started_at=now,
    )
    return (await router.replay(flow.daemon, what, 0, 100, dry_run=False)).created


# What is removed


async def test_finished_event_is_removed_with_everything(flow: "Flow") -> None:
    """Sagas, jobs, labels and the dead letter go with it; a requeued delivery and its dead letter too."""
    await flow.subscribe()
    await publish_labelled(flow)
    await flow.route()
    await flow.attempt(500)
    await flow.attempt(500, POLICY._replace(max_attempts=2))
    letter_id = await flow.daemon.fetchval("select id from webhookd.dead_letters")
    await flow.requeue(letter_id)
    await flow.attempt(200)
    await let_pass(flow.superuser, 100)
    assert await sweep(flow) == {
        "events": 1,
        "deliveries": 2,
        "attempts": 3,
        "dead_letters": 1,
    }
    assert await rows(flow.superuser) == {}


async def test_event_without_subscription_is_removed(flow: "Flow") -> None:
    """It is finished when it is routed, and not before."""
    await flow.publish()
    await let_pass(flow.superuser, 31)
    assert await sweep(flow) == {}
    await flow.route()
    await let_pass(flow.superuser, 1)
    assert await sweep(flow) == {"events": 1}


async def test_young_event_is_kept(flow: "Flow") -> None:
    """The period counts from the creation of the event."""
    await flow.saga_in(COMPLETED)
    await let_pass(flow.superuser, 29.9)
    assert await sweep(flow) == {}
    await let_pass(flow.superuser, 0.2)
    assert (await sweep(flow))["events"] == 1


@pytest.mark.parametrize("status", [PENDING, IN_PROGRESS, PENDING_RETRY])
async def test_unfinished_delivery_keeps_its_event(flow: "Flow", status: SagaStatus) -> None:
    """One live delivery keeps the event, and with it the finished deliveries to other subscriptions."""
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.attempt(200)
    subscription_id = await flow.subscribe()
    await replay(flow, subscription_id)
    if status is IN_PROGRESS:
        await flow.start()
    elif status is PENDING_RETRY:
        await flow.attempt(500)
    await let_pass(flow.superuser, 365)
    before = await rows(flow.superuser)
    assert await sweep(flow) == {}
    assert await rows(flow.superuser) == before | {"retention_kept": 1}


async def test_kept_event_is_removed_when_it_is_finished(flow: "Flow") -> None:
    """A sweep looks again at what it kept, although its position is past it."""
    await flow.saga_in(PENDING_RETRY)
    await let_pass(flow.superuser, 31)
    assert await sweep(flow) == {}
    await flow.attempt(200)
    assert await sweep(flow) == {}, "it looks again after an hour"
    await let_pass(flow.superuser, 1 / 24)
    assert (await sweep(flow))["events"] == 1
    assert await rows(flow.superuser) == {}


@pytest.mark.parametrize(
    ("settings", "days", "removed"),
    [
        (RetentionSettings(events_days=30, dead_letters_days=90), 31, False),
        (RetentionSettings(events_days=30, dead_letters_days=90), 89, False),
        (RetentionSettings(events_days=30, dead_letters_days=90), 91, True),
        (RetentionSettings(events_days=30, dead_letters_days=7), 8, False),
        (RetentionSettings(events_days=30, dead_letters_days=7), 31, True),
        (RetentionSettings(events_days=30, dead_letters_days=0), 30_000, False),
    ],
)
async def test_dead_letter_keeps_its_event(
    flow: "Flow", settings: RetentionSettings, days: float, *, removed: bool
) -> None:
    """At least as long as dead_letters_days, and forever if that is 0."""
    await flow.saga_in(DEAD_LETTERED)
    await let_pass(flow.superuser, days)
    assert bool(await sweep(flow, settings)) is removed


async def test_waiting_delivery_of_a_deleted_subscription_keeps_nothing(flow: "Flow") -> None:
    """It can never be sent: the event, the delivery and then the subscription are removed."""
    subscription_id = await flow.subscribe()
    await flow.publish()
    await flow.publish()
    await flow.route()
    await flow.start(quota=1)
    await subscriptions.delete(flow.daemon, subscription_id)
    await let_pass(flow.superuser, 31)
    assert await sweep(flow) == {"events": 2, "deliveries": 2, "attempts": 1}
    swept = await queries.sweep_subscriptions(flow.daemon, HOLDER, 100, MONTH)
    assert swept.removed == {"subscriptions": 1}
    assert await flow.superuser.fetchval("select count(*) from webhookd.subscription_changes") == 0


async def test_deleted_subscription_with_many_statistics_is_removed_in_several_calls(flow: "Flow") -> None:
    """A call removes at most 50 rows of statistics for each row of its batch, so that it stays short."""
    subscription_id = await flow.subscribe()
    await subscriptions.delete(flow.daemon, subscription_id)
    await flow.superuser.execute(
        """
        insert into webhookd.delivery_stats_hours (subscription_id, hour)
        select $1, '2026-01-01'::timestamptz + h * interval '1 hour' from generate_series(1, 120) h
        """,
        subscription_id,
    )
    await let_pass(flow.superuser, 31)
    left = []
    for _ in range(3):
        swept = await queries.sweep_subscriptions(flow.daemon, HOLDER, 1, MONTH)
        assert swept.more
        left.append(await flow.superuser.fetchval("select count(*) from webhookd.delivery_stats_hours"))
    assert left == [70, 20, 0]
    assert await flow.superuser.fetchval("select count(*) from webhookd.subscriptions") == 0


async def test_request_in_flight_keeps_its_event(flow: "Flow") -> None:
    """Also if its subscription was deleted: the report must find its job."""
    subscription_id = await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    [lease] = await flow.claim()
    await subscriptions.delete(flow.daemon, subscription_id)
    await let_pass(flow.superuser, 31)
    assert await sweep(flow) == {}
    await flow.report(lease)
    await let_pass(flow.superuser, 1)
    assert await sweep(flow) == {}, "the result is not applied yet"
    await flow.apply()
    await let_pass(flow.superuser, 1)
    assert (await sweep(flow))["events"] == 1


async def test_job_of_the_job_queue_keeps_its_event(flow: "Flow") -> None:
    """The job refers to the event."""
    event_id = await flow.publish()
    await flow.route()
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'me')")
    await flow.daemon.execute(
        "select webhookd.fn_job_enqueue('report', 'one', 'DOT', p_actor => 'me', p_causation_event_id => $1)",
        event_id,
    )
    await flow.route()
    await let_pass(flow.superuser, 31)
    await sweep(flow)
    assert await flow.superuser.fetchval(
        "select exists (select from webhookd.events where id = $1)", event_id
    )


async def test_sweep_goes_on_in_batches_of_one(flow: "Flow") -> None:
    """Each call removes one event, and a young event ends the sweep, also in the middle of a batch."""
    await flow.subscribe()
    for _ in range(5):
        await flow.publish()
    await flow.route()
    await flow.attempt(200)
    await let_pass(flow.superuser, 31)
    await flow.publish()
    assert await sweep(flow, batch_size=1) == {"events": 5, "deliveries": 5, "attempts": 5}
    assert await rows(flow.superuser) == {"events": 1, "event_routing_queue": 1}
    position = await flow.superuser.fetchrow(
        "select * from webhookd.retention_progress where kind = 'events'"
    )
    assert position is not None
    assert position["pass_finished_at"] is not None


async def test_event_of_a_long_transaction_is_not_passed_over(flow: "Flow") -> None:
    """An event with a larger id and an earlier time is left for later, not the young one before it."""
    young = await flow.publish()
    old = await flow.publish()
    await flow.route()
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(
            "update webhookd.events set created_at = created_at - interval '31 days' where id = $1", old
        )
    assert await sweep(flow) == {}
    await let_pass(flow.superuser, 31)
    assert await sweep(flow) == {"events": 2}, f"{young} was passed over"


async def test_one_instance_sweeps_at_a_time(flow: "Flow") -> None:
    """Another one is refused until the turn is given back or over."""
    assert await queries.take_turn(flow.daemon, "first", 60)
    refused = await queries.sweep_events(flow.daemon, "second", "events", 10, MONTH)
    assert refused.refused
    assert not await queries.take_turn(flow.daemon, "second", 60)
    assert await queries.take_turn(flow.daemon, "first", 0)
    assert await queries.take_turn(flow.daemon, "second", 60)


async def test_dry_run_counts_what_a_sweep_removes(flow: "Flow") -> None:
    """First those that are due in the list of kept events, then the next ones. Nothing changes."""
    await flow.saga_in(PENDING_RETRY)
    await let_pass(flow.superuser, 31)
    await sweep(flow)
    await flow.attempt(200)
    for _ in range(3):
        await flow.publish()
    await flow.route()
    await flow.attempt(200)
    await let_pass(flow.superuser, 31)
    before = await rows(flow.superuser)
    counted = 0
    for kept in (True, False):
        after_id, more = 0, True
        while more:
            found = await queries.preview(flow.daemon, "events", 2, MONTH, after_id, kept=kept)
            counted += found.expired
            after_id, more = found.last_id, found.more
    assert await rows(flow.superuser) == before
    assert counted == (await sweep(flow))["events"] == 4


async def test_longer_period_keeps_what_was_kept(flow: "Flow") -> None:
    """An event that a sweep had kept is compared with the new period when it is looked at again."""
    await flow.saga_in(PENDING_RETRY)
    await let_pass(flow.superuser, 3)
    day = RetentionSettings(events_days=1, dead_letters_days=1)
    assert await sweep(flow, day) == {}
    await flow.attempt(200)
    await let_pass(flow.superuser, 1)
    assert await sweep(flow, MONTH) == {}
    await let_pass(flow.superuser, 27)
    assert (await sweep(flow, MONTH))["events"] == 1


async def test_batch_has_a_bounded_number_of_deliveries(flow: "Flow") -> None:
    """More than ten thousand deliveries are removed in several transactions, each event completely."""
    await flow.superuser.execute("set session_replication_role = replica")
    await flow.superuser.execute(
        """
        insert into webhookd.events (event_type, payload, created_at)
        select 'a', '{}', now() - interval '40 days' from generate_series(1, 3);
        insert into webhookd.webhook_delivery_sagas (event_id, subscription_id, status)
        select e.id, n, 'Completed' from webhookd.events e, generate_series(1, 6000) n
        """
    )
    await flow.superuser.execute("set session_replication_role = origin")
    batch = await queries.sweep_events(flow.daemon, HOLDER, "events", 1000, MONTH)
    assert (batch.removed["events"], batch.removed["deliveries"]) == (1, 6000)
    for _ in range(2):
        await let_pass(flow.superuser, 1)
        assert await sweep(flow) == {"events": 1, "deliveries": 6000}


# The job queue


async def test_old_jobs_ledger_rows_and_workflows_are_removed(flow: "Flow") -> None:
    """Each after its own period; what is not finished, and its ledger, stays, however old."""
    await flow.daemon.execute("select webhookd.fn_job_enable(true, 'me')")
    await flow.daemon.execute("select webhookd.fn_job_workflow_open('batch', 'cron', 'me')")
    workflow_id = await flow.superuser.fetchval("select workflow_id from webhookd.job_workflow")
    for number in range(30):
        await flow.daemon.execute(
            "select webhookd.fn_job_enqueue('report', $1, 'DOT', p_actor => 'me', p_workflow_id => $2)",
            str(number),
            workflow_id if number < 3 else None,
        )
    jobs = [
        row["job_id"]
        for row in await flow.superuser.fetch("select job_id from webhookd.job_queue order by enqueued_at")
    ]
    for job_id in [*jobs[:3], *jobs[20:]]:
        await flow.daemon.execute("select webhookd.fn_job_cancel($1, 'old', 'me')", job_id)
    await let_pass(flow.superuser, 40)
    ledger = "select count(*) from webhookd.job_command_run where job_id = any($1)"

    async def sweep_jobs(**days: float) -> dict[str, int]:
        removed: dict[str, int] = {}
        while True:
            batch = await queries.sweep_jobs(flow.daemon, HOLDER, 5, RetentionSettings(**days))
            for name, count in batch.removed.items():
                removed[name] = removed.get(name, 0) + count
            if not batch.more:
                return removed

    assert await sweep_jobs(jobs_days=50, job_ledger_days=50, job_workflows_days=50) == {
        "jobs": 0,
        "runs": 0,
        "workflows": 0,
    }
    assert (await sweep_jobs(job_ledger_days=30))["runs"] >= 26
    assert await flow.superuser.fetchval(ledger, jobs[20:]) == 0
    assert await flow.superuser.fetchval(ledger, jobs[3:20]) == 17
    assert (await sweep_jobs(job_workflows_days=30))["workflows"] == 0, "it has jobs"
    assert (await sweep_jobs(jobs_days=30))["jobs"] == 13
    assert (await sweep_jobs(job_workflows_days=30))["workflows"] == 1
    assert await flow.superuser.fetchval("select count(*) from webhookd.job_queue") == 17


# Idempotency keys and payloads


async def test_key_can_be_used_again_after_its_event_is_removed(flow: "Flow") -> None:
    """With other content too."""
    first = await publish_labelled(flow)
    await flow.route()
    with pytest.raises(asyncpg.PostgresError, match="other content"):
        await publish_labelled(flow, '{"other": 1}')
    await let_pass(flow.superuser, 31)
    await sweep(flow)
    assert await publish_labelled(flow, '{"other": 1}') > first


async def test_payload_is_replaced_by_null(flow: "Flow") -> None:
    """The rest of the event stays, and so do its deliveries."""
    await flow.subscribe()
    event_id = await publish_labelled(flow)
    await flow.route()
    await flow.attempt(200)
    await let_pass(flow.superuser, 31)
    before = await rows(flow.superuser)
    assert await sweep(flow, PAYLOADS, "payloads") == {"payloads": 1}
    event = await flow.daemon.fetchrow("select * from webhookd.events where id = $1", event_id)
    assert event is not None
    assert event["payload"] == "null"
    assert event["payload_removed_at"] is not None
    assert (event["event_type"], event["idempotency_key"]) == ("order.created", "key-1")
    assert await rows(flow.superuser) == before
    assert await sweep(flow, PAYLOADS, "payloads") == {}


async def test_repeated_publish_is_recognised_without_the_payload(flow: "Flow") -> None:
    """The payload cannot be compared any more; type and labels still are."""
    event_id = await publish_labelled(flow)
    await flow.route()
    await let_pass(flow.superuser, 31)
    await sweep(flow, PAYLOADS, "payloads")
    assert await publish_labelled(flow) == event_id
    with pytest.raises(asyncpg.PostgresError, match="other content"):
        await flow.daemon.fetchval(
            "select webhookd.publish('order.other', $1::text, idempotency_key => 'key-1')", SECRET
        )


async def test_event_without_payload_is_not_sent_again(flow: "Flow") -> None:
    """A resend, a requeue and a replay would deliver `null`."""
    await flow.saga_in(DEAD_LETTERED)
    saga_id = await flow.saga_in(COMPLETED, subscription_id=1)
    await let_pass(flow.superuser, 91)
    assert await sweep(flow, PAYLOADS, "payloads") == {"payloads": 2}
    snapshot = await flow.daemon.fetchval("select payload_snapshot from webhookd.dead_letters")
    assert snapshot == "null"
    letter_id = await flow.daemon.fetchval("select id from webhookd.dead_letters")
    for call in (sagas.resend(flow.daemon, saga_id), flow.requeue(letter_id)):
        with pytest.raises(Refused) as refused, translated():
            await call
        assert refused.value.refusal is Refusal.PAYLOAD_REMOVED
    for dry_run in (True, False):
        bulk = await dead_letters.requeue_many(flow.daemon, dead_letters.Filter(), 0, 10, dry_run=dry_run)
        assert (bulk.matched, bulk.requeued, bulk.skipped, bulk.payload_removed) == (1, 0, 1, 1)
    [letter] = await reads.dead_letters(flow.daemon, Page(2), dead_letters.Filter())
    single = await reads.dead_letter(flow.daemon, letter_id)
    assert letter["payload_removed_at"] == single["payload_removed_at"] is not None


async def test_requeue_says_why_it_skips(flow: "Flow") -> None:
    """A dead letter that was requeued before is not counted as one whose payload is gone."""
    await flow.saga_in(DEAD_LETTERED)
    letter_id = await flow.daemon.fetchval("select id from webhookd.dead_letters")
    assert (await flow.requeue(letter_id)).created
    await flow.attempt(200)
    await flow.saga_in(DEAD_LETTERED, subscription_id=1)
    await let_pass(flow.superuser, 91)
    await sweep(flow, PAYLOADS, "payloads")
    await flow.saga_in(DEAD_LETTERED, subscription_id=1)
    for dry_run in (True, False):
        bulk = await dead_letters.requeue_many(flow.daemon, dead_letters.Filter(), 0, 10, dry_run=dry_run)
        assert (bulk.matched, bulk.requeued, bulk.skipped, bulk.payload_removed) == (3, 1, 2, 1)
    letters = await reads.dead_letters(flow.daemon, Page(4), dead_letters.Filter())
    assert [letter["payload_removed_at"] is None for letter in letters] == [True, False, False]


async def test_replay_counts_events_without_payload(flow: "Flow") -> None:
    """Of the events that match; with `missing`, only those that were never routed to the subscription."""
    first = await flow.subscribe()
    await flow.publish()
    await flow.publish("order.other")
    await flow.route()
    await flow.attempt(200)
    await let_pass(flow.superuser, 31)
    assert await sweep(flow, PAYLOADS, "payloads") == {"payloads": 2}
    second = await flow.subscribe()
    now = await flow.daemon.fetchval("select now()")
    for subscription_id, include_all, payload_removed in (
        (first, False, 0),
        (first, True, 1),
        (second, False, 1),
        (second, True, 1),
    ):
        what = router.Replay(subscription_id, now - timedelta(days=365), now, None, include_all, now)
        for dry_run in (True, False):
            counts = await router.replay(flow.daemon, what, 0, 10, dry_run=dry_run)
            assert (counts.examined, counts.matched, counts.created) == (2, 0, 0)
            assert counts.payload_removed == payload_removed


async def test_dead_letter_keeps_its_payload(flow: "Flow") -> None:
    """As long as dead_letters_days: it can be requeued until then."""
    await flow.saga_in(DEAD_LETTERED)
    await let_pass(flow.superuser, 31)
    assert await sweep(flow, PAYLOADS, "payloads") == {}
    letter_id = await flow.daemon.fetchval("select id from webhookd.dead_letters")
    assert (await flow.requeue(letter_id)).created


# Only retention_keeper can remove, and only what is finished


@pytest.mark.parametrize("who", ["superuser", "owner"])
@pytest.mark.parametrize(
    "table", ["events", "webhook_delivery_sagas", "webhook_delivery_jobs", "dead_letters", "subscriptions"]
)
async def test_no_other_role_deletes(flow: "Flow", database: "Database", table: str, who: str) -> None:
    """Also not the owner of the tables, and also not finished rows."""
    await flow.saga_in(COMPLETED)
    connection = flow.superuser
    if who == "owner":
        connection = await database.connect("migrator")
        await connection.execute("set role webhookd_owner")
    assert await refusal(connection, f"delete from webhookd.{table}") == "WH410"


@pytest.mark.parametrize(
    "statement",
    [
        "delete from webhookd.webhook_delivery_jobs",
        "delete from webhookd.webhook_delivery_sagas",
        "delete from webhookd.events",
    ],
)
async def test_the_role_itself_removes_no_live_row(flow: "Flow", statement: str) -> None:
    """Triggers refuse a leased job, an unfinished saga, and an event with deliveries."""
    await flow.saga_in(IN_PROGRESS)
    await flow.claim()
    await flow.superuser.execute("set role retention_keeper")
    assert await refusal(flow.superuser, statement) == "WH411"


async def test_the_role_changes_nothing_but_payloads(flow: "Flow") -> None:
    """PostgreSQL refuses other columns, and a trigger refuses every payload but null."""
    await flow.saga_in(DEAD_LETTERED)
    await flow.superuser.execute("set role retention_keeper")
    assert await refusal(flow.superuser, "update webhookd.events set event_type = 'a'") == "42501"
    assert await refusal(flow.superuser, "update webhookd.events set payload = '{}'") == "WH410"
    assert (
        await refusal(flow.superuser, "update webhookd.events set payload = '1', payload_removed_at = now()")
        == "WH410"
    )
    assert (
        await refusal(flow.superuser, "update webhookd.dead_letters set payload_snapshot = 'null'") == "WH410"
    )
    assert await refusal(flow.superuser, "truncate webhookd.events cascade") == "42501"


async def test_sweep_needs_read_committed(flow: "Flow") -> None:
    """With one snapshot for all statements it could not see a resend that it waited for."""
    await flow.saga_in(COMPLETED)
    await let_pass(flow.superuser, 31)
    with pytest.raises(asyncpg.PostgresError, match="read committed"):
        async with flow.daemon.transaction(isolation="repeatable_read"):
            await queries.sweep_events(flow.daemon, HOLDER, "events", 10, MONTH)
