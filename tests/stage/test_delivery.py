"""The worker and its reporter, at the moments when the database fails them."""

import pytest

from tests.stage.conftest import Parts, running
from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.waiting import until
from webhookd.delivery.reporter import Finished, Reporter
from webhookd.delivery.worker import Worker
from webhookd.model.errors import DatabaseUnavailable
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.store import jobs

LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"


def reporter_of(parts: Parts) -> Reporter:
    """A reporter of this process."""
    return Reporter(parts.pool, parts.bells, parts.hints, parts.metrics)


async def jobs_of(flow: Flow, count: int) -> None:
    """So many jobs to be claimed."""
    await flow.subscribe()
    for _ in range(count):
        await flow.publish()
    await flow.route()
    await flow.start()


async def test_leases_that_were_not_loaded_are_handed_back_by_the_drain(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between claim and payloads, and then comes SIGTERM."""
    await jobs_of(flow, 6)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = Worker(
            parts.pool,
            parts.bells,
            client,
            reporter_of(parts),
            parts.metrics,
            parts.current,
            worker_id="worker",
        )

        async def lost(*_: object) -> list[jobs.Delivery]:
            raise DatabaseUnavailable("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(jobs, "load", lost)
            with pytest.raises(DatabaseUnavailable):
                await worker.run()
        assert await flow.daemon.fetchval(LEASED) == 6
        await worker.drain(5)
        assert await flow.daemon.fetchval(LEASED) == 0


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
