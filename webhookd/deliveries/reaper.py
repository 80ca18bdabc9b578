"""The reaper: resets expired leases every few seconds. Wakes ATTEMPTS, or RESULTS if it gave one up."""

import logging

from webhookd.context import Context
from webhookd.core.states import AttemptStatus
from webhookd.deliveries import attempts
from webhookd.wakeups import Work

log = logging.getLogger(__name__)

BATCH_SIZE = 500


class Reaper:
    """Resets expired leases until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._inbox = context.wakeups.inbox(Work.LEASES)

    async def run(self) -> None:
        """Run batch after batch while there is more, then wait for the interval."""
        while True:
            if await self.run_once() < BATCH_SIZE:
                await self._inbox.wait(self._context.settings().reaper.interval_seconds)

    async def run_once(self) -> int:
        """Reset one batch of expired leases; returns how many."""
        async with self._context.pool.connection() as connection:
            resets = await attempts.reset_expired(
                connection, BATCH_SIZE, self._context.settings().reaper.max_lease_resets
            )
        for reset in resets:
            self._context.metrics.lease_resets.labels(reset.status.value).inc()
            log.warning(
                "lease expired; attempt goes back to the queue"
                if reset.status is AttemptStatus.PENDING
                else "lease expired too often; attempt failed",
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
            self._context.wakeups.wake(Work.ATTEMPTS, search=True, notify=True)
        if AttemptStatus.FAILED in statuses:
            self._context.wakeups.wake(Work.RESULTS, search=True, notify=True)
        return len(resets)
