"""The HTTP server: serves routes on an address.

Checks scopes, and converts every error into a problem response. Limits the number of connections, idle time,
slow clients and shutdown time.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable
from ipaddress import ip_address

import anyio
from aiohttp import web
from aiohttp.typedefs import Middleware

from webhookd.core.errors import CannotListen, DatabaseUnavailable, Refused
from webhookd.core.settings import Settings, host_and_port
from webhookd.http.auth import ACTOR, TENANT, TOKEN, Auth
from webhookd.http.requests import CONTINUE
from webhookd.http.responses import Problem, internal, invalid, of_http, of_refusal, unavailable
from webhookd.http.routes import Handler, Route

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2000
# Open files kept free for the database, the log and the like; deliveries have their own. API clients that
# open many connections must not starve webhookd's own requests.
RESERVED_FILES = 100
MIN_CONNECTIONS = 50
# The soft limit on open files is raised to this, where the hard limit allows it.
MAX_OPEN_FILES = 65536
BACKLOG = 1024
# From the connection, or the last response, to the next request. Longer than the 60 s for which nginx and
# load balancers keep an idle connection, so that they close it first.
IDLE_TIMEOUT_SECONDS = 75.0
# From a request's first byte to the end of its headers. aiohttp has no such limit.
HEADERS_TIMEOUT_SECONDS = 15.0
# For a client to read the response; a large one (an event with its payload) gets more time, at this rate.
RESPONSE_TIMEOUT_SECONDS = 30.0
RESPONSE_BYTES_PER_SECOND = 32 * 1024
# A rejected body is read for this long, or its sender might get a reset instead of the response.
LINGERING_SECONDS = 2.0
# At shutdown, running requests get this share of the grace period, and never more than this many seconds.
SHUTDOWN_SHARE = 0.1
MAX_SHUTDOWN_SECONDS = 3.0

BAD_REQUEST = 400


def listening_socket(address: str) -> socket.socket:
    """Return a bound socket. Bind before anything else starts: a taken address must stop the start."""
    host, port = host_and_port(address)
    try:
        [family, *_], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:  # socket.gaierror is one
        # Python appends the address to an errno's message; a name resolution error has no errno.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        taken = error.errno == errno.EADDRINUSE
        hint = " (is webhookd already running? Set api.listen to use another address)" if taken else ""
        raise CannotListen(f"cannot listen on {address}: {reason}{hint}") from error


def raise_file_limit() -> None:
    """Raise the soft limit on open files, usually 1024, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_cap(settings: Settings) -> int:
    """Return how many API connections leave enough open files for deliveries and the database."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    reserved = settings.delivery.concurrency + settings.database.pool_size + RESERVED_FILES
    return min(MAX_CONNECTIONS, max(MIN_CONNECTIONS, limit - reserved))


class Site:
    """Routes on a listening socket."""

    def __init__(
        self, listening: socket.socket, settings: Callable[[], Settings], routes: Iterable[Route]
    ) -> None:
        self._listening = listening
        self._settings = settings
        self.auth = Auth(settings, on_loopback=ip_address(listening.getsockname()[0]).is_loopback)
        self._routes = tuple(routes)

    async def run(self) -> None:
        app = web.Application(middlewares=[errors_to_problems, *self._middlewares()])
        handlers = [(route.method, route.path, self._guarded(route)) for route in self._routes]
        for method, path, handler in (*handlers, *self._pages()):
            # Not add_get, which would also serve HEAD.
            app.router.add_route(method, path, handler, expect_handler=check_expectation)
        app.on_response_prepare.append(self._before_response)
        app.on_shutdown.append(self._on_shutdown)
        await serve(app, self._listening, self._settings)

    def _middlewares(self) -> Iterable[Middleware]:
        """Return what sees requests before the handlers do, and errors before they become problems."""
        return ()

    def _pages(self) -> Iterable[tuple[str, str, Handler]]:
        """Return method, path and handler of each page. Pages check the caller themselves."""
        return ()

    async def _before_response(self, request: web.Request, response: web.StreamResponse) -> None:
        """Run before every response is sent."""

    async def _on_shutdown(self, _: web.Application) -> None:
        """Run when no more requests are accepted and the remaining ones finish."""

    def _guarded(self, route: Route) -> Handler:
        if (scope := route.scope) is None:
            return route.handler

        async def guarded(request: web.Request) -> web.StreamResponse:
            caller = self.auth.require(request, scope, for_tenants=route.for_tenants)
            request[ACTOR], request[TENANT], request[TOKEN] = caller
            if route.refuses_queries and request.query_string:
                raise invalid("this route takes no query parameters", "invalid_parameter", close=True)
            return await route.handler(request)

        return guarded


async def check_expectation(request: web.Request) -> None:
    """Check the Expect header only. `100 Continue` is sent when the body is read, after all other checks."""
    if request.headers["Expect"].strip().lower() != CONTINUE:
        raise web.HTTPExpectationFailed


@web.middleware
async def errors_to_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert whatever a handler raises into a response."""
    try:
        return await handler(request)
    except Problem as problem:
        return problem.response()
    except Refused as refused:
        return of_refusal(refused, of_query=request.method == "GET").response()
    except DatabaseUnavailable as error:
        # The path only: a query may contain values that should not be logged. The message only in the log: it
        # may name hosts and logins.
        log.warning("responded 503, database unavailable: %s", error, extra={"path": request.path})
        detail = "the database is unavailable or too busy; the request may or may not have taken effect"
        return unavailable(detail).response()
    except web.HTTPException as error:
        return of_http(error).response()
    except Exception:
        log.exception("request failed", extra={"method": request.method, "path": request.path})
        return internal().response()


