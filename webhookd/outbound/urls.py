"""Callback URLs: checking the text a user gives, and turning a stored URL into a request head. Pure.

No library parses them: yarl silently strips tabs and line ends, and accepts `https:///path`. The stored form
is ASCII and is sent unchanged.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

import idna

from webhookd import __version__
from webhookd.core.limits import HIGHEST_PORT, LOWEST_UNPRIVILEGED_PORT, MAX_URL_CHARACTERS
from webhookd.outbound.addresses import AddressPolicy

MAX_HOST_LENGTH = 253
HTTPS_PORT = 443

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"//([^/?]*)")
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(.*))?")
_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
# inet_aton, and so getaddrinfo, reads a name with such a last label as an address: 127.1, 0x7f.0.0.1,
# 2130706433.
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ENCODED_CONTROL = re.compile(r"%(?:[01][0-9A-Fa-f]|7[Ff])")
_NEEDS_ENCODING = re.compile(r"[^A-Za-z0-9\-._~!$&'()*+,;=:@/?%\[\]]")

# A stored URL. The API stores no other form, but a row may have another origin, and it is sent unchanged.
_STORED_URL = re.compile(
    r"https://"
    r"(?P<authority>(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?)"
    r"(?P<path>[/?][!-~]*)?"
)

# Private networks, and domains that public DNS never resolves. example, test and invalid are harmless.
_PRIVATE_TOP_LEVELS = frozenset(
    {
        "arpa",
        "corp",
        "home",
        "internal",
        "intranet",
        "lan",
        "local",
        "localdomain",
        "localhost",
        "onion",
        "private",
    }
)


class UrlProblemCode(StrEnum):
    """Stable codes for what is wrong with a callback URL."""

    HTTPS_REQUIRED = "https_required"
    SCHEME = "scheme"
    HOST_MISSING = "host_missing"
    CONTROL_CHAR = "control_char"
    USERINFO = "userinfo"
    FRAGMENT = "fragment"
    BLOCKED_ADDRESS = "blocked_address"
    HOST = "host"
    IPV6_ZONE = "ipv6_zone"
    PORT = "port"
    URL_TOO_LONG = "url_too_long"
    PATH = "path"


@dataclass(frozen=True, slots=True)
class CallbackUrl:
    """A valid URL in the form to store: lower-case ASCII host, no default port, always a path."""

    text: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class UrlProblem:
    """Why a callback URL is rejected."""

    code: UrlProblemCode
    detail: str


class Origin(NamedTuple):
    """The peer of a connection: a name, or an address without brackets, and a port."""

    host: str
    port: int


class Target(NamedTuple):
    """A parsed URL, and the start of every request head that is sent to it."""

    origin: Origin
    head_start: str


_NOT_PUBLIC = "has an address that is not public (delivery.allow_networks opens networks)"


class _InvalidUrl(Exception):
    """Carries a problem out of the parser; never leaves this module."""

    def __init__(self, code: UrlProblemCode, detail: str) -> None:
        self.problem = UrlProblem(code, detail)


def check_callback_url(text: str, policy: AddressPolicy) -> CallbackUrl | UrlProblem:
    """Apply every rule for the text. The addresses behind a name are checked when they are dialled."""
    try:
        return _parse(text, policy)
    except _InvalidUrl as invalid:
        return invalid.problem


@lru_cache(maxsize=1024)  # the same few subscriptions are sent to again and again
def target_of(url: str) -> Target:
    """Parse a stored URL; ValueError if the API could not have stored it."""
    parts = _STORED_URL.fullmatch(url)
    port = int(parts["port"] or HTTPS_PORT) if parts else 0
    if parts is None or not 0 < port <= HIGHEST_PORT:
        raise ValueError("the subscription's URL is not one that the API would store")
    path = (parts["path"] or "/").partition("#")[0]
    head_start = (
        f"POST {path if path.startswith('/') else f'/{path}'} HTTP/1.1\r\n"
        f"host: {parts['authority']}\r\n"
        f"user-agent: webhookd/{__version__}\r\n"
        "content-type: application/json\r\n"
        # Responses are never decompressed, so a decompression bomb stays small.
        "accept-encoding: identity\r\n"
    )
    return Target(Origin(parts["v6"] or parts["host"], port), head_start)


def head_of(target: Target, headers: Mapping[str, str], length: int) -> bytes:
    """Build the request head; ValueError if a header contains a line end or a null character."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    if "accept" not in map(str.lower, headers):
        lines.append("accept: */*\r\n")
    text = "".join(lines)
    if not text.count("\r") == text.count("\n") == len(lines) or "\0" in text:
        raise ValueError("a header has a control character")
    return f"{target.head_start}{text}content-length: {length}\r\n\r\n".encode()


