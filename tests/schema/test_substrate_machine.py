"""Any order of steps: Hypothesis drives the nine functions, with two executors and a small model beside.

After every step the table is as the model says, and each move has its row of the ledger and its event.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.database import Cluster
from tests.support.guards import Weakened
from tests.support.substrate import ACTOR, KIND, Answer, Status, Substrate

Result = TypeVar("Result")

EXECUTORS = st.sampled_from(["DOT", "Agent"])
WORDS = st.sampled_from(["progress", "succeed", "fail", "bury"])
HELD = {Status.LEASED, Status.IN_PROGRESS}
OPEN = {Status.QUEUED, Status.RETRY_WAITING, *HELD}
MAX_ATTEMPTS = 2
MAX_RECOVERIES = 1
# Few enough for every test run; `make machine` takes many more.
EXAMPLES = int(os.environ.get("WEBHOOKD_TEST_EXAMPLES", "10"))
STEPS = 40


@dataclass
class Job:
    """What is known of one."""

    id: str
    executor: str
    priority: int
    workflow: bool
    status: Status = Status.QUEUED
    attempts: int = 0
    recoveries: int = 0
    token: str | None = None
    expired: bool = False
    due: bool = True
    late: bool = False
    ended: Status | None = None  # what it was cleaned from
    moves: int = 1

    def move(self, status: Status) -> None:
        """Take an edge; DP2's drawing has them."""
        self.status = status
        self.moves += 1

    def fail(self, *, permanent: bool = False) -> None:
        """Count an attempt, and go on from there."""
        self.move(Status.FAILED)
        self.attempts += 1
        self.due = False
        if permanent or self.attempts >= MAX_ATTEMPTS:
            self.move(Status.DEAD_LETTER)
        else:
            self.recoveries = 0
            self.move(Status.RETRY_WAITING)


