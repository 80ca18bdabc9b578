"""The HTTP API of a real daemon: what each route answers, to whom, and what it says to nonsense."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pytest
from standardwebhooks import Webhook

from tests.flow.conftest import MakeDaemon
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.postgres import LocalServer
from tests.support.waiting import until

MAX_BYTES = 4096
SCOPES = ("ingest", "subscriptions", "operate", "read")
JSON = {"Content-Type": "application/json"}
# A question that waits for the database is answered in less than this, whatever the database does.
UNAVAILABLE_SECONDS = 2.0


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: Any
    headers: Any

    @property
    def code(self) -> str:
        """The code of a problem, which must be one."""
        assert self.headers["Content-Type"] == "application/problem+json", self
        assert self.body["status"] == self.status
        assert self.body["detail"]
        return str(self.body["code"])

    @property
    def told(self) -> tuple[int, str]:
        return self.status, self.code


class Client:
    """Asks a daemon, with a token or without."""

    def __init__(
        self, session: aiohttp.ClientSession, daemon: DaemonProcess, token: str | None = None
    ) -> None:
        self._session = session
        self._daemon = daemon
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def as_token(self, token: str) -> "Client":
        return Client(self._session, self._daemon, token)

    async def ask(self, method: str, path: str, **request: Any) -> Answer:
        """Anything."""
        headers = self._headers | request.pop("headers", {})
        url = f"http://127.0.0.1:{self._daemon.port}{path}"
        async with self._session.request(method, url, headers=headers, **request) as answer:
            text = await answer.read()
            is_json = "json" in answer.headers.get("Content-Type", "")
            return Answer(answer.status, json.loads(text) if is_json and text else text, answer.headers)

    async def get(self, path: str) -> Answer:
        return await self.ask("GET", path)

    async def post(self, path: str, body: Any = None) -> Answer:
        return await self.ask("POST", path, **({} if body is None else {"json": body}))

    async def patch(self, path: str, body: Any) -> Answer:
        return await self.ask("PATCH", path, json=body)

    async def send(self, body: bytes, path: str = "/v1/events") -> Answer:
        """These very bytes."""
        return await self.ask("POST", path, data=body, headers=JSON)

    async def event(self, **fields: Any) -> Answer:
        return await self.post("/v1/events", {"event_type": EVENT_TYPE, "payload": {}} | fields)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Give connections."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=20)
    ) as session:
        yield session


@pytest.fixture
async def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    """Give an instance without tokens, which takes small bodies."""
    return await make_daemon(api={"max_payload_bytes": MAX_BYTES}, delivery={"timeout_seconds": 1.0}).start()


@pytest.fixture
def api(session: aiohttp.ClientSession, daemon: DaemonProcess) -> Client:
    """Give a client of it."""
    return Client(session, daemon)


async def subscribe(api: Client, endpoint: Endpoint, **fields: Any) -> dict[str, Any]:
    """A verified subscription, made and verified through the API."""
    endpoint.echo_challenge()
    created = await api.post(
        "/v1/subscriptions", {"event_type": EVENT_TYPE, "callback_url": endpoint.url("/hook")} | fields
    )
    assert created.status == 201, created
    verified = await api.post(f"/v1/subscriptions/{created.body['id']}/verify")
    assert verified.status == 200, verified
    body: dict[str, Any] = created.body
    return body


async def dead_letter(api: Client, flow: Flow, endpoint: Endpoint) -> int:
    """One more dead letter's id."""
    endpoint.answer(500)
    event_id = (await api.event()).body["id"]
    await until(
        flow.daemon, "select exists (select from webhookd.dead_letters where event_id = $1)", event_id
    )
    letter_id: int = await flow.daemon.fetchval(
        "select id from webhookd.dead_letters where event_id = $1", event_id
    )
    return letter_id


def is_time(text: str) -> bool:
    """Whether it is RFC 3339 in UTC."""
    return text.endswith("Z") and datetime.fromisoformat(text).utcoffset() is not None


# Events.


