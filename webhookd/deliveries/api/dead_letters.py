"""/v1/dead-letters: what failed for good, and its second chance."""

from aiohttp import web

from webhookd.context import Context
from webhookd.deliveries import dead_letters, reads
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.dead_letters import Filter
from webhookd.http.answers import answer, page_of, raw
from webhookd.http.bodies import path_id, read_json, read_optional_json, read_query
from webhookd.http.database import Database
from webhookd.http.problems import Problem, not_found
from webhookd.http.requests import Nothing
from webhookd.http.routes import Route
from webhookd.wakeups import Work

CREATED = 201
REQUEUE_BATCH = 500


class DeadLetters:
    """The dead-letter resource."""

    def __init__(self, context: Context, database: Database) -> None:
        self._database = database
        self._wakeups = context.wakeups
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/v1/dead-letters",
                "read",
                self._list,
                "List dead letters",
                responses.DeadLetterPage,
                query=requests.DeadLettersQuery,
            ),
            Route(
                "GET",
                "/v1/dead-letters/{id:[0-9]+}",
                "read",
                self._get,
                "One dead letter, and the payload as it was",
                responses.DeadLetterWithPayload,
            ),
            Route(
                "POST",
                "/v1/dead-letters/{id:[0-9]+}/requeue",
                "operate",
                self._requeue,
                "Deliver a dead letter again",
                responses.Requeued,
                CREATED,
                description="As a new delivery, once: asked again, 409 names the delivery that there is.",
                body=Nothing,
                body_optional=True,
                own_problems=((409, "already_requeued"), (409, "subscription_held")),
            ),
            Route(
                "POST",
                "/v1/dead-letters/requeue",
                "operate",
                self._requeue_many,
                "Deliver many dead letters again",
                responses.RequeuedMany,
                description="All that match the filter, but those that come while this runs. Only counts "
                "them unless `dry_run` is false. Safe to ask again.",
                body=requests.RequeueMany,
            ),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.DeadLettersQuery)
        rows = await self._database.ask(
            lambda connection: reads.dead_letters(connection, query.page, query.which)
        )
        return page_of(rows, query.limit)

    async def _get(self, request: web.Request) -> web.Response:
        letter_id = path_id(request, "dead letter")
        found = await self._database.ask(lambda connection: reads.dead_letter(connection, letter_id))
        if found is None:
            raise not_found("dead letter", letter_id)
        return answer(found | {"payload_snapshot": raw(found["payload_snapshot"])})

    async def _requeue(self, request: web.Request) -> web.Response:
        letter_id = path_id(request, "dead letter")
        await read_optional_json(request, Nothing, self._settings().api.max_payload_bytes)
        requeued = await self._database.ask(lambda connection: dead_letters.requeue(connection, letter_id))
        if not requeued.created:
            raise Problem(
                409,
                "already_requeued",
                f"dead letter {letter_id} was requeued as delivery {requeued.saga_id}",
                saga_id=requeued.saga_id,
            )
        self._wakeups.wake(Work.SAGAS, [requeued.subscription_id], cluster=True)
        return answer(responses.Requeued(saga_id=requeued.saga_id), CREATED)

    async def _requeue_many(self, request: web.Request) -> web.Response:
        """Batch by batch, a commit each: asked again after a failure in between, it goes on."""
        asked = await read_json(request, requests.RequeueMany, self._settings().api.max_payload_bytes)
        # Not those that come while this runs: one that fails again at once would be requeued for ever.
        now = await self._database.ask(reads.database_time)
        failed_before = min(asked.filter.failed_before or now, now)
        which = Filter(
            asked.filter.subscription_id, asked.filter.error_code, asked.filter.failed_after, failed_before
        )
        matched = requeued = 0
        after_id, done = asked.after_id, False
        while not done and (asked.limit is None or matched < asked.limit):
            size = REQUEUE_BATCH if asked.limit is None else min(REQUEUE_BATCH, asked.limit - matched)
            batch = await self._database.ask(
                lambda connection, after_id=after_id, size=size: dead_letters.requeue_many(  # type: ignore[misc]
                    connection, which, after_id, size, dry_run=asked.dry_run
                )
            )
            if batch.subscription_ids:
                self._wakeups.wake(Work.SAGAS, batch.subscription_ids, cluster=True)
            matched += batch.matched
            requeued += batch.requeued
            after_id, done = batch.last_id, batch.matched < size
        counts = responses.RequeuedMany(matched=matched, requeued=requeued, skipped=matched - requeued)
        if asked.limit is not None:
            # To go on with: after which one, and up to which time.
            counts["last_id"] = None if done else after_id
            counts["failed_before"] = failed_before
        return answer(counts)
