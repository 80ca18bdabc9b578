"""What goes wrong, as RFC 9457 says it: `application/problem+json` with a stable `code`.

Problem, Refused and DatabaseUnavailable in, a response out. No driver's words and no traceback pass here.
"""

from typing import Any, assert_never

from aiohttp import web

from webhookd.core.errors import DatabaseUnavailable, Refusal, Refused
from webhookd.http.answers import HEADERS, encoded

PROBLEM_JSON = "application/problem+json"
RETRY_AFTER_SECONDS = "1"


class Problem(Exception):
    """An answer that is not the one asked for."""

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
        self.close = close  # the body was not read: what comes next on this connection is not a request
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
    """Understood, and not acceptable."""
    return Problem(422, code, detail, **members)


def not_found(what: str, item_id: object) -> Problem:
    """There is no such thing."""
    return Problem(404, "not_found", f"no {what} {item_id}")


def unavailable(detail: str) -> Problem:
    """The same request may succeed later."""
    return Problem(503, "unavailable", detail, headers={"Retry-After": RETRY_AFTER_SECONDS})


def of_unavailable(_: DatabaseUnavailable) -> Problem:
    """The database's words go to the log, not out: they may name hosts and logins."""
    return unavailable(
        "the database is not available or too busy; whether the request took effect is not known"
    )


def of_refusal(refused: Refused, *, of_query: bool) -> Problem:  # noqa: PLR0911  a case, a return
    """A gated function said no, to what a query or a body asked."""
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
    """What aiohttp itself answers: no such route, no such method."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return Problem(405, "method_not_allowed", f"allowed: {allowed}", headers={"Allow": allowed})
    if error.status == web.HTTPNotFound.status_code:
        return Problem(404, "not_found", "no such resource")
    return Problem(error.status, "bad_request", error.reason, close=True)


def internal() -> Problem:
    """Our fault: the log says more."""
    return Problem(500, "internal", "something went wrong here; the log says what")


def _event_id(detail: str | None) -> dict[str, Any]:
    """From `event_id=7`."""
    name, _, value = (detail or "").partition("=")
    return {"event_id": int(value)} if name == "event_id" and value.isdigit() else {}
