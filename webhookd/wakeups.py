"""Wake-ups: how a stage learns that there is work, in this process and across processes.

A producer calls `wake`; each consumer has an `Inbox`. Inside a process a wake-up goes through memory and can
name the rows it is about. Other processes get a NOTIFY without content. Both are hints: every consumer also
polls, so a lost wake-up costs time and nothing else. docs/how-it-works.md shows which stage wakes which.
"""

import asyncio
import logging
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Final, Self

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.connection import Connection, connected, translated
from webhookd.db.pool import Pool

log = logging.getLogger(__name__)

# NOTIFY locks the whole PostgreSQL cluster at commit, so each process sends at most one batch in this time.
NOTIFY_INTERVAL_SECONDS = 0.1
# publish() sends at most one NOTIFY per session every 50 ms (schema/deliveries/guards.sql). After a NOTIFY,
# check again until 60 ms have passed, so that events committed in that gap do not wait for the poll interval.
FOLLOW_UP_SECONDS = 0.06
# After results, how long to wait before looking for deliveries that no one here knows to wait for them.
FREED_SECONDS = 0.1
# Row ids that an inbox keeps. Past this bound the consumer searches the database instead.
MAX_IDS = 100_000
HEARTBEAT_INTERVAL_SECONDS = 3.0
HEARTBEAT_TIMEOUT_SECONDS = 3.0
# Behind a pooler, LISTEN ends with its transaction: try again now and then, not at every heartbeat.
NO_LISTEN_INTERVAL_SECONDS = 60.0


class Work(StrEnum):
    """The kinds of work. The value is the NOTIFY channel."""

    EVENTS = "webhookd_events"  # to be routed
    SAGAS = "webhookd_sagas"  # due, to be started; ids are subscriptions
    ATTEMPTS = "webhookd_attempts"  # pending, to be claimed
    RESULTS = "webhookd_results"  # reported, to be applied; ids are attempts
    LEASES = "webhookd_leases"  # to be checked before the reaper's interval ends
    ERASURES = "webhookd_erasures"  # requested


# Checks after a NOTIFY, spread over FOLLOW_UP_SECONDS. Events get several: a session that publishes one event
# after another sends no NOTIFY for most of them, and with a single check each would wait the full 60 ms.
FOLLOW_UPS = {Work.EVENTS: 8}


