"""`webhookd deliveries`: lists deliveries, and explains the state of one."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    created_options,
    escaped,
    event_id,
    example,
    json_option,
    listing_options,
    one_more,
    row_id,
)
from webhookd.cli.output import excerpt
from webhookd.core.states import SagaStatus

# Enough of an endpoint's response to recognise the error page of a proxy or a framework.
EXCERPT_CHARACTERS = 60

# As the command line names them elsewhere.
HOLDS = {"tenant_inactive": "tenant inactive", "unverified": "not verified"}
DELETED = "never sent: the subscription is deleted"

delivery_ids = click.argument("delivery_ids", metavar="ID...", type=row_id, nargs=-1, required=True)

_DESCRIPTIONS = {
    SagaStatus.PENDING: "waiting for the first attempt",
    SagaStatus.IN_PROGRESS: "an attempt is in progress",
    SagaStatus.PENDING_RETRY: "failed so far, waiting for the next attempt",
    SagaStatus.COMPLETED: "delivered",
    SagaStatus.DEAD_LETTERED: "failed permanently: now a dead letter",
    "not_routed": "not routed to this subscription",
}


@click.group("deliveries")
def command() -> None:
    """List deliveries, and explain why one succeeded, failed or is waiting."""


@command.command("list", epilog=example("webhookd deliveries list --status PendingRetry --subscription 3"))
@click.option(
    "--status",
    type=click.Choice([status.value for status in SagaStatus]),
    help="Only deliveries with this status.",
)
@click.option(
    "--subscription",
    "subscription_id",
    type=row_id,
    metavar="ID",
    help="Only deliveries to this subscription.",
)
@click.option("--event", "event_id", type=event_id, metavar="ID", help="Only deliveries of this event.")
@click.option("--tenant", help="Only deliveries of this tenant.")
@click.option("--event-type", help="Only deliveries of events of this type.")
@click.option("--error-code", metavar="CODE", help="Only deliveries whose last failure was this.")
@created_options
@listing_options
@asks_daemon
def list_(client: Client, *, limit: int | None, as_json: bool, **query: Any) -> None:
    """List deliveries, newest first."""
    output.list_rows(
        client.rows("/v1/deliveries", query, one_more(limit)),
        ["id", "event", "subscription", "status", "attempts", "changed", "next attempt or error"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No deliveries found.",
    )


@command.command("show", epilog=example("webhookd deliveries show 12", "webhookd deliveries show --event 7"))
@click.argument("saga_id", metavar="[DELIVERY_ID]", type=row_id, required=False)
@click.option(
    "--event", type=event_id, metavar="ID", help="Explain this event for every subscription to its type."
)
@json_option
@asks_daemon
def show(client: Client, *, saga_id: int | None, event: int | None, as_json: bool) -> None:
    """Explain the status of a delivery, and show its attempts.

    With --event ID instead, show for each subscription to the event's type
    whether the event was delivered, is waiting, failed permanently or was not routed, and why.
    """
    if (saga_id is None) == (event is None):
        raise click.UsageError("either a delivery's id or --event ID is required")
    answer = client.get(f"/v1/events/{event}" if saga_id is None else f"/v1/deliveries/{saga_id}")
    if as_json:
        output.show_json(answer.body)
    elif saga_id is None:
        output.show(*event_parts(answer.fields))
    else:
        output.show(*_delivery_parts(answer.value))


@command.command("resend", epilog=example("webhookd deliveries resend 12"))
@delivery_ids
@json_option
@asks_daemon
def resend(client: Client, *, delivery_ids: tuple[int, ...], as_json: bool) -> None:
    """Send finished deliveries again, each as a new delivery. A dead letter is requeued."""
    for delivery_id in delivery_ids:
        answer = client.post(f"/v1/deliveries/{delivery_id}/resend")
        if as_json:
            output.show_json(answer.body)
        else:
            click.echo(f"delivery {delivery_id}: resent as delivery {answer.value['saga_id']}")


@command.command("retry", epilog=example("webhookd deliveries retry 12"))
@delivery_ids
@json_option
@asks_daemon
def retry(client: Client, *, delivery_ids: tuple[int, ...], as_json: bool) -> None:
    """Make the next attempt of failed deliveries due now."""
    for delivery_id in delivery_ids:
        answer = client.post(f"/v1/deliveries/{delivery_id}/retry")
        if as_json:
            output.show_json(answer.body)
        else:
            click.echo(f"delivery {delivery_id}: the next attempt is due now")


def _cells(row: Mapping[str, Any]) -> output.Row:
    if reason := row["held_because"]:
        last = DELETED if reason == "deleted" else f"held: {HOLDS.get(reason, reason)}"
    elif row["status"] == SagaStatus.PENDING_RETRY:
        last = output.time_cell(row["next_attempt_at"])
    else:
        last = output.text(_error(row))
    ids = (str(row[name]) for name in ("id", "event_id", "subscription_id"))
    status, attempts = output.state(row["status"]), str(row["attempt_count"])
    return (*ids, status, attempts, output.time_cell(row["updated_at"]), last)


def _delivery_parts(saga: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _headline(f"delivery {saga['id']}", saga)
    sent_to = {attempt.get("callback_url") for attempt in saga["attempts"]} - {None}
    has_moved = len(sent_to) > 1
    to = [("to", output.text(address)) for address in sent_to if not has_moved]
    yield output.fields([*_why(saga), *_facts(saga), *to])
    yield output.heading("Attempts")
    attempts = [_attempt_cells(attempt, with_address=has_moved) for attempt in saga["attempts"]]
    columns = ["#", "when", "duration", "result", *(["to"] if has_moved else []), "response"]
    yield output.table(columns, attempts) if saga["attempts"] else "none yet"


def _headline(what: str, saga: Mapping[str, Any]) -> RenderableType:
    status = saga["status"]
    description = DELETED if saga.get("reason") == "held_deleted" else _DESCRIPTIONS.get(status, "")
    return output.line(f"{what}  ", output.state(status), f"  {description}")


def _facts(saga: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    yield "event", str(saga["event_id"])
    yield "subscription", str(saga["subscription_id"])
    yield "created", output.time_field(saga["created_at"])
    yield "changed", output.time_field(saga["updated_at"])
    yield "attempts", str(saga["attempt_count"])
    if error := _error(saga):
        yield "error", output.text(error)
    if saga.get("dead_letter_id"):
        yield "requeued from", f"dead letter {saga['dead_letter_id']}"
    if saga.get("resent_from"):
        yield "repeats", f"delivery {saga['resent_from']}"


def _error(saga: Mapping[str, Any]) -> str | None:
    """Return the last error, unless a later attempt succeeded: then it belongs to that attempt only."""
    return None if saga["status"] == SagaStatus.COMPLETED else saga.get("final_error_code")


def _why(saga: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    """Yield the daemon's explanation, and what happens next."""
    yield "why", output.text(saga["explanation"])
    if saga["status"] == SagaStatus.PENDING_RETRY and saga.get("next_attempt_at"):
        yield "next attempt", output.time_field(saga["next_attempt_at"])
    if saga.get("buried_as") and saga.get("reason") != "requeued":
        yield "to retry", f"webhookd dead-letters requeue {saga['buried_as']}"


