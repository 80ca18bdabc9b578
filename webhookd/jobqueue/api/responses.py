"""What is answered about jobs: as responses.py."""

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from webhookd.http.fields import Count, EventType, Id, Time, Uuid
from webhookd.http.health import JobQueueStatus
from webhookd.jobqueue.api.fields import (
    Attempts,
    ByExecutor,
    Detail,
    Domain,
    ErrorText,
    Jitter,
    JobCorrelationId,
    JobKey,
    Kind,
    LeaseToken,
    MaxDelay,
    Name,
    OfWorkflow,
    Priority,
    Recoveries,
    Ref,
    Retention,
    SafePayload,
    Seconds,
    Status,
    WorkErrorCode,
    WorkflowCorrelationId,
)


class JobEnqueued(TypedDict):
    """Stored and committed."""

    job_id: Uuid
    status: Status
    duplicate: Annotated[
        bool, Meta(examples=[False], description="the key was there already: this is the first job's id")
    ]
    process_after: Time


class ClaimedJob(TypedDict):
    """A job that is the holder's now."""

    job_id: Uuid
    job_kind: Kind
    executor: ByExecutor
    event_domain: Domain
    idempotency_key: JobKey
    source_ref: Ref | None
    target_ref: Ref | None
    payload_ref: Ref | None
    safe_payload: SafePayload
    payload_classification: Annotated[str, Meta(examples=["safe_metadata"])]
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    max_attempts: Attempts
    priority: Priority
    process_after: Time
    deadline_at: Time | None
    correlation_id: JobCorrelationId | None
    causation_event_id: Id | None
    parent_job_id: Uuid | None
    workflow_id: Uuid | None
    source_system: Name
    enqueued_by: Name
    enqueued_at: Time
    lease_name: Name
    lease_holder: Name
    lease_token: LeaseToken
    leased_until: Time
    claimed_at: Annotated[Time, Meta(description="by the database's clock, as all times here")]


class JobRenewed(TypedDict):
    """The lease goes on."""

    job_id: Uuid
    status: Annotated[Status, Meta(examples=["in_progress"])]
    leased_until: Time
    started: Annotated[bool, Meta(description="this was the first word of it")]
    deadline_at: Time | None


class JobReported(TypedDict):
    """What the report made of the job."""

    job_id: Uuid
    status: Annotated[Status, Meta(examples=["retry_waiting"])]
    attempts: Count
    duplicate: Annotated[bool, Meta(examples=[False], description="it was reported before: nothing changed")]
    max_attempts: Annotated[Attempts | None, Meta(description="of a failure")]
    process_after: Annotated[Time | None, Meta(description="of a failure that is tried again: when")]


class JobCancelled(TypedDict):
    """Nobody will do it."""

    job_id: Uuid
    status: Annotated[Status, Meta(examples=["cancelled"])]
    duplicate: Annotated[bool, Meta(examples=[False])]


class JobRequeued(TypedDict):
    """The new job that a dead letter has become."""

    job_id: Uuid
    status: Status
    parent_job_id: Annotated[Uuid, Meta(description="the dead one, which is cancelled thereby")]


class Job(TypedDict):
    """One piece of work."""

    job_id: Uuid
    job_kind: Kind
    executor: ByExecutor
    status: Status
    event_domain: Domain
    idempotency_key: JobKey
    source_ref: Ref | None
    target_ref: Ref | None
    payload_ref: Ref | None
    result_ref: Ref | None
    payload_classification: Annotated[str, Meta(examples=["safe_metadata"])]
    attempts: Count
    last_error_code: WorkErrorCode | None
    last_error: ErrorText | None
    last_error_at: Time | None
    status_signal: Annotated[str | None, Meta(description="the holder's last word on how it goes")]
    lease_name: Name | None
    lease_holder: Name | None
    leased_until: Time | None
    lease_recoveries: Count
    process_after: Time
    deadline_at: Time | None
    priority: Priority
    correlation_id: JobCorrelationId | None
    causation_event_id: Id | None
    parent_job_id: Uuid | None
    workflow_id: Uuid | None
    enqueued_by: Name
    enqueued_at: Time
    started_at: Time | None
    finished_at: Time | None
    cancel_reason: Annotated[str, Meta(examples=["deadline_passed"])] | None
    source_system: Name


