"""Pure text functions for people: escaping untrusted values for a terminal, durations and times."""

import re
import unicodedata
from datetime import UTC, datetime, timedelta

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_AGE = re.compile(r"([0-9]{1,6})([dhms])\Z")
# Unicode's line ends that are not control characters.
_LINE_ENDS = ("\u2028", "\u2029")


def escaped(value: object) -> str:
    """Return a value on one line. Characters that could control a terminal are shown as Python escapes."""
    text = str(value)
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def excerpt(text: str, characters: int) -> str:
    """Return the beginning of a text, escaped."""
    return escaped(text[:characters]) + ("…" if len(text) > characters else "")


def count(number: int, most: int) -> str:
    """Return a number that was counted up to a maximum: `10,000 or more`."""
    return str(number) if number < most else f"{most:,} or more"


def duration(seconds: float) -> str:
    """Return the two largest units: `2d 4h`, `3m 5s`, `0.4s`."""
    if seconds < 10:  # noqa: PLR2004  tenths matter below ten seconds
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    left, parts = round(seconds), []
    for unit, length in _UNITS:
        if left >= length:
            parts.append(f"{left // length}{unit}")
            left %= length
        elif parts:  # 1d 0h 5m becomes 1d, not 1d 5m
            break
    return " ".join(parts[:2])


def relative(time: datetime, now: datetime) -> str:
    """Return `3m 5s ago`, or `in 40s`."""
    seconds = (now - time).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def absolute(time: datetime) -> str:
    """Return the time in UTC, to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def parsed_time(text: str, now: datetime) -> datetime:
    """Parse a time with a time zone, or an age such as 90s, 30m, 2h, 7d; raise ValueError otherwise."""
    if age := _AGE.match(text):
        return now - timedelta(seconds=int(age[1]) * dict(_UNITS)[age[2]])
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("the time zone is missing")
    return time.astimezone(UTC)


def _escaped(character: str) -> str:
    # Cc and Cf control terminals and reverse the reading order; Cs, Co and Cn are not characters.
    if unicodedata.category(character)[0] != "C" and character not in _LINE_ENDS:
        return character
    return character.encode("unicode_escape").decode()
