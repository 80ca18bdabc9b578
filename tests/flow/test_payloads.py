"""Payloads are delivered byte for byte, however they were published."""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from standardwebhooks import Webhook

from tests.flow.conftest import MakeDaemon
from tests.support.database import Database
from tests.support.endpoint import Endpoint, Request
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until
from webhookd.deliveries import subscriptions

API_BODY_BYTES = 1024 * 1024
SQL_PAYLOAD_BYTES = 8 * 1024 * 1024
API_DEPTH = 499  # the envelope is one more
SQL_DEPTH = 2000
WRONG_CLOCK = Path(__file__).resolve().parents[1] / "support" / "wrong_clock"

AWKWARD = {
    "spaces": '{ "a" :\t1 ,\r\n "b":[ 1,2 , 3 ]\n}',
    "key order": '{"z":1,"a":2,"m":3,"B":4}',
    "duplicate keys": '{"a":1,"b":2,"a":3}',
    "numbers": "[1.10, 1e2, 1E+2, -0, 0.0, 1e999, 123456789012345678901234567890.10]",
    "escapes": r'["\u0000", "\ud83d\ude00", "\/", "\u00e9", "\"\\\b\f\n\r\t"]',
    "half a surrogate pair, escaped twice": r'["\\ud800"]',
    "beyond ASCII": '{"ключ":"é ☃ 😀","e\u0301":"\u2028\u200b\u202e\ufeff"}',
    "DEL and C1": '["\x7f\x80\x9f"]',
    "scalar": "7",
    "string": '"order"',
    "empty string": '""',
    "null": "null",
    "true": "true",
    "empty object": "{}",
    "empty array": "[]",
    "as if it were headers": '"\\r\\nX-Evil: 1"',
    "as if it were SQL": '"\'; drop table webhookd.events; --"',
}
DEEP = "[" * API_DEPTH + "]" * API_DEPTH


def sized(length: int) -> str:
    """Make a payload of this size; any change to it would be noticed."""
    numbers = ",".join(f"{number:07}" for number in range(length // 8))
    return f'"{numbers[: length - 2].ljust(length - 2, "x")}"'


def envelope(payload: str, correlation_id: str) -> bytes:
    """Make the body of POST /v1/events, with the raw payload inside."""
    return f'{{"event_type":"{EVENT_TYPE}","correlation_id":"{correlation_id}","payload":{payload}}}'.encode()


async def subscribe(flow: Flow, endpoint: Endpoint) -> Webhook:
    """Create a subscription; returns what verifies its deliveries."""
    created = await subscriptions.create(flow.daemon, EVENT_TYPE, endpoint.url("/hook"))
    await flow.verify(created.subscription_id)
    return Webhook(created.signing_secret)


async def test_signature_uses_the_database_clock(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The host is ten minutes ahead, twice what the reference library tolerates."""
    webhook = await subscribe(flow, endpoint)
    path = os.pathsep.join([str(WRONG_CLOCK), *filter(None, [os.environ.get("PYTHONPATH")])])
    daemon = await make_daemon({"PYTHONPATH": path}).start()
    await flow.publish()
    [request] = await endpoint.received(1)
    webhook.verify(request.body, request.headers)
    logged_at = datetime.fromisoformat(json.loads(daemon.output_lines()[-1])["time"])
    assert logged_at > datetime.now(UTC) + timedelta(minutes=5), "the daemon's clock was not ahead"


async def check(endpoint: Endpoint, webhook: Webhook, published: Mapping[int, tuple[str, str]]) -> None:
    """Check that every event arrived once, signed, with its exact payload and its correlation id."""
    requests = await endpoint.received(len(published))
    received = {request.headers["webhook-id"]: request for request in requests}
    assert len(requests) == len(received) == len(published)
    for event_id, (payload, correlation_id) in published.items():
        request = received[f"evt_{event_id}"]
        assert request.body == payload.encode(), payload[:100]
        assert request.headers["content-length"] == str(len(payload.encode()))
        assert request.headers["content-type"] == "application/json"
        assert request.headers["webhook-correlation-id"] == correlation_id
        verify(webhook, request)


def verify(webhook: Webhook, request: Request) -> None:
    """Verify with the reference library; it also parses the body, which fails for very deep nesting."""
    webhook.verify(request.body, request.headers, json_parse=not request.body.startswith(b"[[[["))


async def test_payloads_through_the_api(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """Raw in the envelope: awkward payloads, the deepest, and the largest that fits into a body."""
    webhook = await subscribe(flow, endpoint)
    daemon = await make_daemon(log={"level": "info"}).start()
    room = API_BODY_BYTES - len(envelope("", "correlation-99"))
    published = {}
    for number, payload in enumerate([*AWKWARD.values(), DEEP, sized(room)], start=10):
        correlation_id = f"correlation-{number}"
        status, response = daemon.post("/v1/events", envelope(payload, correlation_id))
        assert status == 202, (payload[:100], response)
        published[response["id"]] = (payload, correlation_id)
    status, problem = daemon.post("/v1/events", envelope(sized(room + 1), "correlation-99"))
    assert (status, problem["code"]) == (413, "payload_too_large")
    await check(endpoint, webhook, published)


async def test_payloads_through_sql(
    flow: Flow, database: Database, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """Published in an application's transaction: up to 8 MiB, and more events than one batch loads."""
    webhook = await subscribe(flow, endpoint)
    await make_daemon(log={"level": "info"}).start()
    application = await database.connect("application")
    large = [sized(SQL_PAYLOAD_BYTES - number) for number in range(6)]
    deep = "[" * SQL_DEPTH + "]" * SQL_DEPTH
    published = {}
    async with application.transaction():
        for number, payload in enumerate([*AWKWARD.values(), deep, *large]):
            correlation_id = f"{number} with blanks; and = signs"
            event_id = await application.fetchval(
                "select webhookd.publish($1, $2, correlation_id => $3)", EVENT_TYPE, payload, correlation_id
            )
            published[event_id] = (payload, correlation_id)
    await check(endpoint, webhook, published)


async def test_without_a_correlation_id_there_is_no_header(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The header is not sent with an invented value."""
    await subscribe(flow, endpoint)
    await make_daemon().start()
    await flow.publish()
    [request] = await endpoint.received(1)
    assert "webhook-correlation-id" not in request.headers


async def test_dead_letter_keeps_the_exact_payload(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon
) -> None:
    """The snapshot and the delivery after a requeue equal the published payload byte for byte."""
    webhook = await subscribe(flow, endpoint)
    endpoint.answer(500)
    daemon = await make_daemon(retry={"max_attempts": 2}, log={"level": "info"}).start()
    payloads = [*AWKWARD.values(), DEEP, sized(2 * API_BODY_BYTES)]
    published = {await flow.publish(payload=payload): payload for payload in payloads}
    await until(flow.daemon, "select count(*) = $1 from webhookd.dead_letters", len(published))
    letters = await flow.daemon.fetch("select event_id, payload_snapshot from webhookd.dead_letters")
    assert dict(map(tuple, letters)) == published
    failed = list(endpoint.requests)

    endpoint.answer(200)
    status, response = daemon.post_json("/v1/dead-letters/requeue", {"filter": {}, "dry_run": False})
    assert (status, response["requeued"]) == (200, len(published))
    requests = await endpoint.received(3 * len(published))
    assert len(failed) == 2 * len(published)
    for request in requests:
        event_id = int(request.headers["webhook-id"].removeprefix("evt_"))
        assert request.body == published[event_id].encode()
        verify(webhook, request)
