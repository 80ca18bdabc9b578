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
from webhookd.core.limits import (
    MAX_BATCH_EVENTS,
    MAX_ID,
    MAX_RESPONSE_EXCERPT_BYTES,
    RESERVED_EVENT_TYPE_PREFIX,
)
from webhookd.core.settings import Settings
from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.db.paging import Row
from webhookd.deliveries import delivery_lists, ingest, reads, sagas
from webhookd.deliveries.explain import Limits
from webhookd.deliveries.ingest import SINGLE_LOCK_TIMEOUT_SECONDS, GroupCommit
from webhookd.http import fields
from webhookd.http.auth import tenant_of
from webhookd.http.requests import (
    KEY_HEADER,
    Nothing,
    Paged,
    agreed_key,
    check_depth,
    key_in_header,
    own_filters,
    path_id,
    read_json,
    read_optional_json,
    read_query,
)
from webhookd.http.responses import Problem, invalid, json_response, list_response, raw_json
from webhookd.http.routes import DatabaseResource, QueryRunner, route
from webhookd.wakeups import Work

ACCEPTED = 202
CREATED = 201
_DELIVERY_PATH = "/v1/deliveries/{id:[0-9]+}"

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
ResentFrom: TypeAlias = Annotated[
    fields.Id | None, Meta(examples=[None], description="the finished delivery that this one repeats")
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
        description="its subscription is paused, disabled, deleted or not verified, or its tenant is not "
        "active, and none of its requests is in flight",
    ),
]


HeldBecause: TypeAlias = Annotated[
    fields.HoldReason | None, Meta(examples=[None], description="why it is held; null: it is not")
]
# In a list by event type it can be negative: the id of an event.
DeliveryPosition: TypeAlias = Annotated[int, Meta(ge=-MAX_ID, le=MAX_ID, examples=[42])]


