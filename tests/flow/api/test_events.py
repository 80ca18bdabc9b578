"""/v1/events: stores payloads byte for byte and a key once, and shows the deliveries of an event."""

import json

from standardwebhooks import Webhook

from tests.support.api import Client, is_time
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until


async def test_event_is_accepted_and_delivered_byte_for_byte(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """202 after the commit, and the endpoint receives the payload unchanged, spaces included."""
    subscription = await api.subscribe(endpoint)
    payload = '{ "b":1.10, "a" : "é\\u0000", "a":1e999 }'
    answer = await api.send(f'{{"event_type": "{EVENT_TYPE}", "payload": {payload} }}'.encode())
    assert answer.status == 202
    assert set(answer.body) == {"id", "event_type", "created_at", "duplicate"}
    assert (answer.body["event_type"], answer.body["duplicate"]) == (EVENT_TYPE, False)
    assert is_time(answer.body["created_at"])
    _, request = await endpoint.received(2)
    assert request.body == payload.encode()
    Webhook(subscription["secret"]).verify(request.body, request.headers)
    stored = await flow.daemon.fetchval(
        "select payload from webhookd.events where id = $1", answer.body["id"]
    )
    assert stored == payload


async def test_idempotency_key_stores_one_event(api: Client, flow: Flow) -> None:
    """Same key and content: the first id. Other content: 409. Header and body must agree."""
    first = await api.event(idempotency_key="a.b/1", correlation_id="c-1")
    again = await api.event(idempotency_key="a.b/1")
    assert (again.status, again.body["duplicate"]) == (202, True)
    assert again.body["id"] == first.body["id"]
    assert again.body["created_at"] == first.body["created_at"]
    conflict = await api.event(idempotency_key="a.b/1", payload=[])
    assert conflict.problem == (409, "idempotency_conflict")
    assert conflict.body["event_id"] == first.body["id"]

    body = {"event_type": EVENT_TYPE, "payload": {}}
    in_header = await api.request("POST", "/v1/events", json=body, headers={"Idempotency-Key": "a.b/1"})
    assert in_header.body["id"] == first.body["id"]
    both = body | {"idempotency_key": "k"}
    agreeing = await api.request("POST", "/v1/events", json=both, headers={"Idempotency-Key": "k"})
    assert (agreeing.status, agreeing.body["duplicate"]) == (202, False)
    differing = await api.request("POST", "/v1/events", json=both, headers={"Idempotency-Key": "K"})
    assert differing.problem == (422, "idempotency_key_mismatch")
    too_long = await api.request("POST", "/v1/events", json=body, headers={"Idempotency-Key": "k" * 256})
    assert too_long.problem == (422, "invalid_request")
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 2


async def test_any_json_is_stored_unchanged(api: Client, flow: Flow) -> None:
    """Scalars, repeated keys, NUL escapes, huge numbers, brackets in strings and 498 levels are valid."""
    texts = [
        "null",
        "7",
        '"x"',
        '{"a":1,"a":2}',
        '"\\u0000"',
        "1e200000",
        "[" * 498 + "]" * 498,
        '"' + "[" * 600 + '"',
        '["\\\\", "\\"' + "[" * 600 + '"]',
    ]
    for text in texts:
        answer = await api.send(f'{{"event_type":"a","payload":{text}}}'.encode())
        assert answer.status == 202, (text[:50], answer)
        shown = await api.request("GET", f"/v1/events/{answer.body['id']}")
        assert shown.body["payload"] == json.loads(text)
    stored = await flow.daemon.fetch("select payload from webhookd.events order by id")
    assert [row["payload"] for row in stored] == texts


async def test_events_are_listed_in_pages(api: Client) -> None:
    """Newest first, each once, with filters; the last page has no cursor."""
    events = [{"event_type": f"type_{number % 2}", "payload": number} for number in range(7)]
    accepted = await api.post("/v1/events/batch", {"events": events})
    ids = [event["id"] for event in accepted.body["events"]]
    assert await api.pages("/v1/events", limit=3) == [ids[:3:-1], ids[3:0:-1], ids[:1]]
    assert await api.pages("/v1/events?event_type=type_1", limit=2) == [[ids[5], ids[3]], [ids[1]]]
    await api.event(idempotency_key="k", correlation_id="c")
    [found] = (await api.get("/v1/events?idempotency_key=k")).body["items"]
    assert set(found) == {
        "id",
        "event_type",
        "created_at",
        "idempotency_key",
        "correlation_id",
        "tenant",
        "labels",
    }
    assert (found["idempotency_key"], found["correlation_id"]) == ("k", "c")
    assert (await api.get("/v1/events?limit=1&cursor=1")).body == {"items": [], "next_cursor": None}


async def test_event_shows_its_delivery_to_each_subscription(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """For each subscription to its type: the status of the delivery, or the reason why there is none."""
    delivered = await api.subscribe(endpoint)
    inactive = await api.subscribe(endpoint)
    await api.patch(f"/v1/subscriptions/{inactive['id']}", {"active": False})
    url = endpoint.url("/other")
    unverified = await api.post("/v1/subscriptions", {"event_type": EVENT_TYPE, "callback_url": url})
    await api.post("/v1/subscriptions", {"event_type": "other", "callback_url": url})
    event_id = (await api.event(payload={"a": 1})).body["id"]
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    await api.patch(f"/v1/subscriptions/{inactive['id']}", {"active": True})
    late = await api.subscribe(endpoint)

    found = (await api.get(f"/v1/events/{event_id}")).body
    assert found["payload"] == {"a": 1}
    assert found["more_deliveries"] is False
    deliveries = {
        delivery["subscription_id"]: (delivery["status"], delivery["reason"])
        for delivery in found["deliveries"]
    }
    assert deliveries == {
        delivered["id"]: ("Completed", "delivered"),
        inactive["id"]: ("not_routed", "inactive"),
        unverified.body["id"]: ("not_routed", "unverified"),
        late["id"]: ("not_routed", "subscribed_later"),
    }
    [saga] = [delivery for delivery in found["deliveries"] if delivery["saga_id"]]
    assert saga["attempt_count"] == 1
    assert saga["held"] is False
    assert saga["callback_url"] == endpoint.url("/hook")
    assert saga["explanation"].startswith("Delivered at 20")
    shown = (await api.get(f"/v1/deliveries/{saga['saga_id']}")).body
    assert {name: shown[name] for name in ("reason", "explanation", "buried_as")} == {
        "reason": "delivered",
        "explanation": saga["explanation"],
        "buried_as": None,
    }
