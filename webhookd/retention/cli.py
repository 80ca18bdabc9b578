"""How commands wait for an erasure."""

import time
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client
from webhookd.core.errors import RequestRefused

POLL_SECONDS = 0.5
FORBIDDEN = 403
COUNTS = ("events", "deliveries", "attempts", "dead_letters", "subscriptions", "jobs")


def wait_for_erasure(client: Client, erasure: dict[str, Any], *, as_json: bool = False) -> None:
    """Wait until the daemon has finished the erasure, then print what was removed."""
    shown = None
    with output.progress(None, "removed") as progress:
        while erasure["status"] == "running":
            time.sleep(POLL_SECONDS)
            try:
                erasure = client.get(f"/v1/erasures/{erasure['id']}").value
            except RequestRefused as error:
                if error.status != FORBIDDEN:
                    raise
                click.echo(f"erasure {erasure['id']} has started; this token cannot read its progress")
                return
            if erasure["waits_for"] not in (None, shown):
                shown = erasure["waits_for"]
                click.echo(f"erasure {erasure['id']} waits for {shown}", err=True)
            progress.update(progress.task_ids[0], completed=sum(erasure[name] for name in COUNTS))
    if as_json:
        output.show_json(msgspec.json.encode(erasure))
        return
    removed = ", ".join(f"{erasure[name]} {name.replace('_', ' ')}" for name in COUNTS if erasure[name])
    click.echo(f"erased: {removed or 'nothing was left'}; evidence: /v1/erasures/{erasure['id']}")
