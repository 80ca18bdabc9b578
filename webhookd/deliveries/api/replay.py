"""POST /v1/subscriptions/{id}/replay: delivers past events to a subscription."""

from typing import Annotated, Literal, TypedDict

import msgspec
from aiohttp import web
from msgspec import Meta

from webhookd.core.limits import MAX_ID, MAX_REPLAY_LIMIT
from webhookd.deliveries import reads, router
from webhookd.deliveries.api.subscriptions import SUBSCRIPTION_PATH
from webhookd.deliveries.router import Replay
from webhookd.http import fields
from webhookd.http.auth import tenant_of
from webhookd.http.requests import path_id, read_json
from webhookd.http.responses import json_response
from webhookd.http.routes import DatabaseResource, route
from webhookd.wakeups import Work

REPLAY_BATCH = 500


class ReplaySubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions/{id}/replay: all matches, or with a limit the next ones after an event."""

    since: fields.Time
    until: fields.Time | None = None
    event_types: fields.EventTypes | None = None
    include: Annotated[
        Literal["missing", "all"],
        Meta(description="`missing`: events that were never routed to it; `all`: also finished ones again"),
    ] = "missing"
    dry_run: bool = True
    limit: (
        Annotated[
            int, Meta(ge=1, le=MAX_REPLAY_LIMIT, description="the most events to look at in this request")
        ]
        | None
    ) = None
    after_event_id: Annotated[int, Meta(ge=0, le=MAX_ID)] = 0
    started_at: (
        Annotated[
            fields.Time,
            Meta(description="of the first response, so that a repeated request resends nothing twice"),
        ]
        | None
    ) = None


class ReplayResult(TypedDict):
    """The result of a replay, or of its dry run."""

    examined: Annotated[int, Meta(ge=0, examples=[500], description="events in the given time")]
    matched: Annotated[int, Meta(ge=0, examples=[20], description="of these, those that it could get")]
    created: Annotated[
        int, Meta(ge=0, examples=[20], description="new deliveries; in a dry run, expected ones")
    ]
    payload_removed: Annotated[
        int,
        Meta(
            ge=0,
            examples=[0],
            description="not in `matched`: events without payload, which retention removed",
        ),
    ]
    started_at: fields.Time
    until: fields.Time
    last_event_id: Annotated[
        fields.Id | None, Meta(description="after_event_id of the next request; null: this was the last")
    ]


class Replays(DatabaseResource):
    """The replay route."""

    @route(
        f"POST {SUBSCRIPTION_PATH}/replay",
        "operate",
        "Deliver past events",
        ReplayResult,
        description="Delivers events of the past that match the subscription now. By default it only counts: "
        "set `dry_run` to false to create the deliveries. To repeat or continue it with `include: all`, pass "
        "the `started_at` of the first response, so that nothing is sent twice.",
        body=ReplaySubscription,
        own_problems=((409, "subscription_held"),),
        for_tenants=True,
    )
    async def _replay(self, request: web.Request) -> web.Response:
        """Replay batch by batch, with a commit each. After a failure, the same request continues."""
        subscription_id, tenant = path_id(request, "subscription"), tenant_of(request)
        body = await read_json(request, ReplaySubscription, self._max_bytes)
        now = await self._database.run(reads.database_time)
        until = min(body.until or now, now)
        started_at = min(body.started_at or now, now)
        what = Replay(subscription_id, body.since, until, body.event_types, body.include == "all", started_at)
        counts = ReplayResult(
            examined=0,
            matched=0,
            created=0,
            payload_removed=0,
            started_at=started_at,
            until=until,
            last_event_id=None,
        )
        after_id, done = body.after_event_id, False
        while not done and (body.limit is None or counts["examined"] < body.limit):
            left = REPLAY_BATCH if body.limit is None else body.limit - counts["examined"]
            size = min(REPLAY_BATCH, left)
            batch = await self._database.run(
                router.replay, what, after_id, size, dry_run=body.dry_run, tenant=tenant
            )
            if batch.created and not body.dry_run:
                self._wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
            counts["examined"] += batch.examined
            counts["matched"] += batch.matched
            counts["created"] += batch.created
            counts["payload_removed"] += batch.payload_removed
            after_id, done = batch.last_event_id, batch.examined < size
        counts["last_event_id"] = None if done else after_id
        return json_response(counts)