def _parse(text: str, policy: AddressPolicy) -> CallbackUrl:
    if len(text) > MAX_URL_CHARACTERS:
        raise _InvalidUrl(UrlProblemCode.URL_TOO_LONG, f"longer than {MAX_URL_CHARACTERS} characters")
    # Checked before parsing, because parsers strip them; by Unicode category, to find invisible characters.
    if any(unicodedata.category(character)[0] in "CZ" for character in text):
        raise _InvalidUrl(UrlProblemCode.CONTROL_CHAR, "contains a space or a control character")
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() not in ("http", "https"):
        raise _InvalidUrl(UrlProblemCode.SCHEME, "must start with https://")
    if scheme[1].lower() == "http":
        raise _InvalidUrl(UrlProblemCode.HTTPS_REQUIRED, "must use https: http is not supported")
    if "#" in text:
        raise _InvalidUrl(UrlProblemCode.FRAGMENT, "must not have a fragment")
    authority = _AUTHORITY.match(text, scheme.end())
    if authority is None or not authority[1]:
        raise _InvalidUrl(UrlProblemCode.HOST_MISSING, "has no host")
    if "@" in authority[1]:
        raise _InvalidUrl(UrlProblemCode.USERINFO, "must not contain a user or password: use a header")
    host, port = _host_and_port(authority[1], policy)
    shown_port = "" if port == HTTPS_PORT else f":{port}"
    stored = f"https://{host}{shown_port}{_path(text[authority.end() :])}"
    if len(stored) > MAX_URL_CHARACTERS:
        raise _InvalidUrl(
            UrlProblemCode.URL_TOO_LONG, f"longer than {MAX_URL_CHARACTERS} characters when encoded"
        )
    return CallbackUrl(stored, host, port)


def _host_and_port(authority: str, policy: AddressPolicy) -> tuple[str, int]:
    if authority.startswith("["):
        bracketed = _BRACKETED.fullmatch(authority)
        if bracketed is None:
            raise _InvalidUrl(UrlProblemCode.HOST, "has a host that is not an IPv6 address")
        return _ipv6(bracketed[1], policy), _port(bracketed[2])
    name, colon, port = authority.partition(":")
    if not name:
        raise _InvalidUrl(UrlProblemCode.HOST_MISSING, "has no host")
    return _ipv4_or_name(name, policy), _port(port if colon else None)


def _port(text: str | None) -> int:
    if text is None:
        return HTTPS_PORT
    port = int(text) if _PORT.fullmatch(text) else 0
    if port != HTTPS_PORT and not LOWEST_UNPRIVILEGED_PORT <= port <= HIGHEST_PORT:
        raise _InvalidUrl(
            UrlProblemCode.PORT,
            f"must have port {HTTPS_PORT}, or {LOWEST_UNPRIVILEGED_PORT} to {HIGHEST_PORT}",
        )
    return port


def _ipv6(text: str, policy: AddressPolicy) -> str:
    if "%" in text:
        raise _InvalidUrl(UrlProblemCode.IPV6_ZONE, "must not have an IPv6 zone")
    try:
        address = IPv6Address(text)
    except ValueError as error:
        raise _InvalidUrl(UrlProblemCode.HOST, "has a host that is not an IPv6 address") from error
    if not policy.permits(address):
        raise _InvalidUrl(UrlProblemCode.BLOCKED_ADDRESS, _NOT_PUBLIC)
    return f"[{address.compressed}]"


def _ipv4_or_name(text: str, policy: AddressPolicy) -> str:
    try:
        address = IPv4Address(text)
    except ValueError:
        return _name(text, policy)
    if not policy.permits(address):
        raise _InvalidUrl(UrlProblemCode.BLOCKED_ADDRESS, _NOT_PUBLIC)
    return str(address)


def _name(text: str, policy: AddressPolicy) -> str:
    name = _punycode(text)
    labels = name.split(".")
    if len(name) > MAX_HOST_LENGTH or not all(_LABEL.fullmatch(label) for label in labels):
        raise _InvalidUrl(UrlProblemCode.HOST, "has a host that is not a domain name")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        raise _InvalidUrl(UrlProblemCode.HOST, "has a number as its host")
    private = len(labels) == 1 or labels[-1] in _PRIVATE_TOP_LEVELS
    if private and not policy.allows_private_names:
        raise _InvalidUrl(UrlProblemCode.HOST, "has a host that is not a public name")
    return name


def _punycode(text: str) -> str:
    """Convert a name to its DNS form. A name that Unicode mapping changes, except in case, is rejected."""
    name = text.lower()
    if name.isascii() and text.isascii():
        if "xn--" not in name:
            return name
    elif any(not before.isascii() and _has_ascii(before.lower()) for before in text):
        # Lower-casing makes them ASCII: the Kelvin sign becomes a k.
        raise _InvalidUrl(UrlProblemCode.HOST, "has a host with look-alike characters")
    try:
        # Strict: apart from the dots, a name that the mapping would change is invalid.
        if idna.uts46_remap(name, std3_rules=True, transitional=False) != name:
            raise _InvalidUrl(UrlProblemCode.HOST, "has a host with look-alike characters")
        return idna.encode(name).decode("ascii")
    except UnicodeError as error:
        raise _InvalidUrl(UrlProblemCode.HOST, "has a host that is not a domain name") from error


def _has_ascii(text: str) -> bool:
    return any(character.isascii() for character in text)


def _path(text: str) -> str:
    if "\\" in text:
        raise _InvalidUrl(UrlProblemCode.PATH, "has a backslash, which some servers read as a slash")
    if _BAD_ESCAPE.search(text):
        raise _InvalidUrl(UrlProblemCode.PATH, "has a % that does not start an escape")
    if _ENCODED_CONTROL.search(text):
        raise _InvalidUrl(UrlProblemCode.PATH, "has an encoded control character")
    encoded = _NEEDS_ENCODING.sub(_percent_encoded, text)
    return encoded if encoded.startswith("/") else f"/{encoded}"


def _percent_encoded(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
