"""`webhookd check`: checks the configuration and the database for `serve`, without changing anything."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.console import Console

from webhookd.core.configuration import data_dir, find_file, load_settings, setting_variables
from webhookd.core.errors import WebhookdError
from webhookd.core.settings import Settings, without_password
from webhookd.daemon.database import Database, opened
from webhookd.daemon.reload import database_warnings, file_warnings, settings_warnings
from webhookd.db import migrations
from webhookd.db.connection import fetch_server_facts
from webhookd.embedded.folder import is_new
from webhookd.embedded.installation import wheel_installation

State = Literal["good", "warning", "failed"]
MARKS = {"good": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}


class Finding(NamedTuple):
    """One line of the report."""

    state: State
    subject: str
    text: str


@click.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_obj
def command(config_path: Path | None, *, as_json: bool) -> None:
    """Check whether `serve` can run with this configuration and database. Changes nothing.

    Exit code 0: `serve` can run, perhaps with warnings. Otherwise: the exit code that `serve` would have.
    """
    found: list[Finding] = []
    with _reported(found, as_json=as_json):
        path = find_file(config_path, os.environ)
        settings = load_settings(path, os.environ)
        found.append(Finding("good", "configuration", _source(path)))
        found += [Finding("warning", "configuration", text) for text in file_warnings(path)]
        warnings = settings_warnings(settings)
        found += [Finding("warning", "database", text) for text in warnings]
        if settings.database.embedded and is_new(data_dir(settings)):
            version = wheel_installation(None).version
            text = f"embedded PostgreSQL {version}: `serve` will create it in {data_dir(settings)}"
            found.append(Finding("good", "database", text))
            return
        with opened(settings) as database:
            found += asyncio.run(_check_database(settings, database))
    if any(finding.state == "failed" for finding in found):
        sys.exit(1)


async def _check_database(settings: Settings, database: Database) -> list[Finding]:
    server = await fetch_server_facts(database.dsn)
    where = str(database.embedded.folder) if database.embedded else without_password(database.dsn)
    found = [Finding("good", "database", f"PostgreSQL {server.version} at {where}")]
    warnings = database_warnings(settings.database, server)
    found += [Finding("warning", "database", text) for text in warnings]
    pending = await migrations.check(database.migrating_dsn)
    if pending:
        missing = ", ".join(pending.describe())
        if settings.database.may_migrate:
            return [*found, Finding("warning", "schema", f"`serve` will migrate it ({missing})")]
        return [*found, Finding("failed", "schema", f"not up to date ({missing}): run `webhookd migrate`")]
    found.append(Finding("good", "schema", "up to date"))
    if server.functions_missing:
        fix = f"GRANT webhookd_app TO {server.login}"
        return [*found, Finding("failed", "login", f"{server.login} lacks privileges: {fix}")]
    return [*found, Finding("good", "login", f"{server.login} has the required privileges")]


@contextmanager
def _reported(found: list[Finding], *, as_json: bool) -> Iterator[None]:
    """Print the findings, also when the block raises. In JSON the error is the last finding."""
    try:
        yield
    except WebhookdError as error:
        if as_json:
            found.append(Finding("failed", "error", str(error)))
        raise
    finally:
        if as_json:
            document = {
                "good": all(finding.state != "failed" for finding in found),
                "findings": [finding._asdict() for finding in found],
            }
            click.echo(json.dumps(document, ensure_ascii=False))
        else:
            _print(found)


def _print(found: list[Finding]) -> None:
    console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    for finding in found:
        mark, colour = MARKS[finding.state]
        console.print(mark, style=colour, end=" ")
        console.print(f"{finding.subject:<14}{finding.text}")


def _source(path: Path | None) -> str:
    variables = ", ".join(sorted(setting_variables(os.environ)))
    file = str(path) if path else "defaults, no file"
    return f"{file}, and {variables} from the environment" if variables else file
