"""`webhookd serve`: makes the parts, runs them as services, reloads on SIGHUP, drains on SIGTERM."""

import logging
import os
import signal
import socket
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from uuid import uuid4

import anyio
import anyio.abc
import msgspec

from webhookd import __version__
from webhookd.api.app import Api
from webhookd.config.settings import Settings
from webhookd.delivery.reporter import Reporter
from webhookd.delivery.worker import Worker
from webhookd.model.errors import ConfigurationError, SchemaProblem, WebhookdError
from webhookd.observe import log as logs
from webhookd.observe.metrics import Metrics
from webhookd.orchestration.loop import Orchestrator
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.reaper.loop import Reaper
from webhookd.routing.loop import Router
from webhookd.store import migrations
from webhookd.store.bells import Bells
from webhookd.store.hints import Hints
from webhookd.store.listener import Listener
from webhookd.store.pool import Pool
from webhookd.supervisor import systemd
from webhookd.supervisor.services import Service, supervise

log = logging.getLogger(__name__)

# Read once, at the start: a change is named, and waits for a restart.
NEEDS_RESTART = (("database",), ("services", "enabled"), ("api", "listen"))


class Daemon:
    """One instance."""

    def __init__(self, settings: Settings, load: Callable[[], Settings]) -> None:
        self._settings = settings
        self._load = load
        self._bells = Bells()
        self._hints = Hints()
        self._metrics = Metrics()
        self._services: list[Service] = []
        self._worker_id = f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self._orchestrator: Orchestrator | None = None
        self._stopping = anyio.Event()

    async def run(self) -> None:
        """Until told to stop; then drain, and return."""
        settings = self._settings
        async with (
            Pool(settings.database.dsn, settings.database.pool_size) as pool,
            GuardedClient(client_options(settings)) as client,
            anyio.create_task_group() as tasks,
        ):
            worker = self._make_services(pool, client)
            for service in self._services:
                tasks.start_soon(supervise, service, self._metrics, name=service.name)
            log.info("webhookd %s serves", __version__, extra={"worker_id": self._worker_id})
            systemd.notify("READY=1")
            tasks.start_soon(self._serve_signals, client, tasks, name="signals")
            await self._stopping.wait()
            systemd.notify("STOPPING=1")
            log.info("draining: no more claims, what is in flight ends")
            await worker.drain(self._settings.services.shutdown_grace_seconds)
            tasks.cancel_scope.cancel()
        log.info("stopped")

    def ready(self) -> bool:
        """Whether every service runs."""
        return all(service.healthy for service in self._services)

    def status(self) -> dict[str, object]:
        """What an operator asks first."""
        return {
            "version": __version__,
            "worker_id": self._worker_id,
            "ready": self.ready(),
            "services": [
                {
                    "name": service.name,
                    "state": service.state,
                    "restarts": service.restarts,
                    "last_error": service.last_error,
                }
                for service in self._services
            ],
            "retry": msgspec.structs.asdict(self._settings.retry),
        }

    def _make_services(self, pool: Pool, client: GuardedClient) -> Worker:
        def current() -> Settings:
            return self._settings

        reporter = Reporter(pool, self._bells, self._hints, self._metrics)
        worker = Worker(
            pool, self._bells, client, reporter, self._metrics, current, worker_id=self._worker_id
        )
        self._orchestrator = Orchestrator(pool, self._bells, self._hints, self._metrics, current)
        api = Api(
            pool,
            self._bells,
            self._hints,
            client,
            self._metrics,
            current,
            ready=self.ready,
            status=self.status,
        )
        runs = {
            "routing": [Router(pool, self._bells, self._hints, self._metrics, current).run],
            "orchestration": [self._orchestrator.run],
            "delivery": [worker.run, reporter.run],
            "reaper": [Reaper(pool, self._bells, self._metrics, current).run],
            "api": [api.run],
        }
        always = {
            "listener": [Listener(self._settings.database.dsn, self._bells).run],
            "announcer": [lambda: self._bells.announce(pool)],
            "watchdog": [systemd.watchdog],
        }
        wanted = {name: runs[name] for name in self._settings.services.enabled}
        self._services = [
            Service(name if number == 0 else f"{name}-reports", run)
            for name, parts in (always | wanted).items()
            for number, run in enumerate(parts)
        ]
        return worker

    async def _serve_signals(self, client: GuardedClient, tasks: anyio.abc.TaskGroup) -> None:
        """SIGHUP reloads; the first SIGTERM or SIGINT stops in order, a second one at once."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for received in signals:
                if received == signal.SIGHUP:
                    await self._reload(client, tasks)
                elif self._stopping.is_set():
                    os._exit(1)
                else:
                    self._stopping.set()

    async def _reload(self, client: GuardedClient, tasks: anyio.abc.TaskGroup) -> None:
        """Read, validate, build what can fail; then swap. A bad file changes a log line and a metric."""
        systemd.reloading()
        try:
            new = self._load()
            options = client_options(new)
        except WebhookdError as error:
            self._metrics.reloads.labels("refused").inc()
            self._metrics.reload_succeeded.set(0)
            log.error("the configuration was not reloaded: %s", error)  # noqa: TRY400  it is the user's
        else:
            old, self._settings = self._settings, new
            client.reconfigure(options)
            logs.configure(new.log.level, new.log.format)
            self._metrics.reloads.labels("done").inc()
            self._metrics.reload_succeeded.set(1)
            log.info("the configuration was reloaded")
            for key in restart_needed(old, new):
                log.warning("%s changed: it takes effect at the next start", key)
            if new.retry.max_attempts < old.retry.max_attempts and self._orchestrator is not None:
                tasks.start_soon(self._orchestrator.sweep, name="sweep")
        systemd.notify("READY=1")


def client_options(settings: Settings) -> ClientOptions:
    """What delivery needs of the settings, with everything done that can fail."""
    delivery = settings.delivery
    return ClientOptions(
        policy=AddressPolicy(tuple(ip_network(network) for network in delivery.allow_networks)),
        tls=trusted_tls(Path(delivery.ca_file) if delivery.ca_file else None),
        max_response_bytes=delivery.max_response_bytes,
        max_connections=delivery.concurrency,
    )


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Settings that changed and are read only at the start."""
    changed = []
    for path in NEEDS_RESTART:
        before: object = old
        after: object = new
        for name in path:
            before, after = getattr(before, name), getattr(after, name)
        if before != after:
            changed.append(".".join(path))
    return changed


async def _serve(settings: Settings, load: Callable[[], Settings]) -> None:
    dsn = settings.database.dsn
    pending = await migrations.check(dsn)
    if pending and not settings.database.auto_migrate:
        missing = ", ".join(pending.describe())
        raise SchemaProblem(f"the database's schema is not up to date ({missing}): run `webhookd migrate`")
    if pending:
        await migrations.migrate(dsn)
    await Daemon(settings, load).run()


def serve(settings: Settings, load: Callable[[], Settings]) -> None:
    """Run an instance until it is told to stop."""
    if not settings.database.dsn:
        raise ConfigurationError("no database: set [database] dsn in webhookd.toml, or WEBHOOKD_DATABASE_DSN")
    logs.configure(settings.log.level, settings.log.format)
    anyio.run(_serve, settings, load, backend_options={"use_uvloop": True})
