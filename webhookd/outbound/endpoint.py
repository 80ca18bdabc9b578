"""An endpoint's URL and custom headers: checks what a user gives, and builds the head of a request. Pure.

No library parses the URL: yarl silently strips tabs and line ends, and accepts `https:///path`. The stored
form is ASCII and is sent unchanged. Create, update and send check headers with the same function.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple
from urllib.parse import quote

import idna

from webhookd import __version__
from webhookd.core import limits
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

# A stored URL. The API stores no other form, but a row may have another origin, and it is sent unchanged.
_STORED_URL = re.compile(
    r"https://"
    r"(?P<authority>(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?)"
    r"(?P<path>[/?][!-~]*)?"
)

# Private networks, and domains that public DNS never resolves. example, test and invalid are harmless.
_PRIVATE_TOP_LEVELS = frozenset(
    (
        *("arpa", "corp", "home", "internal", "intranet", "lan", "local", "localdomain", "localhost"),
        *("onion", "private"),
    )
)
_NOT_PUBLIC = "has an address that is not public (delivery.allow_networks opens networks)"

_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Visible ASCII; spaces only inside, as in `Bearer token`.
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
# Headers that frame or route the request, or that webhookd sets itself.
_FORBIDDEN_HEADERS = frozenset(
    (
        *("accept-encoding", "connection", "cookie", "date", "expect", "forwarded", "host", "http2-settings"),
        *("keep-alive", "metadata", "metadata-flavor", "origin", "range", "referer", "set-cookie", "te"),
        *("trailer", "transfer-encoding", "upgrade", "user-agent", "via"),
    )
)
_FORBIDDEN_PREFIXES = (
    "webhook-",  # our own
    "content-",  # describes our body
    *("proxy-", "sec-", "x-forwarded-"),  # trusted by intermediaries
    *("x-http-method", "x-original-", "x-rewrite-"),  # change the meaning of the request
    "x-aws-",  # carries the token for a machine's credentials
    *("x-amz-", "x-amzn-", "x-azure-", "x-fd-", "x-gfe", "x-goog"),  # Svix's list
)


class EndpointCode(StrEnum):
    """Stable codes for what is wrong with a callback URL or with headers."""

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
    HEADER_NAME = "header_name"
    HEADER_FORBIDDEN = "header_forbidden"
    HEADER_DUPLICATE = "header_duplicate"
    HEADER_VALUE = "header_value"
    HEADER_VALUE_TOO_LONG = "header_value_too_long"
    TOO_MANY_HEADERS = "too_many_headers"
    HEADERS_TOO_LARGE = "headers_too_large"


@dataclass(frozen=True, slots=True)
class EndpointProblem:
    """Why a URL or headers are rejected. Never contains a header's value, which may be a secret."""

    code: EndpointCode
    detail: str


class Origin(NamedTuple):
    """The peer of a connection: a name, or an address without brackets, and a port."""

    host: str
    port: int


class Target(NamedTuple):
    """A parsed URL, and the start of every request head that is sent to it with the same custom headers."""

    origin: Origin
    head_start: bytes


class Request(NamedTuple):
    """One POST as bytes, and where to send it."""

    origin: Origin
    head: bytes
    body: bytes


class _InvalidUrl(Exception):
    """Carries a problem out of the parser; never leaves this module."""

    def __init__(self, code: EndpointCode, detail: str) -> None:
        self.problem = EndpointProblem(code, detail)


def check_callback_url(text: str, policy: AddressPolicy) -> str | EndpointProblem:
    """Return the form to store: lower-case ASCII host, no default port, always a path.

    The addresses behind a name are checked when they are dialled.
    """
    try:
        return _parse(text, policy)
    except _InvalidUrl as invalid:
        return invalid.problem


def check_headers(given: Mapping[str, str]) -> dict[str, str] | EndpointProblem:
    """Return the headers to store and send, or the first problem."""
    if len(given) > limits.MAX_HEADERS:
        return EndpointProblem(EndpointCode.TOO_MANY_HEADERS, f"more than {limits.MAX_HEADERS} headers")
    seen: set[str] = set()
    for name, value in given.items():
        problem = _problem_of_name(name, seen) or _problem_of_value(name, value)
        if problem:
            return problem
        seen.add(name.lower())
    total = sum(len(f"{name}: {value}\r\n") for name, value in given.items())
    if total > limits.MAX_HEADERS_TOTAL_CHARACTERS:
        detail = f"more than {limits.MAX_HEADERS_TOTAL_CHARACTERS} bytes of headers"
        return EndpointProblem(EndpointCode.HEADERS_TOO_LARGE, detail)
    return dict(given)


