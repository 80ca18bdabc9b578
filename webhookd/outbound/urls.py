"""Callback URLs. Pure: a person's text in, the form to store or what is wrong with it out.

Parsed here and not by a library: yarl strips tabs and line ends without a word, and takes
`https:///path` for a URL. What is stored is ASCII and is sent as it is.
"""

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address

import idna

from webhookd.core.limits import HIGHEST_PORT, LOWEST_UNPRIVILEGED_PORT, MAX_URL_CHARACTERS
from webhookd.outbound.addresses import AddressPolicy

MAX_HOST_LENGTH = 253
HTTPS_PORT = 443

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"//([^/?]*)")
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(.*))?")
_PORT = re.compile(r"[0-9]{1,5}")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
# inet_aton, and so getaddrinfo, reads a name that ends so as an address: 127.1, 0x7f.0.0.1, 2130706433.
_NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ENCODED_CONTROL = re.compile(r"%(?:[01][0-9A-Fa-f]|7[Ff])")
_NOT_SENT_AS_IT_IS = re.compile(r"[^A-Za-z0-9\-._~!$&'()*+,;=:@/?%\[\]]")

# Names of private places, and of places that DNS never reaches. example, test and invalid are harmless.
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
    """What is wrong with a callback URL; stable, for programs."""

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
    """A URL that may be stored, in the form to store: lower-case ASCII host, no default port, a path."""

    text: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class UrlProblem:
    """Why not."""

    code: UrlProblemCode
    detail: str


_NOT_PUBLIC = "has an address that is not public (delivery.allow_networks opens networks)"


class _Refused(Exception):
    """Carries a problem out of the parser's depth; never leaves this module."""

    def __init__(self, code: UrlProblemCode, detail: str) -> None:
        self.problem = UrlProblem(code, detail)


def check_callback_url(text: str, policy: AddressPolicy) -> CallbackUrl | UrlProblem:
    """Every rule that holds for the text. The address behind a name is judged when it is dialled."""
    try:
        return _parse(text, policy)
    except _Refused as refused:
        return refused.problem


def _parse(text: str, policy: AddressPolicy) -> CallbackUrl:
    if len(text) > MAX_URL_CHARACTERS:
        raise _Refused(UrlProblemCode.URL_TOO_LONG, f"longer than {MAX_URL_CHARACTERS} characters")
    # Before anything is parsed, for parsers strip them. By Unicode's categories: also what only looks empty.
    if any(unicodedata.category(character)[0] in "CZ" for character in text):
        raise _Refused(UrlProblemCode.CONTROL_CHAR, "contains a blank or a control character")
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1].lower() not in ("http", "https"):
        raise _Refused(UrlProblemCode.SCHEME, "must begin with https://")
    if scheme[1].lower() == "http":
        raise _Refused(UrlProblemCode.HTTPS_REQUIRED, "only https is delivered to")
    if "#" in text:
        raise _Refused(UrlProblemCode.FRAGMENT, "must have no fragment")
    authority = _AUTHORITY.match(text, scheme.end())
    if authority is None or not authority[1]:
        raise _Refused(UrlProblemCode.HOST_MISSING, "has no host")
    if "@" in authority[1]:
        raise _Refused(UrlProblemCode.USERINFO, "must have no user or password: use a header")
    host, port = _host_and_port(authority[1], policy)
    shown_port = "" if port == HTTPS_PORT else f":{port}"
    stored = f"https://{host}{shown_port}{_path(text[authority.end() :])}"
    if len(stored) > MAX_URL_CHARACTERS:
        raise _Refused(
            UrlProblemCode.URL_TOO_LONG, f"longer than {MAX_URL_CHARACTERS} characters when encoded"
        )
    return CallbackUrl(stored, host, port)


