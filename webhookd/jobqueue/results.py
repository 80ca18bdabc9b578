"""The results of the job queue, and their form in the API.

The frozen types are decoded from what the gated functions return; the others describe the rows of reads.py.
"""

from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta

from webhookd.http.fields import Count, EventType, Id, Time, Uuid
from webhookd.http.health import JobQueueStatus
from webhookd.jobqueue import fields


class JobRefusal(msgspec.Struct, frozen=True):
    """A gated function refused the call for a reason that the caller could not know. Nothing changed.

    Every result can be decoded into it: `refused` is false in one that is not a refusal.
    """

    refused: bool = False
    reason: str = ""
    job_id: UUID | None = None
    status: str | None = None


class EnqueuedJob(msgspec.Struct, frozen=True):
    """The job that exists for this kind and key. It is committed."""

    job_id: Uuid
    status: fields.JobState
    duplicate: Annotated[
        fields.Duplicate, Meta(description="True if the key existed: this is the first job.")
    ]
    process_after: Time


class JobFields(msgspec.Struct, frozen=True):
    """The fields that an executor and an operator see, without the payload."""

    job_id: Uuid
    job_kind: fields.JobKind
    executor: fields.JobExecutor
    event_domain: fields.Domain
    idempotency_key: fields.JobKey
    source_ref: fields.Ref | None
    target_ref: fields.Ref | None
    payload_ref: fields.Ref | None
    payload_classification: fields.PayloadClassification
    priority: fields.Priority
    process_after: Time
    deadline_at: Time | None
    correlation_id: fields.JobCorrelationId | None
    causation_event_id: Id | None
    parent_job_id: Uuid | None
    workflow_id: Uuid | None
    source_system: fields.Name
    enqueued_by: fields.Name
    enqueued_at: Time


class ClaimedJob(JobFields, frozen=True):
    """A job that its holder may work on until `leased_until`."""

    safe_payload: fields.RawSafePayload
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    max_attempts: fields.Attempts
    lease_name: fields.Name
    lease_holder: fields.Name
    lease_token: fields.LeaseToken
    leased_until: Time
    claimed_at: Annotated[Time, Meta(description="By the database's clock, like all times here.")]


class RenewedLease(msgspec.Struct, frozen=True):
    """A lease after a progress report."""

    job_id: Uuid
    status: Annotated[fields.JobState, Meta(examples=["in_progress"])]
    leased_until: Time
    started: Annotated[bool, Meta(description="True for the first progress report of this lease.")]
    deadline_at: Time | None


class ReportedJob(msgspec.Struct, frozen=True):
    """A job after a report of success or failure."""

    job_id: Uuid
    status: Annotated[fields.JobState, Meta(examples=["retry_waiting"])]
    attempts: Count
    duplicate: fields.Duplicate
    max_attempts: Annotated[fields.Attempts | None, Meta(description="Set for a failure.")] = None
    process_after: Annotated[
        Time | None, Meta(description="Set for a failure that is retried: the time of the retry.")
    ] = None


class CancelledJob(msgspec.Struct, frozen=True):
    """A cancelled job."""

    job_id: Uuid
    status: Annotated[fields.JobState, Meta(examples=["cancelled"])]
    duplicate: fields.Duplicate


class RequeuedJob(msgspec.Struct, frozen=True):
    """The new job that replaces a dead letter."""

    job_id: Uuid
    status: fields.JobState
    parent_job_id: Annotated[Uuid, Meta(description="The dead letter, which is now cancelled.")]


class OpenedWorkflow(msgspec.Struct, frozen=True):
    """A workflow that new jobs may refer to."""

    workflow_id: Uuid
    status: fields.WorkflowState
    duplicate: fields.Duplicate


class JobRegistration(msgspec.Struct, frozen=True):
    """Each event of this type creates one job of this kind."""

    event_type: EventType
    job_kind: fields.JobKind
    executor: fields.JobExecutor
    priority: fields.Priority
    active: bool


class JobPolicy(msgspec.Struct, frozen=True):
    """Retry delays, limits and retention: the defaults, or those in effect for one kind."""

    max_attempts: fields.Attempts
    base_delay_seconds: fields.Seconds
    max_delay_seconds: fields.MaxDelay
    jitter: fields.Jitter
    max_lease_recoveries: fields.Recoveries
    retention_seconds: fields.Retention


class SpawnedJobs(msgspec.Struct, frozen=True):
    """The number of jobs that one batch of events created."""

    jobs: int
    more: bool


