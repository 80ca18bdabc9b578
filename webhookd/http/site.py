"""Serves routes on an address: checks scopes, and converts every error into a problem response."""

import logging
import socket
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from aiohttp import web

from webhookd.core.errors import DatabaseUnavailable, Refused
from webhookd.core.settings import Settings
from webhookd.http import problems
from webhookd.http.auth import ACTOR, Auth
from webhookd.http.pages import problem_page
from webhookd.http.problems import Problem, invalid
from webhookd.http.requests import CONTINUE
from webhookd.http.routes import HTML, Handler, Route
from webhookd.http.server import serve

log = logging.getLogger(__name__)


class Site:
    """Routes on a listening socket."""

    def __init__(
        self, listening: socket.socket, settings: Callable[[], Settings], routes: Iterable[Route]
    ) -> None:
        self._listening = listening
        self._settings = settings
        self._auth = Auth(settings, on_loopback=ip_address(listening.getsockname()[0]).is_loopback)
        self._routes = tuple(routes)

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application(middlewares=[errors_to_problems])
        for route in self._routes:
            # Not add_get, which would also serve HEAD.
            app.router.add_route(
                route.method, route.path, self._guarded(route), expect_handler=check_expectation
            )
        app.on_response_prepare.append(self._before_response)
        app.on_shutdown.append(self._on_shutdown)
        await serve(app, self._listening, self._settings)

    async def _before_response(self, request: web.Request, response: web.StreamResponse) -> None:
        """Run before every response is sent."""

    async def _on_shutdown(self, _: web.Application) -> None:
        """Run when no more requests are accepted and the remaining ones finish."""

    def _guarded(self, route: Route) -> Handler:
        if route.scope is None:
            return route.handler
        scope = route.scope

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                request[ACTOR] = self._auth.require(request, scope)
            except Problem as problem:
                if route.media_type != HTML:
                    raise
                return problem_page(problem)
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
        return problems.of_refusal(refused, of_query=request.method == "GET").response()
    except DatabaseUnavailable as error:
        # Only the path: a query may contain values that should not be logged.
        log.warning("responded 503, database unavailable: %s", error, extra={"path": request.path})
        return problems.of_unavailable(error).response()
    except web.HTTPException as error:
        return problems.of_http(error).response()
    except Exception:
        log.exception("request failed", extra={"method": request.method, "path": request.path})
        return problems.internal().response()
