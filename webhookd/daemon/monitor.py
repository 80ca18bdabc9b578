"""The monitor: measures backlogs and failing endpoints every few seconds, for metrics and /status."""

import asyncio
from datetime import datetime
from typing import NamedTuple

from webhookd.context import Context
from webhookd.deliveries import backlog, reads
from webhookd.deliveries.backlog import Waiting
from webhookd.http.health import FailingEndpointStatus
from webhookd.jobqueue import queries as job_queries
from webhookd.jobqueue.results import JobQueueHealth

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

    seen_at: datetime
    stages: list[Waiting]
    failing: list[FailingEndpointStatus]
    dead_letters_of_a_day: int
    job_queue: JobQueueHealth


class Monitor:
    """Measures until it is cancelled; `snapshot` is None while the database does not answer."""

    def __init__(self, context: Context) -> None:
        self._pool = context.pool
        self._metrics = context.metrics
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
                    stages = await backlog.waiting(connection, COUNTED_UP_TO)
                    failing = await backlog.failing_endpoints(connection, FAILING_SHOWN)
                    dead_letters = await backlog.dead_letters_of_a_day(connection, COUNTED_UP_TO)
                    job_queue = await job_queries.health(connection)
                    seen_at = await reads.database_time(connection)
            except TimeoutError:
                # Not passed on: slow counts do not mean that the server is unavailable.
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
        self.snapshot = Snapshot(seen_at, stages, failing, dead_letters, job_queue)
        return len(stages)

    def _forget(self) -> None:
        """Show nothing rather than an old number."""
        self.snapshot = None
        self._metrics.forget_backlog()
