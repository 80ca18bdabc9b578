"""A subscriber's HTTPS endpoint, with a method for each kind of misbehaviour.

Uses real sockets on 127.0.0.1, in a thread with its own loop, so that a blocking test does not stall it.
Records every request byte for byte. A behaviour applies to one path or to all: `endpoint.hang("/slow")`.
"""

import asyncio
import contextlib
import fcntl
import json
import socket
import ssl
import struct
import termios
import threading
import time
import warnings
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

# For dripped responses. Every deadline of a test is longer than a few of these.
DRIP_INTERVAL_SECONDS = 0.02
CHUNK = b"x" * 16384
# Larger than any response that a client should read, and small enough to make quickly.
BOMB_BYTES = 64 * 1024 * 1024
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Request:
    """A received request: header names in lower case, body byte for byte."""

    method: str
    path: str
    headers: dict[str, str]
    header_lines: list[str]
    body: bytes
    received_at: float  # time.time()
    connection: int  # number of the connection


class Connection:
    """The endpoint's side of a connection."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self._writer = writer
        self.bytes_sent = 0

    async def send(self, data: bytes) -> None:
        """Send, waiting while the client does not read."""
        # The loop must run to notice a lost connection, and drain() does not always yield to it.
        await asyncio.sleep(0)
        if self._writer.transport.is_closing():
            raise ConnectionResetError
        self._writer.write(data)
        await self._writer.drain()
        self.bytes_sent += len(data)

    async def arrived(self) -> None:
        """Wait until the client's kernel has acknowledged all data, even if the client has not read it."""
        raw = self._writer.get_extra_info("socket")
        while raw.fileno() >= 0 and any(fcntl.ioctl(raw, termios.TIOCOUTQ, bytes(4))):  # noqa: ASYNC110  there is no event
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    def stop_reading(self) -> None:
        """Stop reading below TLS, which would otherwise answer the client's close_notify."""
        self._writer.transport._ssl_protocol._transport.pause_reading()  # type: ignore[attr-defined]

    async def reset(self) -> None:
        """End with a TCP reset."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def abort(self) -> None:
        """Close without a TLS shutdown, and wait until the connection has ended."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await asyncio.wait_for(self._writer.wait_closed(), CONDITION_TIMEOUT_SECONDS)


Behaviour = Callable[[Request, Connection], Awaitable[bool]]  # True: the connection may be reused


class Handshake(Enum):
    """The behaviour during the TLS handshake."""

    MODERN = "modern"
    OLD = "TLS 1.1 at most"
    STALLED = "accepts, and sends nothing"


