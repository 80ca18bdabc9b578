"""The loops of starter, applier and limit sweeper: wake-ups, windows, locks and notifications."""

from dataclasses import dataclass, replace

import pytest

from tests.flow.test_lifecycle import publish_many
from tests.stage.conftest import Parts, running
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until, until_true
from webhookd import wakeups as wakeups_module
from webhookd.core.settings import OrchestrationSettings, RetrySettings, ServicesSettings, Settings
from webhookd.deliveries import attempts, sagas, subscriptions
from webhookd.deliveries import starter as starter_module
from webhookd.deliveries.applier import Applier, LimitSweeper
from webhookd.deliveries.reporter import Finished, Reporter
from webhookd.deliveries.starter import Starter
from webhookd.wakeups import Work

LONG = ServicesSettings(poll_interval_seconds=3600)
STARTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs"
COMPLETED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"


def starter_of(parts: Parts) -> Starter:
    """Return a stage of this process."""
    return Starter(parts.context)


def applier_of(parts: Parts) -> Applier:
    """Return a stage of this process."""
    return Applier(parts.context)


def will_notify(parts: Parts, work: Work) -> bool:
    """Whether other processes will get a NOTIFY for this work, now or later."""
    return work in parts.wakeups._to_notify or work in parts.wakeups._notify_timers


@pytest.fixture
def no_search_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches follow each other without a rest."""
    monkeypatch.setattr(starter_module, "SEARCH_REST_FACTOR", 0)


@dataclass
class Calls:
    """Counts finished calls of a function."""

    ended: int = 0


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    """Count the calls of a query function, which still runs."""
    calls = Calls()
    real = getattr(sagas, name)

    async def counted(*arguments: object) -> object:
        result = await real(*arguments)
        calls.ended += 1
        return result

    monkeypatch.setattr(sagas, name, counted)
    return calls


@pytest.mark.usefixtures("no_search_rest")
async def test_notify_makes_the_starter_search(flow: Flow, parts: Parts) -> None:
    """A NOTIFY from another process names no subscription."""
    parts.settings = Settings(services=LONG)
    await flow.subscribe()
    async with running(starter_of(parts).run):
        for count in (1, 2, 3):
            await flow.publish()
            await flow.route()
            parts.wakeups.received(Work.SAGAS)
            await until(flow.daemon, STARTED, count)


@pytest.mark.usefixtures("no_search_rest")
async def test_ids_do_not_hide_deliveries_routed_elsewhere(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up with ids and one without arrive together: both subscriptions are served."""
    parts.settings = Settings(services=LONG)
    ours, _ = await flow.subscribe("ours"), await flow.subscribe("theirs")
    searches = calls_of(monkeypatch, "due_subscriptions")
    async with running(starter_of(parts).run):
        await until_true(lambda: searches.ended == 1)
        for count in (2, 4):
            await flow.publish("ours")
            await flow.publish("theirs")
            await flow.route()
            parts.wakeups.wake(Work.SAGAS, [ours], notify=True)
            parts.wakeups.wake(Work.SAGAS, search=True)
            await until(flow.daemon, STARTED, count)


