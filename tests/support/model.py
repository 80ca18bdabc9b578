"""A small Python model of event delivery, against which tests check the SQL.

It knows no locks, no time and no batches: a step passes it the answer of the database, and it computes the
expected state. It repeats the edges of both state machines on purpose.
"""

from dataclasses import dataclass, field
from uuid import UUID

from webhookd.core.states import AttemptStatus, SagaStatus

SAGA_EDGES = {
    SagaStatus.PENDING: {SagaStatus.IN_PROGRESS},
    SagaStatus.IN_PROGRESS: {SagaStatus.COMPLETED, SagaStatus.PENDING_RETRY, SagaStatus.DEAD_LETTERED},
    SagaStatus.PENDING_RETRY: {SagaStatus.IN_PROGRESS, SagaStatus.DEAD_LETTERED},
    SagaStatus.COMPLETED: set(),
    SagaStatus.DEAD_LETTERED: set(),
}
WAITING = (SagaStatus.PENDING, SagaStatus.PENDING_RETRY)


@dataclass
class Subscription:
    """An event type, and whether deliveries are allowed."""

    id: int
    event_type: str
    active: bool
    verified: bool
    max_attempts: int | None
    paused: bool = False

    @property
    def routable(self) -> bool:
        return self.active and self.verified

    @property
    def deliverable(self) -> bool:
        return self.routable and not self.paused


@dataclass
class Saga:
    """A delivery."""

    id: int
    event_id: int
    subscription: Subscription
    dead_letter_id: int | None = None
    resent_from: int | None = None
    status: SagaStatus = SagaStatus.PENDING
    attempt_count: int = 0
    error_code: str | None = None
    due: bool = True

    @property
    def finished(self) -> bool:
        return not SAGA_EDGES[self.status]

    def move(self, status: SagaStatus) -> None:
        """Change the status by a legal edge."""
        assert status in SAGA_EDGES[self.status], f"saga {self.id}: {self.status} to {status}"
        self.status = status


@dataclass
class Job:
    """An attempt."""

    id: int
    saga: Saga
    status: AttemptStatus = AttemptStatus.PENDING
    lease_token: UUID | None = None
    lease_resets: int = 0
    error_code: str | None = None
    expired: bool = False
    applied: bool = False

    @property
    def active(self) -> bool:
        return self.status in {AttemptStatus.PENDING, AttemptStatus.LEASED}

    @property
    def unapplied(self) -> bool:
        return not self.active and not self.applied


@dataclass
class World:
    """All rows of the model."""

    subscriptions: dict[int, Subscription] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)  # event type by event id
    keys: dict[str, int] = field(default_factory=dict)
    unrouted: list[int] = field(default_factory=list)
    sagas: dict[int, Saga] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    dead_letters: dict[int, Saga] = field(default_factory=dict)

    def routes(self, event_id: int) -> list[Subscription]:
        """Return the subscriptions that get an event if it is routed now."""
        return [
            subscription
            for subscription in self.subscriptions.values()
            if subscription.routable and subscription.event_type == self.events[event_id]
        ]

    def live_resend(self, saga: Saga) -> Saga | None:
        """Return the resend of a saga that is not finished."""
        resends = (other for other in self.sagas.values() if other.resent_from == saga.id)
        return next((other for other in resends if not other.finished), None)

    def due(self, subscription: Subscription) -> list[Saga]:
        """Return the sagas that a tick may start or dead-letter."""
        return [
            saga
            for saga in self.sagas.values()
            if saga.subscription is subscription and saga.status in WAITING and saga.due
        ]

    def in_progress(self, subscription: Subscription) -> int:
        """Return how much of the window is used."""
        return sum(
            saga.status is SagaStatus.IN_PROGRESS and saga.subscription is subscription
            for saga in self.sagas.values()
        )

    def claimed(self, wanted: int, slots: int) -> list[int]:
        """Return the attempts that a claim gets: the oldest, limited by the slots of each subscription."""
        pending = [
            job
            for _, job in sorted(self.jobs.items())
            if job.status is AttemptStatus.PENDING and job.saga.subscription.deliverable
        ]
        used: dict[int, int] = {}
        taken = []
        for job in pending[:wanted]:
            subscription_id = job.saga.subscription.id
            used[subscription_id] = used.get(subscription_id, 0) + 1
            if used[subscription_id] <= slots:
                taken.append(job.id)
        return taken[:wanted]

    def limit(self, saga: Saga, max_attempts: int) -> int:
        """Return the maximum number of attempts of a saga."""
        return saga.subscription.max_attempts or max_attempts

    def exhausted(self, saga: Saga, max_attempts: int) -> bool:
        """Tell whether a waiting saga has no attempt left."""
        return saga.status is SagaStatus.PENDING_RETRY and saga.attempt_count >= self.limit(
            saga, max_attempts
        )

    def apply(self, job: Job, max_attempts: int, *, due_at_once: bool) -> SagaStatus:
        """Apply a result, and return the new status of its saga."""
        saga = job.saga
        job.applied = True
        saga.attempt_count += 1
        if job.status is AttemptStatus.COMPLETED:
            saga.move(SagaStatus.COMPLETED)
        else:
            saga.error_code = job.error_code
            exhausted = saga.attempt_count >= self.limit(saga, max_attempts)
            saga.move(SagaStatus.DEAD_LETTERED if exhausted else SagaStatus.PENDING_RETRY)
            saga.due = due_at_once
        return saga.status