class Endpoint:
    """Listens from start() to stop(); answers 200 by default."""

    def __init__(self, certificate: Path, handshake: Handshake = Handshake.MODERN) -> None:
        self.requests: list[Request] = []
        self.connections: list[Connection] = []
        self.port = 0
        self._certificate = certificate
        self._handshake = handshake
        self._behaviours: dict[str | None, Behaviour] = {None: _answer(200, b"", {})}
        self._answered_unread: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._listener: socket.socket | None = None
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._handlers: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(CONDITION_TIMEOUT_SECONDS)

    def stop(self) -> None:
        """End every connection and the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CONDITION_TIMEOUT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONDITION_TIMEOUT_SECONDS)
        self._loop.close()

    def stop_listening(self) -> None:
        """Refuse new connections; open connections stay."""
        asyncio.run_coroutine_threadsafe(self._close_listener(), self._loop).result(CONDITION_TIMEOUT_SECONDS)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        """The URL of a path, with any host name that resolves to this endpoint."""
        return f"https://{host}:{self.port}{path}"

    def requests_for(self, path: str) -> list[Request]:
        """The requests of one path."""
        return [request for request in self.requests if request.path == path]

    async def received(self, count: int, path: str | None = None) -> list[Request]:
        """Wait until this many requests have arrived; returns them."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while len(found := self.requests if path is None else self.requests_for(path)) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(found)} of {count} requests within {CONDITION_TIMEOUT_SECONDS} s")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return list(found)

    # Behaviours.

    def behave(self, behaviour: Behaviour, path: str | None = None) -> None:
        """Set a custom behaviour."""
        self._behaviours[path] = behaviour

    def answer(
        self,
        status: int = 200,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        path: str | None = None,
    ) -> None:
        """Send a normal response."""
        self.behave(_answer(status, body, headers or {}), path)

    def answer_unread(self, path: str, status: int = 413) -> None:
        """Respond after the headers, and never read the body."""
        self._answered_unread.add(path)

        async def behaviour(request: Request, connection: Connection) -> bool:
            connection.stop_reading()
            await _answer(status, b"", {})(request, connection)
            await asyncio.Event().wait()
            return False

        self.behave(behaviour, path)

    def fail_times(self, count: int, status: int = 503, path: str | None = None) -> None:
        """Fail this many times, then answer 200."""
        left = count

        async def behaviour(request: Request, connection: Connection) -> bool:
            nonlocal left
            left -= 1
            return await _answer(status if left >= 0 else 200, b"", {})(request, connection)

        self.behave(behaviour, path)

    def retry_after(self, value: str, status: int = 503, path: str | None = None) -> None:
        """Send a Retry-After header."""
        self.answer(status, headers={"Retry-After": value}, path=path)

    def redirect_to(self, url: str, status: int = 307, path: str | None = None) -> None:
        """Send a redirect."""
        self.answer(status, headers={"Location": url}, path=path)

    def echo_challenge(self, *, bare: bool = False, path: str | None = None) -> None:
        """Answer a verification with its challenge, as JSON or as plain text; everything else with 200."""

        async def behaviour(request: Request, connection: Connection) -> bool:
            challenge = _challenge_in(request.body)
            echo = challenge if bare else json.dumps({"challenge": challenge})
            return await _answer(200, b"" if challenge is None else str(echo).encode(), {})(
                request, connection
            )

        self.behave(behaviour, path)

    def hang(self, path: str | None = None) -> None:
        """Never answer."""
        self.behave(_hang, path)

    def hold(self, path: str | None = None) -> "Gate":
        """Keep requests open until the gate lets them through."""
        gate = Gate(self._loop)
        self.behave(gate.hold, path)
        return gate

    def close_at_once(self, path: str | None = None) -> None:
        """Close instead of answering."""
        self.behave(_raw(b""), path)

    def reset_before_status(self, path: str | None = None) -> None:
        """Send a TCP reset instead of an answer."""

        async def behaviour(_: Request, connection: Connection) -> bool:
            await connection.reset()
            return False

        self.behave(behaviour, path)

    def reset_after_status(self, status: int = 200, path: str | None = None) -> None:
        """Send the status and headers, then a reset once the client's kernel has received them."""

        async def behaviour(_: Request, connection: Connection) -> bool:
            await connection.send(f"HTTP/1.1 {status} X\r\nContent-Length: 100\r\n\r\n".encode())
            # A reset discards unsent data. The client reads received data before it notices the reset.
            await connection.arrived()
            await connection.reset()
            return False

        self.behave(behaviour, path)

    def drip_headers(self, path: str | None = None) -> None:
        """Send the status and an endless header line, one byte at a time.

        Not line by line: after 128 lines, which took five seconds, the client reports an error.
        """
        self.behave(_drip(b"HTTP/1.1 200 OK\r\nX-Drip: ", b"."), path)

    def drip_body(self, status: int = 200, path: str | None = None) -> None:
        """Send the headers and an endless body, one byte at a time."""
        head = f"HTTP/1.1 {status} X\r\nContent-Length: 1000000\r\n\r\n".encode()
        self.behave(_drip(head, b"."), path)

    def endless_body(self, status: int = 200, path: str | None = None) -> None:
        """Send an endless body as fast as the client reads."""

        async def behaviour(_: Request, connection: Connection) -> bool:
            await connection.send(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            while True:
                await connection.send(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))

        self.behave(behaviour, path)

    def gzip_bomb(self, path: str | None = None) -> None:
        """Send few bytes that decompress to many."""
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        bomb = b"".join(packer.compress(bytes(1024 * 1024)) for _ in range(BOMB_BYTES // (1024 * 1024)))
        self.answer(200, bomb + packer.flush(), {"Content-Encoding": "gzip"}, path)

    def garbage(
        self, data: bytes = b"\x00\xff\x16\x03 what is this\r\n\r\n", path: str | None = None
    ) -> None:
        """Send these bytes, and close."""
        self.behave(_raw(data), path)

    def duplicate_content_length(self, path: str | None = None) -> None:
        """Send two different lengths."""
        self.garbage(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", path)

    def long_header(self, length: int = 100_000, path: str | None = None) -> None:
        """Send one very long header line."""
        self.answer(200, headers={"X-Long": "x" * length}, path=path)

    def many_headers(self, count: int = 50_000, path: str | None = None) -> None:
        """Send very many header lines."""
        self.answer(200, headers={f"X-{number}": "1" for number in range(count)}, path=path)

    def non_utf8_reason(self, status: int = 500, path: str | None = None) -> None:
        """Send a reason phrase that is not valid text."""
        self.garbage(f"HTTP/1.1 {status} ".encode() + b"\xff\xfe\r\nContent-Length: 0\r\n\r\n", path)

    # Internal.

    async def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        context = None if self._handshake is Handshake.STALLED else self.server_context()
        self._loop.add_reader(self._listener, self._accept, self._listener, context)

    def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Accept without asyncio's server, which before Python 3.13 cannot close unfinished handshakes."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        accepted.setblocking(False)
        # asyncio sets it only for its own server; without it a response waits 40 ms for an acknowledgement.
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = self._loop.create_task(self._shake_hands(accepted, context))
        self._handshakes[handshake] = accepted
        handshake.add_done_callback(self._handshakes.pop)

    async def _shake_hands(self, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)

    def server_context(self) -> ssl.SSLContext:
        """The TLS context of the endpoint, for a test with its own server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate)
        if self._handshake is Handshake.OLD:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                context.minimum_version = ssl.TLSVersion.TLSv1
                context.maximum_version = ssl.TLSVersion.TLSv1_1
            # If OpenSSL supports or allows neither, the client refuses in the same way.
            context.set_ciphers("ALL:@SECLEVEL=0")
        return context

    async def _close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _end(self) -> None:
        await self._close_listener()
        accepted_sockets = list(self._handshakes.values())
        await _cancel(*self._handshakes)
        for accepted in accepted_sockets:
            accepted.close()  # even if its handshake has not started
        for connection in self.connections:
            await connection.abort()
        await _cancel(*self._handlers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._handlers.add(task)
            task.add_done_callback(self._handlers.discard)
        connection = Connection(len(self.connections) + 1, reader, writer)
        self.connections.append(connection)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            while await self._serve_one(connection):
                pass
        connection.close()

    async def _serve_one(self, connection: Connection) -> bool:
        if self._handshake is Handshake.STALLED:
            await asyncio.Event().wait()
        request = await _read_request(connection, self._answered_unread)
        self.requests.append(request)
        behaviour = self._behaviours.get(request.path) or self._behaviours[None]
        return await behaviour(request, connection)


class Gate:
    """Holds requests open, and records the maximum number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.open = 0
        self.most_open = 0
        self._loop = loop
        self._places = asyncio.Semaphore(0)

    async def hold(self, request: Request, connection: Connection) -> bool:
        """A behaviour for `endpoint.behave`."""
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._places.acquire()
        finally:
            self.open -= 1
        return await _answer(200, b"", {})(request, connection)

    def let_through(self, count: int) -> None:
        """Answer this many open or future requests."""
        for _ in range(count):
            self._loop.call_soon_threadsafe(self._places.release)

    async def opened(self, count: int) -> None:
        """Wait until exactly this many requests are open."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while self.open != count:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.open} open, not {count}, after {CONDITION_TIMEOUT_SECONDS} s")
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read_request(connection: Connection, answered_unread: set[str]) -> Request:
    head = (await connection.reader.readuntil(HEAD_END)).decode("latin-1").removesuffix("\r\n\r\n")
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = 0 if path in answered_unread else int(headers.get("content-length", "0"))
    body = await connection.reader.readexactly(length)
    return Request(method, path, headers, lines, body, time.time(), connection.number)


def _answer(status: int, body: bytes, headers: Mapping[str, str]) -> Behaviour:
    async def behaviour(_: Request, connection: Connection) -> bool:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        await connection.send("\r\n".join(lines).encode("latin-1") + HEAD_END + body)
        return True

    return behaviour


def _raw(data: bytes) -> Behaviour:
    async def behaviour(_: Request, connection: Connection) -> bool:
        await connection.send(data)
        return False

    return behaviour


def _drip(head: bytes, drop: bytes) -> Behaviour:
    async def behaviour(_: Request, connection: Connection) -> bool:
        await connection.send(head)
        while True:
            await connection.send(drop)
            await asyncio.sleep(DRIP_INTERVAL_SECONDS)

    return behaviour


async def _hang(_: Request, connection: Connection) -> bool:
    # Until the client closes; it sends nothing more.
    await connection.reader.read()
    return False


def _challenge_in(body: bytes) -> str | None:
    try:
        message = json.loads(body)
    except ValueError:
        return None
    if not isinstance(message, dict) or message.get("type") != "webhookd.verification":
        return None
    return str(message["challenge"])
