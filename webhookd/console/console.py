"""Serves the pages: checks sessions and forms, and sets the headers of every page.

The guard of a page, in this order: session, scope, and for a form its origin and its form token. Errors
become pages.
"""

import hmac
import logging
import time
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from webhookd.console import links
from webhookd.console.api_calls import ApiCalls
from webhookd.console.html import Assets, Renderer
from webhookd.console.logo import CONTENT_SECURITY_POLICY, Logo
from webhookd.console.sessions import OPEN_SESSION, Area, Cookie, Session, Signer, of_token, session_of
from webhookd.console.visits import (
    FORM_TOKEN,
    MAX_FORM_BYTES,
    MAX_OPEN_FORM_BYTES,
    PageRoute,
    Pages,
    Site,
    Visit,
    host_of,
)
from webhookd.context import Context
from webhookd.core.errors import DatabaseUnavailable, Refused
from webhookd.core.settings import Settings
from webhookd.http.auth import Auth
from webhookd.http.responses import HEADERS, Problem, internal, not_found, of_http, of_refusal, unavailable
from webhookd.http.routes import HTML, Handler, QueryRunner, Route

log = logging.getLogger(__name__)

GET = "GET"
UNAUTHORIZED = 401
SEE_OTHER = 303
ASSET_SECONDS = 365 * 86_400
# Nothing is loaded from elsewhere, and nothing inline runs. `data:` is for the icon.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors {ancestors}"
)
_LOGO_HEADERS = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-cache"}
_SAME_ORIGIN = ("same-origin", "none")


