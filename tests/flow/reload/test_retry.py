"""Reloaded: the retry policy. It holds from the next failure on; a lower limit holds at once."""

from tests.flow.conftest import MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.flow.test_scenarios import subscribed
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import until
from tests.support.wire import Wire
from webhookd.deliveries import subscriptions

# Longer than any test: what failed once waits.
LONG = {"base_delay_seconds": 1000, "max_delay_seconds": 10_000}
WAITING = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'PendingRetry'"
DELAYS = (
    "select extract(epoch from next_attempt_at - updated_at)::float8 from webhookd.webhook_delivery_sagas"
    " order by id"
)


@swaps("retry.base_delay_seconds", "retry.max_delay_seconds", "retry.jitter")
async def test_the_next_failure_waits_by_the_new_policy(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Base, jitter and cap, each by a reload; and what waits already waits as it did."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry=LONG).start()

    async def delay_by(**retry: float) -> float:
        """How long one more delivery waits, under this policy, after its first failure."""
        daemon.configure(retry=retry)
        assert await daemon.reload()
        before = len(await flow.daemon.fetch(DELAYS))
        await flow.publish()
        await until(flow.daemon, WAITING, before + 1)
        *_, last = [row[0] for row in await flow.daemon.fetch(DELAYS)]
        return float(last)

    assert await delay_by() == 1000
    assert await delay_by(base_delay_seconds=2000) == 2000
    jittered = await delay_by(jitter=1.0)
    assert 2000 < jittered < 4000
    assert await delay_by(max_delay_seconds=2000) == 2000
    assert [row[0] for row in await flow.daemon.fetch(DELAYS)] == [1000, 2000, jittered, 2000]


@swaps("retry.max_attempts")
async def test_a_lower_limit_dead_letters_what_has_reached_it(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """At once, also what a pause holds; not what has a limit of its own, and nothing is scheduled anew."""
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


async def test_a_raised_limit_gives_the_next_failure_more_attempts(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The last attempt of before is not the last one any more; a dead letter stays dead."""
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


async def test_a_limit_lowered_without_the_database_holds_once_it_is_back(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon, wire: Wire
) -> None:
    """The sweep is part of a reload that was taken: it waits for the database like everything else."""
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
