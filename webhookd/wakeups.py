"""Wake-ups: one bell a kind of work, rung in memory at once and across processes by NOTIFY.

A bell is a hint. Whoever waits for one also looks by itself every poll interval, so a lost ring costs time
and nothing else.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from webhookd.db.pool import Pool

# NOTIFY takes a lock on the whole cluster at commit: one at once or soon, see `ring`, then at most so often.
NOTIFY_INTERVAL_SECONDS = 0.1
# An application's session notifies at most every 50 ms (schema/deliveries/guards.sql): after a ring from
# outside, what came in its shadow is there by then. Events are looked for in between, too: one after another
# from one session, all but the first would else wait for the end of the shadow.
SHADOW_SECONDS = 0.06


class Work(StrEnum):
    """What there is to do. The value is the channel's name."""

    EVENTS = "webhookd_events"  # to be routed
    SAGAS = "webhookd_sagas"  # due, to be started
    JOBS = "webhookd_jobs"  # pending, to be claimed
    RESULTS = "webhookd_results"  # reported, to be applied
    LEASES = "webhookd_leases"  # perhaps lost, to be looked for before their time


# How often one looks into the shadow of a ring; of the others' work once, at its end.
SHADOW_LOOKS = {Work.EVENTS: 8}


class Bells:
    """All bells of a process."""

    def __init__(self) -> None:
        self._rung: Final[set[Work]] = set()
        self._unhinted: Final[set[Work]] = set()
        self._waiting: Final[dict[Work, set[asyncio.Future[None]]]] = {work: set() for work in Work}
        self._ears: Final[dict[Work, set[Ear]]] = {work: set() for work in Work}
        self._looks_left: Final[dict[Work, int]] = {}
        self._served: Final[set[Work]] = set()
        self._to_announce: set[Work] = set()
        self._announce: Final = asyncio.Event()
        # What others are told of when its time has come, unless it is taken by then.
        self._to_announce_later: Final[dict[Work, asyncio.TimerHandle]] = {}

    def ring(self, work: Work, *, hinted: bool = False) -> None:
        """There is work: wake who does it here, and let the others be told.

        At once where nobody here waits for it or serves it. Else later: it will be taken by then, or is too
        much for one. A NOTIFY is a commit, and the next stage would wait for the disk behind it.
        """
        is_done_here = bool(self._waiting[work]) or work in self._served
        self.ring_here(work, hinted=hinted)
        if not is_done_here:
            self._announce_now(work)
        elif work not in self._to_announce_later:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(NOTIFY_INTERVAL_SECONDS, self._announce_now, work)
            self._to_announce_later[work] = timer

    def _announce_now(self, work: Work) -> None:
        self._forget_timer(work)
        self._to_announce.add(work)
        self._announce.set()

    def _forget_timer(self, work: Work) -> None:
        if timer := self._to_announce_later.pop(work, None):
            timer.cancel()

    def ring_here(self, work: Work, *, hinted: bool = False) -> None:
        """There is work, and others know of it by themselves. Hinted: who does it was told which (Hints)."""
        self._rung.add(work)
        if not hinted:
            self._unhinted.add(work)
        for waiter in self._waiting[work]:
            _wake(waiter)
        for ear in self._ears[work]:
            ear.hear()

    @contextmanager
    def serving(self, work: Work) -> Iterator[None]:
        """Somebody here does such work, also when he does not wait for it, and says what is `taken`.

        If he fails, he begins anew with a look at everything, and others find by polling what he took. To
        tell them was a call more, mostly on a database that is away.
        """
        self._served.add(work)
        try:
            yield
        finally:
            self._served.discard(work)

    def taken(self, work: Work) -> None:
        """All that was hinted at is in hand. Others who were told would ask the database in vain."""
        self._forget_timer(work)
        self._to_announce.discard(work)

    def ring_all_here(self) -> None:
        """Rings may have been lost, or the settings are others: let everybody look."""
        for work in Work:
            self.ring_here(work)

    def hear(self, work: Work) -> None:
        """Another process rang: wake who does it here; and again for what comes in its shadow."""
        self.ring_here(work)
        is_looked_into = work in self._looks_left
        # One more where the next comes sooner than its share of the shadow.
        self._looks_left[work] = SHADOW_LOOKS.get(work, 1) + is_looked_into
        if not is_looked_into:
            self._look_later(work)

    def _look_later(self, work: Work) -> None:
        seconds = SHADOW_SECONDS / SHADOW_LOOKS.get(work, 1)
        asyncio.get_running_loop().call_later(seconds, self._look_into_shadow, work)

    def _look_into_shadow(self, work: Work) -> None:
        self.ring_here(work)
        self._looks_left[work] -= 1
        if self._looks_left[work]:
            self._look_later(work)
        else:
            del self._looks_left[work]

    @contextmanager
    def overhearing(self, work: Work) -> Iterator["Ear"]:
        """An ear of one's own: `wait` takes a ring from all who wait by it, and this takes it from nobody."""
        ear = Ear()
        self._ears[work].add(ear)
        try:
            yield ear
        finally:
            self._ears[work].discard(ear)

    async def wait(self, *works: Work, timeout_seconds: float) -> set[Work]:
        """Until one of these is rung, or the time is over. A ring from before the call counts.

        Returns those that somebody rang without a hint: what there is to do must be searched for, whatever
        others hinted at meanwhile.
        """
        if self._rung.isdisjoint(works):
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            too_late = loop.call_later(timeout_seconds, _wake, waiter)
            for work in works:
                self._waiting[work].add(waiter)
            try:
                await waiter
            finally:
                too_late.cancel()
                for work in works:
                    self._waiting[work].discard(waiter)
        self._rung.difference_update(works)
        unhinted = self._unhinted.intersection(works)
        self._unhinted.difference_update(unhinted)
        return unhinted

    @property
    def to_announce(self) -> set[Work]:
        """What other processes are to be told of now."""
        return set(self._to_announce)

    def will_announce(self, work: Work) -> bool:
        """Whether other processes are told of it, now or unless it is taken."""
        return work in self._to_announce or work in self._to_announce_later

    async def announce(self, pool: Pool) -> None:
        """Tell other processes of what was rung here, for ever. A supervised service."""
        while True:
            await self._announce.wait()
            self._announce.clear()
            works, self._to_announce = sorted(self._to_announce), set()
            if not works:
                continue
            try:
                async with pool.connection() as connection:
                    await connection.execute(
                        "select pg_notify(channel, '') from unnest($1::text[]) as channel", works
                    )
            except BaseException:
                self._to_announce.update(works)
                self._announce.set()
                raise
            await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)


class Ear:
    """Hears every ring since it last waited."""

    def __init__(self) -> None:
        self._heard: Final = asyncio.Event()

    def hear(self) -> None:
        self._heard.set()

    async def rest(self, at_least_seconds: float, at_most_seconds: float) -> None:
        """Until there was a ring, or the time is over; however often it rings, for at least so long."""
        await asyncio.sleep(at_least_seconds)
        try:
            async with asyncio.timeout(max(0.0, at_most_seconds - at_least_seconds)):
                await self._heard.wait()
        except TimeoutError:
            return
        self._heard.clear()


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