async def serve(app: web.Application, listening: socket.socket, settings: Callable[[], Settings]) -> None:
    """Serve until cancelled, then let running requests finish briefly. The socket stays open."""
    runner = web.AppRunner(app, shutdown_timeout=MAX_SHUTDOWN_SECONDS)
    await runner.setup()
    loop = asyncio.get_running_loop()
    manager = runner.server
    if manager is None:
        raise RuntimeError("the runner has no server after its setup")

    def accept() -> asyncio.Protocol:
        if len(manager.connections) >= connection_cap(settings()) and not _make_room(manager):
            return _Refusing()
        return _Handler(
            manager,
            loop=loop,
            keepalive_timeout=IDLE_TIMEOUT_SECONDS,
            lingering_time=LINGERING_SECONDS,
            # A compressed body is rejected, and must not be decompressed first.
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
        )

    server: asyncio.Server | None = None
    try:
        # A duplicate, because the server closes its socket; a restarted service still has the address.
        server = await loop.create_server(accept, sock=listening.dup(), backlog=BACKLOG)
        await asyncio.Event().wait()
    finally:
        if server is not None:
            server.close()
        # By the current settings. Requests still running after that end with the process.
        share = settings().services.shutdown_grace_seconds * SHUTDOWN_SHARE
        with anyio.move_on_after(min(MAX_SHUTDOWN_SECONDS, share), shield=True):
            await runner.cleanup()


class _Handler(web.RequestHandler):
    """A connection. Reports invalid HTTP as a problem, and limits how long it waits for the client."""

    __slots__ = ("_headers_timeout", "idle_since")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._headers_timeout: asyncio.TimerHandle | None = None
        self.idle_since = self._loop.time()
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_headers_timeout()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether it waits for a request or for the rest of its headers."""
        if self.transport is None:  # closed already
            return False
        # The first data may arrive before the task that waits for it has started.
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._cancel_headers_timeout()
        elif self._headers_timeout is None:
            self._headers_timeout = self._loop.call_later(HEADERS_TIMEOUT_SECONDS, self.abort)

    def _cancel_headers_timeout(self) -> None:
        if self._headers_timeout is not None:
            self._headers_timeout.cancel()
            self._headers_timeout = None

    def abort(self) -> None:
        """Close it now. Data that the client has not read is lost."""
        if self.transport is not None:
            self.transport.abort()
        self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before any middleware: a bad Expect header
            resp = of_http(resp).response()
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_SECONDS + _length(resp) / RESPONSE_BYTES_PER_SECOND):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.abort()
            return resp, True
        finally:
            self.idle_since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002  aiohttp's signature
        status: int = 500,
        exc: BaseException | None = None,  # noqa: ARG002
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        if status == BAD_REQUEST:
            return Problem(
                BAD_REQUEST,
                "bad_request",
                "the request is not valid HTTP, or its headers are too large",
                close=True,
            ).response()
        return internal().response()


def _length(response: web.StreamResponse) -> int:
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) else 0


def _make_room(manager: web.Server) -> bool:
    """Close the longest idle connection, so that one client with many of them does not block the others."""
    idle = [handler for handler in manager.connections if isinstance(handler, _Handler) and handler.idle]
    if not idle:
        return False
    min(idle, key=lambda handler: handler.idle_since).abort()
    return True


class _Refusing(asyncio.Protocol):
    """Closes a connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
