"""The model of test_job_queue_machine.py: the expected state of the queue after each step."""

from dataclasses import dataclass, field

from tests.support.job_queue import Status

HELD = {Status.LEASED, Status.IN_PROGRESS}
OPEN = {Status.QUEUED, Status.RETRY_WAITING, *HELD}
MAX_ATTEMPTS = 2
MAX_RECOVERIES = 1


@dataclass
class Job:
    """The expected state of one job."""

    id: str
    executor: str
    priority: int
    workflow: bool
    moved_by: list[str]  # the login of each transition and renewal, starting with the insert
    status: Status = Status.QUEUED
    attempts: int = 0
    recoveries: int = 0
    token: str | None = None
    short: bool = False  # its lease is so short that a renewal expires at once
    expired: bool = False
    due: bool = True
    late: bool = False
    ended: Status | None = None  # its status before it was cleaned
    requeued_as: str | None = None
    reported: str | None = None  # the report of its last lease, if there was one

    def move(self, status: Status, by: str) -> None:
        """Change the status."""
        self.status = status
        self.moved_by.append(by)

    def fail(self, by: str, *, permanent: bool = False) -> None:
        """Fail one attempt: retry, or dead letter."""
        self.move(Status.FAILED, by)
        self.attempts += 1
        self.due = False
        if permanent or self.attempts >= MAX_ATTEMPTS:
            self.move(Status.DEAD_LETTER, by)
        else:
            self.recoveries = 0
            self.move(Status.RETRY_WAITING, by)


@dataclass
class World:
    """The expected state of the queue."""

    enabled: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    keys: dict[str, Job] = field(default_factory=dict)

    def next(self, executor: str, taken: Job | None = None) -> Job | None:
        """The job that a claim gets: highest priority, then oldest, except the one already taken."""
        waiting = [
            job
            for job in self.jobs.values()
            if job.status is Status.QUEUED and job.executor == executor and not job.late and job is not taken
        ]
        return max(waiting, key=lambda job: job.priority, default=None)

    def workflow(self) -> str:
        """The expected status of the workflow."""
        ends = [job.ended or job.status for job in self.jobs.values() if job.workflow]
        if not ends or OPEN.intersection(ends):
            return "active"
        if Status.DEAD_LETTER in ends:
            return "partially_failed" if Status.SUCCEEDED in ends else "failed"
        return "succeeded" if Status.SUCCEEDED in ends else "cancelled"
