"""Why a subscription has got an event, has not got it yet, or never will: facts in, words out.

Reads what store/why.py found in one snapshot. Hands on a stable code for programs, and words for a person.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, assert_never

from webhookd.core.states import AttemptStatus, SagaStatus

NOT_ROUTED = "not_routed"


class Reason(StrEnum):
    """Stable: programs may decide by it. New ones may be added."""

    # There is no delivery.
    WAITS_FOR_ROUTING = "waits_for_routing"  # the event was not routed yet
    SUBSCRIBED_LATER = "subscribed_later"  # it was not there, or of another event type, at the time
    INACTIVE = "inactive"  # it was paused at the time
    UNVERIFIED = "unverified"  # its address had not answered the challenge at the time
    CHANGED_MEANWHILE = "changed_meanwhile"  # it was changed in a transaction still open at the time
    # The delivery waits.
    HELD_INACTIVE = "held_inactive"  # the subscription is paused
    HELD_UNVERIFIED = "held_unverified"  # its address has not answered the challenge
    EXHAUSTED = "exhausted"  # the limit was lowered: a dead letter as soon as it is due
    SCHEDULED = "scheduled"  # an operator moved its first attempt to a later time
    FIRST_ATTEMPT_DUE = "first_attempt_due"
    RETRY_LATER = "retry_later"  # the last attempt failed, and the next is not due yet
    RETRY_DUE = "retry_due"
    ENDPOINT_FAILING = "endpoint_failing"  # it keeps failing, and is asked one request at a time
    WINDOW_FULL = "window_full"  # the subscription has as many attempts under way as it may
    # An attempt is under way.
    WAITS_FOR_WORKER = "waits_for_worker"
    IN_FLIGHT = "in_flight"  # a worker holds its lease
    LEASE_EXPIRED = "lease_expired"  # a worker held its lease, and has not reported
    RESULT_REPORTED = "result_reported"  # answered, and about to be applied
    # The delivery is over.
    DELIVERED = "delivered"
    DEAD_LETTERED = "dead_lettered"
    REQUEUED = "requeued"  # dead-lettered, and a new delivery was made of the dead letter


HELD = frozenset({Reason.HELD_INACTIVE, Reason.HELD_UNVERIFIED})


class Limits(NamedTuple):
    """The answering instance's policy: what a subscription does not set itself."""

    subscription_window: int
    max_attempts: int


class State(NamedTuple):
    """What a subscription was at some time."""

    active: bool
    verified: bool

    @property
    def is_deliverable(self) -> bool:
        return self.active and self.verified


class Unrouted(NamedTuple):
    """A subscription that has no delivery of an event."""

    is_queued: bool  # the event waits for routing
    at_the_time: State | None  # as its change log says; None: it was not there, or of another type
    soon_after: State | None  # the next state in which it was not deliverable


class Saga(NamedTuple):
    """A delivery, its last attempt, and what its subscription and endpoint are now."""

    status: SagaStatus
    subscription: State
    attempt_count: int
    attempt_limit: int
    next_attempt_at: datetime
    is_due: bool
    final_error_code: str | None
    job_status: AttemptStatus | None
    worker_id: str | None
    lease_until: datetime | None
    is_lease_over: bool | None
    finished_at: datetime | None
    failing_since: datetime | None
    is_probed: bool  # another attempt of the failing endpoint is under way
    is_window_full: bool
    buried_as: int | None
    requeued_as: int | None


class Why(NamedTuple):
    """The answer."""

    reason: Reason
    explanation: str


def why_unrouted(facts: Unrouted) -> Why:
    """Why there is no delivery. Pure.

    Routing decides by its own snapshot, a little later than the time that is known: so does this, by looking
    on. What was deliverable all along, and yet not seen, was committed too late.
    """
    if facts.is_queued:
        return Why(Reason.WAITS_FOR_ROUTING, "The event waits to be routed.")
    if facts.at_the_time is None:
        return Why(
            Reason.SUBSCRIBED_LATER,
            "Not routed: there was no such subscription to this event type when the event was routed; "
            "later subscriptions do not get earlier events.",
        )
    state = facts.soon_after if facts.at_the_time.is_deliverable else facts.at_the_time
    if state is None:
        return Why(
            Reason.CHANGED_MEANWHILE,
            "Not routed: the subscription was being changed when the event was routed, "
            "and the change was not committed yet.",
        )
    if not state.active:
        return Why(
            Reason.INACTIVE,
            "Not routed: the subscription was not active when the event was routed; pausing skips events.",
        )
    return Why(
        Reason.UNVERIFIED,
        "Not routed: the subscription's address was not verified when the event was routed.",
    )


