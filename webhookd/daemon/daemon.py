"""`webhookd serve`: creates all parts, runs them as services, reloads on SIGHUP, drains on SIGTERM."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn, assert_never
from uuid import uuid4

import anyio
import anyio.lowlevel
from aiohttp import web
from aiohttp.typedefs import Middleware

from webhookd import __version__
from webhookd.console.activity import ActivityHub
from webhookd.console.api import ConsoleLinks
from webhookd.console.console import Console
from webhookd.console.dead_letters import DeadLetterPages
from webhookd.console.deliveries import DeliveryPages
from webhookd.console.endpoint_actions import EndpointActionPages
from webhookd.console.endpoints import EndpointPages
from webhookd.console.events import EventPages
from webhookd.console.jobs import JobPages
from webhookd.console.live import LivePages
from webhookd.console.login import LoginPages
from webhookd.console.logo import Logo, read_logo
from webhookd.console.overview import OverviewPages
from webhookd.console.search import SearchPages
from webhookd.console.tenants import TenantPages
from webhookd.context import Context
from webhookd.core.errors import WebhookdError
from webhookd.core.metrics import Metrics
from webhookd.core.settings import Service as SettingsService
from webhookd.core.settings import Settings
from webhookd.daemon.process import (
    configure_log,
    notify_systemd,
    tune_garbage_collector,
    watchdog,
    watchdog_interval_seconds,
)
from webhookd.daemon.services import Service, supervise
from webhookd.daemon.setup import (
    Database,
    client_options,
    console_address,
    console_warnings,
    database_warnings,
    file_warnings,
    keep_running,
    opened,
    restart_needed,
    settings_warnings,
)
from webhookd.daemon.status import Monitor, StatusReporter
from webhookd.db.connection import fetch_server_facts
from webhookd.db.pool import Pool
from webhookd.deliveries import activity
from webhookd.deliveries.api.attempts import RecentAttempts
from webhookd.deliveries.api.dead_letters import DeadLetters
from webhookd.deliveries.api.endpoint_requests import EndpointChecks, EndpointRequests
from webhookd.deliveries.api.events import Deliveries, Events
from webhookd.deliveries.api.replay import Replays
from webhookd.deliveries.api.stats import StatsReports
from webhookd.deliveries.api.subscriptions import Subscriptions
from webhookd.deliveries.api.tenants import Tenants
from webhookd.deliveries.applier import Applier, LimitSweeper
from webhookd.deliveries.ingest import GroupCommit
from webhookd.deliveries.reaper import Reaper
from webhookd.deliveries.reporter import Reporter
from webhookd.deliveries.router import Router
from webhookd.deliveries.short_path import ShortPath
from webhookd.deliveries.starter import Starter
from webhookd.deliveries.worker import Worker
from webhookd.http.docs import Documents
from webhookd.http.health import Health
from webhookd.http.routes import Handler, QueryRunner
from webhookd.http.server import SHUTDOWN_SHARE, Site, listening_socket, raise_file_limit
from webhookd.jobqueue.api import JobQueueSwitch, Jobs, JobWorkflows
from webhookd.jobqueue.keeper import JobKeeper
from webhookd.jobqueue.leases import JobLeases, WaitingClaims
from webhookd.outbound.client import GuardedClient
from webhookd.retention.api import Erasures
from webhookd.retention.sweeper import Retention
from webhookd.wakeups import Listener, WakeUps

log = logging.getLogger(__name__)


class Sockets(ExitStack):
    """The addresses this instance listens on. They are bound first: without them nothing starts."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.api = self._listen(settings.api.listen if "api" in settings.services.enabled else "")
        self.health = self._listen(settings.api.health_listen)
        names = [listening.getsockname() for listening in (self.api, self.health) if listening]
        self.addresses = frozenset((ip_address(name[0]), int(name[1])) for name in names)
        self.urls = [f"http://{name[0]}:{name[1]}" for name in names]

    def _listen(self, address: str) -> socket.socket | None:
        return self.enter_context(listening_socket(address)) if address else None


