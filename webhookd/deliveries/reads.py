"""Queries of the API and of /status: SELECTs with the rights of webhookd_reader, which cannot see secrets.

Lists are sorted newest first and paged by the id of the last row shown: see db/paging.py.
"""

from datetime import datetime
from typing import NamedTuple, assert_never, cast

from webhookd.core.errors import Refusal, Refused
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection
from webhookd.db.paging import Arguments, Page, Range, Row, fetch_by_index, piece
from webhookd.deliveries import explain
from webhookd.deliveries.dead_letters import Filter
from webhookd.deliveries.explain import Limits
from webhookd.http.health import FailingEndpointStatus

# Shown with an event. /v1/deliveries has the rest.
MAX_DELIVERIES_OF_EVENT = 1000

_EVENTS = """
    select e.id, e.event_type, e.created_at, e.idempotency_key, e.correlation_id
    from ({0}) e"""
_EVENT_OF_KEY = "select * from webhookd.events e where e.idempotency_key = $1"

_EVENT = """
    select e.id, e.event_type, e.created_at, e.idempotency_key, e.correlation_id, e.payload
    from webhookd.events e where e.id = $1"""
_TIME_OF_EVENT = "select e.created_at from webhookd.events e where e.id = $1"

_SUBSCRIPTIONS = """
    select s.id, s.event_type, s.callback_url, s.active, s.verified, s.max_attempts, s.base_delay_seconds,
        s.description, s.created_at, s.updated_at,
        coalesce(h.consecutive_failures, 0) as consecutive_failures, h.failing_since, h.last_error_code,
        h.last_failure_at, h.last_recovery_at
    from webhookd.subscriptions s left join webhookd.endpoint_health h on h.subscription_id = s.id"""
_HEALTH = ("consecutive_failures", "failing_since", "last_error_code", "last_failure_at", "last_recovery_at")

# Held: its subscription is not active and verified, and no attempt is leased.
_DELIVERIES = """
    select g.id, g.event_id, g.subscription_id, g.status, g.attempt_count, g.next_attempt_at,
        g.final_error_code, g.created_at, g.updated_at, g.dead_letter_id,
        not (s.active and s.verified) and (g.status in ('Pending', 'PendingRetry') or exists (
            select from webhookd.webhook_delivery_jobs j
            where j.saga_id = g.id and j.status in ('Pending', 'Leased')
                and (j.status = 'Pending') is true)) as held
    from ({0}) g join webhookd.subscriptions s on s.id = g.subscription_id"""
_SAGAS = "webhookd.webhook_delivery_sagas g"
_SAGA = "select * from webhookd.webhook_delivery_sagas g where g.id = $1"
_EVENT_SAGAS = """
    select * from (
        select * from webhookd.webhook_delivery_sagas g where {0} and g.dead_letter_id is null
        union all
        select * from webhookd.webhook_delivery_sagas g where {0} and g.dead_letter_id is not null
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

_TIME_OF_DEAD_LETTER = "select d.failed_at from webhookd.dead_letters d where d.id = $1"

_DEAD_LETTER = """
    select d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, d.failed_at,
        r.id as requeued_saga_id, e.event_type, d.payload_snapshot
    from webhookd.dead_letters d
    join webhookd.events e on e.id = d.event_id
    left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id
    where d.id = $1"""


async def events(
    connection: Connection, page: Page, event_type: str | None = None, idempotency_key: str | None = None
) -> list[Row]:
    """Return events without payloads. Events of one type are ordered by time."""
    if idempotency_key is not None:
        return await _event_of_key(connection, page, event_type, idempotency_key)
    arguments = Arguments()
    mark: tuple[object, ...] | None
    if event_type is None:
        part, mark = Range(("e.id",)), _id_mark(page)
    else:
        part = Range(("e.event_type", "e.created_at", "e.id"), (event_type,))
        mark = await _time_mark(connection, "event", _TIME_OF_EVENT, page)
    rows = piece("webhookd.events e", part, mark, page.limit, arguments)
    return await fetch_by_index(connection, f"{_EVENTS.format(rows)} order by {part.order}", arguments)


async def _event_of_key(
    connection: Connection, page: Page, event_type: str | None, idempotency_key: str
) -> list[Row]:
    """Return the event with this key, if any. There is at most one, so only the first page has it."""
    row = await connection.fetchrow(_EVENTS.format(_EVENT_OF_KEY), idempotency_key)
    if row is None or event_type not in (None, row["event_type"]):
        return []
    return [dict(row)] if page.after_id is None or row["id"] < page.after_id else []


async def subscriptions(
    connection: Connection,
    page: Page,
    event_type: str | None = None,
    active: bool | None = None,
    verified: bool | None = None,
) -> list[Row]:
    """Return subscriptions with their endpoints' health. There are few, so filters need no index."""
    arguments = Arguments()
    equals = {"s.event_type": event_type, "s.active": active, "s.verified": verified}
    tests = [f"{name} = {arguments.add(value)}" for name, value in equals.items() if value is not None]
    if page.after_id is not None:
        tests.append(f"s.id < {arguments.add(page.after_id)}")
    where = " and ".join(tests) or "true"
    query = f"{_SUBSCRIPTIONS} where {where} order by s.id desc limit {arguments.add(page.limit)}"
    return [_with_health(dict(row)) for row in await connection.fetch(query, *arguments)]


