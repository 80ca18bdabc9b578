"""The client against hostile responses: part E of the bad inputs, over real TLS connections."""

import asyncio
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from tests.support.certificates import Certificates
from tests.support.endpoint import Connection, Endpoint, Handshake, Request
from tests.support.waiting import until_true
from tests.unit.outbound.conftest import (
    DEADLINE_SECONDS,
    Dialled,
    MakeClient,
    Names,
    Signal,
    at_its_deadline,
    called,
    until_closed,
)
from tests.unit.outbound.test_signatures import make_secret
from webhookd import __version__
from webhookd.core.errors import ConfigurationError
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.outbound.outcome import Outcome
from webhookd.outbound.signatures import sign

Verb = Callable[[Endpoint], None]

pytestmark = pytest.mark.usefixtures("nothing_left_open")

SHORT_DEADLINE_SECONDS = 0.3
# Sockets and TLS may buffer this much; an unbounded reader would take far more within the deadline.
IN_BUFFERS_BYTES = 16 * 1024 * 1024


async def post(
    client: GuardedClient, endpoint: Endpoint, deadline_seconds: float = DEADLINE_SECONDS
) -> Outcome:
    """Send an empty object to the endpoint."""
    return await client.post(endpoint.url(), {}, b"{}", deadline_seconds)


def assert_failed(outcome: Outcome, code: str) -> None:
    """Check that the outcome has this code, no status, and nothing from a response."""
    assert (outcome.response_status, outcome.error_code) == (None, code)
    assert outcome.response_excerpt == b""
    assert outcome.retry_after_seconds is None
    assert not outcome.delivered
    assert outcome.duration_ms >= 0


# The request.


async def test_request_matches_the_contract(client: GuardedClient, endpoint: Endpoint) -> None:
    """A POST has our headers and the caller's, each once, and no others."""
    await client.post(
        endpoint.url("/hooks?a=%2F"), {"webhook-id": "evt_1", "X-Own": "a b"}, b"{}", DEADLINE_SECONDS
    )
    request = endpoint.requests[0]
    assert (request.method, request.path, request.body) == ("POST", "/hooks?a=%2F", b"{}")
    assert request.headers == {
        "host": f"127.0.0.1:{endpoint.port}",
        "user-agent": f"webhookd/{__version__}",
        "content-type": "application/json",
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-length": "2",
        "webhook-id": "evt_1",
        "x-own": "a b",
    }
    assert len(request.header_lines) == len(request.headers)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"b":1.10, "a":1e2,"a":2}',
        b'"\\u0000"',
        '{"a":"é☃\u2028𐏿"}'.encode(),
        b'{"a":"\r\n\r\n"}',
        b"\xff\x00\xfe",
        b"[" + b"1," * 500_000 + b"1]",
    ],
    ids=["empty", "null", "order and duplicates", "escaped nul", "unicode", "line ends", "no text", "1 MB"],
)
async def test_the_body_arrives_byte_for_byte(client: GuardedClient, endpoint: Endpoint, body: bytes) -> None:
    """Nothing between the table and the connection parses, orders, escapes or compresses it."""
    assert (await client.post(endpoint.url(), {}, body, DEADLINE_SECONDS)).delivered
    assert endpoint.requests[0].body == body


