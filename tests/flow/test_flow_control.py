"""Concurrent requests per endpoint, with real daemons: few while it is slow, one while it is failing."""

import asyncio
from collections import Counter
from itertools import combinations

from tests.flow.conftest import HELD, PATIENT, MakeDaemon
from tests.flow.test_lifecycle import publish_many
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.open_requests import OpenRequests
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from webhookd.deliveries import subscriptions

COMPLETED_OF = """
    select count(*) from webhookd.webhook_delivery_sagas where subscription_id = $1 and status = 'Completed'
"""
ACTIVE_JOBS_OF = """
    select count(*) from webhookd.webhook_delivery_jobs where subscription_id = $1 and finished_at is null
"""
FAILING_AND_QUIET = """
    select failing_since is not null
        and (select count(*) <= 1 from webhookd.webhook_delivery_jobs
             where subscription_id = $1 and status = 'Leased')
    from webhookd.endpoint_health where subscription_id = $1
"""


async def test_failing_endpoint_is_probed_one_request_at_a_time(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Two instances together send one request at a time; after it recovers, every event is delivered."""
    requests = OpenRequests(status=500, hold_seconds=0.3)
    endpoint.behave(requests)
    subscription_id = await flow.subscribe("orders", endpoint.url())
    # Few slots, a large window and slow responses: attempts are waiting when the endpoint becomes failing.
    settings = {"delivery": {"subscription_concurrency": 8}, "retry": PATIENT}
    daemons = [await make_daemon(**settings).start() for _ in range(2)]
    await publish_many(flow, 60, ["orders"])
    # Attempts claimed before it was failing have finished; those of a concurrent claim arrive soon after.
    await until(flow.daemon, FAILING_AND_QUIET, subscription_id)
    await endpoint.received(len(endpoint.requests) + 2)
    waiting = await flow.daemon.fetchval(ACTIVE_JOBS_OF, subscription_id)
    assert waiting > 1, "the waiting attempts were sent all at once"
    requests.hold_seconds = 0.02
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while requests.most_open != 1:  # until five requests in a row did not overlap
            requests.most_open = 0
            await endpoint.received(len(endpoint.requests) + 5)
    await endpoint.received(len(endpoint.requests) + 60)
    assert requests.most_open == 1
    # The earlier attempts are finished, and at most one new attempt exists.
    assert await flow.daemon.fetchval(ACTIVE_JOBS_OF, subscription_id) <= 1
    for daemon in daemons:
        health = daemon.get_json(f"/v1/subscriptions/{subscription_id}")["health"]
        assert health["failing_since"] is not None
        assert health["consecutive_failures"] >= 10
        assert health["last_error_code"] == "HTTP_500"

    requests.status = 200
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 60", subscription_id)
    assert Counter(requests.answered_ok.values()) == {1: 60}
    assert daemons[0].get_json(f"/v1/subscriptions/{subscription_id}")["health"]["failing_since"] is None


async def test_slow_endpoint_is_limited_to_its_slots(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """4 slots, a window of 8, 50 events due: 4 requests and 8 attempts; other endpoints are not delayed."""
    requests = OpenRequests(status=None)
    endpoint.behave(requests, "/slow")
    slow = await flow.subscribe("slow", endpoint.url("/slow"))
    good = await flow.subscribe("good", endpoint.url("/good"))
    await make_daemon(
        delivery=HELD | {"subscription_concurrency": 4}, orchestration={"subscription_window": 8}
    ).start()
    await publish_many(flow, 50, ["slow"])
    await endpoint.received(4, "/slow")
    await publish_many(flow, 200, ["good"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 200", good)
    assert (requests.open, requests.most_open) == (4, 4)
    # No attempt has finished, so these are all that were created.
    assert Counter(attempt["status"] for attempt in await flow.attempts(slow)) == {"Leased": 4, "Pending": 4}


async def test_slots_are_per_instance_and_the_window_is_shared(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Two instances with 4 slots each and a window of 6 send 6 requests."""
    requests = OpenRequests(status=None)
    endpoint.behave(requests, "/slow")
    slow = await flow.subscribe("slow", endpoint.url("/slow"))
    good = await flow.subscribe("good", endpoint.url("/good"))
    for _ in range(2):
        await make_daemon(
            delivery=HELD | {"subscription_concurrency": 4}, orchestration={"subscription_window": 6}
        ).start()
    await publish_many(flow, 50, ["slow"])
    await endpoint.received(6, "/slow")
    await publish_many(flow, 100, ["good"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 100", good)
    assert (requests.open, requests.most_open) == (6, 6)
    by_worker = Counter(attempt["worker_id"] for attempt in await flow.attempts(slow))
    assert by_worker.total() == 6
    assert max(by_worker.values()) <= 4


async def test_slow_endpoints_leave_slots_for_other_endpoints(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """E25: eight slow endpoints could fill all slots; events of another endpoint are still delivered."""
    endpoint.behave(OpenRequests(status=None), "/slow")
    for _ in range(8):
        await flow.subscribe("slow", endpoint.url("/slow"))
    good = await flow.subscribe("good", endpoint.url("/good"))
    await make_daemon(delivery=HELD | {"concurrency": 200}).start()
    await publish_many(flow, 70, ["slow"])
    await endpoint.received(150, "/slow")  # all slots but the reserved quarter
    await publish_many(flow, 20, ["good"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 20", good)


async def test_freed_slot_is_used_at_once(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """One slot and twenty events: each finished request starts the next one without polling."""
    subscription_id = await flow.subscribe("orders", endpoint.url())
    await make_daemon(
        delivery={"subscription_concurrency": 1}, services={"poll_interval_seconds": 3600}
    ).start()
    await publish_many(flow, 20, ["orders"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 20", subscription_id)


async def test_rate_limit_holds_over_three_instances(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """No span of time has more requests than the limit and a burst; other subscriptions are not slowed.

    A burst is one second's worth when attempts start. A busy instance may send those of one second together
    with those of the next, so two are allowed here.
    """
    limit = 20
    limited = await flow.subscribe("limited.type", endpoint.url("/limited"))
    await subscriptions.update(flow.daemon, limited, {"max_per_second": limit})
    await flow.subscribe("free.type", endpoint.url("/free"))
    await asyncio.gather(*(make_daemon().start() for _ in range(3)))
    query = "select webhookd.publish($1, '{}') from generate_series(1, $2::integer)"
    await flow.daemon.execute(query, "limited.type", 5 * limit)
    await flow.daemon.execute(query, "free.type", 5 * limit)
    await endpoint.received(5 * limit, "/free")
    assert len(endpoint.requests_for("/limited")) < 5 * limit, "the others did not wait for it"
    arrived = [request.received_at for request in await endpoint.received(5 * limit, "/limited")]
    for first, last in combinations(range(len(arrived)), 2):
        assert last - first + 1 <= limit * (arrived[last] - arrived[first]) + 2 * limit
