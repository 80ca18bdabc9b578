"""The commands for the machine that a daemon runs on: `serve`, `migrate`, `check` and `token`."""

import asyncio
import base64
import difflib
import hashlib
import json
import os
import re
import secrets
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.console import Console

from webhookd.cli.options import example, json_option
from webhookd.cli.output import duration, retry_schedule
from webhookd.console.logo import read_logo
from webhookd.core.configuration import data_dir, find_file, load_settings, setting_variables
from webhookd.core.errors import WebhookdError
from webhookd.core.limits import (
    MAX_TENANT_CHARACTERS,
    MAX_TOKEN_NAME_CHARACTERS,
    ONE_DAY_SECONDS,
    TENANT,
)
from webhookd.core.settings import SERVICES, RetentionSettings, Scope, Settings, without_password
from webhookd.daemon.setup import (
    Database,
    console_warnings,
    database_warnings,
    file_warnings,
    opened,
    settings_warnings,
)
from webhookd.db import migrations
from webhookd.db.connection import fetch_server_facts
from webhookd.embedded.folder import is_new
from webhookd.embedded.installation import wheel_installation

PREFIX = "whd_"
RANDOM_BYTES = 32
SCOPES: tuple[str, ...] = typing.get_args(Scope)

# A shorter period than this is probably a mistake: days were taken for something else.
SHORT_RETENTION_SECONDS = 3600

State = Literal["good", "warning", "failed"]
MARKS = {"good": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}


@click.command("serve")
@click.option(
    "--services",
    metavar="NAMES",
    help="Services that this instance runs, separated by commas (default: services.enabled, which is all).",
)
@click.option(
    "--local",
    is_flag=True,
    help="For development: allow deliveries to this machine, and trust the certificate of `webhookd listen`.",
)
@click.pass_obj
def serve(config_path: Path | None, services: str | None, *, local: bool) -> None:
    """Run a daemon that accepts events and delivers them, until it is stopped.

    SIGHUP reloads the configuration. SIGTERM or Ctrl-C stops after requests in flight are finished; a second
    one stops at once.
    """
    from webhookd.daemon import daemon  # noqa: PLC0415  loading it takes 0.4 s, and the other commands do not use it

    environment = dict(os.environ)
    if services is not None:
        _reject_unknown(services)
        environment["WEBHOOKD_SERVICES_ENABLED"] = services
    if local:
        environment["WEBHOOKD_DELIVERY_LOCAL"] = "true"

    # Searched once: if the file is gone, a reload must fail instead of falling back to the defaults.
    path = find_file(config_path, environment)
    daemon.serve(lambda: load_settings(path, environment), path)


def _reject_unknown(services: str) -> None:
    for name in filter(None, map(str.strip, services.split(","))):
        if name not in SERVICES:
            close = difflib.get_close_matches(name, SERVICES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(SERVICES)}"
            raise click.UsageError(f"--services: unknown service {name}: {hint}")


@click.command("migrate")
@click.option("--check", is_flag=True, help="Only show pending migrations; exit 1 if there are any.")
@click.pass_obj
def migrate(config_path: Path | None, *, check: bool) -> None:
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


class Finding(NamedTuple):
    """One line of the report."""

    state: State
    subject: str
    text: str


