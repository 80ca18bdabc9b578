"""The measurements of a bench, one after the other: bare POSTs, a backlog delivered, latency idle and busy.

Events go in by SQL, as an application's do; arrivals are the receiver's to tell, completions the database's.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from webhookd.core.errors import WebhookdError
from webhookd.core.settings import Settings
from webhookd.daemon.reload import client_options
from webhookd.db.pool import Pool
from webhookd.deliveries import ingest, subscriptions
from webhookd.devtools import bench_processors
from webhookd.devtools import bench_queries as bench
from webhookd.devtools.bench_processors import Processors, Sample
from webhookd.devtools.bench_receiver import BenchReceiver
from webhookd.devtools.bench_report import Latency
from webhookd.devtools.sink import BODY_START
from webhookd.devtools.temporary_daemon import TemporaryDaemon
from webhookd.outbound.client import GuardedClient
from webhookd.outbound.signatures import sign

LOOK_INTERVAL_SECONDS = 0.1
# No arrival for so long: those that were on their way have arrived.
SETTLED_SECONDS = 0.5
BATCH_EVENTS = 1000
# Longer than wake-ups are held back: each event meets an idle daemon.
IDLE_PAUSE_SECONDS = 0.1
BUSY_TICK_SECONDS = 0.01
BUSY_SHARE = 0.5
# How long the last ones may take to arrive.
ARRIVAL_TIMEOUT_SECONDS = 20.0

Progress = Callable[[int], None]


class Throughput(NamedTuple):
    """A backlog, from the first event routed to the last delivery completed, by the database's clock."""

    deliveries: int
    seconds: float
    processors: Processors | None

    @property
    def per_second(self) -> float:
        return self.deliveries / self.seconds


