"""/v1/events: publishes events, responding after the commit, and shows them with their deliveries."""

from aiohttp import web

from webhookd.context import Context
from webhookd.core.limits import MAX_BATCH_EVENTS, RESERVED_EVENT_TYPE_PREFIX
from webhookd.deliveries import ingest, reads
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.api.deliveries import limits_of
from webhookd.deliveries.ingest import SINGLE_LOCK_TIMEOUT_SECONDS, GroupCommit
from webhookd.http.fields import KeyHeader
from webhookd.http.requests import (
    KEY_HEADER,
    agreed_key,
    check_depth,
    given,
    key_in_header,
    path_id,
    read_json,
    read_query,
)
from webhookd.http.responses import invalid, json_response, list_response, not_found, raw_json
from webhookd.http.routes import DatabaseResource, QueryRunner, route

ACCEPTED = 202


class Events(DatabaseResource):
    """The event routes."""

    def __init__(self, context: Context, database: QueryRunner, ingest: GroupCommit) -> None:
        super().__init__(context, database)
        self._ingest = ingest

    @route(
        "POST /v1/events",
        "ingest",
        "Publish an event",
        responses.EventAccepted,
        ACCEPTED,
        description="Responds after the commit. A repeated key with the same content returns the "
        "first event's id and `duplicate: true`; with different content it returns 409. Keys in "
        "header and body must be equal.",
        body=requests.PublishEvent,
        headers={KEY_HEADER: KeyHeader},
        own_problems=((409, "idempotency_conflict"), (422, "idempotency_key_mismatch")),
    )
    async def _publish(self, request: web.Request) -> web.Response:
        key = key_in_header(request)
        body = await read_json(request, requests.PublishEvent, self._max_bytes)
        event = _new_event(body)._replace(idempotency_key=agreed_key(key, body.idempotency_key))
        accepted = await self._ingest.publish(event)
        return json_response(
            responses.EventAccepted(
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
        responses.BatchAccepted,
        ACCEPTED,
        description=f"Stores up to {MAX_BATCH_EVENTS} events in one transaction: all or none. "
        "Each event has its own key.",
        body=requests.PublishBatch,
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
        body = await read_json(request, requests.PublishBatch, self._max_bytes, is_wide=True)
        if len(body.events) > MAX_BATCH_EVENTS:
            raise invalid(f"a batch has at most {MAX_BATCH_EVENTS} events", "batch_too_large")
        for event in body.events:
            check_depth(bytes(event.payload))
        batch = [_new_event(event) for event in body.events]
        accepted = await self._database.run(
            lambda connection: ingest.publish(
                connection, batch, lock_timeout_seconds=SINGLE_LOCK_TIMEOUT_SECONDS
            )
        )
        self._ingest.stored(accepted)
        members = [responses.BatchMember(id=event.id, duplicate=event.duplicate) for event in accepted]
        return json_response(responses.BatchAccepted(events=members), ACCEPTED)

    @route("GET /v1/events", "read", "List events", responses.EventPage, query=requests.EventsQuery)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.EventsQuery)
        rows = await self._database.run(
            lambda connection: reads.events(
                connection, query.page, given(query.event_type), given(query.idempotency_key)
            )
        )
        return list_response(rows, query.limit)

    @route(
        "GET /v1/events/{id:[0-9]+}",
        "read",
        "Get an event with its deliveries",
        responses.EventWithDeliveries,
        description="For every subscription to its type: whether the event was delivered, is waiting "
        "(until when and why), became a dead letter (with the error), or was not routed (and why).",
    )
    async def _get(self, request: web.Request) -> web.Response:
        event_id = path_id(request, "event")
        limits = limits_of(self._settings())
        found = await self._database.run(lambda connection: reads.event(connection, event_id, limits))
        if found is None:
            raise not_found("event", event_id)
        return json_response(found | {"payload": raw_json(found["payload"])})


def _new_event(body: requests.PublishEvent) -> ingest.NewEvent:
    if body.event_type.startswith(RESERVED_EVENT_TYPE_PREFIX):
        raise invalid(
            f"event_type must not start with {RESERVED_EVENT_TYPE_PREFIX}: reserved for the job queue"
        )
    return ingest.NewEvent(
        body.event_type, bytes(body.payload).decode(), body.idempotency_key, body.correlation_id
    )
