"""The words of "why?": a reason for every constellation of facts, and one sentence that says it."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.deliveries.explain import HELD, Reason, Saga, State, Unrouted, Why, why_saga, why_unrouted

# In another zone, for the words are in UTC.
AT = datetime(2026, 3, 1, 14, 30, 5, 999999, timezone(timedelta(hours=2)))
TIME = "2026-03-01T12:30:05Z"
DELIVERABLE = State(active=True, verified=True)
PAUSED = State(active=False, verified=True)
UNVERIFIED = State(active=True, verified=False)


NEW = Saga(
    status=SagaStatus.PENDING,
    subscription=DELIVERABLE,
    attempt_count=0,
    attempt_limit=5,
    next_attempt_at=AT,
    is_due=True,
    final_error_code=None,
    job_status=None,
    worker_id=None,
    lease_until=None,
    is_lease_over=None,
    finished_at=None,
    failing_since=None,
    is_probed=False,
    is_window_full=False,
    buried_as=None,
    requeued_as=None,
)


def saga(status: SagaStatus, **facts: Any) -> Saga:
    """A delivery whose subscription is well; with these facts."""
    return NEW._replace(status=status, **facts)


PENDING, RETRY, BUSY = SagaStatus.PENDING, SagaStatus.PENDING_RETRY, SagaStatus.IN_PROGRESS
FAILED = {"attempt_count": 2, "final_error_code": "HTTP_503"}
LEASED = {
    "job_status": AttemptStatus.LEASED,
    "worker_id": "host-1",
    "lease_until": AT,
    "is_lease_over": False,
}
JOB = {"job_status": AttemptStatus.PENDING}

# The first words, and others that must be there.
SAGAS: list[tuple[Saga, Reason, str]] = [
    (saga(PENDING), Reason.FIRST_ATTEMPT_DUE, f"Waiting: attempt 1 of 5 is due since {TIME}"),
    (saga(PENDING, is_due=False), Reason.SCHEDULED, f"Waiting: attempt 1 of 5 is due at {TIME}."),
    (saga(RETRY, **FAILED), Reason.RETRY_DUE, f"Failed with HTTP_503: attempt 3 of 5 is due since {TIME}"),
    (
        saga(RETRY, is_due=False, **FAILED),
        Reason.RETRY_LATER,
        f"Failed with HTTP_503: attempt 3 of 5 is due at {TIME}.",
    ),
    (saga(RETRY, attempt_limit=2, **FAILED), Reason.EXHAUSTED, "the limit is 2 now"),
    (saga(PENDING, subscription=PAUSED), Reason.HELD_INACTIVE, "Held: the subscription is not active"),
    (saga(RETRY, subscription=UNVERIFIED, **FAILED), Reason.HELD_UNVERIFIED, "is not verified"),
    (saga(PENDING, subscription=State(active=False, verified=False)), Reason.HELD_INACTIVE, "not active"),
    # The limit is looked at when it is due, and while it is held it is not.
    (saga(RETRY, subscription=PAUSED, attempt_limit=1, **FAILED), Reason.HELD_INACTIVE, "Held"),
    (saga(PENDING, failing_since=AT, is_probed=True), Reason.ENDPOINT_FAILING, f"is failing since {TIME}"),
    # Nobody probes: it is this one's turn.
    (saga(PENDING, failing_since=AT), Reason.FIRST_ATTEMPT_DUE, "about to start"),
    (saga(PENDING, is_window_full=True), Reason.WINDOW_FULL, "as many attempts under way as it may"),
    (saga(BUSY, **JOB), Reason.WAITS_FOR_WORKER, "Attempt 1 of 5 waits for a worker"),
    (saga(BUSY, subscription=PAUSED, **JOB), Reason.HELD_INACTIVE, "Held"),
    (saga(BUSY, failing_since=AT, is_probed=True, **JOB), Reason.ENDPOINT_FAILING, "one request at a time"),
    (saga(BUSY, **LEASED), Reason.IN_FLIGHT, f"is with worker host-1, whose lease lasts until {TIME}."),
    # A request that is out ends, whatever became of the subscription.
    (saga(BUSY, subscription=PAUSED, **LEASED), Reason.IN_FLIGHT, "Attempt 1 of 5 is with worker"),
    (
        saga(BUSY, **LEASED | {"is_lease_over": True}),
        Reason.LEASE_EXPIRED,
        f"was with worker host-1, whose lease ended at {TIME} without a report",
    ),
    (
        saga(BUSY, job_status=AttemptStatus.FAILED, finished_at=AT, **FAILED),
        Reason.RESULT_REPORTED,
        f"Attempt 3 of 5 was over at {TIME}",
    ),
    (saga(BUSY, job_status=AttemptStatus.COMPLETED, finished_at=AT), Reason.RESULT_REPORTED, "was over at"),
    (
        saga(SagaStatus.COMPLETED, attempt_count=1, finished_at=AT),
        Reason.DELIVERED,
        f"Delivered at {TIME}, after 1 attempt.",
    ),
    (
        saga(SagaStatus.COMPLETED, finished_at=AT, **FAILED),
        Reason.DELIVERED,
        f"Delivered at {TIME}, after 2 attempts; the last failure was HTTP_503.",
    ),
    (
        saga(SagaStatus.DEAD_LETTERED, buried_as=7, **FAILED),
        Reason.DEAD_LETTERED,
        "Dead-lettered with HTTP_503 after 2 attempts, as dead letter 7.",
    ),
    (
        saga(SagaStatus.DEAD_LETTERED, buried_as=7, requeued_as=9, **FAILED),
        Reason.REQUEUED,
        "as dead letter 7, which was requeued as delivery 9.",
    ),
]

UNROUTED: list[tuple[Unrouted, Reason, str]] = [
    (Unrouted(True, None, None), Reason.WAITS_FOR_ROUTING, "waits to be routed"),
    (Unrouted(True, PAUSED, PAUSED), Reason.WAITS_FOR_ROUTING, "waits to be routed"),
    (Unrouted(False, None, UNVERIFIED), Reason.SUBSCRIBED_LATER, "no such subscription"),
    (Unrouted(False, PAUSED, None), Reason.INACTIVE, "was not active"),
    (Unrouted(False, State(active=False, verified=False), None), Reason.INACTIVE, "was not active"),
    (Unrouted(False, UNVERIFIED, PAUSED), Reason.UNVERIFIED, "was not verified"),
    # Deliverable at the time that is known, and not a moment later.
    (Unrouted(False, DELIVERABLE, PAUSED), Reason.INACTIVE, "was not active"),
    (Unrouted(False, DELIVERABLE, UNVERIFIED), Reason.UNVERIFIED, "was not verified"),
    (Unrouted(False, DELIVERABLE, None), Reason.CHANGED_MEANWHILE, "was not committed yet"),
]


def is_a_sentence(text: str) -> bool:
    """One, for a person: it begins and ends like one, in one line, and no value is missing in it."""
    return text[0].isupper() and text.endswith(".") and "\n" not in text and "None" not in text


@pytest.mark.parametrize(("facts", "reason", "words"), SAGAS)
def test_a_delivery_is_explained(facts: Saga, reason: Reason, words: str) -> None:
    """Each constellation has its reason, and its sentence has the facts."""
    why = why_saga(facts)
    assert why == Why(reason, why.explanation)
    assert words in why.explanation
    assert is_a_sentence(why.explanation)


@pytest.mark.parametrize(("facts", "reason", "words"), UNROUTED)
def test_what_was_not_routed_is_explained(facts: Unrouted, reason: Reason, words: str) -> None:
    """By what the subscription was at the time, else by what it became next."""
    why = why_unrouted(facts)
    assert why == Why(reason, why.explanation)
    assert words in why.explanation
    assert is_a_sentence(why.explanation)


def test_every_reason_is_given_by_some_facts() -> None:
    """No reason is listed that nothing gives; what is held is called so."""
    assert {reason for _, reason, _ in SAGAS} | {reason for _, reason, _ in UNROUTED} == set(Reason)
    assert {reason for reason in Reason if reason.startswith("held")} == HELD


def test_times_are_utc() -> None:
    """Whatever zone a time came in."""
    in_utc = saga(PENDING, next_attempt_at=AT.astimezone(UTC))
    assert why_saga(in_utc) == why_saga(saga(PENDING))
