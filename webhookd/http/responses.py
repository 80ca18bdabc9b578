"""Responses: values in, JSON out; errors in, `application/problem+json` (RFC 9457) out.

Times are RFC 3339 in UTC; a stored payload is sent unchanged. An error has a stable `code`. Driver messages
and tracebacks never reach a client.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict, assert_never
from uuid import UUID

import orjson
from aiohttp import web
from msgspec import Meta

from webhookd.core.errors import Refusal, Refused
from webhookd.db.paging import Row
from webhookd.http.fields import Id, Uuid

# Sent with every response. `Server` replaces aiohttp's value, which reveals its version and Python's.
# `nosniff`, because the JSON contains what endpoints sent, and no browser should interpret that as anything
# else.
HEADERS = {"Server": "webhookd", "X-Content-Type-Options": "nosniff"}
PROBLEM_JSON = "application/problem+json"

raw_json = orjson.Fragment  # marks text as JSON, so that it is embedded unchanged

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


def list_response(
    rows: Sequence[Row], limit: int, key: str = "id", cut_at: int | None = None
) -> web.Response:
    """Return one page of a list. `rows` has one row more than `limit` if there is a next page.

    `cut_at` is the cursor of the next page if this one ended before it was full.
    """
    items = rows[:limit]
    return json_response({"items": items, "next_cursor": items[-1][key] if len(rows) > limit else cut_at})


def _plain(value: object) -> str:
    """Convert the driver's UUIDs, which have a class of their own."""
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value)} cannot be encoded as JSON")


class Problem(Exception):
    """An error response. Handlers raise it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: dict[str, str] | None = None,
        close: bool = False,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers or {}
        self.close = close  # the body was not read, so the next bytes on this connection are not a request
        self.members = members

    @property
    def title(self) -> str:
        return self.code.replace("_", " ").capitalize()

    @property
    def document(self) -> dict[str, Any]:
        return {
            "type": f"urn:webhookd:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.members,
        }

    def response(self) -> web.Response:
        response = web.Response(
            body=encoded(self.document),
            status=self.status,
            content_type=PROBLEM_JSON,
            headers=HEADERS | self.headers,
        )
        if self.close:
            response.force_close()
        return response


def invalid(detail: str, code: str = "invalid_request", **members: Any) -> Problem:
    """Return a 422: the request is well-formed but not acceptable."""
    return Problem(422, code, detail, **members)


def not_found(what: str, item_id: object) -> Problem:
    """Return a 404 that names what was looked up."""
    return Problem(404, "not_found", f"{what} {item_id} does not exist")


def unavailable(detail: str) -> Problem:
    """Return a 503: the same request may succeed later."""
    return Problem(503, "unavailable", detail, headers={"Retry-After": "1"})


def of_refusal(refused: Refused, *, of_query: bool) -> Problem:  # noqa: PLR0911  one return per case
    """Convert the refusal of an SQL function; the code says whether a query or a body was wrong."""
    detail = str(refused)
    match refused.refusal:
        case Refusal.INVALID_ARGUMENT:
            return invalid(detail, "invalid_parameter" if of_query else "invalid_request")
        case Refusal.NOT_FOUND:
            return Problem(404, "not_found", detail)
        case Refusal.IDEMPOTENCY_CONFLICT:
            return Problem(409, "idempotency_conflict", detail, **_event_id(refused.detail))
        case Refusal.IMMUTABLE | Refusal.ILLEGAL_TRANSITION:
            return Problem(409, "illegal_transition", detail)
        case Refusal.SUBSCRIPTION_HELD:
            return Problem(409, "subscription_held", detail)
        case Refusal.VERIFICATION_STALE:
            return Problem(409, "verification_stale", detail)
        case Refusal.WRONG_STATUS:
            return Problem(409, "wrong_status", detail)
        case Refusal.LIMIT_REACHED:
            return Problem(409, "limit_reached", detail)
        case Refusal.BEING_ERASED:
            return Problem(409, "being_erased", detail)
        case Refusal.PAYLOAD_REMOVED:
            return Problem(409, "payload_removed", detail)
        case Refusal.ROLE_NOT_OURS:
            return internal()
        case never:
            assert_never(never)


def of_http(error: web.HTTPException) -> Problem:
    """Convert aiohttp's own errors: unknown route, unknown method."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return Problem(405, "method_not_allowed", f"allowed methods: {allowed}", headers={"Allow": allowed})
    if error.status == web.HTTPNotFound.status_code:
        return Problem(404, "not_found", "no such resource")
    return Problem(error.status, "bad_request", error.reason, close=True)


def internal() -> Problem:
    """Return a 500 without details; the log has them."""
    return Problem(500, "internal", "internal error; see the log of webhookd")


def _event_id(detail: str | None) -> dict[str, Any]:
    """Parse the DETAIL `event_id=7`."""
    name, _, value = (detail or "").partition("=")
    return {"event_id": int(value)} if name == "event_id" and value.isdigit() else {}
