"""The states of jobs and workflows, and the executors, spelled as in the database.

The allowed transitions are drawn in schema/README.md and enforced by the database.
"""

from enum import StrEnum


class JobStatus(StrEnum):
    """The nine states of a job (DP2 §4)."""

    QUEUED = "queued"  # can be claimed once process_after has passed
    LEASED = "leased"  # an executor holds it by its lease token
    IN_PROGRESS = "in_progress"  # the executor has reported progress
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # only within a transaction: becomes retry_waiting or dead_letter before the commit
    RETRY_WAITING = "retry_waiting"  # waits for process_after
    DEAD_LETTER = "dead_letter"  # given up, until an operator cancels or requeues it
    CANCELLED = "cancelled"
    CLEANED = "cleaned"  # past its retention: only its history is left


class Executor(StrEnum):
    """The executors that may claim jobs. MOT is not one of them: it generates jobs."""

    DOT = "DOT"
    AGENT = "Agent"
    HERMES = "Hermes"
    CODEX = "Codex"
    PG_WORKER = "PG_worker"
    EXTERNAL_WORKER = "external_worker"
    KESTRA_ADAPTER = "future_Kestra_adapter"


class WorkflowStatus(StrEnum):
    """The status of a workflow, which the database derives from its jobs."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PARTIALLY_FAILED = "partially_failed"
    CANCELLED = "cancelled"
