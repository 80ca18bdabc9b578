"""`webhookd serve`: makes the parts, runs them as services, reloads on SIGHUP, drains on SIGTERM."""

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

import anyio
import anyio.lowlevel

from webhookd import __version__
from webhookd.core import log as logs
from webhookd.core.errors import WebhookdError
from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.daemon import config_warnings, systemd
from webhookd.daemon.api import Api
from webhookd.daemon.database import Database, keep, opened
from webhookd.daemon.monitor import Monitor
from webhookd.daemon.reload import client_options, restart_needed
from webhookd.daemon.services import Service, supervise
from webhookd.daemon.status import Reloads, StatusReporter
from webhookd.db import server_facts as facts
from webhookd.db.listener import Listener
from webhookd.db.pool import Pool
from webhookd.deliveries.applier import Applier
from webhookd.deliveries.limit_sweeper import Sweeper
from webhookd.deliveries.reaper import Reaper
from webhookd.deliveries.reporter import Reporter
from webhookd.deliveries.router import Router
from webhookd.deliveries.starter import Starter
from webhookd.deliveries.worker import Worker
from webhookd.hints import Hints
from webhookd.http.health import Health
from webhookd.http.server import SHUTDOWN_SHARE, listening_socket, raise_file_limit
from webhookd.http.site import Site
from webhookd.jobqueue.keeper import JobKeeper
from webhookd.outbound.client import GuardedClient
from webhookd.wakeups import Bells

log = logging.getLogger(__name__)


