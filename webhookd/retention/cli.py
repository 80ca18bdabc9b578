"""`webhookd erasures`: shows erasures; and how commands that begin one wait for it."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import example, json_option, listing_options, one_more, row_id
from webhookd.core.errors import RequestRefused

POLL_SECONDS = 0.5
FORBIDDEN = 403
COUNTS = ("events", "deliveries", "attempts", "dead_letters", "subscriptions", "jobs")
COLUMNS = ["id", "of", "requested", "by", "state", "events", "deliveries"]


@click.group("erasures")
def command() -> None:
    """Show erasures of tenants and subscriptions: their progress, and then the evidence.

    `webhookd tenants erase` and `webhookd subscriptions delete --erase` begin one.
    """


@command.command(
    "list", epilog=example("webhookd erasures list --status running", "webhookd erasures list --tenant acme")
)
@click.option("--status", type=click.Choice(["running", "finished"]), help="Only erasures in this state.")
@click.option("--tenant", help="Only erasures of this tenant and of its subscriptions, also finished ones.")
@click.option(
    "--subscription", "subscription_id", type=row_id, metavar="ID", help="Only erasures of this subscription."
)
@listing_options
@asks_daemon
def list_(client: Client, *, limit: int | None, as_json: bool, **query: Any) -> None:
    """List erasures, newest first."""
    output.list_rows(
        client.rows("/v1/erasures", query, one_more(limit)),
        COLUMNS,
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No erasures found.",
    )


@command.command("show", epilog=example("webhookd erasures show 3"))
@click.argument("erasure_id", metavar="ID", type=row_id)
@json_option
@asks_daemon
def show(client: Client, *, erasure_id: int, as_json: bool) -> None:
    """Show an erasure, with the number of rows that it removed so far."""
    answer = client.get(f"/v1/erasures/{erasure_id}")
    output.show_answer(answer, lambda answer: [output.fields(_facts(answer.value))], as_json=as_json)


def _cells(row: Mapping[str, Any]) -> output.Row:
    return (
        str(row["id"]),
        output.text(subject(row)),
        output.time_cell(row["requested_at"]),
        output.text(row["requested_by"]),
        state(row),
        str(row["events"]),
        str(row["deliveries"]),
    )


def _facts(row: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    yield "erasure", str(row["id"])
    yield "of", output.text(subject(row))
    if row["tenant_sha256"]:
        yield "SHA-256 of the tenant", output.text(row["tenant_sha256"])
    yield "requested", output.time_field(row["requested_at"])
    yield "by", output.text(row["requested_by"])
    yield "state", state(row)
    if row["finished_at"]:
        yield "finished", output.time_field(row["finished_at"])
    for name in COUNTS:
        yield name.replace("_", " "), str(row[name])


def subject(row: Mapping[str, Any]) -> str:
    """Return what is erased, in words. A finished erasure has only the SHA-256 of its tenant."""
    if row["subscription_id"] is not None:
        return f"subscription {row['subscription_id']}"
    return f"tenant {row['tenant']}" if row["tenant"] else f"tenant sha256:{row['tenant_sha256'][:12]}…"


def state(row: Mapping[str, Any]) -> str:
    """Return whether it is finished, and otherwise what it waits for."""
    if row["finished_at"]:
        return "finished"
    return f"waits for {row['waits_for']}" if row["waits_for"] else "running"


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
    click.echo(f"erased: {removed or 'nothing was left'}; evidence: webhookd erasures show {erasure['id']}")