def _attempt_cells(attempt: Mapping[str, Any], *, with_address: bool) -> output.Row:
    took = attempt.get("duration_ms")
    return (
        str(attempt["attempt"]),
        output.time_cell(attempt["finished_at"] or attempt["attempt_at"]),
        output.NONE if took is None else f"{took} ms",
        _result(attempt),
        *([output.text(attempt.get("callback_url"))] if with_address else []),
        # Escaped, because the endpoint chose these bytes.
        excerpt(attempt.get("response_excerpt") or output.NONE, EXCERPT_CHARACTERS),
    )


def _result(attempt: Mapping[str, Any]) -> output.Cell:
    if attempt.get("error_code"):
        return output.state("failing", attempt["error_code"])
    if attempt.get("response_status"):
        return output.state("delivered", str(attempt["response_status"]))
    return output.state("Pending", attempt["status"])


def labels_in_words(labels: Mapping[str, str]) -> str:
    """Return the labels as they are written on the command line."""
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def event_parts(event: Mapping[str, msgspec.Raw]) -> Iterator[RenderableType]:
    """The payload is not decoded: it may contain numbers that Python cannot represent."""
    known = {name: msgspec.json.decode(raw) for name, raw in event.items() if name != "payload"}
    payload = bytes(event["payload"]).decode("utf-8", "replace")
    yield output.line(f"event {known['id']}  {escaped(known['event_type'])}")
    yield output.fields(
        [
            ("created", output.time_field(known["created_at"])),
            ("idempotency key", output.text(known.get("idempotency_key"))),
            ("correlation id", output.text(known.get("correlation_id"))),
            ("tenant", output.text(known.get("tenant"))),
            ("labels", output.text(labels_in_words(known.get("labels") or {}))),
            ("payload", _removed(known) or excerpt(payload, EXCERPT_CHARACTERS)),
        ]
    )
    deliveries = known["deliveries"]
    if known["no_subscription"]:
        yield f"\n{escaped(known['no_subscription'])}"
    for delivery in deliveries:
        yield _headline(f"\nsubscription {delivery['subscription_id']}", delivery)
        yield output.fields(_event_delivery_fields(delivery))
    if known.get("more_deliveries"):
        yield f"\nThere are more deliveries: webhookd deliveries list --event {known['id']}"


def _removed(event: Mapping[str, Any]) -> str:
    """Say when retention removed the payload; empty if it did not."""
    removed_at = event.get("payload_removed_at")
    return f"removed by retention {output.time_field(removed_at)}" if removed_at else ""


def _event_delivery_fields(delivery: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    if delivery.get("callback_url"):
        yield "to", output.text(delivery["callback_url"])
    yield from _why(delivery)
    if delivery.get("saga_id"):
        yield "delivery", f"{delivery['saga_id']}, attempts: {delivery['attempt_count']}"
    if error := _error(delivery):
        yield "error", output.text(error)
