"""Twenty executors that die at random: every job succeeds once, and each lease has one holder."""

import asyncio
import os
import random
from dataclasses import dataclass, field

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.job_queue import ACTOR, EXECUTOR, KIND, Answer, JobQueue
from tests.support.waiting import POLL_INTERVAL_SECONDS

EXECUTORS = 20
# Few, so that the test is fast; `make executors` runs 10,000.
JOBS = int(os.environ.get("WEBHOOKD_TEST_JOBS", "500"))
# Percentage of leases whose holder dies before or during its report.
DEATHS_PERCENT = 10
SEED = 4


@dataclass
class Crew:
    """The executors, and the answers they got."""

    database: Database
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))  # noqa: S311  no secret
    tokens: list[str] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)
    deaths: int = 0

    async def work(self, name: str) -> None:
        """Claim and report until no job is open; after a death, continue with a new connection."""
        superuser = await self.database.connect("superuser")
        executor = JobQueue(await self.database.connect("executor"), superuser)
        keeper = JobQueue(superuser, superuser)
        while True:
            lease = await executor.try_claim(holder=name)
            if lease["refused"]:
                # As the `jobs` service does: recover leases of dead executors.
                await keeper.reap()
                health = await keeper.call("fn_job_queue_health")
                if health["backlog"] + health["in_progress"] + health["retry_waiting"] == 0:
                    return
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
                continue
            self.tokens.append(lease["lease_token"])
            if self.chance.randrange(100) < DEATHS_PERCENT:
                await self.die(executor, lease)
                executor = JobQueue(await self.database.connect("executor"), superuser)
            elif (await executor.succeed(lease))["refused"] is False:
                self.confirmed.append(lease["job_id"])

    async def die(self, executor: JobQueue, lease: Answer) -> None:
        """Terminate the connection, every second time during a report; then expire the lease."""
        self.deaths += 1
        report = asyncio.create_task(executor.succeed(lease)) if self.deaths % 2 else None
        await executor.superuser.execute("select pg_terminate_backend($1)", executor.daemon.get_server_pid())
        if report is not None:
            [outcome] = await asyncio.gather(report, return_exceptions=True)
            # asyncpg raises various errors when the connection ends before the query is sent.
            lost = (dict, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
            assert isinstance(outcome, lost), outcome
        await executor.superuser.execute(
            "update webhookd.job_queue set leased_until = now() - interval '1 second' "
            "where job_id = $1 and lease_token = $2 and status in ('leased', 'in_progress')",
            lease["job_id"],
            lease["lease_token"],
        )


@pytest.mark.once
async def test_jobs_survive_dying_executors(database: Database) -> None:
    """Each job succeeds once; the ledger has no gap and no second holder."""
    queue = await JobQueue.open(database)
    await queue.configure(KIND, max_lease_recoveries=1000)
    await queue.daemon.execute(
        "select webhookd.fn_job_enqueue($1, 'key-' || i, $2, p_actor => $3) "
        "from generate_series(1, $4::int) i",
        KIND,
        EXECUTOR,
        ACTOR,
        JOBS,
    )
    crew = Crew(database)
    await asyncio.gather(*(crew.work(f"executor-{number}") for number in range(EXECUTORS)))

    statuses = await queue.daemon.fetch("select status, count(*) from webhookd.job_queue group by status")
    assert [tuple(row) for row in statuses] == [("succeeded", JOBS)]
    assert crew.deaths > JOBS * DEATHS_PERCENT // 200
    assert len(set(crew.tokens)) == len(crew.tokens)
    # Each confirmed success is another job; an unconfirmed one was reported during a death.
    assert len(set(crew.confirmed)) == len(crew.confirmed)
    assert JOBS - crew.deaths <= len(crew.confirmed) <= JOBS

    broken = await queue.daemon.fetch(
        """
        select * from (
            select r.*, lag(r.to_status) over (partition by r.job_id order by r.run_id) as before
            from webhookd.job_command_run r) r
        where r.from_status is distinct from r.before
        """
    )
    assert broken == []
    counts = (
        "select count(*), count(distinct payload ->> 'job_id') from webhookd.events where event_type = $1"
    )
    for event_type in ("dot.job.enqueued", "dot.job.succeeded"):
        assert tuple(await queue.daemon.fetchrow(counts, event_type) or ()) == (JOBS, JOBS)
    claims = "select count(*) from webhookd.job_command_run where to_status = 'leased'"
    assert await queue.daemon.fetchval(claims) == len(crew.tokens)
