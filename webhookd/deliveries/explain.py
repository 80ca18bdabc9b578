"""Explains the status of a delivery, or why an event has none: a code for programs, a sentence for people.

First the pure part: facts in, words out. Then the queries that read the facts; reads.py runs them in one
snapshot.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, assert_never

from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.db.connection import Connection, fetch_one
from webhookd.db.paging import Row

NOT_ROUTED = "not_routed"
MAX_COUNTED_SUBSCRIPTIONS = 1000
# A rate limit delays a delivery that is due for longer. The others start within a poll interval.
LATE_SECONDS = 2


class Reason(StrEnum):
    """Stable codes: programs may depend on them. New ones may be added."""

    # No delivery exists.
    WAITS_FOR_ROUTING = "waits_for_routing"  # the event is not routed yet
    SUBSCRIBED_LATER = "subscribed_later"  # created, or given this event type, after the event was routed
    FILTERED = "filtered"  # the event does not have the labels of the subscription's filter
    INACTIVE = "inactive"  # disabled when the event was routed
    UNVERIFIED = "unverified"  # not verified when the event was routed
    CHANGED_MEANWHILE = "changed_meanwhile"  # changed by a transaction that was not committed yet
    # The delivery waits.
    HELD_DELETED = "held_deleted"  # the subscription is deleted: it is never sent
    HELD_PAUSED = "held_paused"  # the subscription is paused
    HELD_TENANT = "held_tenant"  # the subscription's tenant is not active
    HELD_INACTIVE = "held_inactive"  # the subscription is disabled
    HELD_UNVERIFIED = "held_unverified"  # the subscription is not verified
    EXHAUSTED = "exhausted"  # the limit was lowered: it becomes a dead letter when it is due
    SCHEDULED = "scheduled"  # an operator moved its first attempt to a later time
    FIRST_ATTEMPT_DUE = "first_attempt_due"
    RETRY_LATER = "retry_later"  # the last attempt failed, and the next is not due yet
    RETRY_DUE = "retry_due"
    ENDPOINT_FAILING = "endpoint_failing"  # the failing endpoint gets one request at a time
    WINDOW_FULL = "window_full"  # the subscription has its maximum number of active attempts
    RATE_LIMITED = "rate_limited"  # due for a while, and the subscription has a max_per_second
    # An attempt is active.
    WAITS_FOR_WORKER = "waits_for_worker"
    IN_FLIGHT = "in_flight"  # a worker holds its lease
    LEASE_EXPIRED = "lease_expired"  # the lease expired without a report
    RESULT_REPORTED = "result_reported"  # the result is not applied yet
    # The delivery is finished.
    DELIVERED = "delivered"
    DEAD_LETTERED = "dead_lettered"
    REQUEUED = "requeued"  # dead-lettered, and requeued as a new delivery


HELD = frozenset(
    {
        Reason.HELD_DELETED,
        Reason.HELD_PAUSED,
        Reason.HELD_TENANT,
        Reason.HELD_INACTIVE,
        Reason.HELD_UNVERIFIED,
    }
)

_TEXTS = {
    Reason.WAITS_FOR_ROUTING: "The event is waiting to be routed.",
    Reason.SUBSCRIBED_LATER: "Not routed: the subscription to this event type was created later. "
    "Subscriptions do not receive earlier events.",
    Reason.CHANGED_MEANWHILE: "Not routed: a change of the subscription was not committed yet when the event "
    "was routed.",
    Reason.FILTERED: "Not routed: the event does not have the labels of the subscription's filter.",
    Reason.INACTIVE: "Not routed: the subscription was disabled when the event was routed.",
    Reason.UNVERIFIED: "Not routed: the subscription was not verified when the event was routed.",
    Reason.HELD_DELETED: "Never sent: the subscription is deleted.",
    Reason.HELD_PAUSED: "Held: the subscription is paused. Holding uses no attempts.",
    Reason.HELD_TENANT: "Held: the tenant is not active. Holding uses no attempts.",
    Reason.HELD_INACTIVE: "Held: the subscription is disabled. Holding uses no attempts.",
    Reason.HELD_UNVERIFIED: "Held: the subscription is not verified. Holding uses no attempts.",
}


class Limits(NamedTuple):
    """This instance's limits, for subscriptions without limits of their own."""

    subscription_window: int
    max_attempts: int


