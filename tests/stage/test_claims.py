"""Waiting claims of one instance: their limit, and the cost of waiting."""

import asyncio

import pytest

from tests.stage.conftest import CountingPool, Parts
from tests.support.database import Database
from tests.support.job_queue import JobQueue
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true
from webhookd.core.settings import ServicesSettings, Settings
from webhookd.http import routes
from webhookd.http.responses import Problem
from webhookd.http.routes import QueryRunner
from webhookd.jobqueue import leases
from webhookd.jobqueue.fields import Executor
from webhookd.jobqueue.leases import ClaimResult, WaitingClaims
from webhookd.jobqueue.requests import ClaimJob
from webhookd.jobqueue.results import ClaimedJob
from webhookd.wakeups import Work

NEVER_POLLS = Settings(services=ServicesSettings(poll_interval_seconds=3600))
WANTED = ClaimJob("report.build", Executor.DOT, "holder", wait_seconds=3600)


async def claim(claims: WaitingClaims) -> ClaimResult:
    """One executor that waits for a job and does not disconnect."""
    return await claims.claim(WANTED, "test", lambda: False)


@pytest.mark.once
async def test_only_the_first_waiter_queries_the_database(
    database: Database, counted: CountingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up costs one claim and a job two, for ten waiters. An eleventh gets 503. close() ends all."""
    queue = await JobQueue.open(database)
    parts = Parts(counted, settings=NEVER_POLLS)
    claims = WaitingClaims(parts.context, QueryRunner(counted))
    monkeypatch.setattr(leases, "MAX_WAITING", 10)
    monkeypatch.setattr(routes, "QUERY_TIMEOUT_SECONDS", CONDITION_TIMEOUT_SECONDS)
    waiting = [asyncio.create_task(claim(claims)) for _ in range(10)]
    # Each waiter claims once before it waits; the first waiter may claim again before the last has started.
    await until_true(lambda: claims.waiting == 10)
    await counted.used(11)
    with pytest.raises(Problem) as refused:
        await claim(claims)
    assert (refused.value.status, refused.value.code) == (503, "unavailable")
    parts.wakeups.wake(Work.EVENTS, search=True)
    await counted.used(13)
    job_id = await queue.enqueue()
    parts.wakeups.wake(Work.EVENTS, search=True)
    await counted.used(15)  # the waiter that gets the job, and the next one
    [done], left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    claimed = done.result()
    assert isinstance(claimed, ClaimedJob)
    assert str(claimed.job_id) == str(job_id)
    assert len(left) == 9
    claims.close()
    assert await asyncio.gather(*left) == [None] * 9
    assert counted.uses == 15
