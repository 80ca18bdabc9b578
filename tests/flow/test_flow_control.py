"""How much one endpoint gets at once, with real daemons: few while it is slow, one while it keeps failing."""

import asyncio
from collections import Counter

from tests.flow.conftest import HELD, PATIENT, MakeDaemon
from tests.flow.test_lifecycle import publish_many
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.open_requests import OpenRequests
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until

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


async def test_a_failing_endpoint_is_probed_one_request_at_a_time(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """By two instances together never two at once, and told so; when it answers again, nothing is missing."""
    requests = OpenRequests(status=500, hold_seconds=0.3)
    endpoint.behave(requests)
    subscription_id = await flow.subscribe("orders", endpoint.url())
    # Few slots beside a large window, and answers that take a moment: jobs wait when it begins to be failing.
    settings = {"delivery": {"subscription_concurrency": 8}, "retry": PATIENT}
    daemons = [await make_daemon(**settings).start() for _ in range(2)]
    await publish_many(flow, 60, ["orders"])
    # What was claimed before it was failing has ended; what was being claimed just then comes soon after.
    await until(flow.daemon, FAILING_AND_QUIET, subscription_id)
    await endpoint.received(len(endpoint.requests) + 2)
    waiting = await flow.daemon.fetchval(ACTIVE_JOBS_OF, subscription_id)
    assert waiting > 1, "the jobs that waited were sent all at once"
    requests.hold_seconds = 0.02
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while requests.most_open != 1:  # soon: here, when five in a row were alone
            requests.most_open = 0
            await endpoint.received(len(endpoint.requests) + 5)
    await endpoint.received(len(endpoint.requests) + 60)
    assert requests.most_open == 1
    # The jobs from before are used up, and no more than one is made.
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


async def test_a_slow_endpoint_has_its_slots_and_no_more(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """4 slots, a window of 8: with 50 events due it has 4 requests and 8 jobs, and all others have theirs."""
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
    # None of them has ended: these are all that there ever were.
    assert Counter(attempt["status"] for attempt in await flow.attempts(slow)) == {"Leased": 4, "Pending": 4}


async def test_each_instance_has_slots_of_its_own(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Slots are an instance's, the window is everybody's: two with 4 slots and a window of 6 send 6."""
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


async def test_slow_endpoints_leave_slots_for_others(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """E25: eight of them could fill all slots; another's events arrive while none of theirs has ended."""
    endpoint.behave(OpenRequests(status=None), "/slow")
    for _ in range(8):
        await flow.subscribe("slow", endpoint.url("/slow"))
    good = await flow.subscribe("good", endpoint.url("/good"))
    await make_daemon(delivery=HELD | {"concurrency": 200}).start()
    await publish_many(flow, 70, ["slow"])
    await endpoint.received(150, "/slow")  # all but the quarter that is kept
    await publish_many(flow, 20, ["good"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 20", good)


async def test_a_freed_slot_is_used_at_once(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """One slot and twenty events: each end makes room for the next, without waiting for the next look."""
    subscription_id = await flow.subscribe("orders", endpoint.url())
    await make_daemon(
        delivery={"subscription_concurrency": 1}, services={"poll_interval_seconds": 3600}
    ).start()
    await publish_many(flow, 20, ["orders"])
    await until(flow.daemon, f"select ({COMPLETED_OF}) = 20", subscription_id)
