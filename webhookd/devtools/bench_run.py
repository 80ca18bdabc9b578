"""One run of `webhookd bench`: its parts are made, measured with and removed, whatever ends it."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from webhookd import __version__
from webhookd.core.settings import SERVICES, Settings
from webhookd.daemon.database import Database
from webhookd.db.pool import Pool
from webhookd.devtools import bench_database, bench_processors, bench_report
from webhookd.devtools import bench_queries as bench
from webhookd.devtools.bench_measures import BUSY_SHARE, Bench
from webhookd.devtools.bench_progress import Course
from webhookd.devtools.bench_receiver import BenchReceiver
from webhookd.devtools.bench_report import Report
from webhookd.devtools.temporary_daemon import TemporaryDaemon, temporary_folder

STEPS = 6
COMMITS = 50
# Of the rate without a database, what a backlog is made for: it lasts about as long as was asked for.
EXPECTED_SHARE = 0.6
FEWEST_EVENTS, MOST_EVENTS = 100, 1_000_000
# What nobody asked for must not fill a disk.
MOST_PAYLOAD_BYTES = 100_000_000
# A slow server is given so many times the seconds, and then taken by what it has done.
PATIENCE = 2.5
LEAST_PATIENCE_SECONDS = 10.0
BARE_SHARE, BUSY_SECONDS_SHARE = 0.25, 0.6
IDLE_EVENTS_A_SECOND = 6
MOST_IDLE_EVENTS = 50
# What the server's helpers and the bench itself take is less.
OTHERS_SHARE = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Sizes(NamedTuple):
    """How much to measure."""

    events: int | None
    seconds: float
    subscriptions: int
    payload_bytes: int


class Run(NamedTuple):
    """One run, from the making of the database to its end."""

    settings: Settings
    config_path: Path | None
    database: Database
    tablespace: str | None
    notes: list[str]

    async def interruptible(self, sizes: Sizes, course: Course) -> Report | None:
        """None if it was told to stop; then all is cleaned up just as at the end."""
        with anyio.CancelScope() as scope:

            def stop() -> None:
                """First of all: a terminal that was closed cannot be told."""
                if not scope.cancel_called:
                    scope.cancel()
                    course.say("Told to stop: removing all of it")

            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, stop)
            return await self._report(sizes, course)
        return None

    async def _report(self, sizes: Sizes, course: Course) -> Report:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(temporary_folder("webhookd-bench-"))
            data_dir = folder / "data"
            data_dir.mkdir(mode=0o711)
            course.step("Making a database")
            own = await stack.enter_async_context(bench_database.own_database(self.database, self.tablespace))
            receiver = await stack.enter_async_context(BenchReceiver(data_dir))
            pool = await stack.enter_async_context(Pool(own.dsn, 2))
            measures = Bench(pool, receiver, sizes.subscriptions, sizes.payload_bytes)
            await measures.subscribe()
            commits = await bench.commits(pool, COMMITS)

            bare_seconds = sizes.seconds * BARE_SHARE
            course.step("Sending without a database", bare_seconds * 1000)
            bare = await measures.bare(self._local(data_dir), bare_seconds, course.done)

            count = sizes.events or _backlog(sizes, bare)
            course.step(f"Publishing {count:,} events", count)
            before = await bench.counters(pool)
            await measures.publish_backlog(count, course.done)

            arrived = await receiver.count()
            course.step(f"Delivering {count:,} events", count)
            daemon = await stack.enter_async_context(self._daemon(folder, data_dir, own.dsn))
            await receiver.guard(daemon.process_id)
            patience = max(LEAST_PATIENCE_SECONDS, sizes.seconds * PATIENCE) if not sizes.events else 600.0
            done = await measures.throughput(daemon, count, arrived, patience, course.done)
            after = await bench.counters(pool)
            notes = list(self.notes)
            if done.deliveries < count:
                notes.append(f"{count - done.deliveries:,} of {count:,} were not delivered in time")
                await measures.begin_anew()
            if done.processors and done.processors.others > OTHERS_SHARE * done.processors.there_are:
                notes.append(f"other programs kept {done.processors.others:.1f} processors busy meanwhile")

            idle_count = min(MOST_IDLE_EVENTS, int(sizes.seconds * IDLE_EVENTS_A_SECOND))
            course.step("Latency, one event at a time", idle_count)
            idle = await measures.idle_latency(daemon, idle_count, course.done)

            rate, busy_seconds = done.per_second * BUSY_SHARE, sizes.seconds * BUSY_SECONDS_SHARE
            course.step(f"Latency at {rate:,.0f} events/s", busy_seconds * 1000)
            busy = await measures.busy_latency(daemon, rate, busy_seconds, course.done)
            memory = bench_processors.memory_bytes(daemon.process_id)
            course.say("Removing all of it")
        return Report(
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
            postgresql=own.facts.version,
            embedded=self.database.embedded is not None,
            webhookd=__version__,
            notes=notes,
        )

    def _local(self, data_dir: Path) -> Settings:
        """The user's, for requests to this machine."""
        return msgspec.structs.replace(
            self.settings,
            database=msgspec.structs.replace(self.settings.database, data_dir=str(data_dir)),
            delivery=msgspec.structs.replace(self.settings.delivery, local=True),
        )

    def _daemon(self, folder: Path, data_dir: Path, dsn: str) -> TemporaryDaemon:
        """As the user's, but for where it is."""
        config_path = self.config_path or folder / "webhookd.toml"
        if self.config_path is None:
            config_path.touch()  # named and empty: none is looked for
        ca_file = self.settings.delivery.ca_file
        own = {
            "WEBHOOKD_DATABASE_DSN": dsn,
            "WEBHOOKD_DATABASE_DATA_DIR": str(data_dir),
            "WEBHOOKD_DATABASE_AUTO_MIGRATE": "false",
            "WEBHOOKD_DELIVERY_CA_FILE": str(Path(ca_file).absolute()) if ca_file else "",
            "WEBHOOKD_SERVICES_ENABLED": ",".join(SERVICES),
            "WEBHOOKD_API_HEALTH_LISTEN": "",
        }
        return TemporaryDaemon(folder, "bench", config_path, os.environ | own)


def _backlog(sizes: Sizes, bare_rate: float) -> int:
    """About as many as are delivered in the time that was asked for."""
    likely = int(bare_rate * EXPECTED_SHARE * sizes.seconds)
    return max(FEWEST_EVENTS, min(likely, MOST_PAYLOAD_BYTES // sizes.payload_bytes, MOST_EVENTS))
