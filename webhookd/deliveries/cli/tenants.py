"""`webhookd tenants`: creates, changes and lists tenants."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import click

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import (
    age_seconds,
    escaped,
    example,
    given,
    json_option,
    listing_options,
    one_more,
)
from webhookd.core.limits import MAX_LINK_SECONDS, MAX_TENANT_CHARACTERS, MIN_LINK_SECONDS, TENANT
from webhookd.retention.cli import wait_for_erasure

# What a link to the portal can allow. The daemon has the same list.
CAPABILITIES = ("view", "manage", "resend", "secrets")

tenant = click.argument("tenant", metavar="TENANT")


@click.group("tenants")
def command() -> None:
    """Create, change and list tenants: the customers that your events belong to."""


@command.command("list", epilog=example("webhookd tenants list"))
@listing_options
@asks_daemon
def list_(client: Client, *, limit: int | None, as_json: bool) -> None:
    """List tenants, newest first."""
    output.list_rows(
        client.rows("/v1/tenants", {}, one_more(limit)),
        ["tenant", "name", "state", "subscriptions", "created"],
        _cells,
        limit=limit,
        as_json=as_json,
        nothing="No tenants found.",
    )


@command.command("show", epilog=example("webhookd tenants show acme"))
@tenant
@json_option
@asks_daemon
def show(client: Client, *, tenant: str, as_json: bool) -> None:
    """Show a tenant."""
    _print(client.get(_path(tenant)), as_json=as_json)


@command.command("set", epilog=example("webhookd tenants set acme --name 'Acme Ltd' --max-subscriptions 20"))
@tenant
@click.option("--name", help="A name for people.")
@click.option(
    "--active/--inactive",
    default=None,
    help="Inactive: nothing is sent to the tenant, and its deliveries wait.",
)
@click.option("--max-subscriptions", type=click.IntRange(min=0), help="The most subscriptions it may have.")
@click.option("--no-limit", is_flag=True, help="Allow any number of subscriptions.")
@json_option
@asks_daemon
def set_(client: Client, *, tenant: str, no_limit: bool, as_json: bool, **options: Any) -> None:
    """Create a tenant, or change it."""
    changes = ({"max_subscriptions": None} if no_limit else {}) | given(options)
    _print(client.put(_path(tenant), changes), as_json=as_json)


def _capabilities(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in CAPABILITIES]:
        raise click.BadParameter(f"{escaped(unknown[0])!r} is none of {', '.join(CAPABILITIES)}")
    return names


@command.command(
    "portal-link",
    epilog=example(
        "webhookd tenants portal-link acme",
        "webhookd tenants portal-link acme --expires-in 7d --allow manage,resend",
    ),
)
@tenant
@click.option(
    "--expires-in",
    type=age_seconds,
    metavar="TIME",
    default="1h",
    show_default=True,
    help="The link and its session end after this time: from 60s to 7d.",
)
@click.option(
    "--allow",
    "capabilities",
    type=_capabilities,
    metavar="NAMES",
    default="view",
    show_default=True,
    help=f"What the customer may do, separated by commas: {', '.join(CAPABILITIES)}.",
)
@json_option
@asks_daemon
def portal_link(
    client: Client, *, tenant: str, expires_in: int, capabilities: list[str], as_json: bool
) -> None:
    """Create a link to the portal of a tenant, for this customer.

    The link works once. Its session sees only this tenant.
    """
    if not MIN_LINK_SECONDS <= expires_in <= MAX_LINK_SECONDS:
        raise click.UsageError("--expires-in must be 60s to 7d")
    body = {"expires_in_seconds": expires_in, "capabilities": capabilities}
    answer = client.post(f"{_path(tenant)}/portal-link", body)
    if as_json:
        output.show_json(answer.body)
        return
    link = answer.value
    click.echo(escaped(link["url"]))
    allowed = ", ".join(map(escaped, link["capabilities"]))
    output.hint(f"Works once, until {output.time_field(link['expires_at'])}. Allows: {allowed}.")


@command.command("erase", epilog=example("webhookd tenants erase acme", "webhookd tenants erase acme --yes"))
@tenant
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@asks_daemon
def erase(client: Client, *, tenant: str, yes: bool, as_json: bool) -> None:
    """Remove a tenant with everything that belongs to it. This cannot be undone.

    Its subscriptions stop at once. The command waits until events, deliveries, attempts and dead letters are
    gone; after Ctrl-C the daemon continues. An evidence row with the time and the counts stays.
    """
    path = _path(tenant)
    if not yes and click.prompt(f"Type {tenant} to erase everything of it") != tenant:
        raise click.ClickException("that is another name; nothing was erased")
    wait_for_erasure(client, client.delete(path).value, as_json=as_json)


def _path(tenant: str) -> str:
    """Return the path of a tenant. No tenant can have another name: the daemon would only say "not found"."""
    if not re.match(TENANT, tenant) or len(tenant) > MAX_TENANT_CHARACTERS:
        raise click.UsageError("a tenant is 1 to 100 letters, digits and . _ : -")
    return f"/v1/tenants/{quote(tenant, safe='')}"


def _cells(row: Mapping[str, Any]) -> output.Row:
    return (
        output.text(row["tenant"]),
        output.text(row["name"]),
        _state(row),
        _subscriptions(row),
        output.time_cell(row["created_at"]),
    )


def _state(row: Mapping[str, Any]) -> output.Cell:
    return output.state("active") if row["active"] else output.state("paused", "inactive")


def _subscriptions(row: Mapping[str, Any]) -> str:
    limit = row["max_subscriptions"]
    return str(row["subscriptions"]) if limit is None else f"{row['subscriptions']} of {limit}"


def _print(answer: Any, *, as_json: bool) -> None:
    output.show_answer(answer, lambda answer: [output.fields(_facts(answer.value))], as_json=as_json)


def _facts(row: Mapping[str, Any]) -> Iterator[tuple[str, output.Cell]]:
    yield "tenant", output.text(row["tenant"])
    yield "name", output.text(row["name"])
    yield "state", _state(row)
    yield "subscriptions", _subscriptions(row)
    yield "created", output.time_field(row["created_at"])
    yield "changed", output.time_field(row["updated_at"])