@dataclass
class World:
    """All there is."""

    enabled: bool = True
    jobs: dict[str, Job] = field(default_factory=dict)
    keys: dict[str, Job] = field(default_factory=dict)

    def next(self, executor: str) -> Job | None:
        """Whom a claim gets: the most urgent, of them the oldest."""
        waiting = [
            job
            for job in self.jobs.values()
            if job.status is Status.QUEUED and job.executor == executor and not job.late
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


class Work(RuleBasedStateMachine):
    """Who has work, who does it, and time, in whatever order."""

    def __init__(self, runner: asyncio.Runner, substrate: Substrate) -> None:
        super().__init__()
        self.runner = runner
        self.substrate = substrate
        self.world = World()
        self.leases: list[Answer] = []  # all there ever were
        self.run(self.empty())

    def run(self, step: Awaitable[Result]) -> Result:
        """Wait for a step."""

        async def waited() -> Result:
            return await step

        return self.runner.run(waited())

    async def empty(self) -> None:
        """Begin anew in the same database: a new one for each example would take most of the time."""
        superuser = self.substrate.superuser
        async with superuser.transaction():
            await superuser.execute("set local session_replication_role = replica")
            await superuser.execute("truncate webhookd.events, webhookd.job_workflow cascade")
        await self.substrate.call("fn_job_enable", p_enabled=True, p_actor=ACTOR)
        self.workflow_id = await self.substrate.open_workflow()

    # Who has work ------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Begin in the middle: leases out, for either executor."""
        for number, executor in enumerate(["DOT", "DOT", "DOT", "Agent"]):
            self.enqueue(f"first-{number}", executor, number, workflow=number > 0)
        self.claim("DOT")
        self.claim("Agent")

    @rule(
        key=st.sampled_from("abcdef"), executor=EXECUTORS, priority=st.integers(0, 2), workflow=st.booleans()
    )
    def enqueue(self, key: str, executor: str, priority: int, *, workflow: bool) -> None:
        """Once for each key; refused while it is off, and for another executor."""
        answer = self.run(
            self.substrate.try_enqueue(
                key,
                p_executor=executor,
                p_priority=priority,
                p_workflow_id=self.workflow_id if workflow else None,
            )
        )
        known = self.world.keys.get(key)
        if not self.world.enabled:
            assert answer == {"refused": True, "reason": "job_substrate_disabled"}
        elif known is None:
            assert (answer["duplicate"], answer["status"]) == (False, "queued")
            job = Job(answer["job_id"], executor, priority, workflow)
            self.world.jobs[job.id] = self.world.keys[key] = job
        elif known.executor != executor:
            assert (answer["reason"], answer["job_id"]) == ("idempotency_conflict", known.id)
        else:
            assert (answer["duplicate"], answer["job_id"]) == (True, known.id)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """What waits or is dead; not what is held or has succeeded."""
        job = self.some_job(data)
        answer = self.run(self.substrate.cancel(job.id))
        if job.status in HELD:
            assert answer["reason"] == "running"
        elif Status.SUCCEEDED in {job.status, job.ended}:
            assert answer["reason"] == "finished"
        else:
            duplicate = Status.CANCELLED in {job.status, job.ended}
            assert answer["duplicate"] == duplicate
            if not duplicate:
                job.move(Status.CANCELLED)

    @precondition(lambda self: any(job.status is Status.DEAD_LETTER for job in self.world.jobs.values()))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        """A new job, once."""
        job = self.some_job(data, Status.DEAD_LETTER)
        answer = self.run(self.substrate.requeue(job.id))
        if not self.world.enabled:
            assert answer["reason"] == "job_substrate_disabled"
            return
        job.move(Status.CANCELLED)
        self.world.jobs[answer["job_id"]] = Job(answer["job_id"], job.executor, job.priority, job.workflow)
        assert self.run(self.substrate.requeue(job.id))["reason"] == "already_requeued"

    @rule()
    def turn_the_switch(self) -> None:
        """Off or on."""
        self.world.enabled = not self.world.enabled
        self.run(self.substrate.call("fn_job_enable", p_enabled=self.world.enabled, p_actor=ACTOR))

    # Who does it -------------------------------------------------------------------------------------------

    @rule(executor=EXECUTORS)
    def claim(self, executor: str) -> None:
        """The first in the order, with a token that never was."""
        expected = self.world.next(executor)
        answer = self.run(self.substrate.try_claim(executor=executor, holder=f"holder of {executor}"))
        if not self.world.enabled:
            assert answer["reason"] == "job_substrate_disabled"
        elif expected is None:
            assert answer["reason"] == "nothing_to_claim"
        else:
            assert (answer["job_id"], answer["attempt"]) == (expected.id, expected.attempts + 1)
            assert answer["lease_token"] not in {lease["lease_token"] for lease in self.leases}
            expected.move(Status.LEASED)
            expected.token, expected.expired = answer["lease_token"], False
            self.leases.append(answer)

    def progress(self, lease: Answer) -> None:
        """Renew, also an expired lease; not a lost one."""
        job = self.world.jobs[lease["job_id"]]
        answer = self.run(self.substrate.progress(lease))
        if job.token != lease["lease_token"] or job.status not in HELD:
            assert answer["reason"] == "stale_lease"
            return
        assert answer["started"] == (job.status is Status.LEASED)
        job.move(Status.IN_PROGRESS)
        job.expired = False

    def succeed(self, lease: Answer) -> None:
        """Report success: in time, late, again, or after the lease was lost."""
        job = self.world.jobs[lease["job_id"]]
        answer = self.run(self.substrate.succeed(lease))
        if job.token != lease["lease_token"]:
            assert answer["reason"] == "stale_lease"
        elif Status.SUCCEEDED in {job.status, job.ended}:
            assert answer["duplicate"]
        elif job.status not in HELD:
            assert answer["reason"] == "already_reported"
        else:
            assert (answer["status"], answer["duplicate"]) == ("succeeded", False)
            job.move(Status.SUCCEEDED)
            job.attempts += 1

    def fail(self, lease: Answer, *, permanent: bool) -> None:
        """Report a failure, likewise."""
        job = self.world.jobs[lease["job_id"]]
        answer = self.run(self.substrate.fail(lease, permanent=permanent))
        if job.token != lease["lease_token"]:
            assert answer["reason"] == "stale_lease"
        elif Status.SUCCEEDED in {job.status, job.ended}:
            assert answer["reason"] == "already_reported"
        else:
            assert answer["duplicate"] == (job.status not in HELD)
            if not answer["duplicate"]:
                job.fail(permanent=permanent)
            assert (answer["status"], answer["attempts"]) == (job.status, job.attempts)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), word=WORDS)
    def report(self, data: st.DataObject, word: str) -> None:
        """Any word of any holder there ever was."""
        self.say(self.some_lease(data), word)

    def say(self, lease: Answer, word: str) -> None:
        """One of the four."""
        match word:
            case "progress":
                self.progress(lease)
            case "succeed":
                self.succeed(lease)
            case "fail":
                self.fail(lease, permanent=False)
            case "bury":
                self.fail(lease, permanent=True)

    @rule(words=st.lists(WORDS, min_size=1, max_size=3))
    def go_round(self, words: list[str]) -> None:
        """The usual way, all of it at once: so the states that lie far down it are met often enough."""
        for lease, word in zip(self.held(), words, strict=False):
            self.say(lease, word)
        self.let_retries_fall_due()
        self.reap()
        self.claim("DOT")
        self.claim("Agent")

    @precondition(lambda self: self.held())
    @rule(data=st.data(), word=WORDS)
    def come_late(self, data: st.DataObject, word: str) -> None:
        """A holder that was thought dead speaks when another has its job, or could have."""
        lease = data.draw(st.sampled_from(self.held()))
        job = self.world.jobs[lease["job_id"]]
        self.run(self.substrate.expire(job.id))
        job.expired = True
        self.reap()
        self.claim(job.executor)
        self.say(lease, word)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def report_with_a_wrong_token(self, data: st.DataObject) -> None:
        """A token that was never given changes nothing."""
        lease = self.some_lease(data)
        answer = self.run(self.substrate.succeed(lease | {"lease_token": str(uuid4())}))
        assert answer["reason"] == "stale_lease"

    # Time --------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(job.status in HELD for job in self.world.jobs.values()))
    @rule(data=st.data(), reaped=st.booleans())
    def expire(self, data: st.DataObject, *, reaped: bool) -> None:
        """Let a lease's time be over, and perhaps have it taken back at once."""
        job = self.some_job(data, *HELD)
        self.run(self.substrate.expire(job.id))
        job.expired = True
        if reaped:
            self.reap()

    @rule()
    def let_retries_fall_due(self) -> None:
        """Every retry's time comes."""
        self.run(self.substrate.let_retries_fall_due())
        for job in self.world.jobs.values():
            job.due = True

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def let_a_deadline_pass(self, data: st.DataObject) -> None:
        """A job's deadline is over, held or not."""
        job = self.some_job(data, *OPEN)
        if job.status in OPEN:
            self.run(self.substrate.let_deadline_pass(job.id))
            job.late = True

    @rule()
    def reap(self) -> None:
        """Leases, deadlines, retries: each by what was there when it began."""
        before = [(job, job.status) for job in self.world.jobs.values()]
        counted = dict.fromkeys(("recovered", "retry_waiting", "dead_lettered", "promoted", "cancelled"), 0)
        for job, status in before:
            if status in HELD and job.expired:
                job.token, job.expired = None, False
                if job.recoveries < MAX_RECOVERIES:
                    job.recoveries += 1
                    job.move(Status.QUEUED)
                    counted["recovered"] += 1
                else:
                    job.fail()
                    counted["dead_lettered" if job.status is Status.DEAD_LETTER else "retry_waiting"] += 1
            elif status in {Status.QUEUED, Status.RETRY_WAITING} and job.late:
                job.move(Status.CANCELLED)
                counted["cancelled"] += 1
            elif status is Status.RETRY_WAITING and job.due:
                job.move(Status.QUEUED)
                counted["promoted"] += 1
        answer = self.run(self.substrate.reap())
        assert {name: answer[name] for name in counted} == counted

    @rule()
    def sweep(self) -> None:
        """Retention is none: what is over is cleaned, unless it is off."""
        expected = 0
        for job in self.world.jobs.values():
            if job.status in {Status.SUCCEEDED, Status.CANCELLED} and self.world.enabled:
                job.ended = job.status
                job.move(Status.CLEANED)
                expected += 1
        assert self.run(self.substrate.sweep())["cleaned"] == expected

    # What must be true after every step --------------------------------------------------------------------

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        """Every job, with a row of the ledger for each of its moves; and the workflow."""
        rows = self.run(
            self.substrate.daemon.fetch(
                "select q.job_id::text, status, attempts, lease_recoveries, lease_token::text, "
                "leased_until is null, "
                "(select count(*) from webhookd.job_command_run r where r.job_id = q.job_id) "
                "from webhookd.job_queue q"
            )
        )
        assert {tuple(row) for row in rows} == {
            (
                job.id,
                job.status.value,
                job.attempts,
                job.recoveries,
                job.token,
                job.status not in HELD,
                job.moves,
            )
            for job in self.world.jobs.values()
        }
        assert self.run(self.substrate.workflow_status(self.workflow_id)) == self.world.workflow()

    @invariant()
    def each_move_is_told_but_renewals_and_waits(self) -> None:
        """Its event is there, and says the same state."""
        untold = self.run(
            self.substrate.daemon.fetch(
                """
                select r.* from webhookd.job_command_run r left join webhookd.events e on e.id = r.event_id
                where (e.payload ->> 'job_id', e.payload ->> 'status')
                        is distinct from (r.job_id::text, r.to_status)
                    and (r.from_status, r.to_status)
                        not in (('in_progress', 'in_progress'), ('failed', 'retry_waiting'))
                """
            )
        )
        assert untold == []

    # Helpers -----------------------------------------------------------------------------------------------

    def some_job(self, data: st.DataObject, *statuses: Status) -> Job:
        """One in these states, if there is; else any."""
        jobs = list(self.world.jobs.values())
        return data.draw(st.sampled_from([job for job in jobs if job.status in statuses] or jobs))

    def held(self) -> list[Answer]:
        """The leases that are somebody's."""
        return [
            lease
            for lease in self.leases
            if (job := self.world.jobs[lease["job_id"]]).token == lease["lease_token"] and job.status in HELD
        ]

    def some_lease(self, data: st.DataObject) -> Answer:
        """One that is held, more often than not; or any there ever was."""
        return data.draw(st.sampled_from(self.held() or self.leases) | st.sampled_from(self.leases))


