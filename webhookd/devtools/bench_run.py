"""One run of `webhookd bench`: starts its parts, measures, and removes everything, however it ends.

Events are published by SQL, as an application does. The receiver counts arrivals, the database completions.
"""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from webhookd import __version__
from webhookd.core.errors import WebhookdError
from webhookd.core.settings import SERVICES, Settings
from webhookd.daemon.database import Database
from webhookd.daemon.reload import client_options
from webhookd.db.pool import Pool
from webhookd.deliveries import ingest, subscriptions
from webhookd.devtools import bench_database, bench_report, processes
from webhookd.devtools.bench_load import (
    Publisher,
    ReceiverProcess,
    latencies_ms,
    payload,
    percentile,
    receiver_process,
)
from webhookd.devtools.bench_report import BenchReport, Latency, ProgressBar
from webhookd.devtools.processes import Processors, Sample, TemporaryDaemon, temporary_folder
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.client import GuardedClient
from webhookd.outbound.signatures import sign

STEPS = 6
COMMITS = 50
# The backlog lasts as long as requested if the daemon reaches this share of the rate without a database.
EXPECTED_SHARE = 0.6
MIN_EVENTS, MAX_EVENTS = 100, 1_000_000
# Limits the disk space of a backlog whose size the user did not choose.
MAX_BACKLOG_BYTES = 100_000_000
# On a slow server the delivery stops after this many times the requested seconds.
PATIENCE = 2.5
MIN_PATIENCE_SECONDS = 10.0
# The longest delivery of a number of events that the user chose.
EVENTS_PATIENCE_SECONDS = 600.0
BARE_SHARE, BUSY_SECONDS_SHARE = 0.25, 0.6
BUSY_RATE_SHARE = 0.5
IDLE_EVENTS_PER_SECOND = 6
MAX_IDLE_EVENTS = 50
# More load than the server's background processes and the bench itself cause: other programs are running.
OTHER_PROGRAMS_SHARE = 0.2
POLL_INTERVAL_SECONDS = 0.1
# Without an arrival for this long, no request is in flight any more.
SETTLED_SECONDS = 0.5
ARRIVAL_TIMEOUT_SECONDS = 20.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Belongs to no subscription: signing only has to take as long as usual.
_SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"  # noqa: S105


