"""The form of an endpoint: text of its fields in, a body for the API out. Pure.

The API checks the values. Here is only what a text field adds: lists, lines and numbers.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from webhookd.http.responses import Problem, invalid

# The fields that a change can contain. `tenant` and `secret` are given at the creation only.
CHANGEABLE = (
    "callback_url",
    "event_types",
    "description",
    "filter",
    "format",
    "max_per_second",
    "max_attempts",
    "base_delay_seconds",
)
_MAX_DIGITS = 18  # below 2**63
_LABELS = {
    "max_per_second": "Rate limit",
    "max_attempts": "Attempts",
    "base_delay_seconds": "Delay before the first retry",
}


def body_of_new(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a creation. Empty fields keep the API's defaults."""
    body = {name: _value(name, text) for name, text in form.items() if name in CHANGEABLE}
    body |= {name: form[name] for name in ("tenant", "secret") if name in form}
    if "headers" in form:
        body["headers"] = _headers(form["headers"])
    return {"callback_url": ""} | body


def body_of_change(form: Mapping[str, str], original: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a change: the fields that differ from those that the form was filled with."""
    body = {
        name: _value(name, form.get(name, ""))
        for name in CHANGEABLE
        if form.get(name, "") != original.get(name, "")
    }
    if "remove_headers" in form and "headers" in form:
        raise invalid("Headers: either give new headers, or remove the current headers")
    if "remove_headers" in form:
        body["headers"] = {}
    elif "headers" in form:
        body["headers"] = _headers(form["headers"])
    return body


def fields_of(subscription: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that the form of a change is filled with."""
    shown = {
        "callback_url": subscription["pending_callback_url"] or subscription["callback_url"],
        "event_types": "\n".join(subscription["event_types"]),
        "filter": "\n".join(f"{name}={value}" for name, value in subscription["filter"].items()),
    }
    for name in CHANGEABLE:
        value = subscription[name]
        shown.setdefault(name, f"{value:g}" if isinstance(value, float) else str(value or ""))
    # A form's fields come back without spaces at their ends.
    return {name: text.strip() for name, text in shown.items()}


def words(text: str) -> list[str]:
    """Split a list that is separated by commas, spaces or lines."""
    return [word for word in re.split(r"[\s,]+", text) if word]


def number(text: str) -> int:
    """Return a number of a hidden field, or 0 for a text that a page of ours did not write."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else 0


def _value(name: str, text: str) -> Any:
    match name:
        case "event_types":
            return words(text)
        case "filter":
            return _pairs(text, "=", "Label filter", "name=value")
        case "description":
            return text or None
        case "max_per_second" | "base_delay_seconds":
            return _number(name, text) if text else None
        case "max_attempts":
            return _whole_number(name, text) if text else None
        case _:
            return text


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"{_LABELS[name]}: {text[:50]} is not a number")
    return value


def _whole_number(name: str, text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise invalid(f"{_LABELS[name]}: {text[:50]} is not a whole number")
    return int(text)


def _headers(text: str) -> dict[str, str]:
    # The message must not repeat a line: it may contain a password.
    return _pairs(text, ":", "Headers", "Name: value")


def _pairs(text: str, separator: str, label: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, given, value = (part.strip() for part in line.partition(separator))
        if not given or not name:
            raise _bad_line(label, place, f"must have the form {form}")
        if name in found:
            raise _bad_line(label, place, "repeats a name")
        found[name] = value
    return found


def _bad_line(label: str, place: int, what: str) -> Problem:
    return invalid(f"{label}: line {place} {what}")
