"""Stages rest after a small batch unless results are urgent; requests start a few at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType

import pytest

from tests.stage.conftest import Parts, running
from tests.stage.test_delivery import reporter_of, start_attempts, worker_of
from tests.stage.test_orchestration import applier_of, calls_of, starter_of
from tests.support.flow import Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, finished, until, until_true
from webhookd.core.settings import OrchestrationSettings, ServicesSettings, Settings
from webhookd.deliveries import applier as applier_module
from webhookd.deliveries import attempts
from webhookd.deliveries import reporter as reporter_module
from webhookd.deliveries import starter as starter_module
from webhookd.deliveries import worker as worker_module
from webhookd.deliveries.reporter import Finished
from webhookd.deliveries.worker import Worker
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.wakeups import Work

LONG_SECONDS = 3600.0
# Many more than a stage needs for one piece of work.
ROUND_TRIPS = 100
LONG = ServicesSettings(poll_interval_seconds=LONG_SECONDS)
STARTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs"
REPORTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs where finished_at is not null"
COMPLETED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"
LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"


class Stage:
    """A running stage whose rests last as long as the test, and how to give it one piece of work."""

    def __init__(self, done: str, give: Callable[[], Awaitable[None]]) -> None:
        self.done = done
        self.give = give


@contextlib.asynccontextmanager
async def starter(flow: Flow, parts: Parts, _: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Run a starter; its work is a due delivery."""
    subscription_id = await flow.subscribe()

    async def give() -> None:
        await flow.publish()
        await flow.route()
        parts.wakeups.wake(Work.SAGAS, [subscription_id], notify=True)

    async with running(starter_of(parts).run):
        yield Stage(STARTED, give)


