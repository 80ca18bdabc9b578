"""`webhookd subscriptions`: creates, changes, tests and lists subscriptions and their signing secrets."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    escaped,
    event_types,
    example,
    given,
    json_argument,
    json_option,
    label,
    listing_options,
    one_more,
    read_bounded,
    row_id,
    time_or_age,
)
from webhookd.cli.output import excerpt
from webhookd.core.errors import RequestRefused
from webhookd.core.limits import MAX_ATTEMPTS, MAX_DELAY_SECONDS, MAX_PER_SECOND
from webhookd.retention.cli import wait_for_erasure

# The daemon waits for the endpoint up to delivery.timeout_seconds, which an operator may have raised.
VERIFY_TIMEOUT_SECONDS = 120.0
SHOWN_ONCE = "The secret is shown only once. The receiver needs it to verify signatures."
MAX_HEADER_FILE_BYTES = 65_536
MAX_SECRET_FILE_BYTES = 4096
REPLAY_BATCH_SIZE = 5000
# The exit code of a failed test, and of a dry run that found something to do.
NOT_DONE = 1
# Of an endpoint's response.
EXCERPT_CHARACTERS = 500
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
    @click.option(
        "--format",
        type=click.Choice(["raw", "standard"]),
        help='The body: the payload, or {"type", "timestamp", "data"} around it (default: raw).',
    )
    @click.option(
        "--max-per-second",
        type=click.FloatRange(0, MAX_PER_SECOND, min_open=True),
        help="The most requests a second (default: no limit).",
    )
    @click.option(
        "--filter",
        "labels",
        type=label,
        metavar="NAME=VALUE",
        multiple=True,
        help="Only events with this label; can be repeated.",
    )
    @functools.wraps(command)
    def wrapped(
        *arguments: Any,
        lines: tuple[str, ...],
        header_file: str | None,
        labels: tuple[tuple[str, str], ...],
        **others: Any,
    ) -> None:
        headers = _headers(lines, header_file)
        command(*arguments, headers=headers, filter=dict(labels) or None, **others)

    return wrapped


@click.group("subscriptions")
def command() -> None:
    """Create, change and list subscriptions."""


@command.command("list", epilog=example("webhookd subscriptions list --event-type order.created --paused"))
@click.option("--tenant", help="Only subscriptions of this tenant.")
@click.option("--event-type", help="Only subscriptions whose first event type this is.")
@click.option(
    "--enabled/--disabled", "active", default=None, help="Only enabled, or only disabled subscriptions."
)
@click.option("--paused/--not-paused", default=None, help="Only paused ones, or only those that are not.")
@click.option("--verified/--unverified", default=None, help="Only verified, or only unverified ones.")
@click.option("--search", metavar="TEXT", help="Only those with this text in the URL or description.")
@listing_options
@asks_daemon
def list_(client: Client, *, limit: int | None, as_json: bool, **query: Any) -> None:
    """List subscriptions, newest first."""
    names = ("active", "paused", "verified")
    flags = {name: str(query[name]).lower() for name in names if query[name] is not None}
    output.list_rows(
        client.rows("/v1/subscriptions", query | flags, one_more(limit)),
        ["id", "tenant", "event types", "state", "health", "callback URL"],
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
        "webhookd subscriptions create 'order.*,invoice.paid' https://shop.example/hooks --tenant acme",
        "webhookd subscriptions create order.created https://shop.example/hooks --header-file headers.txt",
    ),
)
@click.argument("event_types", metavar="EVENT_TYPES", type=event_types)
@click.argument("callback_url")
@click.option("--tenant", help="The tenant whose events it gets (default: events without a tenant).")
@click.option("--paused", is_flag=True, default=None, help="Let deliveries wait until `resume`.")
@click.option(
    "--secret-file",
    metavar="FILE",
    help="Use the signing secret in this file, or from stdin with -, to migrate from another system.",
)
@setting_options
@json_option
@asks_daemon
def create(client: Client, *, secret_file: str | None, as_json: bool, **options: Any) -> None:
    """Subscribe CALLBACK_URL to EVENT_TYPES, and print the signing secret.

    EVENT_TYPES are types or patterns, separated by commas: order.created is one type, order.* every type
    that begins with `order.`, and * every type.

    The secret is shown only once. Nothing is delivered until the endpoint is verified: see `verify`.
    """
    if secret_file is not None:
        secret = read_bounded(secret_file, "--secret-file", MAX_SECRET_FILE_BYTES)
        options["secret"] = secret.decode("ascii", "replace").strip()
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
@click.option("--event-types", type=event_types, help="New event types or patterns, separated by commas.")
@setting_options
@click.option("--no-headers", is_flag=True, help="Remove all headers.")
@click.option("--no-filter", is_flag=True, help="Accept events with any labels.")
@click.option("--no-rate-limit", is_flag=True, help="Remove the limit of requests a second.")
@click.option("--default-policy", is_flag=True, help="Use the daemon's retry settings.")
@json_option
@asks_daemon
def change(
    client: Client,
    *,
    subscription_id: int,
    no_headers: bool,
    no_filter: bool,
    no_rate_limit: bool,
    default_policy: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Change a subscription. New headers replace all previous headers."""
    changes = given(options)
    if no_headers:
        changes.setdefault("headers", {})
    if no_filter:
        changes.setdefault("filter", {})
    if no_rate_limit:
        changes.setdefault("max_per_second", None)
    if default_policy:
        changes = {"max_attempts": None, "base_delay_seconds": None} | changes
    if not changes:
        raise click.UsageError("at least one change is required")
    _print(client.patch(f"/v1/subscriptions/{subscription_id}", changes), as_json=as_json)


