"""Starts due deliveries: creates an attempt for each, in batches shared fairly among subscriptions.

Woken by SAGAS; wakes ATTEMPTS.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from webhookd.context import Context
from webhookd.db.connection import Connection
from webhookd.deliveries import sagas
from webhookd.deliveries.pacing import SEARCH_REST_FACTOR, rest_seconds
from webhookd.deliveries.sagas import Share, Started, record
from webhookd.wakeups import Work

SEARCH_PAGE = 1000
# Only one orchestrator creates attempts at a time, for some milliseconds. Try again soon.
LOCK_RETRY_SECONDS = 0.02
# A subscription at its rate limit is tried again after the time of one request, but not more often than this:
# a limit of hundreds a second then starts many at a time.
LIMIT_RETRY_SECONDS = 0.1


class Rotation:
    """The order in which subscriptions with due deliveries get their share of a batch. Pure, in memory.

    The database decides on windows and due times; this is a hint. A subscription that is missing here is
    found by the next search. A subscription that has nothing due is removed after the next batch.
    """

    def __init__(self) -> None:
        self._marks: dict[int, tuple[int | None, int | None]] = {}
        self._with_full_window: set[int] = set()
        self.held_up: Final[set[int]] = set()  # more is due than could be started

    @property
    def window_is_full(self) -> bool:
        """Whether a subscription has more deliveries due than its window has room for."""
        return bool(self._with_full_window)

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, subscription_ids: Iterable[int]) -> None:
        """Append subscriptions; those already present keep their place."""
        for subscription_id in subscription_ids:
            self._marks.setdefault(subscription_id, (None, None))

    def next_shares(self, batch_size: int, window: int) -> list[Share]:
        """Give the next subscriptions equal shares of the batch, and move them to the end."""
        served = list(self._marks)[:batch_size]
        if not served:
            return []
        quota = min(window, -(-batch_size // len(served)))
        shares = []
        for subscription_id in served:
            marks = self._marks.pop(subscription_id)
            self._marks[subscription_id] = marks
            shares.append(Share(subscription_id, quota, *marks))
        return shares

    def update(self, started: Sequence[Started]) -> None:
        """Remove subscriptions that have nothing due or whose window is full; a result brings those back.

        A subscription whose whole share was dead-lettered stays: that frees no window, and more may be due.
        """
        for share in started:
            if share.drained or not (share.started or share.dead_lettered):
                self._marks.pop(share.subscription_id, None)
            elif share.subscription_id in self._marks:
                self._marks[share.subscription_id] = (share.next_saga_mark, share.next_job_mark)
            if share.drained:
                self.held_up.discard(share.subscription_id)
            else:
                self.held_up.add(share.subscription_id)
            # A failing endpoint is probed with a single attempt at a time: that is not a full window.
            if share.drained or share.active <= 1:
                self._with_full_window.discard(share.subscription_id)
            else:
                self._with_full_window.add(share.subscription_id)

    def reset_marks(self) -> None:
        """Start from the beginning before a search: deliveries committed late lie before their mark."""
        self._marks = dict.fromkeys(self._marks, (None, None))
        self._with_full_window.clear()
        self.held_up.clear()


class Starter:
    """Starts deliveries until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._inbox = context.wakeups.inbox(Work.SAGAS)
        self._rotation = Rotation()
        context.wakeups.held_up = self._rotation.held_up
        self._lock_was_taken = False
        # Subscriptions at their rate limit, and when to try them again. Nothing else wakes them: no result
        # need be outstanding.
        self._limited: dict[int, float] = {}
        self._known_unlimited: set[int] = set()

    async def run(self) -> None:
        """Start batch after batch while there is more, then wait. Search everything every poll interval."""
        with self._inbox:
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        poll_at = next_search_at = loop.time()
        must_search = False
        while True:
            if loop.time() >= poll_at:
                await self.search_all()
                searched_at = loop.time()
            # With the current settings: a shorter poll interval takes effect at once.
            poll_at = searched_at + self._context.settings().services.poll_interval_seconds
            began = loop.time()
            started = await self.run_once()
            if not self._context.wakeups.results_are_urgent:
                await asyncio.sleep(rest_seconds(started, loop.time() - began))
            wake_at = loop.time()
            if not started:
                wake_at = min(poll_at, next_search_at) if must_search else poll_at
                wake_at = min([wake_at, *self._limited.values()])
            if self._lock_was_taken:
                wake_at = min(wake_at, loop.time() + LOCK_RETRY_SECONDS)
            # A wake-up without ids comes from another instance: search, even while this one is busy.
            must_search |= await self._inbox.wait(max(0.0, wake_at - loop.time()))
            if must_search and loop.time() >= next_search_at:
                must_search, began = False, loop.time()
                await self._search()
                next_search_at = loop.time() + SEARCH_REST_FACTOR * (loop.time() - began)

    async def search_all(self) -> None:
        """Find due deliveries that no wake-up named."""
        self._rotation.reset_marks()
        self._known_unlimited.clear()
        await self._search()

    async def _search(self) -> None:
        after = 0
        while True:
            async with self._context.pool.connection() as connection:
                page = await sagas.due_subscriptions(connection, after, SEARCH_PAGE)
            self._rotation.add(subscription_id for subscription_id, due_at in page if due_at is not None)
            if len(page) < SEARCH_PAGE:
                return
            after = page[-1][0]

    async def run_once(self) -> int:
        """Run one batch; returns how many deliveries were started, or dead-lettered at their limit."""
        settings, wakeups = self._context.settings(), self._context.wakeups
        self._rotation.add(self._inbox.take())
        self._rotation.add(self._take_limited())
        window = settings.orchestration.subscription_window
        shares = self._rotation.next_shares(settings.orchestration.batch_size, window)
        if len(shares) == len(self._rotation):
            self._inbox.handled_here()
        self._lock_was_taken = False
        if not shares:
            wakeups.window_is_full = self._rotation.window_is_full
            return 0
        async with self._context.pool.connection() as connection:
            started = await sagas.start(connection, shares, window, settings.retry.max_attempts)
            attempts = sum(share.started for share in started)
            if attempts:
                # It is committed. Wake now: giving the connection back takes a turn of the event loop.
                wakeups.wake(Work.ATTEMPTS, notify=True)
            await self._note_limits(connection, started, window)
        self._context.metrics.attempts_started.inc(attempts)
        self._lock_was_taken = not started
        self._rotation.update(started)
        wakeups.window_is_full = self._rotation.window_is_full
        wakeups.found_held_up({share.subscription_id for share in started if not share.drained})
        for share in started:
            record(share.dead_lettered, self._context.metrics)
        return attempts + sum(len(share.dead_lettered) for share in started)

    def _take_limited(self) -> list[int]:
        """Remove and return the subscriptions that may start more now."""
        now = asyncio.get_running_loop().time()
        taken = [subscription_id for subscription_id, at in self._limited.items() if at <= now]
        for subscription_id in taken:
            del self._limited[subscription_id]
        return taken

    async def _note_limits(self, connection: Connection, started: Sequence[Started], window: int) -> None:
        """Find out which subscriptions started nothing because of their rate limit, not of their window."""
        stuck = {
            share.subscription_id
            for share in started
            if not (share.drained or share.started or share.dead_lettered) and share.active < window
        }
        asked = stuck - self._known_unlimited
        if not asked:
            return
        limits = await sagas.rate_limits(connection, asked)
        self._known_unlimited |= asked - limits.keys()
        now = asyncio.get_running_loop().time()
        for subscription_id, per_second in limits.items():
            self._limited[subscription_id] = now + max(LIMIT_RETRY_SECONDS, 1 / per_second)
