"""Explains the status of a delivery, or why an event has none. Pure: facts in, words out.

explain_queries.py reads the facts in one snapshot. The result is a stable code for programs and a sentence
for people.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, assert_never

from webhookd.core.states import AttemptStatus, SagaStatus

NOT_ROUTED = "not_routed"


class Reason(StrEnum):
    """Stable codes: programs may depend on them. New ones may be added."""

    # No delivery exists.
    WAITS_FOR_ROUTING = "waits_for_routing"  # the event is not routed yet
    SUBSCRIBED_LATER = "subscribed_later"  # created, or given this event type, after the event was routed
    INACTIVE = "inactive"  # paused when the event was routed
    UNVERIFIED = "unverified"  # not verified when the event was routed
    CHANGED_MEANWHILE = "changed_meanwhile"  # changed by a transaction that was not committed yet
    # The delivery waits.
    HELD_INACTIVE = "held_inactive"  # the subscription is paused
    HELD_UNVERIFIED = "held_unverified"  # the subscription is not verified
    EXHAUSTED = "exhausted"  # the limit was lowered: it becomes a dead letter when it is due
    SCHEDULED = "scheduled"  # an operator moved its first attempt to a later time
    FIRST_ATTEMPT_DUE = "first_attempt_due"
    RETRY_LATER = "retry_later"  # the last attempt failed, and the next is not due yet
    RETRY_DUE = "retry_due"
    ENDPOINT_FAILING = "endpoint_failing"  # the failing endpoint gets one request at a time
    WINDOW_FULL = "window_full"  # the subscription has its maximum number of active attempts
    # An attempt is active.
    WAITS_FOR_WORKER = "waits_for_worker"
    IN_FLIGHT = "in_flight"  # a worker holds its lease
    LEASE_EXPIRED = "lease_expired"  # the lease expired without a report
    RESULT_REPORTED = "result_reported"  # the result is not applied yet
    # The delivery is finished.
    DELIVERED = "delivered"
    DEAD_LETTERED = "dead_lettered"
    REQUEUED = "requeued"  # dead-lettered, and requeued as a new delivery


HELD = frozenset({Reason.HELD_INACTIVE, Reason.HELD_UNVERIFIED})


class Limits(NamedTuple):
    """This instance's limits, for subscriptions without limits of their own."""

    subscription_window: int
    max_attempts: int


class SubscriptionState(NamedTuple):
    """Whether a subscription was active and verified at some time."""

    active: bool
    verified: bool

    @property
    def is_deliverable(self) -> bool:
        return self.active and self.verified


class UnroutedFacts(NamedTuple):
    """Facts about a subscription that has no delivery of an event."""

    is_queued: bool  # the event waits for routing
    at_routing: SubscriptionState | None  # by the change log; None: not subscribed to this event type
    after_routing: SubscriptionState | None  # the next state in which it was not deliverable


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
    buried_as: int | None  # the dead letter that it became
    requeued_as: int | None


class Explanation(NamedTuple):
    """A code for programs, and the same in words."""

    reason: Reason
    text: str


def explain_unrouted(facts: UnroutedFacts) -> Explanation:
    """Return why no delivery exists.

    Routing used its own snapshot, which is slightly later than the recorded time, so the state after that
    time counts too. A subscription that was deliverable throughout but not routed to was changed by a late
    commit.
    """
    if facts.is_queued:
        return Explanation(Reason.WAITS_FOR_ROUTING, "The event is waiting to be routed.")
    if facts.at_routing is None:
        return Explanation(
            Reason.SUBSCRIBED_LATER,
            "Not routed: the subscription to this event type was created later. Subscriptions do not receive "
            "earlier events.",
        )
    state = facts.after_routing if facts.at_routing.is_deliverable else facts.at_routing
    if state is None:
        return Explanation(
            Reason.CHANGED_MEANWHILE,
            "Not routed: a change of the subscription was not committed yet when the event was routed.",
        )
    if not state.active:
        return Explanation(
            Reason.INACTIVE, "Not routed: the subscription was paused when the event was routed."
        )
    return Explanation(
        Reason.UNVERIFIED, "Not routed: the subscription was not verified when the event was routed."
    )


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
        return Explanation(
            Reason.EXHAUSTED,
            f"{_failure(facts)}No attempt is left, because the limit is now {facts.attempt_limit}. "
            f"The delivery becomes a dead letter at {due_at}.",
        )
    attempt = f"{_failure(facts)}Attempt {_next_attempt(facts)}"
    if not facts.is_due:
        reason = Reason.SCHEDULED if facts.status is SagaStatus.PENDING else Reason.RETRY_LATER
        return Explanation(reason, f"{attempt} is due at {due_at}.")
    due = f"{attempt} has been due since {due_at}"
    if facts.failing_since is not None and facts.is_waiting_for_probe:
        return Explanation(Reason.ENDPOINT_FAILING, f"{due}. {_one_at_a_time(facts.failing_since)}")
    if facts.is_window_full:
        return Explanation(
            Reason.WINDOW_FULL, f"{due}. The subscription already has its maximum number of active attempts."
        )
    reason = Reason.FIRST_ATTEMPT_DUE if facts.status is SagaStatus.PENDING else Reason.RETRY_DUE
    return Explanation(reason, f"{due} and is about to start.")


def _in_progress(facts: DeliveryFacts) -> Explanation:
    attempt = f"Attempt {_next_attempt(facts)}"
    match facts.attempt_status:
        case AttemptStatus.LEASED if facts.lease_until is not None:
            lease = f"{attempt}: the lease of worker {facts.worker_id}"
            if facts.is_lease_over:
                return Explanation(
                    Reason.LEASE_EXPIRED,
                    f"{lease} expired at {_time(facts.lease_until)} without a report. "
                    "Another worker gets the attempt soon.",
                )
            return Explanation(
                Reason.IN_FLIGHT,
                f"{attempt} is being sent by worker {facts.worker_id}, with a lease until "
                f"{_time(facts.lease_until)}.",
            )
        case AttemptStatus.COMPLETED | AttemptStatus.FAILED if facts.finished_at is not None:
            return Explanation(
                Reason.RESULT_REPORTED,
                f"{attempt} finished at {_time(facts.finished_at)}. Its result is about to be applied.",
            )
    if held := _held(facts):
        return held
    if facts.failing_since is not None and facts.is_waiting_for_probe:
        return Explanation(
            Reason.ENDPOINT_FAILING, f"{attempt} is waiting. {_one_at_a_time(facts.failing_since)}"
        )
    return Explanation(Reason.WAITS_FOR_WORKER, f"{attempt} is waiting for a worker with a free slot.")


def _dead_lettered(facts: DeliveryFacts) -> Explanation:
    text = (
        f"Failed with {facts.final_error_code} after {_attempts(facts.attempt_count)} and became dead letter "
        f"{facts.buried_as}."
    )
    if facts.requeued_as is None:
        return Explanation(Reason.DEAD_LETTERED, text)
    return Explanation(
        Reason.REQUEUED, f"{text} The dead letter was requeued as delivery {facts.requeued_as}."
    )


def _held(facts: DeliveryFacts) -> Explanation | None:
    if not facts.subscription.active:
        return Explanation(
            Reason.HELD_INACTIVE, "Held: the subscription is paused. Holding uses no attempts."
        )
    if not facts.subscription.verified:
        return Explanation(
            Reason.HELD_UNVERIFIED, "Held: the subscription is not verified. Holding uses no attempts."
        )
    return None


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
