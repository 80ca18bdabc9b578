"""The requests about jobs. The API decodes bodies and queries into them; queries.py takes some of them."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from webhookd.http.fields import EventType, Id, Time, Uuid
from webhookd.jobqueue import fields


class NewJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs."""

    kind: fields.JobKind
    executor: fields.JobExecutor
    idempotency_key: fields.JobKey | None = None
    source_ref: fields.Ref | None = None
    target_ref: fields.Ref | None = None
    payload_ref: fields.Ref | None = None
    # A default factory: a plain default of this type cannot be written into the API document.
    safe_payload: fields.RawSafePayload = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    priority: fields.Priority = 0
    process_after: Annotated[Time, Meta(description="Earliest start. Default: now.")] | None = None
    deadline_at: (
        Annotated[Time, Meta(description="The job is cancelled if it is still waiting at this time.")] | None
    ) = None
    correlation_id: fields.JobCorrelationId | None = None
    causation_event_id: Annotated[Id, Meta(description="The event that caused this job.")] | None = None
    event_domain: fields.Domain = "general"
    source_system: fields.Name = "webhookd"
    workflow_id: Uuid | None = None
    parent_job_id: (
        Annotated[Uuid, Meta(description="A link for the record. It does not affect the order of jobs.")]
        | None
    ) = None


# An example of its own, which can be sent as it is: it refers to no event, workflow or other job.
_EXAMPLE = {
    "kind": "thumbnail.make",
    "executor": "external_worker",
    "idempotency_key": "picture-7",
    "payload_ref": "s3://pictures/7.png",
    "safe_payload": {"width": 200},
}
JobToEnqueue: TypeAlias = Annotated[NewJob, Meta(examples=[_EXAMPLE])]


class ClaimJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/claim."""

    kind: fields.JobKind
    executor: fields.JobExecutor
    lease_holder: Annotated[fields.Name, Meta(description="Name of the worker, for the record.")]
    lease_name: (
        Annotated[fields.Name, Meta(description="Name of the worker's pool. Default: the job kind.")] | None
    ) = None
    lease_seconds: fields.LeaseSeconds = 60.0
    wait_seconds: fields.WaitSeconds = 0.0


class ReportProgress(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/progress."""

    lease_token: fields.LeaseToken
    status_signal: Annotated[fields.ShortText, Meta(description="Progress in a few words.")] | None = None


class ReportSuccess(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/succeed."""

    lease_token: fields.LeaseToken
    result_ref: fields.Ref | None = None


class ReportFailure(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/fail. The code is cut to 100 characters, the message to 2000."""

    lease_token: fields.LeaseToken
    error_code: (
        Annotated[fields.ErrorText, Meta(examples=["NO_PICTURE"], description="The error, for programs.")]
        | None
    ) = None
    error_message: fields.ErrorText | None = None
    permanent: Annotated[bool, Meta(description="True if a retry cannot succeed.")] = False


class CancelJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/cancel."""

    reason: Annotated[fields.ShortText, Meta(examples=["no longer needed"])]


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
    status: fields.JobState | UnsetType = UNSET
    kind: fields.JobKind | UnsetType = UNSET


class NewWorkflow(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/job-workflows."""

    workflow_kind: fields.JobKind
    generator: Annotated[
        fields.Name, Meta(examples=["MOT:template_1"], description="The system that adds the jobs.")
    ]
    correlation_id: fields.WorkflowCorrelationId | None = None
    workflow_id: (
        Annotated[Uuid, Meta(description="Chosen by the generator; a repeated request is then safe.")] | None
    ) = None


class PolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """Changes the given settings of the default retry policy."""

    max_attempts: fields.Attempts | UnsetType = UNSET
    base_delay_seconds: fields.Seconds | UnsetType = UNSET
    max_delay_seconds: fields.MaxDelay | UnsetType = UNSET
    jitter: fields.Jitter | UnsetType = UNSET
    max_lease_recoveries: fields.Recoveries | UnsetType = UNSET
    retention_seconds: fields.Retention | UnsetType = UNSET


class KindPolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """Changes the given settings of one job kind. Null restores the default."""

    job_kind: fields.JobKind
    max_attempts: fields.Attempts | UnsetType | None = UNSET
    base_delay_seconds: fields.Seconds | UnsetType | None = UNSET
    max_delay_seconds: fields.MaxDelay | UnsetType | None = UNSET
    jitter: fields.Jitter | UnsetType | None = UNSET
    max_lease_recoveries: fields.Recoveries | UnsetType | None = UNSET
    retention_seconds: fields.Retention | UnsetType | None = UNSET


class JobQueueChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/job-substrate. Only the given fields change."""

    enabled: bool | UnsetType = UNSET
    policy: PolicyChange | UnsetType = UNSET
    kind_policy: KindPolicyChange | UnsetType = UNSET


class NewRegistration(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/job-registrations."""

    event_type: EventType
    job_kind: fields.JobKind
    executor: Annotated[fields.JobExecutor | None, Meta(description="Required unless `active` is false.")] = (
        None
    )
    priority: fields.Priority = 0
    active: Annotated[
        bool, Meta(description="False: events of this type stop creating these jobs; nothing else changes.")
    ] = True
