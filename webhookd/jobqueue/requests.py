"""The requests about jobs. The API decodes bodies and queries into them; queries.py takes some of them."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from webhookd.http.fields import EventType, Id, Time, Uuid
from webhookd.jobqueue.fields import (
    Attempts,
    Domain,
    ErrorText,
    Jitter,
    JobCorrelationId,
    JobExecutor,
    JobKey,
    JobKind,
    JobState,
    LeaseSeconds,
    LeaseToken,
    MaxDelay,
    Name,
    Priority,
    RawSafePayload,
    Recoveries,
    Ref,
    Retention,
    Seconds,
    ShortText,
    WaitSeconds,
    WorkflowCorrelationId,
)


class NewJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs."""

    kind: JobKind
    executor: JobExecutor
    idempotency_key: JobKey | None = None
    source_ref: Ref | None = None
    target_ref: Ref | None = None
    payload_ref: Ref | None = None
    # A default factory: a plain default of this type cannot be written into the API document.
    safe_payload: RawSafePayload = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    priority: Priority = 0
    process_after: Annotated[Time, Meta(description="Earliest start. Default: now.")] | None = None
    deadline_at: (
        Annotated[Time, Meta(description="The job is cancelled if it is still waiting at this time.")] | None
    ) = None
    correlation_id: JobCorrelationId | None = None
    causation_event_id: Annotated[Id, Meta(description="The event that caused this job.")] | None = None
    event_domain: Domain = "general"
    source_system: Name = "webhookd"
    workflow_id: Uuid | None = None
    parent_job_id: (
        Annotated[Uuid, Meta(description="A link for the record. It does not affect the order of jobs.")]
        | None
    ) = None


# An example of its own, which can be sent as it is: it refers to no event, workflow or other job.
JobToEnqueue: TypeAlias = Annotated[
    NewJob,
    Meta(
        examples=[
            {
                "kind": "thumbnail.make",
                "executor": "external_worker",
                "idempotency_key": "picture-7",
                "payload_ref": "s3://pictures/7.png",
                "safe_payload": {"width": 200},
            }
        ]
    ),
]


class ClaimJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/claim."""

    kind: JobKind
    executor: JobExecutor
    lease_holder: Annotated[Name, Meta(description="Name of the worker, for the record.")]
    lease_name: (
        Annotated[Name, Meta(description="Name of the worker's pool. Default: the job kind.")] | None
    ) = None
    lease_seconds: LeaseSeconds = 60.0
    wait_seconds: WaitSeconds = 0.0


class ReportProgress(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/progress."""

    lease_token: LeaseToken
    status_signal: Annotated[ShortText, Meta(description="Progress in a few words.")] | None = None


class ReportSuccess(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/succeed."""

    lease_token: LeaseToken
    result_ref: Ref | None = None


class ReportFailure(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/fail. The code is cut to 100 characters, the message to 2000."""

    lease_token: LeaseToken
    error_code: (
        Annotated[ErrorText, Meta(examples=["NO_PICTURE"], description="The error, for programs.")] | None
    ) = None
    error_message: ErrorText | None = None
    permanent: Annotated[bool, Meta(description="True if a retry cannot succeed.")] = False


class CancelJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/cancel."""

    reason: Annotated[ShortText, Meta(examples=["no longer needed"])]


class RequeueJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/requeue."""

    deadline_at: (
        Annotated[
            Time,
            Meta(
                description="Deadline of the new job, in the future. Default: none.",
                examples=["2099-12-31T12:00:00Z"],
            ),
        ]
        | None
    ) = None


class JobsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GET /v1/jobs."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE, description="Page size.")] = DEFAULT_PAGE_SIZE
    cursor: Annotated[Uuid, Meta(description="next_cursor of the previous page.")] | UnsetType = UNSET
    status: JobState | UnsetType = UNSET
    kind: JobKind | UnsetType = UNSET


class NewWorkflow(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/job-workflows."""

    workflow_kind: JobKind
    generator: Annotated[
        Name, Meta(examples=["MOT:template_1"], description="The system that adds the jobs.")
    ]
    correlation_id: WorkflowCorrelationId | None = None
    workflow_id: (
        Annotated[Uuid, Meta(description="Chosen by the generator; a repeated request is then safe.")] | None
    ) = None


class PolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """Changes the given settings of the default retry policy."""

    max_attempts: Attempts | UnsetType = UNSET
    base_delay_seconds: Seconds | UnsetType = UNSET
    max_delay_seconds: MaxDelay | UnsetType = UNSET
    jitter: Jitter | UnsetType = UNSET
    max_lease_recoveries: Recoveries | UnsetType = UNSET
    retention_seconds: Retention | UnsetType = UNSET


class KindPolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """Changes the given settings of one job kind. Null restores the default."""

    job_kind: JobKind
    max_attempts: Attempts | UnsetType | None = UNSET
    base_delay_seconds: Seconds | UnsetType | None = UNSET
    max_delay_seconds: MaxDelay | UnsetType | None = UNSET
    jitter: Jitter | UnsetType | None = UNSET
    max_lease_recoveries: Recoveries | UnsetType | None = UNSET
    retention_seconds: Retention | UnsetType | None = UNSET


class JobQueueChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/job-substrate. Only the given fields change."""

    enabled: bool | UnsetType = UNSET
    policy: PolicyChange | UnsetType = UNSET
    kind_policy: KindPolicyChange | UnsetType = UNSET


class NewRegistration(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/job-registrations."""

    event_type: EventType
    job_kind: JobKind
    executor: Annotated[JobExecutor | None, Meta(description="Required unless `active` is false.")] = None
    priority: Priority = 0
    active: Annotated[
        bool,
        Meta(description="False: events of this type stop creating these jobs; nothing else changes."),
    ] = True
