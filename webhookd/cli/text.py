"""Text for a person: times as ages, and values that others chose, which must not steer a terminal. Pure."""

import re
import unicodedata
from datetime import UTC, datetime, timedelta

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_AGE = re.compile(r"([0-9]{1,6})([dhms])\Z")
# Line ends of Unicode, beside the control characters.
_LINE_ENDS = ("\u2028", "\u2029")


def escaped(value: object) -> str:
    """On one line, with what moves, colours, hides or turns text around shown as its escape."""
    text = str(value)
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def excerpt(text: str, characters: int) -> str:
    """The beginning of a text, escaped."""
    return escaped(text[:characters]) + ("…" if len(text) > characters else "")


def count(number: int, most: int) -> str:
    """What is not counted further than to the most says so: `10,000 or more`."""
    return str(number) if number < most else f"{most:,} or more"


def duration(seconds: float) -> str:
    """Its two largest units: `2d 4h`, `3m 5s`, `0.4s`."""
    if seconds < 10:  # noqa: PLR2004  below that, tenths tell something
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    left, parts = round(seconds), []
    for unit, length in _UNITS:
        if left >= length:
            parts.append(f"{left // length}{unit}")
            left %= length
        elif parts:  # 1d 0h 5m is 1d, not 1d 5m
            break
    return " ".join(parts[:2])


def relative(time: datetime, now: datetime) -> str:
    """`3m 5s ago`, or `in 40s`."""
    seconds = (now - time).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def absolute(time: datetime) -> str:
    """To the second, in UTC."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def parsed_time(text: str, now: datetime) -> datetime:
    """A time with its zone, or an age such as 90s, 30m, 2h, 7d; ValueError for what is neither."""
    if age := _AGE.match(text):
        return now - timedelta(seconds=int(age[1]) * dict(_UNITS)[age[2]])
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("it has no zone")
    return time.astimezone(UTC)


def _escaped(character: str) -> str:
    # Cc and Cf steer terminals and turn the reading order; Cs, Co and Cn are no characters.
    if unicodedata.category(character)[0] != "C" and character not in _LINE_ENDS:
        return character
    return character.encode("unicode_escape").decode()
