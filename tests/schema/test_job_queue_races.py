"""Races between two executors, enqueuers or reapers, with two connections.

Each race keeps one transaction open until the other session is seen to skip or to wait. It runs on the real
functions, and again without each guard that it relies on, when it must fail.
"""

from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.guards import Weakened
from tests.support.job_queue import ACTOR, Answer, JobQueue, Status
from tests.support.nightly import first_in_gate
from tests.support.races import Contest


class Race(Contest[JobQueue]):
    """Two executors on one database."""


@pytest.fixture
async def race(database: Database) -> Race:
    """Both sides of a race."""
    return Race(await JobQueue.open(database), await JobQueue.open(database))


async def leases_of_one_workflow(race: Race, number: int) -> tuple[str, list[Answer]]:
    """A workflow and this many leased jobs of it."""
    workflow_id = await race.first.open_workflow()
    for _ in range(number):
        await race.first.enqueue(p_workflow_id=workflow_id)
    return workflow_id, [await race.first.claim() for _ in range(number)]


async def two_claimers(race: Race) -> None:
    """The second claim skips the job of the first, and finds nothing after the last job."""
    ids = [await race.first.enqueue() for _ in range(2)]
    async with race.first.daemon.transaction():
        mine = await race.first.claim(holder="first")
        theirs = await race.skips(race.second.claim(holder="second"))
        nothing = await race.skips(race.second.try_claim())
    assert [mine["job_id"], theirs["job_id"]] == ids
    assert mine["lease_token"] != theirs["lease_token"]
    assert nothing["reason"] == "nothing_to_claim"


async def two_claimers_of_scheduled_jobs(race: Race) -> None:
    """Each claim gets another scheduled job that became due, and finds nothing after the last job."""
    ids = [await race.first.enqueue() for _ in range(2)]
    await race.first.superuser.execute("update webhookd.job_queue set scheduled = true")
    async with race.first.daemon.transaction():
        mine = await race.first.claim()
        theirs = await race.skips(race.second.claim())
        nothing = await race.skips(race.second.try_claim())
    assert {mine["job_id"], theirs["job_id"]} == set(ids)
    assert nothing["reason"] == "nothing_to_claim"


async def two_enqueuers_of_one_key(race: Race) -> None:
    """The second waits for the first and gets its job."""
    transaction = race.first.daemon.transaction()
    await transaction.start()
    job_id = await race.first.enqueue("once")
    task = await race.waits(race.second.try_enqueue("once"))
    await transaction.commit()
    answer = await task
    assert (answer["duplicate"], answer["job_id"]) == (True, job_id)


async def two_jobs_of_a_workflow_end(race: Race) -> None:
    """The second to commit sees both ends: the workflow is not left active."""
    workflow_id, [one, other] = await leases_of_one_workflow(race, 2)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.succeed(one)
    assert await race.first.workflow_status(workflow_id) == "active"
    task = await race.waits(race.second.succeed(other))
    await transaction.commit()
    await task
    assert await race.first.workflow_status(workflow_id) == "succeeded"


async def a_workflow_ends_and_grows(race: Race) -> None:
    """A job added while the last one ends makes the workflow active again."""
    workflow_id, [last] = await leases_of_one_workflow(race, 1)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.succeed(last)
    assert await race.first.workflow_status(workflow_id) == "succeeded"
    task = await race.waits(race.second.enqueue("added", p_workflow_id=workflow_id))
    await transaction.commit()
    await task
    assert await race.first.workflow_status(workflow_id) == "active"


async def a_workflow_grows_and_ends(race: Race) -> None:
    """A workflow stays active if a job is added while its last job ends."""
    workflow_id, [last] = await leases_of_one_workflow(race, 1)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.enqueue("added", p_workflow_id=workflow_id)
    task = await race.waits(race.second.succeed(last))
    await transaction.commit()
    await task
    assert await race.first.workflow_status(workflow_id) == "active"


async def a_recovery_while_reporting(race: Race) -> None:
    """A report during the recovery of its lease waits for it and is refused."""
    job_id = await race.first.enqueue()
    lease = await race.second.claim()
    await race.first.expire(job_id)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert (await race.first.reap())["recovered"] == 1
    task = await race.waits(race.second.succeed(lease))
    await transaction.commit()
    assert (await task)["reason"] == "stale_lease"
    assert await race.first.status(job_id) is Status.QUEUED


async def a_report_while_recovering(race: Race) -> None:
    """The reaper skips a job whose report is not committed yet."""
    job_id = await race.first.enqueue()
    lease = await race.first.claim()
    await race.first.expire(job_id)
    async with race.first.daemon.transaction():
        assert (await race.first.succeed(lease))["status"] == "succeeded"
        assert (await race.skips(race.second.reap()))["recovered"] == 0
    assert await race.first.status(job_id) is Status.SUCCEEDED


