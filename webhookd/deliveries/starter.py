"""Sagas to jobs: starts what is due, a batch at a time, going round the subscriptions.

Wakes on SAGAS; rings JOBS.
"""

import asyncio
from collections.abc import Callable

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.deliveries import sagas
from webhookd.deliveries.ring import Ring
from webhookd.deliveries.transitions import record
from webhookd.hints import Hints
from webhookd.pacing import rest_seconds
from webhookd.wakeups import Bells, Work

DUE_PAGE = 1000
# How much longer than a search for what is due is the rest after it, however often other instances ring.
REST = 10
# Another orchestrator makes jobs at this moment, for some milliseconds: its turn is waited for, not the poll.
TURN_RETRY_SECONDS = 0.02


class Starter:
    """Starts until it is cancelled."""

    def __init__(
        self, pool: Pool, bells: Bells, hints: Hints, metrics: Metrics, settings: Callable[[], Settings]
    ) -> None:
        self._pool = pool
        self._bells = bells
        self._hints = hints
        self._metrics = metrics
        self._settings = settings
        self._ring = Ring()
        self._turn_lost = False

    async def run(self) -> None:
        """Tick: at once again while there is more, else when woken; and look at everything now and then."""
        with self._bells.serving(Work.SAGAS):
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = search_at = loop.time()
        must_search = False
        while True:
            if loop.time() >= look_at:
                await self.look()
                looked_at = loop.time()
            # By the settings of now: a shorter interval need not wait for the end of the longer.
            look_at = looked_at + self._settings().services.poll_interval_seconds
            began = loop.time()
            started = await self.run_once()
            if not self._hints.is_short_of_room:
                await asyncio.sleep(rest_seconds(started, loop.time() - began))
            wake_at = loop.time()
            if not started:
                wake_at = min(look_at, search_at) if must_search else look_at
            if self._turn_lost:
                wake_at = min(wake_at, loop.time() + TURN_RETRY_SECONDS)
            # Rung by another instance, who does not say whose: those are looked for, also while there is
            # enough to do here.
            must_search |= bool(
                await self._bells.wait(Work.SAGAS, timeout_seconds=max(0.0, wake_at - loop.time()))
            )
            if must_search and loop.time() >= search_at:
                must_search, began = False, loop.time()
                await self._find_due()
                search_at = loop.time() + REST * (loop.time() - began)

    async def look(self) -> None:
        """Find what no hint spoke of: subscriptions that fell due."""
        self._ring.forget()
        await self._find_due()

    async def _find_due(self) -> None:
        after = 0
        while True:
            async with self._pool.connection() as connection:
                waiting = await sagas.due_subscriptions(connection, after, DUE_PAGE)
            self._ring.add(subscription_id for subscription_id, due_at in waiting if due_at is not None)
            if len(waiting) < DUE_PAGE:
                return
            after = waiting[-1][0]

    async def run_once(self) -> int:
        """One tick: how many sagas were started, or ended because they had reached their limit."""
        settings = self._settings()
        self._ring.add(self._hints.take_due())
        window = settings.orchestration.subscription_window
        shares = self._ring.next_shares(settings.orchestration.batch_size, window)
        if len(shares) == len(self._ring):
            self._bells.taken(Work.SAGAS)
        self._turn_lost = False
        if not shares:
            self._hints.is_crowded = self._ring.is_crowded
            return 0
        async with self._pool.connection() as connection:
            started = await sagas.start(connection, shares, window, settings.retry.max_attempts)
            jobs = sum(one.started for one in started)
            if jobs:
                # Committed; to give the connection back takes a turn of the loop.
                self._bells.ring(Work.JOBS, hinted=True)
        self._metrics.attempts_started.inc(jobs)
        self._turn_lost = not started
        self._ring.learn(started)
        self._hints.is_crowded = self._ring.is_crowded
        for one in started:
            record(one.dead_lettered, self._metrics)
        return jobs + sum(len(one.dead_lettered) for one in started)
