"""The delivery stage: claims as many jobs as it has free slots, sends each in a task of its own.

Wakes on JOBS and on a slot that became free. Never leases more than it can start now: the lease runs.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import anyio

from webhookd.config.settings import Settings
from webhookd.delivery.reporter import Finished, Reporter
from webhookd.delivery.request import build_request
from webhookd.delivery.slots import Room, Slots
from webhookd.model.errors import WebhookdError
from webhookd.observe.metrics import Metrics
from webhookd.outbound.client import GuardedClient
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.store import jobs
from webhookd.store.bells import Bells, Work
from webhookd.store.jobs import Delivery, Lease, Report
from webhookd.store.pool import Pool

log = logging.getLogger(__name__)

# One claim's size: enough to be cheap for each, small enough that the last of it starts at once.
MAX_CLAIM = 200
# How much longer than a claim from the beginning is the rest before the next, however often others ring.
REST = 10


class Worker:
    """Delivers until it is cancelled; `drain` ends it in order."""

    def __init__(
        self,
        pool: Pool,
        bells: Bells,
        client: GuardedClient,
        reporter: Reporter,
        metrics: Metrics,
        settings: Callable[[], Settings],
        worker_id: str,
    ) -> None:
        self._pool = pool
        self._bells = bells
        self._client = client
        self._reporter = reporter
        self._metrics = metrics
        self._settings = settings
        self._worker_id = worker_id
        self._slots = Slots()
        self._sending: set[asyncio.Task[None]] = set()
        self._claiming: Final = asyncio.Lock()
        self._leaves_out = False
        # Claimed and not loaded yet: a connection lost between the two does not cost them their lease's time.
        self._unsent: tuple[list[Lease], float] | None = None
        self._draining = False
        self._mark = 0

    @property
    def in_flight(self) -> int:
        return self._slots.in_flight

    async def run(self) -> None:
        """Claim and send: again at once while claims are full, else when woken.

        A job that was reset, released or committed late lies behind the mark. So the mark is dropped when
        somebody rings who is not our orchestrator, the reaper above all, and once every poll interval.
        """
        loop = asyncio.get_running_loop()
        look_back = False
        drop_at = look_back_at = loop.time()
        while not self._draining:
            began = loop.time()
            if anew := began >= drop_at or (look_back and began >= look_back_at):
                self._mark, look_back, dropped_at = 0, False, began
            drop_at = dropped_at + self._settings().services.poll_interval_seconds
            settings = self._settings().delivery
            self._metrics.in_flight_limit.set(settings.concurrency)
            room = self._slots.room(settings.concurrency, settings.subscription_concurrency)
            self._leaves_out = room.leaves_out
            wake_at = began
            if self._reporter.waiting > settings.concurrency or not await self.run_once(room):
                wake_at = drop_at
            if anew:
                look_back_at = loop.time() + REST * (loop.time() - began)
            if look_back:
                wake_at = min(wake_at, look_back_at)
            look_back |= bool(
                await self._bells.wait(Work.JOBS, timeout_seconds=max(0.0, wake_at - loop.time()))
            )

    async def run_once(self, room: Room) -> int:
        """One claim, sent; how many jobs it got."""
        async with self._claiming:
            return 0 if self._draining or not room.wanted else await self._claim(room)

    async def _claim(self, room: Room) -> int:
        settings = self._settings().delivery
        async with self._pool.connection() as connection:
            if not self._unsent:
                asked_at = time.monotonic()
                leases = await jobs.claim(
                    connection,
                    self._worker_id,
                    min(room.wanted, MAX_CLAIM),
                    settings.lease_seconds,
                    room.limit_of_one,
                    room.busy,
                    self._mark,
                )
                if not leases:
                    return 0
                self._mark = leases[0].resume_from
                self._unsent = (leases, asked_at)
            leases, asked_at = self._unsent
            deliveries = {delivery.job_id: delivery for delivery in await jobs.load(connection, leases)}
            self._unsent = None
            if _too_late(leases[0], asked_at, settings.timeout_seconds):
                log.warning("too late to send: the leases may end first", extra={"jobs": len(leases)})
                deliveries = {}
            for lease in leases:
                if lease.job_id in deliveries:
                    self._start(lease, deliveries[lease.job_id], asked_at)
        # Too late, more payload than is loaded at once, or lost between the two statements.
        await self._hand_back([lease for lease in leases if lease.job_id not in deliveries])
        # What was left out would only be left out again: the next claim for it waits for a ring.
        return len(deliveries)

    def _start(self, lease: Lease, delivery: Delivery, asked_at: float) -> None:
        self._slots.take(lease.subscription_id, len(delivery.payload))
        self._metrics.in_flight.set(self._slots.in_flight)
        task = asyncio.create_task(self._deliver(lease, delivery, asked_at))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def drain(self, grace_seconds: float) -> None:
        """Take no more; let what is under way end, and its report. What does not keeps its lease."""
        self._draining = True
        self._bells.ring_here(Work.JOBS, hinted=True)
        with anyio.move_on_after(grace_seconds):
            async with self._claiming:
                # A claim under way has ended, and what it got is sent; unless its connection was lost.
                leases, self._unsent = self._unsent[0] if self._unsent else [], None
                await self._hand_back(leases)
            while self._sending:
                await asyncio.wait(self._sending)
            await self._reporter.drained()
        for task in self._sending:
            task.cancel()

    async def _hand_back(self, leases: list[Lease]) -> None:
        """Leases that are not used. If it fails they expire, and the reaper has them."""
        if not leases:
            return
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
            outcome = await self._send(lease, delivery, asked_at)
            if outcome is None:
                return await self._hand_back([lease])
            self._record(lease, delivery, outcome)
            report = Report(
                lease.job_id,
                lease.lease_token,
                outcome.response_status,
                outcome.error_code,
                outcome.duration_ms,
                outcome.retry_after_seconds,
                outcome.response_excerpt,
            )
            self._reporter.put(Finished(lease, report, delivery.correlation_id))
        finally:
            self._slots.give_back(lease.subscription_id, len(delivery.payload))
            self._metrics.in_flight.set(self._slots.in_flight)
            if self._leaves_out:
                # Jobs may wait for this slot alone, and nobody else rings for them.
                self._bells.ring_here(Work.JOBS, hinted=True)

    async def _send(self, lease: Lease, delivery: Delivery, asked_at: float) -> Outcome | None:
        settings = self._settings().delivery
        # Asked once more, for this process may have been stopped meanwhile.
        if _too_late(lease, asked_at, settings.timeout_seconds):
            log.warning("too late to send: the lease may end first", extra=self._fields(lease, delivery))
            return None
        try:
            # The database's time carried forward: a host with a wrong clock signs rightly.
            now = lease.claimed_at.timestamp() + (time.monotonic() - asked_at)
            request = build_request(lease, delivery, int(now))
        except Exception:
            log.exception("a request could not be built", extra={"job_id": lease.job_id})
            return Outcome(None, Failure.INTERNAL.value, 0)
        return await self._client.post(request.url, request.headers, request.body, settings.timeout_seconds)

    def _record(self, lease: Lease, delivery: Delivery, outcome: Outcome) -> None:
        self._metrics.attempts.labels(_error_class(outcome)).inc()
        self._metrics.duration.observe(outcome.duration_ms / 1000)
        level = logging.DEBUG if outcome.delivered else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level,
                "attempt delivered" if outcome.delivered else "attempt failed",
                extra=self._fields(lease, delivery)
                | {
                    "error_code": outcome.error_code,
                    "detail": outcome.detail or None,
                    "response_status": outcome.response_status,
                    "duration_ms": outcome.duration_ms,
                },
            )

    def _fields(self, lease: Lease, delivery: Delivery) -> dict[str, object]:
        return {
            "saga_id": lease.saga_id,
            "job_id": lease.job_id,
            "event_id": lease.event_id,
            "subscription_id": lease.subscription_id,
            "attempt": lease.attempt,
            "worker_id": self._worker_id,
            "correlation_id": delivery.correlation_id,
            "lease_expiration": lease.lease_until.isoformat(),
        }


def _too_late(lease: Lease, asked_at: float, timeout_seconds: float) -> bool:
    """Whether a request begun now might outlast its lease.

    Counted from before the claim was sent, so never longer than the database counts.
    """
    lease_seconds = (lease.lease_until - lease.claimed_at).total_seconds()
    return asked_at + lease_seconds - time.monotonic() < timeout_seconds


def _error_class(outcome: Outcome) -> str:
    """The outcome as a label: an endpoint that thinks of new statuses must not make new time series."""
    if outcome.error_code is None:
        return "delivered"
    if outcome.response_status is not None:
        return f"HTTP_{outcome.response_status // 100}xx"
    return outcome.error_code
