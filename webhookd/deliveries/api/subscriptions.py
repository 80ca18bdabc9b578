"""/v1/subscriptions: creates, changes and verifies subscriptions, and rotates secrets. Never deletes."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.context import Context
from webhookd.db.connection import Connection
from webhookd.db.paging import Row
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.subscriptions import Challenge
from webhookd.http import fields
from webhookd.http.requests import (
    Nothing,
    Paged,
    given_fields,
    path_id,
    read_json,
    read_optional_json,
    read_query,
)
from webhookd.http.responses import Problem, invalid, json_response, list_response, unavailable
from webhookd.http.routes import DatabaseResource, QueryRunner, route
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, GuardedClient
from webhookd.outbound.endpoint import EndpointCode, EndpointProblem, check_callback_url, check_headers
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.outbound.signatures import CHALLENGE_EVENT_TYPE, ChallengeMessage, sign
from webhookd.wakeups import Work

CREATED = 201
_PATH = "/v1/subscriptions/{id:[0-9]+}"
_ENDPOINT_PROBLEMS = tuple((422, code.value) for code in EndpointCode)

Secret: TypeAlias = Annotated[
    str,
    Meta(examples=["whsec_YW4gZXhhbXBsZSwgbm90IGEgc2VjcmV0IQ=="], description="shown only in this response"),
]


class NewSubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions."""

    event_type: fields.EventType
    callback_url: fields.CallbackUrl
    max_attempts: fields.OwnAttempts = None
    base_delay_seconds: fields.OwnDelay = None
    headers: fields.CustomHeaders = {}
    description: fields.Description | None = None


class SubscriptionChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/subscriptions/{id}: changes the given fields; null removes an override."""

    active: bool | UnsetType = UNSET
    callback_url: fields.CallbackUrl | UnsetType = UNSET
    max_attempts: fields.OwnAttempts | UnsetType = UNSET
    base_delay_seconds: fields.OwnDelay | UnsetType = UNSET
    headers: fields.CustomHeaders | UnsetType = UNSET
    description: fields.Description | UnsetType | None = UNSET


class SubscriptionsQuery(Paged, kw_only=True):
    """GET /v1/subscriptions."""

    event_type: fields.EventType | UnsetType = UNSET
    active: bool | UnsetType = UNSET
    verified: bool | UnsetType = UNSET


class EndpointHealth(TypedDict):
    """The recent failures of an endpoint."""

    consecutive_failures: fields.Count
    failing_since: fields.Time | None
    last_error_code: fields.ErrorCode | None
    last_failure_at: fields.Time | None
    last_recovery_at: fields.Time | None


class Subscription(TypedDict):
    """A subscription of an endpoint to an event type. Its secret and headers are never shown."""

    id: fields.Id
    event_type: fields.EventType
    callback_url: fields.CallbackUrl
    active: bool
    verified: bool
    max_attempts: fields.OwnAttempts
    base_delay_seconds: fields.OwnDelay
    description: fields.Description | None
    created_at: fields.Time
    updated_at: fields.Time
    health: EndpointHealth


class SubscriptionWithSecret(Subscription):
    """A subscription with its signing secret."""

    secret: Secret


class SubscriptionPage(TypedDict):
    """A page of subscriptions."""

    items: list[Subscription]
    next_cursor: fields.Cursor


class RotatedSecret(TypedDict):
    """The new secret. The previous one also signs until `previous_valid_until`."""

    secret: Secret
    previous_valid_until: fields.Time


class Verification:
    """Verifies subscriptions, a bounded number at a time."""

    def __init__(self, context: Context, database: QueryRunner, client: GuardedClient) -> None:
        self._database = database
        self._client = client
        self._settings = context.settings
        # A verification may take as long as a delivery; the client reserves these connections for them.
        self._free = asyncio.Semaphore(VERIFICATION_CONNECTIONS)

    async def verify(self, subscription_id: int) -> None:
        """Return when the subscription is verified; otherwise raise a Problem with the reason."""
        if self._free.locked():
            raise unavailable("too many verifications are running")
        async with self._free:
            await self._verify(subscription_id)

    async def _verify(self, subscription_id: int) -> None:
        async def start(connection: Connection) -> tuple[Challenge, int]:
            started = await subscriptions.begin_verification(connection, subscription_id)
            return started, int((await reads.database_time(connection)).timestamp())

        started, timestamp = await self._database.run(start)
        body = msgspec.json.encode(ChallengeMessage(started.challenge))
        outcome = await self._client.post(
            started.callback_url,
            _headers(started, timestamp, body),
            body,
            self._settings().delivery.timeout_seconds,
        )
        _require_echo(outcome, started.challenge)
        await self._database.run(subscriptions.complete_verification, subscription_id, started.challenge)


def _headers(started: Challenge, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Return the headers, signed like those of a delivery. The id reveals only the start of the challenge."""
    message_id = f"ver_{started.challenge[:16]}"
    headers = check_headers(msgspec.json.decode(started.headers, type=dict[str, str]))
    if isinstance(headers, EndpointProblem):  # the row was not written by this API
        raise invalid(f"the subscription's headers cannot be sent: {headers.detail}", "verification_failed")
    return headers | {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(started.secrets, message_id, timestamp, body),
        "webhook-event-type": CHALLENGE_EVENT_TYPE,
    }


