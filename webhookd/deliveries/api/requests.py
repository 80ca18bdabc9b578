"""Request types: bodies and queries, field by field. Unknown fields are rejected."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import MAX_BATCH_EVENTS, MAX_ID, MAX_REQUEUE_LIMIT
from webhookd.core.states import SagaStatus
from webhookd.deliveries.dead_letters import Filter
from webhookd.http.fields import (
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


class PublishEvent(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events. The payload is stored byte for byte."""

    event_type: EventType
    payload: NewPayload
    idempotency_key: IdempotencyKey | None = None
    correlation_id: CorrelationId | None = None


class PublishBatch(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events/batch."""

    # The handler rejects larger batches, with a code of its own.
    events: Annotated[
        list[PublishEvent], Meta(min_length=1, extra_json_schema={"maxItems": MAX_BATCH_EVENTS})
    ]


class NewSubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions."""

    event_type: EventType
    callback_url: CallbackUrl
    max_attempts: OwnAttempts = None
    base_delay_seconds: OwnDelay = None
    headers: CustomHeaders = {}
    description: Description | None = None


class SubscriptionChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/subscriptions/{id}: changes the given fields; null removes an override."""

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
    def selection(self) -> Filter:
        return Filter(
            given(self.subscription_id),
            given(self.error_code),
            given(self.failed_after),
            given(self.failed_before),
        )


class RequeueFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Selects dead letters, with the filters of the list."""

    subscription_id: Id | None = None
    error_code: ErrorCode | None = None
    failed_after: Time | None = None
    failed_before: Time | None = None


class RequeueMany(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/dead-letters/requeue: all matches, or with a limit the next ones after an id."""

    filter: RequeueFilter = msgspec.field(default_factory=RequeueFilter)
    dry_run: bool = True
    limit: Annotated[int, Meta(ge=1, le=MAX_REQUEUE_LIMIT)] | None = None
    after_id: Annotated[int, Meta(ge=0, le=MAX_ID)] = 0
