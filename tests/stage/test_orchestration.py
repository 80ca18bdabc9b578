"""The orchestrator's loop: whom it finds when another process rings, and by which limit it sweeps."""

from tests.flow.test_lifecycle import publish_many
from tests.stage.conftest import Parts, running
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.config.settings import OrchestrationSettings, RetrySettings, ServicesSettings, Settings
from webhookd.orchestration.loop import Orchestrator
from webhookd.store.bells import Work

LONG = ServicesSettings(poll_interval_seconds=3600)
STARTED = "select count(*) = $1 from webhookd.webhook_delivery_jobs"


def orchestrator_of(parts: Parts) -> Orchestrator:
    """An orchestrator of this process."""
    return Orchestrator(parts.pool, parts.bells, parts.hints, parts.metrics, parts.current)


async def test_sagas_of_another_process_are_looked_for(flow: Flow, parts: Parts) -> None:
    """Its ring does not say whose they are, and nothing here knows."""
    parts.settings = Settings(services=LONG)
    await flow.subscribe()
    async with running(orchestrator_of(parts).run):
        for count in (1, 2, 3):
            await flow.publish()
            await flow.route()
            parts.bells.hear(Work.SAGAS)
            await until(flow.daemon, STARTED, count)


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

    orchestrator = Orchestrator(parts.pool, parts.bells, parts.hints, parts.metrics, current)
    assert await orchestrator.sweep() == 5
