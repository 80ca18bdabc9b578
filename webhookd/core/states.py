"""The states of deliveries and attempts, spelled as in the database, which enforces them.

The edges are drawn in schema/README.md and enforced by schema/triggers.sql; `tests/support/model.py`
states them once more in Python, to check the SQL against.
"""

from enum import StrEnum


class SagaStatus(StrEnum):
    """The status of a delivery of an event to a subscription."""

    PENDING = "Pending"  # routed or requeued; it has no attempt yet
    IN_PROGRESS = "InProgress"  # has exactly one attempt that is active or whose result is not applied
    PENDING_RETRY = "PendingRetry"  # its last attempt failed; waits until next_attempt_at
    COMPLETED = "Completed"  # a 2xx was applied; final
    DEAD_LETTERED = "DeadLettered"  # no attempt is left, and its dead letter exists; final


class AttemptStatus(StrEnum):
    """The status of an attempt (a row of webhook_delivery_jobs)."""

    PENDING = "Pending"  # can be leased; also after a reset or a release
    LEASED = "Leased"  # a worker holds its lease
    COMPLETED = "Completed"  # the endpoint responded 2xx
    FAILED = "Failed"  # any other result, or too many expired leases


class ReportVerdict(StrEnum):
    """The result of a worker's report. Only an accepted report changed anything."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same report again, because its acknowledgement was lost
    STALE = "stale"  # the lease was reset, or another worker has it
    UNKNOWN = "unknown"  # no such attempt
