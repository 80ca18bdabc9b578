"""Queries of the API and of /status: SELECTs with the rights of webhookd_reader, which cannot see secrets.

Lists are sorted newest first and paged by the id of the last row shown: see db/paging.py. The list of
deliveries is in delivery_lists.py.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, cast

import msgspec

from webhookd.core.errors import Refusal, Refused
from webhookd.core.limits import MAX_ID
from webhookd.db.connection import Connection
from webhookd.db.paging import Arguments, Page, Range, Row, fetch_by_index, piece, time_mark
from webhookd.deliveries import explain
from webhookd.deliveries.dead_letters import Filter
from webhookd.deliveries.delivery_lists import DELIVERIES, EVENT_TIMES, HELD_BECAUSE, with_held
from webhookd.deliveries.explain import Limits
from webhookd.http.health import FailingEndpointStatus

# Shown with an event. /v1/deliveries has the rest.
MAX_DELIVERIES_OF_EVENT = 1000

_EVENTS = """
    select e.id, e.event_type, e.created_at, e.idempotency_key, e.correlation_id, e.tenant,
        coalesce(e.labels, '{{}}') as labels
    from ({0}) e"""
# OFFSET 0 keeps the planner from walking all events in their order, to find those of the labels.
_EVENTS_OF_LABEL = """
    select e.* from ({0}) l
    cross join lateral (select * from webhookd.events k where k.id = l.event_id offset 0) e"""
_EVENTS_OF_KEY = """
    select * from (select * from webhookd.events e where e.idempotency_key = {0} and {1} offset 0) e
    order by e.created_at desc, e.id desc limit {2}"""

_EVENT = """
    select e.id, e.event_type, e.created_at, e.idempotency_key, e.correlation_id, e.tenant,
        coalesce(e.labels, '{}') as labels, e.payload, e.payload_removed_at
    from webhookd.events e where e.id = $1 and ($2::text is null or e.tenant = $2)"""

_SUBSCRIPTIONS_TEMPLATE = """
    select s.id, s.event_type, s.event_types, s.tenant, s.tenant_active,
        coalesce(s.filter, '{{}}') as filter, s.callback_url, s.pending_callback_url, s.active, s.paused,
        s.verified, {held_because} as held_because, s.verified_by, s.format, s.max_per_second,
        s.max_attempts, s.base_delay_seconds, s.description, s.created_at, s.updated_at,
        coalesce(h.consecutive_failures, 0) as consecutive_failures, h.failing_since, h.last_error_code,
        h.last_failure_at, h.last_recovery_at
    from webhookd.subscriptions s left join webhookd.endpoint_health h on h.subscription_id = s.id"""
_SUBSCRIPTIONS = _SUBSCRIPTIONS_TEMPLATE.format(held_because=HELD_BECAUSE)
_FOUND_SUBSCRIPTION = (
    "strpos(lower(concat_ws(' ', s.callback_url, s.pending_callback_url, s.description)), {0}) > 0"
)
_HEALTH = ("consecutive_failures", "failing_since", "last_error_code", "last_failure_at", "last_recovery_at")

# The subscriptions of a tenant are few: idx_sub_tenant counts them.
_TENANTS = """
    select t.id, t.tenant, t.name, t.active, t.max_subscriptions, t.created_at, t.updated_at,
        (select count(*) from webhookd.subscriptions s where s.tenant = t.tenant and s.tenant <> ''
             and s.deleted_at is null) as subscriptions
    from webhookd.tenants t"""
_NAME_OF_TENANT = "select t.tenant from webhookd.tenants t where t.id = $1"

_SAGA = "select * from webhookd.webhook_delivery_sagas g where g.id = $1"

# By uniq_job_saga_attempt.
_ATTEMPTS_TEMPLATE = """
    select j.id, row_number() over (order by j.attempt_at) as attempt, j.status, j.attempt_at, j.created_at,
        j.finished_at, j.response_status, j.error_code, j.duration_ms, j.retry_after_seconds,
        j.response_excerpt, j.worker_id, j.lease_until, j.lease_resets, j.result_applied_at,
        {sent_to} as callback_url
    from webhookd.webhook_delivery_jobs j where j.saga_id = $1 order by j.attempt_at"""
_ATTEMPTS = _ATTEMPTS_TEMPLATE.format(sent_to=explain.SENT_TO)

_DEAD_LETTERS = """
    select d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, d.failed_at,
        r.id as requeued_saga_id,
        (select e.payload_removed_at from webhookd.events e where e.id = d.event_id) as payload_removed_at
    from ({0}) d left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id"""

_DEAD_LETTER_TIMES = ("dead letter", "webhookd.dead_letters", "failed_at")
_DEAD_LETTER = """
    select d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, d.failed_at,
        r.id as requeued_saga_id, e.payload_removed_at, e.event_type, d.payload_snapshot
    from webhookd.dead_letters d
    join webhookd.events e on e.id = d.event_id
    left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id
    where d.id = $1 and ($2::text is null or d.tenant = $2)"""


class EventFilter(NamedTuple):
    """Selects events; None matches all."""

    tenant: str | None = None
    event_type: str | None = None
    idempotency_key: str | None = None
    correlation_id: str | None = None
    label: Mapping[str, str] | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


async def events(connection: Connection, page: Page, selection: EventFilter) -> list[Row]:
    """Return events without payloads, newest first: by id, or with any filter by time.

    One filter, or two, are a range of an index. The others are compared with the rows of that range.
    """
    arguments = Arguments()
    if selection == EventFilter():
        rows = piece("webhookd.events e", Range(("e.id",)), _id_mark(page), page.limit, arguments)
        query = f"{_EVENTS.format(rows)} order by e.id desc"
    else:
        mark = None
        if page.after_id is not None:
            mark = await time_mark(connection, *EVENT_TIMES, page.after_id, selection.tenant)
        rows = _selected_events(selection, mark, page.limit, arguments)
        query = f"{_EVENTS.format(rows)} order by e.created_at desc, e.id desc"
    return [_decoded(row, "labels") for row in await fetch_by_index(connection, query, arguments)]


def _selected_events(
    selection: EventFilter, mark: tuple[datetime, int] | None, limit: int, arguments: Arguments
) -> str:
    tenant, event_type, key, correlation_id, label, *bounds = selection
    if label:
        return _labelled_events(selection, mark, limit, arguments)
    equal: dict[str, object]
    match key, correlation_id, tenant, event_type:
        case str(), _, _, _:
            # Each tenant has at most one event with a key.
            tests = _event_tests(selection, "e", arguments)
            if mark is not None:
                tests.append(f"(e.created_at, e.id) < ({arguments.add(mark[0])}, {arguments.add(mark[1])})")
            return _EVENTS_OF_KEY.format(arguments.add(key), " and ".join(tests), arguments.add(limit))
        case None, str(), _, _:
            equal, only = {"e.correlation_id": correlation_id}, "e.correlation_id is not null"
        case None, None, str(), None:
            equal, only = {"e.tenant": tenant}, "e.tenant <> ''"
        case None, None, str(), str():
            equal, only = {"e.tenant": tenant, "e.event_type": event_type}, "e.tenant <> ''"
        case _:
            equal, only = {} if event_type is None else {"e.event_type": event_type}, "true"
    part = Range((*equal, "e.created_at", "e.id"), tuple(equal.values()), *bounds)
    others = selection._replace(**{name.removeprefix("e."): None for name in equal}, **_NO_BOUNDS)
    tests = _event_tests(others, "e", arguments)
    return piece("webhookd.events e", part, mark, limit, arguments, only=only, tests=tests)


def _labelled_events(
    selection: EventFilter, mark: tuple[datetime, int] | None, limit: int, arguments: Arguments
) -> str:
    """Select by the first label: by the primary key of event_labels, or idx_event_label_tenant."""
    [(name, value), *more] = (selection.label or {}).items()
    equal: dict[str, object] = {"l.name": name, "l.value": value}
    only = "true"
    if selection.tenant is not None:
        equal, only = {"l.tenant": selection.tenant} | equal, "l.tenant <> ''"
    bounds = (selection.created_after, selection.created_before)
    part = Range((*equal, "l.created_at", "l.event_id"), tuple(equal.values()), *bounds)
    others = selection._replace(label=dict(more), tenant=None, **_NO_BOUNDS)
    tests = _event_tests(others, "k", arguments)
    if tests:
        of_event = f"k.id = l.event_id and {' and '.join(tests)}"
        tests = [f"exists (select from webhookd.events k where {of_event})"]
    labels = piece("webhookd.event_labels l", part, mark, limit, arguments, only=only, tests=tests)
    return _EVENTS_OF_LABEL.format(labels)


_NO_BOUNDS: dict[str, Any] = {"created_after": None, "created_before": None}


def _event_tests(selection: EventFilter, alias: str, arguments: Arguments) -> list[str]:
    """Return the conditions of a filter on rows of events."""
    operators = {
        "label": ("labels", "@>"),
        "created_after": ("created_at", ">="),
        "created_before": ("created_at", "<"),
    }
    tests = []
    for name, value in selection._asdict().items():
        if value is None or value == {}:
            continue
        column, operator = operators.get(name, (name, "="))
        shown = msgspec.json.encode(value).decode() if name == "label" else value
        tests.append(f"{alias}.{column} {operator} {arguments.add(shown)}")
    return tests


async def subscriptions(
    connection: Connection,
    page: Page,
    tenant: str | None = None,
    event_type: str | None = None,
    active: bool | None = None,
    paused: bool | None = None,
    verified: bool | None = None,
    search: str | None = None,
    ids: Sequence[int] | None = None,
) -> list[Row]:
    """Return subscriptions with their endpoints' health.

    Only the ids and the tenant have an index: there are few subscriptions, but there may be many tenants.
    """
    arguments = Arguments()
    equals = {
        "s.tenant": tenant,
        "s.active": active,
        "s.paused": paused,
        "s.verified": verified,
    }
    tests = [f"{name} = {arguments.add(value)}" for name, value in equals.items() if value is not None]
    if tenant is not None:
        tests.append("s.tenant <> ''")  # for idx_sub_tenant
    if page.after_id is not None:
        tests.append(f"s.id < {arguments.add(page.after_id)}")
    if event_type is not None:
        tests.append(f"{arguments.add(event_type)} = any(s.event_types)")
    if search is not None:
        tests.append(_FOUND_SUBSCRIPTION.format(arguments.add(search.lower())))
    if ids is not None:
        tests.append(f"s.id = any({arguments.add(list(ids))}::bigint[])")
    where = " and ".join(["s.deleted_at is null", *tests])
    query = f"{_SUBSCRIPTIONS} where {where} order by s.id desc limit {arguments.add(page.limit)}"
    return [_with_health(dict(row)) for row in await connection.fetch(query, *arguments)]


async def subscription(connection: Connection, subscription_id: int, tenant: str | None = None) -> Row:
    """Return a subscription with its endpoint's health."""
    query = (
        f"{_SUBSCRIPTIONS} where s.id = $1 and s.deleted_at is null and ($2::text is null or s.tenant = $2)"
    )
    return _with_health(await _found(connection, "subscription", query, subscription_id, tenant))


