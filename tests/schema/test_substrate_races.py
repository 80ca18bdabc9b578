"""Two connections at once on everything that two executors, enqueuers or reapers may do at once.

Each race holds one side's transaction open until the other is seen to skip or to wait. It is run as the
database is; and again without each of the guards it relies on, when it must be lost.
"""

from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.guards import Weakened
from tests.support.nightly import first_in_gate
from tests.support.races import Contest
from tests.support.substrate import ACTOR, Answer, Status, Substrate


class Race(Contest[Substrate]):
    """Two executors on one database."""


@pytest.fixture
async def race(database: Database) -> Race:
    """Give both sides."""
    return Race(await Substrate.open(database), await Substrate.open(database))


async def leases_of_one_workflow(race: Race, number: int) -> tuple[str, list[Answer]]:
    """A workflow, and so many jobs of it in somebody's hands."""
    workflow_id = await race.first.open_workflow()
    for _ in range(number):
        await race.first.enqueue(p_workflow_id=workflow_id)
    return workflow_id, [await race.first.claim() for _ in range(number)]


async def two_claimers(race: Race) -> None:
    """A job that one leases, the other leaves; the last one's loser finds nothing."""
    ids = [await race.first.enqueue() for _ in range(2)]
    async with race.first.daemon.transaction():
        mine = await race.first.claim(holder="first")
        theirs = await race.skips(race.second.claim(holder="second"))
        nothing = await race.skips(race.second.try_claim())
    assert [mine["job_id"], theirs["job_id"]] == ids
    assert mine["lease_token"] != theirs["lease_token"]
    assert nothing["reason"] == "nothing_to_claim"


async def two_claimers_of_what_came_due(race: Race) -> None:
    """Of scheduled jobs that fell due each has its own, and the last one's loser finds nothing."""
    ids = [await race.first.enqueue() for _ in range(2)]
    await race.first.superuser.execute("update webhookd.job_queue set scheduled = true")
    async with race.first.daemon.transaction():
        mine = await race.first.claim()
        theirs = await race.skips(race.second.claim())
        nothing = await race.skips(race.second.try_claim())
    assert {mine["job_id"], theirs["job_id"]} == set(ids)
    assert nothing["reason"] == "nothing_to_claim"


async def two_enqueuers_of_one_key(race: Race) -> None:
    """The second waits for the first, and is told of its job."""
    transaction = race.first.daemon.transaction()
    await transaction.start()
    job_id = await race.first.enqueue("once")
    task = await race.waits(race.second.try_enqueue("once"))
    await transaction.commit()
    answer = await task
    assert (answer["duplicate"], answer["job_id"]) == (True, job_id)


async def two_jobs_of_a_workflow_end(race: Race) -> None:
    """Whoever is last sees both: the workflow is not left active."""
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
    """Work added while the last job ends makes it active again."""
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
    """The last job that ends while work is added was not the last."""
    workflow_id, [last] = await leases_of_one_workflow(race, 1)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.enqueue("added", p_workflow_id=workflow_id)
    task = await race.waits(race.second.succeed(last))
    await transaction.commit()
    await task
    assert await race.first.workflow_status(workflow_id) == "active"


async def a_recovery_while_reporting(race: Race) -> None:
    """A report that meets its lease's recovery waits for it, and is refused."""
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
    """The reaper leaves a job whose report is being stored, and does not wait for it."""
    job_id = await race.first.enqueue()
    lease = await race.first.claim()
    await race.first.expire(job_id)
    async with race.first.daemon.transaction():
        assert (await race.first.succeed(lease))["status"] == "succeeded"
        assert (await race.skips(race.second.reap()))["recovered"] == 0
    assert await race.first.status(job_id) is Status.SUCCEEDED


async def two_reapers(race: Race) -> None:
    """A lease is recovered, a retry promoted and a deadline kept by one of them."""
    lost = await race.first.job_in(Status.LEASED)
    await race.first.expire(lost)
    await race.first.job_in(Status.RETRY_WAITING)
    await race.first.let_retries_fall_due()
    late = await race.first.job_in(Status.QUEUED)
    await race.first.let_deadline_pass(late)
    async with race.first.daemon.transaction():
        done = await race.first.reap()
        assert (done["recovered"], done["promoted"], done["cancelled"]) == (1, 1, 1)
        left = await race.skips(race.second.reap())
        assert (left["recovered"], left["promoted"], left["cancelled"]) == (0, 0, 0)


