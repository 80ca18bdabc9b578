"""Hypothesis calls the gated functions in random order, with two executors, and compares with a model.

Each executor has its own login with the role dot_executor, and some steps run in both sessions at once.
Leases end by the clock or because the test moves them, and every token ever issued may be used again by
either session. After each step the tables must equal the model, and each transition must have its ledger
row, with the login that made it, and its event.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.database import Cluster, Database, Login
from tests.support.guards import Weakened
from tests.support.job_queue import ACTOR, KIND, Answer, JobQueue, Status
from tests.support.job_queue_model import HELD, MAX_ATTEMPTS, MAX_RECOVERIES, OPEN, Job, World
from tests.support.machines import Drive
from tests.support.nightly import first_in_gate
from tests.support.waiting import until_blocked

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")

EXECUTORS = st.sampled_from(["DOT", "Agent"])
# Either session may claim jobs of either executor.
SESSIONS = st.sampled_from([0, 1])
# A lease of a minute, and one that has expired at the next statement.
LONG, SHORT = 60.0, 0.000001
REPORTS = st.sampled_from(["progress", "succeed", "fail", "fail_permanent"])
LOGINS: list[Login] = ["daemon", "executor", "other_executor"]
# Few, so that the test is fast; `make machine` runs many more.
EXAMPLES = int(os.environ.get("WEBHOOKD_TEST_EXAMPLES", "10"))


@dataclass(frozen=True)
class Session:
    """A connection and the name of its login, as in the ledger."""

    queue: JobQueue
    login: str

    @classmethod
    async def open(cls, database: Database, login: Login) -> "Session":
        """Connect, with a superuser connection to simulate time."""
        superuser = await database.connect("superuser")
        return cls(JobQueue(await database.connect(login), superuser), database.login_name(login))


@asynccontextmanager
async def held_open(connection: "Connection", *, committed: bool) -> AsyncIterator[None]:
    """Run the block in a transaction; an error rolls back, so that the next example starts clean."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.commit() if committed else transaction.rollback())


@dataclass(frozen=True)
class Sessions:
    """The sessions of one example."""

    administrator: Session
    executors: tuple[Session, Session]


