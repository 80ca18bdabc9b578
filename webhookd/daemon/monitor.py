"""The monitor: looks every few seconds at what waits, for the gauges and for /status. Changes nothing."""

import asyncio
from datetime import datetime
from typing import NamedTuple

from webhookd.core.metrics import Metrics
from webhookd.db.pool import Pool
from webhookd.deliveries import backlog, reads
from webhookd.deliveries.backlog import FailingEndpoint, Waiting
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue.types import Health

INTERVAL_SECONDS = 5.0
# A count costs the same for every backlog beyond this: enough to see that a stage does not keep up.
COUNTED_UP_TO = 10_000
FAILING_SHOWN = 20
# Dead rows in front, under a transaction that somebody holds open, make looking dear: then it is done rarer,
# and given up before the pool would take it for a server that does not answer.
REST = 20
TIMEOUT_SECONDS = 5.0


class Seen(NamedTuple):
    """What the last look saw."""

    seen_at: datetime
    stages: list[Waiting]
    failing: list[FailingEndpoint]
    dead_letters_of_a_day: int
    job_queue: Health


class Monitor:
    """Looks until it is cancelled; `seen` is None as long as the database does not answer."""

    def __init__(self, pool: Pool, metrics: Metrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self.seen: Seen | None = None

    async def run(self) -> None:
        """Look, and rest for a while that follows from how long it took."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self.run_once()
            except BaseException:
                self._forget()
                raise
            await asyncio.sleep(max(INTERVAL_SECONDS, REST * (loop.time() - started)))

    async def run_once(self) -> int:
        """One look; how many stages it saw."""
        async with self._pool.connection() as connection:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    stages = await backlog.waiting(connection, COUNTED_UP_TO)
                    failing = await backlog.failing_endpoints(connection, FAILING_SHOWN)
                    dead_letters = await backlog.dead_letters_of_a_day(connection, COUNTED_UP_TO)
                    job_queue = await job_substrate.health(connection)
                    seen_at = await reads.database_time(connection)
            except TimeoutError:
                # Caught here: a look that is dear is no sign of a server that is away.
                self._forget()
                return 0
        for stage in stages:
            self._metrics.backlog.labels(stage.stage).set(stage.waiting)
            self._metrics.backlog_age.labels(stage.stage).set(max(0.0, stage.age_seconds or 0.0))
        self._metrics.see_job_queue(
            {
                "job_queue_enabled": job_queue.enabled,
                "job_queue_backlog": job_queue.backlog,
                "job_queue_in_progress": job_queue.in_progress,
                "job_queue_lease_active": job_queue.lease_active,
                "job_queue_dead_letter_open": job_queue.dead_letter_open,
                "job_queue_scheduled": job_queue.scheduled,
                "job_queue_retry_waiting": job_queue.retry_waiting,
                "job_queue_events_waiting": job_queue.events_waiting,
                "job_queue_oldest_queued_age_seconds": job_queue.oldest_queued_age_s,
            }
        )
        self.seen = Seen(seen_at, stages, failing, dead_letters, job_queue)
        return len(stages)

    def _forget(self) -> None:
        """An old number looks like a true one."""
        self.seen = None
        self._metrics.forget_backlog()
