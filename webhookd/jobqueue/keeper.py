"""The jobs service: makes jobs of events, takes back their lost leases, promotes retries, sweeps what is old.

Wakes on EVENTS, and rings it: every move of a job is an event. Writes [jobs] into the database.
"""

import asyncio
import logging
from contextlib import closing

import msgspec

from webhookd.context import Context
from webhookd.core.errors import Refused
from webhookd.jobqueue import queries as job_substrate
from webhookd.jobqueue.types import JobRefusal, Reaped
from webhookd.wakeups import Work

log = logging.getLogger(__name__)

BATCH_SIZE = 500
# Every event rings, and most give no job: under a stream of them one look finds what many would.
PAUSE_SECONDS = 0.05
SWEEP_INTERVAL_SECONDS = 60.0
# While the substrate is off there is one statement in so long, and under a stream of events one in a poll
# interval: it ends what was running when it was switched off, and sees that it is on again.
DISABLED_INTERVAL_SECONDS = 5.0
ACTOR = "webhookd"


class JobKeeper:
    """Keeps the substrate until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._pool = context.pool
        self._wakeups = context.wakeups
        self._metrics = context.metrics
        self._settings = context.settings
        self._written: dict[str, float] = {}
        self._enabled = False  # as far as this has seen
        self._reap_at = 0.0
        self._sweep_at = 0.0
        self._swept_up_to_kind = ""

    async def run(self) -> None:
        """Look, again at once while there is more, else when woken or when the time has come."""
        with closing(self._wakeups.inbox(Work.EVENTS)) as inbox:
            while True:
                await self._configure()
                more = await (self.run_once() if self._enabled else self._run_once_disabled())
                if not more and self._enabled:
                    await inbox.rest(PAUSE_SECONDS, self._poll_interval_seconds)
                elif not more:
                    await inbox.rest(self._poll_interval_seconds, DISABLED_INTERVAL_SECONDS)

    async def run_once(self) -> bool:
        """One batch of each kind of work that is due; whether there is more."""
        now = asyncio.get_running_loop().time()
        more = False
        # First: whatever is wrong with what events give, leases and deadlines are looked after.
        if now >= self._reap_at:
            reaped = await self._reap()
            self._reap_at = now if reaped.more else now + self._poll_interval_seconds
            more |= reaped.more
        more |= await self._spawn()
        if now >= self._sweep_at:
            # Before it is tried: a sweep that fails is not what everything else here is begun anew for.
            self._sweep_at = now + SWEEP_INTERVAL_SECONDS
            if await self._sweep():
                self._sweep_at = now
                more = True
        return more

    @property
    def _poll_interval_seconds(self) -> float:
        return self._settings().services.poll_interval_seconds

    async def _configure(self) -> None:
        """At the start and when a reload changed them; what was set in the database meanwhile stays."""
        given = self._settings().jobs.given
        if given == self._written:
            return
        if given:
            try:
                async with self._pool.connection() as connection:
                    await job_substrate.configure(connection, given, ACTOR)
            except Refused as error:  # each is right by itself, and does not fit what the database has
                log.warning(
                    "the numbers of [jobs] were not written into the database: %s", error, extra=given
                )
            else:
                log.info("the numbers of [jobs] were written into the database", extra=given)
        self._written = given

    async def _run_once_disabled(self) -> bool:
        """Look after what was running when the substrate was switched off; whether to go on at once."""
        async with self._pool.connection() as connection:
            reaped = await job_substrate.reap_if_disabled(connection, BATCH_SIZE)
        if reaped is None:
            self._enabled = True
            return True
        self._count(reaped)
        return reaped.more

    async def _spawn(self) -> bool:
        async with self._pool.connection() as connection:
            spawned = await job_substrate.spawn_from_events(connection, BATCH_SIZE)
        if isinstance(spawned, JobRefusal):
            self._enabled = False
            return False
        self._metrics.job_queue_spawned.inc(spawned.jobs)
        if spawned.jobs:
            self._wakeups.wake(Work.EVENTS)
        return spawned.more

    async def _reap(self) -> Reaped:
        async with self._pool.connection() as connection:
            reaped = await job_substrate.reap(connection, BATCH_SIZE)
        self._count(reaped)
        return reaped

    def _count(self, reaped: Reaped) -> None:
        counts = {name: n for name, n in msgspec.structs.asdict(reaped).items() if name != "more" and n}
        for become, count in counts.items():
            self._metrics.job_queue_reaped.labels(become).inc(count)
        if counts:
            log.info("jobs were moved by their time", extra=counts)
            self._wakeups.wake(Work.EVENTS)

    async def _sweep(self) -> bool:
        async with self._pool.connection() as connection:
            swept = await job_substrate.sweep(connection, BATCH_SIZE, self._swept_up_to_kind)
        if isinstance(swept, JobRefusal):
            return False
        self._swept_up_to_kind = swept.last_kind if swept.more else ""
        self._metrics.job_queue_cleaned.inc(swept.cleaned)
        if swept.cleaned:
            self._wakeups.wake(Work.EVENTS)
        return swept.more
