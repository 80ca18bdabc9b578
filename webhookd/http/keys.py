"""An idempotency key, which comes in a header, in the body, or in both alike."""

import msgspec
from aiohttp import web

from webhookd.http.fields import IdempotencyKey
from webhookd.http.problems import Problem, invalid


def key_in_header(request: web.Request) -> str | None:
    """Checked as the one in the body is."""
    keys = set(request.headers.getall("Idempotency-Key", []))
    if not keys:
        return None
    try:
        [key] = keys
        return msgspec.convert(key, IdempotencyKey)
    except ValueError as error:
        raise Problem(
            422, "invalid_request", "Idempotency-Key must be one key of 1 to 255 characters", close=True
        ) from error


def agreed_key(in_header: str | None, in_body: str | None) -> str | None:
    """The one that was given; a Problem if two were."""
    if in_header is not None and in_body not in (None, in_header):
        raise invalid("Idempotency-Key and idempotency_key differ", "idempotency_key_mismatch")
    return in_body if in_header is None else in_header
