"""Reads the rollup of attempts and deliveries: rates and durations, over time and by subscription.

delivery_stats has the last hours by minute, delivery_stats_hours what is older. A row is in one of them,
so both are read in one statement. The functions that apply results write them; retention moves the rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from webhookd.core.errors import Refusal, Refused
from webhookd.core.limits import (
    MAX_ID,
    MAX_STATS_DAYS,
    MAX_STATS_SUBSCRIPTIONS,
    MAX_TENANT_STATS_SUBSCRIPTIONS,
)
from webhookd.db.connection import Connection
from webhookd.db.paging import Arguments, Row
from webhookd.deliveries.reads import database_time

# The last place of `durations` has the longer ones.
BOUNDS_MS = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000)
PLACES = len(BOUNDS_MS) + 1
COUNTS = ("delivered", "failed", "dead_lettered")

STEPS_SECONDS = (60, 300, 3600, 86_400)
HOUR_SECONDS = 3600
# Retention keeps minutes up to two hours more: see sweep_stats. Not longer, because each session that applies
# results has rows of its own: of a day by minute, a page of 50 endpoints would read 72,000 rows a session.
MINUTES_KEPT = timedelta(hours=3)
DEFAULT_PERIOD = timedelta(hours=1)
LONGEST_PERIOD = timedelta(days=MAX_STATS_DAYS)
# A step is chosen so that a chart has at most this many points: a week by hours.
MAX_CHOSEN_POINTS = 170
SPARKLINE_POINTS = 24
# webhookd did not exist before. Times near the ends of a calendar cannot be computed with.
_FIRST_TIME = datetime(2000, 1, 1, tzinfo=UTC)
# The rows of all subscriptions together.
_ALL = 0

_DURATIONS = ", ".join(f"sum(t.durations[{place}])" for place in range(1, PLACES + 1))
_SUMS = f"{', '.join(f'sum(t.{name}) as {name}' for name in COUNTS)}, array[{_DURATIONS}] as durations"
_COLUMNS = ", ".join(f"t.{name}" for name in (*COUNTS, "durations"))
# By the primary keys.
_STATS = """
    select {shown}, {sums}
    from (
        select t.subscription_id, t.minute as at, {columns} from webhookd.delivery_stats t
        where t.subscription_id = any({ids}) and t.minute >= {since} and t.minute < {until}
        union all
        select t.subscription_id, t.hour, {columns} from webhookd.delivery_stats_hours t
        where t.subscription_id = any({ids}) and t.hour >= {since} and t.hour < {until}) t
    group by {group}"""
# A table is never read as a whole; and a chart is not worth the processes of a parallel query.
_SETTINGS = """
    set local enable_seqscan = off; set local enable_bitmapscan = off; set local jit = off;
    set local max_parallel_workers_per_gather = 0"""

_OF_TENANT = """
    select u.id from webhookd.subscriptions u
    where u.tenant = $1 and u.tenant <> '' order by u.id desc limit $2"""
_GIVEN = """
    select u.id from webhookd.subscriptions u
    where u.id = any($1) and ($2::text is null or u.tenant = $2) order by array_position($1, u.id)"""
_FAILING = """
    select h.subscription_id from webhookd.endpoint_health h
    where h.failing_since is not null and exists (
        select from webhookd.subscriptions u where u.id = h.subscription_id and u.deleted_at is null)
    order by h.failing_since limit $1"""


class Period(NamedTuple):
    """A range of time, in whole steps."""

    since: datetime
    until: datetime
    step: timedelta

    @property
    def points(self) -> int:
        return (self.until - self.since) // self.step

    def at(self, place: int) -> datetime:
        """Return the beginning of a step."""
        return self.since + place * self.step


def period(now: datetime, since: datetime | None, until: datetime | None, step_seconds: int | None) -> Period:
    """Choose what is not given, and round the range outwards to whole steps."""
    until = max(_FIRST_TIME, min(until or now, now))
    since = max(_FIRST_TIME, since or until - DEFAULT_PERIOD)
    if since >= until:
        raise Refused(Refusal.INVALID_ARGUMENT, "since must be before until, and not in the future")
    if until - since > LONGEST_PERIOD:
        raise Refused(
            Refusal.INVALID_ARGUMENT, f"since must be at most {LONGEST_PERIOD.days} days before until"
        )
    has_minutes = since >= now - MINUTES_KEPT
    if step_seconds is None:
        possible = [it for it in STEPS_SECONDS if has_minutes or it >= HOUR_SECONDS]
        enough = (it for it in possible if (until - since) / timedelta(seconds=it) <= MAX_CHOSEN_POINTS)
        step_seconds = next(enough, possible[-1])
    elif step_seconds < HOUR_SECONDS and not has_minutes:
        hours = MINUTES_KEPT // timedelta(hours=1)
        raise Refused(
            Refusal.INVALID_ARGUMENT,
            f"step_seconds must be at least {HOUR_SECONDS}: minutes are kept for {hours} hours",
        )
    step = timedelta(seconds=step_seconds)
    return Period(_rounded(since, step), _rounded(until + step - _SMALLEST, step), step)


def sparkline_period(now: datetime, hours: int) -> Period:
    """Return the last hours as SPARKLINE_POINTS steps, which begin with an hour if minutes may be gone."""
    span = timedelta(hours=hours)
    unit = timedelta(minutes=1) if span <= MINUTES_KEPT else timedelta(hours=1)
    until = _rounded(now + unit - _SMALLEST, unit)
    return Period(until - span, until, span / SPARKLINE_POINTS)


_SMALLEST = timedelta(microseconds=1)


def _rounded(time: datetime, step: timedelta) -> datetime:
    return time - (time - _FIRST_TIME) % step


async def stats(
    connection: Connection,
    subscription_id: int | None,
    tenant: str | None,
    since: datetime | None,
    until: datetime | None,
    step_seconds: int | None,
) -> Row:
    """Return the numbers of a subscription, a tenant, or all together: in steps, and in total."""
    chosen = period(await database_time(connection), since, until, step_seconds)
    if subscription_id is not None:
        ids = await _given(connection, [subscription_id], tenant)
        if not ids:
            raise Refused(Refusal.NOT_FOUND, f"subscription {subscription_id} does not exist")
    elif tenant is not None:
        ids = await _of_tenant(connection, tenant, MAX_TENANT_STATS_SUBSCRIPTIONS + 1)
        if len(ids) > MAX_TENANT_STATS_SUBSCRIPTIONS:
            raise Refused(
                Refusal.INVALID_ARGUMENT,
                f"the tenant has more than {MAX_TENANT_STATS_SUBSCRIPTIONS} subscriptions, too many to "
                "add up: ask for a subscription_id",
            )
    else:
        ids = [_ALL]
    rows = {row["place"]: row for row in await _fetch(connection, ids, chosen)}
    points = [
        {"at": chosen.at(place)} | counts([rows[place]] if place in rows else [])
        for place in range(chosen.points)
    ]
    return _shown(chosen) | {"points": points, "totals": totals(rows.values())}


async def stats_of_many(
    connection: Connection, ids: Sequence[int] | None, tenant: str | None, hours: int
) -> Row:
    """Return the numbers of each subscription: in total, and as a sparkline.

    Without ids: of the newest subscriptions of the tenant, or of the longest-failing ones.
    """
    if ids is not None:
        chosen_ids = await _given(connection, ids, tenant)
    elif tenant is not None:
        chosen_ids = await _of_tenant(connection, tenant, MAX_STATS_SUBSCRIPTIONS)
    else:
        rows = await connection.fetch(_FAILING, MAX_STATS_SUBSCRIPTIONS)
        chosen_ids = [row["subscription_id"] for row in rows]
    chosen = sparkline_period(await database_time(connection), hours)
    found: dict[int, dict[int, Row]] = {subscription_id: {} for subscription_id in chosen_ids}
    for row in await _fetch(connection, chosen_ids, chosen, by_subscription=True):
        found[row["subscription_id"]][row["place"]] = row
    items = [
        {"subscription_id": subscription_id}
        | totals(steps.values())
        | {"sparkline": {name: _line(steps, name, chosen.points) for name in ("delivered", "failed")}}
        for subscription_id, steps in found.items()
    ]
    return _shown(chosen) | {"items": items}


def _line(steps: Mapping[int, Row], name: str, points: int) -> list[int]:
    return [steps[place][name] if place in steps else 0 for place in range(points)]


async def _given(connection: Connection, ids: Sequence[int], tenant: str | None) -> list[int]:
    """Return those of the ids that exist, in their order; with a tenant, only its own."""
    known = [subscription_id for subscription_id in ids if subscription_id <= MAX_ID]
    return [row["id"] for row in await connection.fetch(_GIVEN, known, tenant)]


async def _of_tenant(connection: Connection, tenant: str, limit: int) -> list[int]:
    """Return subscriptions of a tenant, newest first."""
    return [row["id"] for row in await connection.fetch(_OF_TENANT, tenant, limit)]


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Add up the counts of rows."""
    added = dict.fromkeys(COUNTS, 0)
    for row in rows:
        for name in COUNTS:
            added[name] += row[name]
    # A delivery is completed by its first successful attempt, so there are as many of these.
    return {
        "delivered": added["delivered"],
        "failed": added["failed"],
        "completed": added["delivered"],
        "dead_lettered": added["dead_lettered"],
    }


