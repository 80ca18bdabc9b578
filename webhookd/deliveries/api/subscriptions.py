"""/v1/subscriptions: creates, changes and verifies subscriptions, and rotates secrets. Never deletes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from webhookd.context import Context
from webhookd.db.paging import Row
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.api.verification import Verification
from webhookd.http.problems import invalid, not_found
from webhookd.http.query_runner import QueryRunner
from webhookd.http.requests import Nothing, given, path_id, read_json, read_optional_json, read_query
from webhookd.http.responses import json_response, list_response
from webhookd.http.routes import DatabaseResource, route
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.headers import HeaderProblem, HeaderProblemCode, check_headers
from webhookd.outbound.urls import UrlProblem, UrlProblemCode, check_callback_url
from webhookd.wakeups import Work

CREATED = 201
_PATH = "/v1/subscriptions/{id:[0-9]+}"
_ENDPOINT_PROBLEMS = tuple((422, code.value) for code in (*UrlProblemCode, *HeaderProblemCode))


class Subscriptions(DatabaseResource):
    """The subscription routes."""

    def __init__(self, context: Context, database: QueryRunner, verification: Verification) -> None:
        super().__init__(context, database)
        self._verification = verification

    @route(
        "POST /v1/subscriptions",
        "subscriptions",
        "Create a subscription",
        responses.SubscriptionWithSecret,
        CREATED,
        description="The endpoint receives nothing until the subscription is verified. The secret is "
        "shown only in this response.",
        body=requests.NewSubscription,
        own_problems=_ENDPOINT_PROBLEMS,
    )
    async def _create(self, request: web.Request) -> web.Response:
        body = await read_json(request, requests.NewSubscription, self._max_bytes)
        callback_url = self._checked_url(body.callback_url)
        headers = _checked_headers(body.headers)
        created = await self._database.run(
            lambda connection: subscriptions.create(
                connection,
                body.event_type,
                callback_url,
                max_attempts=body.max_attempts,
                base_delay_seconds=body.base_delay_seconds,
                headers=headers,
                description=body.description,
            )
        )
        found = await self._found(created.subscription_id)
        return json_response(found | {"secret": created.signing_secret}, CREATED)

    @route(
        "GET /v1/subscriptions",
        "read",
        "List subscriptions",
        responses.SubscriptionPage,
        query=requests.SubscriptionsQuery,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.SubscriptionsQuery)
        rows = await self._database.run(
            lambda connection: reads.subscriptions(
                connection, query.page, given(query.event_type), given(query.active), given(query.verified)
            )
        )
        return list_response(rows, query.limit)

    @route(f"GET {_PATH}", "read", "Get a subscription", responses.Subscription)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(await self._found(path_id(request, "subscription")))

    @route(
        f"PATCH {_PATH}",
        "subscriptions",
        "Change a subscription",
        responses.Subscription,
        description="Fields that are not given stay unchanged. A changed `callback_url` must be "
        "verified again. There is no DELETE: `active: false` stops the subscription and keeps "
        "its history.",
        body=requests.SubscriptionChange,
        own_problems=_ENDPOINT_PROBLEMS,
    )
    async def _change(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        body = await read_json(request, requests.SubscriptionChange, self._max_bytes)
        changes = self._checked_changes(body)
        if changes:
            await self._database.run(
                lambda connection: subscriptions.update(connection, subscription_id, changes)
            )
        found = await self._found(subscription_id)
        if found["active"] and found["verified"]:
            # The change may have released held deliveries, or made some due earlier.
            self._wakeups.wake(Work.SAGAS, [subscription_id], cluster=True)
        return json_response(found)

    @route(
        f"POST {_PATH}/verify",
        "subscriptions",
        "Verify the endpoint with a challenge",
        responses.Subscription,
        description='Sends `{"type": "webhookd.verification", "challenge": "…"}` to the endpoint, '
        'signed. The endpoint must respond 2xx with `{"challenge": "…"}` or the bare challenge.',
        body=Nothing,
        body_optional=True,
        own_problems=((409, "verification_stale"), (422, "verification_failed")),
    )
    async def _verify(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        await read_optional_json(request, Nothing, self._max_bytes)
        await self._verification.verify(subscription_id)
        self._wakeups.wake(Work.SAGAS, [subscription_id], cluster=True)
        return json_response(await self._found(subscription_id))

    @route(
        f"POST {_PATH}/rotate-secret",
        "subscriptions",
        "Rotate the signing secret",
        responses.RotatedSecret,
        description="Deliveries carry signatures of both secrets until `previous_valid_until`.",
        body=Nothing,
        body_optional=True,
    )
    async def _rotate_secret(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        await read_optional_json(request, Nothing, self._max_bytes)
        overlap_seconds = self._settings().subscriptions.secret_overlap_seconds
        rotated = await self._database.run(
            lambda connection: subscriptions.rotate_secret(connection, subscription_id, overlap_seconds)
        )
        return json_response(
            responses.RotatedSecret(
                secret=rotated.signing_secret, previous_valid_until=rotated.previous_valid_until
            )
        )

    async def _found(self, subscription_id: int) -> Row:
        found = await self._database.run(lambda connection: reads.subscription(connection, subscription_id))
        if found is None:
            raise not_found("subscription", subscription_id)
        return found

    def _checked_changes(self, body: requests.SubscriptionChange) -> dict[str, Any]:
        changes = {
            name: value
            for name, value in msgspec.structs.asdict(body).items()
            if not isinstance(value, msgspec.UnsetType)
        }
        if "callback_url" in changes:
            changes["callback_url"] = self._checked_url(changes["callback_url"])
        if "headers" in changes:
            changes["headers"] = _checked_headers(changes["headers"])
        return changes

    def _checked_url(self, text: str) -> str:
        checked = check_callback_url(text, AddressPolicy.of(self._settings().delivery.networks))
        if isinstance(checked, UrlProblem):
            raise invalid(f"callback_url {checked.detail}", checked.code.value)
        return checked.text


def _checked_headers(headers: Mapping[str, str]) -> str:
    """Return the headers as the JSON to store."""
    checked = check_headers(headers)
    if isinstance(checked, HeaderProblem):
        raise invalid(f"headers: {checked.detail}", checked.code.value)
    return msgspec.json.encode(checked).decode()
