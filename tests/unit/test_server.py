"""The bounds of a listening socket, made small: who is silent, slow or one too many is let go of."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.support.waiting import WAIT_TIMEOUT_SECONDS
from webhookd.api import bodies, server
from webhookd.api.app import problems_answered

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT_SECONDS = 0.2
MAX_CONNECTIONS = 3


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Give the port of a site with small bounds."""
    monkeypatch.setattr(server, "IDLE_TIMEOUT_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", MAX_CONNECTIONS)
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_SECONDS", SHORT_SECONDS)
    app = web.Application(middlewares=[problems_answered])
    app.router.add_get("/", _answer)
    app.router.add_post("/", _read)
    with server.listening_socket("127.0.0.1:0") as listening:
        task = asyncio.create_task(server.serve(app, listening))
        yield listening.getsockname()[1]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _answer(_: web.Request) -> web.Response:
    return web.Response(text="here")


async def _read(request: web.Request) -> web.Response:
    return web.json_response(await bodies.read_json(request, dict[str, int], max_bytes=100))


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection."""
    return await asyncio.open_connection("127.0.0.1", port)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Wait for the end of a connection; what came before it."""
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), WAIT_TIMEOUT_SECONDS)
    return b""


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST[:-2], REQUEST + b"GET / HTTP/1.1\r\nHost"])
async def test_c17_who_falls_silent_is_let_go_of(port: int, sent: bytes) -> None:
    """Nothing at all, half a line, half the headers, half of a second request: the end comes by itself."""
    reader, writer = await connect(port)
    writer.write(sent)
    answered = await closed(reader)
    writer.close()
    assert answered.startswith(b"HTTP/1.1 200 ") is sent.startswith(REQUEST)


async def test_c17_who_drips_is_let_go_of(port: int) -> None:
    """A byte now and then does not lengthen the time that headers have."""
    reader, writer = await connect(port)
    writer.write(b"GET / HTTP/1.1\r\nX: ")

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(SHORT_SECONDS / 10)

    dripping = asyncio.create_task(drip())
    try:
        assert await closed(reader) == b""
    finally:
        dripping.cancel()
        writer.close()


async def test_c19_one_connection_too_many_is_closed_and_the_others_are_served(port: int) -> None:
    """Who is refused harms nobody, and a place that is freed is given on."""
    open_ones = [await connect(port) for _ in range(MAX_CONNECTIONS)]
    for reader, writer in open_ones:
        writer.write(REQUEST)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    refused, extra = await connect(port)
    assert await closed(refused) == b""
    extra.close()
    for _, writer in open_ones:
        writer.close()
        await writer.wait_closed()

    async def served() -> bool:
        reader, writer = await connect(port)
        writer.write(REQUEST)
        with contextlib.suppress(ConnectionError):
            line = await reader.readline()
            writer.close()
            return line.startswith(b"HTTP/1.1 200 ")
        return False

    async with asyncio.timeout(WAIT_TIMEOUT_SECONDS):
        while not await served():  # noqa: ASYNC110  it is the server that is asked
            await asyncio.sleep(0)


async def test_c17_a_body_has_its_time(port: int) -> None:
    """Announced and begun, and then nothing: 408 in our words, and the end."""
    reader, writer = await connect(port)
    writer.write(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    answered = await closed(reader)
    writer.close()
    assert answered.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come in time" in answered
