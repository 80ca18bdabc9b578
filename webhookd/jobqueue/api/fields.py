"""Kinds of fields that jobs have, each with its bounds and an example: as fields.py."""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from webhookd.core import limits
from webhookd.core.limits import LABEL
from webhookd.core.states import Executor, WorkflowStatus, WorkStatus
from webhookd.http.fields import CorrelationId, IdempotencyKey, KeyHeader, Uuid

Kind: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=limits.MAX_JOB_KIND_CHARACTERS, pattern=LABEL, examples=["thumbnail.make"]),
]
JobKey: TypeAlias = Annotated[
    IdempotencyKey,
    Meta(
        examples=["picture-7"],
        description="there is one job for a kind and a key, however often it is enqueued",
    ),
]
JobKeyHeader: TypeAlias = Annotated[KeyHeader, Meta(examples=["picture-7"])]
JobCorrelationId: TypeAlias = Annotated[
    CorrelationId, Meta(description="handed to its executor, and of every event about it")
]
WorkflowCorrelationId: TypeAlias = Annotated[
    CorrelationId, Meta(description="for the record; its jobs have their own")
]
Name: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARACTERS, pattern=LABEL, examples=["worker-7"])
]
Domain: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=limits.MAX_JOB_KIND_CHARACTERS, pattern=LABEL, examples=["general"])
]
Ref: TypeAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=limits.MAX_REF_CHARACTERS,
        pattern=LABEL,
        examples=["s3://pictures/7.png"],
        description="where something is: never the thing itself",
    ),
]
Words: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=limits.MAX_WORDS_CHARACTERS, pattern=LABEL, examples=["40 of 100 pages"]),
]
ByExecutor: TypeAlias = Annotated[Executor, Meta(examples=["external_worker"])]
Status: TypeAlias = Annotated[WorkStatus, Meta(examples=["queued"])]
OfWorkflow: TypeAlias = Annotated[WorkflowStatus, Meta(examples=["active"])]
Priority: TypeAlias = Annotated[
    int,
    Meta(
        ge=limits.MIN_PRIORITY,
        le=limits.MAX_PRIORITY,
        examples=[0],
        description="the highest is claimed first",
    ),
]
LeaseToken: TypeAlias = Annotated[
    Uuid, Meta(description="of the claim: who has it holds the job, until the lease is taken back")
]
LeaseSeconds: TypeAlias = Annotated[
    float,
    Meta(
        gt=0,
        le=limits.MAX_LEASE_SECONDS,
        examples=[60.0],
        description="how long the job is the holder's, from the claim and from each progress on",
    ),
]
WaitSeconds: TypeAlias = Annotated[
    float,
    Meta(
        ge=0,
        le=limits.MAX_CLAIM_WAIT_SECONDS,
        examples=[20.0],
        description="for a job to come, if there is none now",
    ),
]
_SAFE = Meta(
    description="a JSON object of at most 16 KiB: what an executor must know at once. Without "
    f"{', '.join(limits.SAFE_PAYLOAD_FORBIDDEN_KEYS)} at its top level: refer to these",
    examples=[{"width": 200}],
    extra_json_schema={"type": "object"},
)
NewSafePayload: TypeAlias = Annotated[msgspec.Raw, _SAFE]
SafePayload: TypeAlias = Annotated[Any, _SAFE]
Detail: TypeAlias = Annotated[Any, Meta(examples=[{"lease_name": "thumbnail.make"}])]
WorkErrorCode: TypeAlias = Annotated[
    str, Meta(examples=["EXIT_1"], description="the executor's word; LEASE_EXPIRED: it said nothing")
]
ErrorText: TypeAlias = Annotated[str, Meta(pattern=limits.FREE_TEXT, examples=["no such picture"])]
Attempts: TypeAlias = Annotated[int, Meta(ge=1, le=limits.MAX_ATTEMPTS, examples=[5])]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JOB_DELAY_SECONDS, examples=[30.0])]
MaxDelay: TypeAlias = Annotated[Seconds, Meta(examples=[3600.0])]
Retention: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JOB_RETENTION_SECONDS, examples=[604_800.0])]
Jitter: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JITTER, examples=[0.0])]
Recoveries: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=limits.MAX_LEASE_RECOVERIES,
        examples=[5],
        description="so often a lease may end without a report; the next time is a failure",
    ),
]
