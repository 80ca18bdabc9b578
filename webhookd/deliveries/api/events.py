"""/v1/events and /v1/deliveries: publishes events, and shows events and deliveries (sagas).

A response to a publisher is sent after the commit. Response types are typed dictionaries, because database
rows are dictionaries already and need no conversion. Fields may be added to them, but never renamed or
removed.
"""

from typing import Annotated, Literal, TypeAlias, TypedDict

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.context import Context
from webhookd.core.limits import MAX_BATCH_EVENTS, MAX_RESPONSE_EXCERPT_BYTES, RESERVED_EVENT_TYPE_PREFIX
from webhookd.core.settings import Settings
from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.db.paging import Row
from webhookd.deliveries import ingest, reads
from webhookd.deliveries.explain import Limits
from webhookd.deliveries.ingest import SINGLE_LOCK_TIMEOUT_SECONDS, GroupCommit
from webhookd.http import fields
from webhookd.http.requests import (
    KEY_HEADER,
    Paged,
    agreed_key,
    check_depth,
    key_in_header,
    path_id,
    read_json,
    read_query,
)
from webhookd.http.responses import invalid, json_response, list_response, raw_json
from webhookd.http.routes import DatabaseResource, QueryRunner, route

ACCEPTED = 202

# A SagaStatus or not_routed. msgspec cannot combine the enum and a literal.
EventDeliveryStatus: TypeAlias = Annotated[
    Literal["Pending", "InProgress", "PendingRetry", "Completed", "DeadLettered", "not_routed"],
    Meta(examples=["PendingRetry"]),
]
DeliveryStatus: TypeAlias = Annotated[SagaStatus, Meta(examples=["PendingRetry"])]
# The examples show a delivery that waits for a retry.
FinalError: TypeAlias = Annotated[
    fields.ErrorCode | None,
    Meta(description="error code of the last failed attempt, also of a delivery that succeeded later"),
]
NextAttemptAt: TypeAlias = Annotated[
    fields.Time | None,
    Meta(description="when the next attempt is due; in the past once the attempt was started"),
]
RequeuedFrom: TypeAlias = Annotated[
    fields.Id | None,
    Meta(examples=[None], description="the dead letter that this delivery was requeued from"),
]
BuriedAs: TypeAlias = Annotated[
    fields.Id | None, Meta(examples=[None], description="the dead letter that this delivery became")
]
Reason: TypeAlias = Annotated[
    str, Meta(examples=["retry_later"], description="the reason for the status: a stable code, for programs")
]
Held: TypeAlias = Annotated[
    bool,
    Meta(
        examples=[False],
        description="its subscription is paused or not verified, and none of its requests is in flight",
    ),
]


