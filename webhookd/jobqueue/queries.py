"""The job substrate: calls schema/jobqueue/*.sql. A refusal is a value, JobRefusal."""

from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from webhookd.core.errors import Refusal, Refused
from webhookd.core.states import Executor, WorkStatus
from webhookd.db.connection import Connection
from webhookd.jobqueue.types import (
    Cancelled,
    Claim,
    Enqueued,
    Health,
    JobRefusal,
    NewJob,
    NewRegistration,
    Opened,
    Policy,
    Reaped,
    Registered,
    Renewed,
    Reported,
    Requeued,
    Spawned,
    Swept,
)

Value = TypeVar("Value", bound=msgspec.Struct)

NOTHING_TO_CLAIM = "nothing_to_claim"


class _Refused(msgspec.Struct):
    refused: bool = False
    reason: str = ""
    job_id: UUID | None = None
    status: str | None = None


async def enqueue(connection: Connection, job: NewJob) -> Enqueued | JobRefusal:
    """Make a job, once for each kind and key."""
    return await _called(connection, "fn_job_enqueue", Enqueued, *msgspec.structs.astuple(job))


async def claim(
    connection: Connection,
    kind: str,
    executor: Executor,
    name: str,
    holder: str,
    lease_seconds: float,
    actor: str,
) -> Claim | JobRefusal:
    """Lease the first job of a kind for an executor."""
    return await _called(
        connection, "fn_job_claim", Claim, kind, executor, name, holder, lease_seconds, actor
    )


async def progress(
    connection: Connection, job_id: UUID, signal: str | None, lease_token: UUID, actor: str
) -> Renewed | JobRefusal:
    """The holder is at it: its lease begins anew."""
    return await _called(connection, "fn_job_progress", Renewed, job_id, signal, lease_token, actor)


async def succeed(
    connection: Connection, job_id: UUID, lease_token: UUID, result_ref: str | None, actor: str
) -> Reported | JobRefusal:
    """Done."""
    return await _called(connection, "fn_job_succeed", Reported, job_id, lease_token, result_ref, actor)


async def fail(
    connection: Connection,
    job_id: UUID,
    lease_token: UUID,
    error_code: str | None,
    error_message: str | None,
    actor: str,
    *,
    permanent: bool,
) -> Reported | JobRefusal:
    """Failed: for now, or for good."""
    function = "fn_job_fail_permanent" if permanent else "fn_job_fail_transient"
    return await _called(
        connection, function, Reported, job_id, lease_token, error_code, error_message, actor
    )


async def cancel(connection: Connection, job_id: UUID, reason: str, actor: str) -> Cancelled | JobRefusal:
    """Nobody shall do it."""
    return await _called(connection, "fn_job_cancel", Cancelled, job_id, reason, actor)


async def requeue(
    connection: Connection, job_id: UUID, actor: str, deadline_at: datetime | None = None
) -> Requeued | JobRefusal:
    """A dead letter's second chance, as a new job, once."""
    return await _called(connection, "fn_job_requeue", Requeued, job_id, actor, deadline_at)


async def open_workflow(
    connection: Connection,
    workflow_kind: str,
    generator: str,
    actor: str,
    correlation_id: str | None,
    workflow_id: UUID | None,
) -> Opened | JobRefusal:
    """A workflow; the same again for the same id."""
    return await _called(
        connection,
        "fn_job_workflow_open",
        Opened,
        workflow_kind,
        generator,
        actor,
        correlation_id,
        workflow_id,
    )


async def register_event(
    connection: Connection, wanted: NewRegistration, actor: str
) -> Registered | JobRefusal:
    """From now on, or no more: events of a type give jobs of a kind. The registration that there is then."""
    return await _called(
        connection,
        "fn_job_register_event",
        Registered,
        wanted.event_type,
        wanted.job_kind,
        wanted.executor,
        actor,
        wanted.priority,
        wanted.active,
    )


async def enable(connection: Connection, actor: str, *, enabled: bool) -> None:
    """The switch."""
    await connection.execute("select webhookd.fn_job_enable($1, $2)", enabled, actor)


async def configure(
    connection: Connection, numbers: dict[str, Any], actor: str, kind: str | None = None
) -> Policy | JobRefusal:
    """Set some of the numbers, for all kinds or for one; those that hold then. None: the default again."""
    text = msgspec.json.encode(numbers).decode()
    return await _called(connection, "fn_job_configure", Policy, text, actor, kind)


async def spawn_from_events(connection: Connection, batch_size: int) -> Spawned | JobRefusal:
    """Make the jobs of up to so many events."""
    return await _called(connection, "fn_job_spawn_from_events", Spawned, batch_size)


async def reap(connection: Connection, batch_size: int) -> Reaped:
    """Take back leases, promote retries, cancel what is late. Works while the substrate is off."""
    text = await connection.fetchval("select webhookd.fn_job_lease_reaper($1)::text", batch_size)
    return msgspec.json.decode(text, type=Reaped)


async def reap_if_disabled(connection: Connection, batch_size: int) -> Reaped | None:
    """The same, in the same statement as the look at the switch; None if it is on."""
    text = await connection.fetchval(
        """
        select webhookd.fn_job_lease_reaper($1)::text from webhookd.settings s
        where s.key = 'queue.job_substrate.enabled' and s.value = 'false'
        """,
        batch_size,
    )
    return None if text is None else msgspec.json.decode(text, type=Reaped)


async def sweep(connection: Connection, batch_size: int, after_kind: str = "") -> Swept | JobRefusal:
    """Clean what is past its retention, of the next kinds."""
    return await _called(connection, "fn_job_cleanup_sweep", Swept, batch_size, after_kind)


async def health(connection: Connection) -> Health:
    """How the queue is, counted as far as the function does by itself: the same for whoever asks."""
    text = await connection.fetchval("select webhookd.fn_job_queue_health()::text")
    return msgspec.json.decode(text, type=Health)


async def _called(
    connection: Connection, function: str, kind: type[Value], *arguments: object
) -> Value | JobRefusal:
    places = ", ".join(f"${number}" for number in range(1, len(arguments) + 1))
    try:
        text = await connection.fetchval(f"select webhookd.{function}({places})::text", *arguments)
    except asyncpg.DataError as error:
        # What is JSON and no jsonb, as a NUL character in a text; and times that PostgreSQL has not.
        message = f"a value cannot be stored: {error.message or error}"
        raise Refused(Refusal.INVALID_ARGUMENT, message) from error
    told = msgspec.json.decode(text, type=_Refused)
    if told.refused:
        # A workflow's status is none of a job's.
        status = WorkStatus(told.status) if told.status in set(WorkStatus) else None
        return JobRefusal(told.reason, told.job_id, status)
    return _in_utc(msgspec.json.decode(text, type=kind))


def _in_utc(value: Value) -> Value:
    """PostgreSQL writes times into JSON in the session's zone."""
    times = {
        name: time.astimezone(UTC)
        for name, time in msgspec.structs.asdict(value).items()
        if isinstance(time, datetime)
    }
    return msgspec.structs.replace(value, **times)