class LedgerRow(TypedDict):
    """Who did what, and when."""

    run_id: Id
    command: Annotated[str, Meta(examples=["fn_job_claim"])]
    actor: Annotated[
        Name, Meta(description="of what came by this API the token's name; else the caller's word")
    ]
    called_by: Annotated[str, Meta(examples=["webhookd"], description="the database's login")]
    detail: Detail
    run_at: Time


class JobRun(LedgerRow):
    """A line of the ledger: a move."""

    from_status: Status | None
    to_status: Annotated[Status, Meta(examples=["leased"])]
    attempts: Count
    event_id: Annotated[Id | None, Meta(description="the event that told of it")]


class JobWithRuns(Job):
    """A job, and all its moves."""

    safe_payload: SafePayload
    max_attempts: Annotated[Attempts, Meta(description="by its kind's policy, as that is now")]
    requeued_as: Annotated[Uuid | None, Meta(description="the job that this dead letter was requeued as")]
    runs: Annotated[
        list[JobRun],
        Meta(description="its moves, the last 500, oldest first; renewals are in the ledger, and not here"),
    ]
    more_runs: Annotated[bool, Meta(examples=[False], description="there are earlier ones")]


class JobPage(TypedDict):
    """Jobs, without their payloads."""

    items: list[Job]
    next_cursor: Annotated[Uuid | None, Meta(description="of the next page; null: this is the last")]


class WorkflowOpened(TypedDict):
    """Jobs may name it now."""

    workflow_id: Uuid
    status: OfWorkflow
    duplicate: Annotated[bool, Meta(examples=[False])]


class WorkflowJob(TypedDict):
    """A job of a workflow."""

    job_id: Uuid
    job_kind: Kind
    executor: ByExecutor
    status: Status
    parent_job_id: Uuid | None
    enqueued_at: Time
    finished_at: Time | None


class Workflow(TypedDict):
    """Jobs that belong together, and how they are together."""

    workflow_id: Uuid
    workflow_kind: Kind
    generator: Name
    status: OfWorkflow
    correlation_id: WorkflowCorrelationId | None
    enqueued_by: Name
    enqueued_at: Time
    finished_at: Time | None
    jobs: Annotated[list[WorkflowJob], Meta(description="up to 1000")]
    more_jobs: Annotated[bool, Meta(examples=[False])]


class Policy(TypedDict):
    """When a failed job is tried again, and for how long an ended one is kept."""

    max_attempts: Attempts
    base_delay_seconds: Seconds
    max_delay_seconds: MaxDelay
    jitter: Jitter
    max_lease_recoveries: Recoveries
    retention_seconds: Retention


class KindPolicy(TypedDict):
    """What a kind has of its own; null: the number of all others."""

    job_kind: Kind
    max_attempts: Attempts | None
    base_delay_seconds: Seconds | None
    max_delay_seconds: MaxDelay | None
    jitter: Jitter | None
    max_lease_recoveries: Recoveries | None
    retention_seconds: Retention | None


class Registration(TypedDict):
    """Events of a type give jobs of a kind."""

    event_type: EventType
    job_kind: Kind
    executor: ByExecutor
    priority: Priority
    active: bool
    registered_by: NotRequired[Name]
    registered_at: NotRequired[Time]


class Substrate(TypedDict):
    """Whether it is on, by what numbers it works, what events give jobs, and how it is."""

    enabled: bool
    policy: Policy
    kind_policies: list[KindPolicy]
    registrations: list[Registration]
    decisions: Annotated[list[LedgerRow], Meta(description="the last 20 changes of the above, newest first")]
    queue: JobQueueStatus