class SubscriptionState(NamedTuple):
    """The state of a subscription at some time, as far as it decides on routing and sending."""

    active: bool
    verified: bool
    accepts_labels: bool = True  # its filter accepted the event's labels
    paused: bool = False
    tenant_active: bool = True
    deleted: bool = False

    @property
    def is_routable(self) -> bool:
        return self.active and self.verified and self.accepts_labels


class UnroutedFacts(NamedTuple):
    """Facts about a subscription that has no delivery of an event."""

    is_queued: bool  # the event waits for routing
    at_routing: SubscriptionState | None  # by the change log; None: not subscribed to this event type
    after_routing: SubscriptionState | None  # the next state in which it was not routable


class DeliveryFacts(NamedTuple):
    """Facts about a delivery, its last attempt, its subscription and its endpoint."""

    status: SagaStatus
    subscription: SubscriptionState
    attempt_count: int
    attempt_limit: int
    next_attempt_at: datetime
    is_due: bool
    final_error_code: str | None
    attempt_status: AttemptStatus | None
    worker_id: str | None
    lease_until: datetime | None
    is_lease_over: bool | None
    finished_at: datetime | None
    failing_since: datetime | None
    is_waiting_for_probe: bool  # the endpoint fails, and another attempt is its probe
    is_window_full: bool
    max_per_second: float | None
    is_late: bool  # due for longer than an attempt takes to start
    buried_as: int | None  # the dead letter that it became
    requeued_as: int | None


class Explanation(NamedTuple):
    """A code for programs, and the same in words."""

    reason: Reason
    text: str


def explain_unrouted(facts: UnroutedFacts) -> Explanation:
    """Return why no delivery exists.

    Routing used its own snapshot, which is slightly later than the recorded time, so the state after that
    time counts too. A subscription that was routable throughout but not routed to was changed by a late
    commit.
    """
    if facts.is_queued:
        reason = Reason.WAITS_FOR_ROUTING
    elif facts.at_routing is None:
        reason = Reason.SUBSCRIBED_LATER
    elif (state := facts.after_routing if facts.at_routing.is_routable else facts.at_routing) is None:
        reason = Reason.CHANGED_MEANWHILE
    elif not state.active:
        reason = Reason.INACTIVE
    else:
        reason = Reason.FILTERED if state.verified else Reason.UNVERIFIED
    return Explanation(reason, _TEXTS[reason])


def explain_no_subscription(event_type: str, tenant: str, others: int) -> str:
    """Return why no subscription matches an event; `others` match its type, but have another tenant."""
    text = (
        f"Tenant {tenant} has no subscription to {event_type}."
        if tenant
        else f"The event has no tenant, and no subscription without a tenant matches {event_type}."
    )
    if not others:
        return text
    number = f"{others} or more" if others >= MAX_COUNTED_SUBSCRIPTIONS else str(others)
    is_one = others == 1
    whose = "of another tenant or of none" if tenant else "of a tenant" if is_one else "of tenants"
    have = "subscription" if is_one else "subscriptions"
    match = "matches" if is_one else "match"
    return f"{text} {number} {have} {whose} {match} this type."


def explain_delivery(facts: DeliveryFacts) -> Explanation:
    """Return the reason for a delivery's status."""
    match facts.status:
        case SagaStatus.PENDING | SagaStatus.PENDING_RETRY:
            return _waiting(facts)
        case SagaStatus.IN_PROGRESS:
            return _in_progress(facts)
        case SagaStatus.COMPLETED:
            return Explanation(Reason.DELIVERED, _delivered(facts))
        case SagaStatus.DEAD_LETTERED:
            return _dead_lettered(facts)
        case never:
            assert_never(never)


