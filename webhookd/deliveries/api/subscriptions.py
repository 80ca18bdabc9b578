"""/v1/subscriptions: creates, shows, changes and deletes subscriptions, and rotates secrets.

endpoint_requests.py verifies and tests them, replay.py delivers past events.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import (
    ID_LIST,
    MAX_ID,
    MAX_LISTED_IDS,
    MAX_PER_SECOND,
    MAX_SECRET_CHARACTERS,
    MAX_URL_CHARACTERS,
    SECRET,
)
from webhookd.core.settings import VerificationMethod
from webhookd.db.paging import Row
from webhookd.deliveries import reads, subscriptions
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
from webhookd.http.responses import Problem, invalid, json_response, list_response
from webhookd.http.routes import DatabaseResource, route
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.endpoint import EndpointCode, EndpointProblem, check_callback_url, check_headers
from webhookd.retention import queries as retention
from webhookd.retention.api import ACCEPTED, Erasure, erasure_accepted
from webhookd.wakeups import Work

CREATED = 201
NO_CONTENT = 204
SUBSCRIPTION_PATH = "/v1/subscriptions/{id:[0-9]+}"
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
    ids: (
        Annotated[
            str,
            Meta(
                pattern=ID_LIST,
                examples=["7,42"],
                description=f"up to {MAX_LISTED_IDS} ids, separated by commas. Ids of deleted subscriptions "
                "are left out",
            ),
        ]
        | UnsetType
    ) = UNSET

    @property
    def filters(self) -> dict[str, Any]:
        """The filters, with the ids as numbers. An id that is too large cannot exist."""
        given = super().filters
        if "ids" in given:
            numbers = map(int, given["ids"].split(","))
            given["ids"] = [number for number in numbers if number <= MAX_ID]
        return given


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
        fields.HoldReason | None,
        Meta(examples=[None], description="why deliveries wait; null: they are sent"),
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


class Subscriptions(DatabaseResource):
    """The subscription routes."""

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

    @route(f"GET {SUBSCRIPTION_PATH}", "read", "Get a subscription", Subscription, for_tenants=True)
    async def _get(self, request: web.Request) -> web.Response:
        return json_response(await self._found(path_id(request, "subscription"), tenant_of(request)))

    @route(
        f"PATCH {SUBSCRIPTION_PATH}",
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
        f"POST {SUBSCRIPTION_PATH}/rotate-secret",
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
        f"DELETE {SUBSCRIPTION_PATH}",
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
