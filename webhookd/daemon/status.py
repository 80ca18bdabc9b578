"""The status of this instance for /status, the status page and /readyz. Built from memory only."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from webhookd import __version__
from webhookd.context import Context
from webhookd.daemon.monitor import COUNTED_UP_TO, Monitor, Snapshot
from webhookd.deliveries.backlog import NOT_WAITING
from webhookd.http.health import BacklogStatus, InstanceStatus, JobQueueStatus

if TYPE_CHECKING:
    from webhookd.daemon.services import Service


@dataclass
class Reloads:
    """The result of the last configuration reload."""

    last_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    successful: bool = True
    error: str | None = None
    restart_needed: list[str] = field(default_factory=list)


class StatusReporter:
    """Collects the status from memory only, so /status answers even when the database does not."""

    def __init__(self, context: Context, monitor: Monitor, in_flight: Callable[[], int]) -> None:
        self._context = context
        self._monitor = monitor
        self._in_flight = in_flight
        self._started_at = datetime.now(UTC)
        self.services: list[Service] = []
        self.reloads = Reloads()
        self.draining = False
        context.metrics.database_up.set_function(lambda: context.pool.available)

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
            "in_flight": {
                "requests": self._in_flight(),
                "concurrency": settings.delivery.concurrency,
            },
            "services": [
                {
                    "name": service.name,
                    "state": service.state,
                    "restarts": service.restarts,
                    "last_error": service.last_error,
                }
                for service in self.services
            ],
            "backlog": snapshot and _backlog(snapshot),
            "failing_endpoints": snapshot and snapshot.failing,
            "dead_letters_of_a_day": snapshot.dead_letters_of_a_day if snapshot else None,
            "job_queue": snapshot and _job_queue(snapshot),
            "configuration": {
                "last_read_at": self.reloads.last_at,
                "last_reload_successful": self.reloads.successful,
                "last_reload_error": self.reloads.error,
                "restart_needed": self.reloads.restart_needed,
            },
            "retry": {
                "max_attempts": settings.retry.max_attempts,
                "base_delay_seconds": settings.retry.base_delay_seconds,
                "max_delay_seconds": settings.retry.max_delay_seconds,
                "jitter": settings.retry.jitter,
            },
        }


def _backlog(snapshot: Snapshot) -> BacklogStatus:
    return {
        "seen_at": snapshot.seen_at,
        "counted_up_to": COUNTED_UP_TO,
        "stages": [
            {"stage": stage.stage, "waiting": stage.waiting, "oldest_at": stage.oldest_at}
            for stage in snapshot.stages
            if stage.stage not in NOT_WAITING
        ],
    }


def _job_queue(snapshot: Snapshot) -> JobQueueStatus:
    queue = snapshot.job_queue
    return {
        "enabled": queue.enabled,
        "backlog": queue.backlog,
        "in_progress": queue.in_progress,
        "dead_letter_open": queue.dead_letter_open,
        "oldest_queued_age_s": queue.oldest_queued_age_s,
        "lease_active": queue.lease_active,
        "scheduled": queue.scheduled,
        "retry_waiting": queue.retry_waiting,
        "events_waiting": queue.events_waiting,
        "counted_up_to": queue.counted_up_to,
    }
