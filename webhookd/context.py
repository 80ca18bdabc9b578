"""What every stage of a process needs, in one object: database, wake-ups, metrics, settings."""

from collections.abc import Callable
from dataclasses import dataclass

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.wakeups import WakeUps


@dataclass(frozen=True)
class Context:
    """The shared parts of one instance."""

    pool: Pool
    wakeups: WakeUps
    metrics: Metrics
    # A call, not a value: a reload swaps the settings, and each use reads the current ones.
    settings: Callable[[], Settings]
    # Names this process in leases and logs.
    worker_id: str
