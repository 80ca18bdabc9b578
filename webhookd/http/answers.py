"""Answers: values in, JSON out. Times are RFC 3339 in UTC, and a payload's text goes out as it is stored."""

from collections.abc import Sequence
from uuid import UUID

import orjson
from aiohttp import web

from webhookd.db.paging import Row

# Of every answer. Server in place of aiohttp's, which tells its version and Python's; and what an endpoint
# answered is shown in JSON: no browser should take it for anything else.
HEADERS = {"Server": "webhookd", "X-Content-Type-Options": "nosniff"}


def encoded(value: object) -> bytes:
    """JSON, as everything goes out."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z, default=_plain)


def answer(value: object, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=encoded(value), status=status, content_type="application/json", headers=HEADERS)


def nothing() -> web.Response:
    """An answer without a body."""
    return web.Response(status=204, headers=HEADERS)


def page_of(rows: Sequence[Row], limit: int, key: str = "id") -> web.Response:
    """A page, from one row more than it shows."""
    items = rows[:limit]
    return answer({"items": items, "next_cursor": items[-1][key] if len(rows) > limit else None})


def raw(text: str) -> orjson.Fragment:
    """JSON that is JSON already."""
    return orjson.Fragment(text)


def _plain(value: object) -> str:
    """The driver's UUIDs are of a class of their own."""
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value)} has no JSON")
