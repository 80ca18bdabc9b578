"""The five main scenarios end to end, with a daemon whose login has only the role webhookd_app."""

from standardwebhooks import Webhook

from tests.flow.conftest import HELD, MakeDaemon
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.deliveries import subscriptions


async def subscribed(flow: Flow, endpoint: Endpoint, **settings: object) -> subscriptions.Created:
    """Create a verified subscription of the endpoint."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, endpoint.url("/hook"), **settings)  # type: ignore[arg-type]
    await flow.verify(created.subscription_id)
    return created


async def test_event_is_delivered_and_its_signature_verifies(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The payload arrives unchanged, and the reference library verifies the signature."""
    created = await subscribed(flow, endpoint)
    await make_daemon().start()
    payload = '{ "b":1.10, "a" : "é\\u0000", "a":2 }'
    event_id = await flow.publish(payload=payload)
    [request] = await endpoint.received(1)
    assert request.body == payload.encode()
    Webhook(created.signing_secret).verify(request.body, request.headers)
    assert request.headers["webhook-id"] == f"evt_{event_id}"
    assert request.headers["webhook-attempt"] == "1"
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")


async def test_duplicate_event_is_delivered_once(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Two publications with the same idempotency key are one event, one saga, one request."""
    await subscribed(flow, endpoint)
    await make_daemon().start()
    first = await flow.publish(idempotency_key="order-7")
    assert await flow.publish(idempotency_key="order-7") == first
    await flow.publish(idempotency_key="order-8")
    await endpoint.received(2)
    await until(
        flow.daemon, "select count(*) = 2 from webhookd.webhook_delivery_sagas where status = 'Completed'"
    )
    assert len(endpoint.requests) == 2


async def test_event_routed_twice_is_delivered_once(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """An event that enters the routing queue again is not sent again."""
    await subscribed(flow, endpoint)
    await make_daemon().start()
    event_id = await flow.publish()
    await endpoint.received(1)
    await flow.superuser.execute(
        "insert into webhookd.event_routing_queue select id, event_type from webhookd.events where id = $1",
        event_id,
    )
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")
    await flow.publish()
    await endpoint.received(2)
    assert len({request.headers["webhook-id"] for request in endpoint.requests}) == 2


async def test_other_instance_delivers_after_a_crash(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Kill -9 during a request: the lease expires and is reset, and another instance delivers."""
    await subscribed(flow, endpoint)
    endpoint.hang()
    doomed = await make_daemon(delivery=HELD).start()
    await flow.publish()
    await endpoint.received(1)
    doomed.kill()
    endpoint.answer(200)
    await make_daemon(delivery=HELD).start()
    await flow.expire_lease(await flow.daemon.fetchval("select id from webhookd.webhook_delivery_jobs"))
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    job = await flow.daemon.fetchrow("select lease_resets, status from webhookd.webhook_delivery_jobs")
    assert job is not None
    assert tuple(job) == (1, "Completed")
    assert [request.headers["webhook-attempt"] for request in endpoint.requests] == ["1", "1"]


async def test_failing_delivery_becomes_a_dead_letter_and_is_requeued(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """It is retried up to the limit; requeueing the dead letter creates a new saga that is delivered."""
    await subscribed(flow, endpoint)
    endpoint.answer(500)
    await make_daemon(retry={"max_attempts": 3}).start()
    event_id = await flow.publish(payload='{"n": 1.0}')
    await until(flow.daemon, "select exists (select from webhookd.dead_letters)")
    assert [request.headers["webhook-attempt"] for request in endpoint.requests] == ["1", "2", "3"]
    letter = await flow.daemon.fetchrow("select * from webhookd.dead_letters")
    assert letter is not None
    assert (letter["final_error_code"], letter["payload_snapshot"]) == ("HTTP_500", '{"n": 1.0}')

    endpoint.answer(200)
    requeued = await flow.requeue(letter["id"])
    await until(
        flow.daemon,
        "select status = 'Completed' from webhookd.webhook_delivery_sagas where id = $1",
        requeued.saga_id,
    )
    assert {request.headers["webhook-id"] for request in endpoint.requests} == {f"evt_{event_id}"}
