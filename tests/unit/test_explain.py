"""Explanations of a delivery's status: every combination of facts has a reason and a text."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.deliveries.explain import (
    HELD,
    DeliveryFacts,
    Explanation,
    Reason,
    SubscriptionState,
    UnroutedFacts,
    explain_delivery,
    explain_unrouted,
)

# In another time zone, because explanations show UTC.
AT = datetime(2026, 3, 1, 14, 30, 5, 999999, timezone(timedelta(hours=2)))
TIME = "2026-03-01T12:30:05Z"
DELIVERABLE = SubscriptionState(active=True, verified=True)
INACTIVE = SubscriptionState(active=False, verified=True)
UNVERIFIED = SubscriptionState(active=True, verified=False)


NEW = DeliveryFacts(
    status=SagaStatus.PENDING,
    subscription=DELIVERABLE,
    attempt_count=0,
    attempt_limit=5,
    next_attempt_at=AT,
    is_due=True,
    final_error_code=None,
    attempt_status=None,
    worker_id=None,
    lease_until=None,
    is_lease_over=None,
    finished_at=None,
    failing_since=None,
    is_waiting_for_probe=False,
    is_window_full=False,
    max_per_second=None,
    is_late=False,
    buried_as=None,
    requeued_as=None,
)


def delivery(status: SagaStatus, **facts: Any) -> DeliveryFacts:
    """Return facts about a delivery whose subscription is deliverable, unless given otherwise."""
    return NEW._replace(status=status, **facts)


PENDING, RETRY, BUSY = SagaStatus.PENDING, SagaStatus.PENDING_RETRY, SagaStatus.IN_PROGRESS
FAILED = {"attempt_count": 2, "final_error_code": "HTTP_503"}
LEASED = {
    "attempt_status": AttemptStatus.LEASED,
    "worker_id": "host-1",
    "lease_until": AT,
    "is_lease_over": False,
}
UNLEASED = {"attempt_status": AttemptStatus.PENDING}

# The text must contain the last item.
DELIVERIES: list[tuple[DeliveryFacts, Reason, str]] = [
    (delivery(PENDING), Reason.FIRST_ATTEMPT_DUE, f"Attempt 1 of 5 has been due since {TIME}"),
    (delivery(PENDING, is_due=False), Reason.SCHEDULED, f"Attempt 1 of 5 is due at {TIME}."),
    (
        delivery(RETRY, **FAILED),
        Reason.RETRY_DUE,
        f"Failed with HTTP_503. Attempt 3 of 5 has been due since {TIME}",
    ),
    (
        delivery(RETRY, is_due=False, **FAILED),
        Reason.RETRY_LATER,
        f"Failed with HTTP_503. Attempt 3 of 5 is due at {TIME}.",
    ),
    (delivery(RETRY, attempt_limit=2, **FAILED), Reason.EXHAUSTED, "the limit is now 2"),
    (delivery(PENDING, subscription=INACTIVE), Reason.HELD_INACTIVE, "Held: the subscription is disabled"),
    (delivery(RETRY, subscription=UNVERIFIED, **FAILED), Reason.HELD_UNVERIFIED, "is not verified"),
    (
        delivery(PENDING, subscription=SubscriptionState(active=False, verified=False)),
        Reason.HELD_INACTIVE,
        "is disabled",
    ),
    (
        delivery(PENDING, subscription=DELIVERABLE._replace(paused=True)),
        Reason.HELD_PAUSED,
        "the subscription is paused",
    ),
    (
        delivery(PENDING, subscription=INACTIVE._replace(deleted=True)),
        Reason.HELD_DELETED,
        "the subscription is deleted",
    ),
    (
        delivery(PENDING, subscription=DELIVERABLE._replace(tenant_active=False)),
        Reason.HELD_TENANT,
        "the tenant is not active",
    ),
    # The limit counts when the delivery is due; a held delivery is not.
    (delivery(RETRY, subscription=INACTIVE, attempt_limit=1, **FAILED), Reason.HELD_INACTIVE, "Held"),
    (
        delivery(PENDING, failing_since=AT, is_waiting_for_probe=True),
        Reason.ENDPOINT_FAILING,
        f"has been failing since {TIME}",
    ),
    # No other attempt is active, so this one is sent.
    (delivery(PENDING, failing_since=AT), Reason.FIRST_ATTEMPT_DUE, "about to start"),
    (delivery(PENDING, is_window_full=True), Reason.WINDOW_FULL, "maximum number of active attempts"),
    (
        delivery(PENDING, max_per_second=2.0, is_late=True),
        Reason.RATE_LIMITED,
        "at most 2 requests per second",
    ),
    (delivery(PENDING, max_per_second=2.0), Reason.FIRST_ATTEMPT_DUE, "about to start"),
    (delivery(PENDING, is_late=True), Reason.FIRST_ATTEMPT_DUE, "about to start"),
    (delivery(BUSY, **UNLEASED), Reason.WAITS_FOR_WORKER, "Attempt 1 of 5 is about to be sent"),
    (delivery(BUSY, subscription=INACTIVE, **UNLEASED), Reason.HELD_INACTIVE, "Held"),
    (
        delivery(BUSY, failing_since=AT, is_waiting_for_probe=True, **UNLEASED),
        Reason.ENDPOINT_FAILING,
        "one request at a time",
    ),
    (delivery(BUSY, **LEASED), Reason.IN_FLIGHT, f"by worker host-1, with a lease until {TIME}."),
    # A request in flight finishes, whatever happens to the subscription.
    (
        delivery(BUSY, subscription=INACTIVE, **LEASED),
        Reason.IN_FLIGHT,
        "Attempt 1 of 5 is being sent by worker",
    ),
    (
        delivery(BUSY, **LEASED | {"is_lease_over": True}),
        Reason.LEASE_EXPIRED,
        f"the lease of worker host-1 expired at {TIME} without a report",
    ),
    (
        delivery(BUSY, attempt_status=AttemptStatus.FAILED, finished_at=AT, **FAILED),
        Reason.RESULT_REPORTED,
        f"Attempt 3 of 5 finished at {TIME}",
    ),
    (
        delivery(BUSY, attempt_status=AttemptStatus.COMPLETED, finished_at=AT),
        Reason.RESULT_REPORTED,
        "finished at",
    ),
    (
        delivery(SagaStatus.COMPLETED, attempt_count=1, finished_at=AT),
        Reason.DELIVERED,
        f"Delivered at {TIME} after 1 attempt.",
    ),
    (
        delivery(SagaStatus.COMPLETED, finished_at=AT, **FAILED),
        Reason.DELIVERED,
        f"Delivered at {TIME} after 2 attempts; the last failure was HTTP_503.",
    ),
    (
        delivery(SagaStatus.DEAD_LETTERED, buried_as=7, **FAILED),
        Reason.DEAD_LETTERED,
        "Failed with HTTP_503 after 2 attempts and became dead letter 7.",
    ),
    (
        delivery(SagaStatus.DEAD_LETTERED, buried_as=7, requeued_as=9, **FAILED),
        Reason.REQUEUED,
        "became dead letter 7. The dead letter was requeued as delivery 9.",
    ),
]

UNROUTED: list[tuple[UnroutedFacts, Reason, str]] = [
    (UnroutedFacts(True, None, None), Reason.WAITS_FOR_ROUTING, "waiting to be routed"),
    (UnroutedFacts(True, INACTIVE, INACTIVE), Reason.WAITS_FOR_ROUTING, "waiting to be routed"),
    (UnroutedFacts(False, None, UNVERIFIED), Reason.SUBSCRIBED_LATER, "was created later"),
    (UnroutedFacts(False, INACTIVE, None), Reason.INACTIVE, "was disabled"),
    (
        UnroutedFacts(False, SubscriptionState(active=False, verified=False), None),
        Reason.INACTIVE,
        "was disabled",
    ),
    (UnroutedFacts(False, UNVERIFIED, INACTIVE), Reason.UNVERIFIED, "was not verified"),
    # Deliverable at the recorded time, but not a moment later.
    (UnroutedFacts(False, DELIVERABLE, INACTIVE), Reason.INACTIVE, "was disabled"),
    (UnroutedFacts(False, DELIVERABLE, UNVERIFIED), Reason.UNVERIFIED, "was not verified"),
    (UnroutedFacts(False, DELIVERABLE, None), Reason.CHANGED_MEANWHILE, "was not committed yet"),
    (
        UnroutedFacts(False, DELIVERABLE._replace(accepts_labels=False), None),
        Reason.FILTERED,
        "does not have the labels",
    ),
]


def is_sentence(text: str) -> bool:
    """Return whether it starts and ends like a sentence, in one line, without a missing value."""
    return text[0].isupper() and text.endswith(".") and "\n" not in text and "None" not in text


@pytest.mark.parametrize(("facts", "reason", "words"), DELIVERIES)
def test_delivery_is_explained(facts: DeliveryFacts, reason: Reason, words: str) -> None:
    """Every combination of facts has a reason, and the text contains the facts."""
    explained = explain_delivery(facts)
    assert explained == Explanation(reason, explained.text)
    assert words in explained.text
    assert is_sentence(explained.text)


@pytest.mark.parametrize(("facts", "reason", "words"), UNROUTED)
def test_unrouted_event_is_explained(facts: UnroutedFacts, reason: Reason, words: str) -> None:
    """The state at the time of routing counts, or the next state after it."""
    explained = explain_unrouted(facts)
    assert explained == Explanation(reason, explained.text)
    assert words in explained.text
    assert is_sentence(explained.text)


def test_every_reason_occurs() -> None:
    """No reason is unused, and the names of HELD reasons start with held."""
    assert {reason for _, reason, _ in DELIVERIES} | {reason for _, reason, _ in UNROUTED} == set(Reason)
    assert {reason for reason in Reason if reason.startswith("held")} == HELD


def test_times_are_shown_in_utc() -> None:
    """The time zone of a fact makes no difference."""
    in_utc = delivery(PENDING, next_attempt_at=AT.astimezone(UTC))
    assert explain_delivery(in_utc) == explain_delivery(delivery(PENDING))
