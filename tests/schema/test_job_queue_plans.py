"""The pages that the functions read with a long history and a long queue, from the session's counters.

As in test_plans.py, with statistics from before the backlog and with fresh ones.
"""

import os
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import pytest

from tests.support.database import Cluster, Database
from tests.support.history import Touched, copy_database, table_names, vacuum, watch
from tests.support.job_queue import ACTOR, KIND, Answer, JobQueue, Status
from tests.support.postgres import run_apart
from webhookd.db.paging import Row
from webhookd.jobqueue import reads as job_reads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.database import Connection

# Few, so that the test is fast; `make history` uses a million finished and 100,000 waiting jobs.
FINISHED = int(os.environ.get("WEBHOOKD_TEST_HISTORY", "20000"))
WAITING = max(20_000, FINISHED // 10)
# A transition reads one index descent and the row, and writes an entry into each index of queued, held,
# finished or listed jobs. Measured: 41 to 53 blocks of job_queue, with B-trees of three levels.
BLOCKS_PER_TRANSITION = 75
# Transitions per call. A health call makes none, but reads as much.
TRANSITIONS = {
    "fail": 2,
    "fail permanently": 2,
    "reap": 3,
    "requeue": 2,
    "sweep": 5,
    "health": 4,
    "claim, many due": 2,
}
OURS = (
    "ix_job_queue_claim_order",
    "ix_job_queue_scheduled",
    "ix_job_queue_scheduled_due",
    "ix_job_queue_lease_end",
    "ix_job_queue_retry_due",
    "ix_job_queue_deadline",
    "ix_job_queue_retention",
    "ix_job_queue_finished",
)
GROWING_TABLES = ("job_queue", "job_command_run", "events", "job_event_queue", "event_routing_queue")

FINISHED_JOBS = """
    insert into webhookd.job_queue (
        job_kind, event_domain, idempotency_key, executor, status, attempts, last_error_code, last_error_at,
        process_after, enqueued_at, finished_at, enqueued_by, source_system, cleaned_from, cancel_reason)
    select $1, 'general', 'past-' || i, 'DOT', s.status, 1, case when s.status = 'dead_letter' then 'X' end,
           case when s.status = 'dead_letter' then s.at end, s.at, s.at, s.at, 'past', 'past',
           case when s.status = 'cleaned' then 'succeeded' end,
           case when s.status = 'cancelled' then 'past' end
    from (select i, now() - interval '2 days' + i * interval '1 ms' as at,
                 (array['cleaned', 'succeeded', 'cancelled', 'dead_letter'])[1 + i % 4] as status
          from generate_series(1, $2::int) i) s
"""
# Half of the jobs can be claimed; the other half is for next week and has a higher priority.
WAITING_JOBS = """
    insert into webhookd.job_queue (
        job_kind, event_domain, idempotency_key, executor, process_after, scheduled, priority, enqueued_by,
        source_system)
    select $1, 'general', 'waiting-' || i, 'DOT',
           now() + case when i % 2 = 0 then interval '7 days' else '0' end, i % 2 = 0,
           case when i % 2 = 0 then 9 else i % 3 end, 'past', 'past'
    from generate_series(1, $2::int) i
"""
FALL_DUE = "update webhookd.job_queue set process_after = now() where job_kind = $1 and scheduled and $2 = 0"
# Transitions of many jobs, and a week of renewals of one job: each is a ledger row.
PAST_TRANSITIONS = """
    insert into webhookd.job_command_run (job_id, command, from_status, to_status, actor, attempts)
    select gen_random_uuid(), 'fn_job_claim', 'queued', 'leased', $1, 0 from generate_series(1, $2::int)
"""
RENEWALS = """
    insert into webhookd.job_command_run (job_id, command, from_status, to_status, actor, attempts)
    select $1, 'fn_job_progress', 'in_progress', 'in_progress', 'past', 0 from generate_series(1, $2::int)
"""
# To find the four transitions of such a job: one descent of the ledger's index, and their rows.
LEDGER_BLOCKS = 15


async def insert(superuser: "Connection", statement: str, of: str, number: int) -> None:
    """Insert rows without triggers and foreign keys."""
    async with superuser.transaction():
        await superuser.execute("set local session_replication_role = replica")
        await superuser.execute(statement, of, number)


async def write_history(superuser: "Connection") -> None:
    """Insert finished jobs and analyze; autovacuum is off, as it would change the statistics."""
    for table in await table_names(superuser):
        await superuser.execute(f"alter table webhookd.{table} set (autovacuum_enabled = false)")
    await insert(superuser, FINISHED_JOBS, KIND, FINISHED)
    await insert(superuser, PAST_TRANSITIONS, ACTOR, 2 * WAITING)
    await insert(superuser, RENEWALS, str(uuid4()), WAITING)
    await vacuum(superuser)


class Calls:
    """One session that makes every call and records the pages it read."""

    def __init__(self, queue: JobQueue, *, analyzed: bool) -> None:
        self.queue = queue
        self._analyzed = analyzed  # also analyze what is created in between
        self.touched: dict[str, Touched] = {}

    async def watch(self, name: str, function: str, **arguments: object) -> Answer:
        """Make a call and record it."""

        async def call(_: "Connection") -> Answer:
            return await self.queue.call(function, **arguments)

        answer, self.touched[name] = await watch(self.queue.daemon, call)
        return answer

    async def read(self, name: str, read: "Callable[[Connection], Awaitable[Row | None]]") -> Row:
        """Run one of the API's reads and record it."""
        row, self.touched[name] = await watch(self.queue.daemon, read, "repeatable_read")
        assert row is not None
        return row

    async def claim(self, name: str = "claim", kind: str = KIND) -> Answer:
        """Claim the next job."""
        return await self.watch(
            name,
            "fn_job_claim",
            p_kind=kind,
            p_executor="DOT",
            p_lease_name="lease",
            p_lease_holder="me",
            p_lease_ttl_seconds=60,
        )

    async def report(self, name: str, function: str, lease: Answer, **arguments: object) -> None:
        """A report that is accepted."""
        named = {"p_job_id": lease["job_id"], "p_lease_token": lease["lease_token"], "p_actor": ACTOR}
        assert (await self.watch(name, function, **named, **arguments))["refused"] is False

    async def go(self) -> dict[str, Touched]:
        """Make every call; the second round counts, when plans are cached."""
        queue = self.queue
        for round_number in range(2):
            await self.watch(
                "enqueue",
                "fn_job_enqueue",
                p_kind=KIND,
                p_idempotency_key=f"new-{round_number}",
                p_executor="DOT",
                p_actor=ACTOR,
            )
            leases = [await self.claim() for _ in range(4)]
            assert [lease["priority"] for lease in leases] == [2] * 4
            assert (await self.claim("claim, nothing", "unknown"))["reason"] == "nothing_to_claim"
            await self.report("progress", "fn_job_progress", leases[0], p_status_signal_only="half")
            await insert(queue.superuser, RENEWALS, leases[0]["job_id"], WAITING)
            if self._analyzed:
                await queue.superuser.execute("analyze webhookd.job_command_run")
            for name in ("succeed", "succeed again"):
                await self.report(name, "fn_job_succeed", leases[0], p_result_ref="r")
            shown = await self.read("show", partial(job_reads.job, job_id=UUID(leases[0]["job_id"])))
            last = [run["to_status"] for run in shown["runs"][-3:]]
            assert last == ["leased", "in_progress", "succeeded"]
            await self.read("decisions", job_reads.configuration)
            failure = {"p_error_code": "X", "p_error_message": "x"}
            await self.report("fail", "fn_job_fail_transient", leases[1], **failure)
            await self.report("fail permanently", "fn_job_fail_permanent", leases[2], **failure)
            await queue.expire(leases[3]["job_id"])
            await queue.make_retries_due()
            late = await queue.job_in(Status.QUEUED)
            await queue.let_deadline_pass(late)
            done = await self.watch("reap", "fn_job_lease_reaper")
            assert (done["recovered"], done["promoted"], done["cancelled"]) == (1, 1, 1)
            await self.watch("requeue", "fn_job_requeue", p_job_id=leases[2]["job_id"], p_actor=ACTOR)
            await self.watch("sweep", "fn_job_cleanup_sweep", p_batch_size=5)
            await queue.daemon.execute("select webhookd.publish('a.b', '{}')")
            assert (await self.watch("spawn", "fn_job_spawn_from_events"))["jobs"] == 1
            await self.watch("health", "fn_job_queue_health", p_counted_up_to=100)
        # Last, because it changes the queue: all scheduled jobs become due at once.
        await insert(queue.superuser, FALL_DUE, KIND, 0)
        for _ in range(2):
            await self.claim("claim, many due")
        return self.touched


class Laboratory:
    """Runs the calls on databases with stale and fresh statistics, and without our indexes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._observed: Future[dict[str, dict[str, Touched]]] = Future()

    def touched(self) -> dict[str, dict[str, Touched]]:
        """By statistics and call. Runs once, even if it fails."""
        if not self._observed.done():
            try:
                self._observed.set_result(run_apart(self._observe()))
            except Exception as error:
                self._observed.set_exception(error)
        return self._observed.result()

    async def _observe(self) -> dict[str, dict[str, Touched]]:
        database = await self._cluster.create_database(migrated=True)
        superuser = await database.connect("superuser")
        await write_history(superuser)
        await insert(superuser, WAITING_JOBS, KIND, WAITING)
        await database.close()
        known, without = await copy_database(database), await copy_database(database)
        await vacuum(await known.connect("superuser"))
        for index in OURS:
            await (await without.connect("superuser")).execute(f"drop index webhookd.{index}")
        try:
            return {
                "stale": await self._calls(database),
                "fresh": await self._calls(known, analyzed=True),
                "without": await self._calls(without),
            }
        finally:
            for each in (database, known, without):
                await self._cluster.drop_database(each)

    async def _calls(self, database: Database, *, analyzed: bool = False) -> dict[str, Touched]:
        queue = await JobQueue.open(database)
        await queue.call(
            "fn_job_register_event", p_event_type="a.b", p_kind="spawned", p_executor="DOT", p_actor=ACTOR
        )
        await queue.configure(KIND, retention_seconds=0, base_delay_seconds=1)
        return await Calls(queue, analyzed=analyzed).go()


@pytest.fixture(scope="session")
def laboratory(cluster: Cluster) -> Laboratory:
    """One per server: writing the history takes seconds."""
    return Laboratory(cluster)


def test_no_call_scans_a_growing_table(laboratory: Laboratory) -> None:
    """No sequential scan, with stale or fresh statistics."""
    scanned = {
        (statistics, call, table)
        for statistics in ("stale", "fresh")
        for call, touched in laboratory.touched()[statistics].items()
        for table in GROWING_TABLES
        if touched.scans[table]
    }
    assert scanned == set()


def expensive(calls: dict[str, Touched]) -> dict[str, int]:
    """The calls that read more of job_queue than their transitions explain."""
    return {
        call: touched.blocks["job_queue"]
        for call, touched in calls.items()
        if touched.blocks["job_queue"] > BLOCKS_PER_TRANSITION * TRANSITIONS.get(call, 1)
    }


@pytest.mark.parametrize("statistics", ["stale", "fresh"])
def test_every_call_reads_few_pages(laboratory: Laboratory, statistics: str) -> None:
    """Independent of the number of finished, claimable and scheduled jobs."""
    assert expensive(laboratory.touched()[statistics]) == {}


@pytest.mark.parametrize("statistics", ["stale", "fresh"])
@pytest.mark.parametrize("call", ["succeed again", "show", "decisions"])
def test_ledger_reads_skip_renewals(laboratory: Laboratory, statistics: str, call: str) -> None:
    """With a week of renewals, of this job and of another."""
    assert laboratory.touched()[statistics][call].blocks["job_command_run"] <= LEDGER_BLOCKS


def test_dp2_indexes_alone_are_not_enough(laboratory: Laboratory) -> None:
    """Without our indexes, claim, reaper and sweep exceed the bound above."""
    assert set(expensive(laboratory.touched()["without"])) >= {"claim", "reap", "sweep"}
