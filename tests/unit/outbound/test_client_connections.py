"""The client's connections: which are reused, which are closed, and how many there are."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
import types
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

import pytest
import uvloop

from tests.support.certificates import Certificates
from tests.support.endpoint import Connection, Endpoint, Handshake, Request
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS
from tests.unit.outbound.conftest import (
    DEADLINE_SECONDS,
    LOOPBACK,
    Dialled,
    MakeClient,
    Names,
    Signal,
    until_closed,
)
from tests.unit.outbound.test_client_responses import SHORT_DEADLINE_SECONDS, post
from webhookd.outbound import client as client_module
from webhookd.outbound import dialling
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient
from webhookd.outbound.endpoint import target_of
from webhookd.outbound.exchange import Exchange

pytestmark = pytest.mark.usefixtures("nothing_left_open")

OK = b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok"


async def test_second_response_closes_the_connection(client: GuardedClient, endpoint: Endpoint) -> None:
    """A second response in the same packet must not become the response to the next request."""
    endpoint.garbage(OK + b"HTTP/1.1 500 X\r\nRetry-After: 9\r\n\r\n")
    outcome = await post(client, endpoint)
    assert (outcome.response_status, outcome.response_excerpt) == (200, b"ok")
    endpoint.answer(200)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


async def test_unsolicited_response_closes_the_connection(
    client: GuardedClient, endpoint: Endpoint, sockets: list[socket.socket]
) -> None:
    """A response that arrives before its request closes the connection."""
    answered = Signal()

    async def answer_twice(_: Request, connection: Connection) -> bool:
        await connection.send(OK)
        await answered.wait()
        await connection.send(b"HTTP/1.1 500 X\r\n\r\n")
        return True

    endpoint.behave(answer_twice)
    assert (await post(client, endpoint)).delivered
    answered.set()
    await until_closed(sockets)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 X\r\n", b"HTTP/1.1 200 X\r\nConnection: close\r\n"])
async def test_connection_is_not_reused_if_the_endpoint_closes_it(
    client: GuardedClient, endpoint: Endpoint, head: bytes
) -> None:
    """HTTP/1.0 and `Connection: close` announce that the endpoint closes the connection."""

    async def answer(_: Request, connection: Connection) -> bool:
        await connection.send(head + b"Content-Length: 0\r\n\r\n")
        return True

    endpoint.behave(answer)
    for _ in range(2):
        assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


async def test_protocol_switch_closes_the_connection(client: GuardedClient, endpoint: Endpoint) -> None:
    """The following bytes are not HTTP, even if the response does not name the protocol."""

    async def switch(_: Request, connection: Connection) -> bool:
        await connection.send(b"HTTP/1.1 101 X\r\nContent-Length: 0\r\n\r\n")
        return True

    endpoint.behave(switch)
    assert (await post(client, endpoint)).error_code == "HTTP_101"
    endpoint.answer(200)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


class Unread(asyncio.Transport):
    """A transport with bytes that the peer has not read."""

    def __init__(self, unread_bytes: int) -> None:
        super().__init__()
        self.unread_bytes = unread_bytes

    def write(self, data: object) -> None:
        """Discard the data."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes


@pytest.mark.parametrize("unread_bytes", [0, 1])
async def test_connection_is_reused_only_if_the_request_was_read(unread_bytes: int) -> None:
    """An endpoint that responds without reading would make every further request wait in memory."""
    loop = asyncio.get_running_loop()
    exchange = Exchange(loop, 1000)
    exchange.connection_made(Unread(unread_bytes))
    ended: list[Exchange] = []
    exchange.start(b"", b"", loop.time() + DEADLINE_SECONDS, ended.append)
    exchange.data_received(OK)
    assert ended == [exchange]
    assert exchange.status == 200
    assert exchange.is_reusable == (unread_bytes == 0)


@pytest.mark.parametrize("first", [SHORT_DEADLINE_SECONDS / 2, DEADLINE_SECONDS], ids=["before", "after"])
async def test_each_request_of_a_connection_has_its_own_deadline(first: float) -> None:
    """The timer stays when a request ends; it may fire before or after the next deadline."""
    loop = asyncio.get_running_loop()
    exchange = Exchange(loop, 1000)
    exchange.connection_made(Unread(0))
    exchange.start(b"", b"", loop.time() + first, lambda _: None)
    exchange.data_received(OK)
    ended = asyncio.Event()
    deadline = loop.time() + SHORT_DEADLINE_SECONDS
    exchange.start(b"", b"", deadline, lambda _: ended.set())
    await asyncio.wait_for(ended.wait(), CONDITION_TIMEOUT_SECONDS)
    assert isinstance(exchange.error, TimeoutError)
    assert deadline - 0.001 <= loop.time() < deadline + DEADLINE_SECONDS / 2


