"""The API of an instance: every resource of deliveries, the job queue and the console on one address."""

import socket

import anyio
from aiohttp import web

from webhookd.console.home import Home
from webhookd.context import Context
from webhookd.deliveries.api.dead_letters import DeadLetters
from webhookd.deliveries.api.deliveries import Deliveries
from webhookd.deliveries.api.events import Events
from webhookd.deliveries.api.subscriptions import Subscriptions
from webhookd.deliveries.api.verification import Verification
from webhookd.deliveries.ingest import GroupCommit
from webhookd.http.database import Database
from webhookd.http.documents import Documents
from webhookd.http.health import Health
from webhookd.http.site import Site
from webhookd.jobqueue.api.claims import Claims
from webhookd.jobqueue.api.jobs import Jobs
from webhookd.jobqueue.api.leases import JobLeases
from webhookd.jobqueue.api.switch import JobSubstrate
from webhookd.jobqueue.api.workflows import JobWorkflows
from webhookd.outbound.client import GuardedClient


class Api(Site):
    """The whole of it."""

    def __init__(
        self, context: Context, listening: socket.socket, client: GuardedClient, health: Health
    ) -> None:
        self._ingest = GroupCommit(context)
        database = Database(context.pool)
        self._claims = Claims(context, database)
        resources = (
            Events(context, database, self._ingest),
            Subscriptions(context, database, Verification(context, database, client)),
            Deliveries(context, database),
            DeadLetters(context, database),
            Jobs(context, database),
            JobLeases(context, database, self._claims),
            JobWorkflows(context, database),
            JobSubstrate(context, database),
            health,
            Home(health.status),
        )
        routes = [route for resource in resources for route in resource.routes()]
        super().__init__(listening, context.settings, [*routes, *Documents(routes).routes()])
        self._responses = context.metrics.api_responses

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