async def tenants(
    connection: Connection, page: Page, only_tenant: str | None = None, prefix: str | None = None
) -> list[Row]:
    """Return tenants, newest first; with a prefix, in the order of their names, by the primary key."""
    arguments = Arguments()
    tests = []
    if prefix is None:
        tests.append(f"t.id < {arguments.add(MAX_ID if page.after_id is None else page.after_id)}")
    else:
        after = None
        if page.after_id is not None:
            after = await connection.fetchval(_NAME_OF_TENANT, page.after_id)
            if after is None:
                detail = f"cursor: tenant {page.after_id} does not exist; begin again without a cursor"
                raise Refused(Refusal.INVALID_ARGUMENT, detail)
        # Every character of a name is below ~.
        tests.append(f"t.tenant >= {arguments.add(prefix)} and t.tenant < {arguments.add(prefix + '~')}")
        if after is not None:
            tests.append(f"t.tenant > {arguments.add(after)}")
    if only_tenant is not None:
        tests.append(f"t.tenant = {arguments.add(only_tenant)}")
    order = "t.id desc" if prefix is None else "t.tenant"
    query = f"{_TENANTS} where {' and '.join(tests)} order by {order} limit {arguments.add(page.limit)}"
    return [dict(row) for row in await connection.fetch(query, *arguments)]


