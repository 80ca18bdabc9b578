"""A hundred reloads while requests are under way: nothing is lost, nothing is doubled."""

from tests.flow.conftest import MakeDaemon
from tests.flow.test_lifecycle import COMPLETED, publish_many, receipts
from tests.flow.test_scenarios import subscribed
from tests.support.daemon import RELOADS
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until

EVENTS = 800
ROUNDS = 40


async def test_reloads_under_load_lose_and_repeat_nothing(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Good and bad files alternate, and every reload ends while older requests are still open."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(
        log={"level": "info"},
        delivery={"timeout_seconds": 300, "lease_seconds": 600, "concurrency": 100},
    ).start()
    await publish_many(flow, EVENTS, [EVENT_TYPE])
    for number in range(ROUNDS):
        # The last of these are let through by the last round: until then some are open.
        await endpoint.received(number * EVENTS // ROUNDS + 1)
        good = number % 2 == 0
        daemon.configure(retry={"max_attempts": 5 + number} if good else {"max_attempts": 0})
        assert gate.open
        assert await daemon.reload() == good
        assert gate.open
        gate.let_through(EVENTS // ROUNDS)
    await until(flow.daemon, COMPLETED, EVENTS)
    assert daemon.metric(RELOADS, outcome="done") == ROUNDS / 2
    assert daemon.metric(RELOADS, outcome="refused") == ROUNDS / 2
    assert len(endpoint.requests) == EVENTS
    assert set(receipts(endpoint).values()) == {1}
    assert daemon.metric("webhookd_service_restarts_total") == 0