@contextlib.asynccontextmanager
async def reporter(flow: Flow, parts: Parts, _: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Run a reporter; its work is an outcome."""
    await flow.subscribe()
    reports = reporter_of(parts)

    async def give() -> None:
        await flow.publish()
        await flow.route()
        await flow.start()
        [lease] = await flow.claim()
        reports.put(Finished(lease, attempts.Report(lease.job_id, lease.lease_token, 200)))

    async with running(reports.run):
        yield Stage(REPORTED, give)


@contextlib.asynccontextmanager
async def applier(flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Run an applier; its work is a reported result."""
    await flow.subscribe()
    searches = calls_of(monkeypatch, "apply_results")

    async def give() -> None:
        await flow.publish()
        await flow.route()
        await flow.start()
        [lease] = await flow.claim()
        await flow.report(lease)
        parts.wakeups.wake(Work.RESULTS, [lease.job_id], notify=True)

    async with running(applier_of(parts).run):
        # The first search finds nothing, so no rest follows it.
        await until_true(lambda: searches.ended == 1)
        yield Stage(COMPLETED, give)


STAGES = [(starter, starter_module), (reporter, reporter_module), (applier, applier_module)]


@pytest.mark.parametrize(("stage", "module"), STAGES, ids=["starter", "reporter", "applier"])
@pytest.mark.parametrize("results_are_urgent", [False, True])
async def test_stage_rests_after_a_small_batch_unless_results_are_urgent(
    flow: Flow,
    parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    stage: Callable[[Flow, Parts, pytest.MonkeyPatch], contextlib.AbstractAsyncContextManager[Stage]],
    module: ModuleType,
    *,
    results_are_urgent: bool,
) -> None:
    """Work that arrives during an endless rest is done only if results are urgent."""
    parts.settings = Settings(services=LONG)
    monkeypatch.setattr(module, "rest_seconds", lambda done, _: LONG_SECONDS if done else 0.0)
    # As the other stages of the process would set it.
    kind = type(parts.wakeups)
    monkeypatch.setattr(kind, "results_are_urgent", property(lambda _: results_are_urgent))
    async with stage(flow, parts, monkeypatch) as running_stage:
        await running_stage.give()
        await until(flow.superuser, running_stage.done, 1)
        await running_stage.give()
        if results_are_urgent:
            await until(flow.superuser, running_stage.done, 2)
        for _ in range(ROUND_TRIPS):
            assert await flow.superuser.fetchval(running_stage.done, 2) == results_are_urgent


async def test_shutdown_ends_the_reporters_rest(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcomes that arrived during the rest are reported before the process ends."""
    monkeypatch.setattr(reporter_module, "rest_seconds", lambda *_: LONG_SECONDS)
    await flow.subscribe()
    for _ in range(2):
        await flow.publish()
    await flow.route()
    await flow.start()
    first, second = await flow.claim()
    reports = reporter_of(parts)
    async with running(reports.run):
        reports.put(Finished(first, attempts.Report(first.job_id, first.lease_token, 200)))
        await until(flow.daemon, REPORTED, 1)
        reports.put(Finished(second, attempts.Report(second.job_id, second.lease_token, 200)))
        await asyncio.wait_for(reports.drained(), CONDITION_TIMEOUT_SECONDS)
    assert await flow.daemon.fetchval(REPORTED, 2)


async def test_results_are_urgent_while_a_full_window_holds_deliveries_up(flow: Flow, parts: Parts) -> None:
    """Also after a batch for another subscription, and until nothing more is due."""
    parts.settings = Settings(orchestration=OrchestrationSettings(subscription_window=4))
    full, other = await flow.subscribe("full"), await flow.subscribe("other")
    starts = starter_of(parts)

    async def tick(event_type: str, subscription_id: int, events: int) -> None:
        for _ in range(events):
            await flow.publish(event_type)
        await flow.route()
        parts.wakeups.wake(Work.SAGAS, [subscription_id])
        await starts.run_once()

    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        reports = reporter_of(parts)
        worker = worker_of(parts, client, reports)
        await tick("full", full, 6)
        assert not parts.wakeups.results_are_urgent, "no slot is free yet"
        leases = await flow.claim()
        await worker.run_once()
        assert parts.wakeups.results_are_urgent
        await tick("other", other, 1)
        assert parts.wakeups.results_are_urgent
        for lease in leases:
            await flow.report(lease)
        await flow.apply()
        await tick("full", full, 0)
        assert not parts.wakeups.results_are_urgent, "the window has room for the last two"


async def test_requests_start_a_few_at_a_time(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them the event loop reads the answers of the database."""
    monkeypatch.setattr(worker_module, "STARTED_AT_ONCE", 2)
    await start_attempts(flow, 7, "{}")
    started: list[int] = []
    send = Worker._send

    def recorded(self: Worker, readable: list[object], asked_at: float) -> None:
        started.append(len(readable))
        send(self, readable, asked_at)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "_send", recorded)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        turns: list[int] = []
        claiming = asyncio.create_task(worker.run_once())
        while not claiming.done() or sum(started) < 7:
            before = sum(started)
            await asyncio.sleep(0)
            turns.append(sum(started) - before)
        await worker.drain(0)
    assert started == [2, 2, 2, 1]
    assert max(turns) == 2


async def test_third_claim_waits_until_requests_of_the_first_two_have_started(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases are running, so no more are taken until some are sent, and then at once."""
    monkeypatch.setattr(worker_module, "STARTED_AT_ONCE", 1)
    monkeypatch.setattr(worker_module, "MAX_CLAIM", 2)
    await start_attempts(flow, 6, "{}")
    send_rest, go_on = Worker._send_rest, asyncio.Event()

    async def held(*arguments: object) -> None:
        await go_on.wait()
        await send_rest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "_send_rest", held)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        for claimed in (2, 4, 4):
            next_claim_at = await worker.run_once()
            assert await flow.daemon.fetchval(LEASED) == claimed
        assert next_claim_at == float("inf")
        woken = asyncio.create_task(parts.wakeups.inbox(Work.ATTEMPTS).wait(LONG_SECONDS))
        assert not await finished(woken)
        go_on.set()
        await woken
        await worker.run_once()
        assert await flow.daemon.fetchval(LEASED) == 6
        await worker.drain(0)
