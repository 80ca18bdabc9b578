"""`webhookd deliveries`: what became of events, and why."""

from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import event_id, example, json_option, listing_options, one_more, row_id
from webhookd.cli.text import escaped, excerpt
from webhookd.core.states import SagaStatus

# Of what an endpoint answered: enough to see which page of whose server it was.
EXCERPT_CHARACTERS = 60

_IN_WORDS = {
    SagaStatus.PENDING: "waits for its first attempt",
    SagaStatus.IN_PROGRESS: "an attempt is under way",
    SagaStatus.PENDING_RETRY: "failed so far, waits for the next attempt",
    SagaStatus.COMPLETED: "delivered",
    SagaStatus.DEAD_LETTERED: "given up: in the dead letters",
    "not_routed": "not routed to this subscription",
}


@click.group("deliveries")
def command() -> None:
    """Look at events on their way to subscriptions, and why."""


@command.command("list", epilog=example("webhookd deliveries list --status PendingRetry --subscription 3"))
@click.option(
    "--status",
    type=click.Choice([status.value for status in SagaStatus]),
    help="Only those in this state.",
)
@click.option("--subscription", type=row_id, metavar="ID", help="Only those to this subscription.")
@click.option("--event", type=event_id, metavar="ID", help="Only those of this event.")
@listing_options
@asks_daemon
def list_(
    client: Client,
    *,
    status: str | None,
    subscription: int | None,
    event: int | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List deliveries, the newest first."""
    query = {"status": status, "subscription_id": subscription, "event_id": event}
    output.list_rows(
        client.rows("/v1/deliveries", query, one_more(limit)),
        ["id", "event", "subscription", "status", "attempts", "changed", "next / error"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="There are no such deliveries.",
    )


@command.command("show", epilog=example("webhookd deliveries show 12", "webhookd deliveries show --event 7"))
@click.argument("saga_id", type=row_id, required=False)
@click.option(
    "--event", type=event_id, metavar="ID", help="Answer for every subscription of this event's type."
)
@json_option
@asks_daemon
def show(client: Client, *, saga_id: int | None, event: int | None, as_json: bool) -> None:
    """Tell why a delivery is where it is, with each of its attempts.

    SAGA_ID is the delivery's id. With --event ID instead: for each subscription of the event's type, whether
    it was delivered, waits, was given up, or was never routed, and why.
    """
    if (saga_id is None) == (event is None):
        raise click.UsageError("give a delivery's id, or --event ID")
    answer = client.get(f"/v1/events/{event}" if saga_id is None else f"/v1/deliveries/{saga_id}")
    if as_json:
        output.show_json(answer.body)
    elif saga_id is None:
        output.show(*_event_parts(answer.fields))
    else:
        output.show(*_delivery_parts(answer.value))


def _cells(row: Mapping[str, Any]) -> output.Row:
    if row.get("held"):
        last = "held: its subscription is paused or unverified"
    elif row["status"] == SagaStatus.PENDING_RETRY:
        last = output.time_cell(row["next_attempt_at"])
    else:
        last = output.text(row["final_error_code"])
    return (
        str(row["id"]),
        str(row["event_id"]),
        str(row["subscription_id"]),
        output.state(row["status"]),
        str(row["attempt_count"]),
        output.time_cell(row["updated_at"]),
        last,
    )


def _delivery_parts(saga: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield output.line(f"delivery {saga['id']}  ", output.state(saga["status"]), f"  {_in_words(saga)}")
    yield output.fields([*_why(saga), *_facts(saga)])
    yield output.heading("Attempts")
    attempts = saga.get("attempts") or []
    if not attempts:
        yield "none yet"
        return
    yield output.table(["#", "when", "took", "result", "answer"], map(_attempt_cells, attempts))


def _facts(saga: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    yield "event", str(saga["event_id"])
    yield "subscription", str(saga["subscription_id"])
    yield "created", output.time_field(saga["created_at"])
    yield "changed", output.time_field(saga["updated_at"])
    yield "attempts", str(saga["attempt_count"])
    if saga.get("final_error_code"):
        yield "error", output.text(saga["final_error_code"])
    if saga.get("dead_letter_id"):
        yield "requeued from", f"dead letter {saga['dead_letter_id']}"


def _why(saga: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    """What the daemon says about it, in its words; and when it goes on."""
    if saga.get("explanation"):
        yield "why", output.text(saga["explanation"])
    elif saga.get("reason"):
        yield "why", output.text(saga["reason"])
    elif saga.get("held"):
        yield "why", "held: its subscription is paused or unverified"
    if saga["status"] == SagaStatus.PENDING_RETRY and saga.get("next_attempt_at"):
        yield "next attempt", output.time_field(saga["next_attempt_at"])
    if saga.get("buried_as") and saga.get("reason") != "requeued":
        yield "try again", f"webhookd dead-letters requeue {saga['buried_as']}"


def _attempt_cells(attempt: Mapping[str, Any]) -> output.Row:
    took = attempt.get("duration_ms")
    return (
        str(attempt["attempt"]),
        output.time_cell(attempt["finished_at"] or attempt["attempt_at"]),
        output.NONE if took is None else f"{took} ms",
        _result(attempt),
        # Escaped: the endpoint's owner chose these bytes.
        excerpt(attempt.get("response_excerpt") or output.NONE, EXCERPT_CHARACTERS),
    )


def _result(attempt: Mapping[str, Any]) -> output.Cell:
    if attempt.get("error_code"):
        return output.state("failing", attempt["error_code"])
    if attempt.get("response_status"):
        return output.state("delivered", str(attempt["response_status"]))
    return output.state("Pending", attempt["status"])


def _event_parts(event: Mapping[str, msgspec.Raw]) -> Iterator[RenderableType]:
    """The payload stays as it is: it may have numbers that Python cannot hold."""
    known = {name: msgspec.json.decode(raw) for name, raw in event.items() if name != "payload"}
    payload = bytes(event["payload"]).decode("utf-8", "replace")
    yield output.line(f"event {known['id']}  {escaped(known['event_type'])}")
    yield output.fields(
        [
            ("created", output.time_field(known["created_at"])),
            ("idempotency key", output.text(known.get("idempotency_key"))),
            ("correlation id", output.text(known.get("correlation_id"))),
            ("payload", excerpt(payload, EXCERPT_CHARACTERS)),
        ]
    )
    deliveries = known["deliveries"]
    if not deliveries:
        yield "\nThere is no subscription of this type."
    for delivery in deliveries:
        yield output.line(
            f"\nsubscription {delivery['subscription_id']}  ",
            output.state(delivery["status"]),
            f"  {_in_words(delivery)}",
        )
        yield output.fields(_event_delivery_fields(delivery))
    if known.get("more_deliveries"):
        yield f"\nThere are more: webhookd deliveries list --event {known['id']}"


def _event_delivery_fields(delivery: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    if delivery.get("callback_url"):
        yield "to", output.text(delivery["callback_url"])
    yield from _why(delivery)
    if delivery.get("saga_id"):
        yield "delivery", f"{delivery['saga_id']}, attempts: {delivery['attempt_count']}"
    if delivery.get("final_error_code"):
        yield "error", output.text(delivery["final_error_code"])


def _in_words(saga: Mapping[str, Any]) -> str:
    return _IN_WORDS.get(saga["status"], "")
