"""The API's server on a real socket, its deadlines short: who is slow, who is silent, who is one too many."""

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
from webhookd.http.site import check_expectation, errors_to_problems

SHORT_SECONDS = 0.2
SETTINGS = Settings(services=ServicesSettings(shutdown_grace_seconds=1.0))
LARGE_BYTES = 64 * 1024 * 1024
BEGUN = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Connection(NamedTuple):
    """A client's."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def sees_the_end(self) -> bytes:
        """All that comes, until the server ends it, in order or not."""
        came = b""
        try:
            while chunk := await asyncio.wait_for(self.reader.read(65536), CONDITION_TIMEOUT_SECONDS):
                came += chunk
        except ConnectionResetError:
            pass
        return came

    async def is_answered(self) -> bool:
        """Whether a whole request gets 200."""
        self.writer.write(WHOLE)
        return b" 200 " in await asyncio.wait_for(self.reader.readline(), CONDITION_TIMEOUT_SECONDS)


Connect = Callable[[], Awaitable[Connection]]


@asynccontextmanager
async def serving() -> AsyncIterator[Connect]:
    """A server, and a way to connect to it."""

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
    """A request that is only begun is ended, silent or dripping, also after a whole one; idleness is not."""
    monkeypatch.setattr(server, "HEADERS_TIMEOUT_SECONDS", SHORT_SECONDS)
    async with serving() as connect:
        idle, silent, dripping, second = [await connect() for _ in range(4)]
        assert await second.is_answered()
        silent.writer.write(BEGUN)
        second.writer.write(BEGUN)

        async def drip() -> None:
            dripping.writer.write(BEGUN)
            while not dripping.reader.at_eof():
                dripping.writer.write(b"x")
                await asyncio.sleep(SHORT_SECONDS / 4)

        drops = asyncio.create_task(drip())
        assert await silent.sees_the_end() == b""
        assert await dripping.sees_the_end() == b""
        assert b"HTTP/1.1 " not in await second.sees_the_end()
        drops.cancel()
        assert await idle.is_answered()


async def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """408, and the connection ends."""
    monkeypatch.setattr(requests, "BODY_TIMEOUT_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(server, "LINGERING_SECONDS", SHORT_SECONDS)
    async with serving() as connect:
        slow = await connect()
        slow.writer.write(POST + b"Content-Length: 10\r\n\r\n{")
        assert (await slow.sees_the_end()).startswith(b"HTTP/1.1 408 ")


async def test_an_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks and does not take the answer is cut off."""
    monkeypatch.setattr(server, "RESPONSE_TIMEOUT_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(server, "RESPONSE_BYTES_PER_SECOND", 10 * LARGE_BYTES)
    async with serving() as connect:
        lazy = await connect()
        lazy.writer.transport.pause_reading()  # type: ignore[attr-defined]
        lazy.writer.write(WHOLE.replace(b"/", b"/large", 1))

        async def write_on() -> None:
            while True:
                lazy.writer.write(b"\r\n")  # which may stand before a request
                await lazy.writer.drain()
                await asyncio.sleep(SHORT_SECONDS / 4)

        with pytest.raises(ConnectionError):  # who reads nothing learns of the end by writing
            await asyncio.wait_for(write_on(), CONDITION_TIMEOUT_SECONDS)


async def test_one_connection_too_many_ends_the_idlest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds all connections open shuts nobody out; one with a request under way is not ended for it."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with serving() as connect:
        busy, idle = await connect(), await connect()
        busy.writer.write(POST + b"Content-Length: 2\r\n\r\n{")
        assert await idle.is_answered()  # so the other's headers are read too
        new = await connect()
        assert await new.is_answered()
        await idle.sees_the_end()
        new.writer.write(POST + b"Content-Length: 2\r\n\r\n{")
        busy.writer.write(b"}")
        assert b" 200 " in await asyncio.wait_for(busy.reader.readline(), CONDITION_TIMEOUT_SECONDS)


async def test_a_body_is_invited_only_where_it_is_read() -> None:
    """`Expect: 100-continue` gets 100 unless the body is refused by its headers; others get 417."""
    expects = POST + b"Expect: 100-continue\r\nConnection: close\r\n"
    async with serving() as connect:
        good, large, odd, nowhere = [await connect() for _ in range(4)]
        good.writer.write(expects + b"Content-Length: 2\r\n\r\n")
        assert await good.reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        good.writer.write(b"{}")
        assert b"HTTP/1.1 200 OK\r\n" in await good.sees_the_end()
        large.writer.write(expects + b"Content-Length: 101\r\n\r\n")
        assert (await large.sees_the_end()).startswith(b"HTTP/1.1 413 ")
        odd.writer.write(expects.replace(b"100-continue", b"nonsense") + b"Content-Length: 2\r\n\r\n{}")
        nowhere.writer.write(b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nExpect: nonsense\r\n\r\n")
        for connection in (odd, nowhere):
            refused = await connection.sees_the_end()
            assert refused.startswith(b"HTTP/1.1 417 ")
            assert b"application/problem+json" in refused
            assert b"aiohttp" not in refused


async def test_a_request_that_never_ends_does_not_outlast_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long requests might have by themselves, at the end."""
    monkeypatch.setattr(server, "MAX_SHUTDOWN_SECONDS", 3600.0)
    asked = asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/", never)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = asyncio.create_task(server.serve(app, listening, lambda: SETTINGS))
        connection = Connection(*await asyncio.open_connection(*listening.getsockname()))
        connection.writer.write(WHOLE)
        await asked.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CONDITION_TIMEOUT_SECONDS)
        connection.writer.close()
    assert done


def test_connections_leave_files_for_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a usual limit of open files, a client who opens many does not take those of requests."""
    settings = Settings(delivery=DeliverySettings(concurrency=300))
    for limit, cap in ((1024, 614), (430, server.MIN_CONNECTIONS), (1_000_000, server.MAX_CONNECTIONS)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        assert server.connection_cap(settings) == cap
