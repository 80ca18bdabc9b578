"""/v1/subscriptions: creates, shows, lists, changes and pauses subscriptions, and rotates secrets."""

import asyncio
import json
import threading
import time
from datetime import datetime
from typing import Any

from standardwebhooks import Webhook

from tests.flow.conftest import MakeApi
from tests.support.api import Client, is_time
from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.traffic import verifies
from tests.support.waiting import until


async def test_subscription_is_created_and_shown(api: Client, endpoint: Endpoint) -> None:
    """201 with the secret, once; the URL in its stored form; secret and headers are never shown again."""
    fields = {
        "event_type": EVENT_TYPE,
        "callback_url": f"HTTPS://LOCALHOST:{endpoint.port}/a?b=1",
        "max_attempts": 3,
        "base_delay_seconds": 0.5,
        "headers": {"X-Key": "hidden"},
        "description": "of a test",
    }
    created = await api.post("/v1/subscriptions", fields)
    assert created.status == 201
    assert created.body["secret"].startswith("whsec_")
    assert (created.body["active"], created.body["verified"]) == (True, False)
    assert created.body["callback_url"] == f"https://localhost:{endpoint.port}/a?b=1"
    read = await api.get(f"/v1/subscriptions/{created.body['id']}")
    secret = created.body.pop("secret")
    assert read.body == created.body
    assert secret not in json.dumps(read.body)
    assert "hidden" not in json.dumps(read.body)
    assert read.body["health"]["consecutive_failures"] == 0
    assert is_time(read.body["created_at"])
    for name in ("max_attempts", "base_delay_seconds", "description"):
        assert read.body[name] == fields[name]


async def test_subscriptions_are_listed_by_filter(api: Client, endpoint: Endpoint) -> None:
    """Filters by type, active and verified, in pages."""
    first = await api.subscribe(endpoint)
    made = [
        (await api.post("/v1/subscriptions", {"event_type": "b", "callback_url": endpoint.url()})).body["id"]
        for _ in range(3)
    ]
    await api.patch(f"/v1/subscriptions/{made[0]}", {"active": False})
    everything = [*reversed(made), first["id"]]
    assert await api.pages("/v1/subscriptions", limit=2) == [everything[:2], everything[2:]]
    assert await api.pages("/v1/subscriptions?event_type=b", limit=9) == [everything[:3]]
    assert await api.pages("/v1/subscriptions?active=false", limit=9) == [[made[0]]]
    assert await api.pages("/v1/subscriptions?verified=true", limit=9) == [[first["id"]]]


async def test_subscriptions_are_listed_by_their_ids(api: Client, endpoint: Endpoint) -> None:
    """Up to 100, in pages; unknown and deleted ones are left out."""
    body = {"event_type": "b", "callback_url": endpoint.url()}
    made = [(await api.post("/v1/subscriptions", body)).body["id"] for _ in range(3)]
    listed = f"{made[0]},{made[2]},999,9999999999999999999"
    assert await api.pages(f"/v1/subscriptions?ids={listed}", limit=1) == [[made[2]], [made[0]]]
    await api.request("DELETE", f"/v1/subscriptions/{made[2]}")
    assert await api.pages(f"/v1/subscriptions?ids={listed}", limit=9) == [[made[0]]]
    assert await api.pages(f"/v1/subscriptions?ids={','.join(map(str, range(100)))}", limit=9) == [
        made[1::-1]
    ]
    too_many = ",".join(map(str, range(101)))
    for wrong in ("", "a", "1,", "-1", "1 2", "1" * 20, too_many):
        answer = await api.get(f"/v1/subscriptions?ids={wrong}")
        assert answer.problem == (422, "invalid_parameter"), wrong
        assert answer.body["detail"] == "ids must be 1 to 100 ids, separated by commas"


BAD_URLS = {
    "http://receiver.example/": "https_required",
    "ftp://receiver.example/": "scheme",
    "": "scheme",
    "//receiver.example/p": "scheme",
    "https:///path": "host_missing",
    " https://receiver.example": "control_char",
    "https://receiver.example/a\r\nX: y": "control_char",
    "https://receiver.example/\0": "control_char",
    "https://user:pw@receiver.example/": "userinfo",
    "https://receiver.example/#f": "fragment",
    "https://10.0.0.1/": "blocked_address",
    "https://169.254.169.254/latest/meta-data/": "blocked_address",
    "https://[::ffff:10.0.0.1]/": "blocked_address",
    "https://[fe80::1%25lo]/": "ipv6_zone",
    "https://2130706433/": "host",
    "https://a..b/": "host",
    "https://receiver.example:22/": "port",
    "https://receiver.example:99999/": "port",
    "https://receiver.example/%0d%0a": "path",
    "https://receiver.example/" + "a" * 500: "url_too_long",
}