async def two_reapers(race: Race) -> None:
    """Only one of them recovers the lease, promotes the retry and applies the deadline."""
    lost = await race.first.job_in(Status.LEASED)
    await race.first.expire(lost)
    await race.first.job_in(Status.RETRY_WAITING)
    await race.first.make_retries_due()
    late = await race.first.job_in(Status.QUEUED)
    await race.first.let_deadline_pass(late)
    async with race.first.daemon.transaction():
        done = await race.first.reap()
        assert (done["recovered"], done["promoted"], done["cancelled"]) == (1, 1, 1)
        left = await race.skips(race.second.reap())
        assert (left["recovered"], left["promoted"], left["cancelled"]) == (0, 0, 0)


async def a_step_is_added_while_reaping(race: Race) -> None:
    """The reaper does not wait for a locked workflow: it skips its late job and does the rest."""
    workflow_id = await race.first.open_workflow()
    late = await race.first.enqueue("late", p_workflow_id=workflow_id)
    await race.first.let_deadline_pass(late)
    lost = await race.first.job_in(Status.LEASED)
    await race.first.expire(lost)
    async with race.first.daemon.transaction():
        await race.first.enqueue("next", p_workflow_id=workflow_id)
        reaped = await race.skips(race.second.reap())
        assert (reaped["recovered"], reaped["cancelled"]) == (1, 0)
    assert (await race.second.reap())["cancelled"] == 1


async def a_held_workflow_has_more_late_jobs_than_a_batch(race: Race) -> None:
    """The reaper skips them and handles the jobs behind them in the same call."""
    workflow_id = await race.first.open_workflow()
    await race.first.configure("report.build", max_lease_recoveries=0, max_attempts=1)
    for relatives in ({"p_workflow_id": workflow_id}, {}):
        await race.first.enqueue(**relatives)
        await race.first.expire((await race.first.claim())["job_id"])
        late = await race.first.enqueue(**relatives)
        await race.first.let_deadline_pass(late)
    async with race.first.daemon.transaction():
        await race.first.enqueue("next", p_workflow_id=workflow_id)
        reaped = await race.skips(race.second.reap(1))
        assert (reaped["cancelled"], reaped["dead_lettered"]) == (1, 1)
        assert await race.second.status(late) is Status.CANCELLED


async def a_step_is_added_and_reported_while_reaping(race: Race) -> None:
    """Adding a step and reporting in one transaction causes no deadlock with the reaper."""
    workflow_id = await race.first.open_workflow()
    await race.first.enqueue(p_workflow_id=workflow_id)
    await race.first.configure("report.build", max_lease_recoveries=0)
    lease = await race.first.claim()
    await race.first.expire(lease["job_id"])
    async with race.first.daemon.transaction():
        await race.first.enqueue("next", p_workflow_id=workflow_id)
        reaped = await race.skips(race.second.reap())
        assert (reaped["retry_waiting"], reaped["dead_lettered"]) == (0, 0)
        assert (await race.first.succeed(lease))["status"] == "succeeded"


async def a_requeue_and_a_cancel(race: Race) -> None:
    """Cancelling a dead letter during its requeue returns the new job."""
    dead = await race.first.job_in(Status.DEAD_LETTER)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await race.first.requeue(dead)
    task = await race.waits(race.second.cancel(dead))
    await transaction.commit()
    answer = await task
    assert (answer["reason"], answer["job_id"]) == ("already_requeued", made["job_id"])


async def two_requeues(race: Race) -> None:
    """The second waits for the first and returns the job it created."""
    dead = await race.first.job_in(Status.DEAD_LETTER)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await race.first.requeue(dead)
    task = await race.waits(race.second.requeue(dead))
    await transaction.commit()
    answer = await task
    assert (answer["reason"], answer["job_id"]) == ("already_requeued", made["job_id"])


async def a_claim_and_a_cancel(race: Race) -> None:
    """A cancel during a claim waits and is refused as running."""
    job_id = await race.first.enqueue()
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.claim()
    task = await race.waits(race.second.cancel(job_id))
    await transaction.commit()
    assert (await task)["reason"] == "running"


async def the_same_report_twice(race: Race) -> None:
    """A repeated report before the commit of the first waits, and is a duplicate."""
    await race.first.enqueue()
    lease = await race.first.claim()
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.fail(lease)
    task = await race.waits(race.second.fail(lease))
    await transaction.commit()
    answer = await task
    assert (answer["duplicate"], answer["attempts"]) == (True, 1)