class WakeUps:
    """All wake-ups of a process, and the few facts that stages share to pace each other."""

    def __init__(self) -> None:
        self._inboxes: Final[dict[Work, set[Inbox]]] = {work: set() for work in Work}
        self._follow_ups_left: Final[dict[Work, int]] = {}
        self._to_notify: set[Work] = set()
        self._notify: Final = asyncio.Event()
        self._notify_timers: Final[dict[Work, asyncio.TimerHandle]] = {}
        # Set by the starter: a subscription has more deliveries due than its window has room for.
        self.window_is_full = False
        # Changed by the starter: subscriptions with due deliveries that wait for a result of another.
        self.held_up: set[int] = set()
        self._freed: set[int] = set()
        # Set by the worker: its last claim found fewer attempts than it has free slots for.
        self.has_free_slots = False

    @property
    def results_are_urgent(self) -> bool:
        """Deliveries wait only for results that free their window, so no stage on that path may rest."""
        return self.window_is_full and self.has_free_slots

    def inbox(self, work: Work) -> "Inbox":
        """Return a new inbox, which receives every wake-up for this work until it is closed."""
        inbox = Inbox(self, work)
        self._inboxes[work].add(inbox)
        return inbox

    def wake(
        self, work: Work, ids: Collection[int] = (), *, search: bool = False, notify: bool = False
    ) -> None:
        """Wake the consumers of this work.

        `ids` names the rows, so that the consumer need not look for them. `search` makes it look for all
        rows. `notify` sends a NOTIFY to other processes too: at once if no consumer runs here; otherwise
        after NOTIFY_INTERVAL_SECONDS, unless `handled_here` cancels it. A NOTIFY is a commit, and the next
        stage would wait for the disk behind it.
        """
        is_attended = any(inbox.is_attended for inbox in self._inboxes[work])
        for inbox in self._inboxes[work]:
            inbox.put(ids, search=search)
        if not notify:
            return
        if not is_attended:
            self._notify_now(work)
        elif work not in self._notify_timers:
            loop = asyncio.get_running_loop()
            self._notify_timers[work] = loop.call_later(NOTIFY_INTERVAL_SECONDS, self._notify_now, work)

    def freed(self, subscription_ids: AbstractSet[int]) -> None:
        """Wake SAGAS: results were applied, so the windows of these subscriptions have more room.

        At once for those that are held up. Mostly nothing waits, and a start that finds nothing costs half as
        much as one that finds a delivery, so the others are looked at after FREED_SECONDS: another instance
        may know of some that wait.
        """
        is_attended = any(inbox.is_attended for inbox in self._inboxes[Work.SAGAS])
        urgent = subscription_ids & self.held_up if is_attended else subscription_ids
        if urgent:
            self.wake(Work.SAGAS, urgent, notify=True)
        if later := subscription_ids - urgent:
            if not self._freed:
                asyncio.get_running_loop().call_later(FREED_SECONDS, self._wake_freed)
            self._freed |= later

    def found_held_up(self, subscription_ids: AbstractSet[int]) -> None:
        """Wake SAGAS for those that were freed meanwhile: the starter may not have seen the results yet."""
        if freed := self._freed & subscription_ids:
            self._freed -= freed
            self.wake(Work.SAGAS, freed, notify=True)

    def wake_all(self) -> None:
        """Make every consumer search: wake-ups may have been lost, or the settings changed."""
        for work in Work:
            self.wake(work, search=True)

    def received(self, work: Work) -> None:
        """Handle a NOTIFY from another process: search now, and again for commits that sent none."""
        self.wake(work, search=True)
        is_following_up = work in self._follow_ups_left
        # One more than usual if a series is running: its next check may come too early for this NOTIFY.
        self._follow_ups_left[work] = FOLLOW_UPS.get(work, 1) + is_following_up
        if not is_following_up:
            self._schedule_follow_up(work)

    async def run_notifier(self, pool: Pool) -> None:
        """Send NOTIFYs to other processes, forever. A supervised service."""
        while True:
            await self._notify.wait()
            self._notify.clear()
            works, self._to_notify = sorted(self._to_notify), set()
            if not works:
                continue
            try:
                async with pool.connection() as connection:
                    await connection.execute(
                        "select pg_notify(channel, '') from unnest($1::text[]) as channel", works
                    )
            except BaseException:
                self._to_notify.update(works)
                self._notify.set()
                raise
            await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)

    def cancel_notify(self, work: Work) -> None:
        """Forget a NOTIFY that was not sent yet."""
        self._to_notify.discard(work)
        if timer := self._notify_timers.pop(work, None):
            timer.cancel()

    def remove(self, inbox: "Inbox") -> None:
        self._inboxes[inbox.work].discard(inbox)

    def _notify_now(self, work: Work) -> None:
        self.cancel_notify(work)
        self._to_notify.add(work)
        self._notify.set()

    def _wake_freed(self) -> None:
        freed, self._freed = self._freed, set()
        if freed:
            self.wake(Work.SAGAS, freed, notify=True)

    def _schedule_follow_up(self, work: Work) -> None:
        seconds = FOLLOW_UP_SECONDS / FOLLOW_UPS.get(work, 1)
        asyncio.get_running_loop().call_later(seconds, self._follow_up, work)

    def _follow_up(self, work: Work) -> None:
        self.wake(work, search=True)
        self._follow_ups_left[work] -= 1
        if self._follow_ups_left[work]:
            self._schedule_follow_up(work)
        else:
            del self._follow_ups_left[work]