async def a_step_is_added_while_reaping(race: Race) -> None:
    """A workflow that somebody holds is not waited for: its late job is left, and all else is done."""
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
    """They are looked past: what comes after them is cancelled, and given up, in the same pass."""
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
    """Who adds the next step and then reports, in one transaction, meets no deadlock with the reaper."""
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
    """Who cancels a dead letter that is just requeued is told of the job that goes on."""
    dead = await race.first.job_in(Status.DEAD_LETTER)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await race.first.requeue(dead)
    task = await race.waits(race.second.cancel(dead))
    await transaction.commit()
    answer = await task
    assert (answer["reason"], answer["job_id"]) == ("already_requeued", made["job_id"])


async def two_requeues(race: Race) -> None:
    """The second waits for the first, and is told of the job it made."""
    dead = await race.first.job_in(Status.DEAD_LETTER)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    made = await race.first.requeue(dead)
    task = await race.waits(race.second.requeue(dead))
    await transaction.commit()
    answer = await task
    assert (answer["reason"], answer["job_id"]) == ("already_requeued", made["job_id"])


async def a_claim_and_a_cancel(race: Race) -> None:
    """Who is claimed while somebody cancels it is running."""
    job_id = await race.first.enqueue()
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.claim()
    task = await race.waits(race.second.cancel(job_id))
    await transaction.commit()
    assert (await task)["reason"] == "running"


async def the_same_report_twice(race: Race) -> None:
    """A report sent again while the first is not committed waits for it, and is known as the same."""
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
    """An event that one takes, the other leaves."""
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
LOCKING = Weakened("lock_work", "for no key update")
LEAVING = Weakened(
    "fn_job_lease_reaper",
    "ending_workflow_ids)\n            for no key update skip locked",
    "ending_workflow_ids)\n            for no key update",
)
LOOKING_PAST = Weakened("fn_job_lease_reaper", "in 1..5 loop", "in 1..1 loop")
ASKING = "update job_workflow w set revision = w.revision + 1 where w.workflow_id = new.workflow_id;"

# Each race, and the guards without which it must be lost.
RACES: dict[Callable[[Race], Awaitable[None]], list[Weakened]] = {
    two_claimers: [Weakened("fn_job_claim", SKIP_LOCKED)],
    two_claimers_of_what_came_due: [
        Weakened(
            "fn_job_claim",
            "d.job_id limit 1 for no key update skip locked",
            "d.job_id limit 1 for no key update",
        )
    ],
    two_enqueuers_of_one_key: [
        Weakened("fn_job_enqueue", "on conflict (job_kind, idempotency_key) do nothing"),
    ],
    two_jobs_of_a_workflow_end: [Weakened("ask_workflow", ASKING)],
    a_workflow_ends_and_grows: [Weakened("ask_workflow", ASKING)],
    a_workflow_grows_and_ends: [Weakened("ask_workflow", ASKING)],
    a_recovery_while_reporting: [
        LOCKING,
        Weakened("lease_refusal", "job.lease_token is distinct from token", "false"),
    ],
    a_report_while_recovering: [Weakened("fn_job_lease_reaper", SKIP_LOCKED)],
    two_reapers: [Weakened("fn_job_lease_reaper", SKIP_LOCKED)],
    a_step_is_added_while_reaping: [LEAVING],
    a_held_workflow_has_more_late_jobs_than_a_batch: [LEAVING, LOOKING_PAST],
    a_step_is_added_and_reported_while_reaping: [LEAVING],
    a_requeue_and_a_cancel: [LOCKING],
    two_requeues: [LOCKING],
    a_claim_and_a_cancel: [LOCKING],
    the_same_report_twice: [LOCKING],
    two_spawners: [Weakened("fn_job_spawn_from_events", SKIP_LOCKED)],
}
LOSSES = [
    pytest.param(run, guard, id=f"{run.__name__}: {guard}")
    for run, guards in RACES.items()
    for guard in guards
]


@pytest.mark.parametrize("run", RACES, ids=lambda run: run.__name__)
async def test_a_race_ends_well(race: Race, run: Callable[[Race], Awaitable[None]]) -> None:
    """Two at once leave what one would have left, and say so."""
    await run(race)


@pytest.mark.once
@pytest.mark.parametrize(("run", "guard"), first_in_gate(LOSSES))
async def test_a_race_is_lost_without_its_guard(
    race: Race, run: Callable[[Race], Awaitable[None]], guard: Weakened
) -> None:
    """The test above would fail without the guard it is about."""
    await guard.take_away(race.first.superuser)
    with pytest.raises((AssertionError, asyncpg.PostgresError)) as lost:
        await run(race)
    if isinstance(lost.value, asyncpg.PostgresError):
        # Lost by a second guard's refusal, and not because the weakened function is no SQL any more.
        assert str(lost.value.sqlstate)[:2] in {"WH", "23"}


async def test_an_old_snapshot_settles_no_workflow(race: Race) -> None:
    """In REPEATABLE READ the second to end is told to try again: it could not have seen the first."""
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
