"""Reads jobs, workflows and the configuration with plain SELECTs, which webhookd_reader may run.

Lease tokens are never read: a token is the right to report, and only a claim returns it.
"""

from uuid import UUID

import msgspec

from webhookd.core.errors import Refusal, Refused
from webhookd.db.connection import Connection, fetch_one
from webhookd.db.paging import Arguments, Range, Row, fetch_by_index, piece
from webhookd.jobqueue.fields import JobStatus

# Transitions shown per job. With a policy of many attempts a job can have more.
MAX_RUNS = 500
# Jobs shown per workflow.
MAX_JOBS = 1000
# Registrations and kind policies shown; both are configuration and few.
MAX_REGISTRATIONS = 1000
MAX_DECISIONS = 20

_JOBS = "webhookd.job_queue j"
_COLUMNS = """
    j.job_id, j.job_kind, j.executor, j.status, j.event_domain, j.idempotency_key, j.source_ref, j.target_ref,
    j.payload_ref, j.result_ref, j.payload_classification, j.attempts, j.last_error_code, j.last_error,
    j.last_error_at, j.status_signal, j.lease_name, j.lease_holder, j.leased_until, j.lease_recoveries,
    j.process_after, j.deadline_at, j.priority, j.correlation_id, j.causation_event_id, j.parent_job_id,
    j.workflow_id, j.enqueued_by, j.enqueued_at, j.started_at, j.finished_at, j.cancel_reason,
    j.source_system"""
_SHOWN = f"select {_COLUMNS}"
# The key of a requeued job contains the dead letter's id; uses ux_job_queue_kind_idempotency_key.
_REQUEUED_AS = """(
    select n.job_id from webhookd.job_queue n
    where n.job_kind = j.job_kind and n.idempotency_key = 'requeue:' || j.job_id) as requeued_as"""
# As webhookd.job_policy has it, which a reader may not call.
_MAX_ATTEMPTS = """coalesce(
    (select k.max_attempts from webhookd.job_kind_policy k where k.job_kind = j.job_kind),
    (select s.value::integer from webhookd.settings s where s.key = 'queue.job_substrate.max_attempts')
    ) as max_attempts"""
_JOB = f"{_SHOWN}, j.safe_payload, {_REQUEUED_AS}, {_MAX_ATTEMPTS} from {_JOBS} where j.job_id = $1"
_MERGED = "select * from ({0}) j order by j.enqueued_at desc, j.job_id desc limit {1}"
_TIME_OF_JOB = "select j.enqueued_at from webhookd.job_queue j where j.job_id = $1"
# Transitions only: a day's renewals would hide them. Uses ix_job_command_run_job. The CTE is materialized:
# for a job with much of the ledger the planner might otherwise scan the whole ledger backwards.
_RUNS = """
    with transitions as materialized (
        select r.run_id, r.command, r.from_status, r.to_status, r.actor, r.called_by, r.attempts, r.event_id,
            r.detail, r.run_at
        from webhookd.job_command_run r where r.job_id = $1 and r.from_status is distinct from r.to_status)
    select * from transitions order by run_id desc limit $2"""

_WORKFLOW = """
    select w.workflow_id, w.workflow_kind, w.generator, w.status, w.correlation_id, w.enqueued_by,
        w.enqueued_at, w.finished_at
    from webhookd.job_workflow w where w.workflow_id = $1"""
# Uses ix_job_queue_workflow_id, and sorts: the jobs may be from any time.
_WORKFLOW_JOBS = """
    select j.job_id, j.job_kind, j.executor, j.status, j.parent_job_id, j.enqueued_at, j.finished_at
    from (select q.job_id, q.job_kind, q.executor, q.status, q.parent_job_id, q.enqueued_at, q.finished_at
        from webhookd.job_queue q where q.workflow_id = $1 limit $2) j
    order by j.enqueued_at, j.job_id"""

_DEFAULTS = """
    select jsonb_object_agg(split_part(s.key, '.', 3), s.value)::text as numbers
    from webhookd.settings s where starts_with(s.key, 'queue.job_substrate.')"""