async def subscription(connection: Connection, subscription_id: int) -> Row:
    """Return a subscription with its endpoint's health."""
    query = f"{_SUBSCRIPTIONS} where s.id = $1"
    return _with_health(await _found(connection, "subscription", query, subscription_id))


async def deliveries(
    connection: Connection,
    page: Page,
    status: SagaStatus | None = None,
    subscription_id: int | None = None,
    event_id: int | None = None,
) -> list[Row]:
    """Return sagas. `held` ones wait until their subscription is active and verified."""
    arguments = Arguments()
    if event_id is not None:
        sagas = _sagas_of_event(page, event_id, status, subscription_id, arguments)
    elif subscription_id is not None:
        sagas = _sagas_of_subscription(page, subscription_id, status, arguments)
    else:
        sagas = _sagas_by_status(page, status, arguments)
    return await fetch_by_index(connection, f"{_DELIVERIES.format(sagas)} order by g.id desc", arguments)


def _sagas_of_event(
    page: Page, event_id: int, status: SagaStatus | None, subscription_id: int | None, arguments: Arguments
) -> str:
    """Select all sagas of an event, then sort them: there are at most as many as subscriptions to its type.

    uniq_saga_event_subscription finds the routed ones, idx_saga_event the requeued ones. OFFSET 0 keeps the
    planner from walking the primary key for the order.
    """
    equals = {"g.event_id": event_id, "g.subscription_id": subscription_id, "g.status": status}
    tests = [f"{name} = {arguments.add(value)}" for name, value in equals.items() if value is not None]
    sagas = _EVENT_SAGAS.format(" and ".join(tests))
    return f"{sagas} where {_after(page, arguments)} order by g.id desc limit {arguments.add(page.limit)}"


def _sagas_of_subscription(
    page: Page, subscription_id: int, status: SagaStatus | None, arguments: Arguments
) -> str:
    """Select a page of each status by its index, and merge them."""
    pieces = [
        _sagas_of_subscription_by_status(page, subscription_id, chosen, arguments)
        for chosen in ([status] if status else SagaStatus)
    ]
    merged = _MERGED.format(" union all ".join(f"({piece})" for piece in pieces))
    return f"{merged} order by g.id desc limit {arguments.add(page.limit)}"


def _sagas_of_subscription_by_status(
    page: Page, subscription_id: int, status: SagaStatus, arguments: Arguments
) -> str:
    match status:
        case SagaStatus.PENDING:
            part, only = Range(("g.subscription_id", "g.id"), (subscription_id,)), "g.status = 'Pending'"
        case SagaStatus.IN_PROGRESS:
            which = f"g.subscription_id = {arguments.add(subscription_id)}"
            return _IN_PROGRESS.format(which, _after(page, arguments), arguments.add(page.limit))
        case SagaStatus.PENDING_RETRY | SagaStatus.COMPLETED | SagaStatus.DEAD_LETTERED:
            part = Range(("g.subscription_id", "g.status", "g.id"), (subscription_id, status))
            only = "g.status in ('PendingRetry', 'Completed', 'DeadLettered')"
        case _:
            assert_never(status)
    return piece(_SAGAS, part, _id_mark(page), page.limit, arguments, only=only)