def _waiting(facts: DeliveryFacts) -> Explanation:
    if held := _held(facts):
        return held
    due_at = _time(facts.next_attempt_at)
    if facts.attempt_count >= facts.attempt_limit:
        none_left = f"{_failure(facts)}No attempt is left, because the limit is now {facts.attempt_limit}."
        text = f"{none_left} The delivery becomes a dead letter at {due_at}."
        return Explanation(Reason.EXHAUSTED, text)
    attempt = f"{_failure(facts)}Attempt {_next_attempt(facts)}"
    if facts.is_due:
        return _due(facts, f"{attempt} has been due since {due_at}")
    reason = Reason.SCHEDULED if facts.status is SagaStatus.PENDING else Reason.RETRY_LATER
    return Explanation(reason, f"{attempt} is due at {due_at}.")


def _due(facts: DeliveryFacts, due: str) -> Explanation:
    if facts.failing_since is not None and facts.is_waiting_for_probe:
        return Explanation(Reason.ENDPOINT_FAILING, f"{due}. {_one_at_a_time(facts.failing_since)}")
    if facts.is_window_full:
        text = f"{due}. The subscription already has its maximum number of active attempts."
        return Explanation(Reason.WINDOW_FULL, text)
    if facts.max_per_second is not None and facts.is_late:
        text = f"{due}. The subscription gets at most {facts.max_per_second:g} requests per second."
        return Explanation(Reason.RATE_LIMITED, text)
    reason = Reason.FIRST_ATTEMPT_DUE if facts.status is SagaStatus.PENDING else Reason.RETRY_DUE
    return Explanation(reason, f"{due} and is about to start.")


def _in_progress(facts: DeliveryFacts) -> Explanation:
    attempt = f"Attempt {_next_attempt(facts)}"
    match facts.attempt_status:
        case AttemptStatus.LEASED if facts.lease_until is not None:
            worker, until = f"worker {facts.worker_id}", _time(facts.lease_until)
            if facts.is_lease_over:
                lease = f"the lease of {worker} expired at {until} without a report"
                text = f"{attempt}: {lease}. Another worker gets the attempt soon."
                return Explanation(Reason.LEASE_EXPIRED, text)
            text = f"{attempt} is being sent by {worker}, with a lease until {until}."
            return Explanation(Reason.IN_FLIGHT, text)
        case AttemptStatus.COMPLETED | AttemptStatus.FAILED if facts.finished_at is not None:
            text = f"{attempt} finished at {_time(facts.finished_at)}. Its result is about to be applied."
            return Explanation(Reason.RESULT_REPORTED, text)
    if held := _held(facts):
        return held
    if facts.failing_since is not None and facts.is_waiting_for_probe:
        text = f"{attempt} is waiting. {_one_at_a_time(facts.failing_since)}"
        return Explanation(Reason.ENDPOINT_FAILING, text)
    return Explanation(
        Reason.WAITS_FOR_WORKER, f"{attempt} is about to be sent by the next worker with a free slot."
    )


def _dead_lettered(facts: DeliveryFacts) -> Explanation:
    text = (
        f"Failed with {facts.final_error_code} after {_attempts(facts.attempt_count)} and became dead letter "
        f"{facts.buried_as}."
    )
    if facts.requeued_as is None:
        return Explanation(Reason.DEAD_LETTERED, text)
    text = f"{text} The dead letter was requeued as delivery {facts.requeued_as}."
    return Explanation(Reason.REQUEUED, text)


def _held(facts: DeliveryFacts) -> Explanation | None:
    subscription = facts.subscription
    if subscription.deleted:
        reason = Reason.HELD_DELETED
    elif not subscription.active:
        reason = Reason.HELD_INACTIVE
    elif not subscription.verified:
        reason = Reason.HELD_UNVERIFIED
    elif subscription.paused:
        reason = Reason.HELD_PAUSED
    elif not subscription.tenant_active:
        reason = Reason.HELD_TENANT
    else:
        return None
    return Explanation(reason, _TEXTS[reason])


