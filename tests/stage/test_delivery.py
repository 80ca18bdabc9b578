"""The worker and its reporter, at the moments when the database fails them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.stage.conftest import Parts, running
from tests.support.database import Database
from tests.support.flow import LARGE, Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, finished, until
from webhookd.core.errors import DatabaseFault, DatabaseUnavailable
from webhookd.core.settings import DeliverySettings, ServicesSettings, Settings
from webhookd.db.connection import Connection
from webhookd.deliveries import attempts as jobs
from webhookd.deliveries.reaper import Reaper
from webhookd.deliveries.reporter import Finished, Reporter
from webhookd.deliveries.worker import Worker
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls

LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"
FAILED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Failed'"


def reporter_of(parts: Parts) -> Reporter:
    """A reporter of this process."""
    return Reporter(parts.context)


def worker_of(parts: Parts, client: GuardedClient, reporter: Reporter) -> Worker:
    """A worker of this process."""
    return Worker(parts.context, client, reporter)


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

        async def lost(*_: object) -> list[jobs.Message]:
            raise DatabaseUnavailable("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(jobs, "load", lost)
            with pytest.raises(DatabaseUnavailable):
                await worker.run()
        assert await flow.daemon.fetchval(LEASED) == 6
        await worker.drain(CONDITION_TIMEOUT_SECONDS)
        assert await flow.daemon.fetchval(LEASED) == 0


async def test_a_drain_waits_for_requests_that_are_not_begun_yet(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim's requests are begun a few at a time; SIGTERM comes when one of forty is."""
    await jobs_of(flow, 40, "{}")
    begin_further, go_on = Worker._send_rest, asyncio.Event()

    async def held(*arguments: Any) -> None:
        await go_on.wait()
        await begin_further(*arguments)

    monkeypatch.setattr("webhookd.deliveries.worker.STARTED_AT_ONCE", 1)
    monkeypatch.setattr(Worker, "_send_rest", held)
    reporter = reporter_of(parts)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter)
        await worker.run_once()
        async with running(reporter.run):
            draining = asyncio.create_task(worker.drain(CONDITION_TIMEOUT_SECONDS))
            await until(flow.daemon, f"select ({FAILED}) = 1")
            assert not await finished(draining)
            go_on.set()
            await draining
    assert await flow.daemon.fetchval(FAILED) == 40
    assert worker.in_flight == 0


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
            await worker.drain(CONDITION_TIMEOUT_SECONDS)
    assert worker.in_flight == 0


async def test_leases_that_come_too_late_are_handed_back_and_not_claimed_at_once(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that the database was long about: nothing is sent, and the next is not made before the poll."""
    parts.settings = Settings(services=ServicesSettings(poll_interval_seconds=3600))
    await jobs_of(flow, 6, "{}")
    monkeypatch.setattr("webhookd.deliveries.worker.is_too_late", lambda *_: True)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        began = asyncio.get_running_loop().time()
        await worker.run_once()
        await until(flow.daemon, f"select ({LEASED}) = 0")
        assert await worker.run_once() >= began + parts.settings.services.poll_interval_seconds
    assert worker.in_flight == 0


@pytest.mark.parametrize("error", [DatabaseUnavailable("cut off"), ValueError("another version's row")])
@pytest.mark.parametrize("loaded", [False, True], ids=["not loaded", "loaded, and not given back"])
async def test_leases_are_loaded_again_and_sent_once(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch, error: Exception, loaded: bool
) -> None:
    """Whatever fails between claim and sending: each job is sent, none of them twice, and no slot is lost."""
    await jobs_of(flow, 6)
    load, failures = jobs.load, iter([error])

    async def lost(*arguments: Any) -> list[jobs.Message]:
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
            await worker.drain(CONDITION_TIMEOUT_SECONDS)
    assert next(failures, None) is None
    assert parts.metrics.attempts.labels("ADDRESS_BLOCKED")._value.get() == 6
    assert worker.in_flight == 0


async def test_what_cannot_be_read_spoils_it_for_nobody_else(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One damaged row among those of a claim: its attempt fails as our own fault, the others are made."""
    await jobs_of(flow, 6)
    damaged = await flow.daemon.fetchval("select min(id) from webhookd.webhook_delivery_jobs")
    load = jobs.load

    async def refused(connection: Connection, leases: list[jobs.Lease]) -> list[jobs.Message]:
        if any(lease.job_id == damaged for lease in leases):
            raise DatabaseFault("XX001: missing chunk number 0 for toast value")
        return await load(connection, leases)

    monkeypatch.setattr(jobs, "load", refused)
    reporter = reporter_of(parts)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter)
        async with running(worker.run), running(reporter.run):
            await until(flow.daemon, f"select ({FAILED}) = 6")
            await worker.drain(CONDITION_TIMEOUT_SECONDS)
    codes = await flow.daemon.fetch(
        "select error_code, array_agg(id) as ids from webhookd.webhook_delivery_jobs group by 1 order by 1"
    )
    assert [(row["error_code"], len(row["ids"])) for row in codes] == [
        ("ADDRESS_BLOCKED", 5),
        ("INTERNAL", 1),
    ]
    assert codes[1]["ids"] == [damaged]
    assert worker.in_flight == 0


async def test_a_claim_is_made_when_a_load_has_ended(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads are the most: when one ends the next claim begins, and does not wait for the other's end."""
    parts.settings = Settings(
        delivery=DeliverySettings(concurrency=40, subscription_concurrency=40),
        services=ServicesSettings(poll_interval_seconds=600),
    )
    await jobs_of(flow, 40)
    load, ends = jobs.load, [asyncio.Event() for _ in range(3)]
    begun = asyncio.Queue[int]()

    async def held(*arguments: Any) -> list[jobs.Message]:
        number = held.count  # type: ignore[attr-defined]
        held.count += 1  # type: ignore[attr-defined]
        begun.put_nowait(number)
        await ends[number].wait()
        return await load(*arguments)

    held.count = 0  # type: ignore[attr-defined]

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(jobs, "load", held)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        monkeypatch.setattr(client, "post", hang)
        worker = worker_of(parts, client, reporter_of(parts))
        async with running(worker.run), asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            assert [await begun.get(), await begun.get()] == [0, 1]
            ends[0].set()
            assert await begun.get() == 2


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
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies behind the mark of this worker, which has claimed later ones since: no poll is waited for."""
    monkeypatch.setattr("webhookd.deliveries.pacing.SEARCH_REST_FACTOR", 0)
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
        assert await Reaper(parts.context).run_once() == 1
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
