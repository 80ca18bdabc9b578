"""/v1/dead-letters: lists dead letters, and requeues one or many."""

from aiohttp import web

from webhookd.deliveries import dead_letters, reads
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.dead_letters import Filter
from webhookd.http.problems import Problem, not_found
from webhookd.http.requests import Nothing, path_id, read_json, read_optional_json, read_query
from webhookd.http.responses import json_response, list_response, raw_json
from webhookd.http.routes import DatabaseResource, route
from webhookd.wakeups import Work

CREATED = 201
REQUEUE_BATCH = 500


class DeadLetters(DatabaseResource):
    """The dead-letter routes."""

    @route(
        "GET /v1/dead-letters",
        "read",
        "List dead letters",
        responses.DeadLetterPage,
        query=requests.DeadLettersQuery,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.DeadLettersQuery)
        rows = await self._database.run(
            lambda connection: reads.dead_letters(connection, query.page, query.selection)
        )
        return list_response(rows, query.limit)

    @route(
        "GET /v1/dead-letters/{id:[0-9]+}",
        "read",
        "Get a dead letter with its payload",
        responses.DeadLetterWithPayload,
    )
    async def _get(self, request: web.Request) -> web.Response:
        letter_id = path_id(request, "dead letter")
        found = await self._database.run(lambda connection: reads.dead_letter(connection, letter_id))
        if found is None:
            raise not_found("dead letter", letter_id)
        return json_response(found | {"payload_snapshot": raw_json(found["payload_snapshot"])})

    @route(
        "POST /v1/dead-letters/{id:[0-9]+}/requeue",
        "operate",
        "Requeue a dead letter",
        responses.RequeuedDeadLetter,
        CREATED,
        description="Creates a new delivery. A dead letter can be requeued once: a second "
        "request returns 409 with the existing delivery.",
        body=Nothing,
        body_optional=True,
        own_problems=((409, "already_requeued"), (409, "subscription_held")),
    )
    async def _requeue(self, request: web.Request) -> web.Response:
        letter_id = path_id(request, "dead letter")
        await read_optional_json(request, Nothing, self._max_bytes)
        requeued = await self._database.run(lambda connection: dead_letters.requeue(connection, letter_id))
        if not requeued.created:
            raise Problem(
                409,
                "already_requeued",
                f"dead letter {letter_id} was requeued as delivery {requeued.saga_id}",
                saga_id=requeued.saga_id,
            )
        self._wakeups.wake(Work.SAGAS, [requeued.subscription_id], notify=True)
        return json_response(responses.RequeuedDeadLetter(saga_id=requeued.saga_id), CREATED)

    @route(
        "POST /v1/dead-letters/requeue",
        "operate",
        "Requeue many dead letters",
        responses.RequeueResult,
        description="Requeues every dead letter that matches the filter, except those created while "
        "this runs. By default it only counts: set `dry_run` to false to requeue. Safe to repeat.",
        body=requests.RequeueMany,
    )
    async def _requeue_many(self, request: web.Request) -> web.Response:
        """Requeue batch by batch, with a commit each. After a failure, the same request continues."""
        body = await read_json(request, requests.RequeueMany, self._max_bytes)
        # Leave out dead letters created while this runs: a delivery that fails at once would be requeued
        # forever.
        now = await self._database.run(reads.database_time)
        failed_before = min(body.filter.failed_before or now, now)
        selection = Filter(
            body.filter.subscription_id, body.filter.error_code, body.filter.failed_after, failed_before
        )
        matched = requeued = 0
        after_id, done = body.after_id, False
        while not done and (body.limit is None or matched < body.limit):
            size = REQUEUE_BATCH if body.limit is None else min(REQUEUE_BATCH, body.limit - matched)
            batch = await self._database.run(
                lambda connection, after_id=after_id, size=size: dead_letters.requeue_many(  # type: ignore[misc]
                    connection, selection, after_id, size, dry_run=body.dry_run
                )
            )
            if batch.subscription_ids:
                self._wakeups.wake(Work.SAGAS, batch.subscription_ids, notify=True)
            matched += batch.matched
            requeued += batch.requeued
            after_id, done = batch.last_id, batch.matched < size
        counts = responses.RequeueResult(matched=matched, requeued=requeued, skipped=matched - requeued)
        if body.limit is not None:
            # The values for the next request: start after this id, and end at this time.
            counts["last_id"] = None if done else after_id
            counts["failed_before"] = failed_before
        return json_response(counts)
