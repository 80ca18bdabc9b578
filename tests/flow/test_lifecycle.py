"""Signals, and several instances on one database, under load. Reloads are tested in reload/."""

from collections import Counter

from tests.flow.conftest import HELD, MakeDaemon
from tests.flow.test_scenarios import subscribed
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.invariants import AUDIT, broken_invariants
from tests.support.waiting import until
from webhookd.deliveries import ingest, subscriptions

COMPLETED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"


async def publish_many(flow: Flow, count: int, types: list[str]) -> None:
    """Publish `count` events, with the event types in turn."""
    batch = [ingest.NewEvent(types[number % len(types)], f'{{"n": {number}}}') for number in range(count)]
    for start in range(0, count, 500):
        await ingest.publish(flow.daemon, batch[start : start + 500])


def receipts(endpoint: Endpoint) -> Counter[str]:
    """Count the requests of each event and path."""
    return Counter(f"{request.path} {request.headers['webhook-id']}" for request in endpoint.requests)


async def test_three_instances_share_the_work(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """2,000 events to 20 subscriptions: each is delivered once, and every instance delivers some."""
    await flow.superuser.execute(AUDIT)
    types = [f"type_{number}" for number in range(20)]
    for event_type in types:
        created = await subscriptions.create(flow.daemon, event_type, endpoint.url(f"/{event_type}"))
        await flow.verify(created.subscription_id)
    # The endpoint is a thread of this process: with more requests it would be too slow on a busy machine.
    limit = {"concurrency": 20}
    instances = [await make_daemon(log={"level": "info"}, delivery=limit).start() for _ in range(3)]
    await publish_many(flow, 2000, types)
    await until(flow.daemon, COMPLETED, 2000)
    assert set(receipts(endpoint).values()) == {1}
    assert len(endpoint.requests) == 2000
    workers = await flow.daemon.fetch("select distinct worker_id from webhookd.webhook_delivery_jobs")
    assert len(workers) == len(instances)
    await flow.superuser.execute(
        "insert into public.receipts select saga_id, id, 200 from webhookd.webhook_delivery_jobs"
    )
    assert await broken_invariants(flow.superuser) == []


async def test_sigterm_drains_under_load(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """Exit 0, no lease left, and the next instance loses and repeats nothing."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    gate.let_through(100)
    first = await make_daemon(delivery=HELD).start()
    await publish_many(flow, 2000, [EVENT_TYPE])
    await endpoint.received(101)
    first.sigterm()
    await first.until(lambda: first.logged("draining"), "draining")
    gate.let_through(2000)
    assert await first.ended() == 0
    leased = "select count(*) from webhookd.webhook_delivery_jobs where status = 'Leased'"
    assert await flow.daemon.fetchval(leased) == 0
    assert len(endpoint.requests) < 2000
    await make_daemon().start()
    await until(flow.daemon, COMPLETED, 2000)
    assert set(receipts(endpoint).values()) == {1}


async def test_second_sigterm_exits_at_once(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """A second SIGTERM ends the daemon while it waits for a request in flight."""
    await subscribed(flow, endpoint)
    endpoint.hang()
    daemon = await make_daemon(delivery=HELD).start()
    await flow.publish()
    await endpoint.received(1)
    daemon.sigterm()
    await daemon.until(lambda: daemon.logged("draining"), "draining")
    daemon.sigterm()
    assert await daemon.ended() == 1
