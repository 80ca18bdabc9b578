"""Calls the gated functions of the job queue, schema/jobqueue/*.sql. A refused call returns a JobRefusal."""

from datetime import UTC, datetime
from typing import Any, TypeVar

import asyncpg
import msgspec

from webhookd.core.errors import Refusal, Refused
from webhookd.db.connection import Connection
from webhookd.http.health import JobQueueStatus
from webhookd.jobqueue.results import JobPolicy, JobRefusal, ReapedJobs

Value = TypeVar("Value", bound=msgspec.Struct)


async def call(
    connection: Connection, function: str, result: type[Value], /, **arguments: object
) -> Value | JobRefusal:
    """Call a gated function. Its parameters have the prefix `p_`, which `arguments` leaves out."""
    named = ", ".join(f"p_{name} => ${number}" for number, name in enumerate(arguments, 1))
    try:
        text = await connection.fetchval(f"select webhookd.{function}({named})::text", *arguments.values())
    except asyncpg.DataError as error:
        # JSON that jsonb rejects, such as a NUL character in a string, and times out of PostgreSQL's range.
        message = f"a value cannot be stored: {error.message or error}"
        raise Refused(Refusal.INVALID_ARGUMENT, message) from error
    refusal = msgspec.json.decode(text, type=JobRefusal)
    return refusal if refusal.refused else _in_utc(msgspec.json.decode(text, type=result))


async def enable(connection: Connection, actor: str, *, enabled: bool) -> None:
    """Enable or disable the job queue."""
    await connection.execute("select webhookd.fn_job_enable($1, $2)", enabled, actor)


async def configure(
    connection: Connection, numbers: dict[str, Any], actor: str, kind: str | None = None
) -> JobPolicy | JobRefusal:
    """Change settings of the default policy, or of one kind, where None restores the default."""
    text = msgspec.json.encode(numbers).decode()
    return await call(connection, "fn_job_configure", JobPolicy, settings=text, actor=actor, kind=kind)


async def reap(connection: Connection, batch_size: int) -> ReapedJobs:
    """Handle expired leases, due retries and deadlines. Works while the job queue is disabled."""
    text = await connection.fetchval("select webhookd.fn_job_lease_reaper($1)::text", batch_size)
    return msgspec.json.decode(text, type=ReapedJobs)


async def reap_if_disabled(connection: Connection, batch_size: int) -> ReapedJobs | None:
    """Check the switch and reap in one statement; None if the job queue is enabled."""
    text = await connection.fetchval(
        """
        select webhookd.fn_job_lease_reaper($1)::text from webhookd.settings s
        where s.key = 'queue.job_substrate.enabled' and s.value = 'false'
        """,
        batch_size,
    )
    return None if text is None else msgspec.json.decode(text, type=ReapedJobs)


async def health(connection: Connection) -> JobQueueStatus:
    """Count the queue, up to the function's own bound: every caller gets the same numbers."""
    text = await connection.fetchval("select webhookd.fn_job_queue_health()::text")
    return msgspec.json.decode(text, type=JobQueueStatus)


def _in_utc(value: Value) -> Value:
    """Convert all times: PostgreSQL writes them into JSON in the session's time zone."""
    times = {
        name: time.astimezone(UTC)
        for name, time in msgspec.structs.asdict(value).items()
        if isinstance(time, datetime)
    }
    return msgspec.structs.replace(value, **times)
