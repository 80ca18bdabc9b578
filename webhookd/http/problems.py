"""Errors as RFC 9457 defines them: `application/problem+json` with a stable `code`.

Problem, Refused and DatabaseUnavailable in, a response out. Driver messages and tracebacks never reach a
client.
"""

from typing import Any, assert_never

from aiohttp import web

from webhookd.core.errors import DatabaseUnavailable, Refusal, Refused
from webhookd.http.responses import HEADERS, encoded

PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_SECONDS = "1"


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
    return Problem(503, "unavailable", detail, headers={"Retry-After": RETRY_AFTER_SECONDS})


def of_unavailable(_: DatabaseUnavailable) -> Problem:
    """Return a 503 without the database's message, which may name hosts and logins. The log has it."""
    return unavailable(
        "the database is unavailable or too busy; the request may or may not have taken effect"
    )


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
