"""`webhookd publish`: one event, or a file of them. What a payload's bytes are, the daemon gets."""

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import example, json_option, read_bounded
from webhookd.deliveries.cli.batch import publish_batch

# The database's own bound; a daemon's, api.max_payload_bytes, is at most this.
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


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
    "--idempotency-key", "--key", metavar="KEY", help="Sent again with the same key, it is the same event."
)
@click.option("--correlation-id", metavar="ID", help="Travels with the event, to its receivers.")
@click.option(
    "--batch",
    metavar="FILE",
    help="Publish a file of events, each a line of JSON as the HTTP API takes it; - is stdin.",
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
    batch: str | None,
    as_json: bool,
) -> None:
    """Publish an event, and print its id.

    PAYLOAD is JSON, or @FILE, or - for stdin. It is delivered byte for byte. The id is followed by
    `duplicate` if an event with this key was there already.

    With --batch FILE, lines of {"event_type", "payload", "idempotency_key"?, "correlation_id"?}, a thousand
    to a request, each request all or nothing. Give them keys, and a run that broke off can be run again.
    """
    if batch is not None:
        if (event_type, idempotency_key, correlation_id) != (None, None, None):
            raise click.UsageError("--batch: each line has its own event type and key")
        publish_batch(client, batch, as_json=as_json)
        return
    if event_type is None or payload is None:
        raise click.UsageError("give an EVENT_TYPE and a PAYLOAD: JSON, @FILE, or - for stdin")
    event = {"event_type": event_type, "payload": _payload(payload)}
    optional = {"idempotency_key": idempotency_key, "correlation_id": correlation_id}
    answer = client.post(
        "/v1/events", event | {key: value for key, value in optional.items() if value is not None}
    )
    if as_json:
        output.show_json(answer.body)
        return
    accepted = answer.value
    click.echo(f"{accepted['id']}{' duplicate' if accepted['duplicate'] else ''}")
    output.hint(f"What became of it: webhookd deliveries show --event {accepted['id']}")


def _payload(text: str) -> msgspec.Raw:
    """JSON, checked here, so that it cannot be more than one value in the body around it."""
    if text == "-":
        data = read_bounded("-", "PAYLOAD", MAX_PAYLOAD_BYTES)
    elif text.startswith("@"):
        data = read_bounded(text[1:], "PAYLOAD", MAX_PAYLOAD_BYTES)
    else:
        data = text.encode("utf-8", "surrogateescape")
    try:
        return msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.UsageError(
            f"PAYLOAD is not JSON: {error} (a file is given as @FILE, a text in double quotes)"
        ) from error
