"""GET /v1/attempts: the newest attempts of all deliveries."""

from typing import Annotated, TypedDict

from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.deliveries import activity
from webhookd.http import fields
from webhookd.http.requests import Paged, own_filters, read_query
from webhookd.http.responses import list_response
from webhookd.http.routes import DatabaseResource, route


class AttemptsQuery(Paged, kw_only=True):
    """GET /v1/attempts."""

    tenant: fields.Tenant | UnsetType = UNSET
    subscription_id: fields.Id | UnsetType = UNSET
    event_type: fields.EventType | UnsetType = UNSET
    status: AttemptStatus | UnsetType = UNSET


class RecentAttempt(TypedDict):
    """An attempt, with what it sends and where."""

    id: fields.Id
    saga_id: fields.Id
    event_id: fields.Id
    subscription_id: fields.Id
    event_type: fields.EventType
    tenant: fields.TenantOrNone
    callback_url: fields.CallbackUrl
    attempt: Annotated[int, Meta(ge=1, examples=[1])]
    status: Annotated[AttemptStatus, Meta(examples=["Failed"])]
    created_at: fields.Time
    finished_at: fields.Time | None
    response_status: Annotated[int, Meta(examples=[503])] | None
    error_code: fields.ErrorCode | None
    duration_ms: Annotated[int, Meta(ge=0, examples=[118])] | None
    delivery_status: Annotated[
        SagaStatus, Meta(examples=["PendingRetry"], description="the status of the whole delivery now")
    ]
    is_latest: Annotated[bool, Meta(examples=[True], description="it is the newest attempt of its delivery")]
    result_applied_at: fields.Time | None


class RecentAttemptPage(TypedDict):
    """A page of attempts."""

    items: list[RecentAttempt]
    next_cursor: fields.Cursor


class RecentAttempts(DatabaseResource):
    """The route of the newest attempts."""

    @route(
        "GET /v1/attempts",
        "read",
        "List the newest attempts",
        RecentAttemptPage,
        query=AttemptsQuery,
        description="Of all deliveries, newest first: what is happening now. The filters are compared with "
        f"at most {activity.MAX_EXAMINED:,} attempts, so a page can have fewer rows than `limit`, also none, "
        "and still a next page. To search the past, list deliveries.",
        for_tenants=True,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, AttemptsQuery)
        selection = activity.AttemptFilter(**own_filters(request, query))
        found = await self._database.run(activity.attempts, query.page, selection)
        return list_response(found.rows, query.limit, cut_at=found.cut_at)
