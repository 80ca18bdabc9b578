"""`webhookd bench`: how fast webhookd is on this machine with this database server, and what limits it.

Uses its own database on the server, a receiver on loopback and a real daemon with the user's settings, and
removes all of them, however it ends. Events are published by SQL, as an application does. The receiver counts
arrivals, the database completions.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import click
import msgspec
import uvloop

from webhookd import __version__
from webhookd.cli import output
from webhookd.cli.options import INTERRUPTED, example
from webhookd.core.configuration import find_file, load_settings
from webhookd.core.errors import WebhookdError
from webhookd.core.settings import SERVICES, Settings
from webhookd.daemon.setup import Database, client_options
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
from webhookd.devtools.processes import (
    SIGNALS,
    Processors,
    Sample,
    TemporaryDaemon,
    interruptible,
    temporary_folder,
)
from webhookd.http.server import raise_file_limit
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.client import GuardedClient
from webhookd.outbound.signatures import sign

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

_Result = TypeVar("_Result")
# Belongs to no subscription: signing only has to take as long as usual.
_SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"  # noqa: S105


@click.command("bench", epilog=example("webhookd bench", "webhookd bench --seconds 30 --payload-bytes 2000"))
@click.option(
    "--seconds",
    type=click.FloatRange(1, 600),
    default=8.0,
    show_default=True,
    help="Approximate duration of the delivery; the whole run takes about three times as long.",
)
@click.option(
    "--events",
    type=click.IntRange(MIN_EVENTS, MAX_EVENTS),
    help="Number of events to deliver, instead of the number that --seconds requires.",
)
@click.option(
    "--subscriptions",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Number of subscriptions that receive the events in turn.",
)
@click.option(
    "--payload-bytes",
    type=click.IntRange(64, 65_536),
    default=400,
    show_default=True,
    help="Size of an event's payload.",
)
@click.option("--yes", is_flag=True, help="Run even if a webhookd is running on the same server.")
@click.option("--clean", is_flag=True, help="Only remove the databases that killed runs left behind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    config_path: Path | None,
    seconds: float,
    events: int | None,
    subscriptions: int,
    payload_bytes: int,
    *,
    yes: bool,
    clean: bool,
    as_json: bool,
) -> None:
    """Measure throughput and latency on this machine with this database server.

    Uses the configuration of `serve`: the same database server and the same delivery settings. It creates its
    own database, webhookd_bench_<random>, delivers to a receiver on this machine, and drops the database
    again. It does not change any other database. The login needs CREATEDB and CREATEROLE. The server is busy
    for about half a minute, so do not run it while production depends on the server.
    """
    environment = dict(os.environ)
    settings = load_settings(config_path, environment)
    raise_file_limit()
    # Before the event loop handles signals: exit normally, so that a server started here is stopped again.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGHUP, _exit)
    with ProgressBar(quiet=as_json or clean) as progress:
        if settings.database.embedded:
            progress.say("Starting PostgreSQL if it is not running")
        with bench_database.open_server(settings) as database:
            progress.pause()
            try:
                if clean:
                    removed = asyncio.run(bench_database.clean(database))
                    click.echo("\n".join(f"removed {name}" for name in removed) or "Nothing to remove.")
                    return
                server = asyncio.run(bench_database.look_at(database.migrating_dsn))
                server.require_fit(settings.database.pool_size)
                notes = _confirmed(server, yes=yes, ask=not as_json)
                notes += server.notes(embedded=database.embedded is not None)
                sizes = Sizes(events, seconds, subscriptions, payload_bytes)
                found = find_file(config_path, environment)
                run = Run(settings, found, database, server, sizes, notes, progress)
                interrupted = partial(progress.say, "Interrupted: cleaning up")
                report = uvloop.run(interruptible(run.report, interrupted))
            finally:
                # Stopping an embedded server must not be interrupted.
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
    if report is None:
        sys.exit(INTERRUPTED)
    if as_json:
        output.show_json(msgspec.json.encode(report))
    else:
        bench_report.show(report)


def _confirmed(server: bench_database.Server, *, yes: bool, ask: bool) -> list[str]:
    """Ask before slowing down a webhookd on the same server. Returns the note for the report."""
    if not server.served:
        return []
    running = f"a webhookd is running on this server (in {', '.join(server.served)})"
    if not yes and ask and sys.stdin.isatty() and sys.stderr.isatty():
        yes = click.confirm(f"{running}, and bench would slow it down. Continue?", err=True)
    if not yes:
        raise WebhookdError(f"{running}, and bench would slow it down: stop it, or use --yes")
    return [f"{running}: the results include its load"]


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


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
    server: bench_database.Server
    sizes: Sizes
    notes: list[str]
    progress: ProgressBar

    async def report(self) -> BenchReport:
        sizes, progress = self.sizes, self.progress
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(temporary_folder("webhookd-bench-"))
            data_dir = folder / "data"
            data_dir.mkdir(mode=0o711)
            progress.step("Creating a database")
            created = bench_database.bench_database(self.database, self.server.tablespace)
            dsn = await stack.enter_async_context(created)
            certificate = LocalCertificate.in_folder(data_dir)
            receiver = await stack.enter_async_context(
                receiver_process(folder, certificate.certificate_file, certificate.key_file)
            )
            pool = await stack.enter_async_context(Pool(dsn, 1))
            measures = Measures(pool, receiver, sizes, progress)
            await measures.subscribe("backlog")
            round_trip_ms, commit_ms = await measures.query(bench_database.commit_times)

            progress.step("Sending without a database")
            bare = await measures.bare(self._local(data_dir), sizes.seconds * BARE_SHARE)

            count = sizes.backlog(bare)
            progress.step(f"Publishing {count:,} events", count)
            before = await measures.query(bench_database.counters)
            await measures.publisher().backlog(count)

            progress.step(f"Delivering {count:,} events", count)
            arrived = await receiver.requests()
            daemon = await stack.enter_async_context(self._daemon(folder, data_dir, dsn))
            await receiver.guard(daemon.process_id)
            done, processors = await measures.throughput(daemon, count, arrived)
            after = await measures.query(bench_database.counters)
            if (missing := count - done.deliveries) > 0:
                self.notes.append(f"{missing:,} of {count:,} events were not delivered in time")
                await measures.pause_subscriptions()
                await measures.subscribe("latency")
            if processors and processors.other_programs > OTHER_PROGRAMS_SHARE * processors.there_are:
                self.notes.append(f"other programs used {processors.other_programs:.1f} processors meanwhile")

            idle_count = min(MAX_IDLE_EVENTS, int(sizes.seconds * IDLE_EVENTS_PER_SECOND))
            progress.step("Latency, one event at a time", idle_count)
            idle = await measures.latency(daemon, idle_count)

            rate = done.per_second * BUSY_RATE_SHARE
            busy_count = int(rate * sizes.seconds * BUSY_SECONDS_SHARE)
            progress.step(f"Latency at {rate:,.0f} events/s", busy_count)
            busy = await measures.latency(daemon, busy_count, rate)
            memory = None
            with suppress(OSError, ValueError):  # a system without /proc
                memory = processes.memory_bytes(daemon.process_id)
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
            round_trip_ms=round_trip_ms,
            commit_ms=commit_ms,
            processors=processors,
            daemon_memory_bytes=memory,
            limit=bench_report.limit(processors),
            subscriptions=sizes.subscriptions,
            payload_bytes=sizes.payload_bytes,
            postgresql=self.server.facts.version,
            embedded=self.database.embedded is not None,
            webhookd=__version__,
            notes=self.notes,
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
        ca_file = self.settings.delivery.ca_file
        changed = {
            "WEBHOOKD_DATABASE_DSN": dsn,
            "WEBHOOKD_DATABASE_DATA_DIR": str(data_dir),
            "WEBHOOKD_DATABASE_AUTO_MIGRATE": "false",
            "WEBHOOKD_DELIVERY_CA_FILE": str(Path(ca_file).absolute()) if ca_file else "",
            "WEBHOOKD_SERVICES_ENABLED": ",".join(SERVICES),
            "WEBHOOKD_API_HEALTH_LISTEN": "",
        }
        return TemporaryDaemon(folder, "bench", self.config_path, os.environ | changed)


@dataclass
class Measures:
    """The measurements of a run."""

    pool: Pool
    receiver: ReceiverProcess
    sizes: Sizes
    progress: ProgressBar
    _subscriptions: dict[str, int] = field(default_factory=dict)  # ids by event type

    async def query(self, function: Callable[..., Awaitable[_Result]], *arguments: object) -> _Result:
        """Call a function with a connection as its first argument."""
        async with self.pool.connection() as connection:
            return await function(connection, *arguments)

    async def subscribe(self, purpose: str) -> None:
        """Create subscriptions with an event type each, so that one event is one delivery."""
        for number in range(self.sizes.subscriptions):
            event_type = f"bench.{purpose}.{number}"
            made = await self.query(subscriptions.create, event_type, self.receiver.url("/timed"))
            started = await self.query(subscriptions.begin_verification, made.subscription_id)
            await self.query(subscriptions.complete_verification, made.subscription_id, started.challenge)
            self._subscriptions[event_type] = made.subscription_id

    async def pause_subscriptions(self) -> None:
        """Leave undelivered what is still pending, and wait until no request is in flight."""
        for subscription_id in self._subscriptions.values():
            await self.query(subscriptions.update, subscription_id, {"active": False})
        self._subscriptions.clear()
        before, now = -1, await self.receiver.requests()
        while before < now:
            await asyncio.sleep(SETTLED_SECONDS)
            before, now = now, await self.receiver.requests()

    def publisher(self) -> Publisher:
        async def publish(new: list[ingest.NewEvent]) -> None:
            await self.query(ingest.publish, new)

        return Publisher(publish, list(self._subscriptions), self.sizes.payload_bytes, self.progress.done)

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

    async def throughput(
        self, daemon: TemporaryDaemon, count: int, arrived_before: int
    ) -> tuple[bench_database.Completed, Processors | None]:
        """Wait until the daemon has delivered the backlog that was published before it started."""
        samples: list[Sample | None] = []
        deadline = time.monotonic() + self.sizes.patience_seconds
        while time.monotonic() < deadline:
            daemon.require_running()
            arrived = await self.receiver.requests() - arrived_before
            self.progress.done(min(arrived, count))
            if 0 < arrived < count:
                backends = await self.query(bench_database.backend_ids)
                samples.append(processes.sample(daemon.process_id, self.receiver.process_id, backends))
            if arrived >= count and (await self.query(bench_database.completed)).deliveries >= count:
                break
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        done = await self.query(bench_database.completed)
        if not done.deliveries:
            raise WebhookdError(f"nothing was delivered within {self.sizes.patience_seconds:.0f} s")
        return done, processes.between(samples[0], samples[-1]) if samples else None

    async def latency(self, daemon: TemporaryDaemon, count: int, rate: float | None = None) -> Latency:
        """At a steady rate, or one event at a time."""
        position, publisher = await self.receiver.log_position(), self.publisher()
        if rate is None:
            await publisher.one_by_one(count)
        else:
            started_at = time.monotonic()
            await publisher.paced(rate, count / rate)
            rate = publisher.published / (time.monotonic() - started_at)
        deadline = time.monotonic() + ARRIVAL_TIMEOUT_SECONDS
        while True:
            # The events of the backlog have no stamp.
            arrivals = [it for it in await self.receiver.arrivals(position) if it.stamp]
            if len(arrivals) >= publisher.published or time.monotonic() > deadline:
                break
            daemon.require_running()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        milliseconds = latencies_ms(arrivals)
        p50, p99 = (percentile(milliseconds, it) if milliseconds else None for it in (50, 99))
        return Latency(len(arrivals), rate, p50, p99)