_KINDS = """
    select k.job_kind, k.max_attempts, k.base_delay_seconds, k.max_delay_seconds, k.jitter,
        k.max_lease_recoveries, k.retention_seconds
    from webhookd.job_kind_policy k order by k.job_kind limit $1"""
_REGISTRY = """
    select r.event_type, r.job_kind, r.executor, r.priority, r.active, r.registered_by, r.registered_at
    from webhookd.job_event_registry r order by r.event_type, r.job_kind limit $1"""
# Ledger rows that belong to no job, except opened workflows, of which there can be any number. Sorted in
# the order of ix_job_command_run_decision: by the primary key the scan could pass all transitions.
_DECISIONS = """
    select r.run_id, r.command, r.actor, r.called_by, r.detail, r.run_at
    from webhookd.job_command_run r where r.job_id is null and r.command <> 'fn_job_workflow_open'
    order by r.job_id desc, r.run_id desc limit $1"""


async def jobs(
    connection: Connection,
    limit: int,
    after_id: UUID | None = None,
    status: JobStatus | None = None,
    kind: str | None = None,
) -> list[Row]:
    """Up to `limit` jobs, newest first, without their payloads, starting after the job `after_id`.

    Uses ix_job_queue_listed or ix_job_queue_status_listed; with a kind, ix_job_queue_kind_listed: a page of
    each status, merged.
    """
    mark = None
    if after_id is not None:
        time = await connection.fetchval(_TIME_OF_JOB, after_id)
        if time is None:
            raise Refused(
                Refusal.INVALID_ARGUMENT,
                f"cursor: job {after_id} does not exist; begin again without a cursor",
            )
        mark = (time, after_id)
    arguments = Arguments()
    pieces = [piece(_JOBS, part, mark, limit, arguments, _COLUMNS) for part in _ranges(status, kind)]
    rows = _MERGED.format(" union all ".join(pieces), arguments.add(limit))
    return await fetch_by_index(connection, rows, arguments)


def _ranges(status: JobStatus | None, kind: str | None) -> list[Range]:
    last = ("j.enqueued_at", "j.job_id")
    if kind is not None:
        columns = ("j.job_kind", "j.status", *last)
        return [Range(columns, (kind, each)) for each in ([status] if status else JobStatus)]
    return [Range(("j.status", *last), (status,)) if status else Range(last)]


async def job(connection: Connection, job_id: UUID) -> Row | None:
    """One job with its transitions, oldest first, from one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_JOB, job_id)
        if row is None:
            return None
        runs = [dict(run) for run in await connection.fetch(_RUNS, job_id, MAX_RUNS + 1)]
    return dict(row) | {"runs": runs[:MAX_RUNS][::-1], "more_runs": len(runs) > MAX_RUNS}


async def workflow(connection: Connection, workflow_id: UUID) -> Row | None:
    """One workflow with its jobs, from one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_WORKFLOW, workflow_id)
        if row is None:
            return None
        found = await connection.fetch(_WORKFLOW_JOBS, workflow_id, MAX_JOBS + 1)
    return dict(row) | {"jobs": [dict(job) for job in found[:MAX_JOBS]], "more_jobs": len(found) > MAX_JOBS}


async def configuration(connection: Connection) -> Row:
    """The switch, the policies, the registrations and the last decisions."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        defaults = await fetch_one(connection, _DEFAULTS)
        kinds = await connection.fetch(_KINDS, MAX_REGISTRATIONS)
        registry = await connection.fetch(_REGISTRY, MAX_REGISTRATIONS)
        decisions = await connection.fetch(_DECISIONS, MAX_DECISIONS)
    numbers = msgspec.json.decode(defaults["numbers"])
    return {
        "enabled": numbers.pop("enabled"),
        "policy": numbers,
        "kind_policies": [dict(kind) for kind in kinds],
        "registrations": [dict(registration) for registration in registry],
        "decisions": [dict(decision) for decision in decisions],
    }
