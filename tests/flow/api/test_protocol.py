"""Invalid requests get a problem; health, status and metrics; connections at shutdown."""

import asyncio
import time

from tests.support.api import Client
from tests.support.daemon import DaemonProcess
from webhookd.http.server import HEADERS_TIMEOUT_SECONDS


async def test_invalid_ids_and_parameters(api: Client) -> None:
    """404 for an impossible id, 422 for a parameter, and never a message of the database."""
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
            assert answer.problem == (404, "not_found"), (resource, item)
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
            assert answer.problem == (422, "invalid_parameter"), (resource, query)
    for query in (
        "deliveries?status=completed",
        "deliveries?event_id=x",
        "events?event_type=%00",
        "events?idempotency_key=%00",
        "events?idempotency_key=%ff%00",
        "dead-letters?error_code=%00",
        "dead-letters?failed_after=infinity",
        "dead-letters?failed_after=2026-01-01",
        "dead-letters?failed_before=0.5",
        "dead-letters?failed_before=1767225600",
        "subscriptions?active=maybe",
    ):
        assert (await api.get(f"/v1/{query}")).problem == (422, "invalid_parameter"), query


async def test_unexpected_parameters_are_rejected(api: Client) -> None:
    """A parameter without effect gets 422, except on health routes, where probes may add one."""
    for route in ("POST /v1/events?idempotency_key=k", "GET /v1/events/1?limit=1", "POST /v1/events/batch?a"):
        method, path = route.split(" ")
        assert (await api.request(method, path)).problem == (422, "invalid_parameter"), route
    assert (await api.get("/healthz?probe=1")).status == 200


async def test_every_response_has_its_content_type(api: Client) -> None:
    """JSON whatever Accept says, with nosniff, and without a version in the headers."""
    for path in (
        "/v1/events",
        "/v1/events/1",
        "/status",
        "/metrics",
        "/",
        "/docs",
        "/openapi.json",
        "/nothing",
    ):
        answer = await api.request("GET", path, headers={"Accept": "text/html"})
        assert answer.headers["Server"] == "webhookd", path
        assert answer.headers["X-Content-Type-Options"] == "nosniff", path
    listed = await api.request("GET", "/v1/events", headers={"Accept": "text/html"})
    assert (listed.status, listed.headers["Content-Type"]) == (200, "application/json")


async def test_unknown_routes_and_methods(api: Client) -> None:
    """404, and 405 with the allowed methods; no CORS, no HEAD, no TRACE."""
    for path in ("/v2/events", "/v1/events/1/payload", "/nothing", "/v1//events"):
        assert (await api.get(path)).problem == (404, "not_found")
    for method in ("POST", "PUT", "OPTIONS", "TRACE"):
        answer = await api.request(method, "/v1/subscriptions/1")
        assert answer.problem == (405, "method_not_allowed")
        assert answer.headers["Allow"] == "DELETE, GET, PATCH"
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert (await api.request("HEAD", "/v1/events")).status == 405


async def test_invalid_http_gets_a_problem_and_is_closed(daemon: DaemonProcess, api: Client) -> None:
    """400 as a problem, the connection is closed, and the daemon keeps running."""
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
        answer = await api.raw(data)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), (data[:60], answer)
        assert b"application/problem+json" in answer
    assert (await api.event()).status == 202
    assert not daemon.logged("a request failed")


async def test_health_status_and_metrics(api: Client, daemon: DaemonProcess) -> None:
    """Each route responds; accepted events are counted, duplicates are not."""
    assert (await api.get("/healthz")).body == {"alive": True}
    assert (await api.get("/readyz")).body == {"ready": True}
    await api.event(idempotency_key="k")
    await api.event(idempotency_key="k")
    await api.post("/v1/events/batch", {"events": [{"event_type": "a", "payload": 1}] * 2})
    assert daemon.metric("webhookd_events_accepted_total") == 3
    status = (await api.get("/status")).body
    assert status["ready"] is True
    assert "api" in [service["name"] for service in status["services"]]


async def test_open_connections_do_not_delay_shutdown(daemon: DaemonProcess, api: Client) -> None:
    """SIGTERM with idle connections and half a request: exit 0 without waiting for the rest."""
    await asyncio.gather(*(api.event() for _ in range(10)))
    started = time.monotonic()
    _, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    writer.write(b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: app")
    await writer.drain()
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert time.monotonic() - started < HEADERS_TIMEOUT_SECONDS
    writer.close()
