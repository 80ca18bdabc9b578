"""Custom headers of a subscription: checks what a user gives. Pure.

Create, update and send use the same function, so no path checks less than another.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from webhookd.core.limits import MAX_HEADER_VALUE_CHARACTERS, MAX_HEADERS, MAX_HEADERS_TOTAL_CHARACTERS

_SEPARATORS_LENGTH = len(": \r\n")

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Visible ASCII; spaces only inside, as in `Bearer token`.
_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")

# Headers that frame or route the request, or that webhookd sets itself.
_FORBIDDEN = frozenset(
    {
        "accept-encoding",
        "connection",
        "cookie",
        "date",
        "expect",
        "forwarded",
        "host",
        "http2-settings",
        "keep-alive",
        "metadata",
        "metadata-flavor",
        "origin",
        "range",
        "referer",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "via",
    }
)
# Svix's list, plus: our own webhook-; content-, which describes our body; proxy-, sec- and x-forwarded-,
# which intermediaries trust; x-http-method, x-original-, x-rewrite-, which change the request's meaning;
# x-aws-, which carries the token for a machine's credentials.
_FORBIDDEN_PREFIXES = (
    "content-",
    "proxy-",
    "sec-",
    "webhook-",
    "x-amz-",
    "x-amzn-",
    "x-aws-",
    "x-azure-",
    "x-fd-",
    "x-forwarded-",
    "x-gfe",
    "x-goog",
    "x-http-method",
    "x-original-",
    "x-rewrite-",
)


class HeaderProblemCode(StrEnum):
    """Stable codes for what is wrong with a subscription's headers."""

    NAME = "header_name"
    FORBIDDEN = "header_forbidden"
    DUPLICATE = "header_duplicate"
    VALUE = "header_value"
    VALUE_TOO_LONG = "header_value_too_long"
    TOO_MANY = "too_many_headers"
    TOO_LARGE = "headers_too_large"


@dataclass(frozen=True, slots=True)
class HeaderProblem:
    """Why the headers are rejected. Never contains a value, which may be a secret."""

    code: HeaderProblemCode
    detail: str


def check_headers(given: Mapping[str, str]) -> dict[str, str] | HeaderProblem:
    """Return the headers to store and send, or the first problem."""
    if len(given) > MAX_HEADERS:
        return HeaderProblem(HeaderProblemCode.TOO_MANY, f"more than {MAX_HEADERS} headers")
    seen: set[str] = set()
    for name, value in given.items():
        problem = _problem_of_name(name, seen) or _problem_of_value(name, value)
        if problem:
            return problem
        seen.add(name.lower())
    if (
        sum(len(name) + len(value) + _SEPARATORS_LENGTH for name, value in given.items())
        > MAX_HEADERS_TOTAL_CHARACTERS
    ):
        return HeaderProblem(
            HeaderProblemCode.TOO_LARGE, f"more than {MAX_HEADERS_TOTAL_CHARACTERS} bytes of headers"
        )
    return dict(given)


def _problem_of_name(name: str, seen: set[str]) -> HeaderProblem | None:
    if not _TOKEN.fullmatch(name):
        return HeaderProblem(HeaderProblemCode.NAME, f"{name[:50]!r} is not a header name")
    # Servers that pass headers on as variables do not distinguish Content_Length and Content-Length.
    lowered = name.lower().replace("_", "-")
    if lowered in _FORBIDDEN or lowered.startswith(_FORBIDDEN_PREFIXES):
        return HeaderProblem(HeaderProblemCode.FORBIDDEN, f"{name[:50]} cannot be set")
    if name.lower() in seen:
        return HeaderProblem(HeaderProblemCode.DUPLICATE, f"{name[:50]} is given twice")
    return None


def _problem_of_value(name: str, value: str) -> HeaderProblem | None:
    if len(value) > MAX_HEADER_VALUE_CHARACTERS:
        detail = f"the value of {name[:50]} is longer than {MAX_HEADER_VALUE_CHARACTERS} bytes"
        return HeaderProblem(HeaderProblemCode.VALUE_TOO_LONG, detail)
    if not _VALUE.fullmatch(value):
        detail = f"the value of {name[:50]} must be visible ASCII, with spaces only inside"
        return HeaderProblem(HeaderProblemCode.VALUE, detail)
    return None
