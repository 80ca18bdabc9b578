"""The API's server on a real socket with short deadlines: slow, silent and too many clients."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from aiohttp import web

from tests.support.waiting import CONDITION_TIMEOUT_SECONDS
from webhookd.core.settings import DeliverySettings, ServicesSettings, Settings
from webhookd.http import requests, server
from webhookd.http.requests import Nothing
from webhookd.http.responses import json_response
from webhookd.http.server import check_expectation, errors_to_problems

SHORT_SECONDS = 0.2
SETTINGS = Settings(services=ServicesSettings(shutdown_grace_seconds=1.0))
LARGE_BYTES = 64 * 1024 * 1024
INCOMPLETE = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
COMPLETE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Connection(NamedTuple):
    """A client's connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_to_end(self) -> bytes:
        """Return everything up to the end of the connection, closed or reset."""
        came = b""
        try:
            while chunk := await asyncio.wait_for(self.reader.read(65536), CONDITION_TIMEOUT_SECONDS):
                came += chunk
        except ConnectionResetError:
            pass
        return came

    async def gets_response(self) -> bool:
        """Return whether a complete request gets 200."""
        self.writer.write(COMPLETE)
        return b" 200 " in await asyncio.wait_for(self.reader.readline(), CONDITION_TIMEOUT_SECONDS)


Connect = Callable[[], Awaitable[Connection]]


@asynccontextmanager
async def serving() -> AsyncIterator[Connect]:
    """Run a server; yield a function that connects to it."""

    async def read(request: web.Request) -> web.StreamResponse:
        await requests.read_json(request, Nothing, 100)
        return json_response({})

    async def small(_: web.Request) -> web.StreamResponse:
        return json_response({})

    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(LARGE_BYTES))

    app = web.Application(middlewares=[errors_to_problems])
    app.router.add_route("GET", "/", small, expect_handler=check_expectation)
    app.router.add_route("GET", "/large", large, expect_handler=check_expectation)
    app.router.add_route("POST", "/", read, expect_handler=check_expectation)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    task = asyncio.create_task(server.serve(app, listening, lambda: SETTINGS))
    opened: list[Connection] = []

    async def connect() -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        opened.append(connection)
        return connection

    try:
        yield connect
    finally:
        for connection in opened:
            connection.writer.transport.abort()
        task.cancel()
        await asyncio.wait({task})
        listening.close()


async def test_headers_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete request is closed, silent or slow, also on a reused connection; an idle one stays."""
    monkeypatch.setattr(server, "HEADERS_TIMEOUT_SECONDS", SHORT_SECONDS)
    async with serving() as connect:
        idle, silent, dripping, second = [await connect() for _ in range(4)]
        assert await second.gets_response()
        silent.writer.write(INCOMPLETE)
        second.writer.write(INCOMPLETE)

        async def drip() -> None:
            dripping.writer.write(INCOMPLETE)
            while not dripping.reader.at_eof():
                dripping.writer.write(b"x")
                await asyncio.sleep(SHORT_SECONDS / 4)

        drops = asyncio.create_task(drip())
        assert await silent.read_to_end() == b""
        assert await dripping.read_to_end() == b""
        assert b"HTTP/1.1 " not in await second.read_to_end()
        drops.cancel()
        assert await idle.gets_response()


async def test_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """408, and the connection is closed."""
    monkeypatch.setattr(requests, "BODY_TIMEOUT_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(server, "LINGERING_SECONDS", SHORT_SECONDS)
    async with serving() as connect:
        slow = await connect()
        slow.writer.write(POST + b"Content-Length: 10\r\n\r\n{")
        assert (await slow.read_to_end()).startswith(b"HTTP/1.1 408 ")


async def test_response_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read the response is disconnected."""
    monkeypatch.setattr(server, "RESPONSE_TIMEOUT_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(server, "RESPONSE_BYTES_PER_SECOND", 10 * LARGE_BYTES)
    async with serving() as connect:
        lazy = await connect()
        lazy.writer.transport.pause_reading()  # type: ignore[attr-defined]
        lazy.writer.write(COMPLETE.replace(b"/", b"/large", 1))

        async def write_on() -> None:
            while True:
                lazy.writer.write(b"\r\n")  # allowed before a request
                await lazy.writer.drain()
                await asyncio.sleep(SHORT_SECONDS / 4)

        with pytest.raises(ConnectionError):  # a client that does not read learns of it by writing
            await asyncio.wait_for(write_on(), CONDITION_TIMEOUT_SECONDS)


async def test_connection_above_the_limit_closes_the_longest_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that holds all connections blocks no other; a connection with a request stays open."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with serving() as connect:
        busy, idle = await connect(), await connect()
        busy.writer.write(POST + b"Content-Length: 2\r\n\r\n{")
        assert await idle.gets_response()  # so the server has read the other's headers
        new = await connect()
        assert await new.gets_response()
        await idle.read_to_end()
        new.writer.write(POST + b"Content-Length: 2\r\n\r\n{")
        busy.writer.write(b"}")
        assert b" 200 " in await asyncio.wait_for(busy.reader.readline(), CONDITION_TIMEOUT_SECONDS)


async def test_100_continue_is_sent_when_the_body_is_read() -> None:
    """`Expect: 100-continue` gets 100 unless the headers are rejected; other expectations get 417."""
    expects = POST + b"Expect: 100-continue\r\nConnection: close\r\n"
    async with serving() as connect:
        good, large, odd, nowhere = [await connect() for _ in range(4)]
        good.writer.write(expects + b"Content-Length: 2\r\n\r\n")
        assert await good.reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        good.writer.write(b"{}")
        assert b"HTTP/1.1 200 OK\r\n" in await good.read_to_end()
        large.writer.write(expects + b"Content-Length: 101\r\n\r\n")
        assert (await large.read_to_end()).startswith(b"HTTP/1.1 413 ")
        odd.writer.write(expects.replace(b"100-continue", b"nonsense") + b"Content-Length: 2\r\n\r\n{}")
        nowhere.writer.write(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nExpect: nonsense\r\n\r\n")
        for connection in (odd, nowhere):
            refused = await connection.read_to_end()
            assert refused.startswith(b"HTTP/1.1 417 ")
            assert b"application/problem+json" in refused
            assert b"aiohttp" not in refused


async def test_endless_request_does_not_outlast_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace period limits shutdown, however long a request takes."""
    monkeypatch.setattr(server, "MAX_SHUTDOWN_SECONDS", 3600.0)
    started = asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/", never)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(app, listening, lambda: SETTINGS))
        connection = Connection(*await asyncio.open_connection(*listening.getsockname()))
        connection.writer.write(COMPLETE)
        await started.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CONDITION_TIMEOUT_SECONDS)
        connection.writer.close()
    assert done
    # The process would end here. In a test, the abandoned request must not reach the garbage collector.
    abandoned = asyncio.all_tasks() - {asyncio.current_task()}
    for request in abandoned:
        request.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)


def test_connection_limit_leaves_files_for_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a usual limit of open files, API clients cannot use up the files of deliveries."""
    settings = Settings(delivery=DeliverySettings(concurrency=300))
    for limit, cap in ((1024, 614), (430, server.MIN_CONNECTIONS), (1_000_000, server.MAX_CONNECTIONS)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert server.connection_cap(settings) == cap
