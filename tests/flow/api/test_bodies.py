"""Rejected bodies: not an event, not JSON, too large, or with another type or encoding."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator

from tests.flow.api.conftest import MAX_BYTES
from tests.support.api import JSON, Client
from tests.support.daemon import DaemonProcess
from tests.support.flow import Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS


async def test_invalid_bodies_are_rejected(api: Client, flow: Flow) -> None:
    """Each gets its status and code, and nothing is stored."""

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
    bad_types = ["", "a" * 101, "a..b", "a b", "a%", "A.\u0430", "*", "a\n", "a\0", ".a", 7, None]
    for event_type in [*bad_types, "dot.job.succeeded"]:  # the last is reserved for the job queue
        body = json.dumps({"event_type": event_type, "payload": 1}).encode()
        cases.append((body, (422, "invalid_request")))
    in_words = await api.post("/v1/events", {"event_type": "order paid", "payload": 1})
    assert in_words.body["detail"] == "event_type must be words of letters, digits and _, joined by dots"
    for field, values in {
        "idempotency_key": ("", "k" * 256, "a\0", "a\n", 7),
        "correlation_id": ("", "c" * 256, "é", "a\r\nX: y", " a", 7),
    }.items():
        for value in values:
            body = json.dumps({"event_type": "a", "payload": 1, field: value}).encode()
            cases.append((body, (422, "invalid_request")))
    for sent, expected in cases:
        answer = await api.send(sent)
        assert answer.problem == expected, (sent[:80], answer)
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 0


async def test_body_size_limit(api: Client, daemon: DaemonProcess) -> None:
    """The limit itself is accepted, one byte more is rejected, chunked or not; a reload changes it."""
    frame = b'{"event_type":"a","payload":"%s"}'
    full = frame % (b"x" * (MAX_BYTES - len(frame) + 2))
    assert len(full) == MAX_BYTES
    over = full[:-2] + b'x"}'
    assert (await api.send(full)).status == 202
    assert (await api.send(over)).problem == (413, "payload_too_large")

    async def chunks(body: bytes) -> AsyncIterator[bytes]:
        yield body[:1000]
        yield body[1000:]

    chunked = await api.request("POST", "/v1/events", data=chunks(full), headers=JSON)
    assert chunked.status == 202
    chunked = await api.request("POST", "/v1/events", data=chunks(over), headers=JSON)
    assert chunked.problem == (413, "payload_too_large")
    daemon.configure(api={"max_payload_bytes": MAX_BYTES + 1})
    assert await daemon.reload()
    assert (await api.send(over)).status == 202


async def test_too_large_content_length_is_rejected_before_the_body(api: Client) -> None:
    """The response comes before the body is read, and the connection is closed."""
    head = (
        "POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 99999999999\r\n\r\n"
    )
    # A server that waited for the body would return 408.
    answer = await api.raw(head.encode() + b"{")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"payload_too_large" in answer


async def test_wrong_content_types_and_encodings_are_rejected(api: Client) -> None:
    """Only application/json in UTF-8 without a Content-Encoding is accepted."""
    body = b'{"event_type":"a","payload":1}'
    for kind in (
        "text/html",
        "application/json; charset=utf-16",
        "application/json; charset=nonsense",
        "json",
        "",
    ):
        answer = await api.request("POST", "/v1/events", data=body, headers={"Content-Type": kind})
        assert answer.problem == (415, "unsupported_media_type"), kind
    for encoding, sent in (("gzip", gzip.compress(body)), ("gzip", b"garbage"), ("br", body)):
        answer = await api.request(
            "POST", "/v1/events", data=sent, headers=JSON | {"Content-Encoding": encoding}
        )
        assert answer.problem == (415, "unsupported_encoding"), encoding
    good = {"Content-Type": "Application/JSON; charset=UTF-8", "Content-Encoding": "identity"}
    assert (await api.request("POST", "/v1/events", data=body, headers=good)).status == 202


async def test_b3_endless_body_is_rejected(api: Client) -> None:
    """An endless chunked body gets 413 as soon as it exceeds the limit, and the connection is closed."""
    loop = asyncio.get_running_loop()
    # Not a stream: a stream that can no longer send discards what it has not read.
    with socket.create_connection(("127.0.0.1", api.daemon.port)) as connection:
        connection.setblocking(False)
        await loop.sock_sendall(
            connection,
            b"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n",
        )

        async def send_on() -> None:
            while True:
                await loop.sock_sendall(connection, b"400\r\n" + b"x" * 1024 + b"\r\n")
                # sock_sendall() does not wait while the server reads, and the response must be read too.
                await asyncio.sleep(0)

        sending = asyncio.create_task(send_on())
        answer = b""
        try:
            async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
                with contextlib.suppress(ConnectionError):
                    while data := await loop.sock_recv(connection, 65_536):
                        answer += data
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    assert answer.startswith(b"HTTP/1.1 413 ")