@command.command("pause", epilog=example("webhookd subscriptions pause 3 4"))
@subscription_ids
@asks_daemon
def pause(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Stop sending to subscriptions. Deliveries of old and new events wait until `resume`; none is lost."""
    for subscription_id in subscription_ids:
        client.patch(f"/v1/subscriptions/{subscription_id}", {"paused": True})
        click.echo(f"subscription {subscription_id} is paused")


@command.command("resume", epilog=example("webhookd subscriptions resume 3 4"))
@subscription_ids
@asks_daemon
def resume(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Resume sending to paused subscriptions, including what was waiting."""
    for subscription_id in subscription_ids:
        resumed = client.patch(f"/v1/subscriptions/{subscription_id}", {"paused": False}).value
        click.echo(f"subscription {subscription_id} is {_state_in_words(resumed)}")


@command.command("disable", epilog=example("webhookd subscriptions disable 3 4"))
@subscription_ids
@asks_daemon
def disable(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Stop routing events to subscriptions. They do not get events that are published until `enable`."""
    for subscription_id in subscription_ids:
        client.patch(f"/v1/subscriptions/{subscription_id}", {"active": False})
        click.echo(f"subscription {subscription_id} is disabled")


@command.command("enable", epilog=example("webhookd subscriptions enable 3 4"))
@subscription_ids
@asks_daemon
def enable(client: Client, *, subscription_ids: tuple[int, ...]) -> None:
    """Route events to disabled subscriptions again. Deliveries that were waiting are sent."""
    for subscription_id in subscription_ids:
        enabled = client.patch(f"/v1/subscriptions/{subscription_id}", {"active": True}).value
        click.echo(f"subscription {subscription_id} is {_state_in_words(enabled)}")


@command.command("verify", epilog=example("webhookd subscriptions verify 3"))
@subscription_id
@click.option(
    "--method",
    type=click.Choice(["challenge", "ping"]),
    default="challenge",
    show_default=True,
    help="A ping only needs a 2xx; the daemon's subscriptions.verification_methods must allow it.",
)
@json_option
@asks_daemon
def verify(client: Client, *, subscription_id: int, method: str, as_json: bool) -> None:
    """Send the endpoint a challenge, and wait for the response."""
    path = f"/v1/subscriptions/{subscription_id}/verify"
    answer = client.post(path, {"method": method}, timeout_seconds=VERIFY_TIMEOUT_SECONDS)
    if as_json:
        output.show_json(answer.body)
    else:
        click.echo(f"subscription {subscription_id} is verified")


@command.command(
    "test",
    epilog=example(
        "webhookd subscriptions test 3",
        "webhookd subscriptions test 3 --event-type order.created --payload @order.json",
    ),
)
@subscription_id
@click.option("--event-type", help="The type of the event (default: webhookd.test).")
@click.option("--payload", help="JSON, @FILE, or - for stdin.")
@json_option
@asks_daemon
def test(
    client: Client, *, subscription_id: int, event_type: str | None, payload: str | None, as_json: bool
) -> None:
    """Send one signed test event to the endpoint, and show how it responds. Exits with 1 if it fails.

    It is sent at once, outside the queue, and stored nowhere.
    """
    path = f"/v1/subscriptions/{subscription_id}/test"
    body = given({"event_type": event_type, "payload": None if payload is None else json_argument(payload)})
    answer = client.post(path, body, timeout_seconds=VERIFY_TIMEOUT_SECONDS)
    result = answer.value
    if as_json:
        output.show_json(answer.body)
    else:
        shown = result["response_status"] or result["error_code"]
        state = output.state("delivered" if result["delivered"] else "failing", str(shown))
        output.show(output.line(state, f"  after {result['duration_ms']} ms"))
        if result["response_excerpt"]:
            click.echo(excerpt(result["response_excerpt"], EXCERPT_CHARACTERS))
    if not result["delivered"]:
        sys.exit(NOT_DONE)


@command.command(
    "replay",
    epilog=example(
        "webhookd subscriptions replay 3 --since 2h",
        "webhookd subscriptions replay 3 --since 2h --include all --yes",
    ),
)
@subscription_id
@click.option("--since", type=time_or_age, metavar="TIME", required=True, help="A time, or an age like 2h.")
@click.option("--until", type=time_or_age, metavar="TIME", help="A time, or an age (default: now).")
@click.option("--event-types", type=event_types, help="Only these types or patterns, separated by commas.")
@click.option(
    "--include",
    type=click.Choice(["missing", "all"]),
    default="missing",
    show_default=True,
    help="Events that were never routed to it, or all, also those that were delivered.",
)
@click.option("--yes", is_flag=True, help="Create the deliveries; without it, only count.")
@json_option
@asks_daemon
def replay(client: Client, *, subscription_id: int, yes: bool, as_json: bool, **options: Any) -> None:
    """Deliver past events that match the subscription now.

    Without --yes it is a dry run: it counts, and exits with 1 if there is something to deliver. After Ctrl-C,
    run the same command again to continue.
    """
    path, what = f"/v1/subscriptions/{subscription_id}/replay", given(options)
    counted = Counter(examined=0, matched=0, created=0, payload_removed=0)
    for batch in _replay_batches(client, path, what, dry_run=True):
        counted.update({name: batch[name] for name in counted})
        what["until"] = batch["until"]
    if not yes or not counted["created"]:
        _print_replay(counted, what["include"], as_json=as_json, dry_run=not yes)
        if counted["created"]:
            if not as_json:
                click.echo("Nothing was sent. To create the deliveries, add --yes", err=True)
            sys.exit(NOT_DONE)
        return
    done = Counter(dict.fromkeys(counted, 0))
    try:
        with output.progress(counted["examined"], "replay") as progress:
            for batch in _replay_batches(client, path, what, dry_run=False):
                done.update({name: batch[name] for name in done})
                progress.advance(progress.task_ids[0], batch["examined"])
    finally:  # also after an error or Ctrl-C
        _print_replay(done, what["include"], as_json=as_json, dry_run=False)


def _replay_batches(
    client: Client, path: str, what: Mapping[str, Any], *, dry_run: bool
) -> Iterator[dict[str, Any]]:
    """Yield the response of each batch. The first one sets the times, by the database's clock."""
    request = {**what, "dry_run": dry_run, "limit": REPLAY_BATCH_SIZE}
    while True:
        batch = client.post(path, request).value
        yield batch
        if batch["last_event_id"] is None:
            return
        request |= {
            "after_event_id": batch["last_event_id"],
            "until": batch["until"],
            "started_at": batch["started_at"],
        }


def _print_replay(counts: Counter[str], include: str, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        output.show_json(msgspec.json.encode({**counts, "dry_run": dry_run}))
        return
    examined, matched, created, payload_removed = counts.values()
    never = " and were never routed to it" if include == "missing" else ""
    click.echo(f"{_number(examined, 'event')} examined; {matched} match the subscription{never}")
    if payload_removed:
        click.echo(f"{_number(payload_removed, 'event')} left out: the payload was removed")
    left = " (the others are unfinished, or were sent again by this replay)" if created < matched else ""
    click.echo(f"{_number(created, 'delivery')} {'would be ' if dry_run else ''}created{left}")


def _number(count: int, noun: str) -> str:
    nouns = {"event": "events", "delivery": "deliveries"}
    return f"{count} {noun if count == 1 else nouns[noun]}"


@command.command(
    "delete",
    epilog=example("webhookd subscriptions delete 3 --yes", "webhookd subscriptions delete 3 --erase"),
)
@subscription_ids
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--erase", is_flag=True, help="Also remove its deliveries, attempts and dead letters.")
@asks_daemon
def delete(client: Client, *, subscription_ids: tuple[int, ...], yes: bool, erase: bool) -> None:
    """Delete subscriptions. Nothing is sent to them any more; their deliveries stay as history.

    With --erase these are removed too, and the command waits for it. After Ctrl-C the daemon continues.
    """
    for subscription_id in subscription_ids:
        path = f"/v1/subscriptions/{subscription_id}"
        if not yes:
            verb = "Delete and erase" if erase else "Delete"
            to = _address(client, path, may_be_deleted=erase)
            click.confirm(f"{verb} subscription {subscription_id}{to}?", abort=True)
        if erase:
            wait_for_erasure(client, client.delete(f"{path}?erase=true").value)
        else:
            client.delete(path)
            click.echo(f"subscription {subscription_id} is deleted")


def _address(client: Client, path: str, *, may_be_deleted: bool) -> str:
    """Return the address for a question. One that was deleted before is not shown, but can be erased."""
    try:
        return f" to {escaped(client.get(path).value['callback_url'])}"
    except RequestRefused:
        if not may_be_deleted:
            raise
        return ", which is deleted or does not exist"


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
        output.text(row["tenant"]),
        output.text(_patterns(row)),
        _state(row),
        _health(row["health"]),
        output.text(row["callback_url"]),
    )


def _patterns(row: Mapping[str, Any]) -> str:
    return ", ".join(row["event_types"])


def _states(row: Mapping[str, Any]) -> list[str]:
    flags = {
        "disabled": not row["active"],
        "paused": row["paused"],
        "unverified": not row["verified"],
        "tenant inactive": not row["tenant_active"],
    }
    return [name for name, is_set in flags.items() if is_set] or ["active"]


def _state(row: Mapping[str, Any]) -> output.Cell:
    states = _states(row)
    return output.state(states[0], ", ".join(states))


def _state_in_words(row: Mapping[str, Any]) -> str:
    """Return the state, and what to do about it."""
    subscription, tenant = row["id"], escaped(row["tenant"])
    remedies = {
        "disabled": f"subscriptions enable {subscription}",
        "paused": f"subscriptions resume {subscription}",
        "unverified": f"subscriptions verify {subscription}",
        "tenant inactive": f"tenants set {tenant} --active",
    }
    states = _states(row)
    if states == ["active"]:
        return "active"
    words = {"tenant inactive": f"held (tenant {tenant} is not active)"}
    return f"{' and '.join(words.get(each, each) for each in states)}: webhookd {remedies[states[0]]}"


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
    if row["tenant"]:
        yield "tenant", output.text(row["tenant"])
    yield "event types", output.text(_patterns(row))
    if row["filter"]:
        yield "filter", output.text(", ".join(f"{name}={value}" for name, value in row["filter"].items()))
    yield "callback URL", output.text(row["callback_url"])
    if row["pending_callback_url"]:
        pending = f"{escaped(row['pending_callback_url'])}: webhookd subscriptions verify {row['id']}"
        yield "new URL, not verified", pending
    yield "state", _state(row)
    yield "health", _health(row["health"])
    for name, what in (("last_failure_at", "last failure"), ("last_recovery_at", "last recovery")):
        if row["health"][name]:
            yield what, output.time_field(row["health"][name])
    for name, what, unit in (("max_attempts", "max attempts", ""), ("base_delay_seconds", "base delay", "s")):
        yield what, "default" if row[name] is None else f"{row[name]:g}{unit}"
    yield "format", row["format"]
    limit = row["max_per_second"]
    yield "rate limit", "none" if limit is None else f"{limit:g} a second"
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