class JobQueueMachine(RuleBasedStateMachine):
    """The steps: enqueue and operate, execute, and the passing of time."""

    def __init__(self, runner: asyncio.Runner, sessions: Sessions) -> None:
        super().__init__()
        self.runner = runner
        self.queue, self.login = sessions.administrator.queue, sessions.administrator.login
        self.executors = sessions.executors
        self.world = World()
        self.leases: list[Answer] = []  # all leases ever issued
        self.run(self.empty())

    def run(self, step: Awaitable[Result]) -> Result:
        """Run a coroutine."""

        async def waited() -> Result:
            return await step

        return self.runner.run(waited())

    async def empty(self) -> None:
        """Empty the tables: a new database per example would take most of the time."""
        superuser = self.queue.superuser
        async with superuser.transaction():
            await superuser.execute("set local session_replication_role = replica")
            await superuser.execute("truncate webhookd.events, webhookd.job_workflow cascade")
        await self.queue.call("fn_job_enable", p_enabled=True, p_actor=ACTOR)
        self.workflow_id = await self.queue.open_workflow()

    # Enqueue and operate -----------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Start with some jobs, and a lease for each executor."""
        for number, executor in enumerate(["DOT", "DOT", "DOT", "Agent"]):
            self.enqueue(f"first-{number}", executor, number, workflow=number > 0)
        self.claim("DOT", 0, LONG)
        self.claim("Agent", 1, LONG)

    @rule(
        key=st.sampled_from("abcdef"), executor=EXECUTORS, priority=st.integers(0, 2), workflow=st.booleans()
    )
    def enqueue(self, key: str, executor: str, priority: int, *, workflow: bool) -> None:
        """One job per key; refused while the queue is disabled, or for other content."""
        answer = self.run(
            self.queue.try_enqueue(
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
            job = Job(answer["job_id"], executor, priority, workflow, [self.login])
            self.world.jobs[job.id] = self.world.keys[key] = job
        elif (known.executor, known.workflow) != (executor, workflow):
            assert (answer["reason"], answer["job_id"]) == ("idempotency_conflict", known.id)
        else:
            assert (answer["duplicate"], answer["job_id"]) == (True, known.id)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Waiting jobs and dead letters can be cancelled; held and succeeded jobs cannot."""
        job = self.some_job(data)
        answer = self.run(self.queue.cancel(job.id))
        if job.status in HELD:
            assert answer["reason"] == "running"
        elif Status.SUCCEEDED in {job.status, job.ended}:
            assert answer["reason"] == "finished"
        elif job.requeued_as is not None:
            assert (answer["reason"], answer["job_id"]) == ("already_requeued", job.requeued_as)
        else:
            duplicate = Status.CANCELLED in {job.status, job.ended}
            assert answer["duplicate"] == duplicate
            if not duplicate:
                job.move(Status.CANCELLED, self.login)

    @rule()
    def cancel_all_queued(self) -> None:
        """Leaves workflows whose last open job waits for a retry or is held."""
        for job in self.world.jobs.values():
            if job.status is Status.QUEUED:
                assert self.run(self.queue.cancel(job.id))["duplicate"] is False
                job.move(Status.CANCELLED, self.login)

    @precondition(lambda self: any(job.status is Status.DEAD_LETTER for job in self.world.jobs.values()))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        """A dead letter is requeued once."""
        job = self.some_job(data, Status.DEAD_LETTER)
        answer = self.run(self.queue.requeue(job.id))
        if not self.world.enabled:
            assert answer["reason"] == "job_substrate_disabled"
            return
        job.move(Status.CANCELLED, self.login)
        job.requeued_as = answer["job_id"]
        self.world.jobs[answer["job_id"]] = Job(
            answer["job_id"], job.executor, job.priority, job.workflow, [self.login]
        )
        assert self.run(self.queue.requeue(job.id))["reason"] == "already_requeued"

    @rule()
    def toggle_enabled(self) -> None:
        """Disable or enable the queue."""
        self.world.enabled = not self.world.enabled
        self.run(self.queue.call("fn_job_enable", p_enabled=self.world.enabled, p_actor=ACTOR))

    # Execute -----------------------------------------------------------------------------------------------

    @rule(executor=EXECUTORS, session=SESSIONS, ttl=st.sampled_from([LONG, LONG, SHORT]))
    def claim(self, executor: str, session: int, ttl: float) -> None:
        """A claim gets the next job, with a new token."""
        expected = self.world.next(executor)
        answer = self.run(self.try_claim(executor, session, ttl))
        self.check_claim(answer, expected, session, ttl)

    def try_claim(self, executor: str, session: int, ttl: float) -> Awaitable[Answer]:
        """Claim in one of the sessions."""
        holder = f"holder {session}"
        return self.executors[session].queue.try_claim(executor=executor, holder=holder, ttl=ttl)

    def check_claim(self, answer: Answer, expected: Job | None, session: int, ttl: float) -> None:
        """Check the answer of a claim and update the model."""
        if not self.world.enabled:
            assert answer["reason"] == "job_substrate_disabled"
        elif expected is None:
            assert answer["reason"] == "nothing_to_claim"
        else:
            assert (answer["job_id"], answer["attempt"]) == (expected.id, expected.attempts + 1)
            assert answer["lease_token"] not in {lease["lease_token"] for lease in self.leases}
            expected.move(Status.LEASED, self.executors[session].login)
            expected.token, expected.reported = answer["lease_token"], None
            expected.short = expected.expired = ttl == SHORT
            self.leases.append(answer)

    @rule(executor=EXECUTORS, committed=st.booleans())
    def claim_at_once(self, executor: str, *, committed: bool) -> None:
        """A second claim before the commit of the first gets the next job, even if the first rolls back."""
        first = self.world.next(executor)
        second = self.world.next(executor, taken=first)

        async def claim() -> tuple[Answer, Answer]:
            async with held_open(self.executors[0].queue.daemon, committed=committed):
                mine = await self.try_claim(executor, 0, LONG)
                theirs = await self.try_claim(executor, 1, LONG)
            return mine, theirs

        mine, theirs = self.run(claim())
        if committed:
            self.check_claim(mine, first, 0, LONG)
        elif not mine["refused"]:
            self.leases.append(mine)  # rolled back
        self.check_claim(theirs, second, 1, LONG)

    def send_report(self, lease: Answer, report: str, session: int) -> Awaitable[Answer]:
        """Send one of the four reports from a session."""
        executor = self.executors[session].queue
        match report:
            case "progress":
                return executor.progress(lease)
            case "succeed":
                return executor.succeed(lease)
            case _:
                return executor.fail(lease, permanent=report == "fail_permanent")

    def report_and_check(self, lease: Answer, report: str, session: int) -> None:
        """Send a report and check its answer."""
        self.check_report(lease, report, session, self.run(self.send_report(lease, report, session)))

    def check_report(self, lease: Answer, report: str, session: int, answer: Answer) -> None:
        """Check the answer of a report: in time, late, repeated, stale or contradicting."""
        job = self.world.jobs[lease["job_id"]]
        login = self.executors[session].login
        if job.token != lease["lease_token"]:
            assert answer["reason"] == "stale_lease"
        elif job.status in HELD:
            match report:
                case "progress":
                    assert answer["started"] == (job.status is Status.LEASED)
                    job.move(Status.IN_PROGRESS, login)  # also for a renewal
                    job.expired = job.short
                    return
                case "succeed":
                    job.move(Status.SUCCEEDED, login)
                    job.attempts += 1
                case _:
                    job.fail(login, permanent=report == "fail_permanent")
            job.reported = report
            assert (answer["duplicate"], answer["status"], answer["attempts"]) == (
                False,
                job.status,
                job.attempts,
            )
        elif report == "progress":
            assert answer["reason"] == "stale_lease"
        elif job.reported == report:
            assert (answer["duplicate"], answer["status"]) == (True, job.status)
        else:
            assert (answer["reason"], answer["status"]) == ("already_reported", job.status)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), report=REPORTS, session=SESSIONS)
    def report_with_any_token(self, data: st.DataObject, report: str, session: int) -> None:
        """Any report with any token ever issued, from either session."""
        self.report_and_check(self.some_lease(data), report, session)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), reports=st.tuples(REPORTS, REPORTS), committed=st.booleans())
    def report_at_once(self, data: st.DataObject, reports: tuple[str, str], *, committed: bool) -> None:
        """A second report with the same token waits for the first transaction and sees its result."""
        lease = data.draw(st.sampled_from(self.held()))
        [first, second] = [executor.queue.daemon for executor in self.executors]

        async def send_both() -> tuple[Answer, Answer]:
            async with held_open(first, committed=committed):
                mine = await self.send_report(lease, reports[0], 0)
                theirs = asyncio.ensure_future(self.send_report(lease, reports[1], 1))
                try:
                    await until_blocked(self.queue.superuser, second.get_server_pid(), first.get_server_pid())
                except BaseException:
                    theirs.cancel()
                    raise
            return mine, await theirs

        mine, theirs = self.run(send_both())
        if committed:
            self.check_report(lease, reports[0], 0, mine)
        self.check_report(lease, reports[1], 1, theirs)

    @rule(reports=st.lists(REPORTS, min_size=1, max_size=3), session=SESSIONS)
    def run_a_cycle(self, reports: list[str], session: int) -> None:
        """A usual cycle in one step, so that later states are reached often enough."""
        for lease, report in zip(self.held(), reports, strict=False):
            self.report_and_check(lease, report, session)
        self.make_retries_due()
        self.reap()
        self.claim("DOT", session, LONG)
        self.claim("Agent", 1 - session, LONG)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), report=REPORTS, session=SESSIONS)
    def report_late(self, data: st.DataObject, report: str, session: int) -> None:
        """A holder reports after its lease was recovered, when the other session may hold the job."""
        lease = data.draw(st.sampled_from(self.held()))
        job = self.world.jobs[lease["job_id"]]
        self.run(self.queue.expire(job.id))
        job.expired = True
        self.reap()
        self.claim(job.executor, 1 - session, LONG)
        self.report_and_check(lease, report, session)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), session=SESSIONS)
    def report_with_a_wrong_token(self, data: st.DataObject, session: int) -> None:
        """A token that was never issued changes nothing."""
        lease = self.some_lease(data) | {"lease_token": str(uuid4())}
        assert self.run(self.send_report(lease, "succeed", session))["reason"] == "stale_lease"

    # Time --------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(job.status in HELD for job in self.world.jobs.values()))
    @rule(data=st.data(), reaped=st.booleans())
    def expire(self, data: st.DataObject, *, reaped: bool) -> None:
        """A lease expires, and may be reaped at once."""
        job = self.some_job(data, *HELD)
        self.run(self.queue.expire(job.id))
        job.expired = True
        if reaped:
            self.reap()

    @rule()
    def make_retries_due(self) -> None:
        """All retries become due."""
        self.run(self.queue.make_retries_due())
        for job in self.world.jobs.values():
            job.due = True

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def let_a_deadline_pass(self, data: st.DataObject) -> None:
        """The deadline of a job passes, held or not."""
        job = self.some_job(data, *OPEN)
        if job.status in OPEN:
            self.run(self.queue.let_deadline_pass(job.id))
            job.late = True

    @rule()
    def reap(self) -> None:
        """The reaper handles leases, deadlines and retries as they were at its start."""
        before = [(job, job.status) for job in self.world.jobs.values()]
        counted = dict.fromkeys(
            ("recovered", "retry_waiting", "dead_lettered", "promoted", "came_due", "cancelled"), 0
        )
        for job, status in before:
            if status in HELD and job.expired:
                job.token, job.expired = None, False
                if job.recoveries < MAX_RECOVERIES:
                    job.recoveries += 1
                    job.move(Status.QUEUED, self.login)
                    counted["recovered"] += 1
                else:
                    job.fail(self.login)
                    counted["dead_lettered" if job.status is Status.DEAD_LETTER else "retry_waiting"] += 1
            elif status in {Status.QUEUED, Status.RETRY_WAITING} and job.late:
                job.move(Status.CANCELLED, self.login)
                counted["cancelled"] += 1
            elif status is Status.RETRY_WAITING and job.due:
                job.move(Status.QUEUED, self.login)
                counted["promoted"] += 1
        answer = self.run(self.queue.reap())
        assert {name: answer[name] for name in counted} == counted

    @rule()
    def sweep(self) -> None:
        """With a retention of 0, finished jobs are cleaned, unless the queue is disabled."""
        expected = 0
        for job in self.world.jobs.values():
            if job.status in {Status.SUCCEEDED, Status.CANCELLED} and self.world.enabled:
                job.ended = job.status
                job.move(Status.CLEANED, self.login)
                expected += 1
        assert self.run(self.queue.sweep())["cleaned"] == expected

    # Invariants --------------------------------------------------------------------------------------------

    @invariant()
    def tables_equal_the_model(self) -> None:
        """Every job, its ledger rows with their logins, and the workflow."""
        rows = self.run(
            self.queue.superuser.fetch(
                "select q.job_id::text, status, attempts, lease_recoveries, lease_token::text, "
                "leased_until is null, "
                "(select string_agg(r.called_by, ' ' order by r.run_id) from webhookd.job_command_run r "
                "where r.job_id = q.job_id) from webhookd.job_queue q"
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
                " ".join(job.moved_by),
            )
            for job in self.world.jobs.values()
        }
        assert self.run(self.queue.workflow_status(self.workflow_id)) == self.world.workflow()

    @invariant()
    def each_transition_has_its_event(self) -> None:
        """With the same status; a wait for a retry and a renewal have none."""
        wrong = self.run(
            self.queue.daemon.fetch(
                """
                select r.* from webhookd.job_command_run r left join webhookd.events e on e.id = r.event_id
                where case when (r.from_status, r.to_status) in (
                            ('failed', 'retry_waiting'), ('in_progress', 'in_progress'))
                        then r.event_id is not null
                        else (e.payload ->> 'job_id', e.payload ->> 'status')
                            is distinct from (r.job_id::text, r.to_status) end
                """
            )
        )
        assert wrong == []

    # Helpers -----------------------------------------------------------------------------------------------

    def some_job(self, data: st.DataObject, *statuses: Status) -> Job:
        """A job in one of these states if there is one, otherwise any job."""
        jobs = list(self.world.jobs.values())
        return data.draw(st.sampled_from([job for job in jobs if job.status in statuses] or jobs))

    def held(self) -> list[Answer]:
        """The leases that are still valid."""
        return [
            lease
            for lease in self.leases
            if (job := self.world.jobs[lease["job_id"]]).token == lease["lease_token"] and job.status in HELD
        ]

    def some_lease(self, data: st.DataObject) -> Answer:
        """Mostly a valid lease, sometimes any lease ever issued."""
        return data.draw(st.sampled_from(self.held() or self.leases) | st.sampled_from(self.leases))


async def open_sessions(database: Database) -> Sessions:
    """Sessions of a database with a policy of few attempts and no retention."""
    administrator, *executors = [await Session.open(database, login) for login in LOGINS]
    await administrator.queue.configure(
        KIND,
        max_attempts=MAX_ATTEMPTS,
        max_lease_recoveries=MAX_RECOVERIES,
        retention_seconds=0,
        base_delay_seconds=1000,
    )
    return Sessions(administrator, (executors[0], executors[1]))


MACHINE = Drive(JobQueueMachine, open_sessions, steps=40)


def test_random_steps_match_the_model(cluster: Cluster) -> None:
    """No sequence of steps that Hypothesis finds makes the tables differ from the model."""
    MACHINE.go(cluster, max_examples=EXAMPLES, derandomize=True)


# One small mistake per function.
MISTAKES = [
    Weakened("fn_job_enqueue", "if not job_queue_enabled()", "if false"),
    Weakened("fn_job_claim", "order by q.priority desc, q.enqueued_at", "order by q.enqueued_at"),
    Weakened("fn_job_claim", "and q.executor = p_executor"),
    Weakened("fn_job_progress", "job.status not in ('leased','in_progress')", "false"),
    Weakened("fn_job_progress", "if before = 'leased' then", "if true then"),
    Weakened("lease_refusal", "job.lease_token is distinct from token", "false"),
    Weakened("duplicate_or_stale_report", "command = (", "exists ("),
    Weakened("settle_failed_jobs", "q.attempts >= p.max_attempts", "q.attempts > p.max_attempts"),
    Weakened(
        "settle_failed_jobs",
        "when d.is_dead then q.lease_recoveries else 0",
        "when true then q.lease_recoveries",
    ),
    Weakened("fn_job_cancel", "job.status in ('leased','in_progress')", "false"),
    Weakened("fn_job_lease_reaper", "e.lease_recoveries >= p.max", "e.lease_recoveries > p.max"),
    Weakened("fn_job_lease_reaper", "and q.deadline_at <= now()", "and false"),
    Weakened("fn_job_cleanup_sweep", "if not job_queue_enabled()", "if false"),
    Weakened("derive_workflow_status", "'failed','retry_waiting'", "'failed'"),
]


@pytest.mark.once
@pytest.mark.parametrize("mistake", first_in_gate(MISTAKES), ids=str)
def test_machine_finds_a_planted_mistake(cluster: Cluster, mistake: Weakened) -> None:
    """The test above fails if a function is wrong."""
    MACHINE.finds(cluster, mistake)
