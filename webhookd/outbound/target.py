"""Where a request goes, and its head. Pure: a stored URL and headers in, what is dialled and sent out."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from webhookd import __version__
from webhookd.core.limits import HIGHEST_PORT
from webhookd.outbound.urls import HTTPS_PORT

# The API stores nothing else; but a row may come from elsewhere, and what is sent is sent as it is.
_SENDABLE_URL = re.compile(
    r"https://"
    r"(?P<authority>(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?)"
    r"(?P<path>[/?][!-~]*)?"
)


class Origin(NamedTuple):
    """What a connection is to: a name, or an address without brackets, and a port."""

    host: str
    port: int


class Target(NamedTuple):
    """A URL taken apart, and with what every head begins that is sent to it."""

    origin: Origin
    beginning: str


@lru_cache(maxsize=1024)  # of few subscriptions at a time
def target_of(url: str) -> Target:
    """Take a URL apart; ValueError for one that could not have been stored through the API."""
    parts = _SENDABLE_URL.fullmatch(url)
    port = int(parts["port"] or HTTPS_PORT) if parts else 0
    if parts is None or not 0 < port <= HIGHEST_PORT:
        raise ValueError("the subscription's URL is none that could have been stored through the API")
    path = (parts["path"] or "/").partition("#")[0]
    beginning = (
        f"POST {path if path.startswith('/') else f'/{path}'} HTTP/1.1\r\n"
        f"host: {parts['authority']}\r\n"
        f"user-agent: webhookd/{__version__}\r\n"
        "content-type: application/json\r\n"
        # Nothing here decompresses: a bomb stays the bytes that it is.
        "accept-encoding: identity\r\n"
    )
    return Target(Origin(parts["v6"] or parts["host"], port), beginning)


def head_of(target: Target, headers: Mapping[str, str], length: int) -> bytes:
    """Everything before the body; ValueError for a header that would end its line, or the head, too early."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    if "accept" not in map(str.lower, headers):
        lines.append("accept: */*\r\n")
    text = "".join(lines)
    if not text.count("\r") == text.count("\n") == len(lines) or "\0" in text:
        raise ValueError("a header has a control character")
    return f"{target.beginning}{text}content-length: {length}\r\n\r\n".encode()
