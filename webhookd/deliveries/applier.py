"""Applies reported results to deliveries, each once: completed, retry later, or dead letter.

Mostly failures: the reporter applies successes itself where it can.

The decision is made in SQL (schema/deliveries/orchestration.sql). Woken by RESULTS; wakes SAGAS, because a
result frees a place in its subscription's window. Runs beside the starter, not in turn with it: on a busy
event loop each would wait for the other's round trip, and the workers for both. LimitSweeper dead-letters
waiting deliveries after a reload lowered `retry.max_attempts`.
"""

import asyncio
from typing import Final

from webhookd.context import Context
from webhookd.deliveries import sagas
from webhookd.deliveries.pacing import rest_seconds
from webhookd.deliveries.sagas import record
from webhookd.wakeups import Work


class Applier:
    """Applies results until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._inbox = context.wakeups.inbox(Work.RESULTS)
        self._rejected_job_ids: set[int] = set()

    async def run(self) -> None:
        """Apply results reported by this process at once, and search for all others every poll interval."""
        with self._inbox:
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        poll_at = loop.time()
        while True:
            if loop.time() >= poll_at:
                await self.search_all()
                searched_at = loop.time()
            # With the current settings: a shorter poll interval takes effect at once.
            poll_at = searched_at + self._context.settings().services.poll_interval_seconds
            began = loop.time()
            applied = await self.run_once()
            if not self._context.wakeups.results_are_urgent:
                await asyncio.sleep(rest_seconds(applied, loop.time() - began))
            wake_at = loop.time() if self._inbox.has_ids else poll_at
            # A wake-up without ids comes from the reaper or another instance: search, even while busy.
            if await self._inbox.wait(max(0.0, wake_at - loop.time())):
                await self._apply_all()

    async def run_once(self) -> int:
        """Apply one batch of results reported by this process; returns how many."""
        job_ids = self._inbox.take(self._context.settings().orchestration.batch_size)
        if not self._inbox.has_ids:
            self._inbox.handled_here()
        return await self._apply(job_ids) if job_ids else 0

    async def search_all(self) -> None:
        """Apply results that no wake-up named, and try rejected results once more."""
        self._rejected_job_ids.clear()
        await self._apply_all()

    async def _apply_all(self) -> None:
        while await self._apply(None) >= self._context.settings().orchestration.batch_size:
            pass

    async def _apply(self, job_ids: list[int] | None) -> int:
        settings = self._context.settings()
        policy = sagas.RetryPolicy(
            settings.retry.max_attempts,
            settings.retry.base_delay_seconds,
            settings.retry.max_delay_seconds,
            settings.retry.jitter,
        )
        async with self._context.pool.connection() as connection:
            transitions = await sagas.apply_results(
                connection,
                settings.orchestration.batch_size,
                policy,
                settings.orchestration.failing_after,
                job_ids,
                list(self._rejected_job_ids),
            )
        record(transitions, self._context.metrics)
        self._rejected_job_ids.update(
            transition.job_id
            for transition in transitions
            if transition.status is None and transition.job_id is not None
        )
        if transitions:
            self._context.wakeups.freed({transition.subscription_id for transition in transitions})
        return len(transitions)


class LimitSweeper:
    """Sweeps on request, until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requested: Final = asyncio.Event()

    def request(self) -> None:
        self._requested.set()

    async def run(self) -> None:
        """Sweep after each request. A sweep that fails is repeated."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                await self.sweep()
            except BaseException:
                self._requested.set()
                raise

    async def sweep(self) -> int:
        """Dead-letter waiting deliveries that have reached the limit, in keyset batches; returns how many."""
        after: int | None = 0
        dead_lettered = 0
        while after is not None:
            settings = self._context.settings()  # read again: a reload may raise the limit meanwhile
            async with self._context.pool.connection() as connection:
                swept = await sagas.dead_letter_exhausted(
                    connection, after, settings.orchestration.batch_size, settings.retry.max_attempts
                )
            record(swept.dead_lettered, self._context.metrics)
            dead_lettered += len(swept.dead_lettered)
            after = swept.last_saga_id
        return dead_lettered
