"""Tests of the client against hostile answers: part E of the bad inputs, over real TLS connections."""

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
# What sockets and TLS may hold on their way; an unbounded reader takes far more in a deadline.
IN_BUFFERS_BYTES = 16 * 1024 * 1024


async def post(
    client: GuardedClient, endpoint: Endpoint, deadline_seconds: float = DEADLINE_SECONDS
) -> Outcome:
    """Send an empty object to the endpoint."""
    return await client.post(endpoint.url(), {}, b"{}", deadline_seconds)


def assert_failed(outcome: Outcome, code: str) -> None:
    """No status, this code, and nothing from the answer."""
    assert (outcome.response_status, outcome.error_code) == (None, code)
    assert outcome.response_excerpt == b""
    assert outcome.retry_after_seconds is None
    assert not outcome.delivered
    assert outcome.duration_ms >= 0


# What is sent.


async def test_what_is_sent_is_what_the_contract_says(client: GuardedClient, endpoint: Endpoint) -> None:
    """A POST with our headers and the caller's, each once, and no other."""
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
    """Nothing between the table and the wire parses, orders, escapes or compresses it."""
    assert (await client.post(endpoint.url(), {}, body, DEADLINE_SECONDS)).delivered
    assert endpoint.requests[0].body == body


async def test_the_reference_library_verifies_what_arrived(client: GuardedClient, endpoint: Endpoint) -> None:
    """Signed here, sent over the wire, verified from what the endpoint saw."""
    secret, now, body = make_secret(), int(time.time()), '{"a":"é"}'.encode()
    headers = {
        "webhook-id": "evt_7",
        "webhook-timestamp": str(now),
        "webhook-signature": sign([secret, make_secret()], "evt_7", now, body),
    }
    await client.post(endpoint.url(), headers, body, DEADLINE_SECONDS)
    request = endpoint.requests[0]
    assert Webhook(secret).verify(request.body, request.headers) == {"a": "é"}


async def test_the_endpoint_can_echo_a_challenge(client: GuardedClient, endpoint: Endpoint) -> None:
    """The test endpoint plays its part in a verification, in both forms; the excerpt is what to compare."""
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
async def test_d1_a_header_that_would_break_the_request_is_an_outcome(
    client: GuardedClient, endpoint: Endpoint, headers: dict[str, str]
) -> None:
    """Should one ever be stored, that delivery fails, and nothing of it reaches the endpoint."""
    assert_failed(await client.post(endpoint.url(), headers, b"{}", DEADLINE_SECONDS), "INTERNAL")
    assert endpoint.requests == []


