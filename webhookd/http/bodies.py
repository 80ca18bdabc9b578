"""Requests read: body, query and path in, typed values out; or a Problem. Nothing here waits without end."""

import asyncio
from datetime import datetime
from itertools import accumulate
from typing import TypeVar
from uuid import UUID

import msgspec
from aiohttp import web

from webhookd.http.fields import MAX_ID
from webhookd.http.problems import Problem, invalid

Value = TypeVar("Value")

BODY_TIMEOUT_SECONDS = 20.0
# Far more than people nest, and less than what breaks the parsers of PostgreSQL, of Python and of receivers.
MAX_DEPTH = 500
MAX_ID_DIGITS = len(str(MAX_ID))

CONTINUE = "100-continue"

_JSON_CHARSETS = ("utf-8", "utf8", "us-ascii")
_BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
FORMS = {
    "event_type": "words of letters, digits and _, joined by dots",
    "idempotency_key": "1 to 255 characters, none of them a control character",
    "correlation_id": "printable ASCII, without spaces at its ends",
}
_UNKNOWN_FIELD = "Object contains unknown field"


async def read_json(
    request: web.Request, kind: type[Value], max_bytes: int, *, is_wide: bool = False
) -> Value:
    """The body as `kind`. Refused from its headers where they tell enough.

    How deep a wide one is nested, the reader checks of each part: for the whole it takes as long as parsing.
    """
    _check_headers(request, max_bytes)
    if request.headers.get("Expect", "").strip().lower() == CONTINUE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer's own begins after it
    body = await _read(request, max_bytes)
    # msgspec lets other bytes than UTF-8 through in a value that it keeps raw.
    if not _is_utf8(body):
        raise Problem(400, "malformed_json", "the body is not UTF-8")
    if not is_wide:
        check_depth(body)
    return _decoded(body, kind)


def check_depth(text: bytes) -> None:
    """Refuse JSON that is nested too deep for somebody on its way."""
    if _is_deeper_than(text, MAX_DEPTH):
        raise _too_deep()


async def read_optional_json(request: web.Request, kind: type[Value], max_bytes: int) -> Value:
    """As read_json, but no body is `{}`."""
    if not request.body_exists:
        return msgspec.convert({}, kind)
    return await read_json(request, kind, max_bytes)


def read_query(request: web.Request, kind: type[Value]) -> Value:
    """The query as `kind`: every parameter known, and there once."""
    if len(request.query) != len(set(request.query)):
        raise invalid("a parameter is there twice", "invalid_parameter")
    try:
        value = msgspec.convert(dict(request.query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(str(error), "invalid_parameter") from error
    for name, text in request.query.items():
        # Texts are made numbers here, and a number is a time to msgspec: seconds since 1970.
        if isinstance(getattr(value, name), datetime) and ":" not in text:
            raise invalid(f"{name} is no time of RFC 3339", "invalid_parameter")
    if any("\0" in text or not _is_text(text) for text in request.query.values()):
        raise invalid("a parameter has characters that are no text", "invalid_parameter")
    return value


def path_id(request: web.Request, what: str) -> int:
    """The id in the path. Digits, as the route asks; more than an id can have is none that there is."""
    text = request.match_info["id"]
    if len(text) > MAX_ID_DIGITS or int(text) > MAX_ID:
        raise Problem(404, "not_found", f"no such {what}")
    return int(text)


def path_uuid(request: web.Request, what: str) -> UUID:
    """The id in the path, where it is a UUID."""
    try:
        return UUID(request.match_info["id"])
    except ValueError as error:
        raise Problem(404, "not_found", f"no such {what}") from error


def _check_headers(request: web.Request, max_bytes: int) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Problem(415, "unsupported_encoding", "the body must not be encoded", close=True)
    try:
        charset = request.charset or "utf-8"
    except (ValueError, LookupError):
        charset = ""
    if request.content_type != "application/json" or charset.lower() not in _JSON_CHARSETS:
        raise Problem(
            415, "unsupported_media_type", "the body must be application/json, in UTF-8", close=True
        )
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: web.Request, max_bytes: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > max_bytes:
                    break
    except TimeoutError as error:
        raise Problem(408, "timeout", "the body did not come in time", close=True) from error
    except Exception as error:  # the peer went away, or its chunks are none: aiohttp has many names for it
        raise Problem(400, "incomplete_body", "the body did not come whole", close=True) from error
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return bytes(body)


def _decoded(body: bytes, kind: type[Value]) -> Value:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not _is_json(body):  # msgspec stops at the first thing that is wrong
            raise Problem(400, "malformed_json", "the body is not JSON") from error
        detail = _in_words(str(error))
        code = "unknown_field" if detail.startswith(_UNKNOWN_FIELD) else "invalid_request"
        raise invalid(detail, code) from error
    except msgspec.DecodeError as error:
        raise Problem(400, "malformed_json", str(error)) from error
    except RecursionError as error:
        raise _too_deep() from error


def _in_words(detail: str) -> str:
    """A form that a person can follow, in place of the expression that tests it."""
    field = detail.rpartition("`$.")[2].rstrip("`").rpartition(".")[2]
    if "matching regex" in detail and field in FORMS:
        return f"{field} must be {FORMS[field]}"
    return detail


def _too_deep() -> Problem:
    return Problem(400, "too_deep", f"nested more than {MAX_DEPTH} deep")


def _is_deeper_than(body: bytes, depth: int) -> bool:
    # Nearly every body ends here: two passes at the speed of memory.
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    # Without escapes every second quote ends a string: what is outside has the brackets that count.
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = outside.translate(None, _ALL_BUT_BRACKETS)
    return max(accumulate(map(_BRACKETS.__getitem__, brackets)), default=0) > depth


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(max_bytes: int) -> Problem:
    return Problem(413, "payload_too_large", f"the body is larger than {max_bytes} bytes", close=True)
