"""The memory of a daemon depends on the requests in flight, not on the backlog."""

from tests.flow.conftest import MakeDaemon
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.deliveries import subscriptions

EVENTS = 5000
SUBSCRIPTIONS = 10
PAYLOAD = '{"text": "' + "x" * 4000 + '"}'
# The whole backlog would be 200 MB of payloads alone. Measured growth: 16 MB.
MAX_GROWTH_BYTES = 60_000_000


async def test_backlog_is_not_loaded_into_memory(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """50,000 deliveries wait; a few hundred are in flight and do not finish."""
    for number in range(SUBSCRIPTIONS):
        created = await subscriptions.create(flow.daemon, EVENT_TYPE, endpoint.url(f"/{number}"))
        await flow.verify(created.subscription_id)
    endpoint.hang()
    daemon = await make_daemon(log={"level": "info"}).start()
    before_bytes = daemon.resident_bytes()
    await flow.superuser.execute(
        "select count(webhookd.publish($1, $2::json)) from generate_series(1, $3)",
        EVENT_TYPE,
        PAYLOAD,
        EVENTS,
    )
    await endpoint.received(200)
    await until(
        flow.daemon, "select count(*) = $1 from webhookd.webhook_delivery_sagas", EVENTS * SUBSCRIPTIONS
    )
    await daemon.until(
        lambda: daemon.metric("webhookd_backlog", stage="orchestration") == 10_000, "backlog counted"
    )
    assert daemon.resident_bytes() - before_bytes < MAX_GROWTH_BYTES
