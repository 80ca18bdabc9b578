"""The HTML of /docs: elements with escaped text, the layout with its style, and the security headers.

The pages of the console are templates: see webhookd/console.
"""

import base64
import hashlib
from html import escape
from importlib import resources
from typing import TypeAlias

from aiohttp import web

from webhookd.http.responses import HEADERS
from webhookd.http.routes import HTML

STYLE = resources.files(__package__).joinpath("style.css").read_text()
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='8' fill='%230f766e'/%3E%3Cpath d='M7 10l5 13 4-10 4 10 5-13' "
    "fill='none' stroke='white' stroke-width='3' stroke-linecap='round' stroke-linejoin='round'/%3E%3C/svg%3E"
)
# Allows the style by its hash and the icon by its scheme. Everything else, above all scripts, is blocked.
_HEADERS = HEADERS | {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_VOID = frozenset({"br", "link", "meta"})


class Markup(str):
    """HTML text whose content is already escaped."""

    __slots__ = ()


Part: TypeAlias = "Markup | str | int | None"


def element(tag: str, *parts: Part, **attributes: str | None) -> Markup:
    """Return an element, as in `element("a", "here", href="/docs", class_="link")`.

    Strings are escaped; Markup is not escaped again.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(*parts)}</{tag}>")


def joined(*parts: Part) -> Markup:
    """Concatenate parts; None is skipped."""
    given = (part for part in parts if part is not None)
    return Markup("".join(part if isinstance(part, Markup) else escape(str(part)) for part in given))


def table(heads: tuple[str, ...], rows: "list[tuple[Part, ...]]", **attributes: str | None) -> Markup:
    """Return a table. Each cell carries its heading, because narrow screens show cells below each other."""
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    body = [
        element("tr", *(element("td", cell, data_head=name) for name, cell in zip(heads, row, strict=True)))
        for row in rows
    ]
    return element("table", element("thead", head), element("tbody", *body), **attributes)


def page(title: str, *content: Part, kind: str) -> str:
    """Return a complete document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href=_ICON),
        element("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + element("html", head, element("body", *content, class_=kind), lang="en")


def links(here: str) -> Markup:
    """Return the navigation links; `here` is the current page."""
    pages = {"/": "Console", "/docs": "API", "/status": "JSON", "/metrics": "Metrics"}
    found = (
        element("a", name, href=path, aria_current="page" if path == here else None)
        for path, name in pages.items()
    )
    return element("nav", *found, class_="links")


def page_response(text: str, status: int = 200) -> web.Response:
    """Return a page as a response."""
    return web.Response(text=text, status=status, content_type=HTML, headers=_HEADERS)
