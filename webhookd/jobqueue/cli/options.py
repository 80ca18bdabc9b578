"""Options and argument types that the `webhookd jobs` commands share."""

from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

import click

from webhookd.cli.options import escaped, parsed_time
from webhookd.core.limits import MAX_PRIORITY, MIN_PRIORITY
from webhookd.jobqueue.states import Executor

priority_option = click.option(
    "--priority",
    type=click.IntRange(MIN_PRIORITY, MAX_PRIORITY),
    default=0,
    show_default=True,
    help="Jobs with a higher priority are claimed first.",
)


def executor_option(meaning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option --executor, with this help text."""
    return click.option(
        "--executor",
        type=click.Choice([executor.value for executor in Executor]),
        default=Executor.EXTERNAL_WORKER.value,
        show_default=True,
        help=meaning,
    )


def job_id(text: str) -> str:
    """The UUID of a job."""
    return _uuid(text, "job")


def workflow_id(text: str) -> str:
    """The UUID of a workflow."""
    return _uuid(text, "workflow")


def _uuid(text: str, noun: str) -> str:
    try:
        return str(UUID(text))
    except ValueError as error:
        raise click.BadParameter(f"{escaped(text)} is not a {noun} id") from error


def time_or_delay(text: str) -> str:
    """A time such as 2026-01-31T08:00:00Z or a delay such as 2h, as RFC 3339."""
    now = datetime.now(UTC)
    try:
        time = parsed_time(text, now)
        time = time if ":" in text else now + (now - time)
        return time.isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{escaped(text)} is neither a time such as 2026-01-31T08:00:00Z nor a delay such as 2h"
        ) from error


def future_time(text: str) -> str:
    """Like time_or_delay, but rejects a time that has passed."""
    time = time_or_delay(text)
    if datetime.fromisoformat(time) <= datetime.now(UTC):
        raise click.BadParameter(f"{escaped(text)} has passed")
    return time