async def tenant(connection: Connection, name: str, only_tenant: str | None = None) -> Row:
    """Return a tenant."""
    query = f"{_TENANTS} where t.tenant = $1 and ($2::text is null or t.tenant = $2)"
    row = await connection.fetchrow(query, name, only_tenant)
    if row is None:
        raise Refused(Refusal.NOT_FOUND, f"tenant {name} does not exist")
    return dict(row)


async def delivery(connection: Connection, saga_id: int, limits: Limits, tenant: str | None = None) -> Row:
    """Return a saga with its attempts, oldest first, and the reason for its status, from one snapshot."""
    query = f"{DELIVERIES.format(_SAGA)} where ($2::text is null or s.tenant = $2)"
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        saga = with_held(await _found(connection, "delivery", query, saga_id, tenant))
        attempts = [dict(attempt) for attempt in await connection.fetch(_ATTEMPTS, saga_id)]
        explained = await explain.delivery(connection, saga_id, limits)
        return saga | explained | {"attempts": attempts}


async def event(connection: Connection, event_id: int, limits: Limits, tenant: str | None = None) -> Row:
    """Return an event with its payload and its delivery to each subscription, from one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        found = _decoded(await _found(connection, "event", _EVENT, event_id, tenant), "labels")
        found_deliveries = await explain.event_deliveries(
            connection, event_id, limits, MAX_DELIVERIES_OF_EVENT + 1
        )
        no_subscription = None
        if not found_deliveries:
            no_subscription = await explain.no_subscription(connection, event_id, only_tenant=tenant)
    return found | {
        "no_subscription": no_subscription,
        "deliveries": found_deliveries[:MAX_DELIVERIES_OF_EVENT],
        "more_deliveries": len(found_deliveries) > MAX_DELIVERIES_OF_EVENT,
    }


async def dead_letters(connection: Connection, page: Page, selection: Filter) -> list[Row]:
    """Return dead letters without payloads, newest first, each with the saga it was requeued as.

    Uses idx_dead_failed, idx_dead_subscription, idx_dead_error, idx_dead_subscription_error, idx_dead_tenant
    or idx_dead_tenant_error.
    """
    subscription_id, error_code, failed_after, failed_before, tenant = selection
    equals = {
        # A subscription has one tenant: if both are given, the tenant is only compared.
        "d.tenant": tenant if subscription_id is None else None,
        "d.subscription_id": subscription_id,
        "d.final_error_code": error_code,
    }
    given = {name: value for name, value in equals.items() if value is not None}
    part = Range((*given, "d.failed_at", "d.id"), tuple(given.values()), failed_after, failed_before)
    mark = None
    if page.after_id is not None:
        mark = await time_mark(connection, *_DEAD_LETTER_TIMES, page.after_id, tenant)
    arguments = Arguments()
    only = "true"
    if tenant is not None:
        only = "d.tenant <> ''" if subscription_id is None else f"d.tenant = {arguments.add(tenant)}"
    letters = piece("webhookd.dead_letters d", part, mark, page.limit, arguments, only=only)
    query = f"{_DEAD_LETTERS.format(letters)} order by d.failed_at desc, d.id desc"
    return await fetch_by_index(connection, query, arguments)


async def dead_letter(connection: Connection, dead_letter_id: int, tenant: str | None = None) -> Row:
    """Return a dead letter with its payload."""
    return await _found(connection, "dead letter", _DEAD_LETTER, dead_letter_id, tenant)


async def database_time(connection: Connection) -> datetime:
    """Return the database's time, the only clock that all instances share."""
    now: datetime = await connection.fetchval("select clock_timestamp()")
    return now


