"""Response types, field by field. /openapi.json is generated from them.

They are typed dictionaries, because database rows are dictionaries already and need no conversion. Fields may
be added to a response, but never renamed or removed.
"""

from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from webhookd.core.limits import MAX_RESPONSE_EXCERPT_BYTES
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

# A SagaStatus or not_routed. msgspec cannot combine the enum and a literal.
EventDeliveryStatus: TypeAlias = Annotated[
    Literal["Pending", "InProgress", "PendingRetry", "Completed", "DeadLettered", "not_routed"],
    Meta(examples=["PendingRetry"]),
]
DeliveryStatus: TypeAlias = Annotated[SagaStatus, Meta(examples=["PendingRetry"])]
# The examples show a delivery that waits for a retry.
FinalError: TypeAlias = Annotated[
    ErrorCode | None,
    Meta(description="error code of the last failed attempt, also of a delivery that succeeded later"),
]
NextAttemptAt: TypeAlias = Annotated[
    Time | None, Meta(description="when the next attempt is due; in the past once the attempt was started")
]
RequeuedFrom: TypeAlias = Annotated[
    Id | None, Meta(examples=[None], description="the dead letter that this delivery was requeued from")
]
BuriedAs: TypeAlias = Annotated[
    Id | None, Meta(examples=[None], description="the dead letter that this delivery became")
]
Reason: TypeAlias = Annotated[
    str, Meta(examples=["retry_later"], description="the reason for the status: a stable code, for programs")
]
Secret: TypeAlias = Annotated[
    str,
    Meta(examples=["whsec_YW4gZXhhbXBsZSwgbm90IGEgc2VjcmV0IQ=="], description="shown only in this response"),
]
Held: TypeAlias = Annotated[
    bool,
    Meta(
        examples=[False],
        description="its subscription is paused or not verified, and none of its requests is in flight",
    ),
]
Cursor: TypeAlias = Annotated[
    Id | None, Meta(description="cursor of the next page; null: this is the last page")
]


class EventAccepted(TypedDict):
    """An event that was stored and committed."""

    id: Id
    event_type: EventType
    created_at: Time
    duplicate: Annotated[
        bool, Meta(examples=[False], description="an event with this key exists; `id` is its id")
    ]


class BatchMember(TypedDict):
    """An event of a batch."""

    id: Id
    duplicate: Annotated[bool, Meta(examples=[False])]


class BatchAccepted(TypedDict):
    """The events of a batch, in the order of the request."""

    events: list[BatchMember]


class Event(TypedDict):
    """A published event. It never changes."""

    id: Id
    event_type: EventType
    created_at: Time
    idempotency_key: IdempotencyKey | None
    correlation_id: CorrelationId | None


class EventDelivery(TypedDict):
    """The delivery of an event to one subscription, or why there is none."""

    subscription_id: Id
    callback_url: CallbackUrl
    status: EventDeliveryStatus
    reason: Reason
    explanation: Sentence
    saga_id: Id | None
    attempt_count: Count | None
    next_attempt_at: NextAttemptAt
    final_error_code: FinalError
    dead_letter_id: RequeuedFrom
    buried_as: BuriedAs
    held: Held


class EventWithDeliveries(Event):
    """An event with its payload and its delivery to each subscription."""

    payload: Payload
    more_deliveries: Annotated[
        bool, Meta(examples=[False], description="the list is cut off; /v1/deliveries has all")
    ]
    deliveries: list[EventDelivery]


class EventPage(TypedDict):
    """A page of events, without payloads."""

    items: list[Event]
    next_cursor: Cursor


class EndpointHealth(TypedDict):
    """The recent failures of an endpoint."""

    consecutive_failures: Count
    failing_since: Time | None
    last_error_code: ErrorCode | None
    last_failure_at: Time | None
    last_recovery_at: Time | None


class Subscription(TypedDict):
    """A subscription of an endpoint to an event type. Its secret and headers are never shown."""

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
    health: EndpointHealth


class SubscriptionWithSecret(Subscription):
    """A subscription with its signing secret."""

    secret: Secret


class SubscriptionPage(TypedDict):
    """A page of subscriptions."""

    items: list[Subscription]
    next_cursor: Cursor


class RotatedSecret(TypedDict):
    """The new secret. The previous one also signs until `previous_valid_until`."""

    secret: Secret
    previous_valid_until: Time


class Delivery(TypedDict):
    """The delivery of an event to a subscription (a saga)."""

    id: Id
    event_id: Id
    subscription_id: Id
    status: DeliveryStatus
    attempt_count: Count
    next_attempt_at: NextAttemptAt
    final_error_code: FinalError
    created_at: Time
    updated_at: Time
    dead_letter_id: RequeuedFrom
    held: Held


class Attempt(TypedDict):
    """An attempt: a request that was sent, or waits to be sent."""

    id: Id
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    status: AttemptStatus
    attempt_at: Annotated[Time, Meta(description="when it was due; not when it was sent")]
    created_at: Time
    finished_at: Time | None
    response_status: Annotated[int, Meta(examples=[503])] | None
    error_code: ErrorCode | None
    duration_ms: Annotated[int, Meta(ge=0, examples=[118])] | None
    retry_after_seconds: float | None
    response_excerpt: Annotated[
        Annotated[str, Meta(examples=["Service Unavailable"])] | None,
        Meta(
            description=f"the first {MAX_RESPONSE_EXCERPT_BYTES} bytes of the response, as the endpoint sent "
            "them: do not trust them"
        ),
    ]
    worker_id: Annotated[str, Meta(examples=["host:4711:9f8e7d6c"])] | None
    lease_until: Time | None
    lease_resets: Count
    result_applied_at: Time | None


class DeliveryWithAttempts(Delivery):
    """A delivery with the reason for its status and its attempts, oldest first."""

    reason: Reason
    explanation: Sentence
    buried_as: BuriedAs
    attempts: list[Attempt]


class DeliveryPage(TypedDict):
    """A page of deliveries."""

    items: list[Delivery]
    next_cursor: Cursor


class DeadLetter(TypedDict):
    """A delivery that failed and is not retried any more."""

    id: Id
    saga_id: Id
    event_id: Id
    subscription_id: Id
    final_error_code: ErrorCode
    failed_at: Time
    requeued_saga_id: Annotated[Id | None, Meta(description="the delivery that it was requeued as, if any")]


class DeadLetterWithPayload(DeadLetter):
    """A dead letter with the payload that was not delivered."""

    event_type: EventType
    payload_snapshot: Payload


class DeadLetterPage(TypedDict):
    """A page of dead letters, without payloads."""

    items: list[DeadLetter]
    next_cursor: Cursor


class RequeuedDeadLetter(TypedDict):
    """The new delivery of a requeued dead letter."""

    saga_id: Id


class RequeueResult(TypedDict):
    """The result of a bulk requeue, or of its dry run."""

    matched: Count
    requeued: Count
    skipped: Annotated[
        int,
        Meta(
            ge=0, examples=[0], description="requeued before, or its subscription is paused or not verified"
        ),
    ]
    last_id: NotRequired[
        Annotated[Id | None, Meta(description="with a limit: after_id of the next request; null at the end")]
    ]
    failed_before: NotRequired[
        Annotated[
            Time,
            Meta(description="with a limit: failed_before of the next request, to leave out new failures"),
        ]
    ]
