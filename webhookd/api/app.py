"""The HTTP API: every route behind its scope, every error a problem, every connection within bounds."""

import logging
import socket
from collections.abc import Callable, Iterable
from ipaddress import ip_address

import anyio
from aiohttp import web

from webhookd.api import problems
from webhookd.api.auth import ACTOR, Auth
from webhookd.api.bodies import CONTINUE
from webhookd.api.database import Database
from webhookd.api.dead_letters import DeadLetters
from webhookd.api.deliveries import Deliveries
from webhookd.api.documents import Documents
from webhookd.api.events import Events
from webhookd.api.health import Health
from webhookd.api.home import Home
from webhookd.api.job_claims import Claims
from webhookd.api.job_leases import JobLeases
from webhookd.api.job_substrate import JobSubstrate
from webhookd.api.job_workflows import JobWorkflows
from webhookd.api.jobs import Jobs
from webhookd.api.pages.layout import problem_response
from webhookd.api.problems import Problem, invalid
from webhookd.api.routes import HTML, Handler, Route
from webhookd.api.server import serve
from webhookd.api.subscriptions import Subscriptions
from webhookd.api.verification import Verification
from webhookd.api.wake import Wake
from webhookd.config.settings import Settings
from webhookd.ingest.group_commit import GroupCommit
from webhookd.model.errors import DatabaseUnavailable, Refused
from webhookd.observe.metrics import Metrics
from webhookd.outbound.client import GuardedClient
from webhookd.store.bells import Bells
from webhookd.store.hints import Hints
from webhookd.store.pool import Pool

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


class Api(Site):
    """The whole of it."""

    def __init__(
        self,
        listening: socket.socket,
        settings: Callable[[], Settings],
        pool: Pool,
        bells: Bells,
        hints: Hints,
        client: GuardedClient,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._ingest = GroupCommit(pool, bells, metrics)
        database = Database(pool)
        wake = Wake(bells, hints)
        self._claims = Claims(database, bells, metrics, settings)
        resources = (
            Events(database, self._ingest, settings),
            Subscriptions(database, Verification(database, client, settings), wake, settings),
            Deliveries(database, settings),
            DeadLetters(database, wake, settings),
            Jobs(database, wake, settings),
            JobLeases(database, self._claims, wake, settings),
            JobWorkflows(database, settings),
            JobSubstrate(database, wake, settings),
            health,
            Home(health.status),
        )
        routes = [route for resource in resources for route in resource.routes()]
        super().__init__(listening, settings, [*routes, *Documents(routes).routes()])
        self._responses = metrics.api_responses

    async def run(self) -> None:
        """Listen and answer; what is still being stored at the end is given up, and nobody was told of it."""
        self._claims.open()
        try:
            await super().run()
        finally:
            with anyio.CancelScope(shield=True):
                await self._ingest.close()

    async def _ending(self, _: web.Application) -> None:
        self._claims.close()

    async def _answering(self, request: web.Request, response: web.StreamResponse) -> None:
        resource = request.match_info.route.resource
        # By the route's form, not by the path: whoever asks for anything must not make new time series.
        route = f"{request.method} {resource.canonical}" if resource else "none"
        self._responses.labels(route, f"{response.status // 100}xx").inc()


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
