"""How `listen` shows an arrival: as text or as JSON.

Any sender may have chosen its bytes, so text is escaped and shortened.
"""

from itertools import islice

import msgspec
from rich.highlighter import JSONHighlighter
from rich.text import Text

from webhookd.cli.options import escaped
from webhookd.devtools.receiver import Arrival

# Limits of the text form; --json shows the whole payload.
MAX_SHOWN_LINES = 30
MAX_SHOWN_CHARACTERS = 3000
MAX_WORD_CHARACTERS = 100
# A larger payload is not indented: a thousand levels of nesting would make megabytes of 64 kB.
MAX_INDENTED_BYTES = 64 * 1024

_highlight = JSONHighlighter().highlight


def as_text(arrival: Arrival) -> Text:
    """One line with the headers and the answer, and the payload below it."""
    parts = [
        (f"{arrival.received_at.astimezone():%H:%M:%S} ", "dim"),
        _signature(arrival),
        (f" {_subject(arrival)}", "bold"),
    ]
    parts += [(f"  {word}", "dim") for word in _details(arrival)]
    parts.append((f"  → {arrival.status}", "green" if arrival.accepted else "red"))
    if arrival.duplicate:
        parts.append(("  duplicate: already accepted", "yellow"))
    shown = Text.assemble(*parts)
    if arrival.problem:
        shown.append(f"\n         {arrival.problem}", "red")
    if arrival.challenge is None and arrival.body:
        shown.append("\n").append_text(_payload(arrival.body))
    return shown


def as_json(arrival: Arrival) -> bytes:
    """One line. A payload that is not JSON becomes a string."""
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


def _signature(arrival: Arrival) -> tuple[str, str]:
    if not arrival.checked:
        return "? not verified: no secret", "yellow"
    return ("✗ signature", "bold red") if arrival.problem else ("✓ signature", "bold green")


def _subject(arrival: Arrival) -> str:
    if arrival.challenge is not None:
        return "challenge"
    if arrival.method != "POST":
        return f"{_word(arrival.method)} {_word(arrival.path)}"
    return _word(_header(arrival, "event-type") or "POST without webhook-event-type")


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
    """Replace lone surrogates, which stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _word(text: str) -> str:
    cut = text if len(text) <= MAX_WORD_CHARACTERS else f"{text[:MAX_WORD_CHARACTERS]}…"
    return escaped(cut)


def _payload(body: bytes) -> Text:
    formatted = _formatted(body, 2) if len(body) <= MAX_INDENTED_BYTES else None
    text = (body if formatted is None else formatted)[: 4 * MAX_SHOWN_CHARACTERS].decode("utf-8", "replace")
    lines = text[:MAX_SHOWN_CHARACTERS].split("\n")
    shown = Text("\n".join(f"    {escaped(line)}" for line in islice(lines, MAX_SHOWN_LINES)))
    if formatted is not None:
        _highlight(shown)
    if len(text) > MAX_SHOWN_CHARACTERS or len(lines) > MAX_SHOWN_LINES:
        shown.append(f"\n    … {len(body):,} bytes in total", "dim")
    return shown


def _formatted(body: bytes, indent: int) -> bytes | None:
    """Indented JSON with every value as it was written; None if the body is not JSON."""
    try:
        body.decode()  # msgspec does not validate UTF-8 inside strings
        return msgspec.json.format(body, indent=indent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
