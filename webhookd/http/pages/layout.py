"""A page around its content: style, icon, and the headers that forbid it everything that it does not need."""

import base64
import hashlib
from importlib import resources

from aiohttp import web

from webhookd.http.answers import HEADERS
from webhookd.http.pages.html import Markup, Part, element, joined
from webhookd.http.problems import Problem
from webhookd.http.routes import HTML

STYLE = resources.files(__package__).joinpath("style.css").read_text()
UNAUTHORIZED = 401
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='8' fill='%230f766e'/%3E%3Cpath d='M7 10l5 13 4-10 4 10 5-13' "
    "fill='none' stroke='white' stroke-width='3' stroke-linecap='round' stroke-linejoin='round'/%3E%3C/svg%3E"
)
# The style by its hash and the icon by its scheme: everything else, scripts first, is not allowed.
_HEADERS = HEADERS | {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(title: str, *content: Part, kind: str, refresh_seconds: int | None = None) -> str:
    """A document. One that refreshes itself does so as a reload, which keeps the place scrolled to."""
    refresh = refresh_seconds and element("meta", http_equiv="refresh", content=str(refresh_seconds))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        refresh,
        element("title", title),
        element("link", rel="icon", href=_ICON),
        element("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + element("html", head, element("body", *content, class_=kind), lang="en")


def links(here: str) -> Markup:
    """To the other pages."""
    others = {"/": "Status", "/docs": "API", "/status": "JSON", "/metrics": "Metrics"}
    current = {True: "page", False: None}
    return element(
        "nav",
        *(element("a", name, href=path, aria_current=current[path == here]) for path, name in others.items()),
        class_="links",
    )


def page_response(text: str, status: int = 200) -> web.Response:
    """A page as an answer."""
    return web.Response(text=text, status=status, content_type=HTML, headers=_HEADERS)


def problem_response(problem: Problem) -> web.Response:
    """A refusal for who sees it in a browser: what is missing, and how it is given."""
    how = element(
        "p",
        "A token is taken from the header ",
        element("code", "Authorization: Bearer …"),
        " alone, never from an address, which would be kept in histories and logs. Ask with it, or let a "
        "proxy or an extension of your browser add it:",
    )
    command = element("pre", 'curl -H "Authorization: Bearer $TOKEN" http://this-address/status')
    content = element(
        "main",
        element("h1", problem.title),
        element("p", problem.detail, class_="lead"),
        joined(how, command) if problem.status == UNAUTHORIZED else None,
        element("p", element("a", "The API's documentation", href="/docs"), " needs no token."),
    )
    response = page_response(page(f"webhookd: {problem.title}", content, kind="problem"), problem.status)
    response.headers.update(problem.headers)
    if problem.close:
        response.force_close()
    return response
