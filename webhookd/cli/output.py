"""Prints results: tables and fields, with colours on a terminal and as plain text elsewhere, or JSON.

Respects NO_COLOR and FORCE_COLOR. Results go to stdout. Hints and progress go to stderr if it is a terminal.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Literal, TypeAlias

import click
import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from webhookd.cli.client import Answer
from webhookd.cli.options import UNITS, escaped

Cell: TypeAlias = str | Text
Row: TypeAlias = Sequence[Cell]

NONE = "-"
# Rows that are laid out together, so that memory stays bounded. Later rows may be wider.
BLOCK_ROWS = 500
# Without a terminal nothing is folded: each row is one line.
UNFOLDED_WIDTH = 100_000

# After so many doublings, every delay has reached any maximum.
MAX_DOUBLINGS = 62
_COLOURED_STATES = {
    "green": ("Completed", "delivered", "ready", "running", "active", "succeeded"),
    "cyan": ("Pending", "InProgress", "queued", "leased", "in_progress"),
    "yellow": ("PendingRetry", "not_routed", "disabled", "paused", "retry_waiting", "unverified"),
    "red": ("dead_letter", "DeadLettered", "failing", "not ready", "unreachable"),
}
_COLOURS = {state: colour for colour, states in _COLOURED_STATES.items() for state in states}


def console() -> Console:
    """Return a console for stdout without markup, because endpoints and publishers choose some texts."""
    # With NO_COLOR alone, rich would still write bold and dim.
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    made = Console(markup=False, emoji=False, highlight=False, color_system=system)
    if not made.is_terminal:
        made.width = UNFOLDED_WIDTH
    return made


def is_plain(to: Console) -> bool:
    """Return whether to print without colours and lines."""
    return not to.is_terminal or bool(os.environ.get("NO_COLOR"))


def show(*parts: RenderableType) -> None:
    """Print the parts below each other."""
    to = console()
    if not is_plain(to):
        to.print(*parts, sep="\n")
        return
    with to.capture() as captured:
        to.print(*parts, sep="\n")
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def show_json(document: bytes | msgspec.Raw) -> None:
    """Print one document on one line, as the daemon sent it."""
    click.echo(bytes(document))


def show_answer(
    answer: Answer, parts: Callable[[Answer], Iterable[RenderableType]], *, as_json: bool
) -> None:
    """Print a response as JSON, or as the parts made from it."""
    if as_json:
        show_json(answer.body)
    else:
        show(*parts(answer))


def list_rows(
    rows: Iterable[msgspec.Raw],
    columns: Sequence[str],
    cells: Callable[[dict[str, object]], Row],
    *,
    limit: int | None,
    as_json: bool,
    nothing: str,
) -> None:
    """Print rows as JSON lines or as a table. A row beyond the limit means that there are more."""
    source = iter(rows)
    shown = islice(source, limit)
    widths: list[int] = []
    while block := list(islice(shown, BLOCK_ROWS)):
        if as_json:
            for row in block:
                show_json(row)
            continue
        laid_out = [cells(msgspec.json.decode(row, type=dict[str, object])) for row in block]
        made = table(columns, laid_out, widths)
        made.show_header = not widths
        widths = _widths([columns, *laid_out], widths)
        show(made)
    if not widths and not as_json:
        hint(nothing)
    elif next(source, None) is not None:
        hint(f"Showing the newest {limit}. Use --limit N to show more, or --all to show all.")


def table(columns: Sequence[str], rows: Iterable[Row], min_widths: Sequence[int] = ()) -> Table:
    """Lay out rows in columns. The last column folds first, the others only if they must."""
    plain = is_plain(console())
    made = Table(
        box=None if plain else box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 2, 0, 0) if plain else (0, 1),
        header_style="" if plain else "bold",
    )
    for column in columns[:-1]:
        made.add_column(column, overflow="fold", no_wrap=True)
    made.add_column(columns[-1], overflow="fold")
    for laid_out, width in zip(made.columns, min_widths[:-1], strict=False):
        laid_out.min_width = width
    for row in rows:
        made.add_row(*row)
    return made


def fields(pairs: Iterable[tuple[str, Cell]]) -> Table:
    """Lay out a name and a value per line."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, style="dim")
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    return made


def line(*parts: Cell) -> Text:
    """Join texts to one line."""
    return Text.assemble(*parts)


def heading(text: str) -> Text:
    """Return a bold line with an empty line before it."""
    return Text(f"\n{text}", style="bold")


def state(name: str, shown: str | None = None) -> Text:
    """Return a state in its colour, optionally with another text."""
    return Text(escaped(shown or name), style=_COLOURS.get(name, ""))


def text(value: object) -> str:
    """Return an untrusted value escaped, or a hyphen for None and for an empty text."""
    return NONE if value in (None, "") else escaped(value)


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
    for unit, length in UNITS:
        if left >= length:
            parts.append(f"{left // length}{unit}")
            left %= length
        elif parts:  # 1d 0h 5m becomes 1d, not 1d 5m
            break
    return " ".join(parts[:2])


def retry_schedule(max_attempts: int, base_delay_seconds: float, max_delay_seconds: float) -> str:
    """Return when a delivery is given up, in words: `5 attempts over 7m 30s`."""
    if max_attempts == 1:
        return "1 attempt, no retry"
    doublings = min(max_attempts - 1, MAX_DOUBLINGS)
    seconds = sum(min(base_delay_seconds * 2**number, max_delay_seconds) for number in range(doublings))
    seconds += (max_attempts - 1 - doublings) * max_delay_seconds
    return f"{max_attempts} attempts over {duration(seconds)}"


def relative(time: datetime, now: datetime) -> str:
    """Return `3m 5s ago`, or `in 40s`."""
    seconds = (now - time).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def absolute(time: datetime) -> str:
    """Return the time in UTC, to the second."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def time_cell(value: object) -> str:
    """Return a time for a table: relative on a terminal, else absolute, which sorts."""
    time = _time(value)
    if time is None:
        return text(value)
    return relative(time, datetime.now(UTC)) if console().is_terminal else absolute(time)


def time_field(value: object) -> str:
    """Return a time for a field: absolute and relative."""
    time = _time(value)
    return text(value) if time is None else f"{absolute(time)} ({relative(time, datetime.now(UTC))})"


def hint(message: str) -> None:
    """Print a message for a person to stderr, if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(message, err=True)


def progress(total: int | None, what: str) -> Progress:
    """Return a progress bar on stderr, to be used in a `with`. It is invisible without a terminal."""
    made = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, markup=False, highlight=False),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    made.add_task(what, total=total)
    return made


def _widths(rows: Sequence[Row], at_least: Sequence[int]) -> list[int]:
    """Return the width of each column, so that the next block of rows is aligned with this one."""
    widths = [max(map(cell_len, map(str, column))) for column in zip(*rows, strict=True)]
    return list(map(max, widths, at_least)) if at_least else widths


def _time(value: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return time if time is None or time.tzinfo else None