class PublishEvent(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events. The payload is stored byte for byte."""

    event_type: fields.EventType
    payload: fields.NewPayload
    idempotency_key: fields.IdempotencyKey | None = None
    correlation_id: fields.CorrelationId | None = None
    tenant: fields.Tenant | None = None
    labels: fields.Labels = {}


class PublishBatch(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/events/batch."""

    # The handler rejects larger batches, with a code of its own.
    events: Annotated[
        list[PublishEvent], Meta(min_length=1, extra_json_schema={"maxItems": MAX_BATCH_EVENTS})
    ]


class EventsQuery(Paged, kw_only=True):
    """GET /v1/events."""

    tenant: fields.Tenant | UnsetType = UNSET
    event_type: fields.EventType | UnsetType = UNSET
    idempotency_key: fields.IdempotencyKey | UnsetType = UNSET
    correlation_id: fields.CorrelationId | UnsetType = UNSET
    label: (
        Annotated[fields.Labels, Meta(description="written as `label.<name>=<value>`; can be repeated")]
        | UnsetType
    ) = UNSET
    created_after: fields.Time | UnsetType = UNSET
    created_before: fields.Time | UnsetType = UNSET


class DeliveriesQuery(Paged, kw_only=True):
    """GET /v1/deliveries."""

    cursor: Annotated[DeliveryPosition, Meta(description="next_cursor of the previous page")] | UnsetType = (
        UNSET
    )
    tenant: fields.Tenant | UnsetType = UNSET
    status: SagaStatus | UnsetType = UNSET
    subscription_id: fields.Id | UnsetType = UNSET
    event_id: fields.Id | UnsetType = UNSET
    event_type: fields.EventType | UnsetType = UNSET
    error_code: fields.ErrorCode | UnsetType = UNSET
    created_after: fields.Time | UnsetType = UNSET
    created_before: fields.Time | UnsetType = UNSET


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
    tenant: fields.TenantOrNone
    labels: fields.Labels


class EventDelivery(TypedDict):
    """The delivery of an event to one subscription, or why there is none."""

    subscription_id: fields.Id
    callback_url: Annotated[
        fields.CallbackUrl,
        Meta(
            description="of a finished delivery: the address that its last attempt was sent to; otherwise "
            "the present address of the subscription"
        ),
    ]
    status: EventDeliveryStatus
    reason: Reason
    explanation: fields.Sentence
    saga_id: fields.Id | None
    attempt_count: fields.Count | None
    next_attempt_at: NextAttemptAt
    final_error_code: FinalError
    dead_letter_id: RequeuedFrom
    resent_from: ResentFrom
    buried_as: BuriedAs
    held: Held


class EventWithDeliveries(Event):
    """An event with its payload and its delivery to each subscription."""

    payload: fields.Payload
    payload_removed_at: Annotated[
        fields.Time | None, Meta(description="when retention replaced the payload by null; null: never")
    ]
    more_deliveries: Annotated[
        bool, Meta(examples=[False], description="the list is cut off; /v1/deliveries has all")
    ]
    deliveries: list[EventDelivery]
    no_subscription: Annotated[
        Annotated[str, Meta(examples=["Tenant acme has no subscription to order.created."])] | None,
        Meta(
            examples=[None],
            description="why `deliveries` is empty, in words. A token that is bound to a tenant learns "
            "nothing about other tenants",
        ),
    ]


class EventPage(TypedDict):
    """A page of events, without payloads."""

    items: list[Event]
    next_cursor: fields.Cursor


class Delivery(TypedDict):
    """The delivery of an event to a subscription (a saga)."""

    id: fields.Id
    event_id: fields.Id
    event_type: fields.EventType
    subscription_id: fields.Id
    status: DeliveryStatus
    attempt_count: fields.Count
    next_attempt_at: NextAttemptAt
    final_error_code: FinalError
    created_at: fields.Time
    updated_at: fields.Time
    dead_letter_id: RequeuedFrom
    resent_from: ResentFrom
    held: Held
    held_because: HeldBecause


class Attempt(TypedDict):
    """An attempt: a request that was sent, or waits to be sent."""

    id: fields.Id
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    status: AttemptStatus
    attempt_at: Annotated[fields.Time, Meta(description="when it was due; not when it was sent")]
    created_at: fields.Time
    callback_url: Annotated[
        fields.CallbackUrl | None,
        Meta(
            description="the address that it was sent to, also if the subscription was moved since; null: "
            "not sent yet. If the move was at the moment of the request, it can be the other address"
        ),
    ]
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
    requeued_as: Annotated[
        fields.Id | None,
        Meta(examples=[None], description="the delivery that its dead letter was requeued as"),
    ]
    attempts: list[Attempt]


class ResentDelivery(TypedDict):
    """The new delivery."""

    saga_id: fields.Id


class DeliveryPage(TypedDict):
    """A page of deliveries."""

    items: list[Delivery]
    next_cursor: Annotated[
        DeliveryPosition | None, Meta(description="cursor of the next page; null: this is the last page")
    ]


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
        for_tenants=True,
    )
    async def _publish(self, request: web.Request) -> web.Response:
        key = key_in_header(request)
        body = await read_json(request, PublishEvent, self._max_bytes)
        event = _new_event(body, tenant_of(request))
        event = event._replace(idempotency_key=agreed_key(key, body.idempotency_key))
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
        for_tenants=True,
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
        tenant = tenant_of(request)
        batch = [_new_event(event, tenant) for event in body.events]
        accepted = await self._database.run(
            ingest.publish, batch, lock_timeout_seconds=SINGLE_LOCK_TIMEOUT_SECONDS
        )
        self._ingest.stored(accepted)
        members = [BatchMember(id=event.id, duplicate=event.duplicate) for event in accepted]
        return json_response(BatchAccepted(events=members), ACCEPTED)

    @route("GET /v1/events", "read", "List events", EventPage, query=EventsQuery, for_tenants=True)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, EventsQuery)
        selection = reads.EventFilter(**own_filters(request, query))
        rows = await self._database.run(reads.events, query.page, selection)
        return list_response(rows, query.limit)

    @route(
        "GET /v1/events/{id:[0-9]+}",
        "read",
        "Get an event with its deliveries",
        EventWithDeliveries,
        description="For every subscription to its type: whether the event was delivered, is waiting "
        "(until when and why), became a dead letter (with the error), or was not routed (and why).",
        for_tenants=True,
    )
    async def _get(self, request: web.Request) -> web.Response:
        limits = _limits(self._settings())
        event_id, tenant = path_id(request, "event"), tenant_of(request)
        found = await self._database.run(reads.event, event_id, limits, tenant)
        return json_response(found | {"payload": raw_json(found["payload"])})


