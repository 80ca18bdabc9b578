"""Options that several commands share, and the words that they take."""

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import click

from webhookd.cli.text import escaped, parsed_time
from webhookd.core.limits import MAX_ID, MAX_ID_DIGITS, MAX_PRIORITY, MIN_PRIORITY
from webhookd.core.states import Executor

# The exit code of a command that Ctrl-C ended, as shells expect it.
INTERRUPTED = 130
DEFAULT_LIMIT = 50

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one document a line.")


priority_option = click.option(
    "--priority",
    type=click.IntRange(MIN_PRIORITY, MAX_PRIORITY),
    default=0,
    show_default=True,
    help="The highest is done first.",
)


def executor_option(meaning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """--executor, of those that there are."""
    return click.option(
        "--executor",
        type=click.Choice([executor.value for executor in Executor]),
        default=Executor.EXTERNAL_WORKER.value,
        show_default=True,
        help=meaning,
    )


def some_text(text: str) -> str:
    """Some text: without any the daemon would refuse it, in words for programs."""
    if not text.strip():
        raise click.BadParameter("it must not be empty")
    return text


def row_id(text: str) -> int:
    """The id of a row."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS and 1 <= int(text) <= MAX_ID):
        raise click.BadParameter(f"{escaped(text)} is no id")
    return int(text)


def event_id(text: str) -> int:
    """An event's id, also as receivers see it: evt_12."""
    return row_id(text.removeprefix("evt_"))


def time_or_age(text: str) -> str:
    """A time, or how long ago it was, as RFC 3339."""
    try:
        return parsed_time(text, datetime.now(UTC)).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{escaped(text)} is no time such as 2026-01-31T08:00:00Z, and no age such as 2h"
        ) from error


def job_id(text: str) -> str:
    """The id of a job."""
    return _uuid(text, "a job")


def workflow_id(text: str) -> str:
    """The id of a workflow."""
    return _uuid(text, "a workflow")


def _uuid(text: str, of_what: str) -> str:
    try:
        return str(UUID(text))
    except ValueError as error:
        raise click.BadParameter(f"{escaped(text)} is no id of {of_what}") from error


def time_or_delay(text: str) -> str:
    """A time, or how long until then, as RFC 3339."""
    now = datetime.now(UTC)
    try:
        time = parsed_time(text, now)
        time = time if ":" in text else now + (now - time)
        return time.isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{escaped(text)} is no time such as 2026-01-31T08:00:00Z, and no delay such as 2h"
        ) from error


def time_to_come(text: str) -> str:
    """The same, but not now and not before."""
    time = time_or_delay(text)
    if datetime.fromisoformat(time) <= datetime.now(UTC):
        raise click.BadParameter(f"{escaped(text)} has passed")
    return time


def example(*lines: str) -> str:
    """An epilog that is not wrapped."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


def listing_options(command: Callable[..., None]) -> Callable[..., None]:
    """How much of a list, and as what: --limit, --all, --json; `limit` is None for all."""

    @click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=DEFAULT_LIMIT,
        show_default=True,
        help="Show at most so many, the newest first.",
    )
    @click.option("--all", "show_all", is_flag=True, help="Show all there are.")
    @json_option
    @functools.wraps(command)
    def wrapped(*arguments: Any, limit: int, show_all: bool, **others: Any) -> None:
        command(*arguments, limit=None if show_all else limit, **others)

    return wrapped


def one_more(limit: int | None) -> int | None:
    """To see that there are more than are shown."""
    return None if limit is None else limit + 1
