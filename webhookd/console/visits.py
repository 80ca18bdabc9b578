"""A visit: one request for a page, with the session of its visitor and what a page needs to answer it.

A page is a function from a Visit to a response, declared with `page`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
from aiohttp import web
from yarl import URL

from webhookd.console.api_calls import ApiCalls
from webhookd.console.html import Renderer
from webhookd.console.sessions import MESSAGE_COOKIE, Area, Session, Signer
from webhookd.core.settings import Scope, Settings
from webhookd.http.requests import read_body
from webhookd.http.responses import Problem
from webhookd.http.routes import HTML

FORM_TOKEN = "form_token"  # noqa: S105  the name of a field
MESSAGE_SECONDS = 60
MAX_MESSAGE_CHARACTERS = 1000
SEE_OTHER = 303
_FORM = "application/x-www-form-urlencoded"
_CHARSETS = ("utf-8", "utf8")
# The largest field is the payload of a test event.
MAX_FORM_BYTES = 1024 * 1024
# Before the login: a token or a code, and a path.
MAX_OPEN_FORM_BYTES = 16 * 1024
MAX_FORM_FIELDS = 1000


class Tab(NamedTuple):
    """A page in the navigation."""

    path: str
    name: str
    key: str  # after `g` on the keyboard
    scope: Scope
    area: Area | None  # None: in both


_TABS = (
    Tab("/", "Overview", "o", "read", Area.CONSOLE),
    Tab("/events", "Events", "e", "read", Area.CONSOLE),
    Tab("/deliveries", "Deliveries", "d", "read", Area.CONSOLE),
    Tab("/endpoints", "Endpoints", "p", "read", None),
    Tab("/deliveries", "Deliveries", "d", "read", Area.PORTAL),
    Tab("/dead-letters", "Dead letters", "x", "read", Area.CONSOLE),
    Tab("/tenants", "Tenants", "t", "read", Area.CONSOLE),
    Tab("/jobs", "Jobs", "j", "jobs", Area.CONSOLE),
    Tab("/live", "Live", "l", "read", Area.CONSOLE),
)


class Message(msgspec.Struct, frozen=True):
    """The result of an action, shown once on the next page."""

    text: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """What every visit needs, of one instance."""

    api: ApiCalls
    renderer: Renderer
    settings: Callable[[], Settings]
    headers: Callable[[Area], Mapping[str, str]]  # of every page
    session_of: Callable[[web.Request, Area, Signer], Session | None]


class Visit:
    """One request for a page."""

    def __init__(
        self,
        request: web.Request,
        site: Site,
        area: Area,
        session: Session | None,
        signer: Signer,
    ) -> None:
        self.request = request
        self.area = area
        self.settings = site.settings()
        self._site = site
        self._session = session
        self.signer = signer
        self._form: Mapping[str, str] = {}
        self._lists: Mapping[str, list[str]] = {}

    @property
    def session(self) -> Session:
        """The session; only pages without a scope may have none."""
        if self._session is None:
            raise Problem(401, "unauthorized", "log in first")
        return self._session

    @property
    def has_session(self) -> bool:
        return self._session is not None

    def is_still_valid(self) -> bool:
        """Return whether the session is still what it was when the request came: for a long response."""
        try:
            session = self._site.session_of(self.request, self.area, self.signer)
        except Problem:
            return False
        # A reload may have taken scopes from its token, or bound it to a tenant.
        return session == self._session

    @property
    def page_headers(self) -> Mapping[str, str]:
        """The headers of every page, for a response that begins before the page has returned it."""
        return self._site.headers(self.area)

    @property
    def in_portal(self) -> bool:
        return self.area is Area.PORTAL

    @property
    def brand(self) -> str:
        """The name in titles and headings: the operator's own, or webhookd."""
        return self.settings.console.name

    @property
    def tabs(self) -> list[Tab]:
        """The pages in the navigation."""
        return [tab for tab in _TABS if self.may(tab.scope) and tab.area in (None, self.area)]

    def is_at(self, path: str) -> bool:
        """Return whether this is the page of a tab, or one below it."""
        here = self.request.path.removeprefix(self.area.value)
        return here == path or (path != "/" and here.startswith(f"{path}/"))

    @property
    def item_id(self) -> str:
        """The id in the path."""
        return self.request.match_info["id"]

    @property
    def form(self) -> Mapping[str, str]:
        """The fields of the form that are not empty."""
        return self._form

    def selected(self, name: str) -> list[str]:
        """Return every value of a field, such as of checked boxes."""
        return self._lists.get(name, [])

    def may(self, scope: Scope) -> bool:
        """Return whether the visitor has a scope."""
        return scope in self.session.scopes

    @property
    def is_read_only(self) -> bool:
        """Return whether no page has an action for the visitor."""
        return self.session.scopes <= {"read", "ingest"}

    @property
    def page_of_form(self) -> str | None:
        """The page of the console that sent the form of this request, if the browser says so."""
        sender = self.request.headers.get("Referer", "")
        if self.in_portal or host_of(sender) not in self.own_hosts:
            return None
        return urlsplit(sender)._replace(scheme="", netloc="", fragment="").geturl()

    @property
    def own_hosts(self) -> frozenset[str]:
        """The hosts under which browsers reach this daemon."""
        return frozenset({self.request.host.lower(), host_of(self.settings.api.public_url)}) - {""}

    def url(self, path: str, **query: object) -> str:
        """Return the address of a page in this area. Values that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return f"{self.area.value}{path}{'?' + urlencode(given) if given else ''}"

    async def get(self, path: str, item_id: object = None, **query: object) -> Any:
        """Return what GET of a route answers, as in `get("/v1/events/{id}", 7)`. None is not sent."""
        given = {name: value for name, value in query.items() if value is not None}
        return msgspec.json.decode(await self.call(f"GET {path}", item_id, query=given))

    async def post(self, path: str, item_id: object = None, body: object = None) -> Any:
        """Return what POST of a route answers."""
        return msgspec.json.decode(await self.call(f"POST {path}", item_id, body=body))

    async def patch(self, path: str, item_id: object, body: object) -> Any:
        """Return what PATCH of a route answers."""
        return msgspec.json.decode(await self.call(f"PATCH {path}", item_id, body=body))

    async def call(
        self,
        target: str,
        item_id: object = None,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
    ) -> bytes:
        """Return the JSON that a route of the API answers to this visitor, or raise a Problem."""
        return await self._site.api.call(
            self.request, self.session, target, item_id=item_id, query=query, body=body
        )

    async def read_form(self, max_bytes: int) -> None:
        """Read the form. Raises a Problem if it is damaged or too large."""
        try:
            charset = (self.request.charset or "utf-8").lower()
        except (ValueError, LookupError):
            charset = ""
        # Any other charset is a choice of the client, and decoding some of them takes seconds.
        is_form = self.request.content_type == _FORM and charset in _CHARSETS
        if not is_form or "Content-Encoding" in self.request.headers:
            raise Problem(415, "unsupported_media_type", f"the body must be {_FORM} in UTF-8", close=True)
        body = await read_body(self.request, max_bytes)
        try:
            fields = parse_qsl(body.decode(), errors="strict", max_num_fields=MAX_FORM_FIELDS)
        except ValueError as error:
            raise Problem(400, "bad_request", "the form is damaged") from error
        values: dict[str, list[str]] = {}
        for name, value in fields:
            # Browsers send CRLF for a line break in a text area.
            if value.strip():
                values.setdefault(name, []).append(value.strip().replace("\r\n", "\n"))
        self._lists = values
        self._form = {name: given[0] for name, given in values.items()}

    def render(self, template: str, http_status: int = 200, **values: object) -> web.Response:
        """Return a page."""
        text = self._site.renderer.render(template, self, **values)
        response = web.Response(text=text, status=http_status, content_type=HTML)
        if MESSAGE_COOKIE in self.request.cookies:
            response.del_cookie(MESSAGE_COOKIE, path="/")
        return response

    def go(
        self,
        path: str,
        message: str = "",
        *,
        is_error: bool = False,
        query: Mapping[str, object] | None = None,
    ) -> web.Response:
        """Return a redirect to a page of this area, which shows the message."""
        response = web.Response(status=SEE_OTHER, headers={"Location": self.url(path, **(query or {}))})
        if message:
            shown = Message(message[:MAX_MESSAGE_CHARACTERS], is_error)
            response.set_cookie(
                MESSAGE_COOKIE,
                self.signer.seal("message", shown),
                max_age=MESSAGE_SECONDS,
                httponly=True,
                secure=self.is_secure,
                samesite="Strict",
                path="/",
            )
        return response

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach this daemon by TLS, so that cookies can require it."""
        return URL(self.settings.api.public_url or "http://").scheme == "https"

    @property
    def message(self) -> Message | None:
        """The result of the action that led to this page."""
        content = self.signer.unseal("message", self.request.cookies.get(MESSAGE_COOKIE, ""))
        return None if content is None else msgspec.json.decode(content, type=Message)

    @property
    def form_token(self) -> str:
        """The token that a form of this visitor must carry."""
        return self.signer.form_token(self._session) if self._session else ""