async def test_f11_a_proxy_in_the_environment_is_not_used(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, dialled: Dialled
) -> None:
    """The address that was judged is the address that is dialled."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert (await post(client, endpoint)).delivered
    assert dialled == [("127.0.0.1", endpoint.port)]


# The status decides.


@pytest.mark.parametrize("status", [200, 201, 202, 204, 226, 299])
async def test_any_2xx_is_a_success(client: GuardedClient, endpoint: Endpoint, status: int) -> None:
    """A success has a status, and no error code."""
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
async def test_any_other_status_is_a_failure_like_others(
    client: GuardedClient, endpoint: Endpoint, status: int
) -> None:
    """What to make of it is the saga's decision."""
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
    """A status like others, after which the connection is of no use."""
    endpoint.garbage(b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert (await post(client, endpoint)).error_code == "HTTP_101"
    endpoint.answer(200)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


@pytest.mark.parametrize("interim", [100, 102, 103])
async def test_an_interim_status_is_not_the_status(
    client: GuardedClient, endpoint: Endpoint, interim: int
) -> None:
    """What comes after it is."""
    head = f"HTTP/1.1 {interim} X\r\n\r\nHTTP/1.1 204 X\r\n\r\n"
    endpoint.garbage(head.encode())
    assert (await post(client, endpoint)).response_status == 204


@pytest.mark.parametrize(
    ("value", "expected"), [("120", 120.0), ("garbage", None), ("-5", None), ("9" * 15, 31_536_000.0)]
)
async def test_retry_after_is_reported(
    client: GuardedClient, endpoint: Endpoint, value: str, expected: float | None
) -> None:
    """A failure carries the endpoint's wish, bounded; garbage is no wish."""
    endpoint.retry_after(value, 429)
    assert (await post(client, endpoint)).retry_after_seconds == expected


async def test_retry_after_may_be_a_time(client: GuardedClient, endpoint: Endpoint) -> None:
    """The other form, against the endpoint's own clock."""
    now = datetime.now(UTC).replace(microsecond=0)
    headers = {
        "Retry-After": format_datetime(now + timedelta(seconds=90), usegmt=True),
        "Date": format_datetime(now, usegmt=True),
    }
    endpoint.answer(503, headers=headers)
    assert (await post(client, endpoint)).retry_after_seconds == 90.0


async def test_a_success_has_no_retry_after(client: GuardedClient, endpoint: Endpoint) -> None:
    """There is nothing to come back for."""
    endpoint.retry_after("120", 200)
    assert (await post(client, endpoint)).retry_after_seconds is None


# Slow and endless answers.


async def test_e1_an_endpoint_that_never_answers_is_a_timeout(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """The request arrived, and the deadline ended the waiting."""
    assert (await post(client, endpoint)).delivered  # by this connection the next is sent at once
    endpoint.hang()
    outcome = await post(client, endpoint, SHORT_DEADLINE_SECONDS)
    assert_failed(outcome, "TIMEOUT")
    assert outcome.duration_ms >= SHORT_DEADLINE_SECONDS * 1000
    assert len(await endpoint.received(2)) == 2


async def test_e2_dripped_headers_are_a_timeout(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time; the deadline is over all of them."""
    is_read = called(monkeypatch, "data_received")
    endpoint.drip_headers()
    request = asyncio.create_task(post(client, endpoint))
    await is_read.wait()
    assert_failed(await at_its_deadline(monkeypatch, request), "TIMEOUT")


@pytest.mark.parametrize("status", [200, 500])
async def test_e3_after_the_status_a_dripped_body_changes_nothing(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The status decides, the deadline ends the reading, and what came until then is kept."""
    is_read = called(monkeypatch, "on_body")
    endpoint.drip_body(status)
    request = asyncio.create_task(post(client, endpoint))
    await is_read.wait()
    outcome = await at_its_deadline(monkeypatch, request)
    assert (outcome.response_status, outcome.delivered) == (status, status == 200)
    assert outcome.response_excerpt.startswith(b".")


async def test_e4_an_endless_body_is_read_to_the_bound_and_cut(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """A success before the deadline; the endpoint got rid of little more than the buffers on the way hold."""
    endpoint.endless_body()
    outcome = await post(client, endpoint)
    assert outcome.delivered
    assert outcome.response_excerpt == b"x" * 4096
    assert endpoint.connections[0].bytes_sent < IN_BUFFERS_BYTES
    endpoint.answer(200)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


async def test_e5_a_gzip_bomb_stays_packed(client: GuardedClient, endpoint: Endpoint) -> None:
    """The excerpt is the packed bytes; nothing here unpacks."""
    endpoint.gzip_bomb()
    outcome = await post(client, endpoint)
    assert outcome.delivered
    assert outcome.response_excerpt.startswith(b"\x1f\x8b")
    assert len(outcome.response_excerpt) == 4096


@pytest.mark.parametrize(
    ("length", "connections"), [(0, 1), (4096, 1), (4097, 1), (10_000, 1), (1_000_000, 2)]
)
async def test_a_body_within_the_bound_is_read_to_its_end_and_one_beyond_is_not(
    make_client: MakeClient, endpoint: Endpoint, length: int, connections: int
) -> None:
    """4096 bytes are kept; up to the bound the connection is used again, past it it is dropped."""
    client = make_client(max_response_bytes=10_000)
    endpoint.answer(200, b"y" * length)
    for _ in range(2):
        outcome = await post(client, endpoint)
        assert outcome.delivered
        assert outcome.response_excerpt == b"y" * min(length, 4096)
    assert len(endpoint.connections) == connections


async def test_an_answer_before_the_body_was_read_ends_the_exchange(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """A large body refused unread is a status like others; the half-sent connection is not reused."""
    endpoint.answer_unread("/", 413)
    for _ in range(2):
        outcome = await client.post(endpoint.url(), {}, bytes(20_000_000), DEADLINE_SECONDS)
        assert outcome.error_code == "HTTP_413"
    assert [request.connection for request in endpoint.requests] == [1, 2]


# Broken answers.


@pytest.mark.parametrize(
    "break_answer",
    [
        pytest.param(Endpoint.close_at_once, id="E14-immediate close"),
        pytest.param(Endpoint.reset_before_status, id="E14-reset before status"),
    ],
)
async def test_a_connection_lost_before_the_status_is_a_failed_attempt(
    client: GuardedClient, endpoint: Endpoint, break_answer: Verb
) -> None:
    """One request was sent, and none again."""
    break_answer(endpoint)
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")
    assert len(endpoint.requests) == 1


async def test_e14_a_reset_after_the_status_changes_nothing(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """The status was there."""
    endpoint.reset_after_status(200)
    assert (await post(client, endpoint)).delivered
    endpoint.reset_after_status(500)
    assert (await post(client, endpoint)).error_code == "HTTP_500"


async def test_a_truncated_body_changes_nothing_and_is_no_news(
    client: GuardedClient, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The status was there; what an endpoint does wrong is not logged as ours."""
    endpoint.garbage(b"HTTP/1.1 200 X\r\nContent-Length: 5\r\n\r\nab")
    outcome = await post(client, endpoint)
    assert (outcome.delivered, outcome.response_excerpt) == (True, b"ab")
    assert caplog.records == []


@pytest.mark.parametrize("head", [b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nA: b\r\n"])
async def test_half_an_answer_is_none(client: GuardedClient, endpoint: Endpoint, head: bytes) -> None:
    """A status counts when its headers are complete: until then the connection was lost before it."""
    endpoint.garbage(head)
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")


async def test_e15_a_kept_connection_closed_as_we_send_is_a_failed_attempt(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """An attempt is one request: what met the closing is not sent again on a new connection."""
    assert (await post(client, endpoint)).delivered
    endpoint.close_at_once()
    assert_failed(await post(client, endpoint), "CONNECT_FAILED")
    assert [request.connection for request in endpoint.requests] == [1, 1]


async def test_nobody_listening_is_a_failed_connection(client: GuardedClient, endpoint: Endpoint) -> None:
    """Refused by the kernel of the other side."""
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
async def test_what_is_not_http_is_a_protocol_error_without_a_status(
    client: GuardedClient, endpoint: Endpoint, answer: bytes
) -> None:
    """No status of ours is taken for the endpoint's."""
    endpoint.garbage(answer)
    assert_failed(await post(client, endpoint), "PROTOCOL_ERROR")


@pytest.mark.parametrize(
    "break_answer",
    [
        pytest.param(Endpoint.duplicate_content_length, id="E17-two lengths"),
        pytest.param(Endpoint.long_header, id="E9-long line"),
        pytest.param(Endpoint.many_headers, id="E9-many lines"),
    ],
)
async def test_headers_beyond_reason_are_a_protocol_error(
    client: GuardedClient, endpoint: Endpoint, break_answer: Verb
) -> None:
    """Bounded in length and in number, and unambiguous."""
    break_answer(endpoint)
    assert_failed(await post(client, endpoint), "PROTOCOL_ERROR")


async def test_e17_a_bad_chunk_after_the_status_changes_nothing(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status decides; only the connection is of no more use."""
    is_read = called(monkeypatch, "on_headers_complete")

    async def bad_chunk(_: Request, connection: Connection) -> bool:
        await connection.send(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        await is_read.wait()  # so that it is not in the packet of the status
        await connection.send(b"no number\r\n")
        return False

    endpoint.behave(bad_chunk)
    outcome = await post(client, endpoint)
    assert (outcome.response_status, outcome.delivered) == (200, True)
    assert outcome.response_excerpt == b"ab"


async def test_e11_a_reason_phrase_that_is_no_text_does_no_harm(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """It is not kept at all: nothing in an outcome can be unstorable."""
    endpoint.non_utf8_reason(500)
    outcome = await post(client, endpoint)
    assert outcome.error_code == "HTTP_500"


async def test_e12_a_body_that_is_no_text_is_kept_as_bytes(client: GuardedClient, endpoint: Endpoint) -> None:
    """NUL and invalid UTF-8 are bytes like others."""
    endpoint.answer(400, b"\x00\xff\xfe")
    assert (await post(client, endpoint)).response_excerpt == b"\x00\xff\xfe"


async def test_e21_cookies_are_not_kept(client: GuardedClient, endpoint: Endpoint, names: Names) -> None:
    """No delivery carries anything from another. By name: of an address no jar would keep them."""
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
    """Nothing of the request is sent to whoever shows it."""
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


async def test_e22_an_authority_that_nobody_named_is_not_trusted(endpoint: Endpoint) -> None:
    """Without the CA file the local authority is a stranger."""
    options = ClientOptions(AddressPolicy.of(["127.0.0.0/8"]), trusted_tls())
    async with GuardedClient(options) as client:
        assert_failed(await post(client, endpoint), "TLS_FAILED")


async def test_e22_tls_before_1_2_is_refused(client: GuardedClient, certificates: Certificates) -> None:
    """The endpoint offers TLS 1.1 at most; where its OpenSSL cannot even do that, it offers nothing."""
    with Endpoint(certificates.good, Handshake.OLD) as endpoint:
        assert_failed(await post(client, endpoint), "TLS_FAILED")
        assert endpoint.requests == []


async def test_e23_a_stalled_handshake_is_a_timeout(
    client: GuardedClient, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted, and then nothing: the deadline covers the handshake."""
    with Endpoint(certificates.good, Handshake.STALLED) as endpoint:
        request = asyncio.create_task(post(client, endpoint))
        await until_true(lambda: len(endpoint.connections) == 1)
        assert_failed(await at_its_deadline(monkeypatch, request), "TIMEOUT")


def test_e22_nothing_of_tls_is_left_to_defaults(tls: ssl.SSLContext) -> None:
    """Verified by authority and by name, and TLS 1.2 at least, whatever Python's defaults become."""
    assert tls.verify_mode is ssl.CERT_REQUIRED
    assert tls.check_hostname
    assert tls.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("content", [None, b"", b"no certificate"], ids=["missing", "empty", "garbage"])
def test_a_ca_file_that_cannot_be_used_is_a_configuration_error(
    tmp_path: Path, content: bytes | None
) -> None:
    """Found out before anything live is touched, in one line."""
    ca_file = tmp_path / "ca.pem"
    if content is not None:
        ca_file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"^delivery\.ca_file .*ca\.pem cannot be used: .+$"):
        trusted_tls(ca_file)


# Connections, reloads, and the end.


async def test_connections_are_kept_alive(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled
) -> None:
    """Twenty requests one after the other, one connection."""
    endpoint.answer(200, b'{"ok":true}')
    for _ in range(20):
        assert (await post(client, endpoint)).delivered
    assert {request.connection for request in endpoint.requests} == {1}
    assert len(dialled) == len(endpoint.connections) == client.counters.dials == 1


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"", b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\n"])
async def test_a_connection_that_is_given_up_does_not_linger(
    client: GuardedClient, endpoint: Endpoint, sockets: list[socket.socket], answer: bytes
) -> None:
    """An endpoint that then reads nothing more, not even our goodbye, holds none of our sockets."""

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


async def test_a_reload_leaves_requests_in_flight_alone(
    client: GuardedClient, endpoint: Endpoint, tls: ssl.SSLContext
) -> None:
    """A request that was sent before is answered after; then the connections of its time are closed."""
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


async def test_a_reload_brings_a_new_authority(endpoint: Endpoint, tls: ssl.SSLContext) -> None:
    """What failed before it for want of the CA file succeeds after it."""
    local = AddressPolicy.of(["127.0.0.0/8"])
    async with GuardedClient(ClientOptions(local, trusted_tls())) as client:
        assert_failed(await post(client, endpoint), "TLS_FAILED")
        client.reconfigure(ClientOptions(local, tls))
        assert (await post(client, endpoint)).delivered


async def test_cancellation_passes(client: GuardedClient, endpoint: Endpoint) -> None:
    """The one thing that is not an outcome: whoever cancels wants the end, not a report."""
    endpoint.hang()
    request = asyncio.create_task(post(client, endpoint))
    await endpoint.received(1)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a31_a_bug_of_ours_is_an_outcome_and_is_logged(
    client: GuardedClient,
    endpoint: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Any exception ends one delivery, and is not lost."""

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(client._connections, "request", broken)
    with caplog.at_level(logging.ERROR):
        assert_failed(await post(client, endpoint), "INTERNAL")
    assert "ZeroDivisionError" in caplog.text


async def test_a_closed_client_answers_with_an_outcome(client: GuardedClient, endpoint: Endpoint) -> None:
    """A delivery that comes too late fails as ours, and goes out again later."""
    client.close()
    assert_failed(await post(client, endpoint), "INTERNAL")


async def test_the_endpoint_fails_as_often_as_told(client: GuardedClient, endpoint: Endpoint) -> None:
    """The test endpoint's own way to recover, for tests of retries."""
    endpoint.fail_times(2, 503)
    statuses = [(await post(client, endpoint)).response_status for _ in range(4)]
    assert statuses == [503, 503, 200, 200]
