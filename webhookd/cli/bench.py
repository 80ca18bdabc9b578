"""`webhookd bench`: how fast webhookd is on this machine with this database server, and what limits it.

A database of its own on the server, a receiver on loopback, a real daemon with the user's settings; all of
it is gone afterwards.
"""

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple, NoReturn

import anyio
import click
import msgspec

from webhookd import __version__
from webhookd.api.server import raise_file_limit
from webhookd.cli import bench_database, bench_processors, bench_report, output
from webhookd.cli.bench_measures import BUSY_SHARE, Bench
from webhookd.cli.bench_progress import Course
from webhookd.cli.bench_receiver import BenchReceiver
from webhookd.cli.bench_report import Report
from webhookd.cli.main import INTERRUPTED
from webhookd.cli.options import example
from webhookd.cli.own_daemon import OwnDaemon, temporary_folder
from webhookd.config.load import find_file, load_settings
from webhookd.config.settings import SERVICES, Settings
from webhookd.model.errors import WebhookdError
from webhookd.store import bench, facts
from webhookd.store.pool import Pool
from webhookd.supervisor.database import Database

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
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Sizes(NamedTuple):
    """How much to measure."""

    events: int | None
    seconds: float
    subscriptions: int
    payload_bytes: int


@click.command("bench", epilog=example("webhookd bench", "webhookd bench --seconds 30 --payload-bytes 2000"))
@click.option(
    "--seconds",
    type=click.FloatRange(1, 600),
    default=8.0,
    show_default=True,
    help="How long deliveries are to last; all of it takes about three times as long.",
)
@click.option(
    "--events",
    type=click.IntRange(FEWEST_EVENTS, MOST_EVENTS),
    help="How many to deliver, instead of as many as the seconds are likely to need.",
)
@click.option(
    "--subscriptions",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="To how many subscriptions they go, in turn.",
)
@click.option(
    "--payload-bytes",
    type=click.IntRange(64, 65_536),
    default=400,
    show_default=True,
    help="The size of an event's payload.",
)
@click.option("--yes", is_flag=True, help="Also where a webhookd serves on the same server.")
@click.option("--clean", is_flag=True, help="Only remove the databases of runs that were killed.")
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
    """Measure this machine with this database server.

    Uses the configuration of `serve`: the same server and the same settings of delivery. It makes a database
    of its own there, webhookd_bench_<random>, delivers to a receiver on this machine, and drops the database
    again; no other database is touched. The login needs CREATEDB and CREATEROLE. It keeps the
    server busy for half a minute: better not while others need it.
    """
    environment = dict(os.environ)
    settings = load_settings(config_path, environment)
    raise_file_limit()
    # Until there is a loop to hear them: a server that was just started is stopped again.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    with Course(STEPS, quiet=as_json or clean) as course, bench_database.server(settings, course) as database:
        course.pause()
        try:
            if clean:
                _clean(database)
                return
            found = asyncio.run(bench.look(database.migrating_dsn))
            told = asyncio.run(facts.look(database.migrating_dsn))
            bench_database.require_fit(found, told, settings.database.pool_size)
            notes = [*_consented(found, yes=yes, ask=not as_json), *_noted(database, found, told)]
            run = _Run(settings, find_file(config_path, environment), database, found.tablespace, notes)
            sizes = Sizes(events, seconds, subscriptions, payload_bytes)
            report = anyio.run(run.interruptible, sizes, course, backend_options={"use_uvloop": True})
        finally:
            # An embedded server is still to be stopped, and is not to be left in the middle of that.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
    if report is None:
        sys.exit(INTERRUPTED)
    if as_json:
        output.show_json(msgspec.json.encode(report))
    else:
        bench_report.show(report)


def _clean(database: Database) -> None:
    removed = asyncio.run(bench_database.clean(database))
    for name in removed:
        click.echo(f"removed {name}")
    if not removed:
        click.echo("There was nothing to remove.")


def _consented(found: bench.Server, *, yes: bool, ask: bool) -> list[str]:
    """Whoever serves here is slowed down: that needs a yes. What there is to say of it."""
    if not found.served:
        return []
    names = ", ".join(found.served)
    what = f"a webhookd is at work on this server (in {names})"
    if not yes and ask and sys.stdin.isatty() and sys.stderr.isatty():
        yes = click.confirm(f"{what}: it would be slowed down. Measure all the same?", err=True)
    if not yes:
        raise WebhookdError(f"{what}, and would be slowed down: stop it, or say --yes")
    return [f"{what}: the figures are of both together"]


def _noted(database: Database, found: bench.Server, told: facts.Facts) -> list[str]:
    notes = []
    if not told.survives_a_power_cut:
        notes.append("fsync is off on this server: the figures are not those of durable commits")
    if found.left_over:
        names = ", ".join(found.left_over)
        notes.append(f"left of runs that were killed: {names}. {bench_database.removal(found.left_over)}")
    if found.is_without_roles and not database.embedded:
        notes.append("the roles of webhookd were made on this server and stay: `webhookd migrate` uses them")
    return notes


class _Run(NamedTuple):
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

            for number in _SIGNALS:
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

    def _daemon(self, folder: Path, data_dir: Path, dsn: str) -> OwnDaemon:
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
        return OwnDaemon(folder, "bench", config_path, os.environ | own)


def _backlog(sizes: Sizes, bare_rate: float) -> int:
    """About as many as are delivered in the time that was asked for."""
    likely = int(bare_rate * EXPECTED_SHARE * sizes.seconds)
    return max(FEWEST_EVENTS, min(likely, MOST_PAYLOAD_BYTES // sizes.payload_bytes, MOST_EVENTS))


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
