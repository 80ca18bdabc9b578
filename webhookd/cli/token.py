"""`webhookd token`: creates an API token and its entry for the configuration. Stores and sends nothing."""

import base64
import hashlib
import json
import secrets
import typing

import click

from webhookd.cli.options import example, json_option
from webhookd.core.limits import MAX_TOKEN_NAME_CHARACTERS
from webhookd.core.settings import Scope

PREFIX = "whd_"
RANDOM_BYTES = 32
SCOPES: tuple[str, ...] = typing.get_args(Scope)


@click.command(
    "token",
    epilog=example(
        "webhookd token shop --scope ingest > shop.token",
        "webhookd publish order.created '{\"id\": 1}' --token-file shop.token",
    ),
)
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="What the token may do; can be repeated.",
)
@json_option
def command(name: str, scopes: tuple[str, ...], *, as_json: bool) -> None:
    """Create a token called NAME for the HTTP API.

    The token is printed to stdout and stored nowhere. Its entry for webhookd.toml, with a digest of the
    token, is printed to stderr. Add the entry to webhookd.toml and reload the daemon.
    """
    if not name.isprintable() or not 1 <= len(name) <= MAX_TOKEN_NAME_CHARACTERS:
        raise click.UsageError(f"NAME must be 1 to {MAX_TOKEN_NAME_CHARACTERS} printable characters")
    token = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(RANDOM_BYTES)).decode().rstrip("=")
    entry = {
        "name": name,
        "sha256": hashlib.sha256(token.encode()).hexdigest(),
        "scopes": list(dict.fromkeys(scopes)),
    }
    if as_json:
        click.echo(json.dumps({"token": token, "entry": entry}))
        return
    click.echo(token)
    # JSON strings and lists of strings are valid TOML.
    members = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items())
    click.echo("The token is shown only once. Add this entry to `tokens` in [api], and reload:", err=True)
    click.echo(f"  {{ {members} }},", err=True)
