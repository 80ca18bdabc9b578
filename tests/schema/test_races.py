"""Two connections at once in everything that two instances may do at the same time.

Each race holds one transaction open until the other side skips or waits. The nightly run repeats each race
without each of its guards, and the race must then fail.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import POLICY, Flow
from tests.support.guards import Dropped, Weakened
from tests.support.nightly import first_in_gate
from tests.support.races import Contest
from tests.support.waiting import until_blocked
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts, router, sagas

SKIP_LOCKED = "skip locked"
# A row goes into the indexes in the order of their creation.
PAUSE_BEFORE_INDEXES = """
    create function webhookd_test_pause(id bigint) returns bigint language plpgsql immutable as $$
    begin
        if current_setting('webhookd_test.pause', true) = 'yes' then
            perform pg_advisory_xact_lock_shared(17);
        end if;
        return id;
    end
    $$;
    create index webhookd_test_pause on webhookd.webhook_delivery_sagas (webhookd_test_pause(id));
    do $$
    declare
        name text;
        definition text;
    begin
        foreach name in array array['uniq_saga_dead_letter', 'uniq_saga_resend'] loop
            definition := pg_get_indexdef(('webhookd.' || name)::regclass);
            execute 'drop index webhookd.' || name;
            execute definition;
        end loop;
    end
    $$"""


class Race(Contest[Flow]):
    """Two daemons on one database."""


@pytest.fixture
async def race(database: Database) -> Race:
    """Connect both sides."""
    return Race(await Flow.open(database), await Flow.open(database))


async def two_routers(race: Race) -> None:
    """The second router skips the events of the first; each event is routed once."""
    await race.first.subscribe()
    for _ in range(3):
        await race.first.publish()
    async with race.first.daemon.transaction():
        assert (await race.first.route(batch_size=2)).events == 2
        assert (await race.skips(race.second.route())).events == 1
    assert (await race.second.route()).events == 0
    assert await race.count("select count(*) from webhookd.webhook_delivery_sagas") == 3


async def event_routed_by_two_routers(race: Race) -> None:
    """An event that is in the queue twice waits for its first saga and gets no second one."""
    await race.first.subscribe()
    event_id = await race.first.publish()
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.route()
    # A second router has the same event, as if the queue had contained it twice.
    other = race.second.daemon.execute("select webhookd_test_route($1)", event_id)
    task = await race.waits(other)
    await transaction.commit()
    await task
    assert await race.count("select count(*) from webhookd.webhook_delivery_sagas") == 1


async def two_orchestrators(race: Race) -> None:
    """Only one tick runs at a time, so that the window holds for both."""
    await race.first.subscribe()
    for _ in range(20):
        await race.first.publish()
    await race.first.route()
    async with race.first.daemon.transaction():
        [started] = await race.first.start(window=8)
        assert started.started == 8
        assert await race.skips(race.second.start(window=8)) == []
    [again] = await race.second.start(window=8)
    assert (again.started, again.active) == (0, 8)
    assert await race.count("select count(*) from webhookd.webhook_delivery_jobs") == 8


async def start_during_a_sweep(race: Race) -> None:
    """A saga that a sweep is dead-lettering gets no attempt, and the start does not wait for it."""
    saga_id = await race.first.saga_in(SagaStatus.PENDING_RETRY)
    subscription_id = await race.count("select max(id) from webhookd.subscriptions")
    async with race.first.daemon.transaction():
        swept = await sagas.dead_letter_exhausted(race.first.daemon, 0, 100, max_attempts=1)
        assert [transition.saga_id for transition in swept.dead_lettered] == [saga_id]
        [started] = await race.skips(race.second.start([subscription_id]))
        assert started.started == 0
    assert await race.first.saga_status(saga_id) is SagaStatus.DEAD_LETTERED
    assert await race.count("select count(*) from webhookd.webhook_delivery_jobs") == 1


async def sweep_during_a_start(race: Race) -> None:
    """The sweep skips a saga that is being started, without waiting."""
    saga_id = await race.first.saga_in(SagaStatus.PENDING_RETRY)
    async with race.first.daemon.transaction():
        await race.first.start()
        sweep = sagas.dead_letter_exhausted(race.second.daemon, 0, 100, max_attempts=1)
        assert (await race.skips(sweep)).dead_lettered == []
    assert await race.first.saga_status(saga_id) is SagaStatus.IN_PROGRESS


async def two_claimers(race: Race) -> None:
    """The second worker skips the attempts that the first leases."""
    await race.first.subscribe()
    for _ in range(5):
        await race.first.publish()
    await race.first.route()
    await race.first.start()
    async with race.first.daemon.transaction():
        mine = await race.first.claim(wanted=2)
        theirs = await race.skips(race.second.claim(worker_id="other"))
    taken = [lease.job_id for lease in mine + theirs]
    assert (len(mine), len(theirs), len(set(taken))) == (2, 3, 5)
    assert await race.first.claim() == []


async def two_probes(race: Race) -> None:
    """A failing endpoint gets one request in the whole cluster."""
    subscription_id = await race.first.subscribe()
    for _ in range(3):
        await race.first.publish()
    await race.first.route()
    await race.first.start()
    await race.first.superuser.execute(
        "insert into webhookd.endpoint_health (subscription_id, consecutive_failures, failing_since) "
        "values ($1, 10, now())",
        subscription_id,
    )
    async with race.first.daemon.transaction():
        # This locks the claimed attempt; the other two attempts stay visible to the other side.
        assert len(await race.first.claim(wanted=1)) == 1
        assert await race.skips(race.second.claim()) == []
    assert await race.second.claim() == []
    assert (
        await race.count("select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'") == 1
    )


async def two_reapers(race: Race) -> None:
    """An expired lease is reset once."""
    await race.first.subscribe()
    for _ in range(3):
        await race.first.publish()
    await race.first.route()
    await race.first.start()
    for lease in await race.first.claim():
        await race.first.expire_lease(lease.job_id)
    async with race.first.daemon.transaction():
        assert len(await attempts.reset_expired(race.first.daemon, 2, max_lease_resets=5)) == 2
        assert len(await race.skips(attempts.reset_expired(race.second.daemon, 9, max_lease_resets=5))) == 1
    assert await attempts.reset_expired(race.second.daemon, 9, max_lease_resets=5) == []
    assert await race.count("select sum(lease_resets) from webhookd.webhook_delivery_jobs") == 3


async def two_requeues(race: Race) -> None:
    """The second requeue waits for the first and returns the saga of the first."""
    await race.first.saga_in(SagaStatus.DEAD_LETTERED)
    dead_letter_id = await race.count("select id from webhookd.dead_letters")
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await race.first.requeue(dead_letter_id)
    task = await race.waits(race.second.requeue(dead_letter_id))
    await transaction.commit()
    assert await task == made._replace(created=False)
    query = "select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null"
    assert await race.count(query) == 1


async def two_requeues_that_both_saw_none(race: Race) -> None:
    """The second one found no saga of the dead letter, and then meets that of the first in both indexes.

    It stops between the two, in the expression of an index that precedes them.
    """
    await race.first.saga_in(SagaStatus.DEAD_LETTERED)
    dead_letter_id = await race.count("select id from webhookd.dead_letters")
    superuser, second_pid = race.first.superuser, race.second.daemon.get_server_pid()
    await superuser.execute(PAUSE_BEFORE_INDEXES)
    await superuser.execute("select pg_advisory_lock(17)")
    await race.second.daemon.execute("set webhookd_test.pause = 'yes'")
    task = asyncio.create_task(race.second.requeue(dead_letter_id))
    await until_blocked(superuser, second_pid, superuser.get_server_pid())
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await race.first.requeue(dead_letter_id)
    await superuser.execute("select pg_advisory_unlock(17)")
    await until_blocked(superuser, second_pid, race.first.daemon.get_server_pid())
    await transaction.commit()
    assert await task == made._replace(created=False)
    query = "select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null"
    assert await race.count(query) == 1


async def two_bulk_requeues(race: Race) -> None:
    """The second bulk requeue counts the sagas of the first as skipped."""
    await race.first.saga_in(SagaStatus.DEAD_LETTERED)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    call = "select requeued from webhookd.requeue_dead_letters(null, null, null, null, 0, 100, false)"
    assert await race.first.daemon.fetchval(call) == 1
    task = await race.waits(race.second.daemon.fetchval(call))
    await transaction.commit()
    assert await task == 0
    query = "select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null"
    assert await race.count(query) == 1


async def two_resends(race: Race) -> None:
    """The second resend waits for the first and returns its saga."""
    saga_id = await race.first.saga_in(SagaStatus.COMPLETED)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await sagas.resend(race.first.daemon, saga_id)
    task = await race.waits(sagas.resend(race.second.daemon, saga_id))
    await transaction.commit()
    assert await task == made._replace(created=False)
    assert await race.count("select count(*) from webhookd.webhook_delivery_sagas") == 2


async def two_replays(race: Race) -> None:
    """The second replay waits for the sagas of the first and creates none."""
    await race.first.publish()
    await race.first.route()
    subscription_id = await race.first.subscribe()
    now = await race.first.daemon.fetchval("select clock_timestamp()")
    what = router.Replay(subscription_id, now - timedelta(days=1), now, None, False, now)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await router.replay(race.first.daemon, what, 0, 100, dry_run=False)
    task = await race.waits(router.replay(race.second.daemon, what, 0, 100, dry_run=False))
    await transaction.commit()
    await task
    assert await race.count("select count(*) from webhookd.webhook_delivery_sagas") == 1


async def retry_during_a_result(race: Race) -> None:
    """A retry waits for the result that is being applied, and is refused if it finished the delivery."""
    saga_id = await race.first.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await race.first.claim()
    report = attempts.Report(lease.job_id, lease.lease_token, 200)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await sagas.complete(race.first.daemon, [report])
    task = await race.waits(sagas.retry(race.second.daemon, saga_id))
    await transaction.commit()
    with pytest.raises(asyncpg.PostgresError, check=lambda error: error.sqlstate == "WH415"):
        await task


async def result_applied_by_two_orchestrators(race: Race) -> None:
    """A result counts one attempt, even if both orchestrators see it."""
    await race.first.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await race.first.claim()
    await race.first.report(lease, 500)
    async with race.first.daemon.transaction():
        [applied] = await race.first.apply()
        assert applied.status is SagaStatus.PENDING_RETRY
        assert await race.skips(race.second.apply()) == []
    await race.first.start()  # InProgress again, with another attempt: the old result must not count for it
    assert await race.second.apply() == []
    assert await race.count("select attempt_count from webhookd.webhook_delivery_sagas") == 1


async def stale_lease_holder(race: Race) -> None:
    """A worker that lost its lease can neither finish nor release the attempt of the new holder."""
    await race.first.saga_in(SagaStatus.IN_PROGRESS)
    [lost] = await race.first.claim(worker_id="first")
    await race.first.expire_lease(lost.job_id)
    await attempts.reset_expired(race.second.daemon, 9, max_lease_resets=5)
    [held] = await race.second.claim(worker_id="second")
    assert held.job_id == lost.job_id
    assert await race.first.report(lost) is ReportVerdict.STALE
    assert await attempts.release(race.first.daemon, [lost]) == []
    assert await race.first.job_status(held.job_id) is AttemptStatus.LEASED
    assert await race.second.report(held) is ReportVerdict.ACCEPTED


async def reset_during_a_report(race: Race) -> None:
    """A report that meets the reset of its lease waits and is refused."""
    await race.first.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await race.second.claim()
    await race.first.expire_lease(lease.job_id)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await attempts.reset_expired(race.first.daemon, 9, max_lease_resets=5)
    task = await race.waits(race.second.report(lease))
    await transaction.commit()
    assert await task is ReportVerdict.STALE
    assert await race.first.job_status(lease.job_id) is AttemptStatus.PENDING


async def report_during_a_reset(race: Race) -> None:
    """The reaper skips an attempt whose report is being stored: the token decides, not the clock."""
    await race.first.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await race.first.claim()
    await race.first.expire_lease(lease.job_id)
    async with race.first.daemon.transaction():
        assert await race.first.report(lease) is ReportVerdict.ACCEPTED
        assert await race.skips(attempts.reset_expired(race.second.daemon, 9, max_lease_resets=5)) == []
    assert await race.first.job_status(lease.job_id) is AttemptStatus.COMPLETED


async def same_report_twice(race: Race) -> None:
    """A report sent again before the first commits waits, and is recognised as a duplicate."""
    await race.first.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await race.first.claim()
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert await race.first.report(lease, 200) is ReportVerdict.ACCEPTED
    task = await race.waits(race.second.report(lease, 500))
    await transaction.commit()
    assert await task is ReportVerdict.DUPLICATE
    assert await race.first.job_status(lease.job_id) is AttemptStatus.COMPLETED


async def two_orchestrators_and_a_failing_endpoint(race: Race) -> None:
    """Failures that both count add up: the second waits for the count of the first."""
    await race.first.subscribe()
    for _ in range(4):
        await race.first.publish()
    await race.first.route()
    await race.first.start()
    for lease in await race.first.claim():
        await race.first.report(lease, 500)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.apply(batch_size=2)
    task = await race.waits(sagas.apply_results(race.second.daemon, 2, POLICY, 4))
    await transaction.commit()
    await task
    query = "select consecutive_failures from webhookd.endpoint_health where failing_since is not null"
    assert await race.count(query) == 4


TOKEN_CHECK = "and j.lease_token = g.lease_token"
ON_REQUEUED = "on conflict do nothing"
ON_RESENT = (
    "on conflict (resent_from) where resent_from is not null and status in "
    "('Pending', 'InProgress', 'PendingRetry') do nothing"
)
ON_ROUTED = "on conflict (event_id, subscription_id) where resent_from is null do nothing"

# Each race, and the guards without which it must fail.
RACES: dict[Callable[[Race], Awaitable[None]], list[Weakened | Dropped]] = {
    two_routers: [Weakened("route_events", SKIP_LOCKED)],
    event_routed_by_two_routers: [
        Dropped("uniq_saga_event_subscription", ON_ROUTED, ("route_events", "webhookd_test_route")),
    ],
    two_orchestrators: [
        Weakened(
            "start_due_sagas", "from orchestration_turn for update skip locked", "from orchestration_turn"
        ),
    ],
    start_during_a_sweep: [Weakened("start_due_sagas", SKIP_LOCKED)],
    sweep_during_a_start: [Weakened("dead_letter_exhausted", SKIP_LOCKED)],
    two_claimers: [Weakened("claim_jobs", SKIP_LOCKED), Weakened("claim_jobs", "for update skip locked")],
    two_probes: [
        Weakened("choose_jobs", "for update skip locked);", ");"),
        Weakened("choose_jobs", "when r.subscription_id = any(probe_ids) then 1 else 0", "else 1"),
    ],
    two_reapers: [Weakened("reset_expired_leases", SKIP_LOCKED)],
    two_requeues: [Dropped("uniq_saga_dead_letter", ON_REQUEUED, ("requeue_dead_letter",))],
    two_requeues_that_both_saw_none: [
        Weakened(
            "requeue_dead_letter",
            ON_REQUEUED,
            "on conflict (dead_letter_id) where dead_letter_id is not null do nothing",
        ),
    ],
    two_bulk_requeues: [Dropped("uniq_saga_dead_letter", ON_REQUEUED, ("requeue_dead_letters",))],
    two_resends: [Dropped("uniq_saga_resend", ON_RESENT, ("resend_delivery",))],
    two_replays: [Dropped("uniq_saga_event_subscription", ON_ROUTED, ("replay_events", "route_events"))],
    retry_during_a_result: [Weakened("retry_delivery", "for no key update of s")],
    result_applied_by_two_orchestrators: [
        Weakened("apply_results", SKIP_LOCKED),
        Weakened("apply_results", "and j.result_applied_at is null"),
    ],
    stale_lease_holder: [Weakened("report_results", TOKEN_CHECK), Weakened("release_jobs", TOKEN_CHECK)],
    reset_during_a_report: [Weakened("report_results", TOKEN_CHECK)],
    report_during_a_reset: [Weakened("reset_expired_leases", SKIP_LOCKED)],
    same_report_twice: [Weakened("report_results", "and j.status <> all('{Completed,Failed}')")],
    two_orchestrators_and_a_failing_endpoint: [
        Weakened(
            "settle_results",
            "when excluded.last_recovery_at is null then h.consecutive_failures",
            "when false then 0",
        ),
    ],
}
LOSSES = [
    pytest.param(run, guard, id=f"{run.__name__}: {guard}")
    for run, guards in RACES.items()
    for guard in guards
]


@pytest.fixture(autouse=True)
async def second_route(request: pytest.FixtureRequest, race: Race) -> None:
    """Make the insert of route_events callable for an event that has left the queue."""
    if request.node.callspec.params["run"] is not event_routed_by_two_routers:
        return  # DDL costs the next test a new copy of the database
    await race.first.superuser.execute(
        f"""
        create function webhookd_test_route(event_id bigint) returns void language sql security definer as $$
            insert into webhookd.webhook_delivery_sagas (event_id, subscription_id)
            select event_id, id from webhookd.subscriptions {ON_ROUTED}
        $$
        """
    )


@pytest.mark.parametrize("run", RACES, ids=lambda run: run.__name__)
async def test_race_leaves_the_result_of_one_instance(
    race: Race, run: Callable[[Race], Awaitable[None]]
) -> None:
    """Two instances at once leave and report the result of one instance."""
    await run(race)


@pytest.mark.parametrize(("run", "guard"), first_in_gate(LOSSES))
async def test_race_fails_without_its_guard(
    race: Race, run: Callable[[Race], Awaitable[None]], guard: Weakened | Dropped
) -> None:
    """The test above depends on each of its guards."""
    await guard.take_away(race.first.superuser)
    with pytest.raises((AssertionError, asyncpg.PostgresError)) as lost:
        await run(race)
    if isinstance(lost.value, asyncpg.PostgresError):
        # Refused by a second guard, not because the weakened function is invalid SQL.
        assert str(lost.value.sqlstate)[:2] in {"WH", "23"}
