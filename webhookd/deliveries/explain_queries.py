"""Reads the facts that explain.py puts into words, in one snapshot, and returns rows for the API."""

from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.db.connection import Connection, fetch_one
from webhookd.db.paging import Row
from webhookd.deliveries.explain import (
    HELD,
    NOT_ROUTED,
    DeliveryFacts,
    Explanation,
    Limits,
    SubscriptionState,
    UnroutedFacts,
    explain_delivery,
    explain_unrouted,
)

# Routing creates all deliveries of an event in one statement, so their time is the time of routing. Without
# any, the event's own time stands in for it.
_ROUTING = """
    select exists (select from webhookd.event_routing_queue q where q.event_id = e.id) as is_queued,
        coalesce((select g.created_at from webhookd.webhook_delivery_sagas g
                  where g.event_id = e.id and g.dead_letter_id is null
                  order by g.subscription_id limit 1), e.created_at) as routed_at
    from webhookd.events e where e.id = $1"""

# The facts about a saga g and its subscription s: the last attempt (uniq_job_saga_attempt), the dead letter
# that it became (idx_dead_saga), the saga that this was requeued as (uniq_saga_dead_letter), the endpoint's
# health, and whether other attempts are in the way (idx_job_subscription_active, counted up to the window).
_FACTS = """
        s.id as subscription_id, s.callback_url, s.active, s.verified, s.max_attempts,
        g.id as saga_id, g.status, g.attempt_count, g.next_attempt_at, g.final_error_code, g.dead_letter_id,
        g.next_attempt_at <= now() as is_due,
        j.status as attempt_status, j.worker_id, j.lease_until, j.finished_at,
        j.lease_until <= now() as is_lease_over,
        h.failing_since, d.id as buried_as, r.id as requeued_as,
        h.failing_since is not null and exists (
            select from webhookd.webhook_delivery_jobs a
            where a.subscription_id = s.id and a.finished_at is null and a.saga_id <> g.id
                and (g.status in ('Pending', 'PendingRetry') or (a.status = 'Leased') is true)
            ) as is_waiting_for_probe,
        case when g.status in ('Pending', 'PendingRetry') and g.next_attempt_at <= now() then
            (select count(*) from (
                select from webhookd.webhook_delivery_jobs a
                where a.subscription_id = s.id and a.finished_at is null limit $2) w) >= $2
            else false end as is_window_full"""
_JOINS = """
    left join lateral (
        select * from webhookd.webhook_delivery_jobs j where j.saga_id = g.id
        order by j.attempt_at desc limit 1) j on true
    left join webhookd.dead_letters d on d.saga_id = g.id
    left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id
    left join webhookd.endpoint_health h on h.subscription_id = s.id"""

# Each subscription to the event type, and each that has a delivery although its type has changed, with its
# latest saga (uniq_saga_event_subscription, or idx_saga_event for a requeued one). Without a saga: its state
# at the time of routing and after it, from the change log (idx_subscription_change).
_SUBSCRIPTIONS_TEMPLATE = """
    select {facts},
        b.active as was_active, b.verified as was_verified,
        a.active as became_active, a.verified as became_verified
    from (
        (select s.id from webhookd.subscriptions s where s.event_type = $3 order by s.id limit $5)
        union
        (select g.subscription_id from webhookd.webhook_delivery_sagas g
         where g.event_id = $1 and g.dead_letter_id is null order by g.subscription_id limit $5)
        order by id limit $5) c
    join webhookd.subscriptions s on s.id = c.id
    left join lateral (
        select * from (
            select * from webhookd.webhook_delivery_sagas g
            where g.event_id = $1 and g.subscription_id = s.id and g.dead_letter_id is null
            union all
            select * from webhookd.webhook_delivery_sagas g
            where g.event_id = $1 and g.subscription_id = s.id and g.dead_letter_id is not null) g
        order by g.id desc limit 1) g on true
    {joins}
    left join lateral (
        select c.active, c.verified, c.event_type from webhookd.subscription_changes c
        where c.subscription_id = s.id and c.changed_at <= $4
        order by c.changed_at desc, c.id desc limit 1) b on g.id is null and b.event_type = $3
    left join lateral (
        select c.active, c.verified from webhookd.subscription_changes c
        where c.subscription_id = s.id and c.changed_at > $4 and not (c.active and c.verified)
        order by c.changed_at, c.id limit 1) a on g.id is null
    order by s.id"""