@dataclass
class Bench:
    """What the measurements share."""

    pool: Pool
    receiver: BenchReceiver
    subscriptions: int
    payload_bytes: int
    _ids: list[int] = field(default_factory=list)
    _generation: int = 0
    _published: int = 0

    async def subscribe(self) -> None:
        """An event type for each subscription: an event is a delivery."""
        self._generation += 1
        async with self.pool.connection() as connection:
            for number in range(self.subscriptions):
                made = await subscriptions.create(connection, self._event_type(number), self.receiver.url)
                asked = await subscriptions.begin_verification(connection, made.subscription_id)
                await subscriptions.complete_verification(connection, made.subscription_id, asked.challenge)
                self._ids.append(made.subscription_id)

    async def begin_anew(self) -> None:
        """Leave what is still to be delivered where it is: other subscriptions take over."""
        async with self.pool.connection() as connection:
            for subscription_id in self._ids:
                await subscriptions.update(connection, subscription_id, {"active": False})
        self._ids.clear()
        before, now = -1, await self.receiver.count()
        while before < now:
            await asyncio.sleep(SETTLED_SECONDS)
            before, now = now, await self.receiver.count()
        await self.subscribe()

    async def publish(self, count: int) -> None:
        """In one commit."""
        new = [
            ingest.NewEvent(self._event_type(self._published + number), self._payload())
            for number in range(count)
        ]
        self._published += count
        async with self.pool.connection() as connection:
            await ingest.publish(connection, new)

    async def publish_backlog(self, count: int, progress: Progress) -> None:
        for done in range(0, count, BATCH_EVENTS):
            await self.publish(min(BATCH_EVENTS, count - done))
            progress(min(count, done + BATCH_EVENTS))

    async def bare(self, settings: Settings, seconds: float, progress: Progress) -> float:
        """The same requests by the daemon's own client, signed, with no database: so many a second."""
        places = min(
            settings.delivery.concurrency, self.subscriptions * settings.delivery.subscription_concurrency
        )
        posted = 0

        async def post_until(ends_at: float) -> None:
            nonlocal posted
            while True:
                body, timestamp = self._payload().encode(), int(time.time())
                headers = {"webhook-signature": sign([_SECRET], "evt_0", timestamp, body)}
                outcome = await client.post(
                    self.receiver.url, headers, body, settings.delivery.timeout_seconds
                )
                if not outcome.delivered:
                    raise WebhookdError(f"a POST to {self.receiver.url} failed: {outcome.error_code}")
                posted += 1
                if time.monotonic() >= ends_at:
                    return

        async with GuardedClient(client_options(settings, frozenset())) as client:
            # Connections first: a daemon makes them once.
            await asyncio.gather(*(post_until(0) for _ in range(places)))
            posted, began_at = 0, time.monotonic()
            looking = asyncio.create_task(_report(progress, began_at))
            try:
                await asyncio.gather(*(post_until(began_at + seconds) for _ in range(places)))
            finally:
                looking.cancel()
            rate = posted / (time.monotonic() - began_at)
        await self.receiver.take()
        return rate

    async def throughput(
        self,
        daemon: TemporaryDaemon,
        count: int,
        arrived_before: int,
        timeout_seconds: float,
        progress: Progress,
    ) -> Throughput:
        """Of a backlog that lies there, for a daemon that has just begun."""
        first: Sample | None = None
        last: Sample | None = None
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            daemon.require_running()
            arrived = await self.receiver.count() - arrived_before
            progress(min(arrived, count))
            if 0 < arrived < count:
                last = await self._sample(daemon)
                first = first or last
            if arrived >= count and (await bench.delivered(self.pool)).deliveries >= count:
                break
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)
        done = await bench.delivered(self.pool)
        if not done.deliveries:
            raise WebhookdError(f"nothing was delivered within {timeout_seconds:.0f} s")
        await self.receiver.take()
        processors = bench_processors.between(first, last)
        return Throughput(done.deliveries, max(done.seconds, 0.001), processors)

    async def idle_latency(self, daemon: TemporaryDaemon, count: int, progress: Progress) -> Latency:
        """One at a time."""
        before = await self.receiver.count()
        for number in range(count):
            await self.publish(1)
            await asyncio.sleep(IDLE_PAUSE_SECONDS)
            progress(number + 1)
        return await self._latency(daemon, before, count, None)

    async def busy_latency(
        self, daemon: TemporaryDaemon, rate: float, seconds: float, progress: Progress
    ) -> Latency:
        """At a steady rate."""
        before = await self.receiver.count()
        began_at, sent, elapsed = time.monotonic(), 0, 0.0
        while elapsed < seconds:
            elapsed = time.monotonic() - began_at
            due = min(int(rate * min(elapsed, seconds)) - sent, BATCH_EVENTS)
            if due > 0:
                await self.publish(due)
                sent += due
            progress(int(elapsed * 1000))
            await asyncio.sleep(BUSY_TICK_SECONDS)
        return await self._latency(daemon, before, sent, sent / (time.monotonic() - began_at))

    async def _latency(self, daemon: TemporaryDaemon, before: int, count: int, rate: float | None) -> Latency:
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_SECONDS
        while await self.receiver.count() < before + count and time.monotonic() < deadline:
            daemon.require_running()
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)
        ages = await self.receiver.take()
        return Latency(ages.arrivals, rate, ages.p50_ms, ages.p99_ms)

    async def _sample(self, daemon: TemporaryDaemon) -> Sample | None:
        at_work = await bench.process_ids(self.pool)
        return bench_processors.sample(time.monotonic(), daemon.process_id, self.receiver.process_id, at_work)

    def _event_type(self, number: int) -> str:
        return f"bench.{self._generation}.{number % self.subscriptions}"

    def _payload(self) -> str:
        head = f"{BODY_START.decode()}{time.monotonic_ns()}," + '"filled":"'
        return f'{head}{"x" * (self.payload_bytes - len(head) - 2)}"}}'


# Of nobody: what matters is that signing takes the time that it takes.
_SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"  # noqa: S105


async def _report(progress: Progress, began_at: float) -> None:
    while True:
        progress(int((time.monotonic() - began_at) * 1000))
        await asyncio.sleep(LOOK_INTERVAL_SECONDS)
