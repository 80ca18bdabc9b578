"""/v1/subscriptions: made, changed, verified by a signed challenge, given new secrets. Never deleted."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from webhookd.context import Context
from webhookd.db.paging import Row
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.api import requests, responses
from webhookd.deliveries.api.verification import Verification
from webhookd.http.answers import answer, page_of
from webhookd.http.bodies import path_id, read_json, read_optional_json, read_query
from webhookd.http.database import Database
from webhookd.http.problems import invalid, not_found
from webhookd.http.requests import Nothing, given
from webhookd.http.routes import Route
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.headers import HeaderProblem, HeaderProblemCode, check_headers
from webhookd.outbound.urls import UrlProblem, UrlProblemCode, check_callback_url
from webhookd.wakeups import Work

CREATED = 201
_OF_ENDPOINTS = tuple((422, code.value) for code in (*UrlProblemCode, *HeaderProblemCode))


class Subscriptions:
    """The subscription resource."""

    def __init__(self, context: Context, database: Database, verification: Verification) -> None:
        self._database = database
        self._verification = verification
        self._wakeups = context.wakeups
        self._settings = context.settings

    def routes(self) -> list[Route]:
        one = "/v1/subscriptions/{id:[0-9]+}"
        return [
            Route(
                "POST",
                "/v1/subscriptions",
                "subscriptions",
                self._create,
                "Subscribe an endpoint to a type of event",
                responses.SubscriptionWithSecret,
                CREATED,
                description="It is sent nothing before it is verified. The secret is shown this once.",
                body=requests.NewSubscription,
                own_problems=_OF_ENDPOINTS,
            ),
            Route(
                "GET",
                "/v1/subscriptions",
                "read",
                self._list,
                "List subscriptions",
                responses.SubscriptionPage,
                query=requests.SubscriptionsQuery,
            ),
            Route("GET", one, "read", self._get, "One subscription", responses.Subscription),
            Route(
                "PATCH",
                one,
                "subscriptions",
                self._change,
                "Change a subscription",
                responses.Subscription,
                description="What is not given stays as it is. With another `callback_url` it must be "
                "verified again. There is no DELETE: `active: false` ends it, and its history stays.",
                body=requests.SubscriptionChange,
                own_problems=_OF_ENDPOINTS,
            ),
            Route(
                "POST",
                f"{one}/verify",
                "subscriptions",
                self._verify,
                "Ask the endpoint whether it wants the webhooks",
                responses.Subscription,
                description='Sends it `{"type": "webhookd.verification", "challenge": "…"}`, signed. It '
                'answers 2xx with `{"challenge": "…"}` or the bare text.',
                body=Nothing,
                body_optional=True,
                own_problems=((409, "verification_stale"), (422, "verification_failed")),
            ),
            Route(
                "POST",
                f"{one}/rotate-secret",
                "subscriptions",
                self._rotate_secret,
                "Sign with a new secret",
                responses.RotatedSecret,
                description="Both secrets sign until `previous_valid_until`.",
                body=Nothing,
                body_optional=True,
            ),
        ]

    async def _create(self, request: web.Request) -> web.Response:
        asked = await read_json(request, requests.NewSubscription, self._max_bytes)
        callback_url = self._checked_url(asked.callback_url)
        headers = _checked_headers(asked.headers)
        created = await self._database.ask(
            lambda connection: subscriptions.create(
                connection,
                asked.event_type,
                callback_url,
                max_attempts=asked.max_attempts,
                base_delay_seconds=asked.base_delay_seconds,
                headers=headers,
                description=asked.description,
            )
        )
        found = await self._found(created.subscription_id)
        return answer(found | {"secret": created.signing_secret}, CREATED)

    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, requests.SubscriptionsQuery)
        rows = await self._database.ask(
            lambda connection: reads.subscriptions(
                connection, query.page, given(query.event_type), given(query.active), given(query.verified)
            )
        )
        return page_of(rows, query.limit)

    async def _get(self, request: web.Request) -> web.Response:
        return answer(await self._found(path_id(request, "subscription")))

    async def _change(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        asked = await read_json(request, requests.SubscriptionChange, self._max_bytes)
        changes = self._checked_changes(asked)
        if changes:
            await self._database.ask(
                lambda connection: subscriptions.update(connection, subscription_id, changes)
            )
        found = await self._found(subscription_id)
        if found["active"] and found["verified"]:
            # Perhaps it was held until now, or has a policy that makes something due.
            self._wakeups.wake(Work.SAGAS, [subscription_id], cluster=True)
        return answer(found)

    async def _verify(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        await read_optional_json(request, Nothing, self._max_bytes)
        await self._verification.verify(subscription_id)
        self._wakeups.wake(Work.SAGAS, [subscription_id], cluster=True)
        return answer(await self._found(subscription_id))

    async def _rotate_secret(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        await read_optional_json(request, Nothing, self._max_bytes)
        overlap_seconds = self._settings().subscriptions.secret_overlap_seconds
        rotated = await self._database.ask(
            lambda connection: subscriptions.rotate_secret(connection, subscription_id, overlap_seconds)
        )
        return answer(
            responses.RotatedSecret(
                secret=rotated.signing_secret, previous_valid_until=rotated.previous_valid_until
            )
        )

    @property
    def _max_bytes(self) -> int:
        return self._settings().api.max_payload_bytes

    async def _found(self, subscription_id: int) -> Row:
        found = await self._database.ask(lambda connection: reads.subscription(connection, subscription_id))
        if found is None:
            raise not_found("subscription", subscription_id)
        return found

    def _checked_changes(self, asked: requests.SubscriptionChange) -> dict[str, Any]:
        changes = {
            name: value
            for name, value in msgspec.structs.asdict(asked).items()
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
    """As the JSON to store."""
    checked = check_headers(headers)
    if isinstance(checked, HeaderProblem):
        raise invalid(f"headers: {checked.detail}", checked.code.value)
    return msgspec.json.encode(checked).decode()
