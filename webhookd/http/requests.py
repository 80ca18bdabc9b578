"""Request parsing: body, query, path and idempotency key in, typed values or a Problem out.

Every read has a size limit and a timeout.
"""

import asyncio
from datetime import datetime
from itertools import accumulate
from typing import Annotated, Any, TypeVar
from uuid import UUID

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import (
    DEFAULT_PAGE_SIZE,
    MAX_ID,
    MAX_ID_DIGITS,
    MAX_KEY_CHARACTERS,
    MAX_LISTED_IDS,
    MAX_PAGE_SIZE,
)
from webhookd.db.paging import Page
from webhookd.http.auth import tenant_of
from webhookd.http.fields import Id, IdempotencyKey
from webhookd.http.responses import Problem, invalid

Value = TypeVar("Value")

BODY_TIMEOUT_SECONDS = 20.0
# Far deeper than real data, and less than what breaks the parsers of PostgreSQL, Python and receivers.
MAX_DEPTH = 500

CONTINUE = "100-continue"
KEY_HEADER = "Idempotency-Key"

_JSON_CHARSETS = ("utf-8", "utf8", "us-ascii")
_BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
# Shown in place of the regular expression that a value does not match.
FORMATS = {
    "event_type": "words of letters, digits and _, joined by dots",
    "tenant": "1 to 100 letters, digits and . _ : -",
    "idempotency_key": f"1 to {MAX_KEY_CHARACTERS} characters without control characters",
    "correlation_id": "visible ASCII, without spaces at the ends",
    "ids": f"1 to {MAX_LISTED_IDS} ids, separated by commas",
}
# Of a subscription's event types. Only their regular expression has this text.
PATTERN_FORMS = (
    "an event type (order.created), a prefix (order.*) or *; words have letters, digits and _, and are "
    "joined by dots"
)
_ALLOWS_PATTERNS = "|\\\\*)"
MAX_SHOWN_CHARACTERS = 100
_UNKNOWN_FIELD = "Object contains unknown field"


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request whose path already says everything."""


class Paged(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The query parameters of every list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE, description="page size")] = DEFAULT_PAGE_SIZE
    cursor: Annotated[Id, Meta(description="next_cursor of the previous page")] | UnsetType = UNSET

    @property
    def page(self) -> Page:
        """Fetch one row more than `limit`, which shows whether there is a next page."""
        return Page(self.limit + 1, given(self.cursor))

    @property
    def filters(self) -> dict[str, Any]:
        """The other parameters that are in the request."""
        return {
            name: value for name, value in given_fields(self).items() if name not in Paged.__struct_fields__
        }


def given(value: Value | UnsetType) -> Value | None:
    """Return None for a value that is not in the request."""
    return None if isinstance(value, UnsetType) else value


def given_fields(body: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are in the request."""
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value is not UNSET}


async def read_json(
    request: web.Request, kind: type[Value], max_bytes: int, *, is_wide: bool = False
) -> Value:
    """Read the body as `kind`. A request whose headers are already wrong is rejected before its body is read.

    The caller checks the nesting of a wide body (a batch) part by part: checking the whole takes as long as
    parsing it.
    """
    _check_headers(request, max_bytes)
    if request.headers.get("Expect", "").strip().lower() == CONTINUE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response's own size is counted from here
    body = await read_body(request, max_bytes)
    try:
        body.decode()  # msgspec does not check the encoding of a value that it keeps raw
    except UnicodeDecodeError as error:
        raise Problem(400, "malformed_json", "the body is not UTF-8") from error
    if not is_wide:
        check_depth(body)
    return _decoded(body, kind)


def check_depth(text: bytes) -> None:
    """Reject JSON that is nested too deeply."""
    # Nearly every body returns here, after two passes at the speed of memory.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and depth(text) > MAX_DEPTH:
        raise _too_deep()


def depth(text: bytes) -> int:
    """Return how many arrays and objects of a JSON document are inside each other."""
    # Once escapes are removed, every second quote ends a string; only brackets outside strings count.
    outside = b"".join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = outside.translate(None, _ALL_BUT_BRACKETS)
    return max(accumulate(map(_BRACKETS.__getitem__, brackets)), default=0)


async def read_optional_json(request: web.Request, kind: type[Value], max_bytes: int) -> Value:
    """Read the body as read_json does; a missing body counts as `{}`."""
    if not request.body_exists:
        return msgspec.convert({}, kind)
    return await read_json(request, kind, max_bytes)


