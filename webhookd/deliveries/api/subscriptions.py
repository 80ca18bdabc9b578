"""/v1/subscriptions: creates, changes, verifies, tests and deletes subscriptions, and rotates secrets."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias, TypedDict
from uuid import uuid4

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.context import Context
from webhookd.core.limits import (
    MAX_ID,
    MAX_PER_SECOND,
    MAX_REPLAY_LIMIT,
    MAX_SECRET_CHARACTERS,
    MAX_URL_CHARACTERS,
    RESERVED_EVENT_TYPE_PREFIX,
    SECRET,
)
from webhookd.core.settings import VerificationMethod
from webhookd.db.connection import Connection
from webhookd.db.paging import Row
from webhookd.deliveries import reads, router, subscriptions
from webhookd.deliveries.router import Replay
from webhookd.deliveries.subscriptions import Challenge
from webhookd.http import fields
from webhookd.http.auth import ACTOR, tenant_of
from webhookd.http.requests import (
    Nothing,
    Paged,
    given_fields,
    own_filters,
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
from webhookd.retention import queries as retention
from webhookd.retention.api import ACCEPTED, Erasure, erasure_accepted
from webhookd.wakeups import Work

CREATED = 201
NO_CONTENT = 204
REPLAY_BATCH = 500
TEST_EVENT_TYPE = "webhookd.test"
TEST_PAYLOAD = b'{"test":true}'
PING_EVENT_TYPE = "webhookd.ping"
_PATH = "/v1/subscriptions/{id:[0-9]+}"
_ENDPOINT_PROBLEMS = tuple((422, code.value) for code in EndpointCode)

Secret: TypeAlias = Annotated[
    str,
    Meta(examples=["whsec_YW4gZXhhbXBsZSwgbm90IGEgc2VjcmV0IQ=="], description="shown only in this response"),
]


Active: TypeAlias = Annotated[
    bool, Meta(examples=[True], description="false: new events are not routed to it, and deliveries wait")
]
Paused: TypeAlias = Annotated[
    bool, Meta(examples=[False], description="true: events are routed to it, and deliveries wait")
]
Format: TypeAlias = Annotated[
    Literal["raw", "standard"],
    Meta(
        description="the body of a delivery: the payload, byte for byte, or `standard`: "
        '`{"type": …, "timestamp": …, "data": <payload>}`, so that the signature covers the type'
    ),
]
MaxPerSecond: TypeAlias = Annotated[
    Annotated[float, Meta(gt=0, le=MAX_PER_SECOND, examples=[10.0])] | None,
    Meta(description="the most requests a second, over all instances; null: no limit"),
]
PendingCallbackUrl: TypeAlias = Annotated[
    fields.CallbackUrl | None,
    Meta(
        examples=[None],
        description="a changed `callback_url`, until it is verified. Deliveries go to the old one until then",
    ),
]
FirstEventType: TypeAlias = Annotated[
    fields.EventPattern, Meta(examples=["order.created"], description="the first of `event_types`")
]


class NewSubscription(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/subscriptions."""

    callback_url: fields.CallbackUrl
    event_type: FirstEventType | UnsetType = UNSET
    event_types: fields.EventTypes | UnsetType = UNSET
    tenant: fields.Tenant | UnsetType = UNSET
    filter: fields.Filter | UnsetType = UNSET
    paused: Paused = False
    format: Format = "raw"
    max_per_second: MaxPerSecond = None
    max_attempts: fields.OwnAttempts = None
    base_delay_seconds: fields.OwnDelay = None
    headers: fields.CustomHeaders = {}
    description: fields.Description | None = None
    secret: (
        Annotated[
            str,
            Meta(
                max_length=MAX_SECRET_CHARACTERS,
                pattern=SECRET,
                examples=["whsec_YW4gZXhhbXBsZSwgbm90IGEgc2VjcmV0IQ=="],
                description="to migrate from another system; otherwise one is generated",
            ),
        ]
        | UnsetType
    ) = UNSET


