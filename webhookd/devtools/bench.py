"""`webhookd bench`: how fast webhookd is on this machine with this database server, and what limits it.

Uses its own database on the server, a receiver on loopback and a real daemon with the user's settings, and
removes all of them at the end.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import anyio
import click
import msgspec

from webhookd.cli import output
from webhookd.cli.options import INTERRUPTED, example
from webhookd.core.configuration import find_file, load_settings
from webhookd.core.errors import WebhookdError
from webhookd.daemon.setup import Database
from webhookd.db.connection import ServerFacts, fetch_server_facts
from webhookd.devtools import bench_database, bench_report
from webhookd.devtools.bench_run import MAX_EVENTS, MIN_EVENTS, SIGNALS, STEPS, Run, Sizes
from webhookd.http.server import raise_file_limit


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
    with bench_report.ProgressBar(STEPS, quiet=as_json or clean) as progress:
        if settings.database.embedded:
            progress.say("Starting PostgreSQL if it is not running")
        with bench_database.open_server(settings) as database:
            progress.pause()
            try:
                if clean:
                    _clean(database)
                    return
                server = asyncio.run(bench_database.look_at(database.migrating_dsn))
                server_facts = asyncio.run(fetch_server_facts(database.migrating_dsn))
                bench_database.require_fit(server, server_facts, settings.database.pool_size)
                notes = _confirmed(server, yes=yes, ask=not as_json)
                notes += _notes(database, server, server_facts)
                run = Run(settings, find_file(config_path, environment), database, server.tablespace, notes)
                sizes = Sizes(events, seconds, subscriptions, payload_bytes)
                report = anyio.run(run.interruptible, sizes, progress, backend_options={"use_uvloop": True})
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


def _clean(database: Database) -> None:
    removed = asyncio.run(bench_database.clean(database))
    for name in removed:
        click.echo(f"removed {name}")
    if not removed:
        click.echo("Nothing to remove.")


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


def _notes(database: Database, server: bench_database.Server, server_facts: ServerFacts) -> list[str]:
    notes = []
    if not server_facts.survives_a_power_cut:
        notes.append("fsync is off on this server: the results are not those of durable commits")
    if server.left_over:
        names = ", ".join(server.left_over)
        notes.append(f"killed runs left these databases: {names}. {bench_database.removal(server.left_over)}")
    if server.is_without_roles and not database.embedded:
        notes.append("bench created the webhookd roles on this server; `webhookd migrate` will use them")
    return notes


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