BAD_HEADERS: list[tuple[dict[str, str], str]] = [
    ({"X-A": "a\r\nX: y"}, "header_value"),
    ({"X-A": "é☃"}, "header_value"),
    ({"X-A": "a\tb"}, "header_value"),
    ({"": "1"}, "header_name"),
    ({"X A": "1"}, "header_name"),
    ({"Content-Length": "999"}, "header_forbidden"),
    ({"Host": "evil.internal"}, "header_forbidden"),
    ({"Webhook-Id": "1"}, "header_forbidden"),
    ({"X-A": "1", "x-a": "2"}, "header_duplicate"),
    ({f"X-{number}": "1" for number in range(21)}, "too_many_headers"),
]


async def test_invalid_urls_headers_and_policies_are_rejected(api: Client, flow: Flow) -> None:
    """The code says what is wrong, the same for create and patch; nothing is stored or changed."""
    good = {"event_type": "a", "callback_url": "https://receiver.example/hook"}
    cases: list[tuple[dict[str, Any], str]] = [
        *(({"callback_url": url}, code) for url, code in BAD_URLS.items()),
        *(({"headers": headers}, code) for headers, code in BAD_HEADERS),
        ({"headers": {"X-A": 7}}, "invalid_request"),
        ({"headers": None}, "invalid_request"),
        ({"callback_url": None}, "invalid_request"),
        ({"max_attempts": 0}, "invalid_request"),
        ({"max_attempts": 1001}, "invalid_request"),
        ({"max_attempts": "3"}, "invalid_request"),
        ({"base_delay_seconds": -1}, "invalid_request"),
        ({"base_delay_seconds": 31536001}, "invalid_request"),
        ({"description": "d" * 501}, "invalid_request"),
        ({"description": "a\0"}, "invalid_request"),
        ({"verified": True}, "unknown_field"),
        ({"event_types": []}, "invalid_request"),
        ({"event_types": ["a"] * 101}, "invalid_request"),
        *(({"event_types": [pattern]}, "invalid_request") for pattern in ("a.*.b", "**", "a*", "")),
        ({"filter": {"x": "v" * 101}}, "invalid_request"),
        ({"filter": {"": "v"}}, "invalid_request"),
        ({"filter": {f"l{number}": "" for number in range(21)}}, "invalid_request"),
        ({"format": "xml"}, "invalid_request"),
        ({"max_per_second": 0}, "invalid_request"),
        ({"paused": None}, "invalid_request"),
    ]
    made = (await api.post("/v1/subscriptions", good)).body
    made.pop("secret")
    for fields, code in cases:
        answer = await api.post("/v1/subscriptions", good | fields)
        assert answer.problem == (422, code), (fields, answer)
        answer = await api.patch(f"/v1/subscriptions/{made['id']}", fields)
        assert answer.problem == (422, code), (fields, answer)
    for fields in ({"active": None}, {"active": 1}):
        answer = await api.patch(f"/v1/subscriptions/{made['id']}", fields)
        assert answer.problem == (422, "invalid_request"), fields
    for secret in ("whsec_x", "whsec_\0", "x", "whsec_" + "A" * 200):
        answer = await api.post("/v1/subscriptions", good | {"secret": secret})
        assert answer.problem == (422, "invalid_request"), secret
    for fields in ({"tenant": "a b"}, {"tenant": ""}, {"event_types": ["other", "a"]}):
        answer = await api.post("/v1/subscriptions", good | fields)
        assert answer.problem == (422, "invalid_request"), fields
    for fields in ({"secret": "whsec_x"}, {"tenant": "b"}, {"deleted_at": None}):
        answer = await api.patch(f"/v1/subscriptions/{made['id']}", fields)
        assert answer.problem == (422, "unknown_field"), fields
    assert (await api.get(f"/v1/subscriptions/{made['id']}")).body == made
    assert await flow.daemon.fetchval("select count(*) from webhookd.subscriptions") == 1