def host_of(url: str) -> str:
    """Return host and port of a URL; of other text, nothing."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


Page: TypeAlias = Callable[[Visit], Awaitable[web.StreamResponse]]
PageMethod = TypeVar("PageMethod", bound=Callable[..., Awaitable[web.StreamResponse]])


@dataclass(frozen=True, slots=True)
class PageRoute:
    """A page: its path, the scope that it needs, and whether the portal has it too."""

    method: str
    path: str
    scope: Scope | None  # None: no session needed
    handler: Page
    in_portal: bool = False
    in_console: bool = True

    @property
    def areas(self) -> tuple[Area, ...]:
        found = [Area.CONSOLE] if self.in_console else []
        return (*found, Area.PORTAL) if self.in_portal else tuple(found)


def page(
    method_and_path: str, scope: Scope | None, *, in_portal: bool = False, in_console: bool = True
) -> Callable[[PageMethod], PageMethod]:
    """Declare a page, as in "GET /events/{id:[0-9]+}"."""
    method, path = method_and_path.split(" ", 1)

    def declare(handler: PageMethod) -> PageMethod:
        def made(bound: Page) -> PageRoute:
            return PageRoute(method, path, scope, bound, in_portal, in_console)

        handler.page_route = made  # type: ignore[attr-defined]
        return handler

    return declare


class Pages:
    """A group of pages."""

    def page_routes(self) -> list[PageRoute]:
        """Return the declared pages, in their order."""
        return [
            method.page_route(getattr(self, name))
            for name, method in vars(type(self)).items()
            if hasattr(method, "page_route")
        ]