def target_of(url: str, headers: Mapping[str, str]) -> Target:
    """Parse a stored URL; ValueError if the API could not have stored it."""
    origin, head_start = _origin_and_head_start(url)
    lines = "".join([header_line(name, value) for name, value in headers.items()])
    accept = "" if "accept" in map(str.lower, headers) else "accept: */*\r\n"
    return Target(origin, f"{head_start}{accept}{lines}".encode())


@lru_cache(maxsize=1024)  # the same few subscriptions are sent to again and again
def _origin_and_head_start(url: str) -> tuple[Origin, str]:
    parts = _STORED_URL.fullmatch(url)
    port = int(parts["port"] or HTTPS_PORT) if parts else 0
    if parts is None or not 0 < port <= limits.HIGHEST_PORT:
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
    return Origin(parts["v6"] or parts["host"], port), head_start


def header_line(name: str, value: str) -> str:
    """Return one line of a head; ValueError if it would end before its end."""
    line = f"{name}: {value}"
    if "\n" in line or "\r" in line or "\0" in line:
        raise ValueError("a header has a control character")
    return f"{line}\r\n"


def request_to(target: Target, header_lines: str, body: bytes) -> Request:
    """Build a request with further headers."""
    further = f"{header_lines}content-length: {len(body)}\r\n\r\n"
    return Request(target.origin, target.head_start + further.encode(), body)


def _parse(text: str, policy: AddressPolicy) -> str:
    if len(text) > limits.MAX_URL_CHARACTERS:
        raise _InvalidUrl(EndpointCode.URL_TOO_LONG, f"longer than {limits.MAX_URL_CHARACTERS} characters")
    # Checked before parsing, because parsers strip them; by Unicode category, to find invisible characters.
    if any(unicodedata.category(character)[0] in "CZ" for character in text):
        raise _InvalidUrl(EndpointCode.CONTROL_CHAR, "contains a space or a control character")
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() not in ("http", "https"):
        raise _InvalidUrl(EndpointCode.SCHEME, "must start with https://")
    if scheme[1].lower() == "http":
        raise _InvalidUrl(EndpointCode.HTTPS_REQUIRED, "must use https: http is not supported")
    if "#" in text:
        raise _InvalidUrl(EndpointCode.FRAGMENT, "must not have a fragment")
    authority = _AUTHORITY.match(text, scheme.end())
    if authority is None or not authority[1]:
        raise _InvalidUrl(EndpointCode.HOST_MISSING, "has no host")
    if "@" in authority[1]:
        raise _InvalidUrl(EndpointCode.USERINFO, "must not contain a user or password: use a header")
    host, port = _host_and_port(authority[1], policy)
    shown_port = "" if port == HTTPS_PORT else f":{port}"
    stored = f"https://{host}{shown_port}{_path(text[authority.end() :])}"
    if len(stored) > limits.MAX_URL_CHARACTERS:
        raise _InvalidUrl(
            EndpointCode.URL_TOO_LONG, f"longer than {limits.MAX_URL_CHARACTERS} characters when encoded"
        )
    return stored


def _host_and_port(authority: str, policy: AddressPolicy) -> tuple[str, int]:
    if authority.startswith("["):
        bracketed = _BRACKETED.fullmatch(authority)
        if bracketed is None:
            raise _InvalidUrl(EndpointCode.HOST, "has a host that is not an IPv6 address")
        return _ipv6(bracketed[1], policy), _port(bracketed[2])
    name, colon, port = authority.partition(":")
    if not name:
        raise _InvalidUrl(EndpointCode.HOST_MISSING, "has no host")
    return _ipv4_or_name(name, policy), _port(port if colon else None)


def _port(text: str | None) -> int:
    if text is None:
        return HTTPS_PORT
    port = int(text) if _PORT.fullmatch(text) else 0
    if port != HTTPS_PORT and not limits.LOWEST_UNPRIVILEGED_PORT <= port <= limits.HIGHEST_PORT:
        raise _InvalidUrl(
            EndpointCode.PORT,
            f"must have port {HTTPS_PORT}, or {limits.LOWEST_UNPRIVILEGED_PORT} to {limits.HIGHEST_PORT}",
        )
    return port


