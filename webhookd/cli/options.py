"""Options and argument types that several commands share, and how untrusted values are read and escaped."""

import functools
import re
import unicodedata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import msgspec

from webhookd.core.limits import MAX_ID, MAX_ID_DIGITS, MAX_PAYLOAD_BYTES

# The exit code after Ctrl-C, as shells expect it.
INTERRUPTED = 130
DEFAULT_LIMIT = 50
UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_AGE = re.compile(r"([0-9]{1,6})([dhms])\Z")
# Unicode's line ends that are not control characters.
_LINE_ENDS = ("\u2028", "\u2029")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one document per line.")


def escaped(value: object) -> str:
    """Return a value on one line. Characters that could control a terminal are shown as Python escapes."""
    text = str(value)
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    # Cc and Cf control terminals and reverse the reading order; Cs, Co and Cn are not characters.
    if unicodedata.category(character)[0] != "C" and character not in _LINE_ENDS:
        return character
    return character.encode("unicode_escape").decode()


def some_text(text: str) -> str:
    """Reject an empty text here, because the daemon's message is written for programs."""
    if not text.strip():
        raise click.BadParameter("it must not be empty")
    return text


def row_id(text: str) -> int:
    """Parse the id of a row."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS and 1 <= int(text) <= MAX_ID):
        raise click.BadParameter(f"{escaped(text)} is not an id")
    return int(text)


def event_id(text: str) -> int:
    """Parse an event's id, also in the form that receivers see: evt_12."""
    return row_id(text.removeprefix("evt_"))


def age_seconds(text: str) -> int:
    """Parse a length of time such as 90s, 30m, 2h or 7d."""
    if not (age := _AGE.match(text)):
        raise click.BadParameter(f"{escaped(text)} is not a length of time like 90s, 30m, 2h or 7d")
    return int(age[1]) * dict(UNITS)[age[2]]


def time_or_age(text: str) -> str:
    """Parse a time, or an age such as 2h, and return it as RFC 3339."""
    try:
        return parsed_time(text, datetime.now(UTC)).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{escaped(text)} is neither a time like 2026-01-31T08:00:00Z nor an age like 2h"
        ) from error


def parsed_time(text: str, now: datetime) -> datetime:
    """Parse a time with a time zone, or an age such as 90s, 30m, 2h, 7d; raise ValueError otherwise."""
    if age := _AGE.match(text):
        return now - timedelta(seconds=int(age[1]) * dict(UNITS)[age[2]])
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("the time zone is missing")
    return time.astimezone(UTC)


def example(*lines: str) -> str:
    """Return an epilog of examples that click does not wrap."""
    return "\n".join(["\b", "Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)])


def label(text: str) -> tuple[str, str]:
    """Parse a label: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{escaped(text)} is not of the form NAME=VALUE")
    return name, value


def event_types(text: str) -> list[str]:
    """Parse event types, or patterns, separated by commas. The daemon checks each of them."""
    return text.split(",")


def listing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --limit, --all and --json. With --all the command gets `limit=None`."""

    @click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=DEFAULT_LIMIT,
        show_default=True,
        help="Maximum number of rows to show, newest first.",
    )
    @click.option("--all", "show_all", is_flag=True, help="Show all rows.")
    @json_option
    @functools.wraps(command)
    def wrapped(*arguments: Any, limit: int, show_all: bool, **others: Any) -> None:
        command(*arguments, limit=None if show_all else limit, **others)

    return wrapped


def created_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --created-after and --created-before."""
    for bound in ("before", "after"):
        command = click.option(
            f"--created-{bound}",
            type=time_or_age,
            metavar="TIME",
            help=f"Only those created {bound} this time, or age like 2h.",
        )(command)
    return command


def one_more(limit: int | None) -> int | None:
    """Return the limit for a request that also finds out whether there are more rows."""
    return None if limit is None else limit + 1


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are given."""
    return {name: value for name, value in options.items() if value is not None}


def json_argument(text: str) -> msgspec.Raw:
    """Read a payload: JSON, @FILE, or - for stdin.

    Checks that it is exactly one JSON value, because it is inserted into a body without further encoding.
    """
    if text == "-":
        data = read_bounded("-", "PAYLOAD", MAX_PAYLOAD_BYTES)
    elif text.startswith("@"):
        data = read_bounded(text[1:], "PAYLOAD", MAX_PAYLOAD_BYTES)
    else:
        data = text.encode("utf-8", "surrogateescape")
    try:
        return msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.UsageError(
            f"PAYLOAD is not JSON: {error} (write @FILE for a file, and a string in double quotes)"
        ) from error


def read_bounded(name: str, option: str, max_bytes: int) -> bytes:
    """Read a file, or stdin for `-`. A file that is too large or cannot be read is a usage error.

    Devices and FIFOs are read like files: a shell's `<(…)` is a FIFO, and /dev/zero ends at the maximum.
    """
    try:
        with click.open_file(name, "rb") as stream:
            data: bytes = stream.read(max_bytes + 1)
    except OSError as error:
        raise click.UsageError(f"{option}: {name} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise click.UsageError(f"{option}: {name} is larger than {max_bytes} bytes")
    return data