@contextmanager
def prepared(cluster: Cluster, weakened: Weakened | None) -> Iterator[tuple[asyncio.Runner, Substrate]]:
    """A database for all examples, with a policy in which every end is near."""
    with asyncio.Runner() as runner:
        database = runner.run(cluster.create_database(migrated=True))
        try:
            substrate = runner.run(Substrate.open(database))
            runner.run(
                substrate.configure(
                    KIND,
                    max_attempts=MAX_ATTEMPTS,
                    max_lease_recoveries=MAX_RECOVERIES,
                    retention_seconds=0,
                    base_delay_seconds=1000,
                )
            )
            if weakened is not None:
                runner.run(weakened.take_away(substrate.superuser))
            yield runner, substrate
        finally:
            runner.run(cluster.drop_database(database))


def drive(cluster: Cluster, weakened: Weakened | None, **chosen: Any) -> None:
    """Run the machine, on functions as they are or on one that is broken."""
    with prepared(cluster, weakened) as (runner, substrate):

        class Machine(Work):
            def __init__(self) -> None:
                super().__init__(runner, substrate)

        run_state_machine_as_test(
            Machine,
            settings=settings(stateful_step_count=STEPS, suppress_health_check=list(HealthCheck), **chosen),
        )


def test_any_order_of_steps_keeps_the_nine_states(cluster: Cluster) -> None:
    """No order of steps that Hypothesis finds makes the tables differ from the model."""
    drive(cluster, None, max_examples=EXAMPLES, derandomize=True)


