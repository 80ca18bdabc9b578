"""Verifies and tests subscriptions: requests to endpoints that are not deliveries, sent at once."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, TypedDict
from uuid import uuid4

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.context import Context
from webhookd.core.limits import RESERVED_EVENT_TYPE_PREFIX
from webhookd.core.settings import VerificationMethod
from webhookd.db.connection import Connection
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.api.subscriptions import SUBSCRIPTION_PATH, Subscription
from webhookd.deliveries.subscriptions import Challenge
from webhookd.http import fields
from webhookd.http.auth import tenant_of
from webhookd.http.requests import path_id, read_optional_json
from webhookd.http.responses import Problem, invalid, json_response, unavailable
from webhookd.http.routes import DatabaseResource, QueryRunner, route
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, GuardedClient
from webhookd.outbound.endpoint import EndpointProblem, check_headers
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.outbound.signatures import CHALLENGE_EVENT_TYPE, ChallengeMessage, sign, standard_body
from webhookd.wakeups import Work

TEST_EVENT_TYPE = "webhookd.test"
TEST_PAYLOAD = b'{"test":true}'
PING_EVENT_TYPE = "webhookd.ping"


class VerifySubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions/{id}/verify."""

    method: Annotated[
        VerificationMethod,
        Meta(
            description="`ping` only if `subscriptions.verification_methods` in the configuration allows it"
        ),
    ] = "challenge"


class TestSubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions/{id}/test."""

    event_type: fields.EventType = TEST_EVENT_TYPE
    payload: fields.NewPayload | UnsetType = UNSET


class TestResult(TypedDict):
    """How the endpoint responded to the test request."""

    delivered: Annotated[bool, Meta(examples=[True], description="the endpoint responded with 2xx")]
    response_status: Annotated[int, Meta(examples=[200])] | None
    error_code: fields.ErrorCode | None
    duration_ms: Annotated[int, Meta(ge=0, examples=[118])]
    response_excerpt: Annotated[
        str, Meta(examples=["OK"], description="the start of the response, as the endpoint sent it")
    ]


class EndpointRequests:
    """Sends requests that are not deliveries: verifications and tests, a bounded number at a time."""

    def __init__(self, context: Context, database: QueryRunner, client: GuardedClient) -> None:
        self._database = database
        self._client = client
        self._settings = context.settings
        # Each may take as long as a delivery; the client reserves these connections for them.
        self._free = asyncio.Semaphore(VERIFICATION_CONNECTIONS)

    async def verify(self, subscription_id: int, method: VerificationMethod, tenant: str | None) -> None:
        """Return when the subscription is verified; otherwise raise a Problem with the reason."""
        if method not in self._settings().subscriptions.verification_methods:
            raise invalid(f"subscriptions.verification_methods does not allow {method}")

        async def start(connection: Connection) -> tuple[Challenge, datetime]:
            started = await subscriptions.begin_verification(connection, subscription_id, tenant)
            return started, await reads.database_time(connection)

        started, now = await self._database.run(start)
        is_ping = method == "ping"
        event_type = PING_EVENT_TYPE if is_ping else CHALLENGE_EVENT_TYPE
        body = (
            standard_body(PING_EVENT_TYPE, now, b"{}")
            if is_ping
            else msgspec.json.encode(ChallengeMessage(started.challenge))
        )
        message_id = f"ver_{started.challenge[:16]}"  # reveals only the start of the challenge
        headers = _signed_headers(started.secrets, started.headers, message_id, event_type, now, body)
        outcome = await self._send(started.callback_url, headers, body)
        _require_success(outcome)
        if not is_ping:
            _require_echo(outcome, started.challenge)
        await self._database.run(
            subscriptions.complete_verification, subscription_id, started.challenge, tenant, method
        )

    async def test(self, subscription_id: int, test: TestSubscription, tenant: str | None) -> Outcome:
        """Send a test event, and return how the endpoint responded.

        Without the response of an endpoint that is not verified: it may not be the subscriber's own.
        """
        prepared = await self._database.run(subscriptions.prepare_test, subscription_id, tenant)
        if test.event_type.startswith(RESERVED_EVENT_TYPE_PREFIX):
            raise invalid(f"event_type must not start with {RESERVED_EVENT_TYPE_PREFIX}")
        body = TEST_PAYLOAD if isinstance(test.payload, UnsetType) else bytes(test.payload)
        if prepared.format == "standard":
            body = standard_body(test.event_type, prepared.now, body)
        message_id = f"test_{uuid4().hex}"
        headers = _signed_headers(
            prepared.secrets, prepared.headers, message_id, test.event_type, prepared.now, body
        )
        outcome = await self._send(prepared.callback_url, headers, body)
        return outcome if prepared.verified else outcome._replace(response_excerpt=b"")

    async def _send(self, url: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        if self._free.locked():
            raise unavailable("too many verifications and tests are running")
        async with self._free:
            return await self._client.post(url, headers, body, self._settings().delivery.timeout_seconds)


def _signed_headers(
    secrets: Sequence[str], stored_headers: str, message_id: str, event_type: str, now: datetime, body: bytes
) -> Mapping[str, str]:
    """Return the headers, signed like those of a delivery."""
    headers = check_headers(msgspec.json.decode(stored_headers, type=dict[str, str]))
    if isinstance(headers, EndpointProblem):  # the row was not written by this API
        raise invalid(f"the subscription's headers cannot be sent: {headers.detail}", "verification_failed")
    timestamp = int(now.timestamp())
    return headers | {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secrets, message_id, timestamp, body),
        "webhook-event-type": event_type,
    }


def _require_success(outcome: Outcome) -> None:
    if outcome.error_code is None:
        return
    detail = (
        f"the endpoint responded with {outcome.response_status}"
        if outcome.response_status is not None
        else f"the request to the endpoint failed: {outcome.error_code}{_in_words(outcome)}"
    )
    raise _failed(detail, outcome.error_code, outcome)


def _require_echo(outcome: Outcome, challenge: str) -> None:
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


class EndpointChecks(DatabaseResource):
    """The routes that send a request to a subscription's endpoint."""

    def __init__(self, context: Context, database: QueryRunner, requests: EndpointRequests) -> None:
        super().__init__(context, database)
        self._requests = requests

    @route(
        f"POST {SUBSCRIPTION_PATH}/verify",
        "subscriptions",
        "Verify the endpoint",
        Subscription,
        description='Sends `{"type": "webhookd.verification", "challenge": "…"}` to the endpoint, '
        'signed. The endpoint must respond 2xx with `{"challenge": "…"}` or the bare challenge. With '
        "`ping` it gets a signed `webhookd.ping` instead, and must respond 2xx.",
        body=VerifySubscription,
        body_optional=True,
        own_problems=((409, "verification_stale"), (422, "verification_failed")),
        for_tenants=True,
    )
    async def _verify(self, request: web.Request) -> web.Response:
        subscription_id, tenant = path_id(request, "subscription"), tenant_of(request)
        body = await read_optional_json(request, VerifySubscription, self._max_bytes)
        await self._requests.verify(subscription_id, body.method, tenant)
        self._wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
        return json_response(await self._database.run(reads.subscription, subscription_id, tenant))

    @route(
        f"POST {SUBSCRIPTION_PATH}/test",
        "subscriptions",
        "Send a test event",
        TestResult,
        description="Sends one signed event to the endpoint at once, outside the queue, and returns how it "
        "responded. Nothing is stored.",
        body=TestSubscription,
        body_optional=True,
        own_problems=((422, "address_blocked"), (422, "verification_failed")),
        for_tenants=True,
    )
    async def _test(self, request: web.Request) -> web.Response:
        subscription_id, tenant = path_id(request, "subscription"), tenant_of(request)
        body = await read_optional_json(request, TestSubscription, self._max_bytes)
        outcome = await self._requests.test(subscription_id, body, tenant)
        if outcome.error_code == Failure.ADDRESS_BLOCKED:
            raise invalid("the endpoint's address is not allowed", "address_blocked")
        return json_response(
            TestResult(
                delivered=outcome.delivered,
                response_status=outcome.response_status,
                error_code=outcome.error_code,
                duration_ms=outcome.duration_ms,
                response_excerpt=(outcome.response_excerpt or b"").decode("utf-8", "replace"),
            )
        )
