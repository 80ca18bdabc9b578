"""`webhookd serve`: runs a daemon until it gets a signal to stop."""

import difflib
import os
from pathlib import Path

import click

from webhookd.core.configuration import find_file, load_settings
from webhookd.core.settings import SERVICES, Settings
from webhookd.daemon import daemon


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
def command(config_path: Path | None, services: str | None, *, local: bool) -> None:
    """Run a daemon that accepts events and delivers them, until it is stopped.

    SIGHUP reloads the configuration. SIGTERM or Ctrl-C stops after requests in flight are finished; a second
    one stops at once.
    """
    environment = dict(os.environ)
    if services is not None:
        _reject_unknown(services)
        environment["WEBHOOKD_SERVICES_ENABLED"] = services
    if local:
        environment["WEBHOOKD_DELIVERY_LOCAL"] = "true"

    # Searched once: if the file is gone, a reload must fail instead of falling back to the defaults.
    path = find_file(config_path, environment)

    def load() -> Settings:
        return load_settings(path, environment)

    daemon.serve(load(), load, path)


def _reject_unknown(services: str) -> None:
    for name in filter(None, map(str.strip, services.split(","))):
        if name not in SERVICES:
            close = difflib.get_close_matches(name, SERVICES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(SERVICES)}"
            raise click.UsageError(f"--services: unknown service {name}: {hint}")
