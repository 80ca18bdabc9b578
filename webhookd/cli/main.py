"""`webhookd`: the commands, and what becomes of an error: one line on stderr, never a traceback.

Exit codes: 0 done, 1 refused or failed, 2 usage, 69 database unavailable, 78 bad configuration.
"""

import asyncio
import difflib
import os
import sys
from pathlib import Path

import click

from webhookd import __version__
from webhookd.config.load import find_file, load_settings
from webhookd.config.settings import SERVICES, Settings
from webhookd.model.errors import ConfigurationError, Refused, WebhookdError
from webhookd.store import migrations
from webhookd.supervisor import daemon

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="webhookd")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="The configuration file to use."
)
@click.pass_context
def commands(context: click.Context, config_path: Path | None) -> None:
    """Takes events and delivers them as signed HTTPS webhooks, durably, with PostgreSQL alone."""
    context.obj = config_path


@commands.command()
@click.option("--check", is_flag=True, help="Only say what would be done; exit 1 if anything would.")
@click.pass_obj
def migrate(config_path: Path | None, *, check: bool) -> None:
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


@commands.command()
@click.option("--services", help="Which services this instance runs, separated by commas (default: all).")
@click.pass_obj
def serve(config_path: Path | None, services: str | None) -> None:
    """Run an instance: route, orchestrate, deliver, until told to stop.

    SIGHUP reloads the configuration. SIGTERM drains and ends; a second one ends at once.
    """
    environment = dict(os.environ)
    if services is not None:
        _require_known(services)
        environment["WEBHOOKD_SERVICES_ENABLED"] = services

    # Found once: a reload that no longer finds it is refused, and does not fall back to the defaults.
    path = find_file(config_path, environment)

    def load() -> Settings:
        return load_settings(path, environment)

    daemon.serve(load(), load, path)


def main() -> None:
    """Run the command line."""
    try:
        commands(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see `{context.command_path} --help`)" if context else ""
        click.echo(f"webhookd: {error.format_message()}{hint}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except WebhookdError as error:
        hint = f" ({error.hint})" if isinstance(error, Refused) and error.hint else ""
        click.echo(f"webhookd: {error}{hint}".replace("\n", " "), err=True)
        sys.exit(error.exit_code)


def _require_known(services: str) -> None:
    for name in filter(None, map(str.strip, services.split(","))):
        if name not in SERVICES:
            close = difflib.get_close_matches(name, SERVICES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SERVICES)}"
            raise click.UsageError(f"--services: unknown service {name}: {hint}")


def _dsn(settings: Settings) -> str:
    if not settings.database.dsn:
        raise ConfigurationError("no database: set [database] dsn in webhookd.toml, or WEBHOOKD_DATABASE_DSN")
    return settings.database.dsn
