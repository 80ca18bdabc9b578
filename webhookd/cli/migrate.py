"""`webhookd migrate`: updates the database schema to this version, or checks it."""

import asyncio
import os
import sys
from pathlib import Path

import click

from webhookd.core.configuration import data_dir, load_settings
from webhookd.daemon.database import opened
from webhookd.db import migrations
from webhookd.embedded.folder import is_new


@click.command("migrate")
@click.option("--check", is_flag=True, help="Only show pending migrations; exit 1 if there are any.")
@click.pass_obj
def command(config_path: Path | None, *, check: bool) -> None:
    """Update the database schema to this version.

    It is safe to run this again, or twice at the same time: migrations that are done are skipped.
    """
    settings = load_settings(config_path, os.environ)
    if check and settings.database.embedded and is_new(data_dir(settings)):
        # A check must not create a database server.
        _report_pending(migrations.everything())
    with opened(settings) as database:
        if check:
            _report_pending(asyncio.run(migrations.check(database.migrating_dsn)))
            return
        done = asyncio.run(migrations.migrate(database.migrating_dsn))
        for line in done.describe():
            click.echo(f"applied {line}")
        click.echo("The schema is up to date.")


def _report_pending(pending: migrations.Pending) -> None:
    if not pending:
        click.echo("The schema is up to date.")
        return
    for line in pending.describe():
        click.echo(f"pending {line}")
    click.echo("The schema is not up to date: run `webhookd migrate`.", err=True)
    sys.exit(1)
