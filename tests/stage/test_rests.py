"""A stage rests after a call that did little, unless somebody waits for the room that the next one makes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType

import pytest

from tests.stage.conftest import Parts, running
from tests.stage.test_delivery import jobs_of, reporter_of, worker_of
from tests.stage.test_orchestration import applier_of, calls_of, starter_of
from tests.support.flow import Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, finished, until, until_true
from webhookd.core.settings import OrchestrationSettings, ServicesSettings, Settings
from webhookd.deliveries import applier as applying
from webhookd.deliveries import attempts as jobs
from webhookd.deliveries import reporter as reporter_module
from webhookd.deliveries import starter as starting
from webhookd.deliveries import worker as worker_module
from webhookd.deliveries.reporter import Finished
from webhookd.deliveries.worker import Worker
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.wakeups import Work

LONG_SECONDS = 3600.0
# Many times as many as a stage needs for one piece of work.
ROUND_TRIPS = 100
LONG = ServicesSettings(poll_interval_seconds=LONG_SECONDS)
STARTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs"
REPORTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs where finished_at is not null"
COMPLETED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"
LEASED = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"


class Stage:
    """One that runs, its rests after little as long as a test; and how it is given one piece of work."""

    def __init__(self, done: str, give: Callable[[], Awaitable[None]]) -> None:
        self.done = done
        self.give = give


@contextlib.asynccontextmanager
async def starter(flow: Flow, parts: Parts, _: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Sagas that are due, to jobs."""
    subscription_id = await flow.subscribe()

    async def give() -> None:
        await flow.publish()
        await flow.route()
        parts.wakeups.wake(Work.SAGAS, [subscription_id], cluster=True)

    async with running(starter_of(parts).run):
        yield Stage(STARTED, give)


@contextlib.asynccontextmanager
async def reporter(flow: Flow, parts: Parts, _: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Answers of endpoints, to results."""
    await flow.subscribe()
    reports = reporter_of(parts)

    async def give() -> None:
        await flow.publish()
        await flow.route()
        await flow.start()
        [lease] = await flow.claim()
        reports.put(Finished(lease, jobs.Report(lease.job_id, lease.lease_token, 200)))

    async with running(reports.run):
        yield Stage(REPORTED, give)


@contextlib.asynccontextmanager
async def applier(flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Results, to sagas that have ended."""
    await flow.subscribe()
    looks = calls_of(monkeypatch, "apply_results")

    async def give() -> None:
        await flow.publish()
        await flow.route()
        await flow.start()
        [lease] = await flow.claim()
        await flow.report(lease)
        parts.wakeups.wake(Work.RESULTS, [lease.job_id], cluster=True)

    async with running(applier_of(parts).run):
        # It applies what it finds, and does not rest after it.
        await until_true(lambda: looks.ended == 1)
        yield Stage(COMPLETED, give)


STAGES = [(starter, starting), (reporter, reporter_module), (applier, applying)]


@pytest.mark.parametrize(("stage", "module"), STAGES, ids=["starter", "reporter", "applier"])
@pytest.mark.parametrize("results_are_urgent", [False, True])
async def test_a_stage_rests_after_little_unless_room_is_short(
    flow: Flow,
    parts: Parts,
    monkeypatch: pytest.MonkeyPatch,
    stage: Callable[[Flow, Parts, pytest.MonkeyPatch], contextlib.AbstractAsyncContextManager[Stage]],
    module: ModuleType,
    *,
    results_are_urgent: bool,
) -> None:
    """A second piece of work comes during a rest that has no end: it is done only where nobody may rest."""
    parts.settings = Settings(services=LONG)
    monkeypatch.setattr(module, "rest_seconds", lambda done, _: LONG_SECONDS if done else 0.0)
    # As the other stages of the process would say.
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


async def test_a_rest_of_reports_ends_with_the_shutdown(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was answered while it rested is reported before the process ends."""
    monkeypatch.setattr(reporter_module, "rest_seconds", lambda *_: LONG_SECONDS)
    await flow.subscribe()
    for _ in range(2):
        await flow.publish()
    await flow.route()
    await flow.start()
    first, second = await flow.claim()
    reports = reporter_of(parts)
    async with running(reports.run):
        reports.put(Finished(first, jobs.Report(first.job_id, first.lease_token, 200)))
        await until(flow.daemon, REPORTED, 1)
        reports.put(Finished(second, jobs.Report(second.job_id, second.lease_token, 200)))
        await asyncio.wait_for(reports.drained(), CONDITION_TIMEOUT_SECONDS)
    assert await flow.daemon.fetchval(REPORTED, 2)


async def test_room_is_short_as_long_as_somebody_waits_for_it(flow: Flow, parts: Parts) -> None:
    """A window is full and a slot is free: also after a tick for somebody else, and until no more is due."""
    parts.settings = Settings(orchestration=OrchestrationSettings(subscription_window=4))
    crowded, other = await flow.subscribe("crowded"), await flow.subscribe("other")
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
        await tick("crowded", crowded, 6)
        assert not parts.wakeups.results_are_urgent, "nobody has a free slot yet"
        leases = await flow.claim()
        await worker.run_once()
        assert parts.wakeups.results_are_urgent
        await tick("other", other, 1)
        assert parts.wakeups.results_are_urgent
        for lease in leases:
            await flow.report(lease)
        await flow.apply()
        await tick("crowded", crowded, 0)
        assert not parts.wakeups.results_are_urgent, "the last two have room"


async def test_requests_are_begun_a_few_at_a_time(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one turn of the loop no more than some, so that the database is heard between them."""
    monkeypatch.setattr(worker_module, "STARTED_AT_ONCE", 2)
    await jobs_of(flow, 7, "{}")
    begun: list[int] = []
    send = Worker._send

    def noted(self: Worker, readable: list[object], asked_at: float) -> None:
        begun.append(len(readable))
        send(self, readable, asked_at)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "_send", noted)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        turns: list[int] = []
        claiming = asyncio.create_task(worker.run_once())
        while not claiming.done() or sum(begun) < 7:
            before = sum(begun)
            await asyncio.sleep(0)
            turns.append(sum(begun) - before)
        await worker.drain(0)
    assert begun == [2, 2, 2, 1]
    assert max(turns) == 2


async def test_two_claims_whose_requests_are_not_begun_hold_up_a_third(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases run: no more are taken until some of them are sent, and then at once."""
    monkeypatch.setattr(worker_module, "STARTED_AT_ONCE", 1)
    monkeypatch.setattr(worker_module, "MAX_CLAIM", 2)
    await jobs_of(flow, 6, "{}")
    begin_further, go_on = Worker._send_rest, asyncio.Event()

    async def held(*arguments: object) -> None:
        await go_on.wait()
        await begin_further(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "_send_rest", held)
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        worker = worker_of(parts, client, reporter_of(parts))
        for claimed in (2, 4, 4):
            come_again_at = await worker.run_once()
            assert await flow.daemon.fetchval(LEASED) == claimed
        assert come_again_at == float("inf")
        rung = asyncio.create_task(parts.wakeups.inbox(Work.ATTEMPTS).wait(LONG_SECONDS))
        assert not await finished(rung)
        go_on.set()
        await rung
        await worker.run_once()
        assert await flow.daemon.fetchval(LEASED) == 6
        await worker.drain(0)
