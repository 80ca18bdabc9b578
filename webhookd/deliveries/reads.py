"""Queries of the API and of /status: SELECTs with the rights of webhookd_reader, which cannot see secrets.

Lists are sorted newest first and paged by the id of the last row shown: see db/paging.py.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, assert_never, cast

import msgspec

from webhookd.core.errors import Refusal, Refused
from webhookd.core.limits import MAX_ID
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection
from webhookd.db.paging import Arguments, Column, Page, Range, Row, fetch_by_index, piece
from webhookd.deliveries import explain
from webhookd.deliveries.dead_letters import Filter
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
_TIME_OF_EVENT = """
    select e.created_at from webhookd.events e where e.id = $1 and ($2::text is null or e.tenant = $2)"""

_SUBSCRIPTIONS = """
    select s.id, s.event_type, s.event_types, s.tenant, coalesce(s.filter, '{}') as filter, s.callback_url,
        s.pending_callback_url, s.active, s.paused, s.verified, s.verified_by, s.format, s.max_per_second,
        s.max_attempts, s.base_delay_seconds, s.description, s.created_at,
        s.updated_at,
        coalesce(h.consecutive_failures, 0) as consecutive_failures, h.failing_since, h.last_error_code,
        h.last_failure_at, h.last_recovery_at
    from webhookd.subscriptions s left join webhookd.endpoint_health h on h.subscription_id = s.id"""
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

# Held: its subscription is not deliverable, and no attempt is leased.
_DELIVERIES = """
    select g.id, g.event_id, g.subscription_id, g.status, g.attempt_count, g.next_attempt_at,
        g.final_error_code, g.created_at, g.updated_at, g.dead_letter_id, g.resent_from,
        not s.deliverable and (g.status in ('Pending', 'PendingRetry') or exists (
            select from webhookd.webhook_delivery_jobs j
            where j.saga_id = g.id and j.status in ('Pending', 'Leased')
                and (j.status = 'Pending') is true)) as held
    from ({0}) g join webhookd.subscriptions s on s.id = g.subscription_id"""
_SAGAS = "webhookd.webhook_delivery_sagas g"
_SAGA = "select * from webhookd.webhook_delivery_sagas g where g.id = $1"
_EVENT_SAGAS = """
    select * from (
        select * from webhookd.webhook_delivery_sagas g where {0} and g.resent_from is null
        union all
        select * from webhookd.webhook_delivery_sagas g where {0} and g.resent_from is not null
        offset 0) g"""
_MERGED = "select * from ({0}) g"
# By idx_saga_in_progress, then sorted: there are no more than the windows allow. OFFSET 0 keeps the planner
# from walking the primary key for the order.
_IN_PROGRESS = """
    select * from (
        select * from webhookd.webhook_delivery_sagas g where g.status = 'InProgress' and {0} offset 0) g
    where {1} order by g.id desc limit {2}"""
# By idx_saga_pending: the newest saga of each subscription, then the sagas of the subscriptions with the
# newest. A page costs a step for each subscription that has pending sagas, however many those are.
_PENDING = """
    with recursive found (subscription_id) as (
        (select g.subscription_id from webhookd.webhook_delivery_sagas g where g.status = 'Pending'
         order by g.subscription_id limit 1)
        union all
        select (select g.subscription_id from webhookd.webhook_delivery_sagas g
                where g.status = 'Pending' and g.subscription_id > f.subscription_id
                order by g.subscription_id limit 1)
        from found f where f.subscription_id is not null
    )
    select g.* from (
        select n.subscription_id
        from found f cross join lateral (
            select g.id, g.subscription_id from webhookd.webhook_delivery_sagas g
            where g.status = 'Pending' and g.subscription_id = f.subscription_id and {0}
            order by g.subscription_id desc, g.id desc limit 1) n
        order by n.id desc limit {1}) n
    cross join lateral (
        select * from webhookd.webhook_delivery_sagas g
        where g.status = 'Pending' and g.subscription_id = n.subscription_id and {0}
        order by g.subscription_id desc, g.id desc limit {1}) g
    order by g.id desc limit {1}"""

_OF_TENANT = """
    select g.* from (
        select u.id
        from webhookd.subscriptions u cross join lateral ({1}) g
        where u.tenant = {0} and u.tenant <> ''
        order by g.id desc limit {3}) u
    cross join lateral ({2}) g
    order by g.id desc limit {3}"""
_FIRST_SAGA = "select webhookd.first_saga_since($1)"
# Ten seconds later than asked, because the ids of overlapping transactions are not in the order of time. The
# function itself looks ten seconds earlier.
_FIRST_LATER_SAGA = "select webhookd.first_saga_since($1::timestamptz + interval '20 seconds')"
_HAS_EVENT_TYPE = "exists (select from webhookd.events k where k.id = g.event_id and k.event_type = {0})"
_HAS_TENANT = (
    "exists (select from webhookd.subscriptions k where k.id = g.subscription_id and k.tenant = {0})"
)

# By uniq_job_saga_attempt.
_ATTEMPTS = """
    select j.id, row_number() over (order by j.attempt_at) as attempt, j.status, j.attempt_at, j.created_at,
        j.finished_at, j.response_status, j.error_code, j.duration_ms, j.retry_after_seconds,
        j.response_excerpt, j.worker_id, j.lease_until, j.lease_resets, j.result_applied_at
    from webhookd.webhook_delivery_jobs j where j.saga_id = $1 order by j.attempt_at"""

_DEAD_LETTERS = """
    select d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, d.failed_at,
        r.id as requeued_saga_id
    from ({0}) d left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id"""

_TIME_OF_DEAD_LETTER = """
    select d.failed_at from webhookd.dead_letters d where d.id = $1 and ($2::text is null or d.tenant = $2)"""

_DEAD_LETTER = """
    select d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, d.failed_at,
        r.id as requeued_saga_id, e.event_type, d.payload_snapshot
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
        mark = await _time_mark(connection, "event", _TIME_OF_EVENT, page, selection.tenant)
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
) -> list[Row]:
    """Return subscriptions with their endpoints' health. There are few, so filters need no index."""
    arguments = Arguments()
    equals = {
        "s.tenant": tenant,
        "s.active": active,
        "s.paused": paused,
        "s.verified": verified,
    }
    tests = [f"{name} = {arguments.add(value)}" for name, value in equals.items() if value is not None]
    if page.after_id is not None:
        tests.append(f"s.id < {arguments.add(page.after_id)}")
    if event_type is not None:
        tests.append(f"{arguments.add(event_type)} = any(s.event_types)")
    if search is not None:
        tests.append(_FOUND_SUBSCRIPTION.format(arguments.add(search.lower())))
    where = " and ".join(["s.deleted_at is null", *tests])
    query = f"{_SUBSCRIPTIONS} where {where} order by s.id desc limit {arguments.add(page.limit)}"
    return [_with_health(dict(row)) for row in await connection.fetch(query, *arguments)]