def totals(rows: Iterable[Row]) -> dict[str, Any]:
    """Add up rows, and estimate the durations."""
    rows = list(rows)
    added = counts(rows)
    attempts = added["delivered"] + added["failed"]
    durations = [sum(row["durations"][place] for row in rows) for place in range(PLACES)]
    return added | {
        "success_rate": added["delivered"] / attempts if attempts else None,
        "p50_ms": percentile(durations, 0.5),
        "p95_ms": percentile(durations, 0.95),
    }


def percentile(durations: Sequence[int], share: float) -> float | None:
    """Estimate a percentile from a histogram, linear inside of a bucket; None without a duration.

    Durations above all bounds count as the highest bound.
    """
    wanted = sum(durations) * share
    below, lower = 0, 0
    for count, upper in zip(durations, (*BOUNDS_MS, BOUNDS_MS[-1]), strict=True):
        if count and below + count >= wanted:
            return round(lower + (upper - lower) * (wanted - below) / count, 1)
        below, lower = below + count, upper
    return None


async def _fetch(
    connection: Connection, ids: Sequence[int], chosen: Period, *, by_subscription: bool = False
) -> list[Row]:
    """Return the sums of each step, and of each subscription if wanted."""
    arguments = Arguments()
    names = {
        "ids": f"{arguments.add(list(ids))}::bigint[]",
        "sums": _SUMS,
        "columns": _COLUMNS,
        "since": arguments.add(chosen.since),
        "until": arguments.add(chosen.until),
    }
    step = f"date_bin({arguments.add(chosen.step)}::interval, t.at, {names['since']}::timestamptz)"
    group = f"t.subscription_id, {step}" if by_subscription else step
    query = _STATS.format(shown=f"{group} as at", group=group, **names)
    async with connection.transaction(readonly=True):
        await connection.execute(_SETTINGS)
        return [
            dict(row) | {"place": (row["at"] - chosen.since) // chosen.step}
            for row in await connection.fetch(query, *arguments)
        ]


def _shown(chosen: Period) -> Row:
    return {
        "since": chosen.since,
        "until": chosen.until,
        "step_seconds": int(chosen.step.total_seconds()),
    }
