"""Reloads while requests are in flight."""

from tests.flow.conftest import MakeDaemon
from tests.flow.test_lifecycle import COMPLETED, publish_many, receipts
from tests.flow.test_scenarios import subscribed
from tests.support.daemon import RELOADS
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until

EVENTS = 800
ROUNDS = 40


async def test_reloads_under_load_lose_and_repeat_no_delivery(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """40 reloads with valid and invalid files in turn, each while older requests are open."""
    await subscribed(flow, endpoint)
    gate = endpoint.hold()
    daemon = await make_daemon(
        log={"level": "info"},
        delivery={"timeout_seconds": 300, "lease_seconds": 600, "concurrency": 100},
    ).start()
    await publish_many(flow, EVENTS, [EVENT_TYPE])
    for number in range(ROUNDS):
        # The last requests are answered in the last round, so until then some are open.
        await endpoint.received(number * EVENTS // ROUNDS + 1)
        is_valid = number % 2 == 0
        daemon.configure(retry={"max_attempts": 5 + number} if is_valid else {"max_attempts": 0})
        assert gate.open
        assert await daemon.reload() == is_valid
        assert gate.open
        gate.let_through(EVENTS // ROUNDS)
    await until(flow.daemon, COMPLETED, EVENTS)
    assert daemon.metric(RELOADS, outcome="done") == ROUNDS / 2
    assert daemon.metric(RELOADS, outcome="refused") == ROUNDS / 2
    assert len(endpoint.requests) == EVENTS
    assert set(receipts(endpoint).values()) == {1}
    assert daemon.metric("webhookd_service_restarts_total") == 0
