"""The list of deliveries: a page of sagas, newest first, for any combination of filters.

SELECTs with the rights of webhookd_reader. One filter selects rows by its index; the others are compared with
the rows of that one. Pages: see db/paging.py. A saga does not have its event's type, so a list by event type
follows the events instead, newest first, and ends a page early if too many of them have no matching delivery.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple, assert_never

from webhookd.core.errors import Refusal, Refused
from webhookd.core.limits import MAX_ID
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection
from webhookd.db.paging import OVERLAP, Arguments, Column, Page, Range, Row, fetch_by_index, piece, time_mark

# The most events, or sagas, that a page looks at to find those of an event type: about 0.1 s.
MAX_EXAMINED = 10_000
# The next step looks at so many times more events, because the last one did not fill the page.
STEP_FACTOR = 4
_LATEST = datetime.max.replace(tzinfo=UTC) - OVERLAP

# Why a subscription s is not deliverable, in the order of deliveries/explain.py.
HELD_BECAUSE = """
    case when s.deleted_at is not null then 'deleted' when not s.active then 'disabled'
        when not s.verified then 'unverified' when s.paused then 'paused'
        when not s.tenant_active then 'tenant_inactive' end"""
# Held: its subscription is not deliverable, and no attempt is leased.
_DELIVERIES_TEMPLATE = """
    select g.id, g.event_id, g.subscription_id, g.status, g.attempt_count, g.next_attempt_at,
        g.final_error_code, g.created_at, g.updated_at, g.dead_letter_id, g.resent_from,
        (select k.event_type from webhookd.events k where k.id = g.event_id) as event_type,
        case when not s.deliverable and (g.status in ('Pending', 'PendingRetry') or exists (
            select from webhookd.webhook_delivery_jobs j
            where j.saga_id = g.id and j.status in ('Pending', 'Leased')
                and (j.status = 'Pending') is true)) then {held_because} end as held_because
    from ({{0}}) g join webhookd.subscriptions s on s.id = g.subscription_id"""
DELIVERIES = _DELIVERIES_TEMPLATE.format(held_because=HELD_BECAUSE)
_SAGAS = "webhookd.webhook_delivery_sagas g"
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
# The function itself looks OVERLAP earlier than asked; this needs the first one OVERLAP later.
_FIRST_LATER_SAGA = "select webhookd.first_saga_since($1::timestamptz + 2 * $2::interval)"
_HAS_EVENT_TYPE = "exists (select from webhookd.events k where k.id = g.event_id and k.event_type = {0})"
_HAS_TENANT = (
    "exists (select from webhookd.subscriptions k where k.id = g.subscription_id and k.tenant = {0})"
)
# Events are read in the order of their index, each with its sagas, until the page is full.
_BY_EVENT = """
    select g.*, e.created_at as event_created_at from ({0}) e cross join lateral ({1}) g
    order by {2}, g.id desc limit {3}"""
_LAST_EVENT = "select e.created_at, e.id from ({0}) e order by {1} offset {2} limit 1"
_SCANNED = "select * from ({0}) g where {1} order by g.id desc limit {2}"
_LAST_SCANNED = "select g.id from ({0}) g order by g.id desc offset {1} limit 1"
_TENANT_OF_SUBSCRIPTION = "select s.tenant from webhookd.subscriptions s where s.id = $1"
_EVENT_OF_SAGA = """
    select e.created_at, e.id
    from webhookd.webhook_delivery_sagas g join webhookd.events e on e.id = g.event_id
    where g.id = $1 and ($2::text is null or e.tenant = $2)"""
# For time_mark().
EVENT_TIMES = ("event", "webhookd.events", "created_at")


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


class Found(NamedTuple):
    """A page of deliveries. If it ended before it was full, the next page starts at the cursor `cut_at`."""

    rows: list[Row]
    cut_at: int | None = None


class _SagaPage(NamedTuple):
    """Sagas to select: newest first, from `first_id` to below `below_id`, that pass the tests."""

    first_id: int
    below_id: int
    limit: int
    tests: tuple[str, ...]  # the conditions that no index serves

    @property
    def mark(self) -> tuple[int]:
        return (self.below_id,)


async def deliveries(connection: Connection, page: Page, selection: DeliveryFilter) -> Found:
    """Return sagas, newest first. `held` ones wait until their subscription is deliverable.

    The cursor is the id of a saga. Only in a list by event type, it can also be the negative id of an event.
    """
    has_type = selection.event_type is not None and selection.event_id is None
    if has_type and selection.created_after is None and page.after_id != 0:
        return await _by_event(connection, page, selection)
    if page.after_id is not None and page.after_id <= 0:
        raise Refused(Refusal.INVALID_ARGUMENT, "cursor: it is of another list")
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
    elif has_type and selection.status in (None, SagaStatus.COMPLETED):
        return await _scan(connection, saga_page, selection.status, arguments)
    else:
        sagas = _sagas_by_status(saga_page, selection.status, arguments)
    query = f"{DELIVERIES.format(sagas)} order by g.id desc"
    return Found(await _fetch(connection, query, arguments))


class _EventWalk(NamedTuple):
    """The events of a type, newest first, and where the walk is."""

    part: Range
    only: str
    mark: tuple[datetime, int] | None = None
    # The previous page ended inside of this event, at this saga.
    rest_of: tuple[int, int] | None = None

    def next_events(self, number: int, arguments: Arguments) -> str:
        shown = ", ".join(self.part.columns)
        return piece("webhookd.events e", self.part, self.mark, number, arguments, shown, self.only)


async def _by_event(connection: Connection, page: Page, selection: DeliveryFilter) -> Found:
    """Follow the events of the type, each with its sagas, in steps until the page is full.

    A resent saga, which has a new id, is listed with its event.
    """
    tenant = selection.tenant
    if selection.subscription_id is not None:
        tenant = await connection.fetchval(_TENANT_OF_SUBSCRIPTION, selection.subscription_id)
        if tenant is None or selection.tenant not in (None, tenant):
            return Found([])
    walk = await _event_walk(connection, page, selection, tenant)
    rows: list[Row] = []
    examined, step = 0, page.limit
    while True:
        rows += await _sagas_of_events(connection, walk, step, page.limit - len(rows), selection)
        if len(rows) == page.limit:
            return Found(rows)
        last = await _last_event(connection, walk, step)
        if last is None:
            return Found(rows)
        examined += step
        if examined >= MAX_EXAMINED:
            return Found(rows, cut_at=-last[1])
        walk = walk._replace(mark=last)
        step = min(step * STEP_FACTOR, MAX_EXAMINED - examined)


async def _event_walk(
    connection: Connection, page: Page, selection: DeliveryFilter, tenant: str | None
) -> _EventWalk:
    """Start at the cursor: after an event, or inside of one, after a saga.

    By idx_event_tenant_type or idx_event_type. A saga is not older than its event, except for the overlap of
    their transactions.
    """
    equal: dict[str, object] = {"e.event_type": selection.event_type}
    only = "true"
    if tenant:
        equal, only = {"e.tenant": tenant} | equal, "e.tenant <> ''"
    before = selection.created_before
    below = None if before is None or before >= _LATEST else before + OVERLAP
    walk = _EventWalk(Range((*equal, "e.created_at", "e.id"), tuple(equal.values()), below=below), only)
    cursor = page.after_id
    if cursor is None:
        return walk
    if cursor < 0:
        mark = await time_mark(connection, *EVENT_TIMES, -cursor, selection.tenant)
        return walk._replace(mark=mark)
    row = await connection.fetchrow(_EVENT_OF_SAGA, cursor, selection.tenant)
    if row is None:
        # Without the delivery, nothing says which event it was of: a resent one can be of any earlier event.
        message = f"cursor: delivery {cursor} does not exist; begin again without a cursor"
        raise Refused(Refusal.INVALID_ARGUMENT, message)
    at, event_id = row
    # Below the next id: including this event.
    return walk._replace(mark=(at, event_id + 1), rest_of=(event_id, cursor))


async def _sagas_of_events(
    connection: Connection, walk: _EventWalk, number: int, limit: int, selection: DeliveryFilter
) -> list[Row]:
    """Return the matching sagas of the next events."""
    arguments = Arguments()
    events = walk.next_events(number, arguments)
    equals = {
        "g.subscription_id": selection.subscription_id,
        "g.status": selection.status,
        "g.final_error_code": selection.error_code,
    }
    tests = [f"{name} = {arguments.add(value)}" for name, value in equals.items() if value is not None]
    if selection.created_before is not None:
        tests.append(f"g.created_at < {arguments.add(selection.created_before)}")
    if walk.rest_of is not None:
        event_id, saga_id = map(arguments.add, walk.rest_of)
        tests.append(f"(g.event_id <> {event_id} or g.id < {saga_id})")
    of_event = _EVENT_SAGAS.format(" and ".join(["g.event_id = e.id", *tests]))
    sagas = _BY_EVENT.format(events, of_event, walk.part.order, arguments.add(limit))
    query = f"{DELIVERIES.format(sagas)} order by g.event_created_at desc, g.event_id desc, g.id desc"
    return await _fetch(connection, query, arguments)


async def _last_event(connection: Connection, walk: _EventWalk, number: int) -> tuple[datetime, int] | None:
    """Return the position of the last of the next events, or None if there are fewer."""
    arguments = Arguments()
    events = walk.next_events(number, arguments)
    query = _LAST_EVENT.format(events, walk.part.order, arguments.add(number - 1))
    rows = await fetch_by_index(connection, query, arguments)
    return (rows[0]["created_at"], rows[0]["id"]) if rows else None


async def _scan(
    connection: Connection, page: _SagaPage, status: SagaStatus | None, arguments: Arguments
) -> Found:
    """Look at the sagas of a time window by the primary key, a bounded number of them."""
    tests = list(page.tests)
    if status is not None:
        tests.append(f"g.status = {arguments.add(status)}")
    first = f"g.id >= {arguments.add(page.first_id)}"
    sagas = piece(_SAGAS, Range(("g.id",)), page.mark, MAX_EXAMINED, arguments, tests=[first])
    query = DELIVERIES.format(_SCANNED.format(sagas, " and ".join(tests), arguments.add(page.limit)))
    rows = await _fetch(connection, f"{query} order by g.id desc", arguments)
    if len(rows) == page.limit:
        return Found(rows)
    arguments = Arguments()
    first = f"g.id >= {arguments.add(page.first_id)}"
    sagas = piece(_SAGAS, Range(("g.id",)), page.mark, MAX_EXAMINED, arguments, tests=[first])
    query = _LAST_SCANNED.format(sagas, arguments.add(MAX_EXAMINED - 1))
    last = await fetch_by_index(connection, query, arguments)
    return Found(rows, cut_at=last[0]["id"] if last else None)


async def _saga_page(
    connection: Connection, page: Page, selection: DeliveryFilter, arguments: Arguments
) -> _SagaPage:
    """Turn the filters that no index of sagas serves into conditions."""
    tests = []
    first_id = 0
    below_id = MAX_ID if page.after_id is None else page.after_id
    if selection.created_before is not None:
        later_id = await connection.fetchval(_FIRST_LATER_SAGA, selection.created_before, OVERLAP)
        below_id = min(below_id, later_id)
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
    return _SagaPage(first_id, below_id, page.limit, tuple(tests))


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


async def _fetch(connection: Connection, query: str, arguments: Arguments) -> list[Row]:
    return [with_held(row) for row in await fetch_by_index(connection, query, arguments)]


def with_held(row: Row) -> Row:
    """Complete a row of DELIVERIES."""
    return row | {"held": row["held_because"] is not None}
