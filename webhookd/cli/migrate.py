"""`webhookd migrate`: the database is brought to this version's schema, or only looked at."""

import asyncio
import os
import sys
from pathlib import Path

import click

from webhookd.config.load import load_settings
from webhookd.config.settings import Settings
from webhookd.model.errors import ConfigurationError
from webhookd.store import migrations


@click.command("migrate")
@click.option("--check", is_flag=True, help="Only say what would be done; exit 1 if anything would.")
@click.pass_obj
def command(config_path: Path | None, *, check: bool) -> None:
    """Bring the database to this version's schema.

    Run it again, or twice at once: what is done is left alone.
    """
    dsn = _dsn(load_settings(config_path, os.environ))
    if not check:
        done = asyncio.run(migrations.migrate(dsn))
        for line in done.describe():
            click.echo(f"applied {line}")
        click.echo("The schema is up to date.")
        return
    pending = asyncio.run(migrations.check(dsn))
    if not pending:
        click.echo("The schema is up to date.")
        return
    for line in pending.describe():
        click.echo(f"pending {line}")
    click.echo("The schema is not up to date: run `webhookd migrate`.", err=True)
    sys.exit(1)


def _dsn(settings: Settings) -> str:
    if not settings.database.dsn:
        raise ConfigurationError("no database: set [database] dsn in webhookd.toml, or WEBHOOKD_DATABASE_DSN")
    return settings.database.dsn
