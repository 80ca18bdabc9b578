"""The five scenarios of the overview at the database, step by step as the daemon runs them."""

from tests.support.flow import POLICY, Flow
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts


async def test_duplicate_event_is_stored_once(flow: Flow) -> None:
    """The same key and content twice give one event and one saga."""
    await flow.subscribe()
    first = await flow.publish(idempotency_key="order-7")
    assert await flow.publish(idempotency_key="order-7") == first
    assert (await flow.route()).sagas == 1


async def test_event_routed_twice_has_one_saga(flow: Flow) -> None:
    """The unique index prevents a second saga when an event is put back; others of the batch are routed."""
    await flow.subscribe()
    event_id = await flow.publish()
    assert (await flow.route()).sagas == 1
    await flow.superuser.execute(
        "insert into webhookd.event_routing_queue (event_id, event_type) "
        "select id, event_type from webhookd.events"
    )
    new_id = await flow.publish()
    again = await flow.route()
    assert (again.events, again.sagas) == (2, 1)
    rows = await flow.daemon.fetch("select event_id from webhookd.webhook_delivery_sagas order by id")
    assert [row["event_id"] for row in rows] == [event_id, new_id]
    assert await flow.superuser.fetchval("select count(*) from webhookd.event_routing_queue") == 0


async def test_expired_lease_is_reset_and_delivered_again(flow: Flow) -> None:
    """An expired lease returns to Pending; its late holder is refused; the next report counts."""
    saga_id = await flow.saga_in(SagaStatus.IN_PROGRESS)
    [lost] = await flow.claim(worker_id="crashed")
    await flow.expire_lease(lost.job_id)
    [reset] = await attempts.reset_expired(flow.daemon, 100, max_lease_resets=5)
    assert (reset.job_id, reset.worker_id, reset.status) == (lost.job_id, "crashed", AttemptStatus.PENDING)
    assert await flow.report(lost) is ReportVerdict.STALE
    [taken] = await flow.claim(worker_id="alive")
    assert await flow.report(taken) is ReportVerdict.ACCEPTED
    await flow.apply()
    assert await flow.saga_status(saga_id) is SagaStatus.COMPLETED


async def test_failures_are_retried_until_the_dead_letter(flow: Flow) -> None:
    """Every failed attempt counts; the last attempt dead-letters the saga in the same step."""
    await flow.subscribe()
    await flow.publish(payload='{"amount": 1.10}')
    await flow.route()
    for attempt in range(1, POLICY.max_attempts):
        [retried] = await flow.attempt(503)
        assert (retried.status, retried.attempt_count) == (SagaStatus.PENDING_RETRY, attempt)
    [dead_lettered] = await flow.attempt(503)
    assert (dead_lettered.status, dead_lettered.attempt_count) == (
        SagaStatus.DEAD_LETTERED,
        POLICY.max_attempts,
    )
    letter = await flow.daemon.fetchrow(
        "select * from webhookd.dead_letters where id = $1", dead_lettered.dead_letter_id
    )
    assert letter is not None
    assert letter["payload_snapshot"] == '{"amount": 1.10}'
    assert letter["final_error_code"] == "HTTP_503"


async def test_requeue_creates_a_new_saga(flow: Flow) -> None:
    """The new saga is Pending without attempts and independent; the dead-lettered saga does not change."""
    dead_id = await flow.saga_in(SagaStatus.DEAD_LETTERED)
    dead = await flow.daemon.fetchrow("select * from webhookd.webhook_delivery_sagas where id = $1", dead_id)
    requeued = await flow.requeue(await flow.daemon.fetchval("select id from webhookd.dead_letters"))
    assert requeued.created
    assert requeued.saga_id != dead_id
    new = await flow.daemon.fetchrow(
        "select status, attempt_count from webhookd.webhook_delivery_sagas where id = $1", requeued.saga_id
    )
    assert new is not None
    assert tuple(new) == ("Pending", 0)
    await flow.attempt(200)
    assert await flow.saga_status(requeued.saga_id) is SagaStatus.COMPLETED
    assert dead == await flow.daemon.fetchrow(
        "select * from webhookd.webhook_delivery_sagas where id = $1", dead_id
    )
