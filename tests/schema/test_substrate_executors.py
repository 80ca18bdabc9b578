"""Twenty executors, and death among them: every job ends once, none is lost, no two hold one lease."""

import asyncio
import os
import random
from dataclasses import dataclass, field

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.substrate import ACTOR, EXECUTOR, KIND, Answer, Substrate
from tests.support.waiting import POLL_INTERVAL_SECONDS

EXECUTORS = 20
# Few enough for every test run; `make executors` takes 10,000.
JOBS = int(os.environ.get("WEBHOOKD_TEST_JOBS", "500"))
# How many of a hundred leases end with their holder's death, before it reports or while it does.
DEATHS_PERCENT = 10
SEED = 4


@dataclass
class Crew:
    """Who works, and what they were told."""

    database: Database
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))  # noqa: S311  no secret
    tokens: list[str] = field(default_factory=list)
    told_succeeded: list[str] = field(default_factory=list)
    deaths: int = 0

    async def work(self, name: str) -> None:
        """Claim and report until nothing is open; who dies comes back with another connection."""
        superuser = await self.database.connect("superuser")
        executor = Substrate(await self.database.connect("executor"), superuser)
        keeper = Substrate(superuser, superuser)
        while True:
            lease = await executor.try_claim(holder=name)
            if lease["refused"]:
                # What the daemon's service does: recover what the dead held.
                await keeper.reap()
                health = await keeper.call("fn_job_queue_health")
                if health["backlog"] + health["in_progress"] + health["retry_waiting"] == 0:
                    return
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
                continue
            self.tokens.append(lease["lease_token"])
            if self.chance.randrange(100) < DEATHS_PERCENT:
                await self.die(executor, lease)
                executor = Substrate(await self.database.connect("executor"), superuser)
            elif (await executor.succeed(lease))["refused"] is False:
                self.told_succeeded.append(lease["job_id"])

    async def die(self, executor: Substrate, lease: Answer) -> None:
        """Lose the connection, every second time with a report on its way; then the lease's time passes."""
        self.deaths += 1
        report = asyncio.create_task(executor.succeed(lease)) if self.deaths % 2 else None
        await executor.superuser.execute("select pg_terminate_backend($1)", executor.daemon.get_server_pid())
        if report is not None:
            [outcome] = await asyncio.gather(report, return_exceptions=True)
            # asyncpg is in no state to say it better when the goodbye comes before the question.
            lost = (dict, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
            assert isinstance(outcome, lost), outcome
        await executor.superuser.execute(
            "update webhookd.job_queue set leased_until = now() - interval '1 second' "
            "where job_id = $1 and lease_token = $2 and status in ('leased', 'in_progress')",
            lease["job_id"],
            lease["lease_token"],
        )


@pytest.mark.once
async def test_twenty_executors_and_death_among_them(database: Database) -> None:
    """Each job succeeds once, whoever died with it; the ledger has no gap and no second holder."""
    substrate = await Substrate.open(database)
    await substrate.configure(KIND, max_lease_recoveries=1000)
    await substrate.daemon.execute(
        "select webhookd.fn_job_enqueue($1, 'key-' || i, $2, p_actor => $3) "
        "from generate_series(1, $4::int) i",
        KIND,
        EXECUTOR,
        ACTOR,
        JOBS,
    )
    crew = Crew(database)
    await asyncio.gather(*(crew.work(f"executor-{number}") for number in range(EXECUTORS)))

    statuses = await substrate.daemon.fetch("select status, count(*) from webhookd.job_queue group by status")
    assert [tuple(row) for row in statuses] == [("succeeded", JOBS)]
    assert crew.deaths > JOBS * DEATHS_PERCENT // 200
    assert len(set(crew.tokens)) == len(crew.tokens)
    # A success that was told is one job's; one that was not told was its holder's last word.
    assert len(set(crew.told_succeeded)) == len(crew.told_succeeded)
    assert JOBS - crew.deaths <= len(crew.told_succeeded) <= JOBS

    broken = await substrate.daemon.fetch(
        """
        select * from (
            select r.*, lag(r.to_status) over (partition by r.job_id order by r.run_id) as before
            from webhookd.job_command_run r) r
        where r.from_status is distinct from r.before
        """
    )
    assert broken == []
    told = "select count(*), count(distinct payload ->> 'job_id') from webhookd.events where event_type = $1"
    for event_type in ("dot.job.enqueued", "dot.job.succeeded"):
        assert tuple(await substrate.daemon.fetchrow(told, event_type) or ()) == (JOBS, JOBS)
    claims = "select count(*) from webhookd.job_command_run where to_status = 'leased'"
    assert await substrate.daemon.fetchval(claims) == len(crew.tokens)