class PublishEvent(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events. The payload is stored byte for byte."""

    event_type: fields.EventType
    payload: fields.NewPayload
    idempotency_key: fields.IdempotencyKey | None = None
    correlation_id: fields.CorrelationId | None = None


class PublishBatch(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events/batch."""

    # The handler rejects larger batches, with a code of its own.
    events: Annotated[
        list[PublishEvent], Meta(min_length=1, extra_json_schema={"maxItems": MAX_BATCH_EVENTS})
    ]


class EventsQuery(Paged, kw_only=True):
    """GET /v1/events."""

    event_type: fields.EventType | UnsetType = UNSET
    idempotency_key: fields.IdempotencyKey | UnsetType = UNSET


class DeliveriesQuery(Paged, kw_only=True):
    """GET /v1/deliveries."""

    status: SagaStatus | UnsetType = UNSET
    subscription_id: fields.Id | UnsetType = UNSET
    event_id: fields.Id | UnsetType = UNSET


class EventAccepted(TypedDict):
    """An event that was stored and committed."""

    id: fields.Id
    event_type: fields.EventType
    created_at: fields.Time
    duplicate: Annotated[
        bool, Meta(examples=[False], description="an event with this key exists; `id` is its id")
    ]


class BatchMember(TypedDict):
    """An event of a batch."""

    id: fields.Id
    duplicate: Annotated[bool, Meta(examples=[False])]


class BatchAccepted(TypedDict):
    """The events of a batch, in the order of the request."""

    events: list[BatchMember]


class Event(TypedDict):
    """A published event. It never changes."""

    id: fields.Id
    event_type: fields.EventType
    created_at: fields.Time
    idempotency_key: fields.IdempotencyKey | None
    correlation_id: fields.CorrelationId | None


class EventDelivery(TypedDict):
    """The delivery of an event to one subscription, or why there is none."""

    subscription_id: fields.Id
    callback_url: fields.CallbackUrl
    status: EventDeliveryStatus
    reason: Reason
    explanation: fields.Sentence
    saga_id: fields.Id | None
    attempt_count: fields.Count | None
    next_attempt_at: NextAttemptAt
    final_error_code: FinalError
    dead_letter_id: RequeuedFrom
    buried_as: BuriedAs
    held: Held


class EventWithDeliveries(Event):
    """An event with its payload and its delivery to each subscription."""

    payload: fields.Payload
    more_deliveries: Annotated[
        bool, Meta(examples=[False], description="the list is cut off; /v1/deliveries has all")
    ]
    deliveries: list[EventDelivery]


class EventPage(TypedDict):
    """A page of events, without payloads."""

    items: list[Event]
    next_cursor: fields.Cursor


class Delivery(TypedDict):
    """The delivery of an event to a subscription (a saga)."""

    id: fields.Id
    event_id: fields.Id
    subscription_id: fields.Id
    status: DeliveryStatus
    attempt_count: fields.Count
    next_attempt_at: NextAttemptAt
    final_error_code: FinalError
    created_at: fields.Time
    updated_at: fields.Time
    dead_letter_id: RequeuedFrom
    held: Held


class Attempt(TypedDict):
    """An attempt: a request that was sent, or waits to be sent."""

    id: fields.Id
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    status: AttemptStatus
    attempt_at: Annotated[fields.Time, Meta(description="when it was due; not when it was sent")]
    created_at: fields.Time
    finished_at: fields.Time | None
    response_status: Annotated[int, Meta(examples=[503])] | None
    error_code: fields.ErrorCode | None
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
    lease_until: fields.Time | None
    lease_resets: fields.Count
    result_applied_at: fields.Time | None


class DeliveryWithAttempts(Delivery):
    """A delivery with the reason for its status and its attempts, oldest first."""

    reason: Reason
    explanation: fields.Sentence
    buried_as: BuriedAs
    attempts: list[Attempt]


class DeliveryPage(TypedDict):
    """A page of deliveries."""

    items: list[Delivery]
    next_cursor: fields.Cursor


class Events(DatabaseResource):
    """The event routes."""

    def __init__(self, context: Context, database: QueryRunner, ingest: GroupCommit) -> None:
        super().__init__(context, database)
        self._ingest = ingest

    @route(
        "POST /v1/events",
        "ingest",
        "Publish an event",
        EventAccepted,
        ACCEPTED,
        description="Responds after the commit. A repeated key with the same content returns the "
        "first event's id and `duplicate: true`; with different content it returns 409. Keys in "
        "header and body must be equal.",
        body=PublishEvent,
        headers={KEY_HEADER: fields.KeyHeader},
        own_problems=((409, "idempotency_conflict"), (422, "idempotency_key_mismatch")),
    )
    async def _publish(self, request: web.Request) -> web.Response:
        key = key_in_header(request)
        body = await read_json(request, PublishEvent, self._max_bytes)
        event = _new_event(body)._replace(idempotency_key=agreed_key(key, body.idempotency_key))
        accepted = await self._ingest.publish(event)
        return json_response(
            EventAccepted(
                id=accepted.id,
                event_type=event.event_type,
                created_at=accepted.created_at,
                duplicate=accepted.duplicate,
            ),
            ACCEPTED,
        )

    @route(
        "POST /v1/events/batch",
        "ingest",
        "Publish a batch of events",
        BatchAccepted,
        ACCEPTED,
        description=f"Stores up to {MAX_BATCH_EVENTS} events in one transaction: all or none. "
        "Each event has its own key.",
        body=PublishBatch,
        own_problems=(
            (409, "idempotency_conflict"),
            (422, "batch_too_large"),
            (422, "idempotency_key_mismatch"),
        ),
    )
    async def _publish_batch(self, request: web.Request) -> web.Response:
        if KEY_HEADER in request.headers:
            raise invalid(
                f"a batch takes no {KEY_HEADER} header; give each event an idempotency_key",
                "idempotency_key_mismatch",
            )
        body = await read_json(request, PublishBatch, self._max_bytes, is_wide=True)
        if len(body.events) > MAX_BATCH_EVENTS:
            raise invalid(f"a batch has at most {MAX_BATCH_EVENTS} events", "batch_too_large")
        for event in body.events:
            check_depth(bytes(event.payload))
        batch = [_new_event(event) for event in body.events]
        accepted = await self._database.run(
            ingest.publish, batch, lock_timeout_seconds=SINGLE_LOCK_TIMEOUT_SECONDS
        )
        self._ingest.stored(accepted)
        members = [BatchMember(id=event.id, duplicate=event.duplicate) for event in accepted]
        return json_response(BatchAccepted(events=members), ACCEPTED)

    @route("GET /v1/events", "read", "List events", EventPage, query=EventsQuery)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, EventsQuery)
        rows = await self._database.run(reads.events, query.page, **query.filters)
        return list_response(rows, query.limit)

    @route(
        "GET /v1/events/{id:[0-9]+}",
        "read",
        "Get an event with its deliveries",
        EventWithDeliveries,
        description="For every subscription to its type: whether the event was delivered, is waiting "
        "(until when and why), became a dead letter (with the error), or was not routed (and why).",
    )
    async def _get(self, request: web.Request) -> web.Response:
        limits = _limits(self._settings())
        found = await self._database.run(reads.event, path_id(request, "event"), limits)
        return json_response(found | {"payload": raw_json(found["payload"])})


