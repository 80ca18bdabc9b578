"""/v1/dead-letters: lists dead letters, and requeues one or many."""

from typing import Annotated, NotRequired, TypedDict

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import MAX_ID, MAX_REQUEUE_LIMIT
from webhookd.deliveries import dead_letters, reads
from webhookd.deliveries.dead_letters import Filter
from webhookd.http import fields
from webhookd.http.auth import tenant_of
from webhookd.http.requests import (
    Nothing,
    Paged,
    own_filters,
    path_id,
    read_json,
    read_optional_json,
    read_query,
)
from webhookd.http.responses import Problem, json_response, list_response, raw_json
from webhookd.http.routes import DatabaseResource, route
from webhookd.wakeups import Work

CREATED = 201
REQUEUE_BATCH = 500


class DeadLettersQuery(Paged, kw_only=True):
    """GET /v1/dead-letters."""

    tenant: fields.Tenant | UnsetType = UNSET
    subscription_id: fields.Id | UnsetType = UNSET
    error_code: fields.ErrorCode | UnsetType = UNSET
    failed_after: fields.Time | UnsetType = UNSET
    failed_before: fields.Time | UnsetType = UNSET


class RequeueFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Selects dead letters, with the filters of the list."""

    subscription_id: fields.Id | None = None
    error_code: fields.ErrorCode | None = None
    failed_after: fields.Time | None = None
    failed_before: fields.Time | None = None
    tenant: fields.Tenant | None = None


class RequeueMany(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/dead-letters/requeue: all matches, or with a limit the next ones after an id."""

    filter: RequeueFilter = msgspec.field(default_factory=RequeueFilter)
    dry_run: bool = True
    limit: Annotated[int, Meta(ge=1, le=MAX_REQUEUE_LIMIT)] | None = None
    after_id: Annotated[int, Meta(ge=0, le=MAX_ID)] = 0


class DeadLetter(TypedDict):
    """A delivery that failed and is not retried any more."""

    id: fields.Id
    saga_id: fields.Id
    event_id: fields.Id
    subscription_id: fields.Id
    final_error_code: fields.ErrorCode
    failed_at: fields.Time
    requeued_saga_id: Annotated[
        fields.Id | None, Meta(description="the delivery that it was requeued as, if any")
    ]
    payload_removed_at: Annotated[
        fields.Time | None,
        Meta(
            examples=[None],
            description="when retention removed its payload: it cannot be requeued; null: never",
        ),
    ]


class DeadLetterWithPayload(DeadLetter):
    """A dead letter with the payload that was not delivered."""

    event_type: fields.EventType
    payload_snapshot: fields.Payload


class DeadLetterPage(TypedDict):
    """A page of dead letters, without payloads."""

    items: list[DeadLetter]
    next_cursor: fields.Cursor


class RequeuedDeadLetter(TypedDict):
    """The new delivery of a requeued dead letter."""

    saga_id: fields.Id


class RequeueResult(TypedDict):
    """The result of a bulk requeue, or of its dry run."""

    matched: fields.Count
    requeued: fields.Count
    skipped: Annotated[
        int,
        Meta(
            ge=0,
            examples=[0],
            description="requeued before, nothing is routed to its subscription, or its payload was removed",
        ),
    ]
    payload_removed: Annotated[
        int,
        Meta(
            ge=0,
            examples=[0],
            description="of the skipped: not requeued before, and its payload was removed by retention",
        ),
    ]
    last_id: NotRequired[
        Annotated[
            fields.Id | None, Meta(description="with a limit: after_id of the next request; null at the end")
        ]
    ]
    failed_before: NotRequired[
        Annotated[
            fields.Time,
            Meta(description="with a limit: failed_before of the next request, to leave out new failures"),
        ]
    ]