def _new_event(body: PublishEvent, tenant: str | None) -> ingest.NewEvent:
    """Return the event to store. `tenant` is the one that the token is bound to."""
    if tenant is not None and body.tenant not in (None, tenant):
        raise Problem(403, "forbidden", f"this token is bound to tenant {tenant}")
    if body.event_type.startswith(RESERVED_EVENT_TYPE_PREFIX):
        raise invalid(
            f"event_type must not start with {RESERVED_EVENT_TYPE_PREFIX}: reserved for the job queue"
        )
    return ingest.NewEvent(
        body.event_type,
        bytes(body.payload).decode(),
        body.idempotency_key,
        body.correlation_id,
        body.tenant or tenant or "",
        msgspec.json.encode(body.labels).decode() if body.labels else None,
    )


class Deliveries(DatabaseResource):
    """The delivery routes."""

    @route(
        "GET /v1/deliveries",
        "read",
        "List deliveries",
        DeliveryPage,
        description="Newest first. With `event_type` and without `created_after`, the list follows the "
        "events: newest event first, and its deliveries newest first. A page with `event_type` can have "
        "fewer rows than `limit`, or none, although more follow: continue until `next_cursor` is null.",
        query=DeliveriesQuery,
        for_tenants=True,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, DeliveriesQuery)
        selection = delivery_lists.DeliveryFilter(**own_filters(request, query))
        found = await self._database.run(delivery_lists.deliveries, query.page, selection)
        return list_response(found.rows, query.limit, cut_at=found.cut_at)

    @route(
        f"GET {_DELIVERY_PATH}",
        "read",
        "Get a delivery with its attempts",
        DeliveryWithAttempts,
        for_tenants=True,
    )
    async def _get(self, request: web.Request) -> web.Response:
        return await self._shown(path_id(request, "delivery"), tenant_of(request))

    @route(
        f"POST {_DELIVERY_PATH}/resend",
        "operate",
        "Send a finished delivery again",
        ResentDelivery,
        CREATED,
        description="Creates a new delivery of the same event to the same subscription. For a dead letter "
        "this is the requeue. While a resend is not finished, another request returns 409 with it.",
        body=Nothing,
        body_optional=True,
        own_problems=(
            (409, "already_resent"),
            (409, "wrong_status"),
            (409, "subscription_held"),
            (409, "payload_removed"),
        ),
        for_tenants=True,
    )
    async def _resend(self, request: web.Request) -> web.Response:
        saga_id = path_id(request, "delivery")
        await read_optional_json(request, Nothing, self._max_bytes)
        resent = await self._database.run(sagas.resend, saga_id, tenant_of(request))
        if not resent.created:
            detail = f"delivery {saga_id} is already resent as delivery {resent.saga_id}"
            raise Problem(409, "already_resent", detail, saga_id=resent.saga_id)
        self._wakeups.wake(Work.SAGAS, [resent.subscription_id], notify=True)
        return json_response(ResentDelivery(saga_id=resent.saga_id), CREATED)

    @route(
        f"POST {_DELIVERY_PATH}/retry",
        "operate",
        "Retry a waiting delivery now",
        DeliveryWithAttempts,
        description="Makes the next attempt of a delivery that has failed so far due now.",
        body=Nothing,
        body_optional=True,
        own_problems=((409, "wrong_status"),),
        for_tenants=True,
    )
    async def _retry(self, request: web.Request) -> web.Response:
        saga_id, tenant = path_id(request, "delivery"), tenant_of(request)
        await read_optional_json(request, Nothing, self._max_bytes)
        subscription_id = await self._database.run(sagas.retry, saga_id, tenant)
        self._wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
        return await self._shown(saga_id, tenant)

    async def _shown(self, saga_id: int, tenant: str | None) -> web.Response:
        found = await self._database.run(reads.delivery, saga_id, _limits(self._settings()), tenant)
        return json_response(found | {"attempts": [_attempt(attempt) for attempt in found["attempts"]]})


def _limits(settings: Settings) -> Limits:
    return Limits(settings.orchestration.subscription_window, settings.retry.max_attempts)


def _attempt(row: Row) -> Row:
    """Show the endpoint's response, which is stored as bytes, as text."""
    excerpt = row["response_excerpt"]
    return row | {"response_excerpt": None if excerpt is None else excerpt.decode("utf-8", "replace")}