def why_saga(facts: Saga) -> Why:
    """Why a delivery is where it is. Pure."""
    match facts.status:
        case SagaStatus.PENDING | SagaStatus.PENDING_RETRY:
            return _why_waiting(facts)
        case SagaStatus.IN_PROGRESS:
            return _why_in_progress(facts)
        case SagaStatus.COMPLETED:
            return Why(Reason.DELIVERED, _delivered(facts))
        case SagaStatus.DEAD_LETTERED:
            return _why_dead(facts)
        case never:
            assert_never(never)


def _why_waiting(facts: Saga) -> Why:
    if held := _held(facts):
        return held
    due = f"{_after_failure(facts)}attempt {_next_attempt(facts)}"
    if facts.attempt_count >= facts.attempt_limit:
        return Why(
            Reason.EXHAUSTED,
            f"{_after_failure(facts)}no attempt is left, for the limit is {facts.attempt_limit} now: "
            f"it becomes a dead letter at {_time(facts.next_attempt_at)}.",
        )
    if not facts.is_due:
        reason = Reason.SCHEDULED if facts.status is SagaStatus.PENDING else Reason.RETRY_LATER
        return Why(reason, f"{due} is due at {_time(facts.next_attempt_at)}.")
    since = f"{due} is due since {_time(facts.next_attempt_at)}"
    if facts.failing_since is not None and facts.is_probed:
        return Why(
            Reason.ENDPOINT_FAILING,
            f"{since}, and waits for its turn: the endpoint is failing since {_time(facts.failing_since)} "
            "and is asked one request at a time.",
        )
    if facts.is_window_full:
        return Why(
            Reason.WINDOW_FULL,
            f"{since}, and waits for its turn: the subscription has as many attempts under way as it may.",
        )
    reason = Reason.FIRST_ATTEMPT_DUE if facts.status is SagaStatus.PENDING else Reason.RETRY_DUE
    return Why(reason, f"{since}, and about to start.")


def _why_in_progress(facts: Saga) -> Why:
    attempt = f"Attempt {_next_attempt(facts)}"
    match facts.job_status:
        case AttemptStatus.LEASED if facts.lease_until is not None:
            lease = f"worker {facts.worker_id}, whose lease"
            if facts.is_lease_over:
                return Why(
                    Reason.LEASE_EXPIRED,
                    f"{attempt} was with {lease} ended at {_time(facts.lease_until)} without a report; "
                    "it is about to be given to another.",
                )
            return Why(Reason.IN_FLIGHT, f"{attempt} is with {lease} lasts until {_time(facts.lease_until)}.")
        case AttemptStatus.COMPLETED | AttemptStatus.FAILED if facts.finished_at is not None:
            return Why(
                Reason.RESULT_REPORTED,
                f"{attempt} was over at {_time(facts.finished_at)}; its result is about to be applied.",
            )
    if held := _held(facts):
        return held
    if facts.failing_since is not None and facts.is_probed:
        return Why(
            Reason.ENDPOINT_FAILING,
            f"{attempt} waits for its turn: the endpoint is failing since {_time(facts.failing_since)} "
            "and is asked one request at a time.",
        )
    return Why(Reason.WAITS_FOR_WORKER, f"{attempt} waits for a worker with a free slot.")


def _why_dead(facts: Saga) -> Why:
    buried = (
        f"Dead-lettered with {facts.final_error_code} after {_attempts(facts.attempt_count)}, "
        f"as dead letter {facts.buried_as}"
    )
    if facts.requeued_as is None:
        return Why(Reason.DEAD_LETTERED, f"{buried}.")
    return Why(Reason.REQUEUED, f"{buried}, which was requeued as delivery {facts.requeued_as}.")


def _held(facts: Saga) -> Why | None:
    if not facts.subscription.active:
        return Why(
            Reason.HELD_INACTIVE, "Held: the subscription is not active; no attempt is used meanwhile."
        )
    if not facts.subscription.verified:
        return Why(
            Reason.HELD_UNVERIFIED,
            "Held: the subscription's address is not verified; no attempt is used meanwhile.",
        )
    return None


def _delivered(facts: Saga) -> str:
    when = "" if facts.finished_at is None else f" at {_time(facts.finished_at)}"
    before = "" if facts.final_error_code is None else f"; the last failure was {facts.final_error_code}"
    return f"Delivered{when}, after {_attempts(facts.attempt_count)}{before}."


def _after_failure(facts: Saga) -> str:
    """How the sentence begins."""
    if facts.final_error_code is None:
        return "Waiting: "
    return f"Failed with {facts.final_error_code}: "


def _next_attempt(facts: Saga) -> str:
    return f"{facts.attempt_count + 1} of {max(facts.attempt_limit, facts.attempt_count + 1)}"


def _attempts(number: int) -> str:
    return f"{number} attempt{'' if number == 1 else 's'}"


def _time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
