"""An HTTPS server on this machine: each request, read within bounds, is judged by the inbox and handed on."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
from aiohttp import web

from webhookd.devtools.inbox import Arrival, Inbox, now

HandOn: TypeAlias = Callable[[Arrival], None]

# The largest payload that the database takes, which is the largest that can be delivered.
MAX_BODY_BYTES = 8 * 1024 * 1024
BODY_TIMEOUT_SECONDS = 30.0
SHUTDOWN_SECONDS = 1.0


@asynccontextmanager
async def receiving(
    listening: socket.socket,
    tls: ssl.SSLContext,
    inbox: Inbox,
    hand_on: HandOn,
    delay_seconds: float = 0.0,
) -> AsyncIterator[str]:
    """Receive on this socket for the length of a `with`; gives the URL."""

    async def handle(request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                body = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        headers = {name.lower(): value for name, value in request.headers.items()}
        arrival = inbox.judge(request.method, request.path_qs, headers, body, now())
        hand_on(arrival)
        await asyncio.sleep(delay_seconds)
        return web.Response(status=arrival.status, body=arrival.answer, content_type="application/json")

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", handle)
    # What is packed stays packed: it is nothing that webhookd sends.
    runner = web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, ssl_context=tls).start()
        host, port = listening.getsockname()
        yield f"https://{host}:{port}/"
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()
