"""A listening socket with bounds: how many connect, how long one may be silent, how long the end takes."""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable

import anyio
from aiohttp import web

from webhookd.core.errors import CannotListen
from webhookd.core.settings import Settings, host_and_port
from webhookd.http.problems import Problem, internal, of_http

MAX_CONNECTIONS = 2000
# Of the files that a process may have open: deliveries have theirs, and the database, the log and the like so
# many. Clients who open many connections must not end our own requests.
RESERVED_FILES = 100
FEWEST_CONNECTIONS = 50
# What a process of this kind may ask for, where the system's first answer is less.
MOST_FILES = 65536
BACKLOG = 1024
# From the connection, or the last answer, to the next request. Longer than the 60 s for which nginx and load
# balancers keep an idle connection: they, not we, should be the ones to close it.
IDLE_TIMEOUT_SECONDS = 75.0
# From a request's first byte to the end of its headers; aiohttp has no such bound.
HEADERS_TIMEOUT_SECONDS = 15.0
# For an answer to be taken; and for a large one, as an event with its payload, at this pace at the least.
ANSWER_TIMEOUT_SECONDS = 30.0
ANSWER_BYTES_PER_SECOND = 32 * 1024
# A refused body is read on for so long, or its sender might see a reset in place of the refusal.
LINGERING_SECONDS = 2.0
# At the end requests under way have a moment: of the grace period so much, and never more than this.
SHUTDOWN_SHARE = 0.1
MAX_SHUTDOWN_SECONDS = 3.0

BAD_REQUEST = 400


def listening_socket(address: str) -> socket.socket:
    """A socket bound before anything runs: who cannot have the address should not begin."""
    host, port = host_and_port(address)
    try:
        [family, *_], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:  # socket.gaierror is one
        # Python adds the address to an errno's own words; a name's error has no errno of the system.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        taken = error.errno == errno.EADDRINUSE
        hint = ": is another webhookd there? api.listen sets another address" if taken else ""
        raise CannotListen(f"cannot listen on {address}: {reason}{hint}") from error


def raise_file_limit() -> None:
    """As many open files as we may have without asking anybody: the usual first limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_cap(settings: Settings) -> int:
    """How many connections may be open here, so that deliveries and the database have theirs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    others = settings.delivery.concurrency + settings.database.pool_size + RESERVED_FILES
    return min(MAX_CONNECTIONS, max(FEWEST_CONNECTIONS, limit - others))


async def serve(app: web.Application, listening: socket.socket, settings: Callable[[], Settings]) -> None:
    """Until cancelled; requests under way then have a moment to end. The socket outlives it."""
    runner = web.AppRunner(app, shutdown_timeout=MAX_SHUTDOWN_SECONDS)
    await runner.setup()
    loop = asyncio.get_running_loop()
    manager = runner.server
    if manager is None:
        raise RuntimeError("the runner was set up and has no server")

    def accept() -> asyncio.Protocol:
        if len(manager.connections) >= connection_cap(settings()) and not _make_room(manager):
            return _Refusing()
        return _Handler(
            manager,
            loop=loop,
            keepalive_timeout=IDLE_TIMEOUT_SECONDS,
            lingering_time=LINGERING_SECONDS,
            # An encoded body is refused, and must not be unpacked on its way to nowhere.
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
        )

    server: asyncio.Server | None = None
    try:
        # A copy, for the server closes what it is given; begun anew, it finds its address still its own.
        server = await loop.create_server(accept, sock=listening.dup(), backlog=BACKLOG)
        await asyncio.Event().wait()
    finally:
        if server is not None:
            server.close()
        # By the settings of now: what is not ended by then ends with the process.
        share = settings().services.shutdown_grace_seconds * SHUTDOWN_SHARE
        with anyio.move_on_after(min(MAX_SHUTDOWN_SECONDS, share), shield=True):
            await runner.cleanup()


class _Handler(web.RequestHandler):
    """A connection. Says in our words what it cannot read as HTTP, and never waits without end for a peer."""

    __slots__ = ("_headers_due", "idle_since")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._headers_due: asyncio.TimerHandle | None = None
        self.idle_since = self._loop.time()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether it waits for a request, or for the rest of one's headers."""
        if self.transport is None:  # ended already
            return False
        # The first data may come before the task that waits for it has begun.
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._headers_came()
        elif self._headers_due is None:
            self._headers_due = self._loop.call_later(HEADERS_TIMEOUT_SECONDS, self.abort)

    def _headers_came(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def abort(self) -> None:
        """End it now: what its peer has not taken is lost."""
        if self.transport is not None:
            self.transport.abort()
        self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before any middleware: what was expected of us
            resp = of_http(resp).response()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS + _length(resp) / ANSWER_BYTES_PER_SECOND):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.abort()
            return resp, True
        finally:
            self.idle_since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002  the base's signature
        status: int = 500,
        exc: BaseException | None = None,  # noqa: ARG002
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        if status == BAD_REQUEST:
            return Problem(
                BAD_REQUEST, "bad_request", "this is not HTTP, or too much of it", close=True
            ).response()
        return internal().response()


def _length(response: web.StreamResponse) -> int:
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) else 0


def _make_room(manager: web.Server) -> bool:
    """End the connection that has been idle for the longest: who holds many of them shuts nobody out."""
    idle = [one for one in manager.connections if isinstance(one, _Handler) and one.idle]
    if not idle:
        return False
    min(idle, key=lambda one: one.idle_since).abort()
    return True


class _Refusing(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
