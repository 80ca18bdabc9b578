"""The lists of the console: their filters, and one page of rows or what is wrong with the filters."""

import re
from typing import Any

from webhookd.console.visits import Visit
from webhookd.http.responses import Problem

PAGE_SIZE = 50
UNPROCESSABLE = 422
NOTHING: dict[str, Any] = {"items": [], "next_cursor": None}
_TIMES = ("created_after", "created_before", "failed_after", "failed_before", "since", "until")
# What the API says about a parameter that it cannot read, and the same for people.
_OF_FIELD = re.compile(r"(?P<what>.+) - at `\$\.(?P<field>[a-z_]+)[^`]*`")
_WORDS = (
    ("Invalid enum value", "none of the choices"),
    ("Invalid RFC3339", "not a time"),
    ("", "not a valid value"),
)


class Filters(dict[str, str]):
    """The filters of a list that have a value. In a template, the others are None."""

    def __missing__(self, _: str) -> None:
        return None


def list_query(visit: Visit, *names: str) -> Filters:
    """Return the filters in the address, for the API and for the links of the page."""
    given = ((name, visit.request.query.get(name, "").strip()) for name in (*names, "cursor"))
    return Filters({name: value for name, value in given if value})


def times(query: dict[str, str]) -> dict[str, str]:
    """Complete the times of a form, which have no seconds and no zone, to times in UTC."""
    complete = dict(query)
    for name in _TIMES:
        value = complete.get(name, "")
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?", value):
            seconds = "" if value.count(":") > 1 else ":00"
            complete[name] = f"{value}{seconds}Z"
    return complete


async def found_or_error(visit: Visit, path: str, query: dict[str, str]) -> tuple[dict[str, Any], str | None]:
    """Return a page of a list, or an empty one and what is wrong with the filters."""
    try:
        return await visit.get(path, limit=PAGE_SIZE, **times(query)), None
    except Problem as problem:
        if problem.status != UNPROCESSABLE:
            raise
        return NOTHING, sentence(problem.detail)


def sentence(detail: str) -> str:
    """Return a problem's detail as a sentence, which begins with the name of the field."""
    if found := _OF_FIELD.fullmatch(detail):
        words = next(text for start, text in _WORDS if found["what"].startswith(start))
        detail = f"{found['field'].replace('_', ' ')}: {words}"
    return f"{detail[:1].upper()}{detail[1:]}{'' if detail.endswith(('.', '!', '?')) else '.'}"
