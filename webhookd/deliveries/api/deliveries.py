"""/v1/deliveries: sagas, each attempt of one, and why it is where it is."""

from aiohttp import web

from webhookd.context import Context
from webhookd.core.settings import Settings
from webhookd.db.paging import Row
from webhookd.deliveries import reads
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.explain import Limits
from webhookd.http.answers import answer, page_of
from webhookd.http.bodies import path_id, read_query
from webhookd.http.database import Database
from webhookd.http.problems import not_found
from webhookd.http.requests import given
from webhookd.http.routes import Route


class Deliveries:
    """The delivery resource: only to look at."""

    def __init__(self, context: Context, database: Database) -> None:
        self._database = database
        self._settings = context.settings

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET",
                "/v1/deliveries",
                "read",
                self._list,
                "List deliveries",
                responses.DeliveryPage,
                query=requests.DeliveriesQuery,
            ),
            Route(
                "GET",
                "/v1/deliveries/{id:[0-9]+}",
                "read",
                self._get,
                "One delivery, and each of its attempts",
                responses.DeliveryWithAttempts,
            ),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.DeliveriesQuery)
        rows = await self._database.ask(
            lambda connection: reads.deliveries(
                connection,
                query.page,
                given(query.status),
                given(query.subscription_id),
                given(query.event_id),
            )
        )
        return page_of(rows, query.limit)

    async def _get(self, request: web.Request) -> web.Response:
        saga_id = path_id(request, "delivery")
        limits = limits_of(self._settings())
        found = await self._database.ask(lambda connection: reads.delivery(connection, saga_id, limits))
        if found is None:
            raise not_found("delivery", saga_id)
        return answer(found | {"attempts": [_attempt(attempt) for attempt in found["attempts"]]})


def limits_of(settings: Settings) -> Limits:
    """What this instance does with a subscription that does not say otherwise."""
    return Limits(settings.orchestration.subscription_window, settings.retry.max_attempts)


def _attempt(row: Row) -> Row:
    """What an endpoint answered is bytes; shown as the text that it most likely is."""
    excerpt = row["response_excerpt"]
    return row | {"response_excerpt": None if excerpt is None else excerpt.decode("utf-8", "replace")}
