"""Reload of [retry]: new delays apply from the next failure, a lower limit of attempts at once."""

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.flow.test_scenarios import subscribed
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import until
from tests.support.wire import Wire
from webhookd.deliveries import subscriptions

# Longer than any test: a failed delivery is not retried.
LONG = {"base_delay_seconds": 1000, "max_delay_seconds": 10_000}
WAITING = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'PendingRetry'"
DELAYS = (
    "select extract(epoch from next_attempt_at - updated_at)::float8 from webhookd.webhook_delivery_sagas"
    " order by id"
)


@swaps("retry.base_delay_seconds", "retry.max_delay_seconds", "retry.jitter")
async def test_next_failure_uses_the_new_delays(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Base delay, jitter and maximum, one reload each; deliveries that wait already keep their time."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry=LONG).start()

    async def delay_with(**retry: float) -> float:
        """Return the delay of a new delivery after its first failure, under this policy."""
        daemon.configure(retry=retry)
        assert await daemon.reload()
        before = len(await flow.daemon.fetch(DELAYS))
        await flow.publish()
        await until(flow.daemon, WAITING, before + 1)
        *_, last = [row[0] for row in await flow.daemon.fetch(DELAYS)]
        return float(last)

    assert await delay_with() == 1000
    assert await delay_with(base_delay_seconds=2000) == 2000
    jittered = await delay_with(jitter=1.0)
    assert 2000 < jittered < 4000
    assert await delay_with(max_delay_seconds=2000) == 2000
    assert [row[0] for row in await flow.daemon.fetch(DELAYS)] == [1000, 2000, jittered, 2000]


@swaps("retry.max_attempts")
async def test_lower_limit_dead_letters_deliveries_that_reached_it(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """At once, also if paused, but not with a limit of the subscription; nothing is rescheduled."""
    active = await subscribed(flow, endpoint)
    paused = await subscribed(flow, endpoint)
    own_limit = await subscribed(flow, endpoint, max_attempts=9)
    endpoint.answer(500)
    daemon = await make_daemon(retry=LONG).start()
    await flow.publish()
    await until(flow.daemon, WAITING, 3)
    await subscriptions.update(flow.daemon, paused.subscription_id, {"active": False})
    due = "select next_attempt_at from webhookd.webhook_delivery_sagas where subscription_id = $1"
    due_before = await flow.daemon.fetchval(due, own_limit.subscription_id)

    daemon.configure(retry={"max_attempts": 1})
    assert await daemon.reload()
    await until(flow.daemon, "select count(*) = 2 from webhookd.dead_letters")
    letters = await flow.daemon.fetch("select subscription_id, final_error_code from webhookd.dead_letters")
    assert {tuple(row) for row in letters} == {
        (active.subscription_id, "HTTP_500"),
        (paused.subscription_id, "HTTP_500"),
    }
    assert await flow.daemon.fetchval(WAITING, 1)
    assert await flow.daemon.fetchval(due, own_limit.subscription_id) == due_before
    assert len(endpoint.requests) == 3


async def test_raised_limit_allows_more_attempts(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """After a new failure there is one more attempt; existing dead letters stay."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry=LONG | {"max_attempts": 1}).start()
    await flow.publish()
    await until(flow.daemon, "select count(*) = 1 from webhookd.dead_letters")
    daemon.configure(retry={"max_attempts": 2})
    assert await daemon.reload()
    await flow.publish()
    await until(flow.daemon, WAITING, 1)
    assert await flow.daemon.fetchval("select count(*) from webhookd.dead_letters") == 1


async def test_limit_lowered_while_the_database_is_down_applies_later(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon, wire: Wire
) -> None:
    """Dead-lettering after a reload waits for the database."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry=LONG, database={"dsn": wire.dsn}).start()
    await flow.publish()
    await until(flow.daemon, WAITING, 1)
    wire.cut()
    daemon.configure(retry={"max_attempts": 1})
    assert await daemon.reload()
    await daemon.until(lambda: daemon.logged("is waiting for the database"), "waiting for the database")
    await wire.open()
    await daemon.until(lambda: daemon.get("/readyz")[0] == 200, "ready")
    await until(flow.daemon, "select count(*) = 1 from webhookd.dead_letters")
