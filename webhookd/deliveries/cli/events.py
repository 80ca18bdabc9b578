"""`webhookd events`: finds events, and shows what became of one."""

from collections.abc import Mapping
from typing import Any

import click

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    created_options,
    event_id,
    example,
    json_option,
    label,
    listing_options,
    one_more,
)
from webhookd.deliveries.cli.deliveries import event_parts, labels_in_words


@click.group("events")
def command() -> None:
    """Find events, and show what became of one."""


@command.command(
    "list",
    epilog=example(
        "webhookd events list --tenant acme --created-after 2h", "webhookd events list --label order=7"
    ),
)
@click.option("--tenant", help="Only events of this tenant.")
@click.option("--event-type", help="Only events of this type.")
@click.option("--idempotency-key", "--key", metavar="KEY", help="Only events with this key.")
@click.option("--correlation-id", metavar="ID", help="Only events with this correlation id.")
@click.option(
    "--label",
    "labels",
    type=label,
    metavar="NAME=VALUE",
    multiple=True,
    help="Only events with this label; can be repeated.",
)
@created_options
@listing_options
@asks_daemon
def list_(
    client: Client, *, labels: tuple[tuple[str, str], ...], limit: int | None, as_json: bool, **query: Any
) -> None:
    """List events, newest first."""
    asked = query | {f"label.{name}": value for name, value in labels}
    output.list_rows(
        client.rows("/v1/events", asked, one_more(limit)),
        ["id", "type", "created", "tenant", "key", "correlation id", "labels"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No events found.",
    )


@command.command("show", epilog=example("webhookd events show 7"))
@click.argument("event_id", metavar="ID", type=event_id)
@json_option
@asks_daemon
def show(client: Client, *, event_id: int, as_json: bool) -> None:
    """Show an event, and for each subscription to its type whether it was delivered, and why not."""
    answer = client.get(f"/v1/events/{event_id}")
    output.show_answer(answer, lambda answer: event_parts(answer.fields), as_json=as_json)


def _cells(row: Mapping[str, Any]) -> output.Row:
    return (
        str(row["id"]),
        output.text(row["event_type"]),
        output.time_cell(row["created_at"]),
        output.text(row["tenant"]),
        output.text(row["idempotency_key"]),
        output.text(row["correlation_id"]),
        output.text(labels_in_words(row["labels"])),
    )
