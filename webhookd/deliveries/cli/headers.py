"""`--header` and `--header-file`: headers that a subscription's deliveries carry."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import click

from webhookd.cli.options import read_bounded
from webhookd.cli.text import escaped

MAX_FILE_BYTES = 65_536
# Names whose values nobody should see in a list of processes.
_SECRET_WORDS = ("auth", "cookie", "key", "pass", "secret", "signature", "token")


def header_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `headers`: a dict, or None if none was given."""

    @click.option(
        "--header",
        "lines",
        metavar="'NAME: VALUE'",
        multiple=True,
        help="A header to send with each delivery; give it again for more.",
    )
    @click.option(
        "--header-file",
        metavar="FILE",
        help="Read headers from this file, a line each, or from - for stdin: for values that are secret.",
    )
    @functools.wraps(command)
    def wrapped(*arguments: Any, lines: tuple[str, ...], header_file: str | None, **others: Any) -> None:
        command(*arguments, headers=_headers(lines, header_file), **others)

    return wrapped


def _headers(lines: tuple[str, ...], file: str | None) -> dict[str, str] | None:
    headers = _parsed(lines, "--header")
    for name in headers:
        if any(word in name.lower() for word in _SECRET_WORDS):
            raise click.UsageError(
                f"--header: every user of this machine can see arguments; put {escaped(name)} into a file, "
                "and use --header-file FILE"
            )
    if file is None:
        return headers or None
    text = read_bounded(file, "--header-file", MAX_FILE_BYTES).decode("utf-8", "replace")
    read = _parsed(filter(str.strip, text.split("\n")), "--header-file")
    if not read:
        raise click.UsageError(f"--header-file: {file} has no headers")
    return headers | read


def _parsed(lines: Iterable[str], option: str) -> dict[str, str]:
    """The daemon judges names and values; that none is there twice is for us to see."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            # Not shown: it may be the secret itself.
            raise click.UsageError(f"{option}: a header is 'Name: value'")
        if name.strip().lower() in map(str.lower, headers):
            raise click.UsageError(f"{option}: {escaped(name.strip())} is there twice")
        headers[name.strip()] = value.strip()
    return headers
