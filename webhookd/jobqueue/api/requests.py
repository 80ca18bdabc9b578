"""What may be asked about jobs: as requests.py."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE
from webhookd.http.fields import EventType, Id, Time, Uuid
from webhookd.http.requests import given
from webhookd.jobqueue.api.fields import (
    Attempts,
    ByExecutor,
    Domain,
    ErrorText,
    Jitter,
    JobCorrelationId,
    JobKey,
    Kind,
    LeaseSeconds,
    LeaseToken,
    MaxDelay,
    Name,
    NewSafePayload,
    Priority,
    Recoveries,
    Ref,
    Retention,
    Seconds,
    Status,
    WaitSeconds,
    Words,
    WorkflowCorrelationId,
)
from webhookd.jobqueue.reads import JobPage


class NewJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs."""

    kind: Kind
    executor: ByExecutor
    idempotency_key: JobKey | None = None
    source_ref: Ref | None = None
    target_ref: Ref | None = None
    payload_ref: Ref | None = None
    # By a function: a default of this type cannot be in a document.
    safe_payload: NewSafePayload = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    priority: Priority = 0
    process_after: Annotated[Time, Meta(description="not before; else now")] | None = None
    deadline_at: Annotated[Time, Meta(description="what waits then is cancelled")] | None = None
    correlation_id: JobCorrelationId | None = None
    causation_event_id: Annotated[Id, Meta(description="the event that it follows from")] | None = None
    event_domain: Domain = "general"
    source_system: Name = "webhookd"
    workflow_id: Uuid | None = None
    parent_job_id: Annotated[Uuid, Meta(description="a link for the record: it orders nothing")] | None = None


# Not of all fields: this one can be sent as it stands, where no event, workflow or other job is.
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

    kind: Kind
    executor: ByExecutor
    lease_holder: Annotated[Name, Meta(description="who does it, for the record")]
    lease_name: Annotated[Name, Meta(description="of the pool it works in; else the kind")] | None = None
    lease_seconds: LeaseSeconds = 60.0
    wait_seconds: WaitSeconds = 0.0


class ReportProgress(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/progress."""

    lease_token: LeaseToken
    status_signal: Annotated[Words, Meta(description="how it goes, in a few words")] | None = None


class ReportSuccess(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/succeed."""

    lease_token: LeaseToken
    result_ref: Ref | None = None


class ReportFailure(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/fail. What is longer than 100 and 2000 characters is cut."""

    lease_token: LeaseToken
    error_code: (
        Annotated[ErrorText, Meta(examples=["NO_PICTURE"], description="what went wrong, for programs")]
        | None
    ) = None
    error_message: ErrorText | None = None
    permanent: Annotated[bool, Meta(description="no further attempt can help")] = False


class CancelJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/cancel."""

    reason: Annotated[Words, Meta(examples=["not wanted any more"])]


class RequeueJob(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/jobs/{id}/requeue."""

    deadline_at: (
        Annotated[
            Time,
            Meta(
                description="of the new job, and still to come; else none", examples=["2099-12-31T12:00:00Z"]
            ),
        ]
        | None
    ) = None


class JobsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GET /v1/jobs."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE, description="of a page")] = DEFAULT_PAGE_SIZE
    cursor: Annotated[Uuid, Meta(description="next_cursor of the page before")] | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    kind: Kind | UnsetType = UNSET

    @property
    def page(self) -> JobPage:
        """One row more than asked for tells whether there is a next page."""
        return JobPage(self.limit + 1, given(self.cursor))


class NewWorkflow(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/job-workflows."""

    workflow_kind: Kind
    generator: Annotated[Name, Meta(examples=["MOT:template_1"], description="who makes its jobs")]
    correlation_id: WorkflowCorrelationId | None = None
    workflow_id: (
        Annotated[Uuid, Meta(description="the generator's own; asked again, it is the same")] | None
    ) = None


class PolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers of the retry policy: what is there is changed."""

    max_attempts: Attempts | UnsetType = UNSET
    base_delay_seconds: Seconds | UnsetType = UNSET
    max_delay_seconds: MaxDelay | UnsetType = UNSET
    jitter: Jitter | UnsetType = UNSET
    max_lease_recoveries: Recoveries | UnsetType = UNSET
    retention_seconds: Retention | UnsetType = UNSET


class KindPolicyChange(msgspec.Struct, forbid_unknown_fields=True):
    """The same for one kind; null is the number of all others again."""

    job_kind: Kind
    max_attempts: Attempts | UnsetType | None = UNSET
    base_delay_seconds: Seconds | UnsetType | None = UNSET
    max_delay_seconds: MaxDelay | UnsetType | None = UNSET
    jitter: Jitter | UnsetType | None = UNSET
    max_lease_recoveries: Recoveries | UnsetType | None = UNSET
    retention_seconds: Retention | UnsetType | None = UNSET


class SubstrateChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/job-substrate: what is there is changed."""

    enabled: bool | UnsetType = UNSET
    policy: PolicyChange | UnsetType = UNSET
    kind_policy: KindPolicyChange | UnsetType = UNSET


class NewRegistration(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/job-registrations."""

    event_type: EventType
    job_kind: Kind
    executor: Annotated[ByExecutor | None, Meta(description="needed unless it is switched off")] = None
    priority: Priority = 0
    active: Annotated[
        bool,
        Meta(description="false: events of this type give no more such jobs; the rest stays as it is"),
    ] = True
