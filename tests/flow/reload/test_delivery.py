"""Reloaded: how many requests are under way, how long each may take, how much is read of its answer."""

import asyncio

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.flow.test_lifecycle import COMPLETED, publish_many, receipts
from tests.flow.test_scenarios import subscribed
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, LARGE, Flow
from tests.support.guards import HOLD_LOADING, HOLDABLE_LOADING
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until

# Held requests do not time out while a test looks at them.
PATIENT = {"timeout_seconds": 300, "lease_seconds": 600}


@swaps("delivery.concurrency")
async def test_fewer_or_more_requests_are_under_way(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Lowered: what is open ends, and no claim goes over the new bound. Raised: it is used."""
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
async def test_more_requests_of_one_subscription_are_under_way(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Raised, it is used by what waited, without a request having to end first."""
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
async def test_a_request_has_the_new_timeout(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """Of the request before the reload nothing is heard; the one after it times out."""
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
async def test_a_job_is_leased_for_the_new_time(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """An hour, where a minute was set before."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon().start()
    daemon.configure(delivery={"lease_seconds": 3600})
    assert await daemon.reload()
    # A claim that was on its way when the file changed is by the old one: what comes after it is not.
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
async def test_an_answer_is_read_as_far_as_is_set(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """A connection whose answer was not read to its end is not used again."""
    await subscribed(flow, endpoint)
    # More than arrives unasked: what is there already counts as read.
    endpoint.answer(200, b"x" * 500_000)
    daemon = await make_daemon(delivery={"max_response_bytes": 1_000_000}).start()
    connections: list[int] = []

    async def deliver() -> None:
        await flow.publish()
        await until(flow.daemon, COMPLETED, len(connections) + 1)
        connections.append(endpoint.requests[-1].connection)

    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while len(connections) == len(set(connections)):  # it is not kept long
            await deliver()
    daemon.configure(delivery={"max_response_bytes": 4096})
    assert await daemon.reload()
    await deliver()
    await deliver()
    assert len(set(connections[-3:])) == 3


async def test_a_raised_bound_is_felt_while_all_is_busy(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """With every place held by a request that does not end, more places are used at once."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(delivery=PATIENT | {"concurrency": 1}).start()
    await publish_many(flow, 5, [EVENT_TYPE])
    await gate.opened(1)
    daemon.configure(delivery={"concurrency": 3})
    assert await daemon.reload()
    await gate.opened(3)


async def test_a_longer_lease_is_not_that_of_a_job_leased_before(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Leased before the reload and ready to be sent after the lease: handed back, whatever a lease is now."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon(
        services={"enabled": ["api", "routing", "orchestration", "delivery"]},
        delivery={"timeout_seconds": 0.1, "lease_seconds": 5.1},
    ).start()
    await HOLDABLE_LOADING.take_away(flow.superuser)
    transaction = flow.superuser.transaction()
    await transaction.start()
    # Between lease and request a large payload is read: here it is not to be had.
    await flow.superuser.execute(HOLD_LOADING)
    await flow.publish(payload=LARGE)
    leased = "select exists (select from webhookd.webhook_delivery_jobs where status = 'Leased'{})"
    await until(flow.daemon, leased.format(""))
    # The request that is made in the end has the time it needs.
    daemon.configure(delivery={"timeout_seconds": 15, "lease_seconds": 600})
    assert await daemon.reload()
    await until(flow.daemon, leased.format(" and lease_until < clock_timestamp()"))
    await transaction.commit()
    await until(flow.daemon, COMPLETED, 1)
    assert daemon.logged("too late to send")
    assert daemon.metric("webhookd_leases_released_total") == 1
    assert len(endpoint.requests) == 1  # under the lease that followed
