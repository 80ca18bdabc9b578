"""Resend, retry, test, replay, move, ping and delete, against a running daemon."""

import json
from typing import Any

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.flow import EVENT_TYPE, LARGE, Flow
from tests.support.traffic import verifies
from tests.support.waiting import until

DELIVERED = "select count(*) = $1 from webhookd.webhook_delivery_sagas where status = 'Completed'"
SINCE = {"since": "2020-01-01T00:00:00Z"}


async def delivered(api: Client, endpoint: Endpoint, flow: Flow, **fields: Any) -> int:
    """Deliver one event, and return its delivery."""
    await api.subscribe(endpoint, **fields)
    await api.event()
    await until(flow.daemon, DELIVERED, 1)
    [row] = (await api.get("/v1/deliveries")).body["items"]
    return int(row["id"])


async def test_finished_delivery_is_resent(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """A new delivery that names the old one; the old one does not change."""
    saga_id = await delivered(api, endpoint, flow)
    before = (await api.get(f"/v1/deliveries/{saga_id}")).body
    resent = await api.post(f"/v1/deliveries/{saga_id}/resend")
    assert resent.status == 201
    await until(flow.daemon, DELIVERED, 2)
    first, second = (await endpoint.received(3))[1:]
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    made = (await api.get(f"/v1/deliveries/{resent.body['saga_id']}")).body
    assert (made["resent_from"], made["status"]) == (saga_id, "Completed")
    assert (await api.get(f"/v1/deliveries/{saga_id}")).body == before
    assert (await api.post("/v1/deliveries/999/resend")).problem == (404, "not_found")


async def test_only_one_resend_is_live(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """While the subscription is paused, the first resend waits, and a second one is 409 with its id."""
    saga_id = await delivered(api, endpoint, flow)
    await api.patch("/v1/subscriptions/1", {"paused": True})
    resent = (await api.post(f"/v1/deliveries/{saga_id}/resend")).body["saga_id"]
    refused = await api.post(f"/v1/deliveries/{saga_id}/resend")
    assert refused.problem == (409, "already_resent")
    assert refused.body["saga_id"] == resent
    assert (await api.post(f"/v1/deliveries/{resent}/resend")).problem == (409, "wrong_status")
    await api.patch("/v1/subscriptions/1", {"active": False})
    assert (await api.post(f"/v1/deliveries/{saga_id}/resend")).problem == (409, "already_resent")


async def test_waiting_retry_is_due_at_once(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """The next attempt does not wait for its hour."""
    await api.subscribe(endpoint, base_delay_seconds=3600)
    endpoint.answer(500)
    await api.event()
    await until(flow.daemon, "select status = 'PendingRetry' from webhookd.webhook_delivery_sagas")
    endpoint.answer(200)
    retried = await api.post("/v1/deliveries/1/retry")
    assert retried.status == 200
    await until(flow.daemon, DELIVERED, 1)
    assert (await api.post("/v1/deliveries/1/retry")).problem == (409, "wrong_status")


async def test_test_event_is_sent_at_once(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Signed, with the response, and without any row."""
    made = await api.subscribe(endpoint)
    answer = await api.post("/v1/subscriptions/1/test")
    assert (answer.status, answer.body["delivered"], answer.body["response_status"]) == (200, True, 200)
    request = (await endpoint.received(2))[-1]
    assert (request.headers["webhook-event-type"], request.body) == ("webhookd.test", b'{"test":true}')
    assert verifies(request, made["secret"])
    endpoint.answer(503)
    await api.patch("/v1/subscriptions/1", {"format": "standard"})
    answer = await api.post("/v1/subscriptions/1/test", {"event_type": "a.b", "payload": {"x": 1}})
    assert (answer.body["delivered"], answer.body["error_code"]) == (False, "HTTP_503")
    body = json.loads((await endpoint.received(3))[-1].body)
    assert (body["type"], body["data"]) == ("a.b", {"x": 1})
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 0
    reserved = await api.post("/v1/subscriptions/1/test", {"event_type": "dot.job.made"})
    assert reserved.problem == (422, "invalid_request")

    async def reply(_: Request, connection: Connection) -> bool:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        return True

    endpoint.behave(reply)
    assert (await api.post("/v1/subscriptions/1/test")).body["response_excerpt"] == "hello"
    await flow.unverify(1)
    hidden = (await api.post("/v1/subscriptions/1/test")).body
    assert (hidden["delivered"], hidden["response_excerpt"]) == (True, "")
    await flow.superuser.execute("update webhookd.subscriptions set callback_url = 'https://10.0.0.1/'")
    assert (await api.post("/v1/subscriptions/1/test")).problem == (422, "address_blocked")


async def test_past_events_are_replayed(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """First counted, then delivered: the missing ones once, and all of them again."""
    await api.event()
    await api.event(event_type="other.type")
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")
    await api.subscribe(endpoint)
    path = "/v1/subscriptions/1/replay"
    counted = (await api.post(path, SINCE)).body
    assert (counted["examined"], counted["matched"], counted["created"]) == (2, 1, 1)
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 0
    created = (await api.post(path, SINCE | {"dry_run": False})).body
    assert created["created"] == 1
    await until(flow.daemon, DELIVERED, 1)
    assert (await api.post(path, SINCE | {"dry_run": False})).body["created"] == 0
    everything = SINCE | {"dry_run": False, "include": "all"}
    repeated = (await api.post(path, everything)).body
    assert repeated["created"] == 1
    await until(flow.daemon, DELIVERED, 2)
    again = everything | {"started_at": repeated["started_at"]}
    assert (await api.post(path, again)).body["created"] == 0
    assert (await api.post(path, everything)).body["created"] == 1, "the latest delivery is repeated"
    narrow = SINCE | {"event_types": ["nothing.*"], "include": "all"}
    assert (await api.post(path, narrow)).body["matched"] == 0
    for wrong in ({"since": "2099-01-01T00:00:00Z"}, SINCE | {"until": "2019-01-01T00:00:00Z"}):
        assert (await api.post(path, wrong)).problem == (422, "invalid_request")


async def test_moved_endpoint_loses_nothing(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Until the new address is verified, deliveries go to the old one."""
    await api.subscribe(endpoint)
    moved = (await api.patch("/v1/subscriptions/1", {"callback_url": endpoint.url("/new")})).body
    assert moved["pending_callback_url"] == endpoint.url("/new")
    await api.event()
    await until(flow.daemon, DELIVERED, 1)
    endpoint.echo_challenge()
    verified = (await api.post("/v1/subscriptions/1/verify")).body
    assert (verified["callback_url"], verified["pending_callback_url"]) == (endpoint.url("/new"), None)
    await api.event()
    await until(flow.daemon, DELIVERED, 2)
    assert [request.path for request in await endpoint.received(4)] == ["/hook", "/hook", "/new", "/new"]


async def test_deleted_subscription_is_gone(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Nothing is routed or sent to it, its secret is gone, and its history stays."""
    saga_id = await delivered(api, endpoint, flow, headers={"x-key": "hidden"})
    assert (await api.request("DELETE", "/v1/subscriptions/1")).status == 204
    for method in ("GET", "DELETE"):
        assert (await api.request(method, "/v1/subscriptions/1")).problem == (404, "not_found")
    assert (await api.get("/v1/subscriptions")).body["items"] == []
    assert await flow.superuser.fetchval("select count(*) from webhookd.subscription_secrets") == 0
    await api.event()
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 1
    assert (await api.get(f"/v1/deliveries/{saga_id}")).status == 200
    assert (await api.post(f"/v1/deliveries/{saga_id}/resend")).problem == (409, "subscription_held")


async def test_standard_format_wraps_the_payload(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """The payload's bytes are inside as they were published; large ones too."""
    made = await api.subscribe(endpoint, format="standard")
    large = LARGE
    for payload in ('{"amount": 1.10}', large):
        await api.send(f'{{"event_type": "{EVENT_TYPE}", "payload": {payload}}}'.encode())
    await until(flow.daemon, DELIVERED, 2)
    requests = sorted((await endpoint.received(3))[1:], key=lambda request: len(request.body))
    for request, payload in zip(requests, ('{"amount": 1.10}', large), strict=True):
        assert verifies(request, made["secret"])
        message = json.loads(request.body)
        assert (message["type"], list(message)) == (EVENT_TYPE, ["type", "timestamp", "data"])
        assert request.body.endswith(f'"data":{payload}}}'.encode())


async def test_ping_verifies_only_if_it_is_allowed(make_api: MakeApi, endpoint: Endpoint) -> None:
    """It needs a 2xx and no challenge, and the configuration must allow it."""
    api = await make_api()
    new = {"event_types": ["*"], "callback_url": endpoint.url("/hook")}
    await api.post("/v1/subscriptions", new)
    refused = await api.post("/v1/subscriptions/1/verify", {"method": "ping"})
    assert refused.problem == (422, "invalid_request")
    allowed = await make_api(subscriptions={"verification_methods": ["challenge", "ping"]})
    endpoint.answer(500)
    refused = await allowed.post("/v1/subscriptions/1/verify", {"method": "ping"})
    assert refused.problem == (422, "verification_failed")
    endpoint.answer(204)
    verified = await allowed.post("/v1/subscriptions/1/verify", {"method": "ping"})
    assert (verified.body["verified"], verified.body["verified_by"]) == (True, "ping")
    assert endpoint.requests[-1].headers["webhook-event-type"] == "webhookd.ping"


async def publish_batch(flow: Flow, count: int) -> None:
    """Publish events in one transaction."""
    query = "select webhookd.publish($1, to_json(i)) from generate_series(1, $2::integer) i"
    await flow.daemon.execute(query, EVENT_TYPE, count)


async def test_everything_published_while_paused_is_delivered(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """A thousand events wait, and a thousand arrive after the resume."""
    await api.subscribe(endpoint)
    await api.patch("/v1/subscriptions/1", {"paused": True})
    await publish_batch(flow, 1000)
    await until(flow.daemon, "select count(*) = 1000 from webhookd.webhook_delivery_sagas")
    [held, *_] = (await api.get("/v1/deliveries")).body["items"]
    assert held["held"] is True
    assert (await api.get(f"/v1/deliveries/{held['id']}")).body["reason"] == "held_paused"
    assert len(endpoint.requests) == 1
    await api.patch("/v1/subscriptions/1", {"paused": False})
    await until(flow.daemon, DELIVERED, 1000)
    assert len(endpoint.requests) == 1001


async def test_address_changed_under_load_loses_nothing(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Every event goes to the old or the new address, and the new one gets nothing before the challenge."""
    await api.subscribe(endpoint)
    await publish_batch(flow, 300)
    await api.patch("/v1/subscriptions/1", {"callback_url": endpoint.url("/new")})
    await publish_batch(flow, 300)
    assert (await api.post("/v1/subscriptions/1/verify")).status == 200
    await publish_batch(flow, 300)
    await until(flow.daemon, DELIVERED, 900)
    at_new = endpoint.requests_for("/new")
    assert b"challenge" in at_new[0].body
    delivered = [
        request.headers["webhook-id"] for request in endpoint.requests if b"challenge" not in request.body
    ]
    assert len(set(delivered)) == 900