class Sockets(ExitStack):
    """Where this instance listens: nothing else of it begins unless it can."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.api = self._listen(settings.api.listen if "api" in settings.services.enabled else "")
        self.health = self._listen(settings.api.health_listen)
        names = [listening.getsockname() for listening in (self.api, self.health) if listening]
        self.addresses = frozenset((ip_address(name[0]), int(name[1])) for name in names)
        self.names = [f"http://{name[0]}:{name[1]}" for name in names]

    def _listen(self, address: str) -> socket.socket | None:
        return self.enter_context(listening_socket(address)) if address else None


class Daemon:
    """One instance."""

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
        self._pool = pool
        self._bells = Bells()
        self._hints = Hints()
        self._metrics = Metrics()
        self._worker_id = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self._client = GuardedClient(client_options(settings, sockets.addresses))
        self._reporter = Reporter(pool, self._bells, self._hints, self._metrics, self._worker_id)
        self._worker = Worker(
            pool,
            self._bells,
            self._client,
            self._reporter,
            self._hints,
            self._metrics,
            self._current,
            worker_id=self._worker_id,
        )
        self._sweeper = Sweeper(pool, self._metrics, self._current)
        self._monitor = Monitor(pool, self._metrics)
        self._status = StatusReporter(
            self._worker_id,
            self._current,
            pool,
            self._monitor,
            self._metrics,
            in_flight=lambda: self._worker.in_flight,
        )
        self._stopping = anyio.Event()

    async def run(self) -> None:
        """Until told to stop; then drain, and return."""
        self._status.services = self._make_services()
        self._follow_dials()
        self._metrics.reloaded_at.set(time.time())
        async with self._client, anyio.create_task_group() as tasks:
            for service in self._status.services:
                tasks.start_soon(supervise, service, self._metrics, name=service.name)
            tasks.start_soon(self._serve_signals, name="signals")
            await anyio.lowlevel.checkpoint()
            log.info(
                "webhookd %s serves %s",
                __version__,
                ", ".join(self._started_with.services.enabled),
                extra={
                    "listen": ", ".join(self._sockets.names) or None,
                    "config": self._config_path and str(self._config_path),
                    "worker_id": self._worker_id,
                },
            )
            self._warn()
            systemd.notify("READY=1")
            await self._stopping.wait()
            self._status.draining = True
            systemd.notify("STOPPING=1")
            log.info("draining: no more claims, the %d in flight end", self._worker.in_flight)
            # What is left of the grace is the API's, to end its requests.
            await self._worker.drain(self._settings.services.shutdown_grace_seconds * (1 - SHUTDOWN_SHARE))
            tasks.cancel_scope.cancel()
        log.info("stopped")

    def _current(self) -> Settings:
        return self._settings

    def _warn(self) -> None:
        """Of what is allowed, and probably not meant."""
        settings = self._settings
        if self._sockets.api and not settings.api.tokens:
            log.warning("no api.tokens: everybody on this machine may do everything")
        if settings.delivery.local:
            log.warning("delivery.local: events may be sent to this machine itself; for development alone")
        if settings.services.shutdown_grace_seconds < settings.delivery.timeout_seconds:
            log.warning(
                "services.shutdown_grace_seconds is less than delivery.timeout_seconds: "
                "at a shutdown some requests are cut off, and sent again"
            )
        for warning in config_warnings.file_warnings(self._config_path):
            log.warning(warning)

    def _make_services(self) -> list[Service]:
        pool, bells, hints, metrics, current = (
            self._pool,
            self._bells,
            self._hints,
            self._metrics,
            self._current,
        )
        health = Health(self._status.unready, self._status.describe, metrics.registry)
        chosen = {
            "routing": [Service("routing", Router(pool, bells, hints, metrics, current).run)],
            "orchestration": [
                Service("orchestration", Starter(pool, bells, hints, metrics, current).run),
                Service("results", Applier(pool, bells, hints, metrics, current).run),
                Service("sweeps", self._sweeper.run),
            ],
            "delivery": [Service("delivery", self._worker.run), Service("reports", self._reporter.run)],
            "reaper": [Service("reaper", Reaper(pool, bells, metrics, current).run)],
            "jobs": [Service("jobs", JobKeeper(pool, bells, metrics, current).run)],
        }
        services = [
            Service("listener", Listener(self._database.dsn, pool, bells).run),
            Service("announcer", lambda: bells.announce(pool)),
            Service("monitor", self._monitor.run),
        ]
        if embedded := self._database.embedded:
            services.append(Service("embedded", lambda: keep(embedded)))
        if systemd.watchdog_interval_seconds():
            services.append(Service("watchdog", systemd.watchdog))
        if self._sockets.api:
            api = Api(self._sockets.api, current, pool, bells, hints, self._client, metrics, health)
            services.append(Service("api", api.run))
        if self._sockets.health:
            services.append(Service("health", Site(self._sockets.health, current, health.routes()).run))
        for name in self._started_with.services.enabled:
            services += chosen.get(name, [])
        return services

    def _follow_dials(self) -> None:
        counters = self._client.counters
        self._metrics.follow("dials", "Connections made to endpoints", lambda: counters.dials)
        self._metrics.follow("dials_blocked", "Addresses refused before a dial", lambda: counters.blocked)
        self._metrics.follow(
            "dns_mixed_answers",
            "Names with allowed and refused addresses",
            lambda: counters.dns_mixed_answers,
        )

    async def _serve_signals(self) -> None:
        """SIGHUP reloads; the first SIGTERM or SIGINT stops in order, a second one at once."""
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
        """Read, validate, build what can fail; then swap. A bad file changes a log line and a metric."""
        systemd.reloading()
        reloads = Reloads(restart_needed=self._status.reloads.restart_needed)
        try:
            new = self._load()
            options = client_options(new, self._sockets.addresses)
        except Exception as error:
            reloads.successful, reloads.error = False, str(error)
            ours = isinstance(error, WebhookdError)
            log.error(  # noqa: TRY400  what the user wrote needs no traceback
                "the configuration was not reloaded: %s", error, exc_info=None if ours else error
            )
        else:
            old, self._settings = self._settings, new
            self._client.reconfigure(options)
            logs.configure(new.log.level, new.log.format)
            log.info("the configuration was reloaded", extra={"config": str(self._config_path)})
            self._warn()
            reloads.restart_needed = restart_needed(self._started_with, new)
            for key in reloads.restart_needed:
                log.warning("%s changed: it takes effect at the next start", key)
            self._bells.ring_all_here()
            if new.retry.max_attempts < old.retry.max_attempts:
                self._sweeper.limit_lowered()
        self._status.reloads = reloads
        self._metrics.reloads.labels("done" if reloads.successful else "refused").inc()
        self._metrics.reload_succeeded.set(reloads.successful)
        self._metrics.restart_needed.set(len(reloads.restart_needed))
        self._metrics.reloaded_at.set(reloads.last_at.timestamp())
        systemd.notify("READY=1")


async def _serve(
    settings: Settings, load: Callable[[], Settings], config_path: Path | None, database: Database
) -> None:
    await database.fit(may_migrate=settings.database.may_migrate)
    found = config_warnings.database_warnings(settings.database, await facts.look(database.dsn))
    with Sockets(settings) as sockets:
        async with Pool(database.dsn, settings.database.pool_size) as pool:
            daemon = Daemon(settings, load, config_path, sockets, database, pool)
            for warning in found:
                log.warning(warning)
            _spare_the_collector()
            await daemon.run()


def _spare_the_collector() -> None:
    """Look for cycles more rarely, and not among what stays: modules, routes, services.

    A request makes a few hundred objects and hardly a cycle. By the defaults the search for them took a tenth
    of the CPU time of a loop that does nothing but POST; what it finds later is a few megabytes at most.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def serve(settings: Settings, load: Callable[[], Settings], config_path: Path | None) -> None:
    """Run an instance until it is told to stop."""
    # Until somebody serves it: a reload that comes while this starts must not end it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_file_limit()
    logs.configure(settings.log.level, settings.log.format)
    # Until the daemon has its own way with signals: a server that was just started is stopped again.
    signal.signal(signal.SIGTERM, _end)
    with opened(settings) as database:
        try:
            anyio.run(_serve, settings, load, config_path, database, backend_options={"use_uvloop": True})
        finally:
            # The embedded server is still to be stopped: a terminal that closes now must not end that.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
