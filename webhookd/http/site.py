"""The HTTP API: every route behind its scope, every error a problem, every connection within bounds."""

import logging
import socket
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from aiohttp import web

from webhookd.core.errors import DatabaseUnavailable, Refused
from webhookd.core.settings import Settings
from webhookd.http import problems
from webhookd.http.auth import ACTOR, Auth
from webhookd.http.bodies import CONTINUE
from webhookd.http.pages.layout import problem_response
from webhookd.http.problems import Problem, invalid
from webhookd.http.routes import HTML, Handler, Route
from webhookd.http.server import serve

log = logging.getLogger(__name__)


class Site:
    """Routes on an address; serves until it is cancelled."""

    def __init__(
        self, listening: socket.socket, settings: Callable[[], Settings], routes: Iterable[Route]
    ) -> None:
        self._listening = listening
        self._settings = settings
        self._auth = Auth(settings, on_loopback=ip_address(listening.getsockname()[0]).is_loopback)
        self._routes = tuple(routes)

    async def run(self) -> None:
        """Listen and answer."""
        app = web.Application(middlewares=[problems_answered])
        for route in self._routes:
            # add_route, for add_get would also answer HEAD.
            app.router.add_route(route.method, route.path, self._guarded(route), expect_handler=uninvited)
        app.on_response_prepare.append(self._answering)
        app.on_shutdown.append(self._ending)
        await serve(app, self._listening, self._settings)

    async def _answering(self, request: web.Request, response: web.StreamResponse) -> None:
        """An answer is about to be sent, whatever made it."""

    async def _ending(self, _: web.Application) -> None:
        """No more requests are taken, and those under way are waited for."""

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
                return problem_response(problem)
            if route.refuses_queries and request.query_string:
                raise invalid("there are no parameters here", "invalid_parameter", close=True)
            return await route.handler(request)

        return guarded


async def uninvited(request: web.Request) -> None:
    """Who asks before sending a body is told to go on when it is read: not before it may be refused."""
    if request.headers["Expect"].strip().lower() != CONTINUE:
        raise web.HTTPExpectationFailed


@web.middleware
async def problems_answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever a handler raises becomes an answer."""
    try:
        return await handler(request)
    except Problem as problem:
        return problem.response()
    except Refused as refused:
        return problems.of_refusal(refused, of_query=request.method == "GET").response()
    except DatabaseUnavailable as error:
        # The path alone: a query may carry what should not be logged.
        log.warning("a request was answered with 503: %s", error, extra={"path": request.path})
        return problems.of_unavailable(error).response()
    except web.HTTPException as error:
        return problems.of_http(error).response()
    except Exception:
        log.exception("a request failed", extra={"method": request.method, "path": request.path})
        return problems.internal().response()
