"""The API of an instance: every resource of deliveries, the job queue and the console on one address."""

import socket
from collections.abc import Callable

import anyio
from aiohttp import web

from webhookd.console.home import Home
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
from webhookd.http.database import Database
from webhookd.http.documents import Documents
from webhookd.http.health import Health
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