async def subscription(connection: Connection, subscription_id: int, tenant: str | None = None) -> Row:
    """Return a subscription with its endpoint's health."""
    query = (
        f"{_SUBSCRIPTIONS} where s.id = $1 and s.deleted_at is null and ($2::text is null or s.tenant = $2)"
    )
    return _with_health(await _found(connection, "subscription", query, subscription_id, tenant))


async def tenants(connection: Connection, page: Page, only_tenant: str | None = None) -> list[Row]:
    """Return tenants, newest first."""
    after_id = MAX_ID if page.after_id is None else page.after_id
    rows = await connection.fetch(
        f"{_TENANTS} where t.id < $1 and ($3::text is null or t.tenant = $3) order by t.id desc limit $2",
        after_id,
        page.limit,
        only_tenant,
    )
    return [dict(row) for row in rows]


async def tenant(connection: Connection, name: str, only_tenant: str | None = None) -> Row:
    """Return a tenant."""
    query = f"{_TENANTS} where t.tenant = $1 and ($2::text is null or t.tenant = $2)"
    row = await connection.fetchrow(query, name, only_tenant)
    if row is None:
        raise Refused(Refusal.NOT_FOUND, f"tenant {name} does not exist")
    return dict(row)


class DeliveryFilter(NamedTuple):
    """Selects deliveries; None matches all."""

    tenant: str | None = None
    status: SagaStatus | None = None
    subscription_id: int | None = None
    event_id: int | None = None
    event_type: str | None = None
    error_code: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


