"""`webhookd subscriptions`: creates, changes and lists subscriptions and their signing secrets."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    escaped,
    example,
    given,
    json_option,
    listing_options,
    one_more,
    read_bounded,
    row_id,
)
from webhookd.core.limits import MAX_ATTEMPTS, MAX_DELAY_SECONDS

# The daemon waits for the endpoint up to delivery.timeout_seconds, which an operator may have raised.
VERIFY_TIMEOUT_SECONDS = 120.0
SHOWN_ONCE = "The secret is shown only once. The receiver needs it to verify signatures."
MAX_HEADER_FILE_BYTES = 65_536
# Headers with these words in their name are probably secret, and must not appear in a list of processes.
_SECRET_WORDS = ("auth", "cookie", "key", "pass", "secret", "signature", "token")

subscription_id = click.argument("subscription_id", metavar="ID", type=row_id)
subscription_ids = click.argument("subscription_ids", metavar="ID...", type=row_id, nargs=-1, required=True)


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the settings of a subscription. `headers` is a dict, or None if no header is given."""

    @click.option(
        "--max-attempts",
        type=click.IntRange(1, MAX_ATTEMPTS),
        help="Maximum number of attempts (default: the daemon's retry.max_attempts).",
    )
    @click.option(
        "--base-delay-seconds",
        type=click.FloatRange(0, MAX_DELAY_SECONDS),
        help="Delay after the first failure (default: the daemon's retry.base_delay_seconds).",
    )
    @click.option(
        "--header",
        "lines",
        metavar="'NAME: VALUE'",
        multiple=True,
        help="A header to send with each delivery; can be repeated.",
    )
    @click.option(
        "--header-file",
        metavar="FILE",
        help="Read headers from this file, one per line, or from stdin with -. Use it for secret values.",
    )
    @click.option("--description", help="A text for people.")
    @functools.wraps(command)
    def wrapped(*arguments: Any, lines: tuple[str, ...], header_file: str | None, **others: Any) -> None:
        command(*arguments, headers=_headers(lines, header_file), **others)

    return wrapped


@click.group("subscriptions")
def command() -> None:
    """Create, change and list subscriptions."""


