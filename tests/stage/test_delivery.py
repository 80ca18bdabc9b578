"""The worker and its reporter, at the moments when the database fails them."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.stage.conftest import Parts, running
from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.waiting import until
from webhookd.config.settings import ServicesSettings, Settings
from webhookd.delivery.reporter import Finished, Reporter
from webhookd.delivery.worker import Worker
from webhookd.model.errors import DatabaseUnavailable
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.reaper.loop import Reaper
from webhookd.store import jobs

LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"
# Too large to come with its lease.
LARGE = f'"{secrets.token_hex(2000)}"'
FAILED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Failed'"


def reporter_of(parts: Parts) -> Reporter:
    """A reporter of this process."""
    return Reporter(parts.pool, parts.bells, parts.hints, parts.metrics, "worker")


def worker_of(parts: Parts, client: GuardedClient, reporter: Reporter) -> Worker:
    """A worker of this process."""
    return Worker(parts.pool, parts.bells, client, reporter, parts.metrics, parts.current, worker_id="worker")


async def jobs_of(flow: Flow, count: int, payload: str = LARGE) -> None:
    """So many jobs to be claimed, to an address that is refused: attempts fail, and nothing is sent."""
    await flow.subscribe(callback_url="https://127.0.0.1/")
    for _ in range(count):
        await flow.publish(payload=payload)
    await flow.route()
    await flow.start()


async def test_leases_that_were_not_loaded_are_handed_back_by_the_drain(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between claim and payloads, and then comes SIGTERM."""
    await jobs_of(flow, 6)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))

        async def lost(*_: object) -> list[jobs.Delivery]:
            raise DatabaseUnavailable("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(jobs, "load", lost)
            with pytest.raises(DatabaseUnavailable):
                await worker.run()
        assert await flow.daemon.fetchval(LEASED) == 6
        await worker.drain(5)
        assert await flow.daemon.fetchval(LEASED) == 0


async def test_what_is_small_is_sent_with_one_statement(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came with its lease: nothing is loaded."""
    await jobs_of(flow, 6, "{}")
    monkeypatch.delattr(jobs, "load")
    reporter = reporter_of(parts)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter)
        async with running(worker.run), running(reporter.run):
            await until(flow.daemon, f"select ({FAILED}) = 6")
            await worker.drain(5)
    assert worker.in_flight == 0


async def test_leases_that_come_too_late_are_handed_back_and_not_claimed_at_once(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that the database was long about: nothing is sent, and the next is not made before the poll."""
    await jobs_of(flow, 6, "{}")
    monkeypatch.setattr("webhookd.delivery.worker.too_late", lambda *_: True)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        began = asyncio.get_running_loop().time()
        await worker.run_once()
        assert await flow.daemon.fetchval(LEASED) == 0
        assert await worker.run_once() >= began + parts.current().services.poll_interval_seconds
    assert worker.in_flight == 0


@pytest.mark.parametrize("error", [DatabaseUnavailable("cut off"), ValueError("another version's row")])
@pytest.mark.parametrize("loaded", [False, True], ids=["not loaded", "loaded, and not given back"])
async def test_leases_are_loaded_again_and_sent_once(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch, error: Exception, loaded: bool
) -> None:
    """Whatever fails between claim and sending: each job is sent, none of them twice, and no slot is lost."""
    await jobs_of(flow, 6)
    load, failures = jobs.load, iter([error])

    async def lost(*arguments: Any) -> list[jobs.Delivery]:
        if not loaded and (failure := next(failures, None)):
            raise failure
        return await load(*arguments)

    @contextlib.asynccontextmanager
    async def kept() -> AsyncIterator[Any]:
        async with pooled() as connection:
            yield connection
        if loaded and asyncio.current_task() in worker._loading and (failure := next(failures, None)):
            raise failure

    monkeypatch.setattr(jobs, "load", lost)
    pooled = parts.pool.connection
    monkeypatch.setattr(parts.pool, "connection", kept)
    reporter = reporter_of(parts)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter)
        async with running(worker.run), running(reporter.run):
            await until(flow.daemon, f"select ({FAILED}) = 6")
            await worker.drain(5)
    assert next(failures, None) is None
    assert parts.metrics.attempts.labels("ADDRESS_BLOCKED")._value.get() == 6
    assert worker.in_flight == 0


async def test_reports_outlive_a_failover(flow: Flow, parts: Parts, database: Database) -> None:
    """For a moment no host is the primary that target_session_attrs asks for: nothing is given up for it."""
    await jobs_of(flow, 6)
    leases = await flow.claim()
    dsn = database.dsn("daemon")
    pool = parts.pool._pool
    assert pool is not None
    await pool.expire_connections()
    pool.set_connect_args(f"{dsn}{'&' if '?' in dsn else '?'}target_session_attrs=standby")
    reporter = reporter_of(parts)
    for lease in leases:
        reporter.put(Finished(lease, jobs.Report(lease.job_id, lease.lease_token, 200)))
    with pytest.raises(DatabaseUnavailable):
        await reporter.run()
    assert not parts.pool.available
    assert reporter.waiting == 6
    pool.set_connect_args(dsn)
    async with running(reporter.run):
        await until(flow.daemon, f"select ({LEASED}) = 0")


async def test_a_job_taken_back_from_the_dead_is_claimed_at_the_reapers_ring(
    flow: Flow, parts: Parts
) -> None:
    """It lies behind the mark of this worker, which has claimed later ones since: no poll is waited for."""
    parts.settings = Settings(services=ServicesSettings(poll_interval_seconds=3600))
    await jobs_of(flow, 2)
    [lost] = await flow.claim(wanted=1)
    reporter = reporter_of(parts)
    async with (
        GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client,
        running(worker_of(parts, client, reporter).run),
        running(reporter.run),
    ):
        await until(flow.daemon, f"select ({FAILED}) = 1")
        await flow.expire_lease(lost.job_id)
        assert await Reaper(parts.pool, parts.bells, parts.metrics, parts.current).run_once() == 1
        await until(flow.daemon, f"select ({FAILED}) = 2")


async def test_a_fault_that_passes_costs_no_report(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right to report is taken away and given again in the middle of a batch: every result is stored."""
    await jobs_of(flow, 20)
    reporter = reporter_of(parts)
    for lease in await flow.claim():
        reporter.put(Finished(lease, jobs.Report(lease.job_id, lease.lease_token, 200)))
    right = "execute on function webhookd.report_results"
    await flow.superuser.execute(f"revoke {right} from webhookd_app")
    report, asked = jobs.report, 0

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 12:
            await flow.superuser.execute(f"grant {right} to webhookd_app")
        return await report(*arguments)

    monkeypatch.setattr(jobs, "report", counted)
    async with running(reporter.run):
        await reporter.drained()
    assert asked > 12
    assert await flow.daemon.fetchval(LEASED) == 0
