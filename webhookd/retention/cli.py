"""How commands wait for an erasure."""

import time
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client

POLL_SECONDS = 0.5
COUNTS = ("events", "deliveries", "attempts", "dead_letters", "subscriptions", "jobs")


def wait_for_erasure(client: Client, erasure: dict[str, Any], *, as_json: bool = False) -> None:
    """Wait until the daemon has finished the erasure, then print what was removed."""
    with output.progress(None, "removed") as progress:
        while erasure["status"] == "running":
            time.sleep(POLL_SECONDS)
            erasure = client.get(f"/v1/erasures/{erasure['id']}").value
            progress.update(progress.task_ids[0], completed=sum(erasure[name] for name in COUNTS))
    if as_json:
        output.show_json(msgspec.json.encode(erasure))
        return
    removed = ", ".join(f"{erasure[name]} {name.replace('_', ' ')}" for name in COUNTS if erasure[name])
    click.echo(f"erased: {removed or 'nothing was left'}; evidence: /v1/erasures/{erasure['id']}")