async def test_one_wake_up_applies_more_results_than_a_batch(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of another process are all applied, without waiting for the poll interval."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(batch_size=5))
    await flow.subscribe()
    await publish_many(flow, 40, [EVENT_TYPE])
    await flow.route()
    await flow.start()
    leases = await flow.claim()
    searches = calls_of(monkeypatch, "apply_results")
    async with running(applier_of(parts).run):
        await until_true(lambda: searches.ended == 1)
        for lease in leases:
            await flow.report(lease, 200)
        parts.wakeups.wake(Work.RESULTS, search=True)
        await until(flow.daemon, COMPLETED, len(leases))


async def test_result_frees_the_window_for_the_next_delivery(flow: Flow, parts: Parts) -> None:
    """With a window of one, the applier wakes the starter; no poll interval passes."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(subscription_window=1))
    await flow.subscribe()
    await publish_many(flow, 3, [EVENT_TYPE])
    await flow.route()
    async with running(starter_of(parts).run), running(applier_of(parts).run):
        for count in (1, 2, 3):
            await until(flow.daemon, STARTED, count)
            [lease] = await flow.claim()
            await flow.report(lease, 200)
            parts.wakeups.wake(Work.RESULTS, [lease.job_id], notify=True)
        await until(flow.daemon, COMPLETED, 3)


async def test_subscription_stays_in_rotation_after_a_dead_lettered_share(flow: Flow, parts: Parts) -> None:
    """After its limit was lowered, waiting deliveries are dead-lettered in shares, then a new one starts."""
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


async def test_starter_retries_soon_while_another_orchestrator_holds_the_lock(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the poll interval."""
    parts.settings = Settings(services=LONG)
    subscription_id = await flow.subscribe()
    searches, starts = calls_of(monkeypatch, "due_subscriptions"), calls_of(monkeypatch, "start")
    async with running(starter_of(parts).run):
        await until_true(lambda: searches.ended == 1)
        await flow.publish()
        await flow.route()
        async with flow.superuser.transaction():
            await flow.superuser.execute("select from webhookd.orchestration_turn for update")
            parts.wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
            # It has tried more than once, without success.
            await until_true(lambda: starts.ended > 1)
        await until(flow.daemon, STARTED, 1)


async def test_rate_limit_starts_the_next_delivery_in_time(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the limit allows it, without a result and without a poll, also beside a failing endpoint."""
    parts.settings = Settings(services=LONG)
    limited, failing = await flow.subscribe(), await flow.subscribe("other")
    await subscriptions.update(flow.daemon, limited, {"max_per_second": 5})
    await flow.superuser.execute(
        "insert into webhookd.endpoint_health (subscription_id, consecutive_failures, failing_since) "
        "values ($1, 10, now())",
        failing,
    )
    await publish_many(flow, 8, [EVENT_TYPE])
    await publish_many(flow, 2, ["other"])
    await flow.route()
    searches = calls_of(monkeypatch, "due_subscriptions")
    async with running(starter_of(parts).run):
        # Five are a second's worth, and one probes the failing endpoint.
        await until(flow.daemon, STARTED, 6)
        await flow.claim()
        await until(flow.daemon, STARTED, 9)
    assert searches.ended == 1


async def test_result_starts_the_delivery_that_waits_for_it(
    flow: Flow, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, although results wake the starter later where nothing is known to wait."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(subscription_window=1))
    monkeypatch.setattr(wakeups_module, "FREED_SECONDS", 3600)
    await flow.subscribe()
    await publish_many(flow, 2, [EVENT_TYPE])
    await flow.route()
    reporter, starts = Reporter(parts.context), calls_of(monkeypatch, "start")
    async with running(starter_of(parts).run):
        # The second call found the window full, and left the subscription to its results.
        await until_true(lambda: starts.ended == 2)
        [lease] = await flow.claim()
        await reporter.report([Finished(lease, attempts.Report(lease.job_id, lease.lease_token, 200))])
        await until(flow.daemon, STARTED, 2)


async def test_raising_the_limit_again_ends_the_sweep(flow: Flow, parts: Parts) -> None:
    """Deliveries that the sweep has not reached yet are still retried."""
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


async def test_more_results_than_a_batch_are_notified(parts: Parts) -> None:
    """Other instances get a NOTIFY only while more results are waiting than a batch holds."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(batch_size=2))
    applier = applier_of(parts)
    with applier._inbox:
        parts.wakeups.wake(Work.RESULTS, [1, 2, 3], notify=True)
        await applier.run_once()
        assert will_notify(parts, Work.RESULTS)
        await applier.run_once()
        assert not will_notify(parts, Work.RESULTS)


async def test_more_due_subscriptions_than_a_batch_are_notified(flow: Flow, parts: Parts) -> None:
    """Other instances get a NOTIFY only if some subscription got no share of the batch."""
    parts.settings = Settings(services=LONG, orchestration=OrchestrationSettings(batch_size=1))
    ids = [await flow.subscribe(f"type{number}") for number in range(2)]
    starter = starter_of(parts)
    with starter._inbox:
        parts.wakeups.wake(Work.SAGAS, ids[:1], notify=True)
        await starter.run_once()
        assert not will_notify(parts, Work.SAGAS)
        parts.wakeups.wake(Work.SAGAS, ids, notify=True)
        await starter.run_once()
        assert will_notify(parts, Work.SAGAS)