class Api(Site):
    """The complete API."""

    def __init__(
        self,
        context: Context,
        listening: socket.socket,
        client: GuardedClient,
        health: Health,
        short_path: ShortPath | None,
        logo: Callable[[], Logo | None],
    ) -> None:
        self._ingest = GroupCommit(context, short_path)
        database = QueryRunner(context.pool)
        self._claims = WaitingClaims(context, database)
        resources = (
            Events(context, database, self._ingest),
            Subscriptions(context, database),
            EndpointChecks(context, database, EndpointRequests(context, database, client)),
            Replays(context, database),
            Tenants(context, database),
            Deliveries(context, database),
            RecentAttempts(context, database),
            DeadLetters(context, database),
            StatsReports(context, database),
            Erasures(context, database),
            ConsoleLinks(context, database),
            Jobs(context, database),
            JobLeases(context, database, self._claims),
            JobWorkflows(context, database),
            JobQueueSwitch(context, database),
            health,
        )
        routes = [route for resource in resources for route in resource.routes()]
        super().__init__(listening, context.settings, [*routes, *Documents(routes).routes()])
        self._activity = ActivityHub(database, activity.newest_attempts)
        pages = (
            LoginPages(database, self._activity.end_session),
            OverviewPages(health.status),
            EventPages(),
            SearchPages(),
            DeliveryPages(),
            EndpointPages(),
            EndpointActionPages(),
            DeadLetterPages(),
            TenantPages(),
            JobPages(),
            LivePages(self._activity),
        )
        self._console = Console(context, database, self.auth, routes, pages, logo)
        self._responses = context.metrics.api_responses

    async def run(self) -> None:
        """Serve until cancelled. Events not committed by then are dropped; no client got a 202 for them."""
        self._claims.open()
        self._activity.open()
        try:
            await super().run()
        finally:
            with anyio.CancelScope(shield=True):
                await self._ingest.close()

    def _middlewares(self) -> Iterable[Middleware]:
        return (self._console.unknown_addresses,)

    def _pages(self) -> Iterable[tuple[str, str, Handler]]:
        return self._console.handlers()

    async def _on_shutdown(self, _: web.Application) -> None:
        self._claims.close()
        self._activity.close()

    async def _before_response(self, request: web.Request, response: web.StreamResponse) -> None:
        resource = request.match_info.route.resource
        # The route's pattern, not the path: arbitrary paths must not create new time series.
        route = f"{request.method} {resource.canonical}" if resource else "none"
        self._responses.labels(route, f"{response.status // 100}xx").inc()