async def test_patch_changes_only_the_given_fields(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Policy, headers and `active` change; null removes an override; a new address waits."""
    made = await api.subscribe(endpoint, max_attempts=3)
    path = f"/v1/subscriptions/{made['id']}"
    changed = await api.patch(path, {"max_attempts": None, "base_delay_seconds": 1.5, "active": False})
    assert changed.status == 200
    assert (changed.body["max_attempts"], changed.body["base_delay_seconds"]) == (None, 1.5)
    assert (changed.body["active"], changed.body["verified"]) == (False, True)
    assert (await api.patch(path, {})).body == (await api.get(path)).body

    await api.patch(path, {"active": True, "headers": {"X-Key": "k"}, "description": "d"})
    await api.event()
    request = (await endpoint.received(2))[-1]
    assert request.headers["x-key"] == "k"
    moved = await api.patch(path, {"callback_url": endpoint.url("/moved")})
    assert (moved.body["active"], moved.body["verified"]) == (True, True)
    assert (moved.body["callback_url"], moved.body["pending_callback_url"]) == (
        made["callback_url"],
        endpoint.url("/moved"),
    )
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")


async def test_paused_subscription_resumes_at_once(
    api: Client, endpoint: Endpoint, flow: Flow, daemon: DaemonProcess
) -> None:
    """Held deliveries are sent as soon as a PATCH makes the subscription active again."""
    made = await api.subscribe(endpoint, base_delay_seconds=0)
    is_paused = threading.Event()

    async def fail(_: Request, connection: Connection) -> bool:
        # Not earlier, or its retry may already be in flight, or all attempts used up.
        await asyncio.to_thread(is_paused.wait)
        await connection.send(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n")
        return True

    endpoint.behave(fail)
    path = f"/v1/subscriptions/{made['id']}"
    await api.event()
    await endpoint.received(2)
    await api.patch(path, {"active": False})
    is_paused.set()
    await until(
        flow.daemon,
        "select exists (select from webhookd.webhook_delivery_sagas where status = 'PendingRetry')",
    )
    [held] = (await api.get("/v1/deliveries")).body["items"]
    assert held["held"] is True
    endpoint.answer(200)
    await api.patch(path, {"active": True})
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    assert daemon.metric("webhookd_service_restarts_total") == 0


async def test_rotated_secret_signs_beside_the_old_one(make_api: MakeApi, endpoint: Endpoint) -> None:
    """During the overlap, which is a setting, both secrets verify a delivery."""
    api = await make_api(subscriptions={"secret_overlap_seconds": 3600})
    made = await api.subscribe(endpoint)
    rotated = await api.post(f"/v1/subscriptions/{made['id']}/rotate-secret")
    assert rotated.status == 200
    assert set(rotated.body) == {"secret", "previous_valid_until"}
    left = datetime.fromisoformat(rotated.body["previous_valid_until"]).timestamp() - time.time()
    assert 3500 < left < 3700
    await api.event()
    request = (await endpoint.received(2))[-1]
    for secret in (made["secret"], rotated.body["secret"]):
        Webhook(secret).verify(request.body, request.headers)
    assert (await api.post("/v1/subscriptions/999/rotate-secret")).problem == (404, "not_found")


async def test_a45_two_subscriptions_may_share_an_address(api: Client, endpoint: Endpoint) -> None:
    """Each has its own secret and its own delivery of the event."""
    made = [await api.subscribe(endpoint) for _ in range(2)]
    event_id = (await api.event()).body["id"]
    requests = (await endpoint.received(4))[2:]
    for subscription in made:
        assert sum(verifies(request, subscription["secret"]) for request in requests) == 1
    assert {request.headers["webhook-id"] for request in requests} == {f"evt_{event_id}"}


async def test_wrong_event_types_are_refused_in_words(api: Client) -> None:
    """The message names the wrong pattern and the allowed forms, and has no regular expression."""
    forms = (
        "must be an event type (order.created), a prefix (order.*) or *; words have letters, digits and _, "
        "and are joined by dots"
    )
    new = {"callback_url": "https://receiver.example/hook"}
    long = "x y" * 33
    for fields, words in (
        ({"event_types": ["order.paid", "a.*.b"]}, f'event_types: "a.*.b" {forms}'),
        ({"event_types": ["order.paid", long + "z"]}, f'event_types: "{long}z" {forms}'),
        ({"event_types": ['ord"er']}, f'event_types: "ord\\"er" {forms}'),
        ({"event_type": "a b"}, f'event_type: "a b" {forms}'),
    ):
        refused = await api.post("/v1/subscriptions", new | fields)
        assert (refused.problem, refused.body["detail"]) == ((422, "invalid_request"), words)
    # A number that Python cannot represent is no error here.
    refused = await api.send(b'{"event_types": ["a b"], "max_attempts": 1e999}', "/v1/subscriptions")
    assert refused.body["detail"] == f'event_types: "a b" {forms}'
    listed = await api.get("/v1/subscriptions?event_type=a%20b")
    assert (listed.problem, listed.body["detail"]) == (
        (422, "invalid_parameter"),
        f'event_type: "a b" {forms}',
    )
    published = await api.get("/v1/events?event_type=order.*")
    assert published.body["detail"] == "event_type must be words of letters, digits and _, joined by dots"
