"""The API of an instance: all routes of deliveries, the job queue and the console on one address."""

import socket
from collections.abc import Callable

import anyio
from aiohttp import web

from webhookd.console.status_page import StatusPage
from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.deliveries.api.dead_letters import DeadLetters
from webhookd.deliveries.api.deliveries import Deliveries
from webhookd.deliveries.api.events import Events
from webhookd.deliveries.api.subscriptions import Subscriptions
from webhookd.deliveries.api.verification import Verification
from webhookd.deliveries.ingest import GroupCommit
from webhookd.hints import Hints
from webhookd.http.docs import Documents
from webhookd.http.health import Health
from webhookd.http.query_runner import QueryRunner
from webhookd.http.site import Site
from webhookd.http.wake import Wake
from webhookd.jobqueue.api.claims import Claims
from webhookd.jobqueue.api.jobs import Jobs
from webhookd.jobqueue.api.leases import JobLeases
from webhookd.jobqueue.api.switch import JobSubstrate
from webhookd.jobqueue.api.workflows import JobWorkflows
from webhookd.outbound.client import GuardedClient
from webhookd.wakeups import Bells


class Api(Site):
    """The complete API."""

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
        database = QueryRunner(pool)
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
            StatusPage(health.status),
        )
        routes = [route for resource in resources for route in resource.routes()]
        super().__init__(listening, settings, [*routes, *Documents(routes).routes()])
        self._responses = metrics.api_responses

    async def run(self) -> None:
        """Serve until cancelled. Events not committed by then are dropped; no client got a 202 for them."""
        self._claims.open()
        try:
            await super().run()
        finally:
            with anyio.CancelScope(shield=True):
                await self._ingest.close()

    async def _on_shutdown(self, _: web.Application) -> None:
        self._claims.close()

    async def _before_response(self, request: web.Request, response: web.StreamResponse) -> None:
        resource = request.match_info.route.resource
        # The route's pattern, not the path: arbitrary paths must not create new time series.
        route = f"{request.method} {resource.canonical}" if resource else "none"
        self._responses.labels(route, f"{response.status // 100}xx").inc()
