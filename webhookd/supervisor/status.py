"""What an operator asks first: is it ready, what runs, what waits, what fails, what was reloaded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from webhookd import __version__
from webhookd.config.settings import Settings
from webhookd.monitor.loop import COUNTED_UP_TO, Monitor
from webhookd.observe.metrics import Metrics
from webhookd.store.pool import Pool

if TYPE_CHECKING:
    from webhookd.supervisor.services import Service


@dataclass
class Reloads:
    """How the configuration was last read."""

    last_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    successful: bool = True
    error: str | None = None
    restart_needed: list[str] = field(default_factory=list)


class Status:
    """Gathers it; asks nobody, so that it answers whatever else does not."""

    def __init__(
        self,
        worker_id: str,
        settings: Callable[[], Settings],
        pool: Pool,
        monitor: Monitor,
        metrics: Metrics,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._pool = pool
        self._monitor = monitor
        self._started_at = datetime.now(UTC)
        self.services: list[Service] = []
        self.reloads = Reloads()
        self.draining = False
        metrics.database_up.set_function(lambda: self._pool.available)

    def unready(self) -> list[str]:
        """Why work sent here may not be done now. Nothing: the database answers, and every service runs."""
        return (
            ["it is draining"] * self.draining
            + ["the database does not answer"] * (not self._pool.available)
            + [f"{service.name} is failing" for service in self.services if not service.healthy]
        )

    def describe(self) -> dict[str, object]:
        """All of it, for /status."""
        seen = self._monitor.seen
        return {
            "version": __version__,
            "worker_id": self._worker_id,
            "started_at": self._started_at,
            "ready": not self.unready(),
            "unready_because": self.unready(),
            "draining": self.draining,
            "database": {"available": self._pool.available},
            "services": [
                {
                    "name": service.name,
                    "state": service.state,
                    "restarts": service.restarts,
                    "last_error": service.last_error,
                }
                for service in self.services
            ],
            "backlog": seen
            and {
                "seen_at": seen.seen_at,
                "counted_up_to": COUNTED_UP_TO,
                "stages": [
                    {"stage": stage.stage, "waiting": stage.waiting, "oldest_at": stage.oldest_at}
                    for stage in seen.stages
                ],
            },
            "failing_endpoints": seen and [endpoint._asdict() for endpoint in seen.failing],
            "configuration": {
                "last_read_at": self.reloads.last_at,
                "last_reload_successful": self.reloads.successful,
                "last_reload_error": self.reloads.error,
                "restart_needed": self.reloads.restart_needed,
            },
            "retry": msgspec.structs.asdict(self._settings().retry),
        }