def _new_event(body: PublishEvent) -> ingest.NewEvent:
    if body.event_type.startswith(RESERVED_EVENT_TYPE_PREFIX):
        raise invalid(
            f"event_type must not start with {RESERVED_EVENT_TYPE_PREFIX}: reserved for the job queue"
        )
    return ingest.NewEvent(
        body.event_type, bytes(body.payload).decode(), body.idempotency_key, body.correlation_id
    )


class Deliveries(DatabaseResource):
    """The delivery routes, which only read."""

    @route("GET /v1/deliveries", "read", "List deliveries", DeliveryPage, query=DeliveriesQuery)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, DeliveriesQuery)
        rows = await self._database.run(reads.deliveries, query.page, **query.filters)
        return list_response(rows, query.limit)

    @route("GET /v1/deliveries/{id:[0-9]+}", "read", "Get a delivery with its attempts", DeliveryWithAttempts)
    async def _get(self, request: web.Request) -> web.Response:
        limits = _limits(self._settings())
        found = await self._database.run(reads.delivery, path_id(request, "delivery"), limits)
        return json_response(found | {"attempts": [_attempt(attempt) for attempt in found["attempts"]]})


def _limits(settings: Settings) -> Limits:
    return Limits(settings.orchestration.subscription_window, settings.retry.max_attempts)


def _attempt(row: Row) -> Row:
    """Show the endpoint's response, which is stored as bytes, as text."""
    excerpt = row["response_excerpt"]
    return row | {"response_excerpt": None if excerpt is None else excerpt.decode("utf-8", "replace")}
