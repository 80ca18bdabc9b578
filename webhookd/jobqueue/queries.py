"""Calls the gated functions of the job queue, schema/jobqueue/*.sql. A refused call returns a JobRefusal."""

from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec

from webhookd.core.errors import Refusal, Refused
from webhookd.db.connection import Connection
from webhookd.http.health import JobQueueStatus
from webhookd.jobqueue.requests import (
    ClaimJob,
    NewJob,
    NewRegistration,
    NewWorkflow,
    ReportFailure,
    ReportProgress,
    ReportSuccess,
)
from webhookd.jobqueue.results import (
    CancelledJob,
    ClaimedJob,
    CleanedJobs,
    EnqueuedJob,
    JobPolicy,
    JobRefusal,
    JobRegistration,
    OpenedWorkflow,
    ReapedJobs,
    RenewedLease,
    ReportedJob,
    RequeuedJob,
    SpawnedJobs,
)
from webhookd.jobqueue.states import JobStatus

Value = TypeVar("Value", bound=msgspec.Struct)

NOTHING_TO_CLAIM = "nothing_to_claim"


class _Verdict(msgspec.Struct):
    """The members that every gated function returns when it refuses."""

    refused: bool = False
    reason: str = ""
    job_id: UUID | None = None
    status: str | None = None


async def enqueue(connection: Connection, job: NewJob, key: str, actor: str) -> EnqueuedJob | JobRefusal:
    """Create a job, once per kind and key."""
    fields = msgspec.structs.asdict(job) | {
        "idempotency_key": key,
        "safe_payload": bytes(job.safe_payload).decode(),
    }
    return await _call(connection, "fn_job_enqueue", EnqueuedJob, **fields, actor=actor)


async def claim(connection: Connection, wanted: ClaimJob, actor: str) -> ClaimedJob | JobRefusal:
    """Lease the next job of a kind for an executor. Does not wait."""
    return await _call(
        connection,
        "fn_job_claim",
        ClaimedJob,
        kind=wanted.kind,
        executor=wanted.executor,
        lease_name=wanted.lease_name or wanted.kind,
        lease_holder=wanted.lease_holder,
        lease_ttl_seconds=wanted.lease_seconds,
        actor=actor,
    )


async def progress(
    connection: Connection, job_id: UUID, report: ReportProgress, actor: str
) -> RenewedLease | JobRefusal:
    """Renew a lease; the first call moves the job to in_progress."""
    return await _call(
        connection,
        "fn_job_progress",
        RenewedLease,
        job_id=job_id,
        status_signal_only=report.status_signal,
        lease_token=report.lease_token,
        actor=actor,
    )


async def succeed(
    connection: Connection, job_id: UUID, report: ReportSuccess, actor: str
) -> ReportedJob | JobRefusal:
    """Report success."""
    return await _call(
        connection,
        "fn_job_succeed",
        ReportedJob,
        job_id=job_id,
        lease_token=report.lease_token,
        result_ref=report.result_ref,
        actor=actor,
    )


async def fail(
    connection: Connection, job_id: UUID, report: ReportFailure, actor: str
) -> ReportedJob | JobRefusal:
    """Report a failure, transient or permanent."""
    return await _call(
        connection,
        "fn_job_fail_permanent" if report.permanent else "fn_job_fail_transient",
        ReportedJob,
        job_id=job_id,
        lease_token=report.lease_token,
        error_code=report.error_code,
        error_message=report.error_message,
        actor=actor,
    )


async def cancel(connection: Connection, job_id: UUID, reason: str, actor: str) -> CancelledJob | JobRefusal:
    """Cancel a waiting job or a dead letter."""
    return await _call(connection, "fn_job_cancel", CancelledJob, job_id=job_id, reason=reason, actor=actor)


async def requeue(
    connection: Connection, job_id: UUID, actor: str, deadline_at: datetime | None = None
) -> RequeuedJob | JobRefusal:
    """Replace a dead letter with a new job. Possible once per dead letter."""
    return await _call(
        connection, "fn_job_requeue", RequeuedJob, job_id=job_id, actor=actor, deadline_at=deadline_at
    )


async def open_workflow(
    connection: Connection, workflow: NewWorkflow, actor: str
) -> OpenedWorkflow | JobRefusal:
    """Open a workflow. The same id returns the existing workflow."""
    fields = msgspec.structs.asdict(workflow)
    return await _call(connection, "fn_job_workflow_open", OpenedWorkflow, **fields, actor=actor)


async def register_event(
    connection: Connection, wanted: NewRegistration, actor: str
) -> JobRegistration | JobRefusal:
    """Set or deactivate a registration; returns it as it is now."""
    return await _call(
        connection,
        "fn_job_register_event",
        JobRegistration,
        event_type=wanted.event_type,
        kind=wanted.job_kind,
        executor=wanted.executor,
        actor=actor,
        priority=wanted.priority,
        active=wanted.active,
    )


async def enable(connection: Connection, actor: str, *, enabled: bool) -> None:
    """Enable or disable the job queue."""
    await connection.execute("select webhookd.fn_job_enable($1, $2)", enabled, actor)


async def configure(
    connection: Connection, numbers: dict[str, Any], actor: str, kind: str | None = None
) -> JobPolicy | JobRefusal:
    """Change settings of the default policy, or of one kind, where None restores the default."""
    text = msgspec.json.encode(numbers).decode()
    return await _call(connection, "fn_job_configure", JobPolicy, settings=text, actor=actor, kind=kind)


async def spawn_from_events(connection: Connection, batch_size: int) -> SpawnedJobs | JobRefusal:
    """Create the jobs of one batch of events."""
    return await _call(connection, "fn_job_spawn_from_events", SpawnedJobs, batch_size=batch_size)


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


async def sweep(connection: Connection, batch_size: int, after_kind: str = "") -> CleanedJobs | JobRefusal:
    """Clean jobs past their retention, of the kinds after `after_kind`."""
    return await _call(
        connection, "fn_job_cleanup_sweep", CleanedJobs, batch_size=batch_size, after_kind=after_kind
    )


async def health(connection: Connection) -> JobQueueStatus:
    """Count the queue, up to the function's own bound: every caller gets the same numbers."""
    text = await connection.fetchval("select webhookd.fn_job_queue_health()::text")
    return msgspec.json.decode(text, type=JobQueueStatus)


async def _call(
    connection: Connection, function: str, result: type[Value], /, **arguments: object
) -> Value | JobRefusal:
    named = ", ".join(f"p_{name} => ${number}" for number, name in enumerate(arguments, 1))
    try:
        text = await connection.fetchval(f"select webhookd.{function}({named})::text", *arguments.values())
    except asyncpg.DataError as error:
        # JSON that jsonb rejects, such as a NUL character in a string, and times out of PostgreSQL's range.
        message = f"a value cannot be stored: {error.message or error}"
        raise Refused(Refusal.INVALID_ARGUMENT, message) from error
    verdict = msgspec.json.decode(text, type=_Verdict)
    if verdict.refused:
        # A workflow's status is not a JobStatus.
        status = JobStatus(verdict.status) if verdict.status in set(JobStatus) else None
        return JobRefusal(verdict.reason, verdict.job_id, status)
    return _in_utc(msgspec.json.decode(text, type=result))


def _in_utc(value: Value) -> Value:
    """Convert all times: PostgreSQL writes them into JSON in the session's time zone."""
    times = {
        name: time.astimezone(UTC)
        for name, time in msgspec.structs.asdict(value).items()
        if isinstance(time, datetime)
    }
    return msgspec.structs.replace(value, **times)
