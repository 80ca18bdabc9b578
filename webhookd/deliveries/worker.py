"""The delivery stage: claims as many jobs as it has free slots, loads them, sends each in a task of its own.

Wakes on JOBS and on a slot that became free. Never leases more than it can start now: the lease runs.

The next claim is made while the last one's requests are under way. One claim for all slots was a procession:
on a busy loop its requests ended at about the same time, and then nothing was under way until the next claim
and its payloads had come (in 4 of 5 looks).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Final, NamedTuple

import anyio

from webhookd.core.errors import WebhookdError
from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.deliveries import attempts as jobs
from webhookd.deliveries.attempts import Delivery, Lease
from webhookd.deliveries.payloads import Loaded, load
from webhookd.deliveries.reporter import Finished, Reporter
from webhookd.deliveries.sender import Sender, too_late, unreadable
from webhookd.deliveries.slots import Room, Slots
from webhookd.hints import Hints
from webhookd.outbound.client import GuardedClient
from webhookd.wakeups import Bells, Work

log = logging.getLogger(__name__)

# One claim's size: enough to be cheap for each, small enough that the last of it starts at once; and a part
# of the slots, so that others are under way meanwhile.
MAX_CLAIM = 200
CLAIM_PART = 4
# Claims whose payloads are under way, each of which may bring 32 MiB before the slots know of them, or whose
# requests are not all begun.
MAX_LOADING = 2
# Requests begun in one turn of the loop. All of a claim's at once were 10 ms in which nobody heard the
# database's answers, and then every stage asked it at the same time: in 44 of 100 looks none of its processes
# ran beside ours, and in 15 ours waited for several. In pairs of runs with ten subscriptions 1.05 to 1.28
# times as many a second with 16; with one, whose claims are small, 0.90 with 16 and 0.94 with 32.
BEGUN_AT_ONCE = 32
# How much longer than a claim that may be in vain is the rest before the next such: from the beginning,
# however often others ring; and for the last slots, where it finds nothing while nobody has few.
REST = 10


class Claimed(NamedTuple):
    """Leases of one claim, and when it was asked for."""

    leases: list[Lease]
    asked_at: float


class Worker:
    """Delivers until it is cancelled; `drain` ends it in order."""

    def __init__(
        self,
        pool: Pool,
        bells: Bells,
        client: GuardedClient,
        reporter: Reporter,
        hints: Hints,
        metrics: Metrics,
        settings: Callable[[], Settings],
        worker_id: str,
    ) -> None:
        self._pool = pool
        self._bells = bells
        self._hints = hints
        self._sender = Sender(client, metrics, settings, worker_id)
        self._reporter = reporter
        self._metrics = metrics
        self._settings = settings
        self._worker_id = worker_id
        self._slots = Slots()
        self._loading: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._claiming: Final = asyncio.Lock()
        self._leaves_out = False
        # Claimed, and the connection was lost before they were loaded: tried again while there is time.
        self._unloaded: list[Claimed] = []
        self._draining = False
        self._mark = 0
        # When the next claim may be made, and the next for the last slots.
        self._few_at = self._last_at = 0.0

    @property
    def in_flight(self) -> int:
        return self._slots.in_flight

    async def run(self) -> None:
        """Claim and send: again at once while there is more and room for it, else when woken.

        A job that was reset, released or committed late lies behind the mark. So the mark is dropped when
        somebody rings who is not our orchestrator, the reaper above all, and once every poll interval.
        """
        loop = asyncio.get_running_loop()
        look_back = False
        drop_at = look_back_at = loop.time()
        while not self._draining:
            while self._unloaded:
                await self._load_again(self._unloaded[-1])
            began = loop.time()
            if anew := began >= drop_at or (look_back and began >= look_back_at):
                self._mark, look_back, dropped_at = 0, False, began
            drop_at = dropped_at + self._settings().services.poll_interval_seconds
            wake_at = min(drop_at, await self.run_once())
            if anew:
                look_back_at = loop.time() + REST * (loop.time() - began)
            if look_back:
                wake_at = min(wake_at, look_back_at)
            look_back |= bool(
                await self._bells.wait(Work.JOBS, timeout_seconds=max(0.0, wake_at - loop.time()))
            )

    async def run_once(self) -> float:
        """One claim, if there is room for it; when to come again, if nobody rings before."""
        loop = asyncio.get_running_loop()
        settings = self._settings().delivery
        self._metrics.in_flight_limit.set(settings.concurrency)
        room = self._slots.room(settings.concurrency, settings.subscription_concurrency)
        self._leaves_out = room.leaves_out
        is_behind = len(self._loading) >= MAX_LOADING or self._reporter.waiting > settings.concurrency
        if is_behind or not room.wanted:
            return float("inf")  # who ends rings
        most = max(1, min(MAX_CLAIM, settings.concurrency // CLAIM_PART))
        wanted = min(room.wanted, most)
        began = loop.time()
        not_before = self._last_at if room.is_last else self._few_at
        if began < not_before:
            return not_before
        async with self._claiming:
            claimed = 0 if self._draining else await self._claim(room, wanted)
        self._hints.is_hungry = claimed < wanted and not room.is_last
        ended = loop.time()
        # A claim for a few costs as much as one for many: while another would last, they may become many.
        # Not for longer than the poll interval, however long the database was stalled.
        most_seconds = self._settings().services.poll_interval_seconds
        few_at = ended + (min(ended - began, most_seconds) if 2 * claimed < most else 0)
        last_at = ended + (0 if claimed else min(REST * (ended - began), most_seconds))
        # What it claimed may have come too late, and asks for a longer rest.
        self._few_at, self._last_at = max(few_at, self._few_at), max(last_at, self._last_at)
        # Not only after a full one: some of what it saw may have had no slot left, and stood before others.
        return ended if claimed else float("inf")

    async def _claim(self, room: Room, wanted: int) -> int:
        asked_at = time.monotonic()
        async with self._pool.connection() as connection:
            claims = await jobs.claim(
                connection,
                self._worker_id,
                wanted,
                self._settings().delivery.lease_seconds,
                room.limit_of_one,
                room.busy,
                self._mark,
            )
            if not claims:
                return 0
            self._mark = claims[0].lease.resume_from
            for lease, _ in claims:
                self._slots.take(lease.subscription_id)
            self._metrics.in_flight.set(self._slots.in_flight)
            # Before the connection is given back, which takes a turn of the loop, and may fail.
            loaded: Loaded = {lease.job_id: delivery for lease, delivery in claims if delivery is not None}
            small = [lease for lease, delivery in claims if delivery is not None]
            if unused := self._begin(Claimed(small, asked_at), loaded):
                _start(self._give_up(unused), self._loading, self._loaded)
            if large := [lease for lease, delivery in claims if delivery is None]:
                _start(self._load(Claimed(large, asked_at)), self._loading, self._loaded)
        return len(claims)

    def _loaded(self) -> None:
        """There is room for another claim's payloads."""
        self._bells.ring_here(Work.JOBS, hinted=True)

    async def _load(self, claimed: Claimed) -> None:
        """Fetch what is to be sent, and begin to send it."""
        try:
            deliveries = await load(self._pool, claimed.leases)
        except Exception as error:  # the loop tries it again, and if that fails the supervisor hears of it
            log.warning("%d leases were not loaded, and will be once more: %s", len(claimed.leases), error)
            self._unloaded.append(claimed)
        else:
            await self._give_up(self._begin(claimed, deliveries))

    async def _load_again(self, claimed: Claimed) -> None:
        async with self._claiming:
            if claimed not in self._unloaded:  # drained meanwhile
                return
            deliveries = await load(self._pool, claimed.leases)
            self._unloaded.remove(claimed)
            await self._give_up(self._begin(claimed, deliveries))

    def _begin(self, claimed: Claimed, deliveries: Loaded) -> list[Lease]:
        """Begin to send, and return the leases that are of no use.

        Too late, more payload than is loaded at once, or lost between the two statements.
        """
        leases, asked_at = claimed
        settings = self._settings()
        if leases and too_late(leases[0], asked_at, settings.delivery.timeout_seconds):
            log.warning("too late to send: the leases may end first", extra={"jobs": len(leases)})
            deliveries = {}
        readable: list[tuple[Lease, Delivery]] = []
        for lease in leases:
            if delivery := deliveries.get(lease.job_id):
                self._slots.hold(lease.subscription_id, len(delivery.payload))
                readable.append((lease, delivery))
            elif lease.job_id in deliveries:
                self._slots.give_back(lease.subscription_id)
                self._reporter.put(Finished(lease, unreadable(lease)))
        self._send(readable[:BEGUN_AT_ONCE], asked_at)
        if further := readable[BEGUN_AT_ONCE:]:
            _start(self._send_further(further, asked_at), self._loading, self._loaded)
        if leases and not deliveries:
            # They would only be left out again: not at once.
            loop = asyncio.get_running_loop()
            self._few_at = self._last_at = loop.time() + settings.services.poll_interval_seconds
        return [lease for lease in leases if lease.job_id not in deliveries]

    def _send(self, readable: list[tuple[Lease, Delivery]], asked_at: float) -> None:
        for lease, delivery in readable:
            _start(self._deliver(lease, delivery, asked_at), self._sending)

    async def _send_further(self, readable: list[tuple[Lease, Delivery]], asked_at: float) -> None:
        for start in range(0, len(readable), BEGUN_AT_ONCE):
            await asyncio.sleep(0)
            self._send(readable[start : start + BEGUN_AT_ONCE], asked_at)

    async def drain(self, grace_seconds: float) -> None:
        """Take no more; let what is under way end, and its report. What does not keeps its lease."""
        self._draining = True
        self._bells.ring_here(Work.JOBS, hinted=True)
        with anyio.move_on_after(grace_seconds):
            async with self._claiming:
                # A claim under way has ended, and what it got is sent; unless its connection was lost.
                while self._loading:
                    await asyncio.wait(self._loading)
                unloaded, self._unloaded = self._unloaded, []
                await self._give_up([lease for claimed in unloaded for lease in claimed.leases])
            while self._sending:
                await asyncio.wait(self._sending)
            await self._reporter.drained()
        for task in self._loading | self._sending:
            task.cancel()

    async def _give_up(self, leases: list[Lease]) -> None:
        """Leases that are not used, and their slots. If it fails they expire, and the reaper has them."""
        if not leases:
            return
        for lease in leases:
            self._slots.give_back(lease.subscription_id)
        self._metrics.in_flight.set(self._slots.in_flight)
        await self._hand_back(leases)
        # A later claim's mark has passed them.
        self._mark = min(self._mark, *(lease.job_id for lease in leases))

    async def _hand_back(self, leases: list[Lease]) -> None:
        try:
            async with self._pool.connection() as connection:
                released = await jobs.release(connection, leases)
        except WebhookdError as error:
            log.warning("%d leases were not handed back: %s", len(leases), error)
        else:
            self._metrics.leases_released.inc(len(released))

    async def _deliver(self, lease: Lease, delivery: Delivery, asked_at: float) -> None:
        """One request, and its report. The slot is held until the report is handed over."""
        try:
            report = await self._sender.send(lease, delivery, asked_at)
            if report is None:
                await self._hand_back([lease])
            else:
                self._reporter.put(Finished(lease, report, delivery.correlation_id))
        finally:
            self._slots.give_back(lease.subscription_id, len(delivery.payload))
            self._metrics.in_flight.set(self._slots.in_flight)
            if self._leaves_out:
                # Jobs may wait for this slot alone, and nobody else rings for them.
                self._bells.ring_here(Work.JOBS, hinted=True)


def _start(
    work: Coroutine[object, object, None],
    tasks: set[asyncio.Task[None]],
    ended: Callable[[], None] | None = None,
) -> None:
    """Keep a task among others until it has ended; then say so."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    if ended is not None:
        task.add_done_callback(lambda _: ended())