class DeadLetters(DatabaseResource):
    """The dead-letter routes."""

    @route(
        "GET /v1/dead-letters",
        "read",
        "List dead letters",
        DeadLetterPage,
        query=DeadLettersQuery,
        for_tenants=True,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, DeadLettersQuery)
        selection = Filter(**own_filters(request, query))
        rows = await self._database.run(reads.dead_letters, query.page, selection)
        return list_response(rows, query.limit)

    @route(
        "GET /v1/dead-letters/{id:[0-9]+}",
        "read",
        "Get a dead letter with its payload",
        DeadLetterWithPayload,
        for_tenants=True,
    )
    async def _get(self, request: web.Request) -> web.Response:
        letter_id, tenant = path_id(request, "dead letter"), tenant_of(request)
        found = await self._database.run(reads.dead_letter, letter_id, tenant)
        return json_response(found | {"payload_snapshot": raw_json(found["payload_snapshot"])})

    @route(
        "POST /v1/dead-letters/{id:[0-9]+}/requeue",
        "operate",
        "Requeue a dead letter",
        RequeuedDeadLetter,
        CREATED,
        description="Creates a new delivery. A dead letter can be requeued once: a second "
        "request returns 409 with the existing delivery.",
        body=Nothing,
        body_optional=True,
        own_problems=((409, "already_requeued"), (409, "subscription_held"), (409, "payload_removed")),
        for_tenants=True,
    )
    async def _requeue(self, request: web.Request) -> web.Response:
        letter_id = path_id(request, "dead letter")
        await read_optional_json(request, Nothing, self._max_bytes)
        requeued = await self._database.run(dead_letters.requeue, letter_id, tenant_of(request))
        if not requeued.created:
            raise Problem(
                409,
                "already_requeued",
                f"dead letter {letter_id} was requeued as delivery {requeued.saga_id}",
                saga_id=requeued.saga_id,
            )
        self._wakeups.wake(Work.SAGAS, [requeued.subscription_id], notify=True)
        return json_response(RequeuedDeadLetter(saga_id=requeued.saga_id), CREATED)

    @route(
        "POST /v1/dead-letters/requeue",
        "operate",
        "Requeue many dead letters",
        RequeueResult,
        description="Requeues every dead letter that matches the filter, except those created while "
        "this runs. By default it only counts: set `dry_run` to false to requeue. Safe to repeat.",
        body=RequeueMany,
        for_tenants=True,
    )
    async def _requeue_many(self, request: web.Request) -> web.Response:
        """Requeue batch by batch, with a commit each. After a failure, the same request continues."""
        body = await read_json(request, RequeueMany, self._max_bytes)
        # Leave out dead letters created while this runs: a delivery that fails at once would be requeued
        # forever.
        now = await self._database.run(reads.database_time)
        failed_before = min(body.filter.failed_before or now, now)
        bound, wanted = tenant_of(request), body.filter.tenant
        if bound is not None and wanted not in (None, bound):
            raise Problem(404, "not_found", "no such tenant")
        chosen = msgspec.structs.asdict(body.filter) | {"tenant": bound or wanted}
        selection = Filter(**chosen)._replace(failed_before=failed_before)
        matched = requeued = payload_removed = 0
        after_id, done = body.after_id, False
        while not done and (body.limit is None or matched < body.limit):
            size = REQUEUE_BATCH if body.limit is None else min(REQUEUE_BATCH, body.limit - matched)
            batch = await self._database.run(
                dead_letters.requeue_many, selection, after_id, size, dry_run=body.dry_run
            )
            if batch.subscription_ids:
                self._wakeups.wake(Work.SAGAS, batch.subscription_ids, notify=True)
            matched += batch.matched
            requeued += batch.requeued
            payload_removed += batch.payload_removed
            after_id, done = batch.last_id, batch.matched < size
        counts = RequeueResult(
            matched=matched,
            requeued=requeued,
            skipped=matched - requeued,
            payload_removed=payload_removed,
        )
        if body.limit is not None:
            # The values for the next request: start after this id, and end at this time.
            counts["last_id"] = None if done else after_id
            counts["failed_before"] = failed_before
        return json_response(counts)
