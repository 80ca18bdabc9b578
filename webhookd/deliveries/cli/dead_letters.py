"""`webhookd dead-letters`: shows deliveries that failed permanently, and requeues them.

A requeue by filter runs in batches, one request each, so that progress can be shown. A batch is committed
when its response arrives: an interrupted requeue keeps what was done, and can be repeated.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    escaped,
    example,
    given,
    json_option,
    listing_options,
    one_more,
    row_id,
    time_or_age,
)
from webhookd.cli.output import excerpt
from webhookd.core.errors import RequestRefused

PAYLOAD_CHARACTERS = 2000
# Small enough for a progress bar to move, large enough for the round trip not to matter.
BATCH_SIZE = 1000
NOT_DONE = 1
ALREADY_REQUEUED = "already_requeued"


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the filter options, with the API's parameter names."""
    options = (
        click.option("--tenant", help="Only dead letters of this tenant."),
        click.option(
            "--subscription",
            "subscription_id",
            type=row_id,
            metavar="ID",
            help="Only dead letters of this subscription.",
        ),
        click.option(
            "--error-code", help="Only dead letters with this last error, for example HTTP_500 or TIMEOUT."
        ),
        click.option(
            "--failed-after",
            type=time_or_age,
            metavar="TIME",
            help="Only dead letters that failed since this time: 2026-01-31T08:00:00Z, or an age such as 2h.",
        ),
        click.option(
            "--failed-before",
            type=time_or_age,
            metavar="TIME",
            help="Only dead letters that failed before this time.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group("dead-letters")
def command() -> None:
    """Show and requeue deliveries that failed permanently."""


@command.command("list", epilog=example("webhookd dead-letters list --error-code TIMEOUT --failed-after 2h"))
@filter_options
@listing_options
@asks_daemon
def list_(client: Client, *, limit: int | None, as_json: bool, **which: Any) -> None:
    """List dead letters, newest first."""
    output.list_rows(
        client.rows("/v1/dead-letters", which, one_more(limit)),
        ["id", "event", "subscription", "failed", "error", "requeued as"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No dead letters found.",
    )


@command.command("show", epilog=example("webhookd dead-letters show 5"))
@click.argument("dead_letter_id", metavar="ID", type=row_id)
@json_option
@asks_daemon
def show(client: Client, *, dead_letter_id: int, as_json: bool) -> None:
    """Show a dead letter and the beginning of its payload. With --json the payload is complete."""
    answer = client.get(f"/v1/dead-letters/{dead_letter_id}")
    output.show_answer(answer, lambda answer: [output.fields(_facts(answer.fields))], as_json=as_json)


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
@click.option("--yes", is_flag=True, help="Requeue them; without it, --all and filters only count.")
@json_option
@asks_daemon
def requeue(
    client: Client, *, dead_letter_ids: tuple[int, ...], every: bool, yes: bool, as_json: bool, **filters: Any
) -> None:
    """Deliver dead letters again, each as a new delivery. A dead letter is requeued at most once.

    Select them by ID, by filter, or with --all. A filter or --all without --yes is a dry run: it counts, and
    exits with 1 if there is something to requeue. After Ctrl-C, run the same command again to continue.
    """
    which = given(filters)
    if dead_letter_ids:
        if every or which:
            raise click.UsageError("use either ids or a filter, not both")
        _requeue_each(client, dead_letter_ids, as_json=as_json)
    elif every or which:
        if every and which:
            raise click.UsageError("use either --all or a filter, not both")
        _requeue_matching(client, which, yes=yes, as_json=as_json)
    else:
        raise click.UsageError("ids, a filter or --all is required")


def _requeue_each(client: Client, dead_letter_ids: Sequence[int], *, as_json: bool) -> None:
    """Requeue by id. If one is rejected, continue with the next and exit with 1 at the end."""
    rejected = False
    for dead_letter_id in dead_letter_ids:
        result: dict[str, Any] = {"id": dead_letter_id}
        try:
            result["saga_id"] = client.post(f"/v1/dead-letters/{dead_letter_id}/requeue").value["saga_id"]
            text = f"requeued as delivery {result['saga_id']}"
        except RequestRefused as error:
            result |= {"code": error.code, "saga_id": error.members.get("saga_id")}
            if error.code == ALREADY_REQUEUED:
                text = f"was already requeued as delivery {result['saga_id']}"
            else:
                text, rejected = f"rejected: {error}", True
        if as_json:
            output.show_json(msgspec.json.encode(result))
        else:
            click.echo(f"dead letter {dead_letter_id}: {text}")
    if rejected:
        sys.exit(NOT_DONE)


def _requeue_matching(client: Client, which: dict[str, Any], *, yes: bool, as_json: bool) -> None:
    """Count the dead letters; with `yes`, requeue those, but none that were added meanwhile."""
    counted = Counter(matched=0, requeued=0, skipped=0, payload_removed=0)
    bound = dict(which)
    for batch in _batches(client, which, dry_run=True):
        counted.update({name: batch[name] for name in counted})
        bound["failed_before"] = batch["failed_before"]
    if not yes or not counted["requeued"]:
        _print_counts(counted, "requeued" if yes else "would be requeued", as_json=as_json, dry_run=not yes)
        if counted["requeued"]:
            if not as_json:
                click.echo(f"Nothing was requeued. To requeue them: {_command(which)}", err=True)
            sys.exit(NOT_DONE)
        return
    done = Counter(dict.fromkeys(counted, 0))
    try:
        with output.progress(counted["matched"], "requeue") as progress:
            for batch in _batches(client, bound, dry_run=False):
                done.update({name: batch[name] for name in done})
                progress.advance(progress.task_ids[0], batch["matched"])
    finally:  # also after an error or Ctrl-C
        _print_counts(done, "requeued", as_json=as_json, dry_run=False)


def _batches(client: Client, which: Mapping[str, Any], *, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Yield the response of each batch. The first one sets the upper time limit, by the database's clock."""
    request = {"filter": dict(which), "dry_run": dry_run, "limit": BATCH_SIZE, "after_id": 0}
    while True:
        batch = client.post("/v1/dead-letters/requeue", request).value
        yield batch
        if batch["last_id"] is None:
            return
        request["after_id"] = batch["last_id"]
        request["filter"] = dict(which) | {"failed_before": batch["failed_before"]}


def _print_counts(counts: Counter[str], what: str, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        output.show_json(msgspec.json.encode({**counts, "dry_run": dry_run}))
        return
    matched, requeued, skipped, payload_removed = counts.values()
    reasons = []
    if payload_removed:
        reasons.append(f"{payload_removed} whose payload was removed")
    if skipped > payload_removed:
        reasons.append("already requeued, or the subscription is disabled, deleted or unverified")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    click.echo(f"{matched} match, {requeued} {what}, {skipped} skipped{why}")


def _command(which: Mapping[str, Any]) -> str:
    options = {name.removesuffix("_id").replace("_", "-"): str(value) for name, value in which.items()}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return shlex.join(["webhookd", "dead-letters", "requeue", *(words or ["--all"]), "--yes"])


def _cells(row: Mapping[str, Any]) -> output.Row:
    ids = (str(row[name]) for name in ("id", "event_id", "subscription_id"))
    error, requeued_as = output.text(row["final_error_code"]), row["requeued_saga_id"]
    if requeued_as is None and row["payload_removed_at"] is not None:
        requeued_as = "payload removed"
    return (*ids, output.time_cell(row["failed_at"]), error, output.text(requeued_as))


def _facts(letter: Mapping[str, msgspec.Raw]) -> Iterator[tuple[str, output.Cell]]:
    known = {name: msgspec.json.decode(raw) for name, raw in letter.items() if name != "payload_snapshot"}
    yield "dead letter", str(known["id"])
    yield "event", f"{known['event_id']}  {escaped(known['event_type'])}"
    yield "subscription", str(known["subscription_id"])
    yield "delivery", f"{known['saga_id']}: webhookd deliveries show {known['saga_id']}"
    yield "failed", output.time_field(known["failed_at"])
    yield "error", output.text(known["final_error_code"])
    requeued = known["requeued_saga_id"]
    yield "requeued", "no" if requeued is None else f"as delivery {requeued}"
    if known["payload_removed_at"] is not None:
        yield "payload", f"removed by retention {output.time_field(known['payload_removed_at'])}"
        return
    payload = bytes(letter["payload_snapshot"]).decode("utf-8", "replace")
    yield "payload", excerpt(payload, PAYLOAD_CHARACTERS)
