"""The orchestration stage: applies results, then starts what is due, a batch of each at a time.

Wakes on RESULTS and SAGAS; rings JOBS.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from webhookd.config.settings import Settings
from webhookd.model.states import SagaStatus
from webhookd.observe.metrics import Metrics
from webhookd.orchestration.ring import Ring
from webhookd.store import sagas
from webhookd.store.bells import Bells, Work
from webhookd.store.hints import Hints
from webhookd.store.pool import Pool

log = logging.getLogger(__name__)

DUE_PAGE = 1000
# How much longer than a search for what is due is the rest after it, however often other instances ring.
REST = 10
# Another orchestrator makes jobs at this moment, for some milliseconds: its turn is waited for, not the poll.
TURN_RETRY_SECONDS = 0.02


class Orchestrator:
    """Orchestrates until it is cancelled."""

    def __init__(
        self, pool: Pool, bells: Bells, hints: Hints, metrics: Metrics, settings: Callable[[], Settings]
    ) -> None:
        self._pool = pool
        self._bells = bells
        self._hints = hints
        self._metrics = metrics
        self._settings = settings
        self._ring = Ring()
        self._refused_job_ids: set[int] = set()
        self._lowered: Final = asyncio.Event()
        self._turn_lost = False

    async def run(self) -> None:
        """Tick: at once again while there is more, else when woken; and look at everything now and then."""
        loop = asyncio.get_running_loop()
        look_at = search_at = loop.time()
        must_search = False
        while True:
            if loop.time() >= look_at:
                await self.look()
                looked_at = loop.time()
            # By the settings of now: a shorter interval need not wait for the end of the longer.
            look_at = looked_at + self._settings().services.poll_interval_seconds
            wake_at = loop.time()
            if not await self.run_once():
                wake_at = min(look_at, search_at) if must_search else look_at
            if self._turn_lost:
                wake_at = min(wake_at, loop.time() + TURN_RETRY_SECONDS)
            # Rung by the reaper or another instance, who do not say which: those are looked for, also while
            # there is enough to do here.
            unhinted = await self._bells.wait(
                Work.RESULTS, Work.SAGAS, timeout_seconds=max(0.0, wake_at - loop.time())
            )
            if Work.RESULTS in unhinted:
                await self._apply_all()
            must_search |= Work.SAGAS in unhinted
            if must_search and loop.time() >= search_at:
                must_search, began = False, loop.time()
                await self._find_due()
                search_at = loop.time() + REST * (loop.time() - began)

    async def run_once(self) -> int:
        """Apply what was reported here, start what is due; how much was done."""
        batch_size = self._settings().orchestration.batch_size
        applied = 0
        if self._hints.reported:
            applied = await self._apply(self._hints.take_reported(batch_size))
        return applied + await self._start(batch_size)

    async def look(self) -> None:
        """Find what no hint spoke of: results of other instances, subscriptions that fell due."""
        self._refused_job_ids.clear()
        self._ring.forget_marks()
        await self._apply_all()
        await self._find_due()

    async def _apply_all(self) -> None:
        while await self._apply(None) >= self._settings().orchestration.batch_size:
            pass

    async def _find_due(self) -> None:
        after = 0
        while True:
            async with self._pool.connection() as connection:
                waiting = await sagas.due_subscriptions(connection, after, DUE_PAGE)
            self._ring.add(subscription_id for subscription_id, due_at in waiting if due_at is not None)
            if len(waiting) < DUE_PAGE:
                return
            after = waiting[-1][0]

    def limit_lowered(self) -> None:
        """Have a sweep made."""
        self._lowered.set()

    async def run_sweeps(self) -> None:
        """Sweep whenever the limit was lowered; one that fails is made again. A service beside the ticks."""
        while True:
            await self._lowered.wait()
            self._lowered.clear()
            try:
                await self.sweep()
            except BaseException:
                self._lowered.set()
                raise

    async def sweep(self) -> int:
        """Dead-letter every waiting saga that has reached the limit."""
        after: int | None = 0
        buried = 0
        while after is not None:
            settings = self._settings()  # of now: the limit may be put back meanwhile
            async with self._pool.connection() as connection:
                swept = await sagas.dead_letter_exhausted(
                    connection, after, settings.orchestration.batch_size, settings.retry.max_attempts
                )
            self._record(swept.dead_lettered)
            buried += len(swept.dead_lettered)
            after = swept.last_saga_id
        return buried

    async def _apply(self, job_ids: list[int] | None) -> int:
        settings = self._settings()
        policy = sagas.RetryPolicy(
            settings.retry.max_attempts,
            settings.retry.base_delay_seconds,
            settings.retry.max_delay_seconds,
            settings.retry.jitter,
        )
        async with self._pool.connection() as connection:
            transitions = await sagas.apply_results(
                connection,
                settings.orchestration.batch_size,
                policy,
                settings.orchestration.failing_after,
                job_ids,
                list(self._refused_job_ids),
            )
        self._record(transitions)
        # A result frees a place in its subscription's window.
        self._ring.add({transition.subscription_id for transition in transitions})
        return len(transitions)

    async def _start(self, batch_size: int) -> int:
        settings = self._settings()
        self._ring.add(self._hints.take_due())
        window = settings.orchestration.subscription_window
        shares = self._ring.next_shares(batch_size, window)
        self._turn_lost = False
        if not shares:
            return 0
        async with self._pool.connection() as connection:
            started = await sagas.start(connection, shares, window, settings.retry.max_attempts)
            jobs = sum(one.started for one in started)
            if jobs:
                self._bells.ring(
                    Work.JOBS, hinted=True
                )  # committed; to give the connection back takes a turn of the loop
        self._metrics.jobs_started.inc(jobs)
        self._turn_lost = not started
        self._ring.learn(started)
        for one in started:
            self._record(one.dead_lettered)
        return jobs + sum(len(one.dead_lettered) for one in started)

    def _record(self, transitions: list[sagas.Transition]) -> None:
        for transition in transitions:
            if transition.status is None:
                if transition.job_id is not None:
                    self._refused_job_ids.add(transition.job_id)
                self._metrics.results_refused.inc()
                log.error("a result cannot be applied: %s", transition.problem, extra=_fields(transition))
                continue
            self._metrics.transitions.labels(transition.status.value).inc()
            if transition.status is SagaStatus.DEAD_LETTERED:
                log.warning("delivery dead-lettered", extra=_fields(transition))
            elif transition.status is SagaStatus.PENDING_RETRY:
                log.info("delivery will be retried", extra=_fields(transition))


def _fields(transition: sagas.Transition) -> dict[str, object]:
    return {
        "saga_id": transition.saga_id,
        "job_id": transition.job_id,
        "event_id": transition.event_id,
        "subscription_id": transition.subscription_id,
        "error_code": transition.error_code,
        "attempt_count": transition.attempt_count,
        "next_attempt_at": transition.next_attempt_at.isoformat()
        if transition.status is SagaStatus.PENDING_RETRY
        else None,
        "dead_letter_id": transition.dead_letter_id,
        "correlation_id": transition.correlation_id,
    }
