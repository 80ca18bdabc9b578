"""/v1/events: events in, answered after their commit; and what became of them."""

from aiohttp import web

from webhookd.context import Context
from webhookd.deliveries import ingest, reads
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.api.deliveries import limits_of
from webhookd.deliveries.ingest import SINGLE_LOCK_TIMEOUT_SECONDS, GroupCommit
from webhookd.http.answers import answer, page_of, raw
from webhookd.http.bodies import check_depth, path_id, read_json, read_query
from webhookd.http.database import Database
from webhookd.http.fields import KeyHeader
from webhookd.http.keys import agreed_key, key_in_header
from webhookd.http.problems import invalid, not_found
from webhookd.http.requests import given
from webhookd.http.routes import Route

ACCEPTED = 202
OF_JOBS = "dot.job."  # what the job substrate emits


class Events:
    """The event resource."""

    def __init__(self, context: Context, database: Database, ingest: GroupCommit) -> None:
        self._database = database
        self._ingest = ingest
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/events",
                "ingest",
                self._publish,
                "Publish an event",
                responses.EventAccepted,
                ACCEPTED,
                description="Answered after the commit. The same key with the same content gives the first "
                "event's id and `duplicate`; with other content 409. A key in header and body must agree.",
                body=requests.NewEvent,
                headers={"Idempotency-Key": KeyHeader},
                own_problems=(
                    (409, "idempotency_conflict"),
                    (422, "idempotency_key_mismatch"),
                ),
            ),
            Route(
                "POST",
                "/v1/events/batch",
                "ingest",
                self._publish_batch,
                "Publish many events, all or none",
                responses.BatchAccepted,
                ACCEPTED,
                description=f"At most {requests.MAX_BATCH}, in one commit, each with a key of its own.",
                body=requests.NewEvents,
                own_problems=(
                    (409, "idempotency_conflict"),
                    (422, "batch_too_large"),
                    (422, "idempotency_key_mismatch"),
                ),
            ),
            Route(
                "GET",
                "/v1/events",
                "read",
                self._list,
                "List events",
                responses.EventPage,
                query=requests.EventsQuery,
            ),
            Route(
                "GET",
                "/v1/events/{id:[0-9]+}",
                "read",
                self._get,
                "One event, and what became of it",
                responses.EventWithDeliveries,
                description="For every subscription of its type: delivered, waiting until when and why, "
                "dead-lettered with what error, or not routed and why.",
            ),
        ]

    async def _publish(self, request: web.Request) -> web.Response:
        key = key_in_header(request)
        asked = await read_json(request, requests.NewEvent, self._settings().api.max_payload_bytes)
        event = _new_event(asked)._replace(idempotency_key=agreed_key(key, asked.idempotency_key))
        accepted = await self._ingest.publish(event)
        return answer(
            responses.EventAccepted(
                id=accepted.id,
                event_type=event.event_type,
                created_at=accepted.created_at,
                duplicate=accepted.duplicate,
            ),
            ACCEPTED,
        )

    async def _publish_batch(self, request: web.Request) -> web.Response:
        if "Idempotency-Key" in request.headers:
            raise invalid("in a batch each event has its own idempotency_key", "idempotency_key_mismatch")
        asked = await read_json(
            request, requests.NewEvents, self._settings().api.max_payload_bytes, is_wide=True
        )
        if len(asked.events) > requests.MAX_BATCH:
            raise invalid(f"more than {requests.MAX_BATCH} events", "batch_too_large")
        for event in asked.events:
            check_depth(bytes(event.payload))
        batch = [_new_event(one) for one in asked.events]
        accepted = await self._database.ask(
            lambda connection: ingest.publish(
                connection, batch, lock_timeout_seconds=SINGLE_LOCK_TIMEOUT_SECONDS
            )
        )
        self._ingest.stored(accepted)
        members = [responses.BatchMember(id=one.id, duplicate=one.duplicate) for one in accepted]
        return answer(responses.BatchAccepted(events=members), ACCEPTED)

    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.EventsQuery)
        rows = await self._database.ask(
            lambda connection: reads.events(
                connection, query.page, given(query.event_type), given(query.idempotency_key)
            )
        )
        return page_of(rows, query.limit)

    async def _get(self, request: web.Request) -> web.Response:
        event_id = path_id(request, "event")
        limits = limits_of(self._settings())
        found = await self._database.ask(lambda connection: reads.event(connection, event_id, limits))
        if found is None:
            raise not_found("event", event_id)
        return answer(found | {"payload": raw(found["payload"])})


def _new_event(asked: requests.NewEvent) -> ingest.NewEvent:
    if asked.event_type.startswith(OF_JOBS):
        raise invalid(f"event_type must not begin with {OF_JOBS}: webhookd alone tells of its jobs")
    return ingest.NewEvent(
        asked.event_type, bytes(asked.payload).decode(), asked.idempotency_key, asked.correlation_id
    )