def read_query(request: web.Request, kind: type[Value]) -> Value:
    """Read the query as `kind`. Unknown and repeated parameters are rejected."""
    if len(request.query) != len(set(request.query)):
        raise invalid("a parameter is given twice", "invalid_parameter")
    parameters: dict[str, Any] = {}
    for name, text in request.query.items():
        # A surrogate or a null character is not text.
        if "\0" in text or text != text.encode(errors="ignore").decode():
            raise invalid("a parameter contains characters that are not text", "invalid_parameter")
        group, dot, member = name.partition(".")
        if dot and isinstance(parameters.setdefault(group, {}), dict):
            parameters[group][member] = text  # label.region=eu is {"label": {"region": "eu"}}
        else:
            parameters[name] = text
    try:
        value = msgspec.convert(parameters, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(_in_words(str(error), parameters), "invalid_parameter") from error
    for name, text in parameters.items():
        # Without `strict` msgspec reads a number as seconds since 1970.
        if isinstance(getattr(value, name), datetime) and ":" not in text:
            raise invalid(f"{name} must be a time as in RFC 3339", "invalid_parameter")
    return value


def own_filters(request: web.Request, query: Paged) -> dict[str, Any]:
    """Return the filters of a list, with the tenant that the token is bound to."""
    filters, tenant = query.filters, tenant_of(request)
    if tenant is None:
        return filters
    if filters.setdefault("tenant", tenant) != tenant:
        raise Problem(404, "not_found", "no such tenant")
    return filters


def path_id(request: web.Request, what: str) -> int:
    """Return the id in the path. The route allows digits only; a number above MAX_ID cannot exist."""
    text = request.match_info["id"]
    if len(text) > MAX_ID_DIGITS or int(text) > MAX_ID:
        raise Problem(404, "not_found", f"no such {what}")
    return int(text)


def path_uuid(request: web.Request, what: str) -> UUID:
    """Return the UUID in the path."""
    try:
        return UUID(request.match_info["id"])
    except ValueError as error:
        raise Problem(404, "not_found", f"no such {what}") from error


def key_in_header(request: web.Request) -> str | None:
    """Return the Idempotency-Key header, checked like the field in the body."""
    keys = set(request.headers.getall(KEY_HEADER, []))
    if not keys:
        return None
    try:
        [key] = keys
        return msgspec.convert(key, IdempotencyKey)
    except ValueError as error:
        detail = f"{KEY_HEADER} must be a single key of 1 to {MAX_KEY_CHARACTERS} characters"
        raise Problem(422, "invalid_request", detail, close=True) from error


def agreed_key(in_header: str | None, in_body: str | None) -> str | None:
    """Return the key from header or body. Two different keys are a Problem."""
    if in_header is not None and in_body not in (None, in_header):
        raise invalid(f"{KEY_HEADER} and idempotency_key differ", "idempotency_key_mismatch")
    return in_body if in_header is None else in_header


def _check_headers(request: web.Request, max_bytes: int) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Problem(415, "unsupported_encoding", "the body must not have a Content-Encoding", close=True)
    try:
        charset = request.charset or "utf-8"
    except (ValueError, LookupError):
        charset = ""
    if request.content_type != "application/json" or charset.lower() not in _JSON_CHARSETS:
        raise Problem(415, "unsupported_media_type", "the body must be application/json in UTF-8", close=True)
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Read the body, up to a size."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > max_bytes:
                    break
    except TimeoutError as error:
        raise Problem(408, "timeout", "the body did not arrive in time", close=True) from error
    except Exception as error:  # a closed connection or invalid chunks: aiohttp has many exceptions for them
        raise Problem(400, "incomplete_body", "the body did not arrive completely", close=True) from error
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return bytes(body)


def _decoded(body: bytes, kind: type[Value]) -> Value:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not _is_json(body):  # msgspec stops at the first error, which may come before the syntax error
            raise Problem(400, "malformed_json", "the body is not JSON") from error
        detail = _in_words(str(error), body)
        code = "unknown_field" if detail.startswith(_UNKNOWN_FIELD) else "invalid_request"
        raise invalid(detail, code) from error
    except msgspec.DecodeError as error:
        raise Problem(400, "malformed_json", str(error)) from error
    except RecursionError as error:
        raise _too_deep() from error


def _in_words(detail: str, given: bytes | dict[str, Any]) -> str:
    """Describe the format in words instead of showing the regular expression."""
    if "matching regex" not in detail:
        return detail
    path = detail.rpartition("`$.")[2].rstrip("`")
    field, _, place = path.rpartition(".")[2].rstrip("]").partition("[")
    if _ALLOWS_PATTERNS in detail:
        return f"{field}: {_bad_pattern(given, field, place)} must be {PATTERN_FORMS}"
    return f"{field} must be {FORMATS[field]}" if field in FORMATS else detail


def _bad_pattern(given: bytes | dict[str, Any], field: str, place: str) -> str:
    """Return the pattern, which is a field at the top of the document, or in a list there."""
    if isinstance(given, bytes):
        value = msgspec.json.decode(msgspec.json.decode(given, type=dict[str, msgspec.Raw])[field])
    else:
        value = given[field]
    return _shown(value[int(place)] if place else value)


def _shown(value: str) -> str:
    short = value if len(value) <= MAX_SHOWN_CHARACTERS else f"{value[:MAX_SHOWN_CHARACTERS]}…"
    return msgspec.json.encode(short).decode()


def _too_deep() -> Problem:
    return Problem(400, "too_deep", f"the body is nested more than {MAX_DEPTH} levels deep")


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _too_large(max_bytes: int) -> Problem:
    return Problem(413, "payload_too_large", f"the body is larger than {max_bytes} bytes", close=True)
