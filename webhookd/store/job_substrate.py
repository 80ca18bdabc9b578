"""The job substrate: calls schema/functions/substrate_*.sql. A refusal is a value, JobRefusal."""

from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from webhookd.model.errors import Refusal, Refused
from webhookd.model.states import Executor, WorkflowStatus, WorkStatus
from webhookd.store.connection import Connection

Value = TypeVar("Value", bound=msgspec.Struct)

DISABLED = "job_substrate_disabled"
NOTHING_TO_CLAIM = "nothing_to_claim"


class JobRefusal(msgspec.Struct, frozen=True):
    """What the caller could not know better; nothing changed."""

    reason: str
    job_id: UUID | None = None
    status: WorkStatus | None = None


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is enqueued: references, and a few safe words. `safe_payload` is JSON text."""

    kind: str
    idempotency_key: str
    executor: Executor
    source_ref: str | None = None
    target_ref: str | None = None
    payload_ref: str | None = None
    safe_payload: str = "{}"
    priority: int = 0
    process_after: datetime | None = None
    deadline_at: datetime | None = None
    correlation_id: str | None = None
    causation_event_id: int | None = None
    actor: str
    event_domain: str
    source_system: str
    workflow_id: UUID | None = None
    parent_job_id: UUID | None = None


class Enqueued(msgspec.Struct, frozen=True):
    """The job that there is for a kind and a key."""

    job_id: UUID
    status: WorkStatus
    duplicate: bool
    process_after: datetime


class Claim(msgspec.Struct, frozen=True):
    """A job that is its holder's until `leased_until`, and what there is to know to do it."""

    job_id: UUID
    job_kind: str
    executor: Executor
    event_domain: str
    idempotency_key: str
    source_ref: str | None
    target_ref: str | None
    payload_ref: str | None
    safe_payload: msgspec.Raw
    payload_classification: str
    attempt: int
    max_attempts: int
    priority: int
    process_after: datetime
    deadline_at: datetime | None
    correlation_id: str | None
    causation_event_id: int | None
    parent_job_id: UUID | None
    workflow_id: UUID | None
    source_system: str
    enqueued_by: str
    enqueued_at: datetime
    lease_name: str
    lease_holder: str
    lease_token: UUID
    leased_until: datetime
    claimed_at: datetime


class Renewed(msgspec.Struct, frozen=True):
    """A lease that goes on."""

    job_id: UUID
    status: WorkStatus
    leased_until: datetime
    started: bool
    deadline_at: datetime | None


class Reported(msgspec.Struct, frozen=True):
    """What a report made of a job; a duplicate changed nothing."""

    job_id: UUID
    status: WorkStatus
    attempts: int
    duplicate: bool
    max_attempts: int | None = None
    process_after: datetime | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """A job that nobody will do."""

    job_id: UUID
    status: WorkStatus
    duplicate: bool


class Requeued(msgspec.Struct, frozen=True):
    """The new job that a dead letter has become."""

    job_id: UUID
    status: WorkStatus
    parent_job_id: UUID


class Opened(msgspec.Struct, frozen=True):
    """A workflow that jobs can belong to."""

    workflow_id: UUID
    status: WorkflowStatus
    duplicate: bool


class Registered(msgspec.Struct, frozen=True):
    """Events of this type give jobs of this kind."""

    event_type: str
    job_kind: str
    executor: Executor
    priority: int
    active: bool


class Policy(msgspec.Struct, frozen=True):
    """The numbers that hold, for a kind or for all others."""

    max_attempts: int
    base_delay_seconds: float
    max_delay_seconds: float
    jitter: float
    max_lease_recoveries: int
    retention_seconds: float


class Spawned(msgspec.Struct, frozen=True):
    """Jobs made of events."""

    events: int
    jobs: int
    more: bool


class Reaped(msgspec.Struct, frozen=True):
    """What time did to jobs: how many went where."""

    recovered: int  # back to the queue
    retry_waiting: int  # after too many recoveries, as a failure is
    dead_lettered: int
    promoted: int  # retries that fell due
    cancelled: int  # past their deadline
    more: bool


class Swept(msgspec.Struct, frozen=True):
    """Jobs past their retention."""

    cleaned: int
    more: bool


class Health(msgspec.Struct, frozen=True):
    """How the queue is (DP2 §8): counts up to a bound, and the age of the oldest that could be claimed."""

    enabled: bool
    backlog: int
    in_progress: int
    dead_letter_open: int
    oldest_queued_age_s: float | None
    lease_active: int
    scheduled: int
    retry_waiting: int
    events_waiting: int


class _Refused(msgspec.Struct):
    refused: bool = False
    reason: str = ""
    job_id: UUID | None = None
    status: str | None = None


async def enqueue(connection: Connection, job: NewJob) -> Enqueued | JobRefusal:
    """Make a job, once for each kind and key."""
    return await _called(connection, "fn_job_enqueue", Enqueued, *msgspec.structs.astuple(job))


async def claim(
    connection: Connection, kind: str, executor: Executor, name: str, holder: str, lease_seconds: float
) -> Claim | JobRefusal:
    """Lease the first job of a kind for an executor."""
    return await _called(connection, "fn_job_claim", Claim, kind, executor, name, holder, lease_seconds)


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


async def register_event(connection: Connection, wanted: Registered, actor: str) -> Registered | JobRefusal:
    """From now on, or no more: events of a type give jobs of a kind."""
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


async def sweep(connection: Connection, batch_size: int) -> Swept | JobRefusal:
    """Clean what is past its retention."""
    return await _called(connection, "fn_job_cleanup_sweep", Swept, batch_size)


async def health(connection: Connection, counted_up_to: int) -> Health:
    """How the queue is."""
    text = await connection.fetchval("select webhookd.fn_job_queue_health($1)::text", counted_up_to)
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