def _ipv6(text: str, policy: AddressPolicy) -> str:
    if "%" in text:
        raise _InvalidUrl(EndpointCode.IPV6_ZONE, "must not have an IPv6 zone")
    try:
        address = IPv6Address(text)
    except ValueError as error:
        raise _InvalidUrl(EndpointCode.HOST, "has a host that is not an IPv6 address") from error
    if not policy.permits(address):
        raise _InvalidUrl(EndpointCode.BLOCKED_ADDRESS, _NOT_PUBLIC)
    return f"[{address.compressed}]"


def _ipv4_or_name(text: str, policy: AddressPolicy) -> str:
    try:
        address = IPv4Address(text)
    except ValueError:
        return _name(text, policy)
    if not policy.permits(address):
        raise _InvalidUrl(EndpointCode.BLOCKED_ADDRESS, _NOT_PUBLIC)
    return str(address)


def _name(text: str, policy: AddressPolicy) -> str:
    name = _punycode(text)
    labels = name.split(".")
    if len(name) > MAX_HOST_LENGTH or not all(_LABEL.fullmatch(label) for label in labels):
        raise _InvalidUrl(EndpointCode.HOST, "has a host that is not a domain name")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        raise _InvalidUrl(EndpointCode.HOST, "has a number as its host")
    private = len(labels) == 1 or labels[-1] in _PRIVATE_TOP_LEVELS
    # An operator who allows a private network also wants to use its private names.
    if private and not policy.allow_networks:
        raise _InvalidUrl(EndpointCode.HOST, "has a host that is not a public name")
    return name


def _punycode(text: str) -> str:
    """Convert a name to its DNS form. A name that Unicode mapping changes, except in case, is rejected."""
    name = text.lower()
    if name.isascii() and text.isascii():
        if "xn--" not in name:
            return name
    elif any(not before.isascii() and any(map(str.isascii, before.lower())) for before in text):
        # Lower-casing makes them ASCII: the Kelvin sign becomes a k.
        raise _InvalidUrl(EndpointCode.HOST, "has a host with look-alike characters")
    try:
        # Strict: apart from the dots, a name that the mapping would change is invalid.
        if idna.uts46_remap(name, std3_rules=True, transitional=False) != name:
            raise _InvalidUrl(EndpointCode.HOST, "has a host with look-alike characters")
        return idna.encode(name).decode("ascii")
    except UnicodeError as error:
        raise _InvalidUrl(EndpointCode.HOST, "has a host that is not a domain name") from error


def _path(text: str) -> str:
    if "\\" in text:
        raise _InvalidUrl(EndpointCode.PATH, "has a backslash, which some servers read as a slash")
    if _BAD_ESCAPE.search(text):
        raise _InvalidUrl(EndpointCode.PATH, "has a % that does not start an escape")
    if _ENCODED_CONTROL.search(text):
        raise _InvalidUrl(EndpointCode.PATH, "has an encoded control character")
    encoded = quote(text, safe="!$&'()*+,;=:@/?%[]")
    return encoded if encoded.startswith("/") else f"/{encoded}"


def _problem_of_name(name: str, seen: set[str]) -> EndpointProblem | None:
    if not _HEADER_NAME.fullmatch(name):
        return EndpointProblem(EndpointCode.HEADER_NAME, f"{name[:50]!r} is not a header name")
    # Servers that pass headers on as variables do not distinguish Content_Length and Content-Length.
    lowered = name.lower().replace("_", "-")
    if lowered in _FORBIDDEN_HEADERS or lowered.startswith(_FORBIDDEN_PREFIXES):
        return EndpointProblem(EndpointCode.HEADER_FORBIDDEN, f"{name[:50]} cannot be set")
    if name.lower() in seen:
        return EndpointProblem(EndpointCode.HEADER_DUPLICATE, f"{name[:50]} is given twice")
    return None


def _problem_of_value(name: str, value: str) -> EndpointProblem | None:
    if len(value) > limits.MAX_HEADER_VALUE_CHARACTERS:
        detail = f"the value of {name[:50]} is longer than {limits.MAX_HEADER_VALUE_CHARACTERS} bytes"
        return EndpointProblem(EndpointCode.HEADER_VALUE_TOO_LONG, detail)
    if not _HEADER_VALUE.fullmatch(value):
        detail = f"the value of {name[:50]} must be visible ASCII, with spaces only inside"
        return EndpointProblem(EndpointCode.HEADER_VALUE, detail)
    return None
