"""`webhookd serve`: an instance, until it is told to stop."""

import difflib
import os
from pathlib import Path

import click

from webhookd.core.configuration import find_file, load_settings
from webhookd.core.settings import SERVICES, Settings
from webhookd.daemon import daemon


@click.command("serve")
@click.option("--services", help="Which services this instance runs, separated by commas (default: all).")
@click.option(
    "--local",
    is_flag=True,
    help="For development: also deliver to this machine, and trust the certificate of `webhookd listen`.",
)
@click.pass_obj
def command(config_path: Path | None, services: str | None, *, local: bool) -> None:
    """Run an instance: route, orchestrate, deliver, until told to stop.

    SIGHUP reloads the configuration. SIGTERM drains and ends; a second one ends at once.
    """
    environment = dict(os.environ)
    if services is not None:
        _require_known(services)
        environment["WEBHOOKD_SERVICES_ENABLED"] = services
    if local:
        environment["WEBHOOKD_DELIVERY_LOCAL"] = "true"

    # Found once: a reload that no longer finds it is refused, and does not fall back to the defaults.
    path = find_file(config_path, environment)

    def load() -> Settings:
        return load_settings(path, environment)

    daemon.serve(load(), load, path)


def _require_known(services: str) -> None:
    for name in filter(None, map(str.strip, services.split(","))):
        if name not in SERVICES:
            close = difflib.get_close_matches(name, SERVICES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(SERVICES)}"
            raise click.UsageError(f"--services: unknown service {name}: {hint}")
