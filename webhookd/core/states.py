"""The states of deliveries and of the substrate's jobs, spelled as in the database, which alone decides.

The edges are drawn in schema/README.md and enforced by schema/triggers.sql; `tests/support/model.py`
states them once more in Python, to check the SQL against.
"""

from enum import StrEnum


class SagaStatus(StrEnum):
    """One delivery of one event to one subscription."""

    PENDING = "Pending"  # routed or requeued: its first job is not made yet
    IN_PROGRESS = "InProgress"  # has exactly one job that is active or not yet applied
    PENDING_RETRY = "PendingRetry"  # its last attempt failed: waits for next_attempt_at
    COMPLETED = "Completed"  # a 2xx was applied; never changes again
    DEAD_LETTERED = "DeadLettered"  # its attempts are used up, its dead letter exists; never changes again


class AttemptStatus(StrEnum):
    """One attempt of a saga."""

    PENDING = "Pending"  # may be leased; also after a reset or a release
    LEASED = "Leased"  # a worker holds it by its lease token
    COMPLETED = "Completed"  # answered 2xx
    FAILED = "Failed"  # anything else, or given up by the reaper


class ReportVerdict(StrEnum):
    """What became of a worker's report; only an accepted one changed anything."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # the same report again, after its acknowledgement was lost
    STALE = "stale"  # the lease was reset, or given to another
    UNKNOWN = "unknown"  # there is no such job


class WorkStatus(StrEnum):
    """One job of the substrate (DP2): work that an executor outside of webhookd does."""

    QUEUED = "queued"  # may be claimed, once its time has come
    LEASED = "leased"  # an executor holds it by its lease token
    IN_PROGRESS = "in_progress"  # and has said that it began
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # for the length of a transaction: goes on to one of the next two
    RETRY_WAITING = "retry_waiting"  # waits for process_after
    DEAD_LETTER = "dead_letter"  # given up, until an operator cancels or requeues it
    CANCELLED = "cancelled"
    CLEANED = "cleaned"  # past its retention: nothing but its history is left


class Executor(StrEnum):
    """Who may execute jobs. MOT is none: it generates them."""

    DOT = "DOT"
    AGENT = "Agent"
    HERMES = "Hermes"
    CODEX = "Codex"
    PG_WORKER = "PG_worker"
    EXTERNAL_WORKER = "external_worker"
    KESTRA_ADAPTER = "future_Kestra_adapter"


class WorkflowStatus(StrEnum):
    """Jobs that belong together: follows from theirs."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PARTIALLY_FAILED = "partially_failed"
    CANCELLED = "cancelled"