async def test_an_event_is_accepted_and_delivered_byte_for_byte(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """202 after the commit, and the payload arrives as it was sent, spaces and all."""
    subscription = await subscribe(api, endpoint)
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


async def test_an_idempotency_key_stores_once(api: Client, flow: Flow) -> None:
    """Same key and content: the first id. Other content: 409. In header and body: they must agree."""
    first = await api.event(idempotency_key="a.b/1", correlation_id="c-1")
    again = await api.event(idempotency_key="a.b/1")
    assert (again.status, again.body["duplicate"]) == (202, True)
    assert again.body["id"] == first.body["id"]
    assert again.body["created_at"] == first.body["created_at"]
    conflict = await api.event(idempotency_key="a.b/1", payload=[])
    assert conflict.told == (409, "idempotency_conflict")
    assert conflict.body["event_id"] == first.body["id"]

    body = {"event_type": EVENT_TYPE, "payload": {}}
    in_header = await api.ask("POST", "/v1/events", json=body, headers={"Idempotency-Key": "a.b/1"})
    assert in_header.body["id"] == first.body["id"]
    both = body | {"idempotency_key": "k"}
    agreeing = await api.ask("POST", "/v1/events", json=both, headers={"Idempotency-Key": "k"})
    assert (agreeing.status, agreeing.body["duplicate"]) == (202, False)
    differing = await api.ask("POST", "/v1/events", json=both, headers={"Idempotency-Key": "K"})
    assert differing.told == (422, "idempotency_key_mismatch")
    too_long = await api.ask("POST", "/v1/events", json=body, headers={"Idempotency-Key": "k" * 256})
    assert too_long.told == (422, "invalid_request")
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 2


async def test_a_batch_is_all_or_nothing(api: Client, flow: Flow) -> None:
    """Ids in order, a key twice is a duplicate; one bad event and nothing is stored."""
    one = {"event_type": EVENT_TYPE, "payload": 1, "idempotency_key": "k"}
    answer = await api.post("/v1/events/batch", {"events": [one, one, {"event_type": "b", "payload": None}]})
    assert answer.status == 202
    ids = [event["id"] for event in answer.body["events"]]
    assert [event["duplicate"] for event in answer.body["events"]] == [False, True, False]
    assert ids[0] == ids[1] != ids[2]

    new = {"event_type": EVENT_TYPE, "payload": 1}
    for events, told in (
        ([new, one | {"payload": 2}], (409, "idempotency_conflict")),
        ([new, new | {"event_type": "a..b"}], (422, "invalid_request")),
        ([new, new | {"more": 1}], (422, "unknown_field")),
        ([], (422, "invalid_request")),
    ):
        assert (await api.post("/v1/events/batch", {"events": events})).told == told
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 2


async def test_a_batch_has_a_thousand_events_at_most(make_daemon: MakeDaemon, session: Any) -> None:
    """1,000 are taken, 1,001 are not."""
    api = Client(session, await make_daemon().start())
    events = [{"event_type": "a", "payload": number} for number in range(1001)]
    assert (await api.post("/v1/events/batch", {"events": events})).told == (422, "batch_too_large")
    answer = await api.post("/v1/events/batch", {"events": events[:1000]})
    assert len({event["id"] for event in answer.body["events"]}) == 1000


async def test_bodies_that_are_no_event_are_refused(api: Client, flow: Flow) -> None:
    """Each gets its own answer, and nothing is stored."""

    def payload(text: bytes) -> bytes:
        return b'{"event_type": "a", "payload": %s}' % text

    cases: list[tuple[bytes, tuple[int, str]]] = [
        (b"", (400, "malformed_json")),
        (b"{} x", (400, "malformed_json")),
        (b"[]", (422, "invalid_request")),
        (b"7", (422, "invalid_request")),
        (b"\xef\xbb\xbf" + payload(b"1"), (400, "malformed_json")),
        (payload(b"1").decode().encode("utf-16"), (400, "malformed_json")),
        (payload(b"1").decode().encode("utf-32"), (400, "malformed_json")),
        (payload(b'"\xff"'), (400, "malformed_json")),
        (payload(b'"\xed\xa0\x80"'), (400, "malformed_json")),
        (payload(b'"\\ud800 alone"'), (400, "malformed_json")),
        (payload(b"NaN"), (400, "malformed_json")),
        (payload(b"Infinity"), (400, "malformed_json")),
        (payload(b"[1,]"), (400, "malformed_json")),
        (payload(b"[" * 501 + b"]" * 501), (400, "too_deep")),
        (payload(b"[" * 2000), (400, "too_deep")),
        (b'{"event_type": "a"}', (422, "invalid_request")),
        (b'{"payload": 1}', (422, "invalid_request")),
        (b'{"event_type": "a", "payload": 1, "id": 7}', (422, "unknown_field")),
        (b'{"event_type": "a", "payload": 1, "__proto__": {}}', (422, "unknown_field")),
    ]
    for event_type in ("", "a" * 101, "a..b", "a b", "a%", "A.\u0430", "*", "a\n", "a\0", ".a", 7, None):
        body = json.dumps({"event_type": event_type, "payload": 1}).encode()
        cases.append((body, (422, "invalid_request")))
    for field, values in {
        "idempotency_key": ("", "k" * 256, "a\0", "a\n", 7),
        "correlation_id": ("", "c" * 256, "é", "a\r\nX: y", " a", 7),
    }.items():
        for value in values:
            body = json.dumps({"event_type": "a", "payload": 1, field: value}).encode()
            cases.append((body, (422, "invalid_request")))
    for sent, told in cases:
        answer = await api.send(sent)
        assert answer.told == told, (sent[:80], answer)
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 0


async def test_what_json_allows_is_kept(api: Client, flow: Flow) -> None:
    """Scalars, doubled keys, NUL escapes, huge numbers, brackets in strings and 498 levels are payloads."""
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
        shown = await api.ask("GET", f"/v1/events/{answer.body['id']}")
        assert shown.body["payload"] == json.loads(text)
    stored = await flow.daemon.fetch("select payload from webhookd.events order by id")
    assert [row["payload"] for row in stored] == texts


async def test_a_body_may_be_as_large_as_is_set(api: Client, daemon: DaemonProcess) -> None:
    """Exactly the bound is taken, a byte more is not, announced or chunked; the bound is reloaded."""
    frame = b'{"event_type":"a","payload":"%s"}'
    full = frame % (b"x" * (MAX_BYTES - len(frame) + 2))
    assert len(full) == MAX_BYTES
    over = full[:-2] + b'x"}'
    assert (await api.send(full)).status == 202
    assert (await api.send(over)).told == (413, "payload_too_large")

    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        yield body[:1000]
        yield body[1000:]

    chunked = await api.ask("POST", "/v1/events", data=chunks(full), headers=JSON)
    assert chunked.status == 202
    chunked = await api.ask("POST", "/v1/events", data=chunks(over), headers=JSON)
    assert chunked.told == (413, "payload_too_large")
    daemon.configure(api={"max_payload_bytes": MAX_BYTES + 1})
    daemon.sighup()
    await daemon.until(lambda: daemon.logged("was reloaded"), "reloaded")
    assert (await api.send(over)).status == 202


async def test_a_length_that_is_too_large_is_refused_from_the_header(daemon: DaemonProcess) -> None:
    """The answer comes at once, before any body, and the connection ends."""
    head = (
        "POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 99999999999\r\n\r\n"
    )
    started = time.monotonic()
    answer = await raw(daemon, head.encode() + b"{")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"payload_too_large" in answer
    assert time.monotonic() - started < 5


async def test_wrong_types_and_encodings_are_refused(api: Client) -> None:
    """Only application/json in UTF-8, and not encoded."""
    body = b'{"event_type":"a","payload":1}'
    for kind in (
        "text/html",
        "application/json; charset=utf-16",
        "application/json; charset=nonsense",
        "json",
        "",
    ):
        answer = await api.ask("POST", "/v1/events", data=body, headers={"Content-Type": kind})
        assert answer.told == (415, "unsupported_media_type"), kind
    for encoding, sent in (("gzip", gzip.compress(body)), ("gzip", b"garbage"), ("br", body)):
        answer = await api.ask("POST", "/v1/events", data=sent, headers=JSON | {"Content-Encoding": encoding})
        assert answer.told == (415, "unsupported_encoding"), encoding
    good = {"Content-Type": "Application/JSON; charset=UTF-8", "Content-Encoding": "identity"}
    assert (await api.ask("POST", "/v1/events", data=body, headers=good)).status == 202


async def test_concurrent_posts_share_commits(api: Client, flow: Flow) -> None:
    """100 posts at once: each is stored once, in fewer commits than posts, with bad ones among them."""
    good = [api.event(payload={"n": number}) for number in range(100)]
    bad = [api.event(event_type="a..b"), api.event(idempotency_key="k"), api.event(idempotency_key="k")]
    answers = await asyncio.gather(*good, *bad)
    assert [answer.status for answer in answers] == [202] * 100 + [422, 202, 202]
    ids = [answer.body["id"] for answer in answers[:100]]
    assert len(set(ids)) == 100
    rows = await flow.daemon.fetch("select id, payload, xmin::text from webhookd.events order by id")
    numbers = {row["id"]: json.loads(row["payload"]).get("n") for row in rows}
    assert [numbers[event_id] for event_id in ids] == list(range(100))
    assert len(rows) == 101
    assert len({row["xmin"] for row in rows}) < 50


async def test_one_members_conflict_spoils_no_other(api: Client, flow: Flow) -> None:
    """In a group that the database refuses, each is answered for itself."""
    await api.event(idempotency_key="taken", payload=1)
    asked = [api.event(idempotency_key="taken", payload=2), *(api.event(payload=n) for n in range(50))]
    answers = await asyncio.gather(*asked)
    assert answers[0].told == (409, "idempotency_conflict")
    assert {answer.status for answer in answers[1:]} == {202}
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 51


async def test_a_key_of_an_open_transaction_holds_up_nobody_else(
    api: Client, flow: Flow, database: Database
) -> None:
    """Its own post waits, then is told 503 in time; the others of its group are stored meanwhile."""
    application = await database.connect("application")
    transaction = application.transaction()
    await transaction.start()
    await application.fetchval("select webhookd.publish('a', '1', 'held')")
    started = time.monotonic()
    # The first goes alone; those that come while it is stored are a group.
    others = [asyncio.create_task(api.event()) for _ in range(10)]
    held = asyncio.create_task(api.event(event_type="a", payload=1, idempotency_key="held"))
    others += [asyncio.create_task(api.event()) for _ in range(10)]
    assert {answer.status for answer in await asyncio.gather(*others)} == {202}
    assert not held.done()
    assert (await held).told == (503, "unavailable")
    assert time.monotonic() - started < UNAVAILABLE_SECONDS
    await transaction.commit()
    again = await api.event(event_type="a", payload=1, idempotency_key="held")
    assert (again.status, again.body["duplicate"]) == (202, True)
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 21


async def test_a_key_that_is_freed_in_time_is_waited_for(api: Client, database: Database) -> None:
    """The application's transaction rolls back: the post that waited for it is the first."""
    application = await database.connect("application")
    observer = await database.connect("superuser")
    transaction = application.transaction()
    await transaction.start()
    await application.fetchval("select webhookd.publish('a', '1', 'held')")
    held = asyncio.create_task(api.event(event_type="a", payload=1, idempotency_key="held"))
    # For longer than a group waits: so it waits alone.
    await until(
        observer,
        "select exists (select from pg_stat_activity where application_name = 'webhookd'"
        " and wait_event_type = 'Lock' and clock_timestamp() - query_start > interval '300 ms')",
    )
    await transaction.rollback()
    answer = await held
    assert (answer.status, answer.body["duplicate"]) == (202, False)


async def test_events_are_listed_in_pages(api: Client) -> None:
    """Newest first, each once, filtered; the last page has no cursor."""
    events = [{"event_type": f"type_{number % 2}", "payload": number} for number in range(7)]
    accepted = await api.post("/v1/events/batch", {"events": events})
    ids = [event["id"] for event in accepted.body["events"]]
    assert await pages(api, "/v1/events", limit=3) == [ids[:3:-1], ids[3:0:-1], ids[:1]]
    assert await pages(api, "/v1/events?event_type=type_1", limit=2) == [[ids[5], ids[3]], [ids[1]]]
    await api.event(idempotency_key="k", correlation_id="c")
    [found] = (await api.get("/v1/events?idempotency_key=k")).body["items"]
    assert set(found) == {"id", "event_type", "created_at", "idempotency_key", "correlation_id"}
    assert (found["idempotency_key"], found["correlation_id"]) == ("k", "c")
    assert (await api.get("/v1/events?limit=1&cursor=1")).body == {"items": [], "next_cursor": None}


async def pages(api: Client, path: str, limit: int) -> list[list[int]]:
    """The ids of each page."""
    found = []
    cursor = ""
    while True:
        mark = "&" if "?" in path else "?"
        answer = await api.get(f"{path}{mark}limit={limit}{cursor}")
        assert answer.status == 200, answer
        assert set(answer.body) == {"items", "next_cursor"}
        found.append([item["id"] for item in answer.body["items"]])
        if answer.body["next_cursor"] is None:
            return found
        cursor = f"&cursor={answer.body['next_cursor']}"


async def test_an_event_tells_what_became_of_it(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """For each subscription of its type: its delivery's status, or why there is none."""
    delivered = await subscribe(api, endpoint)
    inactive = await subscribe(api, endpoint)
    await api.patch(f"/v1/subscriptions/{inactive['id']}", {"active": False})
    url = endpoint.url("/other")
    unverified = await api.post("/v1/subscriptions", {"event_type": EVENT_TYPE, "callback_url": url})
    await api.post("/v1/subscriptions", {"event_type": "other", "callback_url": url})
    event_id = (await api.event(payload={"a": 1})).body["id"]
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    await api.patch(f"/v1/subscriptions/{inactive['id']}", {"active": True})
    late = await subscribe(api, endpoint)

    found = (await api.get(f"/v1/events/{event_id}")).body
    assert found["payload"] == {"a": 1}
    assert found["more_deliveries"] is False
    deliveries = {one["subscription_id"]: (one["status"], one["reason"]) for one in found["deliveries"]}
    assert deliveries == {
        delivered["id"]: ("Completed", None),
        inactive["id"]: ("not_routed", "inactive"),
        unverified.body["id"]: ("not_routed", "unverified"),
        late["id"]: ("not_routed", "subscribed_later"),
    }
    [saga] = [one for one in found["deliveries"] if one["saga_id"]]
    assert saga["attempt_count"] == 1
    assert saga["held"] is False


# Subscriptions.


async def test_a_subscription_is_made_and_read(api: Client, endpoint: Endpoint) -> None:
    """201 with the secret this once; the URL as it is stored; neither secret nor headers ever again."""
    asked = {
        "event_type": EVENT_TYPE,
        "callback_url": f"HTTPS://LOCALHOST:{endpoint.port}/a?b=1",
        "max_attempts": 3,
        "base_delay_seconds": 0.5,
        "headers": {"X-Key": "hidden"},
        "description": "of a test",
    }
    created = await api.post("/v1/subscriptions", asked)
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
        assert read.body[name] == asked[name]


async def test_subscriptions_are_listed_by_filter(api: Client, endpoint: Endpoint) -> None:
    """By type, by active, by verified; in pages."""
    first = await subscribe(api, endpoint)
    made = [
        (await api.post("/v1/subscriptions", {"event_type": "b", "callback_url": endpoint.url()})).body["id"]
        for _ in range(3)
    ]
    await api.patch(f"/v1/subscriptions/{made[0]}", {"active": False})
    everything = [*reversed(made), first["id"]]
    assert await pages(api, "/v1/subscriptions", limit=2) == [everything[:2], everything[2:]]
    assert await pages(api, "/v1/subscriptions?event_type=b", limit=9) == [everything[:3]]
    assert await pages(api, "/v1/subscriptions?active=false", limit=9) == [[made[0]]]
    assert await pages(api, "/v1/subscriptions?verified=true", limit=9) == [[first["id"]]]


async def test_bad_addresses_headers_and_policies_are_refused(api: Client, flow: Flow) -> None:
    """With the code of what is wrong, the same on create and on patch; and nothing is stored or changed."""
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
        ({"secret": "whsec_x"}, "unknown_field"),
    ]
    made = (await api.post("/v1/subscriptions", good)).body
    made.pop("secret")
    for fields, code in cases:
        answer = await api.post("/v1/subscriptions", good | fields)
        assert answer.told == (422, code), (fields, answer)
        answer = await api.patch(f"/v1/subscriptions/{made['id']}", fields)
        assert answer.told == (422, code), (fields, answer)
    for fields in ({"active": None}, {"active": 1}):
        answer = await api.patch(f"/v1/subscriptions/{made['id']}", fields)
        assert answer.told == (422, "invalid_request"), fields
    answer = await api.patch(f"/v1/subscriptions/{made['id']}", {"event_type": "b"})
    assert answer.told == (422, "unknown_field")
    assert (await api.get(f"/v1/subscriptions/{made['id']}")).body == made
    assert await flow.daemon.fetchval("select count(*) from webhookd.subscriptions") == 1


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


async def test_a_patch_changes_what_it_names(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """Policy, headers and the pause; null takes an override back; a new address is not verified."""
    made = await subscribe(api, endpoint, max_attempts=3)
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
    assert (moved.body["active"], moved.body["verified"]) == (True, False)
    await until(flow.daemon, "select not exists (select from webhookd.event_routing_queue)")


async def test_a_paused_subscription_resumes_at_once(
    api: Client, endpoint: Endpoint, flow: Flow, daemon: DaemonProcess
) -> None:
    """What was held while it was paused is delivered as soon as a PATCH makes it active again."""
    made = await subscribe(api, endpoint, base_delay_seconds=0)
    endpoint.answer(500)
    path = f"/v1/subscriptions/{made['id']}"
    await api.event()
    await endpoint.received(2)
    await api.patch(path, {"active": False})
    endpoint.answer(200)
    await until(
        flow.daemon,
        "select exists (select from webhookd.webhook_delivery_sagas where status = 'PendingRetry')",
    )
    [held] = (await api.get("/v1/deliveries")).body["items"]
    assert held["held"] is True
    await api.patch(path, {"active": True})
    await until(flow.daemon, "select status = 'Completed' from webhookd.webhook_delivery_sagas")
    assert daemon.metric("webhookd_service_restarts_total") == 0


async def test_verification_asks_with_a_signed_challenge(api: Client, endpoint: Endpoint) -> None:
    """In JSON or bare, the echo verifies; the reference library verifies the question."""
    for bare in (False, True):
        endpoint.requests.clear()
        endpoint.echo_challenge(bare=bare)
        created = await api.post(
            "/v1/subscriptions",
            {"event_type": "a", "callback_url": endpoint.url("/hook"), "headers": {"X-Key": "k"}},
        )
        verified = await api.post(f"/v1/subscriptions/{created.body['id']}/verify")
        assert (verified.status, verified.body["verified"]) == (200, True)
        assert verified.body["id"] == created.body["id"]
        [request] = endpoint.requests
        question = Webhook(created.body["secret"]).verify(request.body, request.headers)
        assert set(question) == {"type", "challenge"}
        assert question["type"] == "webhookd.verification"
        assert request.headers["x-key"] == "k"


async def test_verification_fails_in_so_many_words(api: Client, endpoint: Endpoint) -> None:
    """Each way an endpoint can fail is told, and leaves the subscription unverified."""
    created = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url("/hook")})
    path = f"/v1/subscriptions/{created.body['id']}"
    fails: list[tuple[Callable[[], None], str, int | None]] = [
        (lambda: endpoint.answer(500), "HTTP_500", 500),
        (lambda: endpoint.redirect_to(endpoint.url("/elsewhere")), "HTTP_307", 307),
        (lambda: endpoint.answer(200), "CHALLENGE_MISMATCH", 200),
        (lambda: endpoint.answer(200, b'{"challenge": "other"}'), "CHALLENGE_MISMATCH", 200),
        (lambda: endpoint.answer(200, b"[" * 4000), "CHALLENGE_MISMATCH", 200),
        (lambda: endpoint.answer(200, b"\xff\xfe\x00"), "CHALLENGE_MISMATCH", 200),
        (endpoint.endless_body, "CHALLENGE_MISMATCH", 200),
        (endpoint.hang, "TIMEOUT", None),
        (endpoint.close_at_once, "CONNECT_FAILED", None),
        (endpoint.garbage, "PROTOCOL_ERROR", None),
    ]
    for behave, error_code, status in fails:
        behave()
        answer = await api.post(f"{path}/verify")
        assert answer.told == (422, "verification_failed"), error_code
        assert (answer.body["error_code"], answer.body["response_status"]) == (error_code, status)
    assert (await api.get(path)).body["verified"] is False
    assert (await api.post("/v1/subscriptions/999/verify")).told == (404, "not_found")