def _sagas_by_status(page: Page, status: SagaStatus | None, arguments: Arguments) -> str:
    match status:
        case SagaStatus.PENDING:
            return _PENDING.format(_after(page, arguments), arguments.add(page.limit))
        case SagaStatus.IN_PROGRESS:
            return _IN_PROGRESS.format("true", _after(page, arguments), arguments.add(page.limit))
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
    return piece(_SAGAS, part, _id_mark(page), page.limit, arguments, only=only)


def _after(page: Page, arguments: Arguments) -> str:
    return "true" if page.after_id is None else f"g.id < {arguments.add(page.after_id)}"


async def delivery(connection: Connection, saga_id: int, limits: Limits) -> Row:
    """Return a saga with its attempts, oldest first, and the reason for its status, from one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        saga = await _found(connection, "delivery", _DELIVERIES.format(_SAGA), saga_id)
        attempts = [dict(attempt) for attempt in await connection.fetch(_ATTEMPTS, saga_id)]
        explained = await explain.delivery(connection, saga_id, limits)
        return saga | explained | {"attempts": attempts}


async def event(connection: Connection, event_id: int, limits: Limits) -> Row:
    """Return an event with its payload and its delivery to each subscription, from one snapshot."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        found = await _found(connection, "event", _EVENT, event_id)
        found_deliveries = await explain.event_deliveries(
            connection, event_id, found["event_type"], limits, MAX_DELIVERIES_OF_EVENT + 1
        )
    return found | {
        "deliveries": found_deliveries[:MAX_DELIVERIES_OF_EVENT],
        "more_deliveries": len(found_deliveries) > MAX_DELIVERIES_OF_EVENT,
    }


async def dead_letters(connection: Connection, page: Page, selection: Filter) -> list[Row]:
    """Return dead letters without payloads, newest first, each with the saga it was requeued as.

    Uses idx_dead_failed, idx_dead_subscription, idx_dead_error or idx_dead_subscription_error.
    """
    subscription_id, error_code, *bounds = selection
    equals = {"d.subscription_id": subscription_id, "d.final_error_code": error_code}
    given = {name: value for name, value in equals.items() if value is not None}
    part = Range((*given, "d.failed_at", "d.id"), tuple(given.values()), *bounds)
    mark = await _time_mark(connection, "dead letter", _TIME_OF_DEAD_LETTER, page)
    arguments = Arguments()
    letters = piece("webhookd.dead_letters d", part, mark, page.limit, arguments)
    query = f"{_DEAD_LETTERS.format(letters)} order by d.failed_at desc, d.id desc"
    return await fetch_by_index(connection, query, arguments)


async def dead_letter(connection: Connection, dead_letter_id: int) -> Row:
    """Return a dead letter with its payload."""
    return await _found(connection, "dead letter", _DEAD_LETTER, dead_letter_id)


async def database_time(connection: Connection) -> datetime:
    """Return the database's time, the only clock that all instances share."""
    now: datetime = await connection.fetchval("select clock_timestamp()")
    return now


async def _found(connection: Connection, what: str, query: str, row_id: int) -> Row:
    row = await connection.fetchrow(query, row_id)
    if row is None:
        raise Refused(Refusal.NOT_FOUND, f"{what} {row_id} does not exist")
    return dict(row)


def _id_mark(page: Page) -> tuple[int] | None:
    return None if page.after_id is None else (page.after_id,)


async def _time_mark(
    connection: Connection, what: str, time_of_row: str, page: Page
) -> tuple[datetime, int] | None:
    """Return the position of the previous page's last row in a list by time. Its row never changes."""
    if page.after_id is None:
        return None
    time = await connection.fetchval(time_of_row, page.after_id)
    if time is None:
        raise Refused(Refusal.INVALID_ARGUMENT, f"cursor: {what} {page.after_id} does not exist")
    return time, page.after_id


def _with_health(row: Row) -> Row:
    health = {name: row.pop(name) for name in _HEALTH}
    return row | {"health": health}


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
