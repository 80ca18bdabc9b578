"""What is asked about: plain SELECTs, with the rights of webhookd_reader, which sees no signing secret.

Lists are newest first and keyset-paged by id: a page costs the same wherever it is.
"""

from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from webhookd.model.states import SagaStatus
from webhookd.store.connection import Connection
from webhookd.store.dead_letters import Filter

Row: TypeAlias = dict[str, Any]

# Of one event: each subscription of its type is one. The rest is in the list of deliveries.
MAX_DELIVERIES_OF_EVENT = 1000


class Page(NamedTuple):
    """So many rows with smaller ids than this one."""

    limit: int
    before_id: int


class Conditions(list[tuple[str, object]]):
    """Constant pieces of SQL that end where their value goes; one without a value is left out.

    Not `$1 is null or …`: a plan for every combination at once has an index for none.
    """

    def with_values(self) -> list[tuple[str, object]]:
        return [(condition, value) for condition, value in self if value is not None]


_EVENTS = """
    select e.id, e.event_type, e.created_at, e.idempotency_key, e.correlation_id
    from webhookd.events e"""

_EVENT = """
    select e.id, e.event_type, e.created_at, e.idempotency_key, e.correlation_id, e.payload,
        exists (select from webhookd.event_routing_queue q where q.event_id = e.id) as waits_for_routing
    from webhookd.events e where e.id = $1"""

# A subscription without saga: what it was when the event came, else the first thing that it became after.
# Routing decides by its own snapshot, somewhat later than the event's time; so does this, by looking on.
_EVENT_DELIVERIES = """
    select s.id as subscription_id, coalesce(g.status::text, 'not_routed') as status,
        case when g.id is not null then null
            when $4 then 'waits_for_routing'
            when b.active is null then 'subscribed_later'
            when not b.active then 'inactive'
            when not b.verified then 'unverified'
            when not a.active then 'inactive'
            when not a.verified then 'unverified'
            else 'unknown' end as reason,
        g.id as saga_id, g.attempt_count, g.next_attempt_at, g.final_error_code, g.dead_letter_id,
        (g.status in ('Pending', 'PendingRetry') and not (s.active and s.verified)) is true as held
    from webhookd.subscriptions s
    left join lateral (
        select * from webhookd.webhook_delivery_sagas g where g.event_id = $1 and g.subscription_id = s.id
        order by g.id desc limit 1) g on true
    left join lateral (
        select c.active, c.verified from webhookd.subscription_changes c
        where c.subscription_id = s.id and c.changed_at <= $3
        order by c.changed_at desc, c.id desc limit 1) b on true
    left join lateral (
        select c.active, c.verified from webhookd.subscription_changes c
        where c.subscription_id = s.id and c.changed_at > $3 and not (c.active and c.verified)
        order by c.changed_at, c.id limit 1) a on true
    where s.event_type = $2
    order by s.id limit $5"""

_SUBSCRIPTIONS = """
    select s.id, s.event_type, s.callback_url, s.active, s.verified, s.max_attempts, s.base_delay_seconds,
        s.description, s.created_at, s.updated_at,
        coalesce(h.consecutive_failures, 0) as consecutive_failures, h.failing_since, h.last_error_code,
        h.last_failure_at, h.last_recovery_at
    from webhookd.subscriptions s left join webhookd.endpoint_health h on h.subscription_id = s.id"""
_HEALTH = ("consecutive_failures", "failing_since", "last_error_code", "last_failure_at", "last_recovery_at")

_DELIVERIES = """
    select g.id, g.event_id, g.subscription_id, g.status, g.attempt_count, g.next_attempt_at,
        g.final_error_code, g.created_at, g.updated_at, g.dead_letter_id,
        g.status in ('Pending', 'PendingRetry') and not (s.active and s.verified) as held
    from webhookd.webhook_delivery_sagas g join webhookd.subscriptions s on s.id = g.subscription_id"""

# By uniq_job_saga_attempt.
_ATTEMPTS = """
    select j.id, row_number() over (order by j.attempt_at) as attempt, j.status, j.attempt_at, j.created_at,
        j.finished_at, j.response_status, j.error_code, j.duration_ms, j.retry_after_seconds,
        j.response_excerpt, j.worker_id, j.lease_until, j.lease_resets, j.result_applied_at
    from webhookd.webhook_delivery_jobs j where j.saga_id = $1 order by j.attempt_at"""