def _delivered(facts: DeliveryFacts) -> str:
    when = "" if facts.finished_at is None else f" at {_time(facts.finished_at)}"
    before = "" if facts.final_error_code is None else f"; the last failure was {facts.final_error_code}"
    return f"Delivered{when} after {_attempts(facts.attempt_count)}{before}."


def _one_at_a_time(failing_since: datetime) -> str:
    return f"The endpoint has been failing since {_time(failing_since)} and gets one request at a time."


def _failure(facts: DeliveryFacts) -> str:
    """Return the first sentence: the last failure, if there was one."""
    return "" if facts.final_error_code is None else f"Failed with {facts.final_error_code}. "


def _next_attempt(facts: DeliveryFacts) -> str:
    return f"{facts.attempt_count + 1} of {max(facts.attempt_limit, facts.attempt_count + 1)}"


def _attempts(number: int) -> str:
    return f"{number} attempt{'' if number == 1 else 's'}"


def _time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# The time of routing is not stored. Routing creates all deliveries of an event in one statement, so two with
# the same time have the time of routing. A replay creates single ones, later: a single delivery has the time
# of routing only if its subscription has been routable since the event. Otherwise the event's own time stands
# in for it.
_ROUTING = """
    select exists (select from webhookd.event_routing_queue q where q.event_id = e.id) as is_queued,
        webhookd.patterns_of(e.event_type) as patterns,
        case when f.number > 1 or (
            (select c.active and c.verified and coalesce(c.filter <@ e.labels, c.filter is null)
                 and c.event_types::text[] && webhookd.patterns_of(e.event_type)
             from webhookd.subscription_changes c
             where c.subscription_id = f.subscription_id and c.changed_at <= e.created_at
             order by c.changed_at desc, c.id desc limit 1)
            and not exists (
                select from webhookd.subscription_changes c
                where c.subscription_id = f.subscription_id
                    and c.changed_at > e.created_at and c.changed_at <= f.created_at
                    and not (c.active and c.verified and coalesce(c.filter <@ e.labels, c.filter is null)
                             and c.event_types::text[] && webhookd.patterns_of(e.event_type)))
        ) then f.created_at else e.created_at end as routed_at
    from webhookd.events e
    left join lateral (
        select g.created_at, count(*) as number, min(g.subscription_id) as subscription_id
        from webhookd.webhook_delivery_sagas g where g.event_id = e.id and g.resent_from is null
        group by g.created_at order by g.created_at limit 1) f on true
    where e.id = $1"""

# The subscriptions of other tenants, or of none, that match the type of an event. Counting ends at the limit.
_OTHER_TENANTS = """
    select e.event_type, e.tenant, (
        select count(*) from (
            select distinct t.subscription_id from webhookd.subscription_types t
            where t.tenant <> e.tenant and t.pattern = any(webhookd.patterns_of(e.event_type))
                and not exists (select from webhookd.subscriptions s
                                where s.id = t.subscription_id and s.deleted_at is not null)
            limit $2) o) as others
    from webhookd.events e where e.id = $1"""

# The address that attempt j was sent to, from the history of its subscription (idx_subscription_change), so
# that no attempt has to store it. A claim reads the address just before the request: if a move was committed
# at that very moment, this can be the other address. Null: the attempt waits.
SENT_TO = """
    (select c.callback_url from webhookd.subscription_changes c
     where j.status <> 'Pending' and c.subscription_id = j.subscription_id
         and c.changed_at <= coalesce(j.finished_at, now())
             - make_interval(secs => coalesce(j.duration_ms, 0) / 1000.0)
     order by c.changed_at desc, c.id desc limit 1)"""