class Sizes(NamedTuple):
    """How much to measure."""

    events: int | None
    seconds: float
    subscriptions: int
    payload_bytes: int

    def backlog(self, bare_rate: float) -> int:
        """The requested number of events, or about as many as are delivered in the requested time."""
        likely = int(bare_rate * EXPECTED_SHARE * self.seconds)
        limited = min(likely, MAX_BACKLOG_BYTES // self.payload_bytes, MAX_EVENTS)
        return self.events or max(MIN_EVENTS, limited)

    @property
    def patience_seconds(self) -> float:
        if self.events:
            return EVENTS_PATIENCE_SECONDS
        return max(MIN_PATIENCE_SECONDS, self.seconds * PATIENCE)


class Run(NamedTuple):
    """One run, from the creation of its database to its removal."""

    settings: Settings
    config_path: Path | None
    database: Database
    tablespace: str | None
    notes: list[str]

    async def interruptible(self, sizes: Sizes, progress: ProgressBar) -> BenchReport | None:
        """Run and clean up. None after a signal."""
        with anyio.CancelScope() as scope:

            def stop() -> None:
                if not scope.cancel_called:
                    scope.cancel()  # first, because printing fails if the terminal was closed
                    progress.say("Interrupted: cleaning up")

            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, stop)
            return await self._report(sizes, progress)
        return None

    async def _report(self, sizes: Sizes, progress: ProgressBar) -> BenchReport:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(temporary_folder("webhookd-bench-"))
            data_dir = folder / "data"
            data_dir.mkdir(mode=0o711)
            progress.step("Creating a database")
            created = bench_database.bench_database(self.database, self.tablespace)
            bench = await stack.enter_async_context(created)
            certificate = LocalCertificate.in_folder(data_dir)
            receiver = await stack.enter_async_context(
                receiver_process(folder, certificate.certificate_file, certificate.key_file)
            )
            pool = await stack.enter_async_context(Pool(bench.dsn, 2))
            measures = Measures(pool, receiver, sizes, progress)
            await measures.subscribe()
            async with pool.connection() as connection:
                commits = await bench_database.commit_times(connection, COMMITS)

            progress.step("Sending without a database")
            bare = await measures.bare(self._local(data_dir), sizes.seconds * BARE_SHARE)

            count = sizes.backlog(bare)
            progress.step(f"Publishing {count:,} events", count)
            before = await measures.counters()
            await measures.publisher().backlog(count)

            progress.step(f"Delivering {count:,} events", count)
            arrived = await receiver.requests()
            daemon = await stack.enter_async_context(self._daemon(folder, data_dir, bench.dsn))
            await receiver.guard(daemon.process_id)
            done = await measures.throughput(daemon, count, arrived)
            after = await measures.counters()
            notes = list(self.notes)
            if done.deliveries < count:
                notes.append(f"{count - done.deliveries:,} of {count:,} events were not delivered in time")
                await measures.replace_subscriptions()
            processors = done.processors
            if processors and processors.other_programs > OTHER_PROGRAMS_SHARE * processors.there_are:
                notes.append(f"other programs used {processors.other_programs:.1f} processors meanwhile")

            idle_count = min(MAX_IDLE_EVENTS, int(sizes.seconds * IDLE_EVENTS_PER_SECOND))
            progress.step("Latency, one event at a time", idle_count)
            idle = await measures.idle_latency(daemon, idle_count)

            rate, busy_seconds = done.per_second * BUSY_RATE_SHARE, sizes.seconds * BUSY_SECONDS_SHARE
            progress.step(f"Latency at {rate:,.0f} events/s", int(rate * busy_seconds))
            busy = await measures.busy_latency(daemon, rate, busy_seconds)
            memory = _memory_bytes(daemon.process_id)
            progress.say("Cleaning up")
        return BenchReport(
            deliveries_per_second=done.per_second,
            deliveries=done.deliveries,
            seconds=done.seconds,
            without_database_per_second=bare,
            latency_idle=idle,
            latency_busy=busy,
            wal_bytes_per_delivery=(after.wal_bytes - before.wal_bytes) / done.deliveries,
            storage_bytes_per_delivery=(after.size_bytes - before.size_bytes) / done.deliveries,
            round_trip_ms=commits.round_trip_ms,
            commit_ms=commits.commit_ms,
            processors=done.processors,
            daemon_memory_bytes=memory,
            limit=bench_report.limit(done.processors),
            subscriptions=sizes.subscriptions,
            payload_bytes=sizes.payload_bytes,
            postgresql=bench.facts.version,
            embedded=self.database.embedded is not None,
            webhookd=__version__,
            notes=notes,
        )

    def _local(self, data_dir: Path) -> Settings:
        """The user's settings, with deliveries to this machine allowed."""
        return msgspec.structs.replace(
            self.settings,
            database=msgspec.structs.replace(self.settings.database, data_dir=str(data_dir)),
            delivery=msgspec.structs.replace(self.settings.delivery, local=True),
        )

    def _daemon(self, folder: Path, data_dir: Path, dsn: str) -> TemporaryDaemon:
        """A daemon with the user's settings, except for its database and addresses."""
        config_path = self.config_path or folder / "webhookd.toml"
        if self.config_path is None:
            config_path.touch()  # an empty file, so that the daemon searches for no other
        ca_file = self.settings.delivery.ca_file
        changed = {
            "WEBHOOKD_DATABASE_DSN": dsn,
            "WEBHOOKD_DATABASE_DATA_DIR": str(data_dir),
            "WEBHOOKD_DATABASE_AUTO_MIGRATE": "false",
            "WEBHOOKD_DELIVERY_CA_FILE": str(Path(ca_file).absolute()) if ca_file else "",
            "WEBHOOKD_SERVICES_ENABLED": ",".join(SERVICES),
            "WEBHOOKD_API_HEALTH_LISTEN": "",
        }
        return TemporaryDaemon(folder, "bench", config_path, os.environ | changed)


class Throughput(NamedTuple):
    """A delivered backlog: seconds from the first start to the last completion, by the database's clock."""

    deliveries: int
    seconds: float
    processors: Processors | None

    @property
    def per_second(self) -> float:
        return self.deliveries / self.seconds