async def two_spawners(race: Race) -> None:
    """The second skips the events that the first has taken."""
    await race.first.call(
        "fn_job_register_event", p_event_type="a.b", p_kind="k", p_executor="DOT", p_actor=ACTOR
    )
    for _ in range(3):
        await race.first.daemon.execute("select webhookd.publish('a.b', '{}')")
    async with race.first.daemon.transaction():
        mine = await race.first.call("fn_job_spawn_from_events", p_batch_size=2)
        theirs = await race.skips(race.second.call("fn_job_spawn_from_events"))
    assert (mine["jobs"], theirs["jobs"]) == (2, 1)


SKIP_LOCKED = "skip locked"
LOCKING = Weakened("lock_job", "for no key update")
SKIP_WORKFLOW = Weakened(
    "fn_job_lease_reaper",
    "ending_workflow_ids)\n            for no key update skip locked",
    "ending_workflow_ids)\n            for no key update",
)
REPEAT_ROUNDS = Weakened("fn_job_lease_reaper", "in 1..5 loop", "in 1..1 loop")
REFRESH = "update job_workflow w set revision = w.revision + 1 where w.workflow_id = new.workflow_id;"

# Each race, and the guards without which it must fail.
RACES: dict[Callable[[Race], Awaitable[None]], list[Weakened]] = {
    two_claimers: [Weakened("fn_job_claim", SKIP_LOCKED)],
    two_claimers_of_scheduled_jobs: [
        Weakened(
            "fn_job_claim",
            "d.job_id limit 1 for no key update skip locked",
            "d.job_id limit 1 for no key update",
        )
    ],
    two_enqueuers_of_one_key: [
        Weakened("fn_job_enqueue", "on conflict (job_kind, idempotency_key) do nothing"),
    ],
    two_jobs_of_a_workflow_end: [Weakened("refresh_workflow", REFRESH)],
    a_workflow_ends_and_grows: [Weakened("refresh_workflow", REFRESH)],
    a_workflow_grows_and_ends: [Weakened("refresh_workflow", REFRESH)],
    a_recovery_while_reporting: [
        LOCKING,
        Weakened("lease_refusal", "job.lease_token is distinct from token", "false"),
    ],
    a_report_while_recovering: [Weakened("fn_job_lease_reaper", SKIP_LOCKED)],
    two_reapers: [Weakened("fn_job_lease_reaper", SKIP_LOCKED)],
    a_step_is_added_while_reaping: [SKIP_WORKFLOW],
    a_held_workflow_has_more_late_jobs_than_a_batch: [SKIP_WORKFLOW, REPEAT_ROUNDS],
    a_step_is_added_and_reported_while_reaping: [SKIP_WORKFLOW],
    a_requeue_and_a_cancel: [LOCKING],
    two_requeues: [LOCKING],
    a_claim_and_a_cancel: [LOCKING],
    the_same_report_twice: [LOCKING],
    two_spawners: [Weakened("fn_job_spawn_from_events", SKIP_LOCKED)],
}
UNGUARDED = [
    pytest.param(run, guard, id=f"{run.__name__}: {guard}")
    for run, guards in RACES.items()
    for guard in guards
]


@pytest.mark.parametrize("run", RACES, ids=lambda run: run.__name__)
async def test_race(race: Race, run: Callable[[Race], Awaitable[None]]) -> None:
    """Two concurrent calls leave a correct state and get correct answers."""
    await run(race)


@pytest.mark.once
@pytest.mark.parametrize(("run", "guard"), first_in_gate(UNGUARDED))
async def test_race_fails_without_its_guard(
    race: Race, run: Callable[[Race], Awaitable[None]], guard: Weakened
) -> None:
    """The test above fails without each of its guards."""
    await guard.take_away(race.first.superuser)
    with pytest.raises((AssertionError, asyncpg.PostgresError)) as failure:
        await run(race)
    if isinstance(failure.value, asyncpg.PostgresError):
        # Refused by another guard, and not because the weakened function is invalid SQL.
        assert str(failure.value.sqlstate)[:2] in {"WH", "23"}


async def test_workflow_in_repeatable_read_is_refused(race: Race) -> None:
    """In REPEATABLE READ the second end fails with 40001: its snapshot does not see the first."""
    workflow_id, [one, other] = await leases_of_one_workflow(race, 2)
    transaction = race.second.daemon.transaction(isolation="repeatable_read")
    await transaction.start()
    await race.second.daemon.execute("select from webhookd.job_workflow")
    await race.first.succeed(one)
    with pytest.raises(asyncpg.SerializationError):
        await race.second.succeed(other)
    await transaction.rollback()
    await race.second.succeed(other)
    assert await race.first.workflow_status(workflow_id) == "succeeded"