class SubscriptionChange(msgspec.Struct, forbid_unknown_fields=True):
    """PATCH /v1/subscriptions/{id}: changes the given fields; null removes an override."""

    active: Active | UnsetType = UNSET
    paused: Paused | UnsetType = UNSET
    callback_url: fields.CallbackUrl | UnsetType = UNSET
    event_type: FirstEventType | UnsetType = UNSET
    event_types: fields.EventTypes | UnsetType = UNSET
    filter: fields.Filter | UnsetType = UNSET
    format: Format | UnsetType = UNSET
    max_per_second: MaxPerSecond | UnsetType = UNSET
    max_attempts: fields.OwnAttempts | UnsetType = UNSET
    base_delay_seconds: fields.OwnDelay | UnsetType = UNSET
    headers: fields.CustomHeaders | UnsetType = UNSET
    description: fields.Description | UnsetType | None = UNSET


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
    started_at: fields.Time
    until: fields.Time
    last_event_id: Annotated[
        fields.Id | None, Meta(description="after_event_id of the next request; null: this was the last")
    ]


class DeleteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """DELETE /v1/subscriptions/{id}."""

    erase: Annotated[
        bool, Meta(description="also remove its deliveries, attempts, dead letters and change log")
    ] = False


class SubscriptionsQuery(Paged, kw_only=True):
    """GET /v1/subscriptions."""

    tenant: fields.Tenant | UnsetType = UNSET
    event_type: FirstEventType | UnsetType = UNSET
    active: bool | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    verified: bool | UnsetType = UNSET
    search: (
        Annotated[
            str,
            Meta(min_length=1, max_length=MAX_URL_CHARACTERS, description="a part of the URL or description"),
        ]
        | UnsetType
    ) = UNSET


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
    event_type: FirstEventType
    event_types: fields.EventTypes
    tenant: fields.TenantOrNone
    tenant_active: Annotated[
        bool, Meta(examples=[True], description="false: its tenant is not active, and deliveries wait")
    ]
    filter: fields.Filter
    callback_url: fields.CallbackUrl
    pending_callback_url: PendingCallbackUrl
    active: Active
    paused: Paused
    verified: bool
    held_because: Annotated[
        fields.HoldReason | None, Meta(examples=[None], description="why deliveries wait; null: they are sent")
    ]
    verified_by: VerificationMethod | None
    format: Format
    max_per_second: MaxPerSecond
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
            _standard_body(PING_EVENT_TYPE, now, b"{}")
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
            body = _standard_body(test.event_type, prepared.now, body)
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


def _standard_body(event_type: str, now: datetime, payload: bytes) -> bytes:
    """Return the body of the format `standard`, as webhookd.standard_body() makes it."""
    timestamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return b'{"type":"%s","timestamp":"%s","data":%s}' % (event_type.encode(), timestamp.encode(), payload)


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


