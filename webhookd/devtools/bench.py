"""`webhookd bench`: how fast webhookd is on this machine with this database server, and what limits it.

A database of its own on the server, a receiver on loopback, a real daemon with the user's settings; all of
it is gone afterwards.
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
from webhookd.daemon.database import Database
from webhookd.db import server_facts as facts
from webhookd.devtools import bench_database, bench_report
from webhookd.devtools import bench_queries as bench
from webhookd.devtools.bench_progress import Course
from webhookd.devtools.bench_run import FEWEST_EVENTS, MOST_EVENTS, SIGNALS, STEPS, Run, Sizes
from webhookd.http.server import raise_file_limit


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
            told = asyncio.run(facts.fetch(database.migrating_dsn))
            bench_database.require_fit(found, told, settings.database.pool_size)
            notes = [*_consented(found, yes=yes, ask=not as_json), *_noted(database, found, told)]
            run = Run(settings, find_file(config_path, environment), database, found.tablespace, notes)
            sizes = Sizes(events, seconds, subscriptions, payload_bytes)
            report = anyio.run(run.interruptible, sizes, course, backend_options={"use_uvloop": True})
        finally:
            # An embedded server is still to be stopped, and is not to be left in the middle of that.
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


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
