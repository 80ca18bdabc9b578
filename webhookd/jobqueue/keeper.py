"""The `jobs` service: creates jobs from events, reaps leases, promotes retries and cleans old jobs.

Waits for Work.EVENTS and wakes it: every transition of a job is an event. Writes [jobs] into the database.
"""

import asyncio
import logging
from contextlib import closing

import msgspec

from webhookd.context import Context
from webhookd.core.errors import Refused
from webhookd.jobqueue import queries
from webhookd.jobqueue.queries import Value
from webhookd.jobqueue.results import CleanedJobs, JobRefusal, ReapedJobs, SpawnedJobs
from webhookd.wakeups import Work

log = logging.getLogger(__name__)

BATCH_SIZE = 500
# Every event wakes this service and most create no job: one pass per pause finds the same as many would.
PAUSE_SECONDS = 0.05
SWEEP_INTERVAL_SECONDS = 60.0
# Disabled, the service runs one statement per interval; under a stream of events one per poll interval. It
# finishes what was running when the queue was disabled, and notices when the queue is enabled again.
DISABLED_INTERVAL_SECONDS = 5.0
ACTOR = "webhookd"


class JobKeeper:
    """Maintains the job queue until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._pool = context.pool
        self._wakeups = context.wakeups
        self._metrics = context.metrics
        self._settings = context.settings
        self._written: dict[str, float] = {}
        self._enabled = False  # as last seen in the database
        self._reap_at = 0.0
        self._sweep_at = 0.0
        self._swept_up_to_kind = ""

    async def run(self) -> None:
        """Run again at once while there is more work, otherwise after a wake-up or the poll interval."""
        with closing(self._wakeups.inbox(Work.EVENTS)) as inbox:
            while True:
                await self._configure()
                more = await (self.run_once() if self._enabled else self._run_once_disabled())
                if not more and self._enabled:
                    await inbox.rest(PAUSE_SECONDS, self._poll_interval_seconds)
                elif not more:
                    await inbox.rest(self._poll_interval_seconds, DISABLED_INTERVAL_SECONDS)

    async def run_once(self) -> bool:
        """Process one batch of each kind of work that is due; True if there is more."""
        now = asyncio.get_running_loop().time()
        more = False
        # Reap first: a failure while creating jobs must not stop the handling of leases and deadlines.
        if now >= self._reap_at:
            reaped = await self._reap()
            self._reap_at = now if reaped.more else now + self._poll_interval_seconds
            more |= reaped.more
        more |= await self._spawn()
        if now >= self._sweep_at:
            # Set before the attempt: a sweep that fails must not restart the service in a loop.
            self._sweep_at = now + SWEEP_INTERVAL_SECONDS
            if await self._sweep():
                self._sweep_at = now
                more = True
        return more

    @property
    def _poll_interval_seconds(self) -> float:
        return self._settings().services.poll_interval_seconds

    async def _configure(self) -> None:
        """Write [jobs] at the start and after a reload changed it; later changes in the database stay."""
        given = self._settings().jobs.given
        if given == self._written:
            return
        if given:
            try:
                async with self._pool.connection() as connection:
                    await queries.configure(connection, given, ACTOR)
            except Refused as error:  # each value is valid, but not together with the database's other values
                log.warning("[jobs] was not written to the database: %s", error, extra=given)
            else:
                log.info("[jobs] was written to the database", extra=given)
        self._written = given

    async def _run_once_disabled(self) -> bool:
        """Finish what was running when the queue was disabled; True if the loop should continue at once."""
        async with self._pool.connection() as connection:
            reaped = await queries.reap_if_disabled(connection, BATCH_SIZE)
        if reaped is None:
            self._enabled = True
            return True
        self._count(reaped)
        return reaped.more

    async def _spawn(self) -> bool:
        spawned = await self._call("fn_job_spawn_from_events", SpawnedJobs)
        if isinstance(spawned, JobRefusal):
            self._enabled = False
            return False
        self._metrics.job_queue_spawned.inc(spawned.jobs)
        if spawned.jobs:
            self._wakeups.wake(Work.EVENTS)
        return spawned.more

    async def _reap(self) -> ReapedJobs:
        async with self._pool.connection() as connection:
            reaped = await queries.reap(connection, BATCH_SIZE)
        self._count(reaped)
        return reaped

    def _count(self, reaped: ReapedJobs) -> None:
        counts = {name: n for name, n in msgspec.structs.asdict(reaped).items() if name != "more" and n}
        for outcome, count in counts.items():
            self._metrics.job_queue_reaped.labels(outcome).inc(count)
        if counts:
            log.info("jobs moved by time", extra=counts)
            self._wakeups.wake(Work.EVENTS)

    async def _sweep(self) -> bool:
        cleaned = await self._call("fn_job_cleanup_sweep", CleanedJobs, after_kind=self._swept_up_to_kind)
        if isinstance(cleaned, JobRefusal):
            return False
        self._swept_up_to_kind = cleaned.last_kind if cleaned.more else ""
        self._metrics.job_queue_cleaned.inc(cleaned.cleaned)
        if cleaned.cleaned:
            self._wakeups.wake(Work.EVENTS)
        return cleaned.more

    async def _call(self, function: str, result: type[Value], **arguments: object) -> Value | JobRefusal:
        async with self._pool.connection() as connection:
            return await queries.call(connection, function, result, batch_size=BATCH_SIZE, **arguments)
