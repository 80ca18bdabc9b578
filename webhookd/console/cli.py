"""`webhookd console`: opens the web console with a one-time login link."""

import os
import sys
import webbrowser
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client, asks_daemon
from webhookd.cli.options import escaped, example, json_option
from webhookd.core.errors import RequestRefused

NO_LOGIN = "login_not_needed"


@click.command(
    "console",
    epilog=example(
        "webhookd console",
        "webhookd console --print",
        "webhookd console --url https://hooks.example.com --token-file support.token",
    ),
)
@click.option("--print", "only_print", is_flag=True, help="Only print the address; do not open a browser.")
@json_option
@asks_daemon
def command(client: Client, *, only_print: bool, as_json: bool) -> None:
    """Open the web console in the browser, logged in with your token.

    Prints a link that logs in once, within five minutes, with the rights of the token. Opens it if there is a
    browser and the output is a terminal. Without tokens no login is needed, and the address of the console is
    printed.
    """
    link = _link(client)
    if as_json:
        click.echo(msgspec.json.encode(link))
        return
    url = escaped(link["url"])
    click.echo(url)
    if link["expires_at"]:
        output.hint(
            "This link logs in once, within five minutes, with the rights of your token. Keep it secret."
        )
    if not only_print and sys.stdout.isatty() and _is_address(link["url"]):
        _open(link["url"])


def _link(client: Client) -> dict[str, Any]:
    try:
        return client.post("/v1/console/login-link").value
    except RequestRefused as error:
        if error.code != NO_LOGIN:
            raise
    return {"url": f"{client.place.url.geturl().rstrip('/')}/", "expires_at": None}


def _is_address(url: str) -> bool:
    """Return whether a browser may get this text of a daemon as an argument."""
    return url.startswith(("http://", "https://")) and url.isascii() and url.isprintable() and " " not in url


def _open(url: str) -> None:
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    # Python's class for browsers in the terminal, which would hide the link. BROWSER is the user's choice.
    if type(browser) is webbrowser.GenericBrowser and not os.environ.get("BROWSER"):
        return
    browser.open(url)
