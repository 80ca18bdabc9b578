"""`webhookd dead-letters`: what failed for good, and its second chance."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import example, json_option, listing_options, one_more, row_id, time_or_age
from webhookd.cli.text import escaped, excerpt
from webhookd.deliveries.cli.requeue import requeue_each, requeue_matching

PAYLOAD_CHARACTERS = 2000


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `which`: the API's filter, with what was given."""

    @click.option("--subscription", type=row_id, metavar="ID", help="Only those of this subscription.")
    @click.option("--error-code", help="Only those with this last error, such as HTTP_500 or TIMEOUT.")
    @click.option(
        "--failed-after",
        type=time_or_age,
        metavar="TIME",
        help="Only those that failed at this time or later: 2026-01-31T08:00:00Z, or 2h ago as 2h.",
    )
    @click.option(
        "--failed-before", type=time_or_age, metavar="TIME", help="Only those that failed before this time."
    )
    @functools.wraps(command)
    def wrapped(*arguments: Any, subscription: int | None, **others: Any) -> None:
        which = {
            "subscription_id": subscription,
            "error_code": others.pop("error_code"),
            "failed_after": others.pop("failed_after"),
            "failed_before": others.pop("failed_before"),
        }
        given = {name: value for name, value in which.items() if value is not None}
        command(*arguments, which=given, **others)

    return wrapped


@click.group("dead-letters")
def command() -> None:
    """Look at what failed for good, and try it again."""


@command.command("list", epilog=example("webhookd dead-letters list --error-code TIMEOUT --failed-after 2h"))
@filter_options
@listing_options
@asks_daemon
def list_(client: Client, *, which: dict[str, Any], limit: int | None, as_json: bool) -> None:
    """List dead letters, the newest first."""
    output.list_rows(
        client.rows("/v1/dead-letters", which, one_more(limit)),
        ["id", "event", "subscription", "failed", "error", "requeued as"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="There are no such dead letters.",
    )


@command.command("show", epilog=example("webhookd dead-letters show 5"))
@click.argument("dead_letter_id", metavar="ID", type=row_id)
@json_option
@asks_daemon
def show(client: Client, *, dead_letter_id: int, as_json: bool) -> None:
    """Show a dead letter with its payload: the beginning of a long one, all of it with --json."""
    answer = client.get(f"/v1/dead-letters/{dead_letter_id}")
    output.show_answer(answer, lambda told: [output.fields(_facts(told.fields))], as_json=as_json)


@command.command(
    "requeue",
    epilog=example(
        "webhookd dead-letters requeue 5 6",
        "webhookd dead-letters requeue --subscription 3 --failed-after 2h",
        "webhookd dead-letters requeue --subscription 3 --failed-after 2h --yes",
    ),
)
@click.argument("dead_letter_ids", metavar="[ID]...", type=row_id, nargs=-1)
@click.option("--all", "every", is_flag=True, help="All dead letters.")
@filter_options
@click.option("--yes", is_flag=True, help="Really do it.")
@json_option
@asks_daemon
def requeue(
    client: Client,
    *,
    dead_letter_ids: tuple[int, ...],
    every: bool,
    which: dict[str, Any],
    yes: bool,
    as_json: bool,
) -> None:
    """Deliver dead letters again, each as a new delivery; each only once.

    By id; or by --all or a filter, which is a dry run that counts and exits with 1 unless --yes is given.
    Ctrl-C leaves requeued what is requeued, and the same command goes on from there.
    """
    if dead_letter_ids:
        if every or which:
            raise click.UsageError("give ids, or a filter, not both")
        requeue_each(client, dead_letter_ids, as_json=as_json)
    elif every or which:
        if every and which:
            raise click.UsageError("--all and a filter contradict each other")
        requeue_matching(client, which, yes=yes, as_json=as_json)
    else:
        raise click.UsageError("give ids, a filter, or --all")


def _cells(row: Mapping[str, Any]) -> output.Row:
    return (
        str(row["id"]),
        str(row["event_id"]),
        str(row["subscription_id"]),
        output.time_cell(row["failed_at"]),
        output.text(row["final_error_code"]),
        output.text(row["requeued_saga_id"]),
    )


def _facts(letter: Mapping[str, msgspec.Raw]) -> Iterator[tuple[str, output.Cell]]:
    known = {name: msgspec.json.decode(raw) for name, raw in letter.items() if name != "payload_snapshot"}
    yield "dead letter", str(known["id"])
    yield "event", f"{known['event_id']}  {escaped(known['event_type'])}"
    yield "subscription", str(known["subscription_id"])
    yield "delivery", f"{known['saga_id']}: webhookd deliveries show {known['saga_id']}"
    yield "failed", output.time_field(known["failed_at"])
    yield "error", output.text(known["final_error_code"])
    requeued = known["requeued_saga_id"]
    yield "requeued", "not yet" if requeued is None else f"as delivery {requeued}"
    payload = bytes(letter["payload_snapshot"]).decode("utf-8", "replace")
    yield "payload", excerpt(payload, PAYLOAD_CHARACTERS)