class Subscriptions(DatabaseResource):
    """The subscription routes."""

    def __init__(self, context: Context, database: QueryRunner, requests: EndpointRequests) -> None:
        super().__init__(context, database)
        self._requests = requests

    @route(
        "POST /v1/subscriptions",
        "subscriptions",
        "Create a subscription",
        SubscriptionWithSecret,
        CREATED,
        description="The endpoint receives nothing until the subscription is verified. The secret is "
        "shown only in this response.",
        body=NewSubscription,
        own_problems=((409, "limit_reached"), (409, "being_erased"), *_ENDPOINT_PROBLEMS),
        for_tenants=True,
    )
    async def _create(self, request: web.Request) -> web.Response:
        body = await read_json(request, NewSubscription, self._max_bytes)
        given, tenant = self._checked(body), tenant_of(request)
        if tenant is not None and given.setdefault("tenant", tenant) != tenant:
            raise Problem(403, "forbidden", f"this token is bound to tenant {tenant}")
        created = await self._database.run(subscriptions.create, **given)
        found = await self._found(created.subscription_id, tenant)
        return json_response(found | {"secret": created.signing_secret}, CREATED)

    @route(
        "GET /v1/subscriptions",
        "read",
        "List subscriptions",
        SubscriptionPage,
        query=SubscriptionsQuery,
        for_tenants=True,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, SubscriptionsQuery)
        rows = await self._database.run(reads.subscriptions, query.page, **own_filters(request, query))
        return list_response(rows, query.limit)

    @route(f"GET {_PATH}", "read", "Get a subscription", Subscription, for_tenants=True)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(await self._found(path_id(request, "subscription"), tenant_of(request)))

    @route(
        f"PATCH {_PATH}",
        "subscriptions",
        "Change a subscription",
        Subscription,
        description="Fields that are not given stay unchanged. A changed `callback_url` must be verified: "
        "until then it is in `pending_callback_url`, and deliveries go to the old one.",
        body=SubscriptionChange,
        own_problems=_ENDPOINT_PROBLEMS,
        for_tenants=True,
    )
    async def _change(self, request: web.Request) -> web.Response:
        subscription_id, tenant = path_id(request, "subscription"), tenant_of(request)
        body = await read_json(request, SubscriptionChange, self._max_bytes)
        changes = self._checked(body)
        if changes:
            await self._database.run(subscriptions.update, subscription_id, changes, tenant)
        found = await self._found(subscription_id, tenant)
        if found["held_because"] is None:
            # The change may have released held deliveries, or made some due earlier.
            self._wakeups.wake(Work.SAGAS, [subscription_id], notify=True)
        return json_response(found)

    @route(
        f"POST {_PATH}/verify",
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
        return json_response(await self._found(subscription_id, tenant))

    @route(
        f"POST {_PATH}/rotate-secret",
        "subscriptions",
        "Rotate the signing secret",
        RotatedSecret,
        description="Deliveries carry signatures of both secrets until `previous_valid_until`.",
        body=Nothing,
        body_optional=True,
        for_tenants=True,
    )
    async def _rotate_secret(self, request: web.Request) -> web.Response:
        subscription_id, tenant = path_id(request, "subscription"), tenant_of(request)
        await read_optional_json(request, Nothing, self._max_bytes)
        overlap_seconds = self._settings().subscriptions.secret_overlap_seconds
        rotated = await self._database.run(
            subscriptions.rotate_secret, subscription_id, overlap_seconds, tenant
        )
        return json_response(
            RotatedSecret(secret=rotated.signing_secret, previous_valid_until=rotated.previous_valid_until)
        )

    @route(
        f"POST {_PATH}/test",
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

    @route(
        f"POST {_PATH}/replay",
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
            examined=0, matched=0, created=0, started_at=started_at, until=until, last_event_id=None
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
            after_id, done = batch.last_event_id, batch.examined < size
        counts["last_event_id"] = None if done else after_id
        return json_response(counts)

    @route(
        f"DELETE {_PATH}",
        "subscriptions",
        "Delete a subscription",
        Erasure,
        ACCEPTED,
        description="From now on nothing is routed or sent to it. Its secret and headers are gone; its "
        "deliveries stay as history. With `erase=true` these are removed too, in the background, and the "
        "response is 202 with the erasure; its events stay.",
        query=DeleteQuery,
        empty_responses={NO_CONTENT: "It is deleted, and nothing is erased"},
        for_tenants=True,
    )
    async def _delete(self, request: web.Request) -> web.Response:
        subscription_id, tenant = path_id(request, "subscription"), tenant_of(request)
        if read_query(request, DeleteQuery).erase:
            erasure = await self._database.run(
                retention.request_subscription_erasure, subscription_id, request[ACTOR], tenant
            )
            self._wakeups.wake(Work.ERASURES, notify=True)
            return erasure_accepted(erasure)
        await self._database.run(subscriptions.delete, subscription_id, tenant)
        return web.Response(status=NO_CONTENT)

    async def _found(self, subscription_id: int, tenant: str | None) -> Row:
        return await self._database.run(reads.subscription, subscription_id, tenant)

    def _checked(self, body: NewSubscription | SubscriptionChange) -> dict[str, Any]:
        """Return the given fields, with URL and headers as they are stored."""
        checked = given_fields(body)
        if "callback_url" in checked:
            checked["callback_url"] = self._checked_url(checked["callback_url"])
        if "headers" in checked:
            checked["headers"] = _checked_headers(checked["headers"])
        if isinstance(body, NewSubscription):
            if not {"event_type", "event_types"} & checked.keys():
                raise invalid("event_types is required")
            checked.setdefault("event_type", None)
        return checked

    def _checked_url(self, text: str) -> str:
        checked = check_callback_url(text, AddressPolicy.of(self._settings().delivery.networks))
        if isinstance(checked, EndpointProblem):
            raise invalid(f"callback_url {checked.detail}", checked.code.value)
        return checked


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers as they are stored."""
    checked = check_headers(headers)
    if isinstance(checked, EndpointProblem):
        raise invalid(f"headers: {checked.detail}", checked.code.value)
    return dict(checked)
