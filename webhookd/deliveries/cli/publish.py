"""`webhookd publish`: publishes one event, or a file of events. Payloads are sent byte for byte.

A file is sent in requests of at most a thousand events, so that memory stays bounded. Lines before a rejected
request are published and later lines are not; the summary says how far it got.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

import click
import msgspec
from rich.progress import Progress

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import example, given, json_argument, json_option, label
from webhookd.core.errors import RequestRefused, WebhookdError
from webhookd.core.limits import MAX_BATCH_EVENTS

# Below the daemon's default limit for a body. A request that is too large for a daemon is sent as two halves.
MAX_BATCH_BYTES = 900_000
MAX_LINE_BYTES = 9 * 1024 * 1024
TOO_LARGE = 413


@click.command(
    "publish",
    epilog=example(
        "webhookd publish order.created '{\"id\": 1}' --idempotency-key order-1",
        "webhookd publish order.created @order.json",
        "make-orders | webhookd publish --batch -",
    ),
)
@click.argument("event_type", required=False)
@click.argument("payload", required=False)
@click.option(
    "--idempotency-key",
    "--key",
    metavar="KEY",
    help="Publish the event only once, however often it is sent with this key.",
)
@click.option("--correlation-id", metavar="ID", help="An id of yours that receivers get with the event.")
@click.option("--tenant", help="The tenant whose subscriptions get the event.")
@click.option(
    "--label",
    "labels",
    type=label,
    metavar="NAME=VALUE",
    multiple=True,
    help="A label, for filters of subscriptions and for searches; can be repeated.",
)
@click.option(
    "--batch",
    metavar="FILE",
    help="Publish a file of events, one JSON object per line; - is stdin.",
)
@json_option
@asks_daemon
def command(
    client: Client,
    *,
    event_type: str | None,
    payload: str | None,
    idempotency_key: str | None,
    correlation_id: str | None,
    tenant: str | None,
    labels: tuple[tuple[str, str], ...],
    batch: str | None,
    as_json: bool,
) -> None:
    """Publish an event and print its id.

    PAYLOAD is JSON, @FILE, or - for stdin. It is delivered byte for byte. If an event with this key exists,
    its id is printed, followed by `duplicate`.

    With --batch, each line of FILE is {"event_type", "payload", "idempotency_key"?, "correlation_id"?,
    "tenant"?, "labels"?}. Up to a thousand lines are sent per request, and each request is published
    completely or not at all. With idempotency keys, an interrupted batch can be repeated.
    """
    if batch is not None:
        if (event_type, idempotency_key, correlation_id, tenant, labels) != (None, None, None, None, ()):
            raise click.UsageError("--batch: each line has its own event type, key, tenant and labels")
        _publish_batch(client, batch, as_json=as_json)
        return
    if event_type is None or payload is None:
        raise click.UsageError("EVENT_TYPE and PAYLOAD are required: PAYLOAD is JSON, @FILE, or - for stdin")
    event = {"event_type": event_type, "payload": json_argument(payload)}
    optional = {
        "idempotency_key": idempotency_key,
        "correlation_id": correlation_id,
        "tenant": tenant,
        "labels": dict(labels) or None,
    }
    answer = client.post("/v1/events", event | given(optional))
    if as_json:
        output.show_json(answer.body)
        return
    accepted = answer.value
    click.echo(f"{accepted['id']}{' duplicate' if accepted['duplicate'] else ''}")
    output.hint(f"To see its deliveries: webhookd deliveries show --event {accepted['id']}")


class Published(msgspec.Struct):
    """Counts what was published so far."""

    events: int = 0
    duplicates: int = 0
    last_line: int = 0

    def summary(self) -> str:
        if not self.events:
            return "published nothing"
        some = f", {self.duplicates} of them duplicates" if self.duplicates else ""
        return f"published {self.events} events{some}, up to line {self.last_line}"


class Line(msgspec.Struct):
    """One event of the file, not decoded."""

    number: int
    event: msgspec.Raw


def _publish_batch(client: Client, name: str, *, as_json: bool) -> None:
    """Publish a file, and print the summary also after an error or Ctrl-C."""
    done = Published()
    try:
        with _opened(name) as stream, output.progress(None, "events") as progress:
            for lines in _batches(stream):
                _publish_lines(client, lines, done, progress, as_json=as_json)
    finally:
        if not as_json:
            click.echo(done.summary())


def _opened(name: str) -> AbstractContextManager[IO[bytes]]:
    try:
        return click.open_file(name, "rb")
    except OSError as error:
        raise click.UsageError(f"--batch: {name} cannot be read: {error.strerror}") from error


def _batches(stream: IO[bytes]) -> Iterator[list[Line]]:
    """Group the lines into requests."""
    batch: list[Line] = []
    size_bytes = 0
    for line in _lines(stream):
        length = len(bytes(line.event))
        if batch and (len(batch) == MAX_BATCH_EVENTS or size_bytes + length > MAX_BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(line)
        size_bytes += length
    if batch:
        yield batch


def _lines(stream: IO[bytes]) -> Iterator[Line]:
    """Check that each line is exactly one JSON value: it is inserted into a body with others."""
    number = 0
    while text := _next_line(stream):
        number += 1
        if len(text) > MAX_LINE_BYTES:
            raise WebhookdError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        if not text.strip():
            continue
        try:
            yield Line(number, msgspec.json.decode(text, type=msgspec.Raw))
        except (msgspec.DecodeError, RecursionError) as error:
            raise WebhookdError(f"line {number} is not JSON: {error}") from error


def _next_line(stream: IO[bytes]) -> bytes:
    try:
        return stream.readline(MAX_LINE_BYTES + 1)
    except OSError as error:  # a directory, or a failing disk
        raise click.UsageError(f"--batch: the file cannot be read: {error.strerror}") from error


def _publish_lines(
    client: Client, lines: list[Line], done: Published, progress: Progress, *, as_json: bool
) -> None:
    try:
        answer = client.post("/v1/events/batch", {"events": [line.event for line in lines]})
    except RequestRefused as refused:
        if refused.status == TOO_LARGE and len(lines) > 1:
            middle = len(lines) // 2
            _publish_lines(client, lines[:middle], done, progress, as_json=as_json)
            _publish_lines(client, lines[middle:], done, progress, as_json=as_json)
            return
        raise WebhookdError(f"lines {lines[0].number} to {lines[-1].number}: {refused}") from refused
    accepted: list[dict[str, Any]] = answer.value["events"]
    done.events += len(accepted)
    done.duplicates += sum(event["duplicate"] for event in accepted)
    done.last_line = lines[-1].number
    progress.advance(progress.task_ids[0], len(accepted))
    if as_json:
        for event in accepted:
            output.show_json(msgspec.json.encode(event))