async def test_verification_goes_through_the_guard(
    make_daemon: MakeDaemon, session: aiohttp.ClientSession, endpoint: Endpoint, flow: Flow
) -> None:
    """An address that was allowed when it was stored, and is not now, is not dialled."""
    daemon = make_daemon()
    api = Client(session, await daemon.start())
    created = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url()})
    daemon.configure(delivery={"allow_networks": []})
    daemon.sighup()
    await daemon.until(lambda: daemon.logged("was reloaded"), "reloaded")
    answer = await api.post(f"/v1/subscriptions/{created.body['id']}/verify")
    assert (answer.code, answer.body["error_code"]) == ("verification_failed", "ADDRESS_BLOCKED")
    assert endpoint.requests == []
    refused = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url()})
    assert refused.told == (422, "blocked_address")
    assert await flow.daemon.fetchval("select not bool_or(verified) from webhookd.subscriptions")


async def test_a_verification_of_an_old_address_does_not_count(api: Client, endpoint: Endpoint) -> None:
    """The address changes while the endpoint thinks: 409, and not verified."""
    may_answer = asyncio.Event()
    loop = asyncio.get_running_loop()
    created = await api.post("/v1/subscriptions", {"event_type": "a", "callback_url": endpoint.url("/old")})
    path = f"/v1/subscriptions/{created.body['id']}"

    async def echo_later(request: Any, connection: Any) -> bool:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may_answer.wait(), loop))
        body = json.loads(request.body)["challenge"].encode()
        await connection.send(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        return True

    endpoint.behave(echo_later)
    verifying = asyncio.create_task(api.post(f"{path}/verify"))
    await endpoint.received(1)
    await api.patch(path, {"callback_url": endpoint.url("/new")})
    may_answer.set()
    assert (await verifying).told == (409, "verification_stale")
    assert (await api.get(path)).body["verified"] is False


async def test_a_rotated_secret_signs_beside_the_old_one(
    make_daemon: MakeDaemon, session: aiohttp.ClientSession, endpoint: Endpoint
) -> None:
    """Both verify a delivery during the overlap, which is a setting."""
    api = Client(session, await make_daemon(subscriptions={"secret_overlap_seconds": 3600}).start())
    made = await subscribe(api, endpoint)
    rotated = await api.post(f"/v1/subscriptions/{made['id']}/rotate-secret")
    assert rotated.status == 200
    assert set(rotated.body) == {"secret", "previous_valid_until"}
    left = datetime.fromisoformat(rotated.body["previous_valid_until"]).timestamp() - time.time()
    assert 3500 < left < 3700
    await api.event()
    request = (await endpoint.received(2))[-1]
    for secret in (made["secret"], rotated.body["secret"]):
        Webhook(secret).verify(request.body, request.headers)
    assert (await api.post("/v1/subscriptions/999/rotate-secret")).told == (404, "not_found")


# Deliveries and dead letters.


async def test_deliveries_are_listed_and_shown_with_their_attempts(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """By status, subscription and event; one with what each attempt was answered."""
    made = await subscribe(api, endpoint, max_attempts=2)
    endpoint.fail_times(1, 503)
    ids = [(await api.event()).body["id"] for _ in range(2)]
    await until(
        flow.daemon, "select count(*) = 2 from webhookd.webhook_delivery_sagas where status = 'Completed'"
    )
    listed = (await api.get("/v1/deliveries")).body["items"]
    assert [one["event_id"] for one in listed] == ids[::-1]
    assert {one["subscription_id"] for one in listed} == {made["id"]}
    assert await pages(api, "/v1/deliveries?status=Completed", limit=1) == [[one["id"]] for one in listed]
    assert await pages(api, "/v1/deliveries?status=DeadLettered", limit=1) == [[]]
    assert await pages(api, f"/v1/deliveries?event_id={ids[0]}", limit=9) == [[listed[1]["id"]]]
    assert await pages(api, f"/v1/deliveries?subscription_id={made['id'] + 1}", limit=9) == [[]]
    retried = max(listed, key=lambda one: one["attempt_count"])
    one = (await api.get(f"/v1/deliveries/{retried['id']}")).body
    assert {name: one[name] for name in retried} == retried
    assert [(a["attempt"], a["status"], a["response_status"]) for a in one["attempts"]] == [
        (1, "Failed", 503),
        (2, "Completed", 200),
    ]
    assert one["attempts"][0]["error_code"] == "HTTP_503"
    assert is_time(one["attempts"][0]["finished_at"])
    assert "lease_token" not in one["attempts"][0]


async def test_a_dead_letter_is_shown_and_requeued_once(api: Client, endpoint: Endpoint, flow: Flow) -> None:
    """201 with the new saga, which is delivered; again: 409 with the same one."""
    made = await subscribe(api, endpoint, max_attempts=1)
    letter_id = await dead_letter(api, flow, endpoint)
    letter = (await api.get(f"/v1/dead-letters/{letter_id}")).body
    assert (letter["final_error_code"], letter["payload_snapshot"]) == ("HTTP_500", {})
    assert (letter["subscription_id"], letter["requeued_saga_id"]) == (made["id"], None)
    endpoint.answer(200)
    path = f"/v1/dead-letters/{letter_id}/requeue"
    answers = await asyncio.gather(*(api.post(path) for _ in range(5)))
    [requeued] = [answer for answer in answers if answer.status == 201]
    again = [answer for answer in answers if answer is not requeued]
    assert {answer.told for answer in again} == {(409, "already_requeued")}
    assert {answer.body["saga_id"] for answer in again} == {requeued.body["saga_id"]}
    await until(
        flow.daemon,
        "select status = 'Completed' from webhookd.webhook_delivery_sagas where id = $1",
        requeued.body["saga_id"],
    )
    shown = (await api.get(f"/v1/dead-letters/{letter_id}")).body
    assert shown["requeued_saga_id"] == requeued.body["saga_id"]
    assert (await api.post("/v1/dead-letters/999/requeue")).told == (404, "not_found")


async def test_a_requeue_to_a_held_subscription_is_refused(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """409 while it is paused; a bulk requeue skips and counts it."""
    made = await subscribe(api, endpoint, max_attempts=1)
    letter_id = await dead_letter(api, flow, endpoint)
    await api.patch(f"/v1/subscriptions/{made['id']}", {"active": False})
    answer = await api.post(f"/v1/dead-letters/{letter_id}/requeue")
    assert answer.told == (409, "subscription_held")
    many = await api.post("/v1/dead-letters/requeue", {"filter": {}, "dry_run": False})
    assert many.body == {"matched": 1, "requeued": 0, "skipped": 1}


async def test_dead_letters_are_listed_and_requeued_by_filter(
    api: Client, endpoint: Endpoint, flow: Flow
) -> None:
    """By subscription, error code and time; dry unless told otherwise; a bad filter is refused."""
    made = await subscribe(api, endpoint, max_attempts=1)
    letters = [await dead_letter(api, flow, endpoint) for _ in range(3)]
    failed_at = [(await api.get(f"/v1/dead-letters/{letter}")).body["failed_at"] for letter in letters]
    path = "/v1/dead-letters"
    assert await pages(api, path, limit=2) == [[letters[2], letters[1]], [letters[0]]]
    assert await pages(api, f"{path}?subscription_id={made['id']}", limit=9) == [letters[::-1]]
    assert await pages(api, f"{path}?error_code=HTTP_404", limit=9) == [[]]
    assert await pages(api, f"{path}?failed_after={failed_at[1]}", limit=9) == [[letters[2], letters[1]]]
    assert await pages(api, f"{path}?failed_before={failed_at[1]}", limit=9) == [[letters[0]]]

    requeue = f"{path}/requeue"
    counts = {"matched": 3, "requeued": 3, "skipped": 0}
    assert (await api.post(requeue, {"filter": {"error_code": "HTTP_500"}})).body == counts
    assert (await api.post(requeue, {"filter": {}, "dry_run": True})).body == counts
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 3
    some = {"filter": {"failed_before": failed_at[1]}, "dry_run": False}
    assert (await api.post(requeue, some)).body == {"matched": 1, "requeued": 1, "skipped": 0}
    await until(flow.daemon, "select count(*) = 4 from webhookd.dead_letters")
    many = await api.post(requeue, {"filter": {"subscription_id": made["id"]}, "dry_run": False})
    assert many.body == {"matched": 4, "requeued": 3, "skipped": 1}
    await until(flow.daemon, "select count(*) = 7 from webhookd.dead_letters")
    for body, code in (
        ({"filter": {"status": "x"}}, "unknown_field"),
        ({"dry_run": "no"}, "invalid_request"),
        ({"filter": {"failed_after": "2026-02-30T00:00:00Z"}}, "invalid_request"),
        ({"filter": {"failed_after": "2026-01-01T00:00:00"}}, "invalid_request"),
        ({"filter": {"failed_before": "infinity"}}, "invalid_request"),
    ):
        assert (await api.post(requeue, body)).told == (422, code), body


# Protocol.


async def test_ids_and_parameters_that_are_none(api: Client) -> None:
    """404 for an id that cannot be, 422 for a parameter: never a word of the database's."""
    for resource in ("events", "subscriptions", "deliveries", "dead-letters"):
        for item in (
            "0",
            "999",
            "abc",
            "1.5",
            "-1",
            "9" * 19,
            "9" * 100,
            "%00",
            "..%2f",
            "1%20or%201=1",
            "٣",
        ):
            answer = await api.get(f"/v1/{resource}/{item}")
            assert answer.told == (404, "not_found"), (resource, item)
        for query in (
            "limit=0",
            "limit=1001",
            "limit=x",
            "limit=1&limit=2",
            "cursor=' or 1=1--",
            "cursor=0",
            "cursor=99999999999999999999",
            "cursor=",
            "sort=id",
            "token=x",
        ):
            answer = await api.get(f"/v1/{resource}?{query}")
            assert answer.told == (422, "invalid_parameter"), (resource, query)
    for query in (
        "deliveries?status=completed",
        "deliveries?event_id=x",
        "events?event_type=%00",
        "events?idempotency_key=%00",
        "events?idempotency_key=%ff%00",
        "dead-letters?error_code=%00",
        "dead-letters?failed_after=infinity",
        "dead-letters?failed_after=2026-01-01",
        "subscriptions?active=maybe",
    ):
        assert (await api.get(f"/v1/{query}")).told == (422, "invalid_parameter"), query


async def test_unknown_routes_and_methods(api: Client) -> None:
    """404, and 405 with what is allowed; no CORS, no HEAD, no TRACE."""
    for path in ("/v2/events", "/v1/events/1/payload", "/nothing", "/v1//events"):
        assert (await api.get(path)).told == (404, "not_found")
    for method in ("DELETE", "PUT", "OPTIONS", "TRACE"):
        answer = await api.ask(method, "/v1/subscriptions/1")
        assert answer.told == (405, "method_not_allowed")
        assert answer.headers["Allow"] == "GET, PATCH"
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert (await api.ask("HEAD", "/v1/events")).status == 405


async def test_what_is_not_http_is_answered_and_closed(daemon: DaemonProcess, api: Client) -> None:
    """400 as a problem, and the connection ends; the daemon goes on."""
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not HTTP\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/events?" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        (
            b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        ),
    ):
        answer = await raw(daemon, data)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), (data[:60], answer)
        assert b"application/problem+json" in answer
    assert (await api.event()).status == 202
    assert not daemon.logged("a request failed")


