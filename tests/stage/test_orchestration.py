"""The orchestrator's loops: whom they find when another process rings, and by which limit it sweeps."""

from dataclasses import dataclass, replace

import pytest

from tests.flow.test_lifecycle import publish_many
from tests.stage.conftest import Parts, running
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until, until_true
from webhookd.core.settings import OrchestrationSettings, RetrySettings, ServicesSettings, Settings
from webhookd.deliveries import sagas, subscriptions
from webhookd.deliveries import starter as starting
from webhookd.deliveries.applier import Applier
from webhookd.deliveries.limit_sweeper import LimitSweeper
from webhookd.deliveries.starter import Starter
from webhookd.wakeups import Work

LONG = ServicesSettings(poll_interval_seconds=3600)
STARTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs"
COMPLETED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"


def starter_of(parts: Parts) -> Starter:
    """One of this process."""
    return Starter(parts.context)


def applier_of(parts: Parts) -> Applier:
    """One of this process."""
    return Applier(parts.context)


def will_notify(parts: Parts, work: Work) -> bool:
    """Whether other processes will get a NOTIFY for this work, now or later."""
    return work in parts.wakeups._to_notify or work in parts.wakeups._notify_timers


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search rests for ten times as long as the last took."""
    monkeypatch.setattr(starting, "SEARCH_REST_FACTOR", 0)


@dataclass
class Calls:
    """How many calls of a function have ended."""

    ended: int = 0


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    """Count the calls of one of the store's functions, which goes on doing what it does."""
    calls = Calls()
    real = getattr(sagas, name)

    async def counted(*arguments: object) -> object:
        result = await real(*arguments)
        calls.ended += 1
        return result

    monkeypatch.setattr(sagas, name, counted)
    return calls


@pytest.mark.usefixtures("restless")
async def test_sagas_of_another_process_are_looked_for(flow: Flow, parts: Parts) -> None:
    """Its ring does not say whose they are, and nothing here knows."""
    parts.settings = Settings(services=LONG)
    await flow.subscribe()
    async with running(starter_of(parts).run):
        for count in (1, 2, 3):
            await flow.publish()
            await flow.route()
            parts.wakeups.received(Work.SAGAS)
            await until(flow.daemon, STARTED, count)


