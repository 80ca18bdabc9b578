"""What is answered, field by field: the types that the document at /openapi.json is made of.

Typed dictionaries, for a row of the database is one already: nothing is converted on its way out. Fields may
be added to an answer; none is renamed or taken away.
"""

from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.http.fields import (
    CallbackUrl,
    CorrelationId,
    Count,
    Description,
    ErrorCode,
    EventType,
    Id,
    IdempotencyKey,
    OwnAttempts,
    OwnDelay,
    Payload,
    Sentence,
    Time,
)

# A saga's status, or none: SagaStatus and a literal cannot be one type for msgspec.
Became: TypeAlias = Annotated[
    Literal["Pending", "InProgress", "PendingRetry", "Completed", "DeadLettered", "not_routed"],
    Meta(examples=["PendingRetry"]),
]
Progress: TypeAlias = Annotated[SagaStatus, Meta(examples=["PendingRetry"])]
# The examples are of one delivery that is about to be retried.
FinalError: TypeAlias = Annotated[ErrorCode | None, Meta(description="of its last failure, if it had one")]
SecondChanceOf: TypeAlias = Annotated[
    Id | None, Meta(examples=[None], description="the dead letter that it is the second chance of")
]
BuriedAs: TypeAlias = Annotated[
    Id | None, Meta(examples=[None], description="the dead letter that it ended as")
]
Reason: TypeAlias = Annotated[str, Meta(examples=["retry_later"], description="a stable code, for programs")]
Secret: TypeAlias = Annotated[
    str, Meta(examples=["whsec_YW4gZXhhbXBsZSwgbm90IGEgc2VjcmV0IQ=="], description="shown this once")
]
Held: TypeAlias = Annotated[
    bool, Meta(examples=[False], description="waits for its subscription to be active and verified")
]
Cursor: TypeAlias = Annotated[Id | None, Meta(description="of the next page; null: this is the last")]


class EventAccepted(TypedDict):
    """Stored and committed."""

    id: Id
    event_type: EventType
    created_at: Time
    duplicate: Annotated[
        bool, Meta(examples=[False], description="the key was there already: this is the first event's id")
    ]


class BatchMember(TypedDict):
    """One event of a batch."""

    id: Id
    duplicate: Annotated[bool, Meta(examples=[False])]


class BatchAccepted(TypedDict):
    """All of a batch, in its order."""

    events: list[BatchMember]


class Event(TypedDict):
    """A fact; it never changes."""

    id: Id
    event_type: EventType
    created_at: Time
    idempotency_key: IdempotencyKey | None
    correlation_id: CorrelationId | None


class EventDelivery(TypedDict):
    """What became of an event at one subscription of its type."""

    subscription_id: Id
    callback_url: CallbackUrl
    status: Became
    reason: Reason
    explanation: Sentence
    saga_id: Id | None
    attempt_count: Count | None
    next_attempt_at: Time | None
    final_error_code: FinalError
    dead_letter_id: SecondChanceOf
    buried_as: BuriedAs
    held: Held


class EventWithDeliveries(Event):
    """An event, its payload, and what became of it everywhere."""

    payload: Payload
    more_deliveries: Annotated[
        bool, Meta(examples=[False], description="not all are here; the rest is in /v1/deliveries")
    ]
    deliveries: list[EventDelivery]


class EventPage(TypedDict):
    """Events, without their payloads."""

    items: list[Event]
    next_cursor: Cursor


class Health(TypedDict):
    """How an endpoint does."""

    consecutive_failures: Count
    failing_since: Time | None
    last_error_code: ErrorCode | None
    last_failure_at: Time | None
    last_recovery_at: Time | None


class Subscription(TypedDict):
    """Where events of a type are sent. Its secret and its headers are not shown."""

    id: Id
    event_type: EventType
    callback_url: CallbackUrl
    active: bool
    verified: bool
    max_attempts: OwnAttempts
    base_delay_seconds: OwnDelay
    description: Description | None
    created_at: Time
    updated_at: Time
    health: Health


class SubscriptionWithSecret(Subscription):
    """A subscription and what it signs with."""

    secret: Secret


class SubscriptionPage(TypedDict):
    """Subscriptions."""

    items: list[Subscription]
    next_cursor: Cursor


class RotatedSecret(TypedDict):
    """The new secret; the one before goes on signing beside it for a while."""

    secret: Secret
    previous_valid_until: Time


class Delivery(TypedDict):
    """A saga: one event on its way to one subscription."""

    id: Id
    event_id: Id
    subscription_id: Id
    status: Progress
    attempt_count: Count
    next_attempt_at: Time | None
    final_error_code: FinalError
    created_at: Time
    updated_at: Time
    dead_letter_id: SecondChanceOf
    held: Held


class Attempt(TypedDict):
    """One request, or one about to be made."""

    id: Id
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    status: AttemptStatus
    attempt_at: Time
    created_at: Time
    finished_at: Time | None
    response_status: Annotated[int, Meta(examples=[503])] | None
    error_code: ErrorCode | None
    duration_ms: Annotated[int, Meta(ge=0, examples=[118])] | None
    retry_after_seconds: float | None
    response_excerpt: Annotated[
        Annotated[str, Meta(examples=["Service Unavailable"])] | None,
        Meta(description="the first 4096 bytes of the answer, as the endpoint wrote them: do not trust them"),
    ]
    worker_id: Annotated[str, Meta(examples=["host:4711:9f8e7d6c"])] | None
    lease_until: Time | None
    lease_resets: Count
    result_applied_at: Time | None


class DeliveryWithAttempts(Delivery):
    """A saga, why it is where it is, and each attempt, oldest first."""

    reason: Reason
    explanation: Sentence
    buried_as: BuriedAs
    attempts: list[Attempt]


class DeliveryPage(TypedDict):
    """Deliveries."""

    items: list[Delivery]
    next_cursor: Cursor


class DeadLetter(TypedDict):
    """A delivery that failed for good."""

    id: Id
    saga_id: Id
    event_id: Id
    subscription_id: Id
    final_error_code: ErrorCode
    failed_at: Time
    requeued_saga_id: Annotated[Id | None, Meta(description="the delivery that it was requeued as")]


class DeadLetterWithPayload(DeadLetter):
    """A dead letter and the payload as it was."""

    event_type: EventType
    payload_snapshot: Payload


class DeadLetterPage(TypedDict):
    """Dead letters, without their payloads."""

    items: list[DeadLetter]
    next_cursor: Cursor


class Requeued(TypedDict):
    """The delivery that a dead letter has become."""

    saga_id: Id


class RequeuedMany(TypedDict):
    """What a bulk requeue did, or would do."""

    matched: Count
    requeued: Count
    skipped: Annotated[int, Meta(ge=0, examples=[0], description="requeued before, or held")]
    last_id: NotRequired[
        Annotated[Id | None, Meta(description="with a limit: the after_id to go on with; null at the end")]
    ]
    failed_before: NotRequired[
        Annotated[Time, Meta(description="with a limit: to go on with, so that what fails again is left out")]
    ]
