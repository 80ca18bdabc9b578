"""`webhookd subscriptions`: who gets which events, where; and the secrets that sign them."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import example, json_option, listing_options, one_more, row_id
from webhookd.core.limits import MAX_ATTEMPTS, MAX_DELAY_SECONDS
from webhookd.deliveries.cli.headers import header_options

# The endpoint may take a whole delivery's timeout, which an operator may have raised.
VERIFY_TIMEOUT_SECONDS = 120.0
SHOWN_ONCE = "The secret is shown this once: give it to the receiver, which verifies with it."

subscription_id = click.argument("subscription_id", metavar="ID", type=row_id)
subscription_ids = click.argument("subscription_ids", metavar="ID...", type=row_id, nargs=-1, required=True)
max_attempts = click.option(
    "--max-attempts",
    type=click.IntRange(1, MAX_ATTEMPTS),
    help="Attempts in all, in place of the daemon's setting.",
)
base_delay_seconds = click.option(
    "--base-delay-seconds",
    type=click.FloatRange(0, MAX_DELAY_SECONDS),
    help="The delay after the first failure, in place of the daemon's setting.",
)
description = click.option("--description", help="For people.")


@click.group("subscriptions")
def command() -> None:
    """Look at subscriptions, make and change them."""


@command.command("list", epilog=example("webhookd subscriptions list --event-type order.created --paused"))
@click.option("--event-type", help="Only those of this type.")
@click.option("--active/--paused", default=None, help="Only those that are.")
@click.option("--verified/--unverified", default=None, help="Only those that are.")
@listing_options
@asks_daemon
def list_(
    client: Client,
    *,
    event_type: str | None,
    active: bool | None,
    verified: bool | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List subscriptions, the newest first."""
    query = {"event_type": event_type, "active": _flag(active), "verified": _flag(verified)}
    output.list_rows(
        client.rows("/v1/subscriptions", query, one_more(limit)),
        ["id", "event type", "state", "health", "callback URL"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="There are no such subscriptions.",
    )


@command.command("show", epilog=example("webhookd subscriptions show 3"))
@subscription_id
@json_option
@asks_daemon
def show(client: Client, *, subscription_id: int, as_json: bool) -> None:
    """Show a subscription and how its endpoint does."""
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
@max_attempts
@base_delay_seconds
@header_options
@description
@json_option
@asks_daemon
def create(client: Client, *, as_json: bool, **asked: Any) -> None:
    """Subscribe CALLBACK_URL to events of EVENT_TYPE. Its secret is printed this once.

    Nothing is delivered until the endpoint has answered its challenge: see `verify`.
    """
    answer = client.post("/v1/subscriptions", _given(asked))
    _print(answer, as_json=as_json)
    if not as_json:
        click.echo(SHOWN_ONCE, err=True)
        output.hint(f"Next: webhookd subscriptions verify {answer.value['id']}")


@command.command(
    "change", epilog=example("webhookd subscriptions change 3 --callback-url https://shop.example/new")
)
@subscription_id
@click.option("--callback-url", help="Where to deliver from now on; it must be verified again.")
@max_attempts
@base_delay_seconds
@header_options
@description
@click.option("--no-headers", is_flag=True, help="Send no further headers.")
@click.option("--default-policy", is_flag=True, help="Retry as the daemon's setting says.")
@json_option
@asks_daemon
def change(
    client: Client,
    *,
    subscription_id: int,
    no_headers: bool,
    default_policy: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Change a subscription. Headers that are given replace all that there were."""
    changes = _given(asked)
    if no_headers:
        changes.setdefault("headers", {})
    if default_policy:
        changes = {"max_attempts": None, "base_delay_seconds": None} | changes
    if not changes:
        raise click.UsageError("say what to change")
    _print(client.patch(f"/v1/subscriptions/{subscription_id}", changes), as_json=as_json)


@command.command("pause", epilog=example("webhookd subscriptions pause 3 4"))
@subscription_ids
@asks_daemon
def pause(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Stop delivering to subscriptions. What is under way waits; new events are not routed to them."""
    for one in subscription_ids:
        client.patch(f"/v1/subscriptions/{one}", {"active": False})
        click.echo(f"subscription {one} is paused")


@command.command("resume", epilog=example("webhookd subscriptions resume 3 4"))
@subscription_ids
@asks_daemon
def resume(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Deliver to paused subscriptions again, also what waited."""
    for one in subscription_ids:
        resumed = client.patch(f"/v1/subscriptions/{one}", {"active": True}).value
        unverified = "" if resumed["verified"] else f", but not verified: webhookd subscriptions verify {one}"
        click.echo(f"subscription {one} is active{unverified}")


@command.command("verify", epilog=example("webhookd subscriptions verify 3"))
@subscription_id
@json_option
@asks_daemon
def verify(client: Client, *, subscription_id: int, as_json: bool) -> None:
    """Send the endpoint its challenge, and wait for the answer."""
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
    """Make a new secret, printed this once. The old one goes on signing beside it for a while."""
    answer = client.post(f"/v1/subscriptions/{subscription_id}/rotate-secret")
    if as_json:
        output.show_json(answer.body)
        return
    rotated = answer.value
    until = output.time_field(rotated["previous_valid_until"])
    output.show(output.fields([("secret", rotated["secret"]), ("old one signs until", until)]))
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
    if as_json:
        output.show_json(answer.body)
    else:
        output.show(output.fields(_facts(answer.value)))


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
    for name, what in (("max_attempts", "max attempts"), ("base_delay_seconds", "base delay")):
        yield what, "the daemon's" if row[name] is None else f"{row[name]:g}"
    yield "description", output.text(row["description"])
    yield "created", output.time_field(row["created_at"])
    yield "changed", output.time_field(row["updated_at"])


def _given(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if value is not None}


def _flag(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()
