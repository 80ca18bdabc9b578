"""An arrival, for a person or a program. Whoever found the port chose its bytes: they are escaped and cut."""

from itertools import islice

import msgspec
from rich.highlighter import JSONHighlighter
from rich.text import Text

from webhookd.cli.text import escaped
from webhookd.devtools.inbox import Arrival

# Of a payload on a terminal; --json shows all of it.
MAX_SHOWN_LINES = 30
MAX_SHOWN_CHARACTERS = 3000
MAX_WORD_CHARACTERS = 100
# Deep nesting makes much of little: a thousand levels, of two blanks a line, make megabytes of this.
MAX_INDENTED_BYTES = 64 * 1024

_highlight = JSONHighlighter().highlight


def as_text(arrival: Arrival) -> Text:
    """A line that says what it is and what became of it, and the payload below it."""
    parts = [
        (f"{arrival.received_at.astimezone():%H:%M:%S} ", "dim"),
        _mark(arrival),
        (f" {_what(arrival)}", "bold"),
    ]
    parts += [(f"  {word}", "dim") for word in _details(arrival)]
    parts.append((f"  → {arrival.status}", "green" if arrival.taken else "red"))
    if arrival.duplicate:
        parts.append(("  a duplicate: it was taken before", "yellow"))
    shown = Text.assemble(*parts)
    if arrival.problem:
        shown.append(f"\n         {arrival.problem}", "red")
    if arrival.challenge is None and arrival.body:
        shown.append("\n").append_text(_payload(arrival.body))
    return shown


def as_json(arrival: Arrival) -> bytes:
    """One line. The payload is JSON if it was, and else a text."""
    payload = _formatted(arrival.body, -1)
    signature = "refused" if arrival.problem else "verified" if arrival.checked else "not_checked"
    return msgspec.json.encode(
        {
            "received_at": arrival.received_at,
            "method": arrival.method,
            "path": _valid(arrival.path),
            "event_type": _header(arrival, "event-type"),
            "webhook_id": _header(arrival, "id"),
            "attempt": _header(arrival, "attempt"),
            "correlation_id": _header(arrival, "correlation-id"),
            "signature": signature,
            "problem": arrival.problem,
            "duplicate": arrival.duplicate,
            "challenge": arrival.challenge is not None,
            "answered": arrival.status,
            "payload": arrival.body.decode("utf-8", "replace") if payload is None else msgspec.Raw(payload),
        }
    )


def _mark(arrival: Arrival) -> tuple[str, str]:
    if not arrival.checked:
        return "? not verified: no secret", "yellow"
    return ("✗ signature", "bold red") if arrival.problem else ("✓ signature", "bold green")


def _what(arrival: Arrival) -> str:
    if arrival.challenge is not None:
        return "the challenge"
    if arrival.method != "POST":
        return f"{_word(arrival.method)} {_word(arrival.path)}"
    return _word(_header(arrival, "event-type") or "a POST without webhook-event-type")


def _details(arrival: Arrival) -> list[str]:
    attempt, correlation = _header(arrival, "attempt"), _header(arrival, "correlation-id")
    return [
        _word(text)
        for text in (
            _header(arrival, "id"),
            attempt and f"attempt {attempt}",
            correlation and f"correlation {correlation}",
        )
        if text
    ]


def _header(arrival: Arrival, name: str) -> str | None:
    value = arrival.headers.get(f"webhook-{name}")
    return None if value is None else _valid(value)


def _valid(text: str) -> str:
    """Without the lone surrogates that stand for bytes that are no text."""
    return text.encode("utf-8", "replace").decode()


def _word(text: str) -> str:
    cut = text if len(text) <= MAX_WORD_CHARACTERS else f"{text[:MAX_WORD_CHARACTERS]}…"
    return escaped(cut)


def _payload(body: bytes) -> Text:
    formatted = _formatted(body, 2) if len(body) <= MAX_INDENTED_BYTES else None
    text = (body if formatted is None else formatted)[: 4 * MAX_SHOWN_CHARACTERS].decode("utf-8", "replace")
    lines = text[:MAX_SHOWN_CHARACTERS].split("\n")
    shown = "\n".join(f"    {escaped(line)}" for line in islice(lines, MAX_SHOWN_LINES))
    whole = len(text) <= MAX_SHOWN_CHARACTERS and len(lines) <= MAX_SHOWN_LINES
    coloured = Text(shown)
    if formatted is not None:
        _highlight(coloured)
    if not whole:
        coloured.append(f"\n    … {len(body):,} bytes in all", "dim")
    return coloured


def _formatted(body: bytes, indent: int) -> bytes | None:
    """JSON with these line breaks and every value as it was written; None if it is no JSON."""
    try:
        body.decode()  # msgspec looks into no string
        return msgspec.json.format(body, indent=indent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
