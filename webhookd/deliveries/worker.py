"""The delivery stage: claims as many attempts as it has free slots, sends them, and reports their outcomes.

Woken by ATTEMPTS and by a slot that became free. Never leases more than it can start now, because the lease
runs. The next claim is made while the requests of the last one are in flight. With one claim for all slots,
on a busy event loop all requests ended at about the same time, and then nothing was in flight until the next
claim and its payloads had arrived (in 4 of 5 samples).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final, NamedTuple

import anyio

from webhookd.context import Context
from webhookd.core.errors import WebhookdError
from webhookd.deliveries import attempts
from webhookd.deliveries.attempts import Claimed, Lease, Message, Messages, load_messages
from webhookd.deliveries.pacing import NEVER, ClaimPacing
from webhookd.deliveries.reporter import Finished, Reporter
from webhookd.deliveries.sender import Sender, database_time, is_too_late, unreadable
from webhookd.deliveries.slots import Room, Slots
from webhookd.outbound.client import GuardedClient, Sending
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.wakeups import Work

log = logging.getLogger(__name__)

# The largest claim: large enough to be cheap per attempt, small enough that its last request starts at once,
# and a part of the slots, so that other requests are in flight meanwhile.
MAX_CLAIM = 200
CLAIM_SHARE = 4
# Claims whose messages are being loaded (each may bring 32 MiB before the slots count them), or whose
# requests have not all started.
MAX_LOADING = 2
# Requests started in one turn of the event loop. Starting all of a claim at once took 10 ms in which no
# answer of the database was read, and then all stages called it at the same time: in 44 of 100 samples none
# of its processes ran beside ours, and in 15 we waited for several. With 16, pairs of runs with ten
# subscriptions delivered 1.05 to 1.28 times as much; with one subscription, whose claims are small, 0.90 with
# 16 and 0.94 with 32.
STARTED_AT_ONCE = 32


class LeaseBatch(NamedTuple):
    """The leases of one claim, and the time before it was sent."""

    leases: list[Lease]
    asked_at: float


class Worker:
    """Delivers until it is cancelled; `drain` ends it in order."""

    def __init__(self, context: Context, client: GuardedClient, reporter: Reporter) -> None:
        self._context = context
        self._inbox = context.wakeups.inbox(Work.ATTEMPTS)
        self._client = client
        self._sender = Sender(context)
        self._reporter = reporter
        self._slots = Slots()
        context.metrics.in_flight.set_function(lambda: self._slots.in_flight)
        self._pacing = ClaimPacing()
        self.next_job_id = 0
        self._loading: set[asyncio.Task[None]] = set()
        self._sending: set[Sending] = set()
        self._all_sent: Final = asyncio.Event()  # set while draining, when the last request has ended
        self.claiming: Final = asyncio.Lock()
        self._wants_to_claim = False
        self._leaves_out = False
        # Leases whose messages could not be loaded because the connection was lost: tried again while there
        # is time.
        self._unloaded: list[LeaseBatch] = []
        self._draining = False

    @property
    def in_flight(self) -> int:
        return self._slots.in_flight

    async def run(self) -> None:
        """Claim and send again at once while there is work and room for it, then wait for a wake-up."""
        loop = asyncio.get_running_loop()
        self._pacing.start()
        while not self._draining:
            while self._unloaded:
                await self._load_again(self._unloaded[-1])
            began = loop.time()
            restarts = self._pacing.restart_due(began, self._poll_interval_seconds)
            next_claim_at = await self.run_once(restarts=restarts)
            if restarts:
                self._pacing.restarted(began, loop.time())
            wake_at = self._pacing.wake_at(next_claim_at, self._poll_interval_seconds)
            if await self._inbox.wait(max(0.0, wake_at - loop.time())):
                self._pacing.request_restart()

    async def run_once(self, *, restarts: bool = False) -> float:
        """Make one claim if there is room for it; returns when to try again if no wake-up comes before."""
        loop = asyncio.get_running_loop()
        self._wants_to_claim = True
        async with self.claiming:
            self._wants_to_claim = False
            # Under the lock: the short path may have used the room and moved the mark while this waited.
            if restarts:
                self.next_job_id = 0
            room = self.room()
            if room is None:
                return NEVER  # a load, report or request that ends wakes us
            began = loop.time()
            next_claim_at = self._pacing.next_claim_at(only_reserved=room.only_reserved)
            if began < next_claim_at:
                return next_claim_at
            largest_claim = max(
                1, min(MAX_CLAIM, self._context.settings().delivery.concurrency // CLAIM_SHARE)
            )
            wanted = min(room.wanted, largest_claim)
            claimed = await self._claim(room, wanted)
        self._context.wakeups.has_free_slots = claimed < wanted and not room.only_reserved
        ended = loop.time()
        self._pacing.claimed(
            claimed,
            began,
            ended,
            largest_claim=largest_claim,
            poll_interval_seconds=self._poll_interval_seconds,
        )
        # Not only after a full claim: attempts without a free slot may have stood in front of others.
        return ended if claimed else NEVER

    @property
    def may_claim(self) -> bool:
        """Whether a claim beside `run` would neither wait for one nor come too early after one."""
        is_busy = self._wants_to_claim or self.claiming.locked()
        next_claim_at = self._pacing.next_claim_at(only_reserved=False)
        return not is_busy and asyncio.get_running_loop().time() >= next_claim_at

    def room(self) -> Room | None:
        """Return what may be claimed now; None if nothing. Call it, claim and accept while `claiming`."""
        settings = self._context.settings().delivery
        self._context.metrics.in_flight_limit.set(settings.concurrency)
        room = self._slots.room(settings.concurrency, settings.subscription_concurrency)
        self._leaves_out = room.leaves_out
        is_behind = len(self._loading) >= MAX_LOADING or self._reporter.is_behind
        return None if self._draining or is_behind or not room.wanted else room

    @property
    def _poll_interval_seconds(self) -> float:
        return self._context.settings().services.poll_interval_seconds

    async def _claim(self, room: Room, wanted: int) -> int:
        asked_at = time.monotonic()
        async with self._context.pool.connection() as connection:
            claims = await attempts.claim(
                connection,
                self._context.worker_id,
                wanted,
                self._context.settings().delivery.lease_seconds,
                room.subscription_limit,
                room.in_use,
                self.next_job_id,
            )
            # Before the connection is given back, which takes a turn of the event loop and may fail.
            self.accept(claims, asked_at)
        return len(claims)

    def accept(self, claims: list[Claimed], asked_at: float) -> None:
        """Start sending what was claimed. `asked_at` is before the claim was sent."""
        if not claims:
            return
        self.next_job_id = claims[0].lease.resume_from
        for lease, _ in claims:
            self._slots.take(lease.subscription_id)
        messages: Messages = {lease.job_id: message for lease, message in claims if message is not None}
        small = [lease for lease, message in claims if message is not None and lease.callback_url]
        unused = self._start_sending(LeaseBatch(small, asked_at), messages)
        unused += [lease for lease, _ in claims if not lease.callback_url]
        if unused:
            _start(self._give_up(unused), self._loading, self._load_ended)
        if large := [lease for lease, message in claims if message is None and lease.callback_url]:
            _start(self._load(LeaseBatch(large, asked_at)), self._loading, self._load_ended)

    def _load_ended(self) -> None:
        self._context.wakeups.wake(Work.ATTEMPTS)

    async def _load(self, batch: LeaseBatch) -> None:
        """Load the messages and start sending them."""
        try:
            messages = await load_messages(self._context.pool, batch.leases)
        except (
            Exception
        ) as error:  # run() tries again; if that fails too, the supervisor restarts the service
            log.warning("loading %d messages failed, trying again: %s", len(batch.leases), error)
            self._unloaded.append(batch)
        else:
            await self._give_up(self._start_sending(batch, messages))

    async def _load_again(self, batch: LeaseBatch) -> None:
        async with self.claiming:
            if batch not in self._unloaded:  # given up by drain() meanwhile
                return
            messages = await load_messages(self._context.pool, batch.leases)
            self._unloaded.remove(batch)
            await self._give_up(self._start_sending(batch, messages))

    def _start_sending(self, batch: LeaseBatch, messages: Messages) -> list[Lease]:
        """Start the requests, and return the leases that cannot be used.

        Those are too close to their end, exceeded the size limit of one load, or were lost between the
        statements.
        """
        leases, asked_at = batch
        settings = self._context.settings()
        if leases and is_too_late(leases[0], asked_at, settings.delivery.timeout_seconds):
            log.warning("%d attempts returned unsent: too little time left on their leases", len(leases))
            messages = {}
        readable: list[tuple[Lease, Message]] = []
        for lease in leases:
            if message := messages.get(lease.job_id):
                self._slots.hold_payload(lease.subscription_id, len(message.payload))
                readable.append((lease, message))
            elif lease.job_id in messages:
                self._slots.release(lease.subscription_id)
                self._reporter.put(Finished(lease, unreadable(lease)))
        if readable:
            self._send(readable[:STARTED_AT_ONCE], asked_at)
        if rest := readable[STARTED_AT_ONCE:]:
            _start(self._send_rest(rest, asked_at), self._loading, self._load_ended)
        if leases and not messages:
            # A new claim now would lease the same attempts again.
            self._pacing.pause(asyncio.get_running_loop().time() + settings.services.poll_interval_seconds)
        return [lease for lease in leases if lease.job_id not in messages]

    def _send(self, readable: list[tuple[Lease, Message]], asked_at: float) -> None:
        """Start requests of one claim; each of them ends in _ended."""
        timeout_seconds = self._context.settings().delivery.timeout_seconds
        # Checked again right before sending: this process may have been suspended since the claim.
        if is_too_late(readable[0][0], asked_at, timeout_seconds):
            log.warning("%d attempts not sent: their leases may expire first", len(readable))
            for lease, message in readable:
                self._slots.release(lease.subscription_id, len(message.payload))
            unsent = [lease for lease, _ in readable]
            _start(self._release(unsent), self._loading, self._load_ended)
            return
        timestamp = database_time(readable[0][0], asked_at)
        for lease, message in readable:
            if request := self._sender.request(lease, message, timestamp):
                on_outcome = partial(self._ended, lease, message)
                self._sending.add(self._client.send(request, timeout_seconds, on_outcome))
            else:
                self._report(lease, message, Outcome(None, Failure.INTERNAL.value, 0))

    async def _send_rest(self, readable: list[tuple[Lease, Message]], asked_at: float) -> None:
        for start in range(0, len(readable), STARTED_AT_ONCE):
            await asyncio.sleep(0)
            self._send(readable[start : start + STARTED_AT_ONCE], asked_at)

    async def drain(self, grace_seconds: float) -> None:
        """Stop claiming; let requests in flight and their reports finish. The others keep their lease."""
        self._draining = True
        self._context.wakeups.wake(Work.ATTEMPTS)
        with anyio.move_on_after(grace_seconds):
            async with self.claiming:
                # A claim in progress has ended and its requests are sent, unless the connection was lost.
                while self._loading:
                    await asyncio.wait(self._loading)
                unloaded, self._unloaded = self._unloaded, []
                await self._give_up([lease for batch in unloaded for lease in batch.leases])
            while self._sending:
                self._all_sent.clear()
                await self._all_sent.wait()
            await self._reporter.drained()
        for task in self._loading:
            task.cancel()
        for sending in self._sending:
            sending.cancel()

    async def _give_up(self, leases: list[Lease]) -> None:
        """Release unused leases and their slots. If that fails they expire, and the reaper resets them."""
        if not leases:
            return
        for lease in leases:
            self._slots.release(lease.subscription_id)
        await self._release(leases)
        # A later claim may already have moved the mark past them.
        self.next_job_id = min(self.next_job_id, *(lease.job_id for lease in leases))

    async def _release(self, leases: list[Lease]) -> None:
        try:
            async with self._context.pool.connection() as connection:
                released = await attempts.release(connection, leases)
        except WebhookdError as error:
            log.warning("cannot release %d leases: %s", len(leases), error)
        else:
            self._context.metrics.leases_released.inc(len(released))

    def _ended(self, lease: Lease, message: Message, sending: Sending, outcome: Outcome) -> None:
        self._sending.discard(sending)
        if self._draining and not self._sending:
            self._all_sent.set()
        self._report(lease, message, outcome)

    def _report(self, lease: Lease, message: Message, outcome: Outcome) -> None:
        """Report one outcome. The slot is in use until the report is handed over."""
        try:
            report = self._sender.report(lease, message, outcome)
            self._reporter.put(Finished(lease, report, message.correlation_id))
        finally:
            self._slots.release(lease.subscription_id, len(message.payload))
            if self._leaves_out:
                # Attempts may be waiting for exactly this slot, and no other wake-up comes for them.
                self._context.wakeups.wake(Work.ATTEMPTS)


def _start(
    work: Coroutine[object, object, None],
    tasks: set[asyncio.Task[None]],
    on_end: Callable[[], None],
) -> None:
    """Run a coroutine as a task that stays in the set until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(lambda _: on_end())
