"""`webhookd retention`: makes one pass, or shows how far retention is. Uses the database directly."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.options import example, json_option
from webhookd.core.configuration import data_dir, load_settings
from webhookd.core.errors import ConfigurationError, DatabaseBusy
from webhookd.core.metrics import Metrics
from webhookd.core.settings import RetentionSettings, Settings
from webhookd.daemon.setup import Database, opened
from webhookd.db.paging import Page
from webhookd.db.pool import Pool
from webhookd.embedded.folder import is_new
from webhookd.retention import queries
from webhookd.retention.cli import COLUMNS, state, subject
from webhookd.retention.queries import Kind
from webhookd.retention.sweeper import Sweeper

PREVIEW_BATCH = 1000
# Kinds of rows whose names need more words.
KINDS = {
    "dead_letters": "dead letters",
    "runs": "ledger rows",
    "erased": "rows of erasures",
    "stats": "hours of statistics",
}
POOL_SIZE = 2
COUNTED_UP_TO = 10_000
ERASURES_SHOWN = 10
FOREVER = "kept forever"
WORDS = {
    "events_days": "finished events, with deliveries and attempts",
    "dead_letters_days": "events with a dead letter, at least",
    "payloads_days": "payloads",
    "jobs_days": "finished jobs of the job queue",
    "job_ledger_days": "ledger of the job queue",
    "job_workflows_days": "finished workflows of the job queue",
    "stats_days": "statistics",
}


@click.group("retention")
def command() -> None:
    """Remove old rows as [retention] in webhookd.toml says, and show how far that is.

    The service `retention` does the same in the background.
    """


@command.command("run", epilog=example("webhookd retention run --dry-run", "webhookd retention run"))
@click.option("--dry-run", is_flag=True, help="Only count what would be removed.")
@json_option
@click.pass_obj
def run(config_path: Path | None, *, dry_run: bool, as_json: bool) -> None:
    """Make one pass: remove everything that is older than its period. Also continues erasures.

    It uses the database directly, with the periods of the configuration file. It is safe to interrupt it, and
    to run it while daemons run. It rests between small batches, so that it hardly slows down deliveries.
    """
    settings = _settings(config_path)
    with opened(settings) as database:
        asyncio.run(_run(settings, database, dry_run=dry_run, as_json=as_json))


def _settings(config_path: Path | None) -> Settings:
    """Read the settings; refuse to create an embedded database."""
    settings = load_settings(config_path, os.environ)
    if settings.database.embedded and is_new(data_dir(settings)):
        raise ConfigurationError(
            f"there is no database in {data_dir(settings)}: use the configuration file and the environment "
            "of the daemon, for example --config or WEBHOOKD_DATABASE_DSN"
        )
    return settings


async def _run(settings: Settings, database: Database, *, dry_run: bool, as_json: bool) -> None:
    async with Pool(database.dsn, POOL_SIZE) as pool:
        count = _count(pool, settings.retention) if dry_run else _sweep(pool, settings.retention)
        counts = await count
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, **counts}))
    elif counts:
        verb = "would be removed" if dry_run else "removed"
        for kind, number in counts.items():
            click.echo(f"{number} {KINDS.get(kind, kind)} {verb}")
    else:
        click.echo("Nothing to remove.")


async def _count(pool: Pool, settings: RetentionSettings) -> Counter[str]:
    counts: Counter[str] = Counter()
    with output.progress(await _to_examine(pool, settings), "examined") as progress:
        for kind in _kinds(settings):
            for kept in (True, False):
                after_id, more = 0, True
                while more:
                    async with pool.connection() as connection:
                        found = await queries.preview(
                            connection, kind, PREVIEW_BATCH, settings, after_id, kept=kept
                        )
                    counts[kind] += found.expired
                    after_id, more = found.last_id, found.more
                    progress.advance(progress.task_ids[0], found.examined)
    async with pool.connection() as connection:
        counts["stats"] = await queries.expired_stats(connection, settings)
    return +counts


async def _sweep(pool: Pool, settings: RetentionSettings) -> Counter[str]:
    holder = f"retention run {uuid4().hex[:8]}"
    sweeper = Sweeper(pool, holder, lambda: settings, Metrics(), is_requested=True)
    removed: Counter[str] = Counter()
    try:
        async with pool.connection() as connection:
            await queries.recheck_kept(connection)
        with output.progress(await _to_examine(pool, settings), "examined") as progress:
            for step in sweeper.steps():
                async for batch in sweeper.batches(step):
                    if batch.refused:
                        raise DatabaseBusy("another instance is removing rows now; try again in a minute")
                    removed.update(batch.removed)
                    progress.advance(progress.task_ids[0], batch.examined)
    finally:
        await sweeper.give_back_turn()
    return +removed


def _kinds(settings: RetentionSettings) -> list[Kind]:
    kinds: tuple[Kind, ...] = ("events", "payloads")
    return [kind for kind in kinds if queries.period_days(settings, kind)]


async def _to_examine(pool: Pool, settings: RetentionSettings) -> int:
    async with pool.connection() as connection:
        return sum([await queries.to_examine(connection, kind, settings) for kind in _kinds(settings)])


@command.command("status", epilog=example("webhookd retention status"))
@json_option
@click.pass_obj
def status(config_path: Path | None, *, as_json: bool) -> None:
    """Show the periods, how far retention is, and the last erasures."""
    settings = _settings(config_path)
    with opened(settings) as database:
        progress, erasures = asyncio.run(_status(settings, database))
    if as_json:
        document = {
            **msgspec.structs.asdict(settings.retention),
            **progress._asdict(),
            "last_erasures": erasures,
        }
        output.show_json(msgspec.json.encode(document))
        return
    output.show(output.fields(_facts(settings.retention, progress)))
    if erasures:
        output.show(
            output.heading("Erasures"),
            output.table(COLUMNS, map(_cells, erasures)),
        )


async def _status(settings: Settings, database: Database) -> tuple[queries.Progress, list[dict[str, Any]]]:
    async with Pool(database.dsn, POOL_SIZE) as pool, pool.connection() as connection:
        progress = await queries.progress(connection, settings.retention, COUNTED_UP_TO)
        return progress, await queries.erasures(connection, Page(ERASURES_SHOWN))


def _facts(settings: RetentionSettings, progress: queries.Progress) -> Iterator[tuple[str, output.Cell]]:
    for name, words in WORDS.items():
        days = getattr(settings, name)
        yield words, f"{days:g} days" if days else FOREVER
    yield "oldest event", _time(progress.oldest_event_at)
    yield "examined up to", _time(progress.swept_before)
    if progress.lag_seconds is not None:
        late = f"{output.duration(progress.lag_seconds)} behind"
        yield "state", output.state("failing", late) if progress.lag_seconds > 1 else "up to date"
    kept = output.count(progress.kept, COUNTED_UP_TO)
    yield "old events kept", f"{kept}: not finished, or with a dead letter" if progress.kept else "none"
    yield "erasures running", str(progress.erasures)


def _cells(row: dict[str, Any]) -> output.Row:
    return (
        str(row["id"]),
        output.text(subject(row)),
        _time(row["requested_at"]),
        output.text(row["requested_by"]),
        state(row),
        str(row["events"]),
        str(row["deliveries"]),
    )


def _time(value: Any) -> str:
    return output.time_field(value.isoformat() if value else None)