class ReapedJobs(msgspec.Struct, frozen=True):
    """Counts of the jobs that one run of the reaper moved."""

    recovered: int  # expired lease: back to the queue
    retry_waiting: int  # expired too often: counted as a failure
    dead_lettered: int
    promoted: int  # retries that became due
    came_due: int  # scheduled jobs whose time has come: claims now take them by priority
    cancelled: int  # past their deadline
    more: bool


class CleanedJobs(msgspec.Struct, frozen=True):
    """Counts of one run of the retention sweep."""

    cleaned: int
    more: bool
    last_kind: str  # pass this to the next call


class Job(JobFields, frozen=True):
    """One job, without its payload."""

    status: fields.JobState
    result_ref: fields.Ref | None
    attempts: Count
    last_error_code: fields.JobErrorCode | None
    last_error: fields.ErrorText | None
    last_error_at: Time | None
    status_signal: Annotated[str | None, Meta(description="The holder's last progress report.")]
    lease_name: fields.Name | None
    lease_holder: fields.Name | None
    leased_until: Time | None
    lease_recoveries: Count
    started_at: Time | None
    finished_at: Time | None
    cancel_reason: Annotated[str, Meta(examples=["deadline_passed"])] | None


class LedgerRow(msgspec.Struct):
    """One entry of the ledger."""

    run_id: Id
    command: Annotated[str, Meta(examples=["fn_job_claim"])]
    actor: Annotated[
        fields.Name,
        Meta(description="For requests to this API the token's name, otherwise given by the caller."),
    ]
    called_by: Annotated[str, Meta(examples=["webhookd"], description="The database login.")]
    detail: fields.Detail
    run_at: Time


class JobRun(LedgerRow):
    """A transition of a job, from the ledger."""

    from_status: fields.JobState | None
    to_status: Annotated[fields.JobState, Meta(examples=["leased"])]
    attempts: Count
    event_id: Annotated[Id | None, Meta(description="The event that announced the transition.")]


class JobWithRuns(Job, frozen=True):
    """A job with its payload and its transitions."""

    safe_payload: fields.SafePayload
    max_attempts: Annotated[fields.Attempts, Meta(description="From the current policy of its kind.")]
    requeued_as: Annotated[Uuid | None, Meta(description="The job that replaced this dead letter.")]
    runs: Annotated[
        list[JobRun], Meta(description="The last 500 transitions, oldest first. Lease renewals are left out.")
    ]
    more_runs: Annotated[bool, Meta(examples=[False], description="True if there are earlier ones.")]


class JobPage(msgspec.Struct):
    """A page of jobs, without their payloads."""

    items: list[Job]
    next_cursor: Annotated[Uuid | None, Meta(description="Cursor of the next page; null on the last page.")]


class WorkflowJob(msgspec.Struct):
    """A job of a workflow."""

    job_id: Uuid
    job_kind: fields.JobKind
    executor: fields.JobExecutor
    status: fields.JobState
    parent_job_id: Uuid | None
    enqueued_at: Time
    finished_at: Time | None


class Workflow(msgspec.Struct):
    """A workflow and its jobs. Its status follows from theirs."""

    workflow_id: Uuid
    workflow_kind: fields.JobKind
    generator: fields.Name
    status: fields.WorkflowState
    correlation_id: fields.WorkflowCorrelationId | None
    enqueued_by: fields.Name
    enqueued_at: Time
    finished_at: Time | None
    jobs: Annotated[list[WorkflowJob], Meta(description="At most 1000.")]
    more_jobs: Annotated[bool, Meta(examples=[False])]


class KindPolicy(msgspec.Struct):
    """The settings of one job kind; null means the default policy."""

    job_kind: fields.JobKind
    max_attempts: fields.Attempts | None
    base_delay_seconds: fields.Seconds | None
    max_delay_seconds: fields.MaxDelay | None
    jitter: fields.Jitter | None
    max_lease_recoveries: fields.Recoveries | None
    retention_seconds: fields.Retention | None


class RegistrationRow(JobRegistration, frozen=True):
    """A registration: each event of this type creates one job of this kind."""

    registered_by: fields.Name
    registered_at: Time


class JobQueueConfiguration(msgspec.Struct):
    """The switch, the policies, the registrations and the current counts."""

    enabled: bool
    policy: JobPolicy
    kind_policies: list[KindPolicy]
    registrations: list[RegistrationRow]
    decisions: Annotated[list[LedgerRow], Meta(description="The last 20 changes of the above, newest first.")]
    queue: JobQueueStatus