def _require_echo(outcome: Outcome, challenge: str) -> None:
    if outcome.error_code is not None:
        detail = (
            f"the endpoint responded with {outcome.response_status}"
            if outcome.response_status is not None
            else f"the request to the endpoint failed: {outcome.error_code}{_in_words(outcome)}"
        )
        raise _failed(detail, outcome.error_code, outcome)
    if not echoes(outcome.response_excerpt, challenge):
        detail = 'the endpoint did not echo the challenge, neither as {"challenge": "…"} nor as bare text'
        raise _failed(detail, "CHALLENGE_MISMATCH", outcome)


def _in_words(outcome: Outcome) -> str:
    hint = (
        "; delivery.ca_file adds a certificate authority" if outcome.error_code == Failure.TLS_FAILED else ""
    )
    return f" ({outcome.detail}{hint})" if outcome.detail else ""


def echoes(body: bytes, challenge: str) -> bool:
    """Return whether a response body is the challenge, as JSON or bare. Pure."""
    if body.strip() == challenge.encode():
        return True
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("challenge") == challenge


def _failed(detail: str, error_code: str, outcome: Outcome) -> Problem:
    """Return the problem without the response body: subscribers must not read what internal hosts respond."""
    return Problem(
        422,
        "verification_failed",
        detail,
        error_code=error_code,
        response_status=outcome.response_status,
        duration_ms=outcome.duration_ms,
    )


class Subscriptions(DatabaseResource):
    """The subscription routes."""

    def __init__(self, context: Context, database: QueryRunner, verification: Verification) -> None:
        super().__init__(context, database)
        self._verification = verification

    @route(
        "POST /v1/subscriptions",
        "subscriptions",
        "Create a subscription",
        SubscriptionWithSecret,
        CREATED,
        description="The endpoint receives nothing until the subscription is verified. The secret is "
        "shown only in this response.",
        body=NewSubscription,
        own_problems=_ENDPOINT_PROBLEMS,
    )
    async def _create(self, request: web.Request) -> web.Response:
        body = await read_json(request, NewSubscription, self._max_bytes)
        created = await self._database.run(subscriptions.create, **self._checked(body))
        found = await self._found(created.subscription_id)
        return json_response(found | {"secret": created.signing_secret}, CREATED)

    @route("GET /v1/subscriptions", "read", "List subscriptions", SubscriptionPage, query=SubscriptionsQuery)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, SubscriptionsQuery)
        rows = await self._database.run(reads.subscriptions, query.page, **query.filters)
        return list_response(rows, query.limit)

    @route(f"GET {_PATH}", "read", "Get a subscription", Subscription)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(await self._found(path_id(request, "subscription")))

    @route(
        f"PATCH {_PATH}",
        "subscriptions",
        "Change a subscription",
        Subscription,
        description="Fields that are not given stay unchanged. A changed `callback_url` must be "
        "verified again. There is no DELETE: `active: false` stops the subscription and keeps "
        "its history.",
        body=SubscriptionChange,
        own_problems=_ENDPOINT_PROBLEMS,
    )
    async def _change(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        body = await read_json(request, SubscriptionChange, self._max_bytes)
        changes = self._checked(body)
        if changes:
            await self._database.run(subscriptions.update, subscription_id, changes)
        found = await self._found(subscription_id)
        if found["active"] and found["verified"]:
            # The change may have released held deliveries, or made some due earlier.
            self._wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
        return json_response(found)

    @route(
        f"POST {_PATH}/verify",
        "subscriptions",
        "Verify the endpoint with a challenge",
        Subscription,
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
        self._wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
        return json_response(await self._found(subscription_id))

    @route(
        f"POST {_PATH}/rotate-secret",
        "subscriptions",
        "Rotate the signing secret",
        RotatedSecret,
        description="Deliveries carry signatures of both secrets until `previous_valid_until`.",
        body=Nothing,
        body_optional=True,
    )
    async def _rotate_secret(self, request: web.Request) -> web.Response:
        subscription_id = path_id(request, "subscription")
        await read_optional_json(request, Nothing, self._max_bytes)
        overlap_seconds = self._settings().subscriptions.secret_overlap_seconds
        rotated = await self._database.run(subscriptions.rotate_secret, subscription_id, overlap_seconds)
        return json_response(
            RotatedSecret(secret=rotated.signing_secret, previous_valid_until=rotated.previous_valid_until)
        )

    async def _found(self, subscription_id: int) -> Row:
        return await self._database.run(reads.subscription, subscription_id)

    def _checked(self, body: NewSubscription | SubscriptionChange) -> dict[str, Any]:
        """Return the given fields, with URL and headers as they are stored."""
        checked = given_fields(body)
        if "callback_url" in checked:
            checked["callback_url"] = self._checked_url(checked["callback_url"])
        if "headers" in checked:
            checked["headers"] = _checked_headers(checked["headers"])
        return checked

    def _checked_url(self, text: str) -> str:
        checked = check_callback_url(text, AddressPolicy.of(self._settings().delivery.networks))
        if isinstance(checked, EndpointProblem):
            raise invalid(f"callback_url {checked.detail}", checked.code.value)
        return checked


def _checked_headers(headers: Mapping[str, str]) -> str:
    """Return the headers as the JSON to store."""
    checked = check_headers(headers)
    if isinstance(checked, EndpointProblem):
        raise invalid(f"headers: {checked.detail}", checked.code.value)
    return msgspec.json.encode(checked).decode()
