"""Renders the templates: one environment, its filters, and what every page gets.

Every value is escaped. A template that uses an unknown name fails.
"""

import hashlib
import re
from contextlib import suppress
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from webhookd import __version__
from webhookd.console import charts
from webhookd.http.requests import depth

if TYPE_CHECKING:
    from webhookd.console.visits import Visit

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
# Invisible characters that change the order or the look of text around them, and control characters.
DECEPTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
MAX_SHOWN_CHARACTERS = 200
# Of a payload on a page. The buttons copy all of it.
MAX_PAYLOAD_CHARACTERS = 200_000
INDENT = 2
# A longer document is shown without indentation.
MAX_FORMATTED_BYTES = 8 * 1024 * 1024

_STATUS_WORDS = {
    "Pending": "Waiting",
    "InProgress": "In progress",
    "Leased": "Being sent",
    "PendingRetry": "Waiting for a retry",
    "Completed": "Delivered",
    "DeadLettered": "Dead letter",
    "not_routed": "Not routed",
    # Of jobs.
    "queued": "Queued",
    "leased": "Leased",
    "in_progress": "In progress",
    "succeeded": "Succeeded",
    "failed": "Failed",
    "retry_waiting": "Waiting for a retry",
    "dead_letter": "Dead letter",
    "cancelled": "Cancelled",
    "cleaned": "Cleaned",
}
_HOLD_WORDS = {
    "deleted": "Deleted",
    "disabled": "Disabled",
    "unverified": "Not verified",
    "paused": "Paused",
    "tenant_inactive": "Tenant inactive",
}


class Assets:
    """The style sheet and the scripts, with names that change with their content."""

    def __init__(self) -> None:
        folder = resources.files("webhookd.console") / "assets"
        self.by_name: dict[str, tuple[bytes, str]] = {}
        self.urls: dict[str, str] = {}
        for name, kind in (
            ("console.css", "text/css"),
            ("console.js", "text/javascript"),
            ("live.js", "text/javascript"),
        ):
            content = folder.joinpath(name).read_bytes()
            stem, _, ending = name.partition(".")
            unique = f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.{ending}"
            self.by_name[unique] = (content, kind)
            self.urls[name] = f"/assets/{unique}"
        self.by_name["icon.svg"] = (folder.joinpath("icon.svg").read_bytes(), "image/svg+xml")


class Renderer:
    """Renders templates with the values that every page has."""

    def __init__(self, assets: Assets) -> None:
        self._environment = Environment(
            loader=PackageLoader("webhookd.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters |= {
            "ago": ago,
            "when": when,
            "duration": duration,
            "visible": visible,
            "short": short,
            "pretty_json": pretty_json,
            "status_word": lambda status: _STATUS_WORDS.get(status, status),
            "hold_word": lambda reason: _HOLD_WORDS.get(reason, reason),
            "percent": percent,
            "count_up_to": count_up_to,
            "for_input": for_input,
            "thousands": lambda number: f"{number:,}",
        }
        self._environment.globals |= {
            "version": __version__,
            "max_payload_characters": MAX_PAYLOAD_CHARACTERS,
            "asset": assets.urls,
            "sparkline": charts.sparkline,
            "bar_chart": charts.bar_chart,
        }

    def render_plain(self, template: str, **values: object) -> str:
        """Return the text of a page without session and navigation."""
        return self._environment.get_template(template).render(**values)

    def render(self, template: str, visit: "Visit", **values: object) -> str:
        """Return the text of a page."""
        return self._environment.get_template(template).render(visit=visit, now=datetime.now(UTC), **values)


def parsed(value: str | datetime) -> datetime:
    """Return a time from a response of the API."""
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def ago(value: str | datetime | None, now: datetime) -> Markup:
    """Show a time relative to now, with the exact time as its tooltip. The script keeps it current."""
    if value is None:
        return Markup("—")
    at = parsed(value)
    seconds = (now - at).total_seconds()
    text = f"in {duration(-seconds)}" if seconds < -1 else f"{duration(seconds)} ago"
    if abs(seconds) <= 1:
        text = "now"
    exact = f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Markup('<time datetime="{}" title="{}" data-ago>{}</time>').format(at.isoformat(), exact, text)


def when(value: str | datetime | None) -> Markup:
    """Show an exact time."""
    if value is None:
        return Markup("—")
    at = parsed(value).astimezone(UTC)
    milliseconds = f"{at.microsecond // 1000:03d}"
    text = f"{at:%Y-%m-%d %H:%M:%S}.{milliseconds} UTC"
    return Markup('<time datetime="{}">{}</time>').format(at.isoformat(), text)


def duration(seconds: float) -> str:
    """Return a time span in its largest unit, or in the two largest if the first is small."""
    if seconds < 0.9995:  # noqa: PLR2004
        return f"{max(0, round(seconds * 1000))} ms" if seconds >= 0.001 else "0 s"  # noqa: PLR2004
    left = round(seconds)
    parts = []
    for name, size in _UNITS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def visible(text: object) -> Markup:
    """Escape text, and show invisible and direction-changing characters as their code points."""
    parts: list[str | Markup] = []
    end = 0
    value = str(text)
    for found in DECEPTIVE.finditer(value):
        code = f"U+{ord(found.group()):04X}"
        parts += [value[end : found.start()], Markup('<span class="code-point">{}</span>').format(code)]
        end = found.end()
    return Markup("").join([*parts, value[end:]])


def short(text: object, characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """Cut a long text."""
    value = str(text)
    return value if len(value) <= characters else f"{value[:characters]}…"


def pretty_json(payload: str) -> str:
    """Return the beginning of JSON with indentation, or of the text itself if that is not possible."""
    text = payload.encode()
    # Each comma, opening and closing bracket can start a line. Indentation can make a deep document 1,000
    # times as long, and only its beginning is shown.
    lines = sum(map(text.count, b",[]{}"))
    if len(text) + lines * INDENT * depth(text) <= MAX_FORMATTED_BYTES:
        # It keeps numbers and strings as they are, which decoding would not.
        with suppress(msgspec.DecodeError, RecursionError):
            payload = msgspec.json.format(payload, indent=INDENT)
    return short(payload, MAX_PAYLOAD_CHARACTERS)


def for_input(time: str | None) -> str | None:
    """Return a time in UTC as a field for times takes it, which is without zone."""
    return None if time is None else time.removesuffix("Z").removesuffix("+00:00")


def percent(fraction: float | None) -> str:
    """Return a share as a percentage. 99.96 % is not shown as 100 %."""
    if fraction is None:
        return "—"
    value = fraction * 100
    if value in (0, 100):
        return f"{value:.0f} %"
    return f"{min(value, 99.9):.1f} %" if value > 99.9 else f"{value:.1f} %"  # noqa: PLR2004


def count_up_to(number: int, limit: int) -> str:
    """Return a count that stopped at a limit, as in `10,000+`."""
    return f"{number:,}" if number < limit else f"{limit:,}+"