# The facts about a saga g and its subscription s: the last attempt (uniq_job_saga_attempt), the dead letter
# that it became (idx_dead_saga), the saga that this was requeued as (uniq_saga_dead_letter), the endpoint's
# health, and whether other attempts are in the way (idx_saga_in_progress, counted up to the window).
# A finished delivery shows the address of its last attempt, any other one the address of the next attempt.
_FACTS_TEMPLATE = """
        case when g.status in ('Completed', 'DeadLettered') then coalesce({sent_to}, s.callback_url)
            else s.callback_url end as callback_url,
        s.id as subscription_id, s.active, s.verified, s.paused, s.tenant_active,
        s.deleted_at is not null as deleted, s.max_attempts, g.id as saga_id, g.status, g.attempt_count,
        g.next_attempt_at, g.final_error_code,
        g.dead_letter_id, g.resent_from,
        g.next_attempt_at <= now() as is_due,
        j.status as attempt_status, j.worker_id, j.lease_until, j.finished_at,
        j.lease_until <= now() as is_lease_over,
        h.failing_since, d.id as buried_as, r.id as requeued_as,
        h.failing_since is not null and exists (
            select from webhookd.webhook_delivery_sagas o
            join webhookd.webhook_delivery_jobs a on a.id = o.job_id
            where o.subscription_id = s.id and o.status = 'InProgress' and o.id <> g.id
                and (g.status in ('Pending', 'PendingRetry') or (a.status = 'Leased') is true)
            ) as is_waiting_for_probe,
        case when g.status in ('Pending', 'PendingRetry') and g.next_attempt_at <= now() then
            (select count(*) from (
                select from webhookd.webhook_delivery_sagas o
                where o.subscription_id = s.id and o.status = 'InProgress' limit $2) w) >= $2
            else false end as is_window_full,
        s.max_per_second, g.next_attempt_at <= now() - interval '{late_seconds} seconds' as is_late"""
_FACTS = _FACTS_TEMPLATE.format(sent_to=SENT_TO, late_seconds=LATE_SECONDS)
_JOINS = """
    left join lateral (
        select * from webhookd.webhook_delivery_jobs j where j.saga_id = g.id
        order by j.attempt_at desc limit 1) j on true
    left join webhookd.dead_letters d on d.saga_id = g.id
    left join webhookd.webhook_delivery_sagas r on r.dead_letter_id = d.id
    left join webhookd.endpoint_health h on h.subscription_id = s.id"""

# Each subscription of the tenant with a pattern for the event type, and each that has a delivery although its
# patterns have changed, with its latest saga (uniq_saga_event_subscription, or idx_saga_event for a requeued
# one). Without a saga: its state at the time of routing and after it, from the change log
# (idx_subscription_change).
_SUBSCRIPTIONS_TEMPLATE = """
    select {facts},
        b.active as was_active, b.verified as was_verified, b.accepts_labels as did_accept_labels,
        a.active as became_active, a.verified as became_verified, a.accepts_labels as later_accepts_labels
    from (
        (select distinct t.subscription_id as id
         from webhookd.events e cross join unnest($3::text[]) as p (pattern) cross join lateral (
             select t.subscription_id from webhookd.subscription_types t
             where t.tenant = e.tenant and t.pattern = p.pattern order by t.subscription_id limit $5) t
         where e.id = $1 order by id limit $5)
        union
        (select g.subscription_id from webhookd.webhook_delivery_sagas g
         where g.event_id = $1 and g.resent_from is null order by g.subscription_id limit $5)
        order by id limit $5) c
    join webhookd.subscriptions s on s.id = c.id
    join webhookd.events e on e.id = $1
    left join lateral (
        select * from (
            select * from webhookd.webhook_delivery_sagas g
            where g.event_id = $1 and g.subscription_id = s.id and g.resent_from is null
            union all
            select * from webhookd.webhook_delivery_sagas g
            where g.event_id = $1 and g.subscription_id = s.id and g.resent_from is not null) g
        order by g.id desc limit 1) g on true
    {joins}
    left join lateral (
        select c.active, c.verified, c.event_types,
            coalesce(c.filter <@ e.labels, c.filter is null) as accepts_labels
        from webhookd.subscription_changes c
        where c.subscription_id = s.id and c.changed_at <= $4
        order by c.changed_at desc, c.id desc limit 1) b on g.id is null and b.event_types::text[] && $3
    left join lateral (
        select c.active, c.verified, coalesce(c.filter <@ e.labels, c.filter is null) as accepts_labels
        from webhookd.subscription_changes c
        where c.subscription_id = s.id and c.changed_at > $4
            and not (c.active and c.verified and coalesce(c.filter <@ e.labels, c.filter is null))
        order by c.changed_at, c.id limit 1) a on g.id is null
    order by s.id"""

