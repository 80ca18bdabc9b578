"""Logging in to the console with a token or a one-time link, entering the portal, and logging out."""

import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from aiohttp import web

from webhookd.console import links
from webhookd.console.sessions import Area, Cookie, new_id, session_of
from webhookd.console.visits import Pages, Visit, page
from webhookd.core.settings import Token
from webhookd.http.auth import matching_token
from webhookd.http.responses import Problem
from webhookd.http.routes import QueryRunner

TOO_MANY = 429
UNAUTHORIZED = 401
# A token is random, so guessing is hopeless. This keeps a flood of guesses out of the log and off the CPU.
MAX_FAILURES_PER_MINUTE = 20
MAX_ADDRESSES = 10_000
_MINUTE = 60.0
_WRONG_TOKEN = "This token is not valid."  # noqa: S105
_USED_LINK = "This link has expired or was already used. Ask for a new one."


class FailureLimit:
    """Counts failed logins per client address and minute, for a bounded number of addresses."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, address: str, now: float) -> None:
        """Count a failed login. Raise a Problem if the address has failed too often.

        A login that succeeds is never refused: behind a proxy all clients have one address, and one of them
        could lock out the others.
        """
        count, since = self._failures.pop(address, (0, now))
        if now - since >= _MINUTE:
            count, since = 0, now
        self._failures[address] = (count + 1, since)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)
        if count >= MAX_FAILURES_PER_MINUTE:
            wait = str(max(1, round(_MINUTE - (now - since))))
            detail = f"too many failed logins; try again in {wait} s"
            raise Problem(TOO_MANY, "too_many_logins", detail, headers={"Retry-After": wait})


class LoginPages(Pages):
    """The pages that open and close sessions."""

    def __init__(self, database: QueryRunner, on_logout: Callable[[str], None]) -> None:
        self._database = database
        self._on_logout = on_logout  # gets the id of the session
        self._failures = FailureLimit()

    @page("GET /login", None)
    async def login_form(self, visit: Visit) -> web.StreamResponse:
        """Show the form for a token, or the button that uses a one-time link."""
        return _form(visit)

    @page("POST /login", None)
    async def login(self, visit: Visit) -> web.StreamResponse:
        """Open a session. Its cookie is always new, so no one can fix it beforehand."""
        if "code" in visit.form:
            token, ends_at = await self._token_of_link(visit)
            wrong = _USED_LINK
        else:
            ends_at = time.time() + visit.settings.console.session_seconds
            token = matching_token(visit.settings.api.tokens, visit.form.get("token", ""))
            wrong = _WRONG_TOKEN
        if token is None:
            self._failures.failed(visit.request.remote or "", time.monotonic())
            return _form(visit, UNAUTHORIZED, error=wrong)
        if "read" not in token.scopes:
            return _form(
                visit, 403, error="This token does not have the scope read, which the console needs."
            )
        area = Area.CONSOLE if token.tenant is None else Area.PORTAL
        cookie = Cookie(area.value, new_id(), links.fingerprint(token), int(ends_at))
        target = _safe_path(visit.form.get("next", "/")) if area is Area.CONSOLE else "/"
        return _opened(visit, area, cookie, target)

    async def _token_of_link(self, visit: Visit) -> tuple[Token | None, float]:
        """Return the token that made the link, and the end of the session."""
        link = await self._database.run(links.redeem_link, "login", visit.form["code"])
        if link is None:
            return None, 0.0
        token = links.token_with(link.token_fingerprint, visit.settings.api.tokens)
        return token, link.session_expires_at.timestamp()

    @page("POST /logout", "read", in_portal=True)
    async def logout(self, visit: Visit) -> web.StreamResponse:
        """End the session in this browser, and its open streams."""
        self._on_logout(visit.session.id)
        path = "/login" if visit.area is Area.CONSOLE else "/enter"
        response = visit.go(path, "You are logged out.")
        response.del_cookie(visit.area.cookie, path=visit.area.path)
        return response

    @page("GET /enter", None, in_portal=True, in_console=False)
    async def portal_form(self, visit: Visit) -> web.StreamResponse:
        """Show the button that uses a portal link. A GET uses nothing up: mail filters open links too."""
        return visit.render("enter.html", code=visit.request.query.get("code"), error=None)

    @page("GET /login", None, in_portal=True, in_console=False)
    async def portal_login(self, visit: Visit) -> web.StreamResponse:
        """Say that the session has ended."""
        return visit.render("enter.html", UNAUTHORIZED, code=None, error=None)

    @page("POST /enter", None, in_portal=True, in_console=False)
    async def enter(self, visit: Visit) -> web.StreamResponse:
        """Open a session for the tenant of a portal link."""
        link = await self._database.run(links.redeem_link, "portal", visit.form.get("code", ""))
        cookie = None
        if link is not None:
            cookie = Cookie(
                Area.PORTAL.value,
                new_id(),
                link.token_fingerprint,
                int(link.session_expires_at.timestamp()),
                actor=link.actor,
                tenant=link.tenant,
                capabilities=link.capabilities,
            )
        if cookie is None or session_of(cookie, Area.PORTAL, visit.settings, time.time()) is None:
            self._failures.failed(visit.request.remote or "", time.monotonic())
            return visit.render("enter.html", UNAUTHORIZED, code=None, error=_USED_LINK)
        return _opened(visit, Area.PORTAL, cookie, "/")


def _form(visit: Visit, status: int = 200, error: str | None = None) -> web.Response:
    query = visit.request.query
    code = query.get("code") if error is None else None
    return visit.render(
        "login.html",
        status,
        code=code,
        next_path=_safe_path(visit.form.get("next") or query.get("next", "/")),
        error=error,
        needs_token=bool(visit.settings.api.tokens),
    )


def _safe_path(given: str) -> str:
    """Return the path if it is one of ours: a redirect to another site would help phishing."""
    is_own = given.startswith("/") and not given.startswith("//")
    return given if is_own and given.isprintable() and "\\" not in given else "/"


def _opened(visit: Visit, area: Area, cookie: Cookie, path: str) -> web.Response:
    """Return the redirect that sets the cookie. A form of ours led here, so the browser sends it along."""
    response = web.Response(status=303, headers={"Location": f"{area.value}{path}"})
    response.set_cookie(
        area.cookie,
        visit.signer.seal("session", cookie),
        max_age=max(0, cookie.ends_at - int(datetime.now(UTC).timestamp())),
        httponly=True,
        secure=visit.is_secure,
        samesite="Strict",
        path=area.path,
    )
    return response
