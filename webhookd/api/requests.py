"""What may be asked: the bodies and queries, field by field. Unknown fields are refused."""

from datetime import datetime
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.api.bodies import MAX_ID
from webhookd.model.states import SagaStatus
from webhookd.store.dead_letters import Filter
from webhookd.store.reads import Page

Value = TypeVar("Value")

MAX_BATCH = 1000
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

# As the tables' checks say. \Z, for $ also matches before a line end.
EventType: TypeAlias = Annotated[str, Meta(max_length=100, pattern=r"^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*\Z")]
IdempotencyKey: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+\Z")
]
CorrelationId: TypeAlias = Annotated[
    str, Meta(max_length=255, pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?\Z")
]
Attempts: TypeAlias = Annotated[int, Meta(ge=1, le=1000)]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=31_536_000)]
Description: TypeAlias = Annotated[str, Meta(max_length=500, pattern=r"^[^\x00]*\Z")]
Id: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_ID)]
ErrorCode: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100)]
Time: TypeAlias = Annotated[datetime, Meta(tz=True)]


class NewEvent(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events. The payload's bytes are kept as they are."""

    event_type: EventType
    payload: msgspec.Raw
    idempotency_key: IdempotencyKey | None = None
    correlation_id: CorrelationId | None = None


class NewEvents(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events/batch."""

    events: Annotated[list[NewEvent], Meta(min_length=1)]


class NewSubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions."""

    event_type: EventType
    callback_url: str
    max_attempts: Attempts | None = None
    base_delay_seconds: Delay | None = None
    headers: dict[str, str] = {}
    description: Description | None = None


class SubscriptionChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/subscriptions/{id}: what is there is changed; null takes an override back."""

    active: bool | UnsetType = UNSET
    callback_url: str | UnsetType = UNSET
    max_attempts: Attempts | UnsetType | None = UNSET
    base_delay_seconds: Delay | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    description: Description | UnsetType | None = UNSET


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that says everything by its path."""


class Paged(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every list takes."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    cursor: Id | UnsetType = UNSET

    @property
    def page(self) -> Page:
        """One row more than asked for tells whether there is a next page."""
        return Page(self.limit + 1, given(self.cursor))


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
    """POST /v1/dead-letters/requeue."""

    filter: RequeueFilter = msgspec.field(default_factory=RequeueFilter)
    dry_run: bool = True


def given(value: Value | UnsetType) -> Value | None:
    """None for what was not given."""
    return None if isinstance(value, UnsetType) else value


def check_key(text: str) -> str:
    """An idempotency key from elsewhere than JSON; ValueError for what is none."""
    return msgspec.convert(text, IdempotencyKey)
