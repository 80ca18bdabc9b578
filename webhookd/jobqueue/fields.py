"""The states and executors of jobs, and the fields of the API with their bounds, examples and descriptions.

States are spelled as in the database, which enforces the transitions; schema/README.md draws them.
"""

from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from webhookd.core import limits
from webhookd.http.fields import CorrelationId, IdempotencyKey, KeyHeader, Uuid


class JobStatus(StrEnum):
    """The nine states of a job (DP2 §4)."""

    QUEUED = "queued"  # can be claimed once process_after has passed
    LEASED = "leased"  # an executor holds it by its lease token
    IN_PROGRESS = "in_progress"  # the executor has reported progress
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # only within a transaction: becomes retry_waiting or dead_letter before the commit
    RETRY_WAITING = "retry_waiting"  # waits for process_after
    DEAD_LETTER = "dead_letter"  # given up, until an operator cancels or requeues it
    CANCELLED = "cancelled"
    CLEANED = "cleaned"  # past its retention: only its history is left


class Executor(StrEnum):
    """The executors that may claim jobs. MOT is not one of them: it generates jobs."""

    DOT = "DOT"
    AGENT = "Agent"
    HERMES = "Hermes"
    CODEX = "Codex"
    PG_WORKER = "PG_worker"
    EXTERNAL_WORKER = "external_worker"
    KESTRA_ADAPTER = "future_Kestra_adapter"


class WorkflowStatus(StrEnum):
    """The status of a workflow, which the database derives from its jobs."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PARTIALLY_FAILED = "partially_failed"
    CANCELLED = "cancelled"


def _label(max_characters: int, example: str) -> Meta:
    return Meta(min_length=1, max_length=max_characters, pattern=limits.LABEL, examples=[example])


JobKind: TypeAlias = Annotated[str, _label(limits.MAX_JOB_KIND_CHARACTERS, "thumbnail.make")]
Domain: TypeAlias = Annotated[str, _label(limits.MAX_JOB_KIND_CHARACTERS, "general")]
Name: TypeAlias = Annotated[str, _label(limits.MAX_NAME_CHARACTERS, "worker-7")]
Ref: TypeAlias = Annotated[
    str,
    _label(limits.MAX_REF_CHARACTERS, "s3://pictures/7.png"),
    Meta(description="A reference to the data, never the data itself."),
]
ShortText: TypeAlias = Annotated[str, _label(limits.MAX_WORDS_CHARACTERS, "40 of 100 pages")]
JobKey: TypeAlias = Annotated[
    IdempotencyKey,
    Meta(
        examples=["picture-7"], description="There is one job per kind and key, however often it is enqueued."
    ),
]
JobKeyHeader: TypeAlias = Annotated[KeyHeader, Meta(examples=["picture-7"])]
JobCorrelationId: TypeAlias = Annotated[
    CorrelationId, Meta(description="Passed to the executor and copied into every event about the job.")
]
WorkflowCorrelationId: TypeAlias = Annotated[
    CorrelationId, Meta(description="Stored with the workflow. Its jobs have their own correlation ids.")
]
JobExecutor: TypeAlias = Annotated[Executor, Meta(examples=["external_worker"])]
JobState: TypeAlias = Annotated[JobStatus, Meta(examples=["queued"])]
WorkflowState: TypeAlias = Annotated[WorkflowStatus, Meta(examples=["active"])]
Priority: TypeAlias = Annotated[
    int,
    Meta(ge=limits.MIN_PRIORITY, le=limits.MAX_PRIORITY, examples=[0]),
    Meta(description="Jobs with a higher priority are claimed first."),
]
LeaseToken: TypeAlias = Annotated[
    Uuid, Meta(description="Returned by the claim. Its owner holds the job until the lease is taken back.")
]
LeaseSeconds: TypeAlias = Annotated[
    float,
    Meta(gt=0, le=limits.MAX_LEASE_SECONDS, examples=[60.0]),
    Meta(description="Length of the lease, counted from the claim and from each progress report."),
]
WaitSeconds: TypeAlias = Annotated[
    float,
    Meta(ge=0, le=limits.MAX_CLAIM_WAIT_SECONDS, examples=[20.0]),
    Meta(description="How long to wait for a job if none can be claimed now."),
]
_SAFE = Meta(
    description="A JSON object of at most 16 KiB with what the executor needs at once. Its top level must "
    f"not have the keys {', '.join(limits.SAFE_PAYLOAD_FORBIDDEN_KEYS)}: use a reference instead.",
    examples=[{"width": 200}],
    extra_json_schema={"type": "object"},
)
RawSafePayload: TypeAlias = Annotated[msgspec.Raw, _SAFE]
SafePayload: TypeAlias = Annotated[Any, _SAFE]
PayloadClassification: TypeAlias = Annotated[str, Meta(examples=["safe_metadata"])]
Detail: TypeAlias = Annotated[Any, Meta(examples=[{"lease_name": "thumbnail.make"}])]
JobErrorCode: TypeAlias = Annotated[
    str,
    Meta(examples=["EXIT_1"], description="Set by the executor. LEASE_EXPIRED: the executor did not report."),
]
ErrorText: TypeAlias = Annotated[str, Meta(pattern=limits.FREE_TEXT, examples=["no such picture"])]
Attempts: TypeAlias = Annotated[int, Meta(ge=1, le=limits.MAX_ATTEMPTS, examples=[5])]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JOB_DELAY_SECONDS, examples=[30.0])]
MaxDelay: TypeAlias = Annotated[Seconds, Meta(examples=[3600.0])]
Retention: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JOB_RETENTION_SECONDS, examples=[604_800.0])]
Jitter: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JITTER, examples=[0.0])]
Recoveries: TypeAlias = Annotated[
    int,
    Meta(ge=0, le=limits.MAX_LEASE_RECOVERIES, examples=[5]),
    Meta(description="How often a lease may expire without a report. The next expiry counts as a failure."),
]
Duplicate: TypeAlias = Annotated[
    bool, Meta(examples=[False], description="True if an earlier request did this; nothing changed.")
]