def _host_and_port(authority: str, policy: AddressPolicy) -> tuple[str, int]:
    if authority.startswith("["):
        bracketed = _BRACKETED.fullmatch(authority)
        if bracketed is None:
            raise _Refused(UrlProblemCode.HOST, "has a host that is no IPv6 address")
        return _ipv6(bracketed[1], policy), _port(bracketed[2])
    name, colon, port = authority.partition(":")
    if not name:
        raise _Refused(UrlProblemCode.HOST_MISSING, "has no host")
    return _ipv4_or_name(name, policy), _port(port if colon else None)


def _port(text: str | None) -> int:
    if text is None:
        return HTTPS_PORT
    port = int(text) if _PORT.fullmatch(text) else 0
    if port != HTTPS_PORT and not LOWEST_UNPRIVILEGED_PORT <= port <= HIGHEST_PORT:
        raise _Refused(
            UrlProblemCode.PORT,
            f"must have port {HTTPS_PORT}, or {LOWEST_UNPRIVILEGED_PORT} to {HIGHEST_PORT}",
        )
    return port


def _ipv6(text: str, policy: AddressPolicy) -> str:
    if "%" in text:
        raise _Refused(UrlProblemCode.IPV6_ZONE, "must name no interface of this machine")
    try:
        address = IPv6Address(text)
    except ValueError as error:
        raise _Refused(UrlProblemCode.HOST, "has a host that is no IPv6 address") from error
    if not policy.permits(address):
        raise _Refused(UrlProblemCode.BLOCKED_ADDRESS, _NOT_PUBLIC)
    return f"[{address.compressed}]"


def _ipv4_or_name(text: str, policy: AddressPolicy) -> str:
    try:
        address = IPv4Address(text)
    except ValueError:
        return _name(text, policy)
    if not policy.permits(address):
        raise _Refused(UrlProblemCode.BLOCKED_ADDRESS, _NOT_PUBLIC)
    return str(address)


def _name(text: str, policy: AddressPolicy) -> str:
    name = _punycode(text)
    labels = name.split(".")
    if len(name) > MAX_HOST_LENGTH or not all(_LABEL.fullmatch(label) for label in labels):
        raise _Refused(UrlProblemCode.HOST, "has a host that is no domain name")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        raise _Refused(UrlProblemCode.HOST, "has a number for a host")
    private = len(labels) == 1 or labels[-1] in _PRIVATE_TOP_LEVELS
    if private and not policy.allows_private_names:
        raise _Refused(UrlProblemCode.HOST, "has a host that is not a public name")
    return name


def _punycode(text: str) -> str:
    """The name as DNS has it. What Unicode's mapping changes beyond case is refused, not guessed at."""
    name = text.lower()
    if name.isascii() and text.isascii():
        if "xn--" not in name:
            return name
    elif any(not before.isascii() and _has_ascii(before.lower()) for before in text):
        # The Kelvin sign is a k in lower case.
        raise _Refused(UrlProblemCode.HOST, "has a host with characters that stand for others")
    try:
        # Strict: a name that mapping would change is invalid as it stands, but for the dots.
        if idna.uts46_remap(name, std3_rules=True, transitional=False) != name:
            raise _Refused(UrlProblemCode.HOST, "has a host with characters that stand for others")
        return idna.encode(name).decode("ascii")
    except UnicodeError as error:
        raise _Refused(UrlProblemCode.HOST, "has a host that is no domain name") from error


def _has_ascii(text: str) -> bool:
    return any(character.isascii() for character in text)


def _path(text: str) -> str:
    if "\\" in text:
        raise _Refused(UrlProblemCode.PATH, "has a backslash, which some read as a slash")
    if _BAD_ESCAPE.search(text):
        raise _Refused(UrlProblemCode.PATH, "has a % that begins no escape")
    if _ENCODED_CONTROL.search(text):
        raise _Refused(UrlProblemCode.PATH, "has an encoded control character")
    encoded = _NOT_SENT_AS_IT_IS.sub(_percent_encoded, text)
    return encoded if encoded.startswith("/") else f"/{encoded}"


def _percent_encoded(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