async def _found(connection: Connection, what: str, query: str, row_id: int, tenant: str | None) -> Row:
    """Return the row; with a tenant, rows of others do not exist."""
    row = await connection.fetchrow(query, row_id, tenant)
    if row is None:
        raise Refused(Refusal.NOT_FOUND, f"{what} {row_id} does not exist")
    return dict(row)


def _id_mark(page: Page) -> tuple[int] | None:
    return None if page.after_id is None else (page.after_id,)


def _with_health(row: Row) -> Row:
    health = {name: row.pop(name) for name in _HEALTH}
    return _decoded(row, "filter") | {"health": health}


def _decoded(row: Row, name: str) -> Row:
    """Decode a column of type jsonb."""
    return row | {name: msgspec.json.decode(row[name])}


class Waiting(NamedTuple):
    """The work that waits for a stage. The oldest item could be processed since `oldest_at`."""

    stage: str
    waiting: int
    oldest_at: datetime | None
    age_seconds: float | None  # by the database's clock


# Stages of webhookd.backlog() that are no waiting work: leased attempts and failing endpoints.
NOT_WAITING = frozenset({"in_flight", "failing"})


async def waiting(connection: Connection, counted_up_to: int) -> list[Waiting]:
    """Return every stage's backlog. Counting stops at `counted_up_to`."""
    rows = await connection.fetch(
        """
        select b.stage, b.waiting, b.oldest_at, extract(epoch from now() - b.oldest_at)::double precision
        from webhookd.backlog($1) b
        """,
        counted_up_to,
    )
    return [Waiting(*row) for row in rows]


async def dead_letters_of_a_day(connection: Connection, counted_up_to: int) -> int:
    """Return the number of dead letters of the last 24 hours, requeued or not.

    Counting stops at `counted_up_to`. Uses idx_dead_failed.
    """
    count: int = await connection.fetchval(
        """
        select count(*) from (
            select from webhookd.dead_letters d where d.failed_at > now() - interval '24 hours'
            order by d.failed_at desc limit $1) w
        """,
        counted_up_to,
    )
    return count


async def failing_endpoints(connection: Connection, limit: int) -> list[FailingEndpointStatus]:
    """Return the endpoints that have been failing for longest."""
    rows = await connection.fetch(
        """
        select h.subscription_id, s.callback_url, s.description, h.failing_since, h.consecutive_failures,
            h.last_error_code
        from webhookd.endpoint_health h
        cross join lateral (
            select * from webhookd.subscriptions k where k.id = h.subscription_id and k.deleted_at is null) s
        where h.failing_since is not null
        order by h.failing_since limit $1
        """,
        limit,
    )
    return [cast("FailingEndpointStatus", dict(row)) for row in rows]
