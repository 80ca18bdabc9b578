"""/v1/erasures: the progress of erasures, and afterwards the evidence."""

from typing import Annotated, Any, Literal, TypedDict

from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.db.paging import Row
from webhookd.http import fields
from webhookd.http.auth import tenant_of
from webhookd.http.requests import Paged, own_filters, path_id, read_query
from webhookd.http.responses import HEADERS, encoded, json_response, list_response
from webhookd.http.routes import DatabaseResource, route
from webhookd.retention import queries

ACCEPTED = 202


class ErasuresQuery(Paged, kw_only=True):
    """GET /v1/erasures."""

    status: Literal["running", "finished"] | UnsetType = UNSET
    tenant: (
        Annotated[
            fields.Tenant,
            Meta(description="of this tenant and its subscriptions, also after its name was erased"),
        ]
        | UnsetType
    ) = UNSET
    subscription_id: fields.Id | UnsetType = UNSET


class Erasure(TypedDict):
    """The removal of everything of a tenant, or of a subscription. The counts grow while it runs."""

    id: fields.Id
    tenant: Annotated[
        fields.Tenant | None, Meta(description="null: no tenant, or the tenant is erased by now")
    ]
    tenant_sha256: Annotated[
        Annotated[str, Meta(examples=["5b3a…"])] | None,
        Meta(description="of an erased tenant: the SHA-256 of its name, in hexadecimal digits"),
    ]
    subscription_id: Annotated[fields.Id | None, Meta(description="null: the whole tenant")]
    status: Annotated[str, Meta(examples=["running"], description="`running` or `finished`")]
    waits_for: Annotated[
        Annotated[str, Meta(examples=["a request in flight, or a job that is not finished"])] | None,
        Meta(description="while it is running and something is in use: what"),
    ]
    requested_by: Annotated[str, Meta(examples=["support"], description="the name of the token")]
    requested_at: fields.Time
    finished_at: fields.Time | None
    events: fields.Count
    deliveries: fields.Count
    attempts: fields.Count
    dead_letters: fields.Count
    subscriptions: fields.Count
    jobs: Annotated[
        int, Meta(ge=0, examples=[0], description="jobs of the job queue, created from its events")
    ]


class ErasurePage(TypedDict):
    """A page of erasures."""

    items: list[Erasure]
    next_cursor: fields.Cursor


def erasure_accepted(row: Row) -> web.Response:
    """Return 202 with the erasure, and its address in Location."""
    return web.Response(
        body=encoded(_shown(row)),
        status=ACCEPTED,
        content_type="application/json",
        headers=HEADERS | {"Location": f"/v1/erasures/{row['id']}"},
    )


class Erasures(DatabaseResource):
    """The erasure routes."""

    @route("GET /v1/erasures", "read", "List erasures", ErasurePage, query=ErasuresQuery, for_tenants=True)
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, ErasuresQuery)
        selection = queries.ErasureFilter(**own_filters(request, query), only_tenant=tenant_of(request))
        rows = await self._database.run(queries.erasures, query.page, selection)
        return list_response([_shown(row) for row in rows], query.limit)

    @route(
        "GET /v1/erasures/{id:[0-9]+}",
        "read",
        "Get an erasure",
        Erasure,
        description="Its progress while it runs, and afterwards the evidence that it was done.",
        for_tenants=True,
    )
    async def _get(self, request: web.Request) -> web.Response:
        erasure_id, tenant = path_id(request, "erasure"), tenant_of(request)
        return json_response(_shown(await self._database.run(queries.erasure, erasure_id, tenant)))


def _shown(row: Row) -> dict[str, Any]:
    return row | {"status": "finished" if row["finished_at"] else "running"}
