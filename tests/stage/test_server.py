"""The API's end: what is under way has a part of the grace period, and no more."""

import asyncio
import socket

import pytest
from aiohttp import web

from webhookd.api import server


async def test_a_request_that_never_ends_does_not_outlast_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long requests might have by themselves."""
    monkeypatch.setattr(server, "MAX_SHUTDOWN_SECONDS", 3600.0)
    asked = asyncio.Event()

    async def never(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/", never)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(app, listening, lambda: 1.0))
        _, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asked.wait()
        serving.cancel()
        done, _ = await asyncio.wait({serving}, timeout=60)
        assert done
        writer.close()
