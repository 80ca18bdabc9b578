"""/v1/tenants: the customers of the users of webhookd."""

from typing import Annotated, TypeAlias, TypedDict

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import FREE_TEXT, MAX_SUBSCRIPTIONS, MAX_TENANT_NAME_CHARACTERS
from webhookd.deliveries import reads, tenants
from webhookd.http import fields
from webhookd.http.auth import ACTOR, tenant_of
from webhookd.http.requests import Paged, given, given_fields, read_json, read_query
from webhookd.http.responses import json_response, list_response
from webhookd.http.routes import TENANT_ID, DatabaseResource, OtherResponse, route
from webhookd.retention import queries as retention
from webhookd.retention.api import ACCEPTED, Erasure, erasure_accepted
from webhookd.wakeups import Work

CREATED = 201
_PATH = f"/v1/tenants/{TENANT_ID}"

Name: TypeAlias = Annotated[
    str,
    Meta(max_length=MAX_TENANT_NAME_CHARACTERS, pattern=FREE_TEXT, examples=["Acme Ltd"]),
]
Active: TypeAlias = Annotated[
    bool,
    Meta(
        examples=[True], description="false: events are routed to its subscriptions, and all deliveries wait"
    ),
]
MaxSubscriptions: TypeAlias = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_SUBSCRIPTIONS, examples=[20])] | None,
    Meta(description="the most subscriptions it may have; null: no limit"),
]


class TenantChange(msgspec.Struct, forbid_unknown_fields=True):
    """PUT /v1/tenants/{tenant}: fields that are not given stay unchanged."""

    name: Name | UnsetType | None = UNSET
    active: Active | UnsetType = UNSET
    max_subscriptions: MaxSubscriptions | UnsetType = UNSET


class TenantsQuery(Paged, kw_only=True):
    """GET /v1/tenants."""

    prefix: (
        Annotated[
            fields.Tenant,
            Meta(description="only tenants whose id begins with this; the list is in the order of their ids"),
        ]
        | UnsetType
    ) = UNSET


class Tenant(TypedDict):
    """A tenant. It is created by a PUT, or by its first subscription."""

    id: fields.Id
    tenant: fields.Tenant
    name: Name | None
    active: Active
    max_subscriptions: MaxSubscriptions
    subscriptions: fields.Count
    created_at: fields.Time
    updated_at: fields.Time


class TenantPage(TypedDict):
    """A page of tenants."""

    items: list[Tenant]
    next_cursor: fields.Cursor


class Tenants(DatabaseResource):
    """The tenant routes."""

    @route("GET /v1/tenants", "read", "List tenants", TenantPage, query=TenantsQuery, for_tenants=True)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, TenantsQuery)
        rows = await self._database.run(reads.tenants, query.page, tenant_of(request), given(query.prefix))
        return list_response(rows, query.limit)

    @route(f"GET {_PATH}", "read", "Get a tenant", Tenant, for_tenants=True)
    async def _get(self, request: web.Request) -> web.Response:
        name, tenant = request.match_info["id"], tenant_of(request)
        return json_response(await self._database.run(reads.tenant, name, tenant))

    @route(
        f"PUT {_PATH}",
        "subscriptions",
        "Create or change a tenant",
        Tenant,
        body=TenantChange,
        other_responses={CREATED: OtherResponse("It was created", {})},
        own_problems=((409, "being_erased"),),
    )
    async def _put(self, request: web.Request) -> web.Response:
        tenant = request.match_info["id"]
        body = await read_json(request, TenantChange, self._max_bytes)
        created = await self._database.run(tenants.put, tenant, given_fields(body))
        # Deliveries may have waited until the tenant is active again.
        self._wakeups.wake(Work.SAGAS, search=True, notify=True)
        found = await self._database.run(reads.tenant, tenant)
        return json_response(found, CREATED if created else 200)

    @route(
        f"DELETE {_PATH}",
        "subscriptions",
        "Erase a tenant",
        Erasure,
        ACCEPTED,
        description="Removes the tenant, its subscriptions with their secrets and headers, its events, "
        "deliveries, attempts and dead letters, in the background. Nothing is routed or sent from now on. "
        "`Location` is the address of its progress. Repeating the request returns the running erasure.",
    )
    async def _delete(self, request: web.Request) -> web.Response:
        tenant = request.match_info["id"]
        erasure = await self._database.run(retention.request_tenant_erasure, tenant, request[ACTOR])
        self._wakeups.wake(Work.ERASURES, notify=True)
        return erasure_accepted(erasure)
