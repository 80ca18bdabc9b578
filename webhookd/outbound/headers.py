"""A subscription's own headers. Pure: what a person gave in, the headers to store or the problem out.

One function for create and for patch: a validator that checked less on one of the ways would be the way.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from webhookd.core.limits import MAX_HEADER_VALUE_CHARACTERS, MAX_HEADERS, MAX_HEADERS_TOTAL_CHARACTERS

_SEPARATORS_LENGTH = len(": \r\n")

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Visible ASCII; blanks only inside, as in `Bearer token`.
_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")

# What frames the request, routes it, or is ours to say.
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
# Svix's list, and: our own webhook-; content-, which describes our body; proxy-, sec- and x-forwarded-,
# which intermediaries believe; x-http-method, x-original-, x-rewrite-, which turn a request into another;
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
    """What is wrong with a subscription's headers; stable, for programs."""

    NAME = "header_name"
    FORBIDDEN = "header_forbidden"
    DUPLICATE = "header_duplicate"
    VALUE = "header_value"
    VALUE_TOO_LONG = "header_value_too_long"
    TOO_MANY = "too_many_headers"
    TOO_LARGE = "headers_too_large"


@dataclass(frozen=True, slots=True)
class HeaderProblem:
    """Why not, and which; never the value, which may be a secret."""

    code: HeaderProblemCode
    detail: str


def check_headers(given: Mapping[str, str]) -> dict[str, str] | HeaderProblem:
    """The headers as they may be stored and sent, or the first problem."""
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
        return HeaderProblem(HeaderProblemCode.NAME, f"{name[:50]!r} is no header name")
    # Servers that hand headers on as variables make one of Content_Length and Content-Length.
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
        detail = f"the value of {name[:50]} must be visible ASCII, with blanks only inside"
        return HeaderProblem(HeaderProblemCode.VALUE, detail)
    return None
