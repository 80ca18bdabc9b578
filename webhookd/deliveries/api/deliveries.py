"""/v1/deliveries: lists deliveries (sagas), and shows one with its attempts and the reason for its status."""

from aiohttp import web

from webhookd.core.settings import Settings
from webhookd.db.paging import Row
from webhookd.deliveries import reads
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.explain import Limits
from webhookd.http.requests import given, path_id, read_query
from webhookd.http.responses import json_response, list_response, not_found
from webhookd.http.routes import DatabaseResource, route


class Deliveries(DatabaseResource):
    """The delivery routes, which only read."""

    @route(
        "GET /v1/deliveries",
        "read",
        "List deliveries",
        responses.DeliveryPage,
        query=requests.DeliveriesQuery,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.DeliveriesQuery)
        rows = await self._database.run(
            lambda connection: reads.deliveries(
                connection,
                query.page,
                given(query.status),
                given(query.subscription_id),
                given(query.event_id),
            )
        )
        return list_response(rows, query.limit)

    @route(
        "GET /v1/deliveries/{id:[0-9]+}",
        "read",
        "Get a delivery with its attempts",
        responses.DeliveryWithAttempts,
    )
    async def _get(self, request: web.Request) -> web.Response:
        saga_id = path_id(request, "delivery")
        limits = limits_of(self._settings())
        found = await self._database.run(lambda connection: reads.delivery(connection, saga_id, limits))
        if found is None:
            raise not_found("delivery", saga_id)
        return json_response(found | {"attempts": [_attempt(attempt) for attempt in found["attempts"]]})


def limits_of(settings: Settings) -> Limits:
    """Return the limits that apply to subscriptions without limits of their own."""
    return Limits(settings.orchestration.subscription_window, settings.retry.max_attempts)


def _attempt(row: Row) -> Row:
    """Show the endpoint's response, which is stored as bytes, as text."""
    excerpt = row["response_excerpt"]
    return row | {"response_excerpt": None if excerpt is None else excerpt.decode("utf-8", "replace")}
