"""The backlog of each stage, as the gauges show it."""

from tests.support.flow import POLICY, Flow
from tests.support.history import watch
from webhookd.deliveries import reads, subscriptions

# A retry is an hour away.
LATER = POLICY._replace(base_delay_seconds=3600)


async def waiting(flow: Flow, counted_up_to: int = 100) -> dict[str, int]:
    """Return the stages that have a backlog, with their counts."""
    stages = await reads.waiting(flow.daemon, counted_up_to)
    assert len(stages) == 8
    for stage in stages:
        has_age = stage.waiting > 0 and stage.stage != "retry"
        assert (stage.oldest_at is not None) == has_age, stage
        assert (stage.age_seconds is not None) == has_age, stage
    return {stage.stage: stage.waiting for stage in stages if stage.waiting}


async def test_delivery_is_counted_at_every_stage(flow: Flow) -> None:
    """One event is counted from the routing queue to its end, with a retry in between."""
    assert await waiting(flow) == {}
    await flow.subscribe()
    await flow.publish()
    assert await waiting(flow) == {"routing": 1}
    await flow.route()
    assert await waiting(flow) == {"orchestration": 1}
    await flow.start()
    assert await waiting(flow) == {"delivery": 1}
    [lease] = await flow.claim()
    assert await waiting(flow) == {"in_flight": 1}
    await flow.report(lease, 500)
    assert await waiting(flow) == {"results": 1}
    await flow.apply(LATER, failing_after=1)
    assert await waiting(flow) == {"retry": 1, "failing": 1}
    [endpoint] = await reads.failing_endpoints(flow.daemon, 10)
    assert (endpoint["consecutive_failures"], endpoint["last_error_code"]) == (1, "HTTP_500")


async def test_held_work_is_not_backlog(flow: Flow) -> None:
    """Sagas and attempts of a paused subscription are not part of any stage's backlog."""
    paused = await flow.subscribe()
    await flow.subscribe()
    for _ in range(3):
        await flow.publish()
    await flow.route()
    await flow.start([paused], quota=1)
    await flow.superuser.execute("update webhookd.subscriptions set active = false where id = $1", paused)
    assert await waiting(flow) == {"orchestration": 3, "held": 2}


async def test_deleted_subscription_has_no_backlog(flow: Flow) -> None:
    """Nothing of it waits for an operator: neither due deliveries, nor retries, attempts or its endpoint."""
    subscription_id = await flow.subscribe()
    for _ in range(3):
        await flow.publish()
    await flow.route()
    await flow.start(quota=1)
    [lease] = await flow.claim()
    await flow.report(lease, 500)
    await flow.apply(LATER, failing_after=1)
    await flow.start(quota=1)
    assert await waiting(flow) == {"orchestration": 1, "delivery": 1, "retry": 1, "failing": 1}
    await subscriptions.delete(flow.daemon, subscription_id)
    assert await waiting(flow) == {}
    assert await reads.failing_endpoints(flow.daemon, 10) == []


async def test_few_retries_of_a_deleted_subscription_are_read(flow: Flow) -> None:
    """They count nothing, and however many they are, no more than the limit are read."""
    subscription_id = await flow.subscribe()
    for _ in range(200):
        await flow.publish()
    await flow.route()
    await flow.start(window=200)
    for lease in await flow.claim(200):
        await flow.report(lease, 500)
    await flow.apply(LATER)
    assert (await waiting(flow))["retry"] == 100
    await subscriptions.delete(flow.daemon, subscription_id)
    await flow.superuser.execute("vacuum analyze webhookd.webhook_delivery_sagas")
    assert await waiting(flow, 10) == {}
    _, touched = await watch(flow.daemon, lambda _: waiting(flow, 10))
    assert touched.blocks["subscriptions"] < 50, touched.blocks


async def test_counting_stops_at_the_limit(flow: Flow) -> None:
    """The count stops at the limit, for any amount of work and any number of subscriptions."""
    for _ in range(4):
        await flow.subscribe()
    for _ in range(4):
        await flow.publish()
    assert await waiting(flow, 3) == {"routing": 3}
    await flow.route()
    assert await waiting(flow, 3) == {"orchestration": 3}
    await flow.start()
    assert await waiting(flow, 3) == {"delivery": 3}
    assert await waiting(flow, 100) == {"delivery": 16}