_DEAD_LETTERS = """
    select d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, d.failed_at,
        r.id as requeued_saga_id
    from webhookd.dead_letters d left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id"""

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
    """Events, without their payloads."""
    conditions = Conditions([("e.event_type =", event_type), ("e.idempotency_key =", idempotency_key)])
    return await _page(connection, _EVENTS, "e.id", conditions, page)


async def event(connection: Connection, event_id: int) -> Row | None:
    """One event with its payload, and what became of it at every subscription of its type."""
    row = await connection.fetchrow(_EVENT, event_id)
    if row is None:
        return None
    found = dict(row)
    deliveries = await connection.fetch(
        _EVENT_DELIVERIES,
        event_id,
        found["event_type"],
        found["created_at"],
        found.pop("waits_for_routing"),
        MAX_DELIVERIES_OF_EVENT + 1,
    )
    found["deliveries"] = [dict(delivery) for delivery in deliveries[:MAX_DELIVERIES_OF_EVENT]]
    found["more_deliveries"] = len(deliveries) > MAX_DELIVERIES_OF_EVENT
    return found


async def subscriptions(
    connection: Connection,
    page: Page,
    event_type: str | None = None,
    active: bool | None = None,
    verified: bool | None = None,
) -> list[Row]:
    """Subscriptions with their endpoints' health."""
    conditions = Conditions(
        [("s.event_type =", event_type), ("s.active =", active), ("s.verified =", verified)]
    )
    rows = await _page(connection, _SUBSCRIPTIONS, "s.id", conditions, page)
    return [_with_health(row) for row in rows]


async def subscription(connection: Connection, subscription_id: int) -> Row | None:
    """One subscription with its endpoint's health."""
    row = await connection.fetchrow(f"{_SUBSCRIPTIONS} where s.id = $1", subscription_id)
    return None if row is None else _with_health(dict(row))


async def deliveries(
    connection: Connection,
    page: Page,
    status: SagaStatus | None = None,
    subscription_id: int | None = None,
    event_id: int | None = None,
) -> list[Row]:
    """Sagas; `held` ones wait for their subscription."""
    conditions = Conditions(
        [("g.status =", status), ("g.subscription_id =", subscription_id), ("g.event_id =", event_id)]
    )
    return await _page(connection, _DELIVERIES, "g.id", conditions, page)


async def delivery(connection: Connection, saga_id: int) -> Row | None:
    """One saga with its attempts, oldest first."""
    row = await connection.fetchrow(f"{_DELIVERIES} where g.id = $1", saga_id)
    if row is None:
        return None
    attempts = [dict(attempt) for attempt in await connection.fetch(_ATTEMPTS, saga_id)]
    return dict(row) | {"attempts": attempts}


async def dead_letters(connection: Connection, page: Page, which: Filter) -> list[Row]:
    """Dead letters, without their payloads; with the saga that one was requeued as."""
    conditions = Conditions(
        [
            ("d.subscription_id =", which.subscription_id),
            ("d.final_error_code =", which.error_code),
            ("d.failed_at >=", which.failed_after),
            ("d.failed_at <", which.failed_before),
        ]
    )
    return await _page(connection, _DEAD_LETTERS, "d.id", conditions, page)


async def dead_letter(connection: Connection, dead_letter_id: int) -> Row | None:
    """One dead letter with the payload as it was."""
    row = await connection.fetchrow(_DEAD_LETTER, dead_letter_id)
    return None if row is None else dict(row)


async def database_time(connection: Connection) -> datetime:
    """What time it is, for everybody."""
    now: datetime = await connection.fetchval("select clock_timestamp()")
    return now


async def _page(
    connection: Connection, query: str, key: str, conditions: Conditions, page: Page
) -> list[Row]:
    given = conditions.with_values()
    pieces = [f"{condition} ${number}" for number, (condition, _) in enumerate(given, start=3)]
    where = " and ".join([f"{key} < $1", *pieces])
    values = [value for _, value in given]
    rows = await connection.fetch(
        f"{query} where {where} order by {key} desc limit $2", page.before_id, page.limit, *values
    )
    return [dict(row) for row in rows]


def _with_health(row: Row) -> Row:
    health = {name: row.pop(name) for name in _HEALTH}
    return row | {"health": health}
