"""What a queue of jobs must be like after each step: the model of test_substrate_machine.py."""

from dataclasses import dataclass, field

from tests.support.substrate import Status

HELD = {Status.LEASED, Status.IN_PROGRESS}
OPEN = {Status.QUEUED, Status.RETRY_WAITING, *HELD}
MAX_ATTEMPTS = 2
MAX_RECOVERIES = 1


@dataclass
class Job:
    """What is known of one."""

    id: str
    executor: str
    priority: int
    workflow: bool
    moved_by: list[str]  # the login of each move and renewal, the birth's first
    status: Status = Status.QUEUED
    attempts: int = 0
    recoveries: int = 0
    token: str | None = None
    short: bool = False  # what a renewal adds to its lease is over at once
    expired: bool = False
    due: bool = True
    late: bool = False
    ended: Status | None = None  # what it was cleaned from
    heir: str | None = None  # the job that it was requeued as
    reported: str | None = None  # how its last lease ended, if its holder said so

    def move(self, status: Status, by: str) -> None:
        """Take an edge; DP2's drawing has them."""
        self.status = status
        self.moved_by.append(by)

    def fail(self, by: str, *, permanent: bool = False) -> None:
        """Count an attempt, and go on from there."""
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
    """All there is."""

    enabled: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    keys: dict[str, Job] = field(default_factory=dict)

    def next(self, executor: str, taken: Job | None = None) -> Job | None:
        """Whom a claim gets: the most urgent, of them the oldest, but the one that another just takes."""
        waiting = [
            job
            for job in self.jobs.values()
            if job.status is Status.QUEUED and job.executor == executor and not job.late and job is not taken
        ]
        return max(waiting, key=lambda job: job.priority, default=None)

    def workflow(self) -> str:
        """How the workflow must stand."""
        ends = [job.ended or job.status for job in self.jobs.values() if job.workflow]
        if not ends or OPEN.intersection(ends):
            return "active"
        if Status.DEAD_LETTER in ends:
            return "partially_failed" if Status.SUCCEEDED in ends else "failed"
        return "succeeded" if Status.SUCCEEDED in ends else "cancelled"
