"""What /status, /readyz and the gauges show: backlogs, measured every few seconds, and this instance."""

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from webhookd import __version__
from webhookd.context import Context
from webhookd.core.settings import RetentionSettings
from webhookd.deliveries import reads
from webhookd.http.health import (
    BacklogStatus,
    ConfigurationStatus,
    FailingEndpointStatus,
    InstanceStatus,
    JobQueueStatus,
    RetentionStatus,
)
from webhookd.jobqueue import queries as job_queries
from webhookd.retention import queries as retention_queries

if TYPE_CHECKING:
    from webhookd.daemon.services import Service
    from webhookd.http.health import RetryStatus

INTERVAL_SECONDS = 5.0
# Counts stop here, so that they cost the same for every larger backlog. It is enough to see a stage fall
# behind.
COUNTED_UP_TO = 10_000
FAILING_SHOWN = 20
# Dead rows that an open transaction keeps make the counts slow. Then they run less often, and give up before
# the pool would take the server for unavailable.
REST_FACTOR = 20
TIMEOUT_SECONDS = 5.0


class Snapshot(NamedTuple):
    """The last measurement."""

    backlog: BacklogStatus
    failing: list[FailingEndpointStatus]
    dead_letters_of_a_day: int
    job_queue: JobQueueStatus
    retention: retention_queries.Progress


class Monitor:
    """Measures until it is cancelled; `snapshot` is None while the database does not answer."""

    def __init__(self, context: Context) -> None:
        self._pool = context.pool
        self._metrics = context.metrics
        self._settings = context.settings
        self.snapshot: Snapshot | None = None

    async def run(self) -> None:
        """Measure, then rest; longer if the measurement was slow."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self.run_once()
            except BaseException:
                self._forget()
                raise
            await asyncio.sleep(max(INTERVAL_SECONDS, REST_FACTOR * (loop.time() - started)))

    async def run_once(self) -> int:
        """Measure once; returns the number of stages."""
        async with self._pool.connection() as connection:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    stages = await reads.waiting(connection, COUNTED_UP_TO)
                    failing = await reads.failing_endpoints(connection, FAILING_SHOWN)
                    dead_letters = await reads.dead_letters_of_a_day(connection, COUNTED_UP_TO)
                    job_queue = await job_queries.health(connection)
                    retention = await retention_queries.progress(
                        connection, self._settings().retention, COUNTED_UP_TO
                    )
                    seen_at = await reads.database_time(connection)
            except TimeoutError:
                # Not passed on: slow counts do not mean that the server is unavailable.
                self._forget()
                return 0
        for stage in stages:
            self._metrics.backlog.labels(stage.stage).set(stage.waiting)
            self._metrics.backlog_age.labels(stage.stage).set(max(0.0, stage.age_seconds or 0.0))
        self._metrics.see_job_queue(job_queue)
        self._metrics.retention_lag.set(retention.lag_seconds or 0.0)
        self._metrics.oldest_event.set(
            retention.oldest_event_at.timestamp() if retention.oldest_event_at else math.nan
        )
        self._metrics.erasures_running.set(retention.erasures)
        backlog: BacklogStatus = {
            "seen_at": seen_at,
            "counted_up_to": COUNTED_UP_TO,
            "stages": [
                {"stage": stage.stage, "waiting": stage.waiting, "oldest_at": stage.oldest_at}
                for stage in stages
                if stage.stage not in reads.NOT_WAITING
            ],
        }
        self.snapshot = Snapshot(backlog, failing, dead_letters, job_queue, retention)
        return len(stages)

    def _forget(self) -> None:
        """Show nothing rather than an old number."""
        self.snapshot = None
        self._metrics.forget_backlog()


class StatusReporter:
    """Collects the status from memory only, so /status answers even when the database does not."""

    def __init__(self, context: Context, monitor: Monitor, in_flight: Callable[[], int]) -> None:
        self._context = context
        self._monitor = monitor
        self._in_flight = in_flight
        self._started_at = datetime.now(UTC)
        self.services: list[Service] = []
        self.configuration: ConfigurationStatus = {
            "last_read_at": self._started_at,
            "last_reload_successful": True,
            "last_reload_error": None,
            "restart_needed": [],
        }
        self.draining = False
        metrics = context.metrics
        metrics.database_up.set_function(lambda: context.pool.available)
        metrics.reload_succeeded.set_function(lambda: self.configuration["last_reload_successful"])
        metrics.restart_needed.set_function(lambda: len(self.configuration["restart_needed"]))
        metrics.reloaded_at.set_function(
            lambda: self.configuration["last_read_at"].timestamp()  # noqa: PLW0108  a reload replaces it
        )

    def unready(self) -> list[str]:
        """Return why this instance is not ready. An empty list: the database answers and all services run."""
        return (
            ["this instance is draining"] * self.draining
            + ["the database does not answer"] * (not self._context.pool.available)
            + [f"the service {service.name} is failing" for service in self.services if not service.healthy]
        )

    def describe(self) -> InstanceStatus:
        """Return the document of /status."""
        snapshot = self._monitor.snapshot
        settings = self._context.settings()
        return {
            "version": __version__,
            "worker_id": self._context.worker_id,
            "started_at": self._started_at,
            "ready": not self.unready(),
            "unready_because": self.unready(),
            "draining": self.draining,
            "database": {"available": self._context.pool.available},
            "in_flight": {"requests": self._in_flight(), "concurrency": settings.delivery.concurrency},
            "services": [
                {
                    "name": service.name,
                    "state": service.state,
                    "restarts": service.restarts,
                    "last_error": service.last_error,
                }
                for service in self.services
            ],
            "backlog": snapshot and snapshot.backlog,
            "failing_endpoints": snapshot and snapshot.failing,
            "dead_letters_of_a_day": snapshot.dead_letters_of_a_day if snapshot else None,
            "job_queue": snapshot and snapshot.job_queue,
            "retention": snapshot and _retention(settings.retention, snapshot.retention),
            "configuration": self.configuration,
            "retry": cast("RetryStatus", msgspec.structs.asdict(settings.retry)),
        }


def _retention(settings: RetentionSettings, progress: retention_queries.Progress) -> RetentionStatus:
    return {
        **cast("RetentionStatus", msgspec.structs.asdict(settings)),
        "swept_before": progress.swept_before,
        "lag_seconds": progress.lag_seconds,
        "oldest_event_at": progress.oldest_event_at,
        "kept_events": progress.kept,
        "erasures_running": progress.erasures,
    }