async def test_reference_library_verifies_the_received_request(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """Signed here, sent over a connection, and verified from what the endpoint received."""
    secret, now, body = make_secret(), int(time.time()), '{"a":"é"}'.encode()
    headers = {
        "webhook-id": "evt_7",
        "webhook-timestamp": str(now),
        "webhook-signature": sign([secret, make_secret()], "evt_7", now, body),
    }
    await client.post(endpoint.url(), headers, body, DEADLINE_SECONDS)
    request = endpoint.requests[0]
    assert Webhook(secret).verify(request.body, request.headers) == {"a": "é"}


async def test_endpoint_echoes_a_challenge(client: GuardedClient, endpoint: Endpoint) -> None:
    """The test endpoint answers a verification in both forms; the excerpt is compared."""
    body = json.dumps({"type": "webhookd.verification", "challenge": "abc"}).encode()
    endpoint.echo_challenge(path="/json")
    endpoint.echo_challenge(bare=True, path="/bare")
    as_json = await client.post(endpoint.url("/json"), {}, body, DEADLINE_SECONDS)
    as_text = await client.post(endpoint.url("/bare"), {}, body, DEADLINE_SECONDS)
    other = await client.post(endpoint.url("/json"), {}, b'{"challenge": "abc"}', DEADLINE_SECONDS)
    assert json.loads(as_json.response_excerpt) == {"challenge": "abc"}
    assert (as_text.response_excerpt, other.response_excerpt) == (b"abc", b"")


@pytest.mark.parametrize(
    "headers", [{"X-A": "a\r\nX-B: c"}, {"X-A": "a\nb"}, {"X-A\r\nX-B": "c"}, {"X-A": "\x00"}]
)
async def test_d1_header_with_line_end_is_an_outcome(
    client: GuardedClient, endpoint: Endpoint, headers: dict[str, str]
) -> None:
    """If such a header is ever stored, that delivery fails and nothing reaches the endpoint."""
    assert_failed(await client.post(endpoint.url(), headers, b"{}", DEADLINE_SECONDS), "INTERNAL")
    assert endpoint.requests == []


async def test_f11_a_proxy_in_the_environment_is_not_used(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, dialled: Dialled
) -> None:
    """The checked address is the dialled address."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await post(client, endpoint)).delivered
    assert dialled == [("127.0.0.1", endpoint.port)]


# The status decides.


@pytest.mark.parametrize("status", [200, 201, 202, 204, 226, 299])
async def test_any_2xx_is_a_success(client: GuardedClient, endpoint: Endpoint, status: int) -> None:
    """A success has a status and no error code."""
    endpoint.answer(status)
    outcome = await post(client, endpoint)
    assert (outcome.response_status, outcome.error_code, outcome.delivered) == (status, None, True)


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(410, id="E19-410"),
        *(pytest.param(status, id=f"E20-{status}") for status in (429, 502, 503, 504)),
        *(300, 304, 400, 401, 404, 418, 500, 599),
    ],
)
async def test_any_other_status_is_a_failure(client: GuardedClient, endpoint: Endpoint, status: int) -> None:
    """The saga decides about retries."""
    endpoint.answer(status, b"" if status == 304 else b"why")
    outcome = await post(client, endpoint)
    assert (outcome.response_status, outcome.error_code) == (status, f"HTTP_{status}")
    assert outcome.response_excerpt == (b"" if status == 304 else b"why")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_e8_a_redirect_is_a_failure_and_is_not_followed(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, status: int
) -> None:
    """Neither to a blocked address nor to the endpoint itself."""
    for target in ("https://169.254.169.254/latest/meta-data/", endpoint.url("/elsewhere")):
        endpoint.redirect_to(target, status)
        assert (await post(client, endpoint)).error_code == f"HTTP_{status}"
    assert [request.path for request in endpoint.requests] == ["/", "/"]
    assert set(dialled) == {("127.0.0.1", endpoint.port)}


async def test_e7_switching_protocols_is_a_failure(client: GuardedClient, endpoint: Endpoint) -> None:
    """It is an ordinary failed status, but the connection cannot be reused."""
    endpoint.garbage(b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert (await post(client, endpoint)).error_code == "HTTP_101"
    endpoint.answer(200)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


@pytest.mark.parametrize("interim", [100, 102, 103])
async def test_interim_status_is_skipped(client: GuardedClient, endpoint: Endpoint, interim: int) -> None:
    """The final status after it decides."""
    head = f"HTTP/1.1 {interim} X\r\n\r\nHTTP/1.1 204 X\r\n\r\n"
    endpoint.garbage(head.encode())
    assert (await post(client, endpoint)).response_status == 204


@pytest.mark.parametrize(
    ("value", "expected"), [("120", 120.0), ("garbage", None), ("-5", None), ("9" * 15, 31_536_000.0)]
)
async def test_retry_after_is_reported(
    client: GuardedClient, endpoint: Endpoint, value: str, expected: float | None
) -> None:
    """A failure carries the endpoint's Retry-After, bounded; an invalid value is ignored."""
    endpoint.retry_after(value, 429)
    assert (await post(client, endpoint)).retry_after_seconds == expected


async def test_retry_after_may_be_a_date(client: GuardedClient, endpoint: Endpoint) -> None:
    """The date form, relative to the endpoint's own clock."""
    now = datetime.now(UTC).replace(microsecond=0)
    headers = {
        "Retry-After": format_datetime(now + timedelta(seconds=90), usegmt=True),
        "Date": format_datetime(now, usegmt=True),
    }
    endpoint.answer(503, headers=headers)
    assert (await post(client, endpoint)).retry_after_seconds == 90.0


async def test_a_success_has_no_retry_after(client: GuardedClient, endpoint: Endpoint) -> None:
    """A delivered event is not retried."""
    endpoint.retry_after("120", 200)
    assert (await post(client, endpoint)).retry_after_seconds is None


# Slow and endless responses.


async def test_e1_an_endpoint_that_never_answers_is_a_timeout(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """The request arrives, and the deadline ends the wait."""
    assert (await post(client, endpoint)).delivered  # opens the connection for the next request
    endpoint.hang()
    outcome = await post(client, endpoint, SHORT_DEADLINE_SECONDS)
    assert_failed(outcome, "TIMEOUT")
    assert outcome.duration_ms >= SHORT_DEADLINE_SECONDS * 1000
    assert len(await endpoint.received(2)) == 2


async def test_e2_dripped_headers_are_a_timeout(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte arrives in time, but the deadline covers all of them."""
    is_read = called(monkeypatch, "data_received")
    endpoint.drip_headers()
    request = asyncio.create_task(post(client, endpoint))
    await is_read.wait()
    assert_failed(await at_its_deadline(monkeypatch, request), "TIMEOUT")


@pytest.mark.parametrize("status", [200, 500])
async def test_e3_dripped_body_does_not_change_the_status(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The status decides; the deadline ends the reading, and the bytes received so far are kept."""
    is_read = called(monkeypatch, "on_body")
    endpoint.drip_body(status)
    request = asyncio.create_task(post(client, endpoint))
    await is_read.wait()
    outcome = await at_its_deadline(monkeypatch, request)
    assert (outcome.response_status, outcome.delivered) == (status, status == 200)
    assert outcome.response_excerpt.startswith(b".")


async def test_e4_endless_body_is_cut_at_the_limit(client: GuardedClient, endpoint: Endpoint) -> None:
    """It succeeds before the deadline; the endpoint sends little more than the buffers hold."""
    endpoint.endless_body()
    outcome = await post(client, endpoint)
    assert outcome.delivered
    assert outcome.response_excerpt == b"x" * 4096
    assert endpoint.connections[0].bytes_sent < IN_BUFFERS_BYTES
    endpoint.answer(200)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


async def test_e5_gzip_bomb_is_not_decompressed(client: GuardedClient, endpoint: Endpoint) -> None:
    """The excerpt holds the compressed bytes."""
    endpoint.gzip_bomb()
    outcome = await post(client, endpoint)
    assert outcome.delivered
    assert outcome.response_excerpt.startswith(b"\x1f\x8b")
    assert len(outcome.response_excerpt) == 4096


@pytest.mark.parametrize(
    ("length", "connections"), [(0, 1), (4096, 1), (4097, 1), (10_000, 1), (1_000_000, 2)]
)
async def test_connection_is_reused_if_the_body_is_within_the_limit(
    make_client: MakeClient, endpoint: Endpoint, length: int, connections: int
) -> None:
    """The excerpt has 4096 bytes; a connection with a larger body than the limit is closed."""
    client = make_client(max_response_bytes=10_000)
    endpoint.answer(200, b"y" * length)
    for _ in range(2):
        outcome = await post(client, endpoint)
        assert outcome.delivered
        assert outcome.response_excerpt == b"y" * min(length, 4096)
    assert len(endpoint.connections) == connections


async def test_response_before_the_body_was_read_ends_the_exchange(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """A large body that is refused unread gives a normal status; the connection is not reused."""
    endpoint.answer_unread("/", 413)
    for _ in range(2):
        outcome = await client.post(endpoint.url(), {}, bytes(20_000_000), DEADLINE_SECONDS)
        assert outcome.error_code == "HTTP_413"
    assert [request.connection for request in endpoint.requests] == [1, 2]


# Broken responses.


@pytest.mark.parametrize(
    "break_response",
    [
        pytest.param(Endpoint.close_at_once, id="E14-immediate close"),
        pytest.param(Endpoint.reset_before_status, id="E14-reset before status"),
    ],
)
async def test_a_connection_lost_before_the_status_is_a_failed_attempt(
    client: GuardedClient, endpoint: Endpoint, break_response: Verb
) -> None:
    """The request is sent once."""
    break_response(endpoint)
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")
    assert len(endpoint.requests) == 1


async def test_e14_reset_after_the_status_is_ignored(client: GuardedClient, endpoint: Endpoint) -> None:
    """The status had arrived."""
    endpoint.reset_after_status(200)
    assert (await post(client, endpoint)).delivered
    endpoint.reset_after_status(500)
    assert (await post(client, endpoint)).error_code == "HTTP_500"


async def test_truncated_body_is_ignored_and_not_logged(
    client: GuardedClient, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The status had arrived, and an endpoint's mistakes are not logged as ours."""
    endpoint.garbage(b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n\r\nab")
    outcome = await post(client, endpoint)
    assert (outcome.delivered, outcome.response_excerpt) == (True, b"ab")
    assert caplog.records == []


@pytest.mark.parametrize("head", [b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nA: b\r\n"])
async def test_incomplete_head_is_a_lost_connection(
    client: GuardedClient, endpoint: Endpoint, head: bytes
) -> None:
    """A status counts only with complete headers."""
    endpoint.garbage(head)
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")


async def test_e15_idle_connection_closed_while_sending_is_a_failed_attempt(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """An attempt is one request: it is not sent again on a new connection."""
    assert (await post(client, endpoint)).delivered
    endpoint.close_at_once()
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")
    assert [request.connection for request in endpoint.requests] == [1, 1]


async def test_closed_port_is_a_failed_connection(client: GuardedClient, endpoint: Endpoint) -> None:
    """The kernel of the endpoint refuses the connection."""
    endpoint.stop_listening()
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"\x00\xff\x16\x03 what\r\n\r\n", id="E17-garbage"),
        pytest.param(b"<html>hello</html>\r\n\r\n", id="E17-HTTP/0.9"),
        pytest.param(b"HTTP/1.1 abc OK\r\n\r\n", id="E17-no number"),
        pytest.param(b"HTTP/1.1 2000 OK\r\n\r\n", id="E17-long number"),
        pytest.param(b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n", id="E17-too low"),
        pytest.param(b"HTTP/1.1 600 OK\r\nContent-Length: 0\r\n\r\n", id="E17-too high"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", id="E17-bad length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", id="E17-negative length"),
        pytest.param(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", id="E17-bad header"),
        pytest.param(
            b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="E17-bad chunk at once"
        ),
        pytest.param(b"HTTP/2 200\r\n\r\n" * 2, id="E17-HTTP/2"),
    ],
)
async def test_invalid_http_is_a_protocol_error(
    client: GuardedClient, endpoint: Endpoint, answer: bytes
) -> None:
    """There is no status, not even one that was parsed from the invalid response."""
    endpoint.garbage(answer)
    assert_failed(await post(client, endpoint), "PROTOCOL_ERROR")


@pytest.mark.parametrize(
    "break_response",
    [
        pytest.param(Endpoint.duplicate_content_length, id="E17-two lengths"),
        pytest.param(Endpoint.long_header, id="E9-long line"),
        pytest.param(Endpoint.many_headers, id="E9-many lines"),
    ],
)
async def test_excessive_headers_are_a_protocol_error(
    client: GuardedClient, endpoint: Endpoint, break_response: Verb
) -> None:
    """Headers are bounded in length and number, and must not contradict each other."""
    break_response(endpoint)
    assert_failed(await post(client, endpoint), "PROTOCOL_ERROR")


async def test_e17_bad_chunk_after_the_status_is_ignored(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status decides; only the connection cannot be reused."""
    is_read = called(monkeypatch, "on_headers_complete")

    async def bad_chunk(_: Request, connection: Connection) -> bool:
        await connection.send(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        await is_read.wait()  # so that it is not in the same packet as the status
        await connection.send(b"no number\r\n")
        return False

    endpoint.behave(bad_chunk)
    outcome = await post(client, endpoint)
    assert (outcome.response_status, outcome.delivered) == (200, True)
    assert outcome.response_excerpt == b"ab"


async def test_e11_non_text_reason_phrase_is_ignored(client: GuardedClient, endpoint: Endpoint) -> None:
    """It is not stored, so an outcome contains nothing that cannot be stored."""
    endpoint.non_utf8_reason(500)
    outcome = await post(client, endpoint)
    assert outcome.error_code == "HTTP_500"


async def test_e12_binary_body_is_kept_as_bytes(client: GuardedClient, endpoint: Endpoint) -> None:
    """NUL and invalid UTF-8 are ordinary bytes."""
    endpoint.answer(400, b"\x00\xff\xfe")
    assert (await post(client, endpoint)).response_excerpt == b"\x00\xff\xfe"


async def test_e21_cookies_are_not_stored(client: GuardedClient, endpoint: Endpoint, names: Names) -> None:
    """Deliveries share no state. Uses a name, because no cookie jar stores cookies of an address."""
    names.answers["hooks.example"] = ["127.0.0.1"]
    endpoint.answer(200, headers={"Set-Cookie": "a=b"})
    for _ in range(2):
        await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert len(endpoint.requests) == 2
    assert all("cookie" not in request.headers for request in endpoint.requests)


# TLS.


@pytest.mark.parametrize("kind", ["expired", "wrong_host", "self_signed"])
async def test_e22_a_bad_certificate_is_refused(
    client: GuardedClient, certificates: Certificates, kind: str
) -> None:
    """Nothing of the request is sent to such an endpoint."""
    with Endpoint(getattr(certificates, kind)) as endpoint:
        assert_failed(await post(client, endpoint), "TLS_FAILED")
        assert endpoint.requests == []


async def test_e22_a_name_that_is_not_in_the_certificate_is_refused(
    client: GuardedClient, endpoint: Endpoint, names: Names
) -> None:
    """The certificate is checked against the name in the URL, not against the address."""
    names.answers["elsewhere.example"] = ["127.0.0.1"]
    outcome = await client.post(endpoint.url("/", "elsewhere.example"), {}, b"{}", DEADLINE_SECONDS)
    assert_failed(outcome, "TLS_FAILED")


async def test_e22_unknown_authority_is_not_trusted(endpoint: Endpoint) -> None:
    """The local authority is trusted only with its CA file."""
    options = ClientOptions(AddressPolicy.of(["127.0.0.0/8"]), trusted_tls())
    async with GuardedClient(options) as client:
        assert_failed(await post(client, endpoint), "TLS_FAILED")


async def test_e22_tls_before_1_2_is_refused(client: GuardedClient, certificates: Certificates) -> None:
    """The endpoint offers TLS 1.1 at most, or nothing if its OpenSSL does not support that."""
    with Endpoint(certificates.good, Handshake.OLD) as endpoint:
        assert_failed(await post(client, endpoint), "TLS_FAILED")
        assert endpoint.requests == []


async def test_e23_a_stalled_handshake_is_a_timeout(
    client: GuardedClient, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline covers the handshake."""
    with Endpoint(certificates.good, Handshake.STALLED) as endpoint:
        request = asyncio.create_task(post(client, endpoint))
        await until_true(lambda: len(endpoint.connections) == 1)
        assert_failed(await at_its_deadline(monkeypatch, request), "TIMEOUT")


def test_e22_tls_settings_do_not_depend_on_defaults(tls: ssl.SSLContext) -> None:
    """Authority and name are verified, with TLS 1.2 or newer, whatever Python's defaults become."""
    assert tls.verify_mode is ssl.CERT_REQUIRED
    assert tls.check_hostname
    assert tls.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("content", [None, b"", b"no certificate"], ids=["missing", "empty", "garbage"])
def test_unusable_ca_file_is_a_configuration_error(tmp_path: Path, content: bytes | None) -> None:
    """It is detected before the running client changes, and the error is one line."""
    ca_file = tmp_path / "ca.pem"
    if content is not None:
        ca_file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"^delivery\.ca_file .*ca\.pem cannot be used: .+$"):
        trusted_tls(ca_file)


# Connections, reloads and closing.


async def test_connections_are_kept_alive(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled
) -> None:
    """Twenty sequential requests use one connection."""
    endpoint.answer(200, b'{"ok":true}')
    for _ in range(20):
        assert (await post(client, endpoint)).delivered
    assert {request.connection for request in endpoint.requests} == {1}
    assert len(dialled) == len(endpoint.connections) == client.counters.dials == 1


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"", b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n"])
async def test_abandoned_connection_is_closed(
    client: GuardedClient, endpoint: Endpoint, sockets: list[socket.socket], answer: bytes
) -> None:
    """An endpoint that stops reading, even our TLS shutdown, does not hold a socket."""

    async def answer_and_stop_reading(_: Request, connection: Connection) -> bool:
        connection.stop_reading()
        await connection.send(answer)
        await asyncio.Event().wait()
        return False

    assert (await post(client, endpoint)).delivered
    endpoint.behave(answer_and_stop_reading)
    await post(client, endpoint, SHORT_DEADLINE_SECONDS)
    assert len(sockets) == 1
    await until_closed(sockets)


async def test_reload_does_not_affect_requests_in_flight(
    client: GuardedClient, endpoint: Endpoint, tls: ssl.SSLContext
) -> None:
    """A request sent before the reload is answered after it; then its connections are closed."""
    go_on = Signal()

    async def wait(_: Request, connection: Connection) -> bool:
        await go_on.wait()
        await connection.send(b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n")
        return True

    endpoint.behave(wait)
    request = asyncio.create_task(post(client, endpoint))
    await endpoint.received(1)
    before = client._connections
    client.reconfigure(ClientOptions(AddressPolicy(), tls))
    assert not before.is_closed
    go_on.set()
    assert (await request).delivered
    assert before.is_closed


async def test_reload_applies_a_new_authority(endpoint: Endpoint, tls: ssl.SSLContext) -> None:
    """A request that failed without the CA file succeeds after the reload."""
    local = AddressPolicy.of(["127.0.0.0/8"])
    async with GuardedClient(ClientOptions(local, trusted_tls())) as client:
        assert_failed(await post(client, endpoint), "TLS_FAILED")
        client.reconfigure(ClientOptions(local, tls))
        assert (await post(client, endpoint)).delivered


async def test_cancellation_is_raised(client: GuardedClient, endpoint: Endpoint) -> None:
    """Cancellation is the only exception that is not turned into an outcome."""
    endpoint.hang()
    request = asyncio.create_task(post(client, endpoint))
    await endpoint.received(1)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a31_internal_error_is_an_outcome_and_is_logged(
    client: GuardedClient,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Any exception ends one delivery, and is logged."""

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(client._connections, "dial", broken)
    with caplog.at_level(logging.ERROR):
        assert_failed(await post(client, endpoint), "INTERNAL")
    assert "ZeroDivisionError" in caplog.text


async def test_closed_client_returns_an_outcome(client: GuardedClient, endpoint: Endpoint) -> None:
    """A late delivery fails with INTERNAL, and is sent again later."""
    client.close()
    assert_failed(await post(client, endpoint), "INTERNAL")


async def test_endpoint_fails_the_given_number_of_times(client: GuardedClient, endpoint: Endpoint) -> None:
    """The test endpoint recovers, for tests of retries."""
    endpoint.fail_times(2, 503)
    statuses = [(await post(client, endpoint)).response_status for _ in range(4)]
    assert statuses == [503, 503, 200, 200]
