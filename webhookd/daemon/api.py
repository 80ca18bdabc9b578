"""The API of an instance: all routes of deliveries, the job queue and the console on one address."""

import socket

import anyio
from aiohttp import web

from webhookd.console.status_page import StatusPage
from webhookd.context import Context
from webhookd.deliveries.api.dead_letters import DeadLetters
from webhookd.deliveries.api.events import Deliveries, Events
from webhookd.deliveries.api.subscriptions import Subscriptions, Verification
from webhookd.deliveries.ingest import GroupCommit
from webhookd.http.docs import Documents
from webhookd.http.health import Health
from webhookd.http.routes import QueryRunner
from webhookd.http.server import Site
from webhookd.jobqueue.api import JobQueueSwitch, Jobs, JobWorkflows
from webhookd.jobqueue.leases import JobLeases, WaitingClaims
from webhookd.outbound.client import GuardedClient


class Api(Site):
    """The complete API."""

    def __init__(
        self, context: Context, listening: socket.socket, client: GuardedClient, health: Health
    ) -> None:
        self._ingest = GroupCommit(context)
        database = QueryRunner(context.pool)
        self._claims = WaitingClaims(context, database)
        resources = (
            Events(context, database, self._ingest),
            Subscriptions(context, database, Verification(context, database, client)),
            Deliveries(context, database),
            DeadLetters(context, database),
            Jobs(context, database),
            JobLeases(context, database, self._claims),
            JobWorkflows(context, database),
            JobQueueSwitch(context, database),
            health,
            StatusPage(health.status),
        )
        routes = [route for resource in resources for route in resource.routes()]
        super().__init__(listening, context.settings, [*routes, *Documents(routes).routes()])
        self._responses = context.metrics.api_responses

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
