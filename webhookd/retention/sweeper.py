"""The `retention` service: removes what is older than its period, and erases tenants and subscriptions.

One instance at a time, in small batches with a rest after each, so that deliveries are not delayed. Reads the
settings at every pass. Waits for Work.ERASURES, and for the pause between two passes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

from webhookd.context import Context
from webhookd.core.errors import DatabaseBusy, WebhookdError
from webhookd.core.metrics import Metrics
from webhookd.core.settings import RetentionSettings
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool
from webhookd.retention import queries
from webhookd.retention.queries import Batch
from webhookd.wakeups import Work

if TYPE_CHECKING:
    from datetime import datetime

log = logging.getLogger(__name__)

# A batch should take about this long. It uses a processor for as long, which deliveries may wait for: beside
# batches of 50 ms, their 99th percentile at 350 a second was 1.19 times as long as without, beside 10 ms 1.08
# times; each removed event then costs 1.7 times as much. It is one transaction: a table lock of a migration
# waits for it, and everything else waits behind that lock.
TARGET_SECONDS = 0.01
FIRST_BATCH = 100
SMALLEST_BATCH = 10
LARGEST_BATCH = 5000
# After a batch, rest this many times as long: one connection works a twentieth of the time. Beside a sweep,
# the rate of deliveries was then 0.96 of that without, and the 99th percentile at 350 a second 1.04 times as
# long.
REST_FACTOR = 19.0
# The same for what a person waits for: an erasure, and `webhookd retention run`.
REQUESTED_REST_FACTOR = 4.0
# A sweep that loses ground rests less, down to this, because the tables would grow without end otherwise.
LEAST_REST_FACTOR = 0.5
PACE_SECONDS = 60.0
# A batch that failed because of a lock is tried again after this time.
BUSY_SECONDS = 1.0
PAUSE_SECONDS = 30.0
# While an erasure waits for a request in flight.
ERASURE_PAUSE_SECONDS = 5.0
# At a shutdown. The server may need a moment to end the batch that was cancelled.
GIVE_BACK_SECONDS = 2.0

Step = Callable[[Connection, int], Awaitable[Batch]]


class BatchSize:
    """The size of the next batch: follows the duration of the last, and shrinks after a lock timeout."""

    def __init__(self) -> None:
        self.rows = FIRST_BATCH

    def took(self, seconds: float) -> None:
        """Aim at TARGET_SECONDS, at most twice or half as many rows as before."""
        factor = min(2.0, max(0.5, TARGET_SECONDS / max(seconds, 0.001)))
        self.rows = min(LARGEST_BATCH, max(SMALLEST_BATCH, int(self.rows * factor)))

    def was_blocked(self) -> None:
        """Halve it: a smaller batch needs fewer locks, and holds them for a shorter time."""
        self.rows = max(SMALLEST_BATCH, self.rows // 2)


class Pace:
    """How long to rest after a batch of a pass: less while the work grows faster than it is done."""

    def __init__(self, rest_factor: float) -> None:
        self.rest_factor = rest_factor
        self._remaining: int | None = None

    def remaining_is(self, events: int) -> None:
        """Rest half as long if there is more to do than the last time."""
        if self._remaining is not None and events > self._remaining:
            self.rest_factor = max(LEAST_REST_FACTOR, self.rest_factor / 2)
        self._remaining = events


class NamedStep(NamedTuple):
    """A step of a pass, for the log and the progress bar."""

    name: str
    run: Step
    kind: queries.Kind | None = None  # of a sweep over events, which can lose ground
    is_requested: bool = False  # by a person, as an erasure is


class Sweeper:
    """Runs passes. The service and `webhookd retention run` share it."""

    def __init__(
        self,
        pool: Pool,
        holder: str,
        settings: Callable[[], RetentionSettings],
        metrics: Metrics,
        *,
        is_requested: bool = False,
    ) -> None:
        self._pool = pool
        self._holder = holder
        self._settings = settings
        self._metrics = metrics
        self._is_requested = is_requested  # by a command: a person waits
        self._sizes: dict[str, BatchSize] = {}
        self.has_waiting_erasure = False  # of the last pass

    def steps(self) -> Iterator[NamedStep]:
        """Yield the steps of a pass. Erasures come first, because a person waits for them."""
        settings, holder = self._settings(), self._holder
        yield NamedStep("erasures", self._erase_since(), is_requested=True)
        if settings.payloads_days:
            yield NamedStep(
                "payloads",
                lambda connection, size: queries.sweep_events(connection, holder, "payloads", size, settings),
                kind="payloads",
            )
        if settings.events_days:
            yield NamedStep(
                "events",
                lambda connection, size: queries.sweep_events(connection, holder, "events", size, settings),
                kind="events",
            )
            yield NamedStep(
                "subscriptions",
                lambda connection, size: queries.sweep_subscriptions(connection, holder, size, settings),
            )
        if settings.jobs_days or settings.job_ledger_days or settings.job_workflows_days:
            yield NamedStep(
                "jobs", lambda connection, size: queries.sweep_jobs(connection, holder, size, settings)
            )
        # Also if they are kept forever: the minutes become hours.
        yield NamedStep(
            "stats", lambda connection, size: queries.sweep_stats(connection, holder, size, settings)
        )

    async def batches(self, step: NamedStep) -> AsyncIterator[Batch]:
        """Run a step batch by batch, with a rest after each, until its end or a reload with other periods."""
        loop = asyncio.get_running_loop()
        settings = self._settings()
        size = self._sizes.setdefault(step.name, BatchSize())
        is_requested = self._is_requested or step.is_requested
        pace, pace_at = Pace(REQUESTED_REST_FACTOR if is_requested else REST_FACTOR), loop.time()
        while True:
            started = loop.time()
            try:
                async with self._pool.connection() as connection:
                    if step.kind and started >= pace_at:
                        pace.remaining_is(await queries.to_examine(connection, step.kind, settings))
                        pace_at = started + PACE_SECONDS
                    batch = await step.run(connection, size.rows)
            except DatabaseBusy as error:
                log.info("retention waits for a lock: %s", error, extra={"step": step.name})
                size.was_blocked()
                await asyncio.sleep(BUSY_SECONDS)
                continue
            seconds = loop.time() - started
            # A fast batch of a few rows says little about the duration of many.
            if batch.examined >= size.rows // 2 or seconds > TARGET_SECONDS:
                size.took(seconds)
            for kind, count in batch.removed.items():
                self._metrics.retention_removed.labels(kind).inc(count)
            yield batch
            if batch.refused or not batch.more or self._settings() != settings:
                return
            await asyncio.sleep(pace.rest_factor * seconds)

    async def run_once(self) -> Counter[str]:
        """Make one pass; return the removed rows by kind. Empty if another instance has the turn."""
        removed: Counter[str] = Counter()
        for step in self.steps():
            async for batch in self.batches(step):
                if batch.refused:
                    return removed
                removed.update(batch.removed)
        return +removed

    async def give_back_turn(self) -> None:
        """Let another instance continue at once, also at a shutdown. If that fails, the turn expires."""
        with anyio.move_on_after(GIVE_BACK_SECONDS, shield=True), suppress(WebhookdError):
            async with self._pool.connection() as connection:
                await queries.take_turn(connection, self._holder, 0)

    def _erase_since(self) -> Step:
        """Return the step that tries each erasure once."""
        since: datetime | None = None

        async def erase(connection: Connection, batch_size: int) -> Batch:
            nonlocal since
            since = since or await queries.database_time(connection)
            batch, tried_id, finished_id = await queries.erase(connection, self._holder, batch_size, since)
            if finished_id is not None:
                log.info("erasure finished", extra={"erasure_id": finished_id})
            self.has_waiting_erasure = tried_id is not None and finished_id is None
            return batch

        return erase


class Retention:
    """The service: a pass, a pause, forever."""

    def __init__(self, context: Context) -> None:
        self._sweeper = Sweeper(
            context.pool, context.worker_id, lambda: context.settings().retention, context.metrics
        )
        self._inbox = context.wakeups.inbox(Work.ERASURES)

    async def run(self) -> None:
        """Run until cancelled; a wake-up, for an erasure or a reload, ends the pause."""
        while True:
            await self.run_once()
            waits = self._sweeper.has_waiting_erasure
            await self._inbox.wait(ERASURE_PAUSE_SECONDS if waits else PAUSE_SECONDS)

    async def run_once(self) -> int:
        """Make one pass, and give the turn back; returns the number of removed rows."""
        try:
            removed = await self._sweeper.run_once()
        finally:
            await self._sweeper.give_back_turn()
        if removed:
            log.info("retention removed rows", extra=dict(removed))
        return removed.total()