class Console:
    """The pages of the console and of the portal, as handlers for the HTTP server."""

    def __init__(
        self,
        context: Context,
        database: QueryRunner,
        auth: Auth,
        routes: Iterable[Route],
        pages: Iterable[Pages],
        logo: Callable[[], Logo | None],
    ) -> None:
        self._settings = context.settings
        self._database = database
        self._auth = auth
        self._logo_now = logo
        self._assets = Assets()
        self._site = Site(
            ApiCalls(routes), Renderer(self._assets), context.settings, self._headers, self._session
        )
        self._pages = [route for group in pages for route in group.page_routes()]
        self._signer: Signer | None = None

    def handlers(self) -> Iterable[tuple[str, str, Handler]]:
        """Return method, path and handler of every page and asset."""
        yield GET, "/assets/{name:[a-z0-9.-]+}", self._asset
        for route in self._pages:
            for area in route.areas:
                yield route.method, f"{area.value}{route.path}", self._guarded(route, area)
        yield GET, "/portal", self._to_portal
        yield GET, "/portal/logo", self._logo

    @web.middleware
    async def unknown_addresses(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Show a page to a browser at an address that does not exist; other clients get a problem."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            accepts_pages = HTML in request.headers.get("Accept", "")
            if request.match_info.http_exception is None or not accepts_pages or _is_of_api(request):
                raise
            found = of_http(error)

        async def refuse(_: Visit) -> web.StreamResponse:
            detail = "There is no page at this address."
            raise Problem(found.status, found.code, detail, headers=found.headers)

        area = Area.PORTAL if request.path.startswith("/portal/") else Area.CONSOLE
        return await self._guarded(PageRoute(GET, request.path, None, refuse), area)(request)

    async def signer(self) -> Signer:
        """Return the signer. Its key never changes, so it is read once."""
        if self._signer is None:
            self._signer = Signer(await self._database.run(links.console_key))
        return self._signer

    async def _asset(self, request: web.Request) -> web.Response:
        found = self._assets.by_name.get(request.match_info["name"])
        if found is None:
            return not_found("asset", request.match_info["name"]).response()
        content, kind = found
        # The name changes with the content.
        caching = {"Cache-Control": f"public, max-age={ASSET_SECONDS}, immutable"}
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=HEADERS | caching)

    async def _to_portal(self, _: web.Request) -> web.Response:
        return web.Response(status=SEE_OTHER, headers=HEADERS | {"Location": "/portal/"})

    async def _logo(self, _: web.Request) -> web.Response:
        """Serve the operator's logo, which every page of the portal shows."""
        found = self._logo_now()
        if found is None:
            return not_found("file", "logo").response()
        return web.Response(
            body=found.content, content_type=found.media_type, headers=HEADERS | _LOGO_HEADERS
        )

    def _guarded(self, route: PageRoute, area: Area) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            visit: Visit | None = None
            try:
                signer = await self.signer()
                session = self._session(request, area, signer)
                visit = Visit(request, self._site, area, session, signer)
                response = await self._respond(route, visit)
            except Exception as error:  # every error becomes a page
                response = self._error(request, visit, error)
            # A stream has sent its headers already.
            if not response.prepared:
                for name, value in self._headers(area).items():
                    response.headers.setdefault(name, value)
            return response

        return guarded

    async def _respond(self, route: PageRoute, visit: Visit) -> web.StreamResponse:
        if route.scope is not None and not visit.has_session:
            if route.method == GET:
                here = visit.request.path_qs.removeprefix(visit.area.value)
                return visit.go("/login", query={"next": here if here != "/" else None})
            raise Problem(UNAUTHORIZED, "unauthorized", "the session has ended: log in, then try again")
        if route.scope is not None and route.scope not in visit.session.scopes:
            raise Problem(403, "forbidden", f"this page needs the scope {route.scope}")
        if route.method != GET:
            _require_own_page(visit)
            await visit.read_form(MAX_OPEN_FORM_BYTES if route.scope is None else MAX_FORM_BYTES)
            if visit.has_session and route.scope is not None:
                _require_form_token(visit)
        return await route.handler(visit)

    def _session(self, request: web.Request, area: Area, signer: Signer) -> Session | None:
        settings = self._settings()
        content = signer.unseal("session", request.cookies.get(area.cookie, ""))
        session = None
        if content is not None:
            cookie = msgspec.json.decode(content, type=Cookie)
            session = session_of(cookie, area, settings, time.time())
        if session is None and area is Area.CONSOLE:
            session = self._without_cookie(request, settings)
        return session

    def _without_cookie(self, request: web.Request, settings: Settings) -> Session | None:
        """Return the session where no tokens are configured, or of a token in the header, as for the API."""
        if settings.api.tokens and "Authorization" not in request.headers:
            return None
        try:
            # Without tokens, this rejects a request of another site's page.
            caller = self._auth.require(request, "read", for_tenants=False)
        except Problem as problem:
            if problem.status == UNAUTHORIZED:
                return None
            raise
        return OPEN_SESSION if caller.token is None else of_token(caller.token)

    def _error(self, request: web.Request, visit: Visit | None, error: Exception) -> web.StreamResponse:
        problem = _problem(request, error)
        if visit is None:
            # Without a signer there is no form and no navigation.
            text = self._site.renderer.render_plain("problem_plain.html", problem=problem)
            response = web.Response(text=text, status=problem.status, content_type=HTML)
        else:
            response = visit.render("problem.html", problem.status, problem=problem)
        response.headers.update(problem.headers)
        if problem.close:
            response.force_close()
        return response

    def _headers(self, area: Area) -> dict[str, str]:
        allowed = self._settings().console.frame_ancestors if area is Area.PORTAL else ()
        ancestors = " ".join(allowed) or "'none'"
        return HEADERS | {
            "Content-Security-Policy": _POLICY.format(ancestors=ancestors),
            "Referrer-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
        }


def _is_of_api(request: web.Request) -> bool:
    return request.path.startswith("/v1/")


def _problem(request: web.Request, error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case Refused():
            return of_refusal(error, of_query=request.method == GET)
        case DatabaseUnavailable():
            log.warning("responded 503, database unavailable: %s", error, extra={"path": request.path})
            return unavailable("the database is unavailable or too busy. Try again in a moment.")
        case web.HTTPException():
            return of_http(error)
        case _:
            log.error(
                "request failed", extra={"method": request.method, "path": request.path}, exc_info=error
            )
            return internal()


def _require_own_page(visit: Visit) -> None:
    """Reject a form that a page of another site sent, also before there is a session."""
    headers = visit.request.headers
    fetched_from = headers.get("Sec-Fetch-Site")
    if fetched_from is not None and fetched_from not in _SAME_ORIGIN:
        raise Problem(403, "foreign_form", "a page of another site sent this form", close=True)
    origin = headers.get("Origin")
    if origin is not None and host_of(origin) not in visit.own_hosts:
        raise Problem(403, "foreign_form", "a page of another site sent this form", close=True)


def _require_form_token(visit: Visit) -> None:
    given = visit.form.get(FORM_TOKEN, "")
    if not hmac.compare_digest(given.encode(errors="replace"), visit.form_token.encode()):
        raise Problem(
            403, "stale_form", "this form belongs to another session. Go back, reload the page and try again."
        )
