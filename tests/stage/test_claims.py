"""Who waits for a job at an instance: how many may, and what their waiting costs."""

import asyncio

import pytest

from tests.stage.conftest import CountingPool, Parts
from tests.support.database import Database
from tests.support.substrate import Substrate
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true
from webhookd.core.settings import ServicesSettings, Settings
from webhookd.core.states import Executor
from webhookd.http import query_runner
from webhookd.http.problems import Problem
from webhookd.http.query_runner import QueryRunner
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue.api import claims as job_claims
from webhookd.jobqueue.api.claims import Claims
from webhookd.jobqueue.types import Claim
from webhookd.wakeups import Work

NEVER_POLLS = Settings(services=ServicesSettings(poll_interval_seconds=3600))
KIND = "report.build"


async def waits(claims: Claims) -> job_claims.Claimed:
    """One executor more, which stays."""
    return await claims.claim(
        KIND,
        Executor.DOT,
        lambda connection: job_substrate.claim(connection, KIND, Executor.DOT, KIND, "holder", 60, "test"),
        3600,
        lambda: False,
    )


@pytest.mark.once
async def test_only_the_first_in_line_looks(
    database: Database, counted: CountingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many wait, a ring costs one look, and a job two; one too many is told so; the end tells all."""
    substrate = await Substrate.open(database)
    parts = Parts(counted, settings=NEVER_POLLS)
    claims = Claims(parts.context, QueryRunner(counted))
    monkeypatch.setattr(job_claims, "MAX_WAITING", 10)
    monkeypatch.setattr(query_runner, "QUERY_TIMEOUT_SECONDS", CONDITION_TIMEOUT_SECONDS)
    waiting = [asyncio.create_task(waits(claims)) for _ in range(10)]
    # In line after a look of its own: the first may be at its second before the last has had its first.
    await until_true(lambda: claims.waiting == 10)
    await counted.used(11)
    with pytest.raises(Problem) as refused:
        await waits(claims)
    assert (refused.value.status, refused.value.code) == (503, "unavailable")
    parts.wakeups.wake(Work.EVENTS, search=True)
    await counted.used(13)
    job_id = await substrate.enqueue()
    parts.wakeups.wake(Work.EVENTS, search=True)
    await counted.used(15)  # the one that gets it, and the next in line
    [done], left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    claimed = done.result()
    assert isinstance(claimed, Claim)
    assert str(claimed.job_id) == str(job_id)
    assert len(left) == 9
    claims.close()
    assert await asyncio.gather(*left) == [None] * 9
    assert counted.uses == 15