class Daemon:
    """One instance of webhookd."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        config_path: Path | None,
        sockets: Sockets,
        database: Database,
        pool: Pool,
    ) -> None:
        self._started_with = settings
        self._config_path = config_path
        self._settings = settings
        self._load = load
        self._sockets = sockets
        self._database = database
        self._context = Context(
            pool,
            WakeUps(),
            Metrics(),
            settings=lambda: self._settings,
            worker_id=f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}",
        )
        self._client = GuardedClient(client_options(settings, sockets.addresses))
        self._logo = read_logo(settings.console.logo)
        self._reporter = Reporter(self._context)
        self._worker = Worker(self._context, self._client, self._reporter)
        stages = {"routing", "orchestration", "delivery"}
        is_complete = stages <= set(settings.services.enabled)
        self._short_path = ShortPath(self._context, self._worker) if is_complete else None
        self._limit_sweeper = LimitSweeper(self._context)
        self._monitor = Monitor(self._context)
        self._status = StatusReporter(self._context, self._monitor, in_flight=lambda: self._worker.in_flight)
        self._stopping = anyio.Event()

    async def run(self) -> None:
        """Run all services until a signal stops them; then drain and return."""
        self._status.services = self._make_services()
        self._export_client_counters()
        async with self._client, anyio.create_task_group() as tasks:
            for service in self._status.services:
                tasks.start_soon(supervise, service, self._context.metrics, name=service.name)
            tasks.start_soon(self._serve_signals, name="signals")
            await anyio.lowlevel.checkpoint()
            log.info(
                "webhookd %s started: %s",
                __version__,
                ", ".join(self._started_with.services.enabled),
                extra={
                    "listen": ", ".join(self._sockets.urls) or None,
                    "console": self._console_address(),
                    "config": self._config_path and str(self._config_path),
                    "worker_id": self._context.worker_id,
                },
            )
            self._warn()
            notify_systemd("READY=1")
            await self._stopping.wait()
            self._status.draining = True
            notify_systemd("STOPPING=1")
            log.info("draining: no new claims, %d requests in flight", self._worker.in_flight)
            # The rest of the grace period is for API requests.
            await self._worker.drain(self._settings.services.shutdown_grace_seconds * (1 - SHUTDOWN_SHARE))
            tasks.cancel_scope.cancel()
        log.info("stopped")

    def _console_address(self) -> str | None:
        """Return the address of the console; None if this instance does not serve it."""
        if not self._sockets.api:
            return None
        host, port, *_ = self._sockets.api.getsockname()
        return console_address(self._settings.api.public_url, host, port)

    def _warn(self) -> None:
        """Warn about settings that are allowed but probably a mistake."""
        settings = self._settings
        if self._sockets.api and not settings.api.tokens:
            log.warning("api.tokens is empty: every user of this machine has full access to the API")
        if settings.delivery.local:
            log.warning(
                "delivery.local is on: deliveries to this machine are allowed; use it for development only"
            )
        grace_seconds = settings.services.shutdown_grace_seconds * (1 - SHUTDOWN_SHARE)
        if grace_seconds < settings.delivery.timeout_seconds:
            log.warning(
                "services.shutdown_grace_seconds leaves deliveries less time than delivery.timeout_seconds: "
                "a shutdown may cut off requests, which are then sent again"
            )
        warnings = (
            *settings_warnings(settings),
            *console_warnings(settings),
            *file_warnings(self._config_path),
        )
        for warning in warnings:
            log.warning(warning)

    def _make_services(self) -> list[Service]:
        context = self._context
        wakeups, pool = context.wakeups, context.pool
        health = Health(self._status.unready, self._status.describe, context.metrics.registry)
        services = [
            Service("listener", Listener(self._database.dsn, pool, wakeups).run),
            Service("notifier", lambda: wakeups.run_notifier(pool)),
            Service("monitor", self._monitor.run),
        ]
        if embedded := self._database.embedded:
            services.append(Service("embedded", lambda: keep_running(embedded)))
        if watchdog_interval_seconds():
            services.append(Service("watchdog", watchdog))
        if self._sockets.api:
            api = Api(context, self._sockets.api, self._client, health, self._short_path, lambda: self._logo)
            services.append(Service("api", api.run))
        if self._sockets.health:
            site = Site(self._sockets.health, context.settings, health.routes())
            services.append(Service("health", site.run))
        for name in self._started_with.services.enabled:
            services += self._services_of(name)
        return services

    def _services_of(self, name: SettingsService) -> list[Service]:  # noqa: PLR0911  one return per name
        """Return the services behind one name of `services.enabled`."""
        context = self._context
        match name:
            case "routing":
                return [Service("routing", Router(context, self._short_path).run)]
            case "orchestration":
                return [
                    Service("orchestration", Starter(context).run),
                    Service("results", Applier(context).run),
                    Service("limit_sweeper", self._limit_sweeper.run),
                ]
            case "delivery":
                return [Service("delivery", self._worker.run), Service("reports", self._reporter.run)]
            case "reaper":
                return [Service("reaper", Reaper(context).run)]
            case "retention":
                return [Service("retention", Retention(context).run)]
            case "jobs":
                return [Service("jobs", JobKeeper(context).run)]
            case "api":  # started with its socket
                return []
            case never:
                assert_never(never)

    def _export_client_counters(self) -> None:
        counters, follow = self._client.counters, self._context.metrics.follow
        follow("dials", "Connections opened to endpoints", lambda: counters.dials)
        follow("dials_blocked", "Addresses blocked before a connection was opened", lambda: counters.blocked)
        follow(
            "dns_mixed_answers",
            "DNS answers with both allowed and blocked addresses",
            lambda: counters.dns_mixed_answers,
        )

    async def _serve_signals(self) -> None:
        """Reload on SIGHUP, drain on the first SIGTERM or SIGINT, exit at once on the second."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for received in signals:
                if received == signal.SIGHUP:
                    if not self._stopping.is_set():
                        self._reload()
                elif self._stopping.is_set():
                    os._exit(1)
                else:
                    self._stopping.set()

    def _reload(self) -> None:
        """Read, validate and build everything that can fail; then swap. A bad file changes nothing."""
        notify_systemd("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        error_text: str | None = None
        needed = self._status.configuration["restart_needed"]
        try:
            new = self._load()
            options = client_options(new, self._sockets.addresses)
            logo = read_logo(new.console.logo)
        except Exception as error:
            error_text = str(error)
            ours = isinstance(error, WebhookdError)
            log.error(  # noqa: TRY400  a mistake in the file needs no traceback
                "configuration not reloaded: %s", error, exc_info=None if ours else error
            )
        else:
            old, self._settings = self._settings, new
            self._logo = logo
            self._client.reconfigure(options)
            configure_log(new.log.level, new.log.format)
            log.info("configuration reloaded", extra={"config": str(self._config_path)})
            self._warn()
            needed = restart_needed(self._started_with, new)
            for key in needed:
                log.warning("%s changed; restart webhookd to apply it", key)
            self._context.wakeups.wake_all()
            if new.retry.max_attempts < old.retry.max_attempts:
                self._limit_sweeper.request()
        self._status.configuration = {
            "last_read_at": datetime.now(UTC),
            "last_reload_successful": error_text is None,
            "last_reload_error": error_text,
            "restart_needed": needed,
        }
        self._context.metrics.reloads.labels("done" if error_text is None else "refused").inc()
        notify_systemd("READY=1")


async def _serve(
    settings: Settings, load: Callable[[], Settings], config_path: Path | None, database: Database
) -> None:
    await database.fit(may_migrate=settings.database.may_migrate)
    found = database_warnings(settings.database, await fetch_server_facts(database.dsn))
    with Sockets(settings) as sockets:
        async with Pool(database.dsn, settings.database.pool_size) as pool:
            daemon = Daemon(settings, load, config_path, sockets, database, pool)
            for warning in found:
                log.warning(warning)
            tune_garbage_collector()
            await daemon.run()


def serve(load: Callable[[], Settings], config_path: Path | None) -> None:
    """Run an instance until a signal stops it. `load` reads the settings, now and at each reload."""
    settings = load()
    # A SIGHUP during the start must not end the process; the daemon handles it later.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_file_limit()
    configure_log(settings.log.level, settings.log.format)
    # Until the daemon handles signals itself: exit normally, so that an embedded server is stopped again.
    signal.signal(signal.SIGTERM, _end)
    with opened(settings) as database:
        try:
            anyio.run(_serve, settings, load, config_path, database, backend_options={"use_uvloop": True})
        finally:
            # The embedded server still has to stop: a terminal that closes now must not interrupt that.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
