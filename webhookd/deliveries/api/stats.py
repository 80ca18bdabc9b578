"""/v1/stats: rates, dead letters and durations, over time and by subscription."""

from typing import Annotated, Literal, TypeAlias, TypedDict

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from webhookd.core.limits import MAX_STATS_DAYS, MAX_STATS_SUBSCRIPTIONS, MAX_TENANT_STATS_SUBSCRIPTIONS
from webhookd.deliveries import stats
from webhookd.http import fields
from webhookd.http.auth import tenant_of
from webhookd.http.requests import given, read_query
from webhookd.http.responses import Problem, invalid, json_response
from webhookd.http.routes import DatabaseResource, route

_LONGEST_IDS = MAX_STATS_SUBSCRIPTIONS * 20

Step: TypeAlias = Annotated[
    int,
    Meta(
        ge=60,
        examples=[60],
        description="seconds of a step: 60 or 300 for the last 3 hours, 3600 or 86400 for any time",
    ),
]
Delivered: TypeAlias = Annotated[int, Meta(ge=0, examples=[117], description="successful attempts")]
Failed: TypeAlias = Annotated[int, Meta(ge=0, examples=[3], description="failed attempts")]
Completed: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        examples=[117],
        description="completed deliveries: as many as `delivered`, because the first success completes one",
    ),
]
DeadLettered: TypeAlias = Annotated[
    int, Meta(ge=0, examples=[0], description="deliveries that became dead letters")
]
SuccessRate: TypeAlias = Annotated[
    Annotated[float, Meta(ge=0, le=1, examples=[0.975])] | None,
    Meta(description="successful attempts of all attempts; null: there was no attempt"),
]
Milliseconds: TypeAlias = Annotated[
    Annotated[float, Meta(ge=0, examples=[42.5])] | None,
    Meta(
        description="estimated from a histogram of the attempts' durations; durations above 30 s count as "
        "30 s; null: no attempt has a duration"
    ),
]


class StatsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GET /v1/stats."""

    subscription_id: fields.Id | UnsetType = UNSET
    tenant: fields.Tenant | UnsetType = UNSET
    since: Annotated[fields.Time, Meta(description="default: an hour before `until`")] | UnsetType = UNSET
    until: Annotated[fields.Time, Meta(description="default: now")] | UnsetType = UNSET
    step_seconds: (
        Annotated[
            Literal[60, 300, 3600, 86400],
            Meta(description="default: the smallest that gives no more than 170 points"),
        ]
        | UnsetType
    ) = UNSET


class SubscriptionStatsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """GET /v1/stats/subscriptions."""

    ids: (
        Annotated[
            str,
            Meta(
                pattern=r"^[0-9]{1,19}(,[0-9]{1,19})*\Z",
                max_length=_LONGEST_IDS,
                examples=["7,8,9"],
                description=f"ids of at most {MAX_STATS_SUBSCRIPTIONS} subscriptions, separated by commas",
            ),
        ]
        | UnsetType
    ) = UNSET
    tenant: fields.Tenant | UnsetType = UNSET
    hours: Annotated[
        Literal[2, 24, 168, 720], Meta(description="the last hours, up to the end of the current step")
    ] = 24


class StatsPoint(TypedDict):
    """The numbers of a step."""

    at: Annotated[fields.Time, Meta(description="beginning of the step")]
    delivered: Delivered
    failed: Failed
    completed: Completed
    dead_lettered: DeadLettered


class StatsTotals(TypedDict):
    """The numbers of the whole period."""

    delivered: Delivered
    failed: Failed
    completed: Completed
    dead_lettered: DeadLettered
    success_rate: SuccessRate
    p50_ms: Milliseconds
    p95_ms: Milliseconds


class Stats(TypedDict):
    """What was attempted in a period. Attempts count when their results are applied."""

    since: Annotated[fields.Time, Meta(description="rounded down to a whole step")]
    until: Annotated[fields.Time, Meta(description="rounded up to a whole step")]
    step_seconds: Step
    points: list[StatsPoint]
    totals: StatsTotals


class Sparkline(TypedDict):
    """The numbers of each step, oldest first."""

    delivered: list[Delivered]
    failed: list[Failed]


class SubscriptionStats(StatsTotals):
    """The numbers of a subscription."""

    subscription_id: fields.Id
    sparkline: Sparkline


class SubscriptionStatsList(TypedDict):
    """The numbers of several subscriptions, in the same steps."""

    since: fields.Time
    until: fields.Time
    step_seconds: Step
    items: list[SubscriptionStats]


class StatsReports(DatabaseResource):
    """The routes of statistics."""

    @route(
        "GET /v1/stats",
        "read",
        "Get rates and durations over time",
        Stats,
        description="Of a subscription, of a tenant with at most "
        f"{MAX_TENANT_STATS_SUBSCRIPTIONS} of them, or of all together, in steps of the same length; a step "
        f"without activity has zeros. A period has at most {MAX_STATS_DAYS} days. `retention.stats_days` "
        "says how long the numbers are kept.",
        query=StatsQuery,
        own_problems=((404, "not_found"),),
        for_tenants=True,
    )
    async def _get(self, request: web.Request) -> web.Response:
        query = read_query(request, StatsQuery)
        found = await self._database.run(
            stats.stats,
            given(query.subscription_id),
            _tenant(request, given(query.tenant)),
            given(query.since),
            given(query.until),
            given(query.step_seconds),
        )
        return json_response(found)

    @route(
        "GET /v1/stats/subscriptions",
        "read",
        "Get rates and durations of many subscriptions",
        SubscriptionStatsList,
        description="Of the given subscriptions, as far as they exist; of the newest "
        f"{MAX_STATS_SUBSCRIPTIONS} of a tenant; or else of those whose endpoints are failing, the "
        f"longest-failing first. A sparkline has {stats.SPARKLINE_POINTS} points.",
        query=SubscriptionStatsQuery,
        own_problems=((404, "not_found"),),
        for_tenants=True,
    )
    async def _list(self, request: web.Request) -> web.Response:
        query = read_query(request, SubscriptionStatsQuery)
        tenant = _tenant(request, given(query.tenant))
        ids = _ids(given(query.ids))
        return json_response(await self._database.run(stats.stats_of_many, ids, tenant, query.hours))


def _tenant(request: web.Request, wanted: str | None) -> str | None:
    """Return the tenant that the token is bound to, or the wanted one."""
    bound = tenant_of(request)
    if bound is not None and wanted not in (None, bound):
        raise Problem(404, "not_found", "no such tenant")
    return bound or wanted


def _ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    ids = list(dict.fromkeys(map(int, text.split(","))))
    if len(ids) > MAX_STATS_SUBSCRIPTIONS:
        raise invalid(f"ids must name at most {MAX_STATS_SUBSCRIPTIONS} subscriptions", "invalid_parameter")
    return ids
