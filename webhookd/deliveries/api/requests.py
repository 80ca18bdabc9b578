"""What may be asked: the bodies and queries, field by field. Unknown fields are refused."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.states import SagaStatus
from webhookd.deliveries.dead_letters import Filter
from webhookd.http.fields import (
    MAX_ID,
    CallbackUrl,
    CorrelationId,
    CustomHeaders,
    Description,
    ErrorCode,
    EventType,
    Id,
    IdempotencyKey,
    NewPayload,
    OwnAttempts,
    OwnDelay,
    Time,
)
from webhookd.http.requests import Paged, given

MAX_BATCH = 1000
MAX_REQUEUE = 10_000


class NewEvent(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events. The payload's bytes are kept as they are."""

    event_type: EventType
    payload: NewPayload
    idempotency_key: IdempotencyKey | None = None
    correlation_id: CorrelationId | None = None


class NewEvents(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events/batch."""

    # More has a code of its own.
    events: Annotated[list[NewEvent], Meta(min_length=1, extra_json_schema={"maxItems": MAX_BATCH})]


class NewSubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions."""

    event_type: EventType
    callback_url: CallbackUrl
    max_attempts: OwnAttempts = None
    base_delay_seconds: OwnDelay = None
    headers: CustomHeaders = {}
    description: Description | None = None


class SubscriptionChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/subscriptions/{id}: what is there is changed; null takes an override back."""

    active: bool | UnsetType = UNSET
    callback_url: CallbackUrl | UnsetType = UNSET
    max_attempts: OwnAttempts | UnsetType = UNSET
    base_delay_seconds: OwnDelay | UnsetType = UNSET
    headers: CustomHeaders | UnsetType = UNSET
    description: Description | UnsetType | None = UNSET


class EventsQuery(Paged, kw_only=True):
    """GET /v1/events."""

    event_type: EventType | UnsetType = UNSET
    idempotency_key: IdempotencyKey | UnsetType = UNSET


class SubscriptionsQuery(Paged, kw_only=True):
    """GET /v1/subscriptions."""

    event_type: EventType | UnsetType = UNSET
    active: bool | UnsetType = UNSET
    verified: bool | UnsetType = UNSET


class DeliveriesQuery(Paged, kw_only=True):
    """GET /v1/deliveries."""

    status: SagaStatus | UnsetType = UNSET
    subscription_id: Id | UnsetType = UNSET
    event_id: Id | UnsetType = UNSET


class DeadLettersQuery(Paged, kw_only=True):
    """GET /v1/dead-letters."""

    subscription_id: Id | UnsetType = UNSET
    error_code: ErrorCode | UnsetType = UNSET
    failed_after: Time | UnsetType = UNSET
    failed_before: Time | UnsetType = UNSET

    @property
    def which(self) -> Filter:
        return Filter(
            given(self.subscription_id),
            given(self.error_code),
            given(self.failed_after),
            given(self.failed_before),
        )


class RequeueFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Which dead letters: as the list's."""

    subscription_id: Id | None = None
    error_code: ErrorCode | None = None
    failed_after: Time | None = None
    failed_before: Time | None = None


class RequeueMany(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/dead-letters/requeue: all that match, or with a limit the first so many after an id."""

    filter: RequeueFilter = msgspec.field(default_factory=RequeueFilter)
    dry_run: bool = True
    limit: Annotated[int, Meta(ge=1, le=MAX_REQUEUE)] | None = None
    after_id: Annotated[int, Meta(ge=0, le=MAX_ID)] = 0
