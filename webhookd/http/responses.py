"""Responses: values in, JSON out, and the response types that every API shares.

Times are RFC 3339 in UTC; a stored payload is sent unchanged.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict
from uuid import UUID

import orjson
from aiohttp import web
from msgspec import Meta

from webhookd.db.paging import Row
from webhookd.http.fields import Id, Uuid

# Sent with every response. `Server` replaces aiohttp's value, which reveals its version and Python's.
# `nosniff`, because the JSON contains what endpoints sent, and no browser should interpret that as anything
# else.
HEADERS = {"Server": "webhookd", "X-Content-Type-Options": "nosniff"}

Metrics: TypeAlias = Annotated[str, Meta(examples=["webhookd_events_accepted_total 3.0\n"])]
Document: TypeAlias = Annotated[dict[str, Any], Meta(examples=[{"openapi": "3.1.0"}])]
Html: TypeAlias = Annotated[str, Meta(examples=["<!doctype html>…"])]


class ProblemDocument(TypedDict):
    """An error (RFC 9457). `code` is stable; the wording of `title` and `detail` may change."""

    type: Annotated[str, Meta(examples=["urn:webhookd:problem:not_found"])]
    title: Annotated[str, Meta(examples=["Not found"])]
    status: Annotated[int, Meta(ge=400, le=599, examples=[404])]
    code: Annotated[str, Meta(examples=["not_found"])]
    detail: Annotated[str, Meta(examples=["event 42 does not exist"])]
    event_id: NotRequired[
        Annotated[Id, Meta(description="with idempotency_conflict: the event that has the key")]
    ]
    saga_id: NotRequired[Annotated[Id, Meta(description="with already_requeued: the existing delivery")]]
    job_id: NotRequired[
        Annotated[Uuid, Meta(description="with idempotency_conflict or already_requeued: the existing job")]
    ]
    job_status: NotRequired[Annotated[str, Meta(examples=["queued"], description="the job's current status")]]
    error_code: NotRequired[
        Annotated[str, Meta(description="with verification_failed: an error code as in attempts")]
    ]
    response_status: NotRequired[
        Annotated[int | None, Meta(description="with verification_failed: the endpoint's HTTP status")]
    ]
    duration_ms: NotRequired[
        Annotated[int | None, Meta(description="with verification_failed: duration of the request")]
    ]


def encoded(value: object) -> bytes:
    """Encode as JSON, with UTC times ending in Z."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z, default=_plain)


def json_response(value: object, status: int = 200) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=encoded(value), status=status, content_type="application/json", headers=HEADERS)


def no_content() -> web.Response:
    """Return a response without a body."""
    return web.Response(status=204, headers=HEADERS)


def list_response(rows: Sequence[Row], limit: int, key: str = "id") -> web.Response:
    """Return one page of a list. `rows` has one row more than `limit` if there is a next page."""
    items = rows[:limit]
    return json_response({"items": items, "next_cursor": items[-1][key] if len(rows) > limit else None})


def raw_json(text: str) -> orjson.Fragment:
    """Mark text as JSON, so that it is embedded unchanged."""
    return orjson.Fragment(text)


def _plain(value: object) -> str:
    """Convert the driver's UUIDs, which have a class of their own."""
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value)} cannot be encoded as JSON")