@pytest.mark.usefixtures("restless")
async def test_a_hint_does_not_hide_what_another_process_routed(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ring at one moment: of ours it is known whose they are, the other's are looked for."""
    parts.settings = Settings(services=LONG)
    ours, _ = await flow.subscribe("ours"), await flow.subscribe("theirs")
    looks = calls_of(monkeypatch, "due_subscriptions")
    async with running(starter_of(parts).run):
        await until_true(lambda: looks.ended == 1)
        for count in (2, 4):
            await flow.publish("ours")
            await flow.publish("theirs")
            await flow.route()
            parts.wakeups.wake(Work.SAGAS, [ours], cluster=True)
            parts.wakeups.wake(Work.SAGAS, search=True)
            await until(flow.daemon, STARTED, count)


async def test_more_results_than_a_batch_are_applied_at_one_ring(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reported them: nobody waits for the next look with the rest."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(batch_size=5))
    await flow.subscribe()
    await publish_many(flow, 40, [EVENT_TYPE])
    await flow.route()
    await flow.start()
    leases = await flow.claim()
    looks = calls_of(monkeypatch, "apply_results")
    async with running(applier_of(parts).run):
        await until_true(lambda: looks.ended == 1)
        for lease in leases:
            await flow.report(lease, 200)
        parts.wakeups.wake(Work.RESULTS, search=True)
        await until(flow.daemon, COMPLETED, len(leases))


async def test_a_result_makes_room_for_the_next(flow: Flow, parts: Parts) -> None:
    """A window of one: the starter hears of a result applied beside it, and no poll is waited for."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(subscription_window=1))
    await flow.subscribe()
    await publish_many(flow, 3, [EVENT_TYPE])
    await flow.route()
    async with running(starter_of(parts).run), running(applier_of(parts).run):
        for count in (1, 2, 3):
            await until(flow.daemon, STARTED, count)
            [lease] = await flow.claim()
            await flow.report(lease, 200)
            parts.wakeups.wake(Work.RESULTS, [lease.job_id], cluster=True)
        await until(flow.daemon, COMPLETED, 3)


async def test_who_was_only_dead_lettered_has_its_next_turn(flow: Flow, parts: Parts) -> None:
    """A subscription's limit is lowered: what waits ends share by share, and then a fresh one starts."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(subscription_window=5))
    subscription_id = await flow.subscribe()
    await publish_many(flow, 20, [EVENT_TYPE])
    await flow.route()
    await flow.start()
    for lease in await flow.claim():
        await flow.report(lease, 500)
    await flow.apply(failing_after=1000)
    await subscriptions.update(flow.daemon, subscription_id, {"max_attempts": 1})
    await flow.publish()
    await flow.route()
    async with running(starter_of(parts).run):
        await until(flow.daemon, "select count(*) = 20 from webhookd.dead_letters")
        await until(flow.daemon, STARTED, 21)


async def test_a_turn_that_was_lost_is_waited_for(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another orchestrator makes jobs at that moment: ours comes back when it has ended, not by polling."""
    parts.settings = Settings(services=LONG)
    subscription_id = await flow.subscribe()
    looks, starts = calls_of(monkeypatch, "due_subscriptions"), calls_of(monkeypatch, "start")
    async with running(starter_of(parts).run):
        await until_true(lambda: looks.ended == 1)
        await flow.publish()
        await flow.route()
        async with flow.superuser.transaction():
            await flow.superuser.execute("select from webhookd.orchestration_turn for update")
            parts.wakeups.wake(Work.SAGAS, [subscription_id], cluster=True)
            # It has asked more than once, and got nothing.
            await until_true(lambda: starts.ended > 1)
        await until(flow.daemon, STARTED, 1)


async def test_a_limit_put_back_ends_the_sweep(flow: Flow, parts: Parts) -> None:
    """Lowered by mistake and raised again: what the sweep has not reached yet goes on being retried."""
    await flow.subscribe()
    await publish_many(flow, 20, [EVENT_TYPE])
    await flow.route()
    for _ in range(3):
        await flow.start()
        for lease in await flow.claim():
            await flow.report(lease, 500)
        await flow.apply(failing_after=1000)
    limits = iter([3])

    def current() -> Settings:
        retry = RetrySettings(max_attempts=next(limits, 5))
        return Settings(orchestration=OrchestrationSettings(batch_size=5), retry=retry)

    assert await LimitSweeper(replace(parts.context, settings=current)).sweep() == 5


async def test_results_that_are_too_many_for_one_are_announced(parts: Parts) -> None:
    """Other instances will hear of them while there is more in hand than a batch, and not after."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(batch_size=2))
    applier = applier_of(parts)
    with applier._inbox:
        parts.wakeups.wake(Work.RESULTS, [1, 2, 3], cluster=True)
        await applier.run_once()
        assert will_notify(parts, Work.RESULTS)
        await applier.run_once()
        assert not will_notify(parts, Work.RESULTS)


async def test_sagas_that_are_too_many_for_one_tick_are_announced(flow: Flow, parts: Parts) -> None:
    """Other instances hear of subscriptions that had no turn, and of none while all have theirs."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(batch_size=1))
    ids = [await flow.subscribe(f"type{number}") for number in range(2)]
    starter = starter_of(parts)
    with starter._inbox:
        parts.wakeups.wake(Work.SAGAS, ids[:1], cluster=True)
        await starter.run_once()
        assert not will_notify(parts, Work.SAGAS)
        parts.wakeups.wake(Work.SAGAS, ids, cluster=True)
        await starter.run_once()
        assert will_notify(parts, Work.SAGAS)