@dataclass
class Measures:
    """The measurements of a run."""

    pool: Pool
    receiver: ReceiverProcess
    sizes: Sizes
    progress: ProgressBar
    _event_types: list[str] = field(default_factory=list)
    _subscription_ids: list[int] = field(default_factory=list)
    _generation: int = 0

    async def subscribe(self) -> None:
        """Create subscriptions with an event type each, so that one event is one delivery."""
        self._generation += 1
        self._event_types = [f"bench.{self._generation}.{it}" for it in range(self.sizes.subscriptions)]
        async with self.pool.connection() as connection:
            for event_type in self._event_types:
                made = await subscriptions.create(connection, event_type, self.receiver.url("/timed"))
                subscription_id = made.subscription_id
                started = await subscriptions.begin_verification(connection, subscription_id)
                await subscriptions.complete_verification(connection, subscription_id, started.challenge)
                self._subscription_ids.append(subscription_id)

    async def replace_subscriptions(self) -> None:
        """Pause the subscriptions with what is still undelivered, and create new ones."""
        async with self.pool.connection() as connection:
            for subscription_id in self._subscription_ids:
                await subscriptions.update(connection, subscription_id, {"active": False})
        self._subscription_ids.clear()
        before, now = -1, await self.receiver.requests()
        while before < now:
            await asyncio.sleep(SETTLED_SECONDS)
            before, now = now, await self.receiver.requests()
        await self.subscribe()

    def publisher(self) -> Publisher:
        return Publisher(self._publish, self._event_types, self.sizes.payload_bytes, self.progress.done)

    async def counters(self) -> bench_database.Counters:
        async with self.pool.connection() as connection:
            return await bench_database.counters(connection)

    async def bare(self, settings: Settings, seconds: float) -> float:
        """Requests per second of the daemon's own client, signed, without a database."""
        delivery = settings.delivery
        slots = min(delivery.concurrency, self.sizes.subscriptions * delivery.subscription_concurrency)
        body = payload(0, self.sizes.payload_bytes).encode()
        url = self.receiver.url("/now")
        posted = 0

        async def post_until(ends_at: float) -> None:
            nonlocal posted
            while True:
                headers = {"webhook-signature": sign([_SECRET], "evt_0", int(time.time()), body)}
                outcome = await client.post(url, headers, body, delivery.timeout_seconds)
                if not outcome.delivered:
                    raise WebhookdError(f"a POST to {url} failed: {outcome.error_code}")
                posted += 1
                if time.monotonic() >= ends_at:
                    return

        async with GuardedClient(client_options(settings, frozenset())) as client:
            # Open the connections first: a daemon opens them only once.
            await asyncio.gather(*(post_until(0) for _ in range(slots)))
            posted, started_at = 0, time.monotonic()
            await asyncio.gather(*(post_until(started_at + seconds) for _ in range(slots)))
            return posted / (time.monotonic() - started_at)

    async def throughput(self, daemon: TemporaryDaemon, count: int, arrived_before: int) -> Throughput:
        """Wait until the daemon has delivered the backlog that was published before it started."""
        samples: list[Sample | None] = []
        deadline = time.monotonic() + self.sizes.patience_seconds
        while time.monotonic() < deadline:
            daemon.require_running()
            arrived = await self.receiver.requests() - arrived_before
            self.progress.done(min(arrived, count))
            if 0 < arrived < count:
                samples.append(await self._sample(daemon))
            if arrived >= count and (await self._completed()).deliveries >= count:
                break
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        done = await self._completed()
        if not done.deliveries:
            raise WebhookdError(f"nothing was delivered within {self.sizes.patience_seconds:.0f} s")
        processors = processes.between(samples[0], samples[-1]) if samples else None
        return Throughput(done.deliveries, max(done.seconds, 0.001), processors)

    async def idle_latency(self, daemon: TemporaryDaemon, count: int) -> Latency:
        """One event at a time."""
        position, publisher = await self.receiver.log_position(), self.publisher()
        await publisher.one_by_one(count)
        return await self._latency(daemon, position, publisher.published, None)

    async def busy_latency(self, daemon: TemporaryDaemon, rate: float, seconds: float) -> Latency:
        """At a steady rate."""
        position, publisher = await self.receiver.log_position(), self.publisher()
        started_at = time.monotonic()
        await publisher.paced(rate, seconds)
        measured_rate = publisher.published / (time.monotonic() - started_at)
        return await self._latency(daemon, position, publisher.published, measured_rate)

    async def _latency(
        self, daemon: TemporaryDaemon, position: int, count: int, rate: float | None
    ) -> Latency:
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_SECONDS
        while True:
            # The events of the backlog have no stamp.
            arrivals = [it for it in await self.receiver.arrivals(position) if it.stamp]
            if len(arrivals) >= count or time.monotonic() > deadline:
                break
            daemon.require_running()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        milliseconds = latencies_ms(arrivals)
        p50, p99 = (percentile(milliseconds, it) if milliseconds else None for it in (50, 99))
        return Latency(len(arrivals), rate, p50, p99)

    async def _sample(self, daemon: TemporaryDaemon) -> Sample | None:
        async with self.pool.connection() as connection:
            backends = await bench_database.backend_ids(connection)
        return processes.sample(time.monotonic(), daemon.process_id, self.receiver.process_id, backends)

    async def _completed(self) -> bench_database.Completed:
        async with self.pool.connection() as connection:
            return await bench_database.completed(connection)

    async def _publish(self, new: list[ingest.NewEvent]) -> None:
        async with self.pool.connection() as connection:
            await ingest.publish(connection, new)


def _memory_bytes(process_id: int) -> int | None:
    try:
        return processes.memory_bytes(process_id)
    except (OSError, ValueError):
        return None  # a system without /proc
