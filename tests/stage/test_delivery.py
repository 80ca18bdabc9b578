"""The worker and its reporter when the database fails between claim, load, send and report."""

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
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection
from webhookd.deliveries import attempts
from webhookd.deliveries.reaper import Reaper
from webhookd.deliveries.reporter import Finished, Reporter
from webhookd.deliveries.worker import Worker
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls

LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"
FAILED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Failed'"


def reporter_of(parts: Parts) -> Reporter:
    """Return a reporter of this process."""
    return Reporter(parts.context)


def worker_of(parts: Parts, client: GuardedClient, reporter: Reporter) -> Worker:
    """Return a worker of this process."""
    return Worker(parts.context, client, reporter)


async def start_attempts(flow: Flow, count: int, payload: str = LARGE) -> None:
    """Create attempts for a blocked address: they fail, and nothing is sent."""
    await flow.subscribe(callback_url="https://127.0.0.1/")
    for _ in range(count):
        await flow.publish(payload=payload)
    await flow.route()
    await flow.start()


async def test_drain_releases_leases_whose_messages_were_not_loaded(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost between claim and load, then SIGTERM arrives."""
    await start_attempts(flow, 6)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))

        async def lost(*_: object) -> list[attempts.Message]:
            raise DatabaseUnavailable("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(attempts, "load", lost)
            with pytest.raises(DatabaseUnavailable):
                await worker.run()
        assert await flow.daemon.fetchval(LEASED) == 6
        await worker.drain(CONDITION_TIMEOUT_SECONDS)
        assert await flow.daemon.fetchval(LEASED) == 0


async def test_drain_waits_for_requests_that_have_not_started(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests start a few at a time; SIGTERM arrives when one of forty has started."""
    await start_attempts(flow, 40, "{}")
    send_rest, go_on = Worker._send_rest, asyncio.Event()

    async def held(*arguments: Any) -> None:
        await go_on.wait()
        await send_rest(*arguments)

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


async def test_small_message_needs_no_load(flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with its lease, so the load function is never called."""
    await start_attempts(flow, 6, "{}")
    monkeypatch.delattr(attempts, "load")
    reporter = reporter_of(parts)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter)
        async with running(worker.run), running(reporter.run):
            await until(flow.daemon, f"select ({FAILED}) = 6")
            await worker.drain(CONDITION_TIMEOUT_SECONDS)
    assert worker.in_flight == 0


async def test_leases_too_close_to_their_end_are_released_and_not_claimed_again_at_once(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a slow claim nothing is sent, and the next claim waits for the poll interval."""
    parts.settings = Settings(services=ServicesSettings(poll_interval_seconds=3600))
    await start_attempts(flow, 6, "{}")
    monkeypatch.setattr("webhookd.deliveries.worker.is_too_late", lambda *_: True)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        began = asyncio.get_running_loop().time()
        await worker.run_once()
        await until(flow.daemon, f"select ({LEASED}) = 0")
        assert await worker.run_once() >= began + parts.settings.services.poll_interval_seconds
    assert worker.in_flight == 0


async def test_process_suspended_between_claim_and_send_sends_nothing(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is checked again right before sending; leases, slots and payload memory are released."""
    await start_attempts(flow, 6, "{}")
    checks = iter([False])
    monkeypatch.setattr("webhookd.deliveries.worker.is_too_late", lambda *_: next(checks, True))
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        monkeypatch.delattr(GuardedClient, "send")
        worker = worker_of(parts, client, reporter_of(parts))
        await worker.run_once()
        await until(flow.daemon, f"select ({LEASED}) = 0")
    assert worker.in_flight == 0
    assert worker._slots._all_payloads == 0


@pytest.mark.parametrize("error", [DatabaseUnavailable("cut off"), ValueError("row of another version")])
@pytest.mark.parametrize("loaded", [False, True], ids=["load fails", "returning the connection fails"])
async def test_failed_load_is_repeated_and_each_attempt_sent_once(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch, error: Exception, loaded: bool
) -> None:
    """Whatever fails between claim and send: each attempt is sent exactly once, and no slot is lost."""
    await start_attempts(flow, 6)
    load, failures = attempts.load, iter([error])

    async def lost(*arguments: Any) -> list[attempts.Message]:
        if not loaded and (failure := next(failures, None)):
            raise failure
        return await load(*arguments)

    @contextlib.asynccontextmanager
    async def kept() -> AsyncIterator[Any]:
        async with pooled() as connection:
            yield connection
        if loaded and asyncio.current_task() in worker._loading and (failure := next(failures, None)):
            raise failure

    monkeypatch.setattr(attempts, "load", lost)
    pooled = parts.pool.connection
    monkeypatch.setattr(parts.pool, "connection", kept)
    reporter = reporter_of(parts)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter)
        async with running(worker.run), running(reporter.run):
            await until(flow.daemon, f"select ({FAILED}) = 6")
            await worker.drain(CONDITION_TIMEOUT_SECONDS)
    assert next(failures, None) is None
    blocked = {"outcome": "ADDRESS_BLOCKED"}
    assert parts.metrics.registry.get_sample_value("webhookd_delivery_attempts_total", blocked) == 6
    assert worker.in_flight == 0


async def test_unreadable_row_fails_only_its_own_attempt(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One damaged row in a claim: its attempt fails with INTERNAL, the others are sent."""
    await start_attempts(flow, 6)
    damaged = await flow.daemon.fetchval("select min(id) from webhookd.webhook_delivery_jobs")
    load = attempts.load

    async def refused(connection: Connection, leases: list[attempts.Lease]) -> list[attempts.Message]:
        if any(lease.job_id == damaged for lease in leases):
            raise DatabaseFault("XX001: missing chunk number 0 for toast value")
        return await load(connection, leases)

    monkeypatch.setattr(attempts, "load", refused)
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


async def test_next_claim_starts_when_one_of_two_loads_ends(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two loads run; when one ends, the next claim does not wait for the other."""
    parts.settings = Settings(
        delivery=DeliverySettings(concurrency=40, subscription_concurrency=40),
        services=ServicesSettings(poll_interval_seconds=600),
    )
    await start_attempts(flow, 40)
    load, ends = attempts.load, [asyncio.Event() for _ in range(3)]
    started = asyncio.Queue[int]()

    async def held(*arguments: Any) -> list[attempts.Message]:
        number = held.count  # type: ignore[attr-defined]
        held.count += 1  # type: ignore[attr-defined]
        started.put_nowait(number)
        await ends[number].wait()
        return await load(*arguments)

    held.count = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(attempts, "load", held)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        monkeypatch.setattr(client, "send", lambda *_: object())  # never ends
        worker = worker_of(parts, client, reporter_of(parts))
        async with running(worker.run), asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            assert [await started.get(), await started.get()] == [0, 1]
            ends[0].set()
            assert await started.get() == 2
        for end in ends:
            end.set()
        await asyncio.wait(worker._loading)


async def test_reports_survive_a_failover(flow: Flow, parts: Parts, database: Database) -> None:
    """While no host matches target_session_attrs, reports are kept and then sent."""
    await start_attempts(flow, 6)
    leases = await flow.claim()
    dsn = database.dsn("daemon")
    pool = parts.pool._pool
    assert pool is not None
    await pool.expire_connections()
    pool.set_connect_args(f"{dsn}{'&' if '?' in dsn else '?'}target_session_attrs=standby")
    reporter = reporter_of(parts)
    for lease in leases:
        reporter.put(Finished(lease, attempts.Report(lease.job_id, lease.lease_token, 200)))
    with pytest.raises(DatabaseUnavailable):
        await reporter.run()
    assert not parts.pool.available
    assert len(reporter._waiting) == 6
    pool.set_connect_args(dsn)
    async with running(reporter.run):
        await until(flow.daemon, f"select ({LEASED}) = 0")


async def test_reset_attempt_is_claimed_at_once_after_the_reapers_wake_up(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies before the worker's mark, which has claimed later attempts since; no poll interval passes."""
    monkeypatch.setattr("webhookd.deliveries.pacing.SEARCH_REST_FACTOR", 0)
    parts.settings = Settings(services=ServicesSettings(poll_interval_seconds=3600))
    await start_attempts(flow, 2)
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


async def test_temporary_fault_loses_no_report(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXECUTE is revoked and granted again in the middle of a batch: every result is stored."""
    await start_attempts(flow, 20)
    reporter = reporter_of(parts)
    for lease in await flow.claim():
        reporter.put(Finished(lease, attempts.Report(lease.job_id, lease.lease_token, 500)))
    right = "execute on function webhookd.report_results"
    await flow.superuser.execute(f"revoke {right} from webhookd_app")
    report, calls = attempts.report, 0

    async def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 12:
            await flow.superuser.execute(f"grant {right} to webhookd_app")
        return await report(*arguments)

    monkeypatch.setattr(attempts, "report", counted)
    async with running(reporter.run):
        await reporter.drained()
    assert calls > 12
    assert await flow.daemon.fetchval(LEASED) == 0


async def test_success_is_stored_in_two_steps_if_one_call_fails(flow: Flow, parts: Parts) -> None:
    """Without complete_deliveries, successes are recorded, and applied by the applier."""
    await start_attempts(flow, 3)
    reporter = reporter_of(parts)
    await flow.superuser.execute("revoke execute on function webhookd.complete_deliveries from webhookd_app")
    for lease in await flow.claim():
        reporter.put(Finished(lease, attempts.Report(lease.job_id, lease.lease_token, 200)))
    async with running(reporter.run):
        await reporter.drained()
    assert await flow.daemon.fetchval(LEASED) == 0
    applied = await flow.apply()
    assert [transition.status for transition in applied] == [SagaStatus.COMPLETED] * 3
