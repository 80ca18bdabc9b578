"""The reaper: takes back lost leases every few seconds. Rings JOBS, and RESULTS for those it gave up."""

import logging
from collections.abc import Callable

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.core.states import AttemptStatus
from webhookd.db.pool import Pool
from webhookd.deliveries import attempts as jobs
from webhookd.wakeups import Bells, Work

log = logging.getLogger(__name__)

BATCH_SIZE = 500


class Reaper:
    """Reaps until it is cancelled."""

    def __init__(self, pool: Pool, bells: Bells, metrics: Metrics, settings: Callable[[], Settings]) -> None:
        self._pool = pool
        self._bells = bells
        self._metrics = metrics
        self._settings = settings

    async def run(self) -> None:
        """Reap, again at once while there is more, then after the interval."""
        while True:
            if await self.run_once() < BATCH_SIZE:
                await self._bells.wait(Work.LEASES, timeout_seconds=self._settings().reaper.interval_seconds)

    async def run_once(self) -> int:
        """One batch; how many leases were taken back."""
        async with self._pool.connection() as connection:
            resets = await jobs.reset_expired(
                connection, BATCH_SIZE, self._settings().reaper.max_lease_resets
            )
        for reset in resets:
            self._metrics.lease_resets.labels(reset.status.value).inc()
            log.warning(
                "lease expired",
                extra={
                    "job_id": reset.job_id,
                    "saga_id": reset.saga_id,
                    "worker_id": reset.worker_id,
                    "lease_expiration": reset.lease_until.isoformat(),
                    "lease_resets": reset.lease_resets,
                    "status": reset.status.value,
                },
            )
        statuses = {reset.status for reset in resets}
        if AttemptStatus.PENDING in statuses:
            self._bells.ring(Work.JOBS)
        if AttemptStatus.FAILED in statuses:
            self._bells.ring(Work.RESULTS)
        return len(resets)
