"""What the substrate's functions take and answer: the values of job_substrate.py."""

from datetime import datetime
from uuid import UUID

import msgspec

from webhookd.core.states import Executor, WorkflowStatus, WorkStatus


class JobRefusal(msgspec.Struct, frozen=True):
    """What the caller could not know better; nothing changed."""

    reason: str
    job_id: UUID | None = None
    status: WorkStatus | None = None


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is enqueued: references, and a few safe words. `safe_payload` is JSON text."""

    kind: str
    idempotency_key: str
    executor: Executor
    source_ref: str | None = None
    target_ref: str | None = None
    payload_ref: str | None = None
    safe_payload: str = "{}"
    priority: int = 0
    process_after: datetime | None = None
    deadline_at: datetime | None = None
    correlation_id: str | None = None
    causation_event_id: int | None = None
    actor: str
    event_domain: str
    source_system: str
    workflow_id: UUID | None = None
    parent_job_id: UUID | None = None


class Enqueued(msgspec.Struct, frozen=True):
    """The job that there is for a kind and a key."""

    job_id: UUID
    status: WorkStatus
    duplicate: bool
    process_after: datetime


class Claim(msgspec.Struct, frozen=True):
    """A job that is its holder's until `leased_until`, and what there is to know to do it."""

    job_id: UUID
    job_kind: str
    executor: Executor
    event_domain: str
    idempotency_key: str
    source_ref: str | None
    target_ref: str | None
    payload_ref: str | None
    safe_payload: msgspec.Raw
    payload_classification: str
    attempt: int
    max_attempts: int
    priority: int
    process_after: datetime
    deadline_at: datetime | None
    correlation_id: str | None
    causation_event_id: int | None
    parent_job_id: UUID | None
    workflow_id: UUID | None
    source_system: str
    enqueued_by: str
    enqueued_at: datetime
    lease_name: str
    lease_holder: str
    lease_token: UUID
    leased_until: datetime
    claimed_at: datetime


class Renewed(msgspec.Struct, frozen=True):
    """A lease that goes on."""

    job_id: UUID
    status: WorkStatus
    leased_until: datetime
    started: bool
    deadline_at: datetime | None


class Reported(msgspec.Struct, frozen=True):
    """What a report made of a job; a duplicate changed nothing."""

    job_id: UUID
    status: WorkStatus
    attempts: int
    duplicate: bool
    max_attempts: int | None = None
    process_after: datetime | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """A job that nobody will do."""

    job_id: UUID
    status: WorkStatus
    duplicate: bool


class Requeued(msgspec.Struct, frozen=True):
    """The new job that a dead letter has become."""

    job_id: UUID
    status: WorkStatus
    parent_job_id: UUID


class Opened(msgspec.Struct, frozen=True):
    """A workflow that jobs can belong to."""

    workflow_id: UUID
    status: WorkflowStatus
    duplicate: bool


class NewRegistration(msgspec.Struct, frozen=True):
    """What is asked for; not active, it is switched off, and otherwise as it was."""

    event_type: str
    job_kind: str
    executor: Executor | None
    priority: int
    active: bool


class Registered(msgspec.Struct, frozen=True):
    """Events of this type give jobs of this kind."""

    event_type: str
    job_kind: str
    executor: Executor
    priority: int
    active: bool


class Policy(msgspec.Struct, frozen=True):
    """The numbers that hold, for a kind or for all others."""

    max_attempts: int
    base_delay_seconds: float
    max_delay_seconds: float
    jitter: float
    max_lease_recoveries: int
    retention_seconds: float


class Spawned(msgspec.Struct, frozen=True):
    """Jobs made of events."""

    events: int
    jobs: int
    more: bool


class Reaped(msgspec.Struct, frozen=True):
    """What time did to jobs: how many went where."""

    recovered: int  # back to the queue
    retry_waiting: int  # after too many recoveries, as a failure is
    dead_lettered: int
    promoted: int  # retries that fell due
    came_due: int  # scheduled ones, which can be claimed by their priority now
    cancelled: int  # past their deadline
    more: bool


class Swept(msgspec.Struct, frozen=True):
    """Jobs past their retention."""

    cleaned: int
    more: bool
    last_kind: str  # where the next call goes on


class Health(msgspec.Struct, frozen=True):
    """How the queue is (DP2 §8): counts up to a bound, and the age of the oldest that could be claimed."""

    enabled: bool
    backlog: int
    in_progress: int
    dead_letter_open: int
    oldest_queued_age_s: float | None
    lease_active: int
    scheduled: int
    retry_waiting: int
    events_waiting: int
    counted_up_to: int