_DELIVERY_TEMPLATE = """
    select {facts}
    from webhookd.webhook_delivery_sagas g join webhookd.subscriptions s on s.id = g.subscription_id
    {joins}
    where g.id = $1"""
_SUBSCRIPTIONS = _SUBSCRIPTIONS_TEMPLATE.format(facts=_FACTS, joins=_JOINS)
_DELIVERY = _DELIVERY_TEMPLATE.format(facts=_FACTS, joins=_JOINS)


async def event_deliveries(connection: Connection, event_id: int, limits: Limits, limit: int) -> list[Row]:
    """Return the delivery to each subscription of the event's type, or why there is none, up to `limit`."""
    routing = await fetch_one(connection, _ROUTING, event_id)
    rows = await connection.fetch(
        _SUBSCRIPTIONS, event_id, limits.subscription_window, routing["patterns"], routing["routed_at"], limit
    )
    return [_event_delivery(dict(row), limits, is_queued=routing["is_queued"]) for row in rows]


async def no_subscription(connection: Connection, event_id: int, only_tenant: str | None) -> str:
    """Return why an event has no delivery: no subscription of its tenant matches its type.

    Without `only_tenant`, it also says how many of other tenants do: a wrong tenant is the usual mistake.
    """
    limit = 0 if only_tenant is not None else MAX_COUNTED_SUBSCRIPTIONS
    event_type, tenant, others = await fetch_one(connection, _OTHER_TENANTS, event_id, limit)
    return explain_no_subscription(event_type, tenant, others)


async def delivery(connection: Connection, saga_id: int, limits: Limits) -> Row:
    """Return the reason for the status of an existing saga."""
    facts = dict(await fetch_one(connection, _DELIVERY, saga_id, limits.subscription_window))
    explained = _explained(facts, limits)
    return {
        "reason": explained.reason,
        "explanation": explained.text,
        "buried_as": facts["buried_as"],
        "requeued_as": facts["requeued_as"],
    }


def _event_delivery(row: Row, limits: Limits, *, is_queued: bool) -> Row:
    if row["saga_id"] is None:
        at_routing = _state(row["was_active"], row["was_verified"], row["did_accept_labels"])
        after_routing = _state(row["became_active"], row["became_verified"], row["later_accepts_labels"])
        explained = explain_unrouted(UnroutedFacts(is_queued, at_routing, after_routing))
    else:
        explained = _explained(row, limits)
    return {
        "subscription_id": row["subscription_id"],
        "callback_url": row["callback_url"],
        "status": row["status"] or NOT_ROUTED,
        "reason": explained.reason,
        "explanation": explained.text,
        "saga_id": row["saga_id"],
        "attempt_count": row["attempt_count"],
        "next_attempt_at": row["next_attempt_at"],
        "final_error_code": row["final_error_code"],
        "dead_letter_id": row["dead_letter_id"],
        "resent_from": row["resent_from"],
        "buried_as": row["buried_as"],
        "held": explained.reason in HELD,
    }


def _state(
    active: bool | None, verified: bool | None, accepts_labels: bool | None
) -> SubscriptionState | None:
    if active is None or verified is None or accepts_labels is None:
        return None
    return SubscriptionState(active, verified, accepts_labels)


def _explained(row: Row, limits: Limits) -> Explanation:
    facts = row | {
        "status": SagaStatus(row["status"]),
        "subscription": SubscriptionState(
            row["active"],
            row["verified"],
            paused=row["paused"],
            tenant_active=row["tenant_active"],
            deleted=row["deleted"],
        ),
        "attempt_limit": row["max_attempts"] or limits.max_attempts,
        "attempt_status": row["attempt_status"] and AttemptStatus(row["attempt_status"]),
    }
    return explain_delivery(DeliveryFacts(**{name: facts[name] for name in DeliveryFacts._fields}))
