"""Markup: elements of text and of elements. Text is escaped, wherever it comes from; markup is not, again."""

from html import escape
from typing import TypeAlias

_VOID = frozenset({"br", "link", "meta"})


class Markup(str):
    """Text that is HTML; whoever makes one has escaped what is in it."""

    __slots__ = ()


Part: TypeAlias = "Markup | str | int | None"


def element(tag: str, *parts: Part, **attributes: str | None) -> Markup:
    """`element("a", "here", href="/docs")`. A name that Python keeps for itself ends in an underscore."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(*parts)}</{tag}>")


def joined(*parts: Part) -> Markup:
    """One after another; None is nothing."""
    return Markup("".join(_markup(part) for part in parts if part is not None))


def table(heads: tuple[str, ...], rows: "list[tuple[Part, ...]]", **attributes: str | None) -> Markup:
    """Rows under heads; each cell knows its head, for a phone shows them one under another."""
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    body = [
        element("tr", *(element("td", cell, data_head=name) for name, cell in zip(heads, row, strict=True)))
        for row in rows
    ]
    return element("table", element("thead", head), element("tbody", *body), **attributes)


def _markup(part: "Markup | str | int") -> str:
    return part if isinstance(part, Markup) else escape(str(part))
