"""The list of deliveries: a page of sagas, newest first, for any combination of filters.

SELECTs with the rights of webhookd_reader. One filter selects rows by its index; the others are compared with
the rows of that one. Pages: see db/paging.py.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, assert_never

from webhookd.core.limits import MAX_ID
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection
from webhookd.db.paging import Arguments, Column, Page, Range, Row, fetch_by_index, piece

# Held: its subscription is not deliverable, and no attempt is leased.
DELIVERIES = """
    select g.id, g.event_id, g.subscription_id, g.status, g.attempt_count, g.next_attempt_at,
        g.final_error_code, g.created_at, g.updated_at, g.dead_letter_id, g.resent_from,
        not s.deliverable and (g.status in ('Pending', 'PendingRetry') or exists (
            select from webhookd.webhook_delivery_jobs j
            where j.saga_id = g.id and j.status in ('Pending', 'Leased')
                and (j.status = 'Pending') is true)) as held
    from ({0}) g join webhookd.subscriptions s on s.id = g.subscription_id"""
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
# Ten seconds later than asked, because the ids of overlapping transactions are not in the order of time. The
# function itself looks ten seconds earlier.
_FIRST_LATER_SAGA = "select webhookd.first_saga_since($1::timestamptz + interval '20 seconds')"
_HAS_EVENT_TYPE = "exists (select from webhookd.events k where k.id = g.event_id and k.event_type = {0})"
_HAS_TENANT = (
    "exists (select from webhookd.subscriptions k where k.id = g.subscription_id and k.tenant = {0})"
)


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
    return await fetch_by_index(connection, f"{DELIVERIES.format(sagas)} order by g.id desc", arguments)


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