async def raw(daemon: DaemonProcess, data: bytes) -> bytes:
    """All that comes back for these bytes, until the daemon ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def test_health_status_and_metrics(api: Client, daemon: DaemonProcess) -> None:
    """Each answers; accepted events are counted, duplicates not."""
    assert (await api.get("/healthz")).body == {"alive": True}
    assert (await api.get("/readyz")).body == {"ready": True}
    await api.event(idempotency_key="k")
    await api.event(idempotency_key="k")
    await api.post("/v1/events/batch", {"events": [{"event_type": "a", "payload": 1}] * 2})
    assert daemon.metric("webhookd_events_accepted_total") == 3
    status = (await api.get("/status")).body
    assert status["ready"] is True
    assert "api" in [service["name"] for service in status["services"]]


# Tokens.


def set_tokens(daemon: DaemonProcess, tokens: dict[str, tuple[str, ...]]) -> None:
    """Write tokens into the configuration file: each is what it is called, and has these scopes."""
    tables = [
        f'{{name = "{token}", sha256 = "{hashlib.sha256(token.encode()).hexdigest()}",'
        f" scopes = {json.dumps(scopes)}}}"
        for token, scopes in tokens.items()
    ]
    daemon.configure()
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(text.replace("[api]\n", f"[api]\ntokens = [{', '.join(tables)}]\n"))


ROUTES = {
    "ingest": ["POST /v1/events", "POST /v1/events/batch"],
    "subscriptions": [
        "POST /v1/subscriptions",
        "PATCH /v1/subscriptions/1",
        "POST /v1/subscriptions/1/verify",
        "POST /v1/subscriptions/1/rotate-secret",
    ],
    "operate": ["POST /v1/dead-letters/1/requeue", "POST /v1/dead-letters/requeue"],
    "read": [
        "GET /v1/events",
        "GET /v1/events/1",
        "GET /v1/subscriptions",
        "GET /v1/subscriptions/1",
        "GET /v1/deliveries",
        "GET /v1/deliveries/1",
        "GET /v1/dead-letters",
        "GET /v1/dead-letters/1",
        "GET /status",
        "GET /metrics",
    ],
}


async def test_each_route_needs_its_scope(make_daemon: MakeDaemon, session: aiohttp.ClientSession) -> None:
    """401 without a good token, 403 without the scope, through with it; health is open to all."""
    daemon = make_daemon()
    set_tokens(daemon, {scope: (scope,) for scope in SCOPES} | {"all": SCOPES})
    api = Client(session, await daemon.start())
    for needed, routes in ROUTES.items():
        for route in routes:
            method, path = route.split(" ")
            refused = await api.ask(method, path)
            assert refused.told == (401, "unauthorized"), route
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            for scope in SCOPES:
                answer = await api.as_token(scope).ask(method, path)
                if scope == needed:
                    assert answer.status not in (401, 403, 500), route
                else:
                    assert answer.told == (403, "forbidden"), route
            assert (await api.as_token("all").ask(method, path)).status not in (401, 403, 500)
    assert (await api.get("/healthz")).status == 200
    assert (await api.get("/readyz")).status == 200


async def test_tokens_that_are_none(make_daemon: MakeDaemon, session: aiohttp.ClientSession) -> None:
    """Every way of not having one is the same 401."""
    daemon = make_daemon()
    set_tokens(daemon, {"good": ("read",)})
    api = Client(session, await daemon.start())
    bodies = set()
    for value in (
        "",
        "Bearer",
        "Bearer ",
        "Basic Z29vZA==",
        "good",
        "Bearer goodx",
        "Bearer xood",
        "Bearer é",
    ):
        answer = await api.ask("GET", "/v1/events", headers={"Authorization": value})
        assert answer.told == (401, "unauthorized"), value
        bodies.add(json.dumps(answer.body))
    answer = await api.get("/v1/events?access_token=good")
    assert answer.told == (401, "unauthorized")
    bodies.add(json.dumps(answer.body))
    assert len(bodies) == 1
    twice = b"GET /v1/events HTTP/1.1\r\nHost: x\r\n" + b"Authorization: Bearer good\r\n" * 2 + b"\r\n"
    assert (await raw(daemon, twice)).startswith(b"HTTP/1.1 401 ")
    assert (await api.ask("GET", "/v1/events", headers={"Authorization": "bearer good"})).status == 200
    assert "good" not in daemon.log_path.read_text()


async def test_tokens_are_reloaded(make_daemon: MakeDaemon, session: aiohttp.ClientSession) -> None:
    """A token that is taken out stops at the reload, and one that is put in works."""
    daemon = make_daemon()
    set_tokens(daemon, {"old": ("read",)})
    api = Client(session, await daemon.start())
    assert (await api.as_token("old").get("/v1/events")).status == 200
    set_tokens(daemon, {"new": ("read",)})
    daemon.sighup()
    await daemon.until(lambda: daemon.logged("was reloaded"), "reloaded")
    assert (await api.as_token("old").get("/v1/events")).status == 401
    assert (await api.as_token("new").get("/v1/events")).status == 200


async def test_without_tokens_only_loopback_is_listened_on(make_daemon: MakeDaemon) -> None:
    """Another address without tokens is a bad configuration: exit 78, in one line."""
    daemon = make_daemon(api={"listen": "0.0.0.0:8470"})
    with pytest.raises(AssertionError):
        await daemon.start()
    assert daemon.process.returncode == 78
    [line] = daemon.log_path.read_text().splitlines()
    assert "api.listen" in line


async def test_without_tokens_a_web_page_may_not_ask(api: Client) -> None:
    """A page of another origin, or one whose name resolves to this machine, is refused."""
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
        answer = await api.ask("GET", "/v1/events", headers=headers)
        assert answer.told == (403, "forbidden"), headers


# Without a database.


class Wire:
    """A way to the database that a test can cut or stall."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        assert parts.port is not None
        self._target = (parts.hostname or "", parts.port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def dsn(self, dsn: str) -> str:
        parts = urlsplit(dsn)
        return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{self.port}").geturl()

    def stall(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """No connection stays, and none is taken."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        for one, other in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    """Give a way to the database."""
    if not isinstance(database.server, LocalServer):
        pytest.skip("the way to this server is not known to be TCP on this machine")
    wire = Wire(database.dsn("daemon"))
    await wire.open()
    yield wire
    await wire.close()


QUESTIONS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/events", {"event_type": "a", "payload": 1}),
    ("POST", "/v1/events/batch", {"events": [{"event_type": "a", "payload": 1}]}),
    ("POST", "/v1/subscriptions", {"event_type": "a", "callback_url": "https://receiver.example/"}),
    ("PATCH", "/v1/subscriptions/1", {"active": True}),
    ("POST", "/v1/subscriptions/1/verify", {}),
    ("POST", "/v1/dead-letters/1/requeue", {}),
    ("POST", "/v1/dead-letters/requeue", {}),
    ("GET", "/v1/events", None),
    ("GET", "/v1/deliveries/1", None),
]


@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_without_the_database_everything_is_503_in_time(
    how: str,
    make_daemon: MakeDaemon,
    session: aiohttp.ClientSession,
    wire: Wire,
    database: Database,
) -> None:
    """Gone or silent: 503 with Retry-After within the bound, alive all the while, and 202 again after it."""
    daemon = await make_daemon(database={"dsn": wire.dsn(database.dsn("daemon"))}).start()
    api = Client(session, daemon)
    assert (await api.event()).status == 202
    getattr(wire, how)()

    async def timed(method: str, path: str, body: Any) -> None:
        started = time.monotonic()
        answer = await api.ask(method, path, **({} if body is None else {"json": body}))
        assert answer.told == (503, "unavailable"), (method, path)
        assert answer.headers["Retry-After"]
        assert time.monotonic() - started < UNAVAILABLE_SECONDS, (method, path)

    for _ in range(2):
        await asyncio.gather(*(timed(*question) for question in QUESTIONS))
    assert (await api.get("/healthz")).status == 200
    if how == "cut":
        await wire.open()
    else:
        wire.flow()

    async def accepted() -> None:
        while (await api.event()).status != 202:  # noqa: ASYNC110  it is the daemon that is asked
            await asyncio.sleep(0.05)

    await asyncio.wait_for(accepted(), 10)
    assert not daemon.logged("a request failed")


async def test_open_connections_do_not_delay_the_end(daemon: DaemonProcess, api: Client) -> None:
    """SIGTERM with idle connections and half a request: exit 0 within the moment that requests are given."""
    await asyncio.gather(*(api.event() for _ in range(10)))
    _, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    writer.write(b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: app")
    await writer.drain()
    started = time.monotonic()
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert time.monotonic() - started < 8
    writer.close()


async def test_tokens_come_from_the_environment_as_json(
    make_daemon: MakeDaemon, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WEBHOOKD_API_TOKENS is the list as JSON."""
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = [{"name": "a", "sha256": digest, "scopes": ["read"]}]
    monkeypatch.setenv("WEBHOOKD_API_TOKENS", json.dumps(tokens))
    api = Client(session, await make_daemon().start())
    assert (await api.get("/v1/events")).status == 401
    assert (await api.as_token("secret").get("/v1/events")).status == 200
    assert (await api.as_token("secret").event()).status == 403
