"""Reload of [delivery]: concurrency, timeout, lease and response size."""

import asyncio

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.flow.test_lifecycle import COMPLETED, publish_many, receipts
from tests.flow.test_scenarios import subscribed
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, LARGE, Flow
from tests.support.guards import HOLD_LOADING, HOLDABLE_LOADING
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until

# Held requests do not time out during a test.
PATIENT = {"timeout_seconds": 300, "lease_seconds": 600}


@swaps("delivery.concurrency")
async def test_reload_changes_the_number_of_concurrent_requests(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Lowered: open requests finish and no claim exceeds the new limit. Raised: the new limit is used."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=PATIENT | {"concurrency": 4}).start()
    await publish_many(flow, 20, [EVENT_TYPE])
    await gate.opened(4)
    daemon.configure(delivery={"concurrency": 2})
    assert await daemon.reload()
    gate.let_through(2)
    await gate.opened(2)
    gate.most_open = 2
    for number in range(6):
        gate.let_through(1)
        await endpoint.received(5 + number)
    await gate.opened(2)
    assert gate.most_open == 2
    daemon.configure(delivery={"concurrency": 4})
    assert await daemon.reload()
    gate.let_through(1)
    await gate.opened(4)
    assert gate.most_open == 4
    gate.let_through(20)
    await until(flow.daemon, COMPLETED, 20)
    assert set(receipts(endpoint).values()) == {1}


@swaps("delivery.subscription_concurrency")
async def test_reload_raises_the_concurrency_of_a_subscription(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Waiting attempts use the new limit before any open request finishes."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=PATIENT | {"subscription_concurrency": 1}).start()
    await publish_many(flow, 10, [EVENT_TYPE])
    await gate.opened(1)
    daemon.configure(delivery={"subscription_concurrency": 3})
    assert await daemon.reload()
    await gate.opened(3)
    assert gate.most_open == 3


@swaps("delivery.timeout_seconds")
async def test_reload_changes_the_timeout_of_new_requests(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The request from before the reload stays open; the next one times out."""
    await subscribed(flow, endpoint)
    endpoint.hang()
    daemon = await make_daemon(delivery=PATIENT).start()
    await flow.publish()
    await endpoint.received(1)
    daemon.configure(delivery={"timeout_seconds": 0.2})
    assert await daemon.reload()
    event_id = await flow.publish()
    await until(
        flow.daemon,
        "select exists (select from webhookd.webhook_delivery_jobs j"
        " join webhookd.webhook_delivery_sagas s on s.id = j.saga_id"
        " where s.event_id = $1 and j.error_code = 'TIMEOUT')",
        event_id,
    )


@swaps("delivery.lease_seconds")
async def test_reload_changes_the_duration_of_new_leases(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """A new lease lasts an hour instead of the default."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon().start()
    daemon.configure(delivery={"lease_seconds": 3600})
    assert await daemon.reload()
    # A claim that was running during the reload uses the old setting; later claims use the new one.
    await flow.publish()
    await until(flow.daemon, COMPLETED, 1)
    endpoint.hang()
    await flow.publish()
    await endpoint.received(2)
    assert await flow.daemon.fetchval(
        "select lease_until - created_at >= interval '1 hour' from webhookd.webhook_delivery_jobs"
        " order by id desc limit 1"
    )


@swaps("delivery.max_response_bytes")
async def test_reload_changes_the_maximum_response_size(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """A connection whose response was not read completely is not reused."""
    await subscribed(flow, endpoint)
    # More than fits into the socket buffers: bytes that have arrived already count as read.
    endpoint.answer(200, b"x" * 500_000)
    daemon = await make_daemon(delivery={"max_response_bytes": 1_000_000}).start()
    connections: list[int] = []

    async def deliver() -> None:
        await flow.publish()
        await until(flow.daemon, COMPLETED, len(connections) + 1)
        connections.append(endpoint.requests[-1].connection)

    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        # Until a connection is reused: an idle connection is closed soon.
        while len(connections) == len(set(connections)):
            await deliver()
    daemon.configure(delivery={"max_response_bytes": 4096})
    assert await daemon.reload()
    await deliver()
    await deliver()
    assert len(set(connections[-3:])) == 3


async def test_raised_concurrency_is_used_while_all_slots_are_busy(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """While a request that does not finish holds the only slot, the new slots are used at once."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=PATIENT | {"concurrency": 1}).start()
    await publish_many(flow, 5, [EVENT_TYPE])
    await gate.opened(1)
    daemon.configure(delivery={"concurrency": 3})
    assert await daemon.reload()
    await gate.opened(3)


async def test_longer_lease_does_not_extend_existing_leases(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """An attempt leased before the reload is released if its lease expired before it could be sent."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon(
        services={"enabled": ["api", "routing", "orchestration", "delivery"]},
        delivery={"timeout_seconds": 0.1, "lease_seconds": 5.1},
    ).start()
    await HOLDABLE_LOADING.take_away(flow.superuser)
    transaction = flow.superuser.transaction()
    await transaction.start()
    # A large payload is loaded between lease and request: hold that call here.
    await flow.superuser.execute(HOLD_LOADING)
    await flow.publish(payload=LARGE)
    leased = "select exists (select from webhookd.webhook_delivery_jobs where status = 'Leased'{})"
    await until(flow.daemon, leased.format(""))
    # The request that is finally sent has enough time.
    daemon.configure(delivery={"timeout_seconds": 15, "lease_seconds": 600})
    assert await daemon.reload()
    await until(flow.daemon, leased.format(" and lease_until < clock_timestamp()"))
    await transaction.commit()
    await until(flow.daemon, COMPLETED, 1)
    assert daemon.logged("returned unsent")
    assert daemon.metric("webhookd_leases_released_total") == 1
    assert len(endpoint.requests) == 1  # with the next lease
