"""Routing: which subscriptions get a saga, and the marks of the queue."""

from tests.support.flow import Flow
from webhookd.deliveries import router


async def test_event_goes_to_matching_deliverable_subscriptions(flow: Flow) -> None:
    """The subscription must have the type and be active and verified at the time of routing."""
    wanted = await flow.subscribe()
    await flow.subscribe("another.type")
    await flow.subscribe(verified=False)
    paused = await flow.subscribe()
    await flow.publish()
    await flow.superuser.execute("update webhookd.subscriptions set active = false where id = $1", paused)
    routed = await flow.route()
    assert (routed.events, routed.sagas, routed.subscription_ids) == (1, 1, [wanted])
    await flow.superuser.execute("update webhookd.subscriptions set active = true, verified = true")
    assert (await flow.route()).events == 0


async def test_event_without_a_match_leaves_the_queue(flow: Flow) -> None:
    """It is routed to no subscription; a later subscription does not get old events."""
    await flow.publish()
    assert (await flow.route())[:3] == (1, 0, [])
    await flow.subscribe()
    assert (await flow.route())[:3] == (0, 0, [])


async def test_wide_fan_out_is_split_into_batches(flow: Flow) -> None:
    """A batch ends before the event that would exceed the limit; a single event is always routed."""
    for _ in range(3):
        await flow.subscribe("wide")
    await flow.subscribe("narrow")
    for event_type in ("wide", "wide", "narrow", "unmatched", "wide"):
        await flow.publish(event_type)

    async def routed(max_sagas: int) -> tuple[int, int]:
        outcome = await router.route(flow.daemon, 10, max_sagas=max_sagas)
        return outcome.events, outcome.sagas

    assert await routed(2) == (1, 3)
    assert await routed(5) == (3, 4)
    assert await routed(5) == (1, 3)
    assert await routed(5) == (0, 0)


async def test_marks_skip_only_routed_events(flow: Flow) -> None:
    """The mark is the oldest event left, or the position after the newest routed event."""
    await flow.subscribe()
    ids = [await flow.publish() for _ in range(3)]
    first = await router.route(flow.daemon, 2)
    assert (first.events, first.next_event_id) == (2, ids[2])
    second = await router.route(flow.daemon, 2, first.next_event_id)
    assert (second.events, second.next_event_id) == (1, ids[2] + 1)
    # An event that committed late lies behind the mark; a search from the beginning finds it.
    await flow.superuser.execute(
        "insert into webhookd.event_routing_queue (event_id, event_type) values ($1, 'order.created')", ids[0]
    )
    assert (await router.route(flow.daemon, 2, second.next_event_id)).events == 0
    assert (await router.route(flow.daemon, 2)).events == 1