class _SagaPage(NamedTuple):
    """Sagas to select: newest first below `below_id`, and the conditions that no index serves."""

    below_id: int
    limit: int
    tests: tuple[str, ...]

    @property
    def mark(self) -> tuple[int]:
        return (self.below_id,)


async def deliveries(connection: Connection, page: Page, selection: DeliveryFilter) -> list[Row]:
    """Return sagas, newest first. `held` ones wait until their subscription is deliverable.

    One filter selects by its index: the first of event, subscription, tenant, error code and status. The
    others are compared with the rows of that one.
    """
    arguments = Arguments()
    saga_page = await _saga_page(connection, page, selection, arguments)
    if selection.event_id is not None:
        sagas = _sagas_of_event(saga_page, selection, arguments)
    elif selection.subscription_id is not None:
        sagas = _sagas_of_subscription(saga_page, selection.subscription_id, selection.status, arguments)
    elif selection.tenant is not None:
        sagas = _sagas_of_tenant(saga_page, selection.tenant, selection.status, arguments)
    elif selection.error_code is not None:
        sagas = _sagas_by_error(saga_page, selection.error_code, selection.status, arguments)
    else:
        sagas = _sagas_by_status(saga_page, selection.status, arguments)
    return await fetch_by_index(connection, f"{_DELIVERIES.format(sagas)} order by g.id desc", arguments)


async def _saga_page(
    connection: Connection, page: Page, selection: DeliveryFilter, arguments: Arguments
) -> _SagaPage:
    """Turn the filters that no index of sagas serves into conditions."""
    tests = []
    below_id = MAX_ID if page.after_id is None else page.after_id
    if selection.created_before is not None:
        below_id = min(below_id, await connection.fetchval(_FIRST_LATER_SAGA, selection.created_before))
        tests.append(f"g.created_at < {arguments.add(selection.created_before)}")
    if selection.created_after is not None:
        first_id = await connection.fetchval(_FIRST_SAGA, selection.created_after)
        tests.append(f"g.id >= {arguments.add(first_id)}")
        tests.append(f"g.created_at >= {arguments.add(selection.created_after)}")
    if selection.event_type is not None:
        tests.append(_HAS_EVENT_TYPE.format(arguments.add(selection.event_type)))
    if selection.error_code is not None:
        tests.append(f"g.final_error_code = {arguments.add(selection.error_code)}")
    # The tenant alone selects by its subscriptions.
    if selection.tenant is not None and (selection.event_id or selection.subscription_id):
        tests.append(_HAS_TENANT.format(arguments.add(selection.tenant)))
    return _SagaPage(below_id, page.limit, tuple(tests))


def _sagas_of_event(page: _SagaPage, selection: DeliveryFilter, arguments: Arguments) -> str:
    """Select all sagas of an event, then sort them: there are at most as many as subscriptions to its type.

    uniq_saga_event_subscription finds the routed ones, idx_saga_event the requeued ones. OFFSET 0 keeps the
    planner from walking the primary key for the order.
    """
    equals = {
        "g.event_id": selection.event_id,
        "g.subscription_id": selection.subscription_id,
        "g.status": selection.status,
    }
    tests = [f"{name} = {arguments.add(value)}" for name, value in equals.items() if value is not None]
    sagas = _EVENT_SAGAS.format(" and ".join([*tests, *page.tests]))
    return f"{sagas} where {_below(page, arguments)} order by g.id desc limit {arguments.add(page.limit)}"


def _sagas_of_subscription(
    page: _SagaPage, subscription_id: int | Column, status: SagaStatus | None, arguments: Arguments
) -> str:
    """Select a page of each status by its index, and merge them."""
    pieces = [
        _sagas_of_subscription_by_status(page, subscription_id, chosen, arguments)
        for chosen in ([status] if status else SagaStatus)
    ]
    return _merged(pieces, page, arguments)


def _sagas_of_subscription_by_status(
    page: _SagaPage, subscription_id: int | Column, status: SagaStatus, arguments: Arguments
) -> str:
    match status:
        case SagaStatus.PENDING:
            part, only = Range(("g.subscription_id", "g.id"), (subscription_id,)), "g.status = 'Pending'"
        case SagaStatus.IN_PROGRESS:
            tests = [f"g.subscription_id = {arguments.add(subscription_id)}", *page.tests]
            return _IN_PROGRESS.format(
                " and ".join(tests), _below(page, arguments), arguments.add(page.limit)
            )
        case SagaStatus.PENDING_RETRY | SagaStatus.COMPLETED | SagaStatus.DEAD_LETTERED:
            part = Range(("g.subscription_id", "g.status", "g.id"), (subscription_id, status))
            only = "g.status in ('PendingRetry', 'Completed', 'DeadLettered')"
        case _:
            assert_never(status)
    return piece(_SAGAS, part, page.mark, page.limit, arguments, only=only, tests=page.tests)