_DELIVERY_TEMPLATE = """
    select {facts}
    from webhookd.webhook_delivery_sagas g join webhookd.subscriptions s on s.id = g.subscription_id
    {joins}
    where g.id = $1"""
_SUBSCRIPTIONS = _SUBSCRIPTIONS_TEMPLATE.format(facts=_FACTS, joins=_JOINS)
_DELIVERY = _DELIVERY_TEMPLATE.format(facts=_FACTS, joins=_JOINS)

# Fields of DeliveryFacts with the same name as their column.
_SAME_NAMES = (
    "attempt_count",
    "next_attempt_at",
    "is_due",
    "final_error_code",
    "worker_id",
    "lease_until",
    "is_lease_over",
    "finished_at",
    "failing_since",
    "is_waiting_for_probe",
    "is_window_full",
    "buried_as",
    "requeued_as",
)


async def event_deliveries(
    connection: Connection, event_id: int, event_type: str, limits: Limits, limit: int
) -> list[Row]:
    """Return the delivery to each subscription of the event's type, or why there is none, up to `limit`."""
    routing = await fetch_one(connection, _ROUTING, event_id)
    rows = await connection.fetch(
        _SUBSCRIPTIONS, event_id, limits.subscription_window, event_type, routing["routed_at"], limit
    )
    return [_event_delivery(dict(row), limits, is_queued=routing["is_queued"]) for row in rows]


async def delivery(connection: Connection, saga_id: int, limits: Limits) -> Row:
    """Return the reason for the status of an existing saga."""
    facts = dict(await fetch_one(connection, _DELIVERY, saga_id, limits.subscription_window))
    explained = _explained(facts, limits)
    return {"reason": explained.reason, "explanation": explained.text, "buried_as": facts["buried_as"]}


def _event_delivery(facts: Row, limits: Limits, *, is_queued: bool) -> Row:
    if facts["saga_id"] is None:
        at_routing = _state(facts, "was_active", "was_verified")
        after_routing = _state(facts, "became_active", "became_verified")
        explained = explain_unrouted(UnroutedFacts(is_queued, at_routing, after_routing))
    else:
        explained = _explained(facts, limits)
    return {
        "subscription_id": facts["subscription_id"],
        "callback_url": facts["callback_url"],
        "status": facts["status"] or NOT_ROUTED,
        "reason": explained.reason,
        "explanation": explained.text,
        "saga_id": facts["saga_id"],
        "attempt_count": facts["attempt_count"],
        "next_attempt_at": facts["next_attempt_at"],
        "final_error_code": facts["final_error_code"],
        "dead_letter_id": facts["dead_letter_id"],
        "buried_as": facts["buried_as"],
        "held": explained.reason in HELD,
    }


def _state(facts: Row, active: str, verified: str) -> SubscriptionState | None:
    return None if facts[active] is None else SubscriptionState(facts[active], facts[verified])


def _explained(facts: Row, limits: Limits) -> Explanation:
    attempt_status = facts["attempt_status"]
    return explain_delivery(
        DeliveryFacts(
            status=SagaStatus(facts["status"]),
            subscription=SubscriptionState(facts["active"], facts["verified"]),
            attempt_limit=facts["max_attempts"] or limits.max_attempts,
            attempt_status=None if attempt_status is None else AttemptStatus(attempt_status),
            **{name: facts[name] for name in _SAME_NAMES},
        )
    )