@command.command("list", epilog=example("webhookd subscriptions list --event-type order.created --paused"))
@click.option("--event-type", help="Only subscriptions to this event type.")
@click.option("--active/--paused", default=None, help="Only active, or only paused subscriptions.")
@click.option("--verified/--unverified", default=None, help="Only verified, or only unverified ones.")
@listing_options
@asks_daemon
def list_(client: Client, *, limit: int | None, as_json: bool, **query: Any) -> None:
    """List subscriptions, newest first."""
    flags = {name: str(query[name]).lower() for name in ("active", "verified") if query[name] is not None}
    output.list_rows(
        client.rows("/v1/subscriptions", query | flags, one_more(limit)),
        ["id", "event type", "state", "health", "callback URL"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No subscriptions found.",
    )


@command.command("show", epilog=example("webhookd subscriptions show 3"))
@subscription_id
@json_option
@asks_daemon
def show(client: Client, *, subscription_id: int, as_json: bool) -> None:
    """Show a subscription and the health of its endpoint."""
    _print(client.get(f"/v1/subscriptions/{subscription_id}"), as_json=as_json)


@command.command(
    "create",
    epilog=example(
        "webhookd subscriptions create order.created https://shop.example/hooks",
        "webhookd subscriptions create order.created https://shop.example/hooks --header-file headers.txt",
    ),
)
@click.argument("event_type")
@click.argument("callback_url")
@setting_options
@json_option
@asks_daemon
def create(client: Client, *, as_json: bool, **options: Any) -> None:
    """Subscribe CALLBACK_URL to events of EVENT_TYPE, and print the signing secret.

    The secret is shown only once. Nothing is delivered until the endpoint is verified: see `verify`.
    """
    answer = client.post("/v1/subscriptions", given(options))
    _print(answer, as_json=as_json)
    if not as_json:
        click.echo(SHOWN_ONCE, err=True)
        output.hint(f"Next: webhookd subscriptions verify {answer.value['id']}")


@command.command(
    "change", epilog=example("webhookd subscriptions change 3 --callback-url https://shop.example/new")
)
@subscription_id
@click.option("--callback-url", help="New URL for deliveries; it must be verified again.")
@setting_options
@click.option("--no-headers", is_flag=True, help="Remove all headers.")
@click.option("--default-policy", is_flag=True, help="Use the daemon's retry settings.")
@json_option
@asks_daemon
def change(
    client: Client,
    *,
    subscription_id: int,
    no_headers: bool,
    default_policy: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Change a subscription. New headers replace all previous headers."""
    changes = given(options)
    if no_headers:
        changes.setdefault("headers", {})
    if default_policy:
        changes = {"max_attempts": None, "base_delay_seconds": None} | changes
    if not changes:
        raise click.UsageError("at least one change is required")
    _print(client.patch(f"/v1/subscriptions/{subscription_id}", changes), as_json=as_json)


@command.command("pause", epilog=example("webhookd subscriptions pause 3 4"))
@subscription_ids
@asks_daemon
def pause(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Stop deliveries to subscriptions. Unfinished deliveries wait; new events are not routed to them."""
    for subscription_id in subscription_ids:
        client.patch(f"/v1/subscriptions/{subscription_id}", {"active": False})
        click.echo(f"subscription {subscription_id} is paused")


@command.command("resume", epilog=example("webhookd subscriptions resume 3 4"))
@subscription_ids
@asks_daemon
def resume(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Resume deliveries to paused subscriptions, including those that were waiting."""
    for subscription_id in subscription_ids:
        resumed = client.patch(f"/v1/subscriptions/{subscription_id}", {"active": True}).value
        verify_it = f", but not verified: webhookd subscriptions verify {subscription_id}"
        click.echo(f"subscription {subscription_id} is active{'' if resumed['verified'] else verify_it}")


@command.command("verify", epilog=example("webhookd subscriptions verify 3"))
@subscription_id
@json_option
@asks_daemon
def verify(client: Client, *, subscription_id: int, as_json: bool) -> None:
    """Send the endpoint a challenge, and wait for the response."""
    path = f"/v1/subscriptions/{subscription_id}/verify"
    answer = client.post(path, timeout_seconds=VERIFY_TIMEOUT_SECONDS)
    if as_json:
        output.show_json(answer.body)
    else:
        click.echo(f"subscription {subscription_id} is verified")


@command.command("rotate-secret", epilog=example("webhookd subscriptions rotate-secret 3"))
@subscription_id
@json_option
@asks_daemon
def rotate_secret(client: Client, *, subscription_id: int, as_json: bool) -> None:
    """Create a new signing secret and print it once. The old secret stays valid for a while."""
    answer = client.post(f"/v1/subscriptions/{subscription_id}/rotate-secret")
    if as_json:
        output.show_json(answer.body)
        return
    rotated = answer.value
    until = output.time_field(rotated["previous_valid_until"])
    output.show(output.fields([("secret", rotated["secret"]), ("old secret valid until", until)]))
    click.echo(SHOWN_ONCE, err=True)


def _cells(row: Mapping[str, Any]) -> output.Row:
    return (
        str(row["id"]),
        output.text(row["event_type"]),
        _state(row),
        _health(row["health"]),
        output.text(row["callback_url"]),
    )


def _state(row: Mapping[str, Any]) -> output.Cell:
    if not row["active"]:
        return output.state("paused", "paused" if row["verified"] else "paused, unverified")
    return output.state("active" if row["verified"] else "unverified")


def _health(health: Mapping[str, Any]) -> output.Cell:
    if health["failing_since"]:
        return output.state("failing", f"failing: {health['last_error_code']}")
    failures = health["consecutive_failures"]
    return f"{failures} failures in a row" if failures else "no failures"


def _print(answer: Any, *, as_json: bool) -> None:
    output.show_answer(answer, lambda answer: [output.fields(_facts(answer.value))], as_json=as_json)


def _facts(row: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    yield "subscription", str(row["id"])
    if "secret" in row:
        yield "secret", output.text(row["secret"])
    yield "event type", output.text(row["event_type"])
    yield "callback URL", output.text(row["callback_url"])
    yield "state", _state(row)
    yield "health", _health(row["health"])
    for name, what in (("last_failure_at", "last failure"), ("last_recovery_at", "last recovery")):
        if row["health"][name]:
            yield what, output.time_field(row["health"][name])
    for name, what, unit in (("max_attempts", "max attempts", ""), ("base_delay_seconds", "base delay", "s")):
        yield what, "default" if row[name] is None else f"{row[name]:g}{unit}"
    yield "description", output.text(row["description"])
    yield "created", output.time_field(row["created_at"])
    yield "changed", output.time_field(row["updated_at"])


def _headers(lines: tuple[str, ...], file: str | None) -> dict[str, str] | None:
    headers = _parsed_headers(lines, "--header")
    for name in headers:
        if any(word in name.lower() for word in _SECRET_WORDS):
            raise click.UsageError(
                f"--header: every user of this machine can see arguments; write {escaped(name)} to a file, "
                "and use --header-file FILE"
            )
    if file is None:
        return headers or None
    text = read_bounded(file, "--header-file", MAX_HEADER_FILE_BYTES).decode("utf-8", "replace")
    read = _parsed_headers(filter(str.strip, text.split("\n")), "--header-file")
    if not read:
        raise click.UsageError(f"--header-file: {file} contains no headers")
    return headers | read


def _parsed_headers(lines: Iterable[str], option: str) -> dict[str, str]:
    """Split the lines. The daemon validates names and values, but cannot see duplicates in a JSON object."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            # The line is not repeated in the message: it may be the secret itself.
            raise click.UsageError(f"{option}: a header must be written as 'Name: value'")
        if name.strip().lower() in map(str.lower, headers):
            raise click.UsageError(f"{option}: {escaped(name.strip())} is given twice")
        headers[name.strip()] = value.strip()
    return headers