# One small mistake in each function.
MISTAKES = [
    Weakened("fn_job_enqueue", "if not job_substrate_enabled()", "if false"),
    Weakened("fn_job_claim", "order by q.priority desc, q.enqueued_at", "order by q.enqueued_at"),
    Weakened("fn_job_claim", "and q.executor = p_executor"),
    Weakened("fn_job_progress", "job.lease_token is distinct from p_lease_token or"),
    Weakened("fn_job_succeed", "job.lease_token is distinct from p_lease_token", "false"),
    Weakened("fail_work", "job.lease_token is distinct from token", "false"),
    Weakened("settle_failed_work", "q.attempts >= p.max_attempts", "q.attempts > p.max_attempts"),
    Weakened(
        "settle_failed_work",
        "when d.is_dead then q.lease_recoveries else 0",
        "when true then q.lease_recoveries",
    ),
    Weakened("fn_job_cancel", "job.status in ('leased','in_progress')", "false"),
    Weakened("fn_job_lease_reaper", "e.lease_recoveries >= p.max", "e.lease_recoveries > p.max"),
    Weakened("fn_job_lease_reaper", "and q.deadline_at <= now()", "and false"),
    Weakened("fn_job_cleanup_sweep", "if not job_substrate_enabled()", "if false"),
    Weakened("derive_workflow_status", "'failed','retry_waiting'", "'failed'"),
]


@pytest.mark.once
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_the_machine_finds_a_mistake(cluster: Cluster, mistake: Weakened) -> None:
    """The test above would fail if a function were wrong: here one is."""
    # A KeyError: the answer has not what an answer of its kind has.
    with pytest.raises((AssertionError, KeyError, asyncpg.PostgresError)) as found:
        drive(cluster, mistake, max_examples=50, derandomize=True, phases=[Phase.generate], database=None)
    assert not isinstance(found.value, asyncpg.PostgresSyntaxError)