@click.command("check")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_obj
def check(config_path: Path | None, *, as_json: bool) -> None:
    """Check whether `serve` can run with this configuration and database. Changes nothing.

    Exit code 0: `serve` can run, perhaps with warnings. Otherwise: the exit code that `serve` would have.
    """
    found: list[Finding] = []
    with _reported(found, as_json=as_json):
        path = find_file(config_path, os.environ)
        settings = load_settings(path, os.environ)
        found.append(Finding("good", "configuration", _source(path)))
        found += [Finding("warning", "configuration", text) for text in file_warnings(path)]
        found += [Finding("warning", "database", text) for text in settings_warnings(settings)]
        found += [Finding("warning", "console", text) for text in console_warnings(settings)]
        read_logo(settings.console.logo)
        retry = settings.retry
        schedule = retry_schedule(retry.max_attempts, retry.base_delay_seconds, retry.max_delay_seconds)
        found.append(Finding("good", "retries", f"a delivery is given up after {schedule}"))
        found.append(_retention(settings.retention))
        if settings.database.embedded and is_new(data_dir(settings)):
            version = wheel_installation(None).version
            text = f"embedded PostgreSQL {version}: `serve` will create it in {data_dir(settings)}"
            found.append(Finding("good", "database", text))
            return
        with opened(settings) as database:
            found += asyncio.run(_check_database(settings, database))
    if any(finding.state == "failed" for finding in found):
        sys.exit(1)


def _retention(retention: RetentionSettings) -> Finding:
    """Say how long finished events are kept, and warn about a period that looks like a mistake."""
    if not retention.events_days:
        return Finding("good", "retention", "finished events are kept forever")
    text = f"finished events are removed after {duration(retention.events_days * ONE_DAY_SECONDS)}"
    is_short = retention.events_days * ONE_DAY_SECONDS < SHORT_RETENTION_SECONDS
    return Finding("warning" if is_short else "good", "retention", text)


async def _check_database(settings: Settings, database: Database) -> list[Finding]:
    server = await fetch_server_facts(database.dsn)
    where = str(database.embedded.folder) if database.embedded else without_password(database.dsn)
    found = [Finding("good", "database", f"PostgreSQL {server.version} at {where}")]
    found += [Finding("warning", "database", text) for text in database_warnings(settings.database, server)]
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
            console = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
            for finding in found:
                mark, colour = MARKS[finding.state]
                console.print(mark, style=colour, end=" ")
                console.print(f"{finding.subject:<14}{finding.text}")


def _source(path: Path | None) -> str:
    variables = ", ".join(sorted(setting_variables(os.environ)))
    file = str(path) if path else "defaults, no file"
    return f"{file}, and {variables} from the environment" if variables else file


@click.command(
    "token",
    epilog=example(
        "webhookd token shop --scope ingest > shop.token",
        "webhookd publish order.created '{\"id\": 1}' --token-file shop.token",
        "webhookd token acme --scope read --scope subscriptions --tenant acme",
    ),
)
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="What the token may do; can be repeated.",
)
@click.option("--tenant", help="Bind it to this tenant: only rows of the tenant exist for it.")
@json_option
def token(name: str, scopes: tuple[str, ...], tenant: str | None, *, as_json: bool) -> None:
    """Create a token called NAME for the HTTP API.

    The token is printed to stdout and stored nowhere. Its entry for webhookd.toml, with a digest of the
    token, is printed to stderr. Add the entry to webhookd.toml and reload the daemon.
    """
    if not name.isprintable() or not 1 <= len(name) <= MAX_TOKEN_NAME_CHARACTERS:
        raise click.UsageError(f"NAME must be 1 to {MAX_TOKEN_NAME_CHARACTERS} printable characters")
    if tenant is not None and not (re.match(TENANT, tenant) and len(tenant) <= MAX_TENANT_CHARACTERS):
        raise click.UsageError("--tenant: a tenant is 1 to 100 letters, digits and . _ : -")
    token = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(RANDOM_BYTES)).decode().rstrip("=")
    entry = {
        "name": name,
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
        "scopes": list(dict.fromkeys(scopes)),
    } | ({} if tenant is None else {"tenant": tenant})
    if as_json:
        click.echo(json.dumps({"token": token, "entry": entry}))
        return
    click.echo(token)
    # JSON strings and lists of strings are valid TOML.
    members = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items())
    click.echo("The token is shown only once. Add this entry to `tokens` in [api], and reload:", err=True)
    click.echo(f"  {{ {members} }},", err=True)