async def test_handshake_uses_the_deadline_of_the_request(
    certificates: Certificates, client: GuardedClient
) -> None:
    """Also if the cancellation of the dial is lost (aiohappyeyeballs may swallow it)."""
    with Endpoint(certificates.good, Handshake.STALLED) as stalled:
        dialler = client._connections._dialler
        deadline = asyncio.get_running_loop().time() + SHORT_DEADLINE_SECONDS
        origin = target_of(stalled.url(), {}).origin
        async with asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(TimeoutError):
                await dialler.dial(origin, 1000, deadline)


class StoppedLoop(uvloop.Loop):
    """A uvloop that stalls after the TLS client hello, as in a process that is stopped and resumed."""

    def __init__(self) -> None:
        super().__init__()
        self.dialling: asyncio.Future[Exchange] | None = None
        self.connected: asyncio.Future[asyncio.Transport] = self.create_future()
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    async def create_connection(self, *arguments: Any, **named: Any) -> Any:
        connected = await self._stopped(super().create_connection(*arguments, **named))
        self.connected.set_result(connected[0])
        return connected

    @types.coroutine
    def _stopped(self, connecting: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        awaited = connecting.send(None)
        # Runs in the same loop iteration, after the client hello: then the response is already there.
        self.call_soon(self._stop)
        while True:
            try:
                sent = yield awaited
            except BaseException as error:
                step = partial(connecting.throw, error)
            else:
                step = partial(connecting.send, sent)
            try:
                awaited = step()
            except StopIteration as end:
                return end.value

    def _stop(self) -> None:
        assert self.dialling is not None
        time.sleep(0.1)
        self.dialling.cancel()


def test_dial_cancelled_as_its_handshake_ends_is_not_an_error(
    endpoint: Endpoint, tls: ssl.SSLContext, names: Names
) -> None:
    """As when a stopped process resumes after the deadline: the new connection is closed silently."""
    loop = StoppedLoop()

    async def give_up() -> None:
        client = GuardedClient(ClientOptions(AddressPolicy.of(LOOPBACK), tls), names)
        origin = target_of(endpoint.url(), {}).origin
        dial = client._connections._dialler.dial(origin, 1000, loop.time() + DEADLINE_SECONDS)
        loop.dialling = asyncio.ensure_future(dial)
        with pytest.raises(asyncio.CancelledError):
            await loop.dialling
        transport = await asyncio.wait_for(loop.connected, CONDITION_TIMEOUT_SECONDS)
        await asyncio.sleep(0.1)  # for error reports, and for the connection to end
        assert transport.is_closing()
        client.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(give_up())
    assert loop.errors == []


async def test_body_without_length_ends_with_the_connection(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """Without a length the end of the connection is the end of the body."""
    endpoint.garbage(b"HTTP/1.1 201 X\r\n\r\nall of it")
    outcome = await post(client, endpoint)
    assert (outcome.response_status, outcome.response_excerpt) == (201, b"all of it")


async def test_an_endless_chunk_extension_is_cut(make_client: MakeClient, endpoint: Endpoint) -> None:
    """Bytes outside of head and body are bounded too; the status had arrived."""
    client = make_client(max_response_bytes=10_000)

    async def extend(_: Request, connection: Connection) -> bool:
        await connection.send(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2;a=")
        while True:
            await connection.send(b"a" * 8192)

    endpoint.behave(extend)
    assert (await post(client, endpoint)).delivered


async def test_endless_header_line_is_a_protocol_error(client: GuardedClient, endpoint: Endpoint) -> None:
    """The limit applies before the line ends."""

    async def send_header(_: Request, connection: Connection) -> bool:
        await connection.send(b"HTTP/1.1 200 X\r\na: ")
        while True:
            await connection.send(b"a" * 8192)

    endpoint.behave(send_header)
    assert (await post(client, endpoint)).error_code == "PROTOCOL_ERROR"


async def test_endless_interim_responses_are_a_protocol_error(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """They do not last until the deadline."""

    async def send_interim(_: Request, connection: Connection) -> bool:
        while True:
            await connection.send(b"HTTP/1.1 102 X\r\n\r\n" * 100)

    endpoint.behave(send_interim)
    assert (await post(client, endpoint)).error_code == "PROTOCOL_ERROR"


async def test_a_large_body_to_an_endpoint_that_does_not_read_is_a_timeout(
    client: GuardedClient, endpoint: Endpoint
) -> None:
    """The deadline covers the sending, too."""

    async def never_read(_: Request, connection: Connection) -> bool:
        connection.stop_reading()
        await asyncio.Event().wait()
        return False

    assert (await post(client, endpoint)).delivered
    endpoint.answer_unread("/")  # do not wait for the body
    endpoint.behave(never_read, "/")
    outcome = await client.post(endpoint.url(), {}, bytes(50_000_000), SHORT_DEADLINE_SECONDS)
    assert outcome.error_code == "TIMEOUT"


async def test_custom_accept_header_replaces_the_default(client: GuardedClient, endpoint: Endpoint) -> None:
    """`Accept` is the only header that both may set."""
    await client.post(endpoint.url(), {"Accept": "text/plain"}, b"{}", DEADLINE_SECONDS)
    lines = [line.lower() for line in endpoint.requests[0].header_lines]
    assert [line for line in lines if line.startswith("accept:")] == ["accept: text/plain"]


async def test_idle_connection_is_closed_after_the_keepalive_time(
    client: GuardedClient,
    endpoint: Endpoint,
    sockets: list[socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a further request, and before the endpoint closes it."""
    monkeypatch.setattr(client_module, "_KEEPALIVE_SECONDS", 0.05)
    assert (await post(client, endpoint)).delivered
    await until_closed(sockets)
    assert (await post(client, endpoint)).delivered
    assert [request.connection for request in endpoint.requests] == [1, 2]


async def test_idle_connections_are_bounded(
    client: GuardedClient,
    endpoint: Endpoint,
    names: Names,
    tls: ssl.SSLContext,
    sockets: list[socket.socket],
) -> None:
    """A new connection replaces the one that was idle longest; the others are reused."""
    client.reconfigure(ClientOptions(AddressPolicy.of(LOOPBACK), tls, max_connections=3))
    hosts = [f"{number}.hooks.example" for number in range(5)]
    names.answers = {host: ["127.0.0.1"] for host in hosts}
    for host in (*hosts, *hosts[2:]):
        assert (await client.post(endpoint.url("/", host), {}, b"{}", DEADLINE_SECONDS)).delivered
    await until_closed(sockets[:2])
    assert [made.fileno() == -1 for made in sockets] == [True, True, False, False, False]


@pytest.mark.parametrize("host", ["127.1", "2130706433", "127.0.0.1."])
async def test_a24_numeric_host_is_not_resolved(
    tls: ssl.SSLContext, dialled: Dialled, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The resolver would return the address of the number, and loopback is allowed here."""

    def getaddrinfo(_: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with GuardedClient(ClientOptions(AddressPolicy.of(LOOPBACK), tls)) as client:
        outcome = await client.post(f"https://{host}/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert dialled == []


async def test_headers_of_interim_responses_are_ignored(client: GuardedClient, endpoint: Endpoint) -> None:
    """Retry-After comes from the final response."""
    endpoint.garbage(b"HTTP/1.1 103 X\r\nRetry-After: 9\r\n\r\nHTTP/1.1 503 X\r\nRetry-After: 1\r\n\r\n")
    assert (await post(client, endpoint)).retry_after_seconds == 1.0


async def test_a_dial_that_outlasts_the_deadline_sends_nothing(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the dialler swallows the cancellation: the lease may have expired by then."""
    dialler = client._connections._dialler
    dial = dialler.dial

    async def dial_on(*arguments: Any) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await dial(*arguments)

    monkeypatch.setattr(dialler, "dial", dial_on)
    assert (await post(client, endpoint, SHORT_DEADLINE_SECONDS)).error_code == "TIMEOUT"
    assert endpoint.requests == []


async def test_client_closed_while_dialling_sends_nothing(
    client: GuardedClient, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is made after the client was closed is closed too."""
    dialler = client._connections._dialler
    dial = dialler.dial
    dials, go_on = asyncio.Event(), asyncio.Event()

    async def dial_slowly(*arguments: Any) -> Any:
        dials.set()
        await go_on.wait()
        return await dial(*arguments)

    monkeypatch.setattr(dialler, "dial", dial_slowly)
    request = asyncio.create_task(post(client, endpoint))
    await dials.wait()
    client.close()
    go_on.set()
    assert (await request).error_code == "INTERNAL"
    assert endpoint.requests == []


async def test_client_closed_during_a_lookup_returns_an_outcome(
    tls: ssl.SSLContext,
) -> None:
    """The request was not cancelled, so it does not raise CancelledError."""
    looking_up = asyncio.Event()

    async def never(_: str, __: int) -> list[str]:
        looking_up.set()
        await asyncio.Event().wait()
        return []

    client = GuardedClient(ClientOptions(AddressPolicy(), tls), never)
    request = asyncio.create_task(client.post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS))
    await looking_up.wait()
    client.close()
    assert (await request).error_code == "INTERNAL"


async def test_thread_that_fails_to_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups work again as soon as the machine has free threads."""

    def getaddrinfo(_: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(dialling, "_LOOKUP_THREADS", 1)
    lookup = dialling.SystemLookup()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            await lookup("hooks.example", 443)
    assert await lookup("hooks.example", 443) == ["127.0.0.1"]