class Inbox:
    """The wake-ups for one consumer. A wake-up that arrives before `wait` counts.

    `with inbox:` says that the consumer runs and calls `handled_here`. Without it, the consumer counts as
    running only while it waits. Only the single consumer of a kind of work may call `handled_here`: events
    have several.
    """

    def __init__(self, wakeups: WakeUps, work: Work) -> None:
        self.work: Final = work
        self._wakeups = wakeups
        self._ids: dict[int, None] = {}
        self._is_woken = False
        self._must_search = False
        self._is_running = False
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        self._is_running = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_running = False

    @property
    def is_attended(self) -> bool:
        return self._is_running or self._waiter is not None

    @property
    def has_ids(self) -> bool:
        return bool(self._ids)

    def put(self, ids: Collection[int], *, search: bool) -> None:
        """Store a wake-up, and end the wait."""
        self._is_woken = True
        self._must_search |= search
        for row_id in ids:
            if len(self._ids) >= MAX_IDS:
                self._must_search = True
                break
            self._ids[row_id] = None
        _resolve(self._waiter)

    def take(self, limit: int = MAX_IDS) -> list[int]:
        """Remove and return up to `limit` ids, oldest first."""
        if len(self._ids) <= limit:
            taken, self._ids = list(self._ids), {}
            return taken
        taken = [row_id for row_id, _ in zip(self._ids, range(limit), strict=False)]
        for row_id in taken:
            del self._ids[row_id]
        return taken

    def handled_here(self) -> None:
        """Cancel the pending NOTIFY: this consumer has all known work in hand.

        If the consumer then fails, it restarts with a search, and other processes find the work by polling.
        """
        self._wakeups.cancel_notify(self.work)

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait for a wake-up or the timeout. Returns whether to search for work that no id names."""
        if not self._is_woken:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_seconds, _resolve, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        must_search, self._must_search, self._is_woken = self._must_search, False, False
        return must_search

    async def rest(self, at_least_seconds: float, at_most_seconds: float) -> None:
        """Sleep for the first time, then wait for a wake-up until the second, however many come."""
        await asyncio.sleep(at_least_seconds)
        await self.wait(max(0.0, at_most_seconds - at_least_seconds))

    def close(self) -> None:
        self._wakeups.remove(self)


class Listener:
    """Listens for NOTIFY from other processes, on a connection of its own, until it is cancelled.

    A connection that is cut off receives nothing and reports nothing. So it is checked every few seconds,
    with a timeout, whether it still listens. Where LISTEN does not work (behind PgBouncer in transaction
    mode) the daemon relies on polling, and logs that once.
    """

    def __init__(self, dsn: str, pool: Pool, wakeups: WakeUps) -> None:
        self._dsn = dsn
        self._pool = pool
        self._wakeups = wakeups
        self._has_warned = False

    async def run(self) -> None:
        """Listen; a lost connection raises, and the supervisor restarts this service."""
        while True:
            try:
                await self._listen()
            except DatabaseUnavailable as error:
                # The heartbeat notices a stalled server before a call through the pool runs into its timeout.
                self._pool.report_unavailable(error)
                raise
            if not self._has_warned:
                self._has_warned = True
                log.warning("LISTEN has no effect on this connection (is it pooled?): relying on polling")
            await asyncio.sleep(NO_LISTEN_INTERVAL_SECONDS)

    async def _listen(self) -> None:
        """Listen until the connection is lost, or turns out not to listen."""
        async with connected(self._dsn) as connection:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_SECONDS):
                for work in Work:
                    await connection.add_listener(work.value, self._notified)
            # Notifications sent before this point were missed.
            self._wakeups.wake_all()
            while await self._still_listens(connection):  # noqa: ASYNC110  the server is polled, not a variable
                await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)

    async def _still_listens(self, connection: Connection) -> bool:
        with translated():
            try:
                channels = await asyncio.wait_for(
                    connection.fetchval("select array(select pg_listening_channels())"),
                    HEARTBEAT_TIMEOUT_SECONDS,
                )
            except TimeoutError as error:
                raise DatabaseUnavailable("the listener's connection does not answer") from error
        return set(channels) >= set(Work)

    def _notified(self, _: object, process_id: int, channel: str, __: object) -> None:
        # Wake-ups from this process were delivered through memory.
        if not self._pool.has_process(process_id):
            self._wakeups.received(Work(channel))


def _resolve(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