def _sagas_of_tenant(page: _SagaPage, tenant: str, status: SagaStatus | None, arguments: Arguments) -> str:
    """Select the subscriptions of the tenant with the newest sagas, then the sagas of those."""
    newest = _sagas_of_subscription(page._replace(limit=1), Column("u.id"), status, arguments)
    sagas = _sagas_of_subscription(page, Column("u.id"), status, arguments)
    return _OF_TENANT.format(arguments.add(tenant), newest, sagas, arguments.add(page.limit))


def _sagas_by_error(page: _SagaPage, error_code: str, status: SagaStatus | None, arguments: Arguments) -> str:
    """Select a page of each status by idx_saga_error, and merge them."""
    pieces = [
        piece(
            _SAGAS,
            Range(("g.final_error_code", "g.status", "g.id"), (error_code, chosen)),
            page.mark,
            page.limit,
            arguments,
            only="g.final_error_code is not null",
            tests=page.tests,
        )
        for chosen in ([status] if status else SagaStatus)
    ]
    return _merged(pieces, page, arguments)


def _merged(pieces: Sequence[str], page: _SagaPage, arguments: Arguments) -> str:
    merged = _MERGED.format(" union all ".join(f"({piece})" for piece in pieces))
    return f"{merged} order by g.id desc limit {arguments.add(page.limit)}"


def _sagas_by_status(page: _SagaPage, status: SagaStatus | None, arguments: Arguments) -> str:
    match status:
        case SagaStatus.PENDING:
            tests = " and ".join([_below(page, arguments), *page.tests])
            return _PENDING.format(tests, arguments.add(page.limit))
        case SagaStatus.IN_PROGRESS:
            tests = " and ".join([_below(page, arguments), *page.tests])
            return _IN_PROGRESS.format("true", tests, arguments.add(page.limit))
        case SagaStatus.PENDING_RETRY | SagaStatus.DEAD_LETTERED:
            part = Range(("g.status", "g.id"), (status,))
            only = "g.status in ('PendingRetry', 'DeadLettered')"
        case SagaStatus.COMPLETED:
            # Nearly all are: the primary key needs to pass only newer sagas that are not finished or failed.
            part, only = Range(("g.id",)), "g.status = 'Completed'"
        case None:
            part, only = Range(("g.id",)), "true"
        case _:
            assert_never(status)
    return piece(_SAGAS, part, page.mark, page.limit, arguments, only=only, tests=page.tests)


def _below(page: _SagaPage, arguments: Arguments) -> str:
    return f"g.id < {arguments.add(page.below_id)}"


async def delivery(connection: Connection, saga_id: int, limits: Limits, tenant: str | None = None) -> Row:
    """Return a saga with its attempts, oldest first, and the reason for its status, from one snapshot."""
    query = f"{_DELIVERIES.format(_SAGA)} where ($2::text is null or s.tenant = $2)"
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        saga = await _found(connection, "delivery", query, saga_id, tenant)
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
    return found | {
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
    mark = await _time_mark(connection, "dead letter", _TIME_OF_DEAD_LETTER, page, tenant)
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


async def _time_mark(
    connection: Connection, what: str, time_of_row: str, page: Page, tenant: str | None
) -> tuple[datetime, int] | None:
    """Return the position of the previous page's last row in a list by time. Its row never changes."""
    if page.after_id is None:
        return None
    time = await connection.fetchval(time_of_row, page.after_id, tenant)
    if time is None:
        raise Refused(Refusal.INVALID_ARGUMENT, f"cursor: {what} {page.after_id} does not exist")
    return time, page.after_id


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
        select h.subscription_id, h.failing_since, h.consecutive_failures, h.last_error_code
        from webhookd.endpoint_health h where h.failing_since is not null order by h.failing_since limit $1
        """,
        limit,
    )
    return [cast("FailingEndpointStatus", dict(row)) for row in rows]
