"""Any order of steps: Hypothesis drives the nine functions, with two executors and a small model beside.

Each executor has a login and a session of its own, with nothing but dot_executor, and now and then both are
in the middle of something at once. Leases end by the clock or because time was moved, and every token that
there ever was may be used again, by either. After every step the table is as the model says, and each move
has its row of the ledger, with the login that made it, and its event.
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
from tests.support.machines import Drive
from tests.support.nightly import first_in_gate
from tests.support.substrate import ACTOR, KIND, Answer, Status, Substrate
from tests.support.substrate_model import HELD, MAX_ATTEMPTS, MAX_RECOVERIES, OPEN, Job, World
from tests.support.waiting import until_blocked

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")

EXECUTORS = st.sampled_from(["DOT", "Agent"])
# Whose session it is: either does work for either name.
SESSIONS = st.sampled_from([0, 1])
# A lease of a minute; and one that is over at the next statement.
LONG, SHORT = 60.0, 0.000001
WORDS = st.sampled_from(["progress", "succeed", "fail", "bury"])
LOGINS: list[Login] = ["daemon", "executor", "other_executor"]
# Few enough for every test run; `make machine` takes many more.
EXAMPLES = int(os.environ.get("WEBHOOKD_TEST_EXAMPLES", "10"))


@dataclass(frozen=True)
class Session:
    """A connection of somebody's, and the login that the ledger knows them by."""

    substrate: Substrate
    login: str

    @classmethod
    async def open(cls, database: Database, login: Login) -> "Session":
        """With a superuser beside, to let time pass."""
        superuser = await database.connect("superuser")
        return cls(Substrate(await database.connect(login), superuser), database.login_name(login))


@asynccontextmanager
async def held_open(connection: "Connection", *, committed: bool) -> AsyncIterator[None]:
    """A transaction around the block; one that fails leaves none open for the next example."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.commit() if committed else transaction.rollback())


@dataclass(frozen=True)
class People:
    """Who there is."""

    administrator: Session
    executors: tuple[Session, Session]


class Work(RuleBasedStateMachine):
    """Who has work, who does it, and time, in whatever order."""

    def __init__(self, runner: asyncio.Runner, people: People) -> None:
        super().__init__()
        self.runner = runner
        self.substrate, self.login = people.administrator.substrate, people.administrator.login
        self.executors = people.executors
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
        self.claim("DOT", 0, LONG)
        self.claim("Agent", 1, LONG)

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
            job = Job(answer["job_id"], executor, priority, workflow, [self.login])
            self.world.jobs[job.id] = self.world.keys[key] = job
        elif (known.executor, known.workflow) != (executor, workflow):
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
        elif job.heir is not None:
            assert (answer["reason"], answer["job_id"]) == ("already_requeued", job.heir)
        else:
            duplicate = Status.CANCELLED in {job.status, job.ended}
            assert answer["duplicate"] == duplicate
            if not duplicate:
                job.move(Status.CANCELLED, self.login)

    @rule()
    def cancel_what_is_queued(self) -> None:
        """All of it: so that a workflow is seen whose last open job waits for its retry, or is held."""
        for job in self.world.jobs.values():
            if job.status is Status.QUEUED:
                assert self.run(self.substrate.cancel(job.id))["duplicate"] is False
                job.move(Status.CANCELLED, self.login)

    @precondition(lambda self: any(job.status is Status.DEAD_LETTER for job in self.world.jobs.values()))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        """A new job, once."""
        job = self.some_job(data, Status.DEAD_LETTER)
        answer = self.run(self.substrate.requeue(job.id))
        if not self.world.enabled:
            assert answer["reason"] == "job_substrate_disabled"
            return
        job.move(Status.CANCELLED, self.login)
        job.heir = answer["job_id"]
        self.world.jobs[answer["job_id"]] = Job(
            answer["job_id"], job.executor, job.priority, job.workflow, [self.login]
        )
        assert self.run(self.substrate.requeue(job.id))["reason"] == "already_requeued"

    @rule()
    def turn_the_switch(self) -> None:
        """Off or on."""
        self.world.enabled = not self.world.enabled
        self.run(self.substrate.call("fn_job_enable", p_enabled=self.world.enabled, p_actor=ACTOR))

    # Who does it -------------------------------------------------------------------------------------------

    @rule(executor=EXECUTORS, session=SESSIONS, ttl=st.sampled_from([LONG, LONG, SHORT]))
    def claim(self, executor: str, session: int, ttl: float) -> None:
        """The first in the order, with a token that never was."""
        expected = self.world.next(executor)
        answer = self.run(self.try_claim(executor, session, ttl))
        self.claimed(answer, expected, session, ttl)

    def try_claim(self, executor: str, session: int, ttl: float) -> Awaitable[Answer]:
        """What an executor asks."""
        holder = f"holder {session}"
        return self.executors[session].substrate.try_claim(executor=executor, holder=holder, ttl=ttl)

    def claimed(self, answer: Answer, expected: Job | None, session: int, ttl: float) -> None:
        """What it is told, and what is so then."""
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
        """Both claim, one before the other has committed: it gets the next, also if the other gives up."""
        first = self.world.next(executor)
        second = self.world.next(executor, taken=first)

        async def claim() -> tuple[Answer, Answer]:
            async with held_open(self.executors[0].substrate.daemon, committed=committed):
                mine = await self.try_claim(executor, 0, LONG)
                theirs = await self.try_claim(executor, 1, LONG)
            return mine, theirs

        mine, theirs = self.run(claim())
        if committed:
            self.claimed(mine, first, 0, LONG)
        elif not mine["refused"]:
            self.leases.append(mine)  # of a claim that never was
        self.claimed(theirs, second, 1, LONG)

    def ask(self, lease: Answer, word: str, session: int) -> Awaitable[Answer]:
        """One of the four words, from whoever says it."""
        executor = self.executors[session].substrate
        match word:
            case "progress":
                return executor.progress(lease)
            case "succeed":
                return executor.succeed(lease)
            case _:
                return executor.fail(lease, permanent=word == "bury")

    def say(self, lease: Answer, word: str, session: int) -> None:
        """Ask, and see that the answer is right."""
        self.told(lease, word, session, self.run(self.ask(lease, word, session)))

    def told(self, lease: Answer, word: str, session: int, answer: Answer) -> None:
        """In time, late, again, after the lease was lost, or with what the lease had not said."""
        job = self.world.jobs[lease["job_id"]]
        login = self.executors[session].login
        if job.token != lease["lease_token"]:
            assert answer["reason"] == "stale_lease"
        elif job.status in HELD:
            match word:
                case "progress":
                    assert answer["started"] == (job.status is Status.LEASED)
                    job.move(Status.IN_PROGRESS, login)  # a renewal: from there to there
                    job.expired = job.short
                    return
                case "succeed":
                    job.move(Status.SUCCEEDED, login)
                    job.attempts += 1
                case _:
                    job.fail(login, permanent=word == "bury")
            job.reported = word
            assert (answer["duplicate"], answer["status"], answer["attempts"]) == (
                False,
                job.status,
                job.attempts,
            )
        elif word == "progress":
            assert answer["reason"] == "stale_lease"
        elif job.reported == word:
            assert (answer["duplicate"], answer["status"]) == (True, job.status)
        else:
            assert (answer["reason"], answer["status"]) == ("already_reported", job.status)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), word=WORDS, session=SESSIONS)
    def report(self, data: st.DataObject, word: str, session: int) -> None:
        """Any word with any token there ever was, from either."""
        self.say(self.some_lease(data), word, session)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), words=st.tuples(WORDS, WORDS), committed=st.booleans())
    def report_at_once(self, data: st.DataObject, words: tuple[str, str], *, committed: bool) -> None:
        """Two words with one token, the second before the first is committed: it waits, and sees what was."""
        lease = data.draw(st.sampled_from(self.held()))
        [first, second] = [executor.substrate.daemon for executor in self.executors]

        async def report() -> tuple[Answer, Answer]:
            async with held_open(first, committed=committed):
                mine = await self.ask(lease, words[0], 0)
                theirs = asyncio.ensure_future(self.ask(lease, words[1], 1))
                try:
                    await until_blocked(
                        self.substrate.superuser, second.get_server_pid(), first.get_server_pid()
                    )
                except BaseException:
                    theirs.cancel()
                    raise
            return mine, await theirs

        mine, theirs = self.run(report())
        if committed:
            self.told(lease, words[0], 0, mine)
        self.told(lease, words[1], 1, theirs)

    @rule(words=st.lists(WORDS, min_size=1, max_size=3), session=SESSIONS)
    def go_round(self, words: list[str], session: int) -> None:
        """The usual way, all of it at once: so the states that lie far down it are met often enough."""
        for lease, word in zip(self.held(), words, strict=False):
            self.say(lease, word, session)
        self.let_retries_fall_due()
        self.reap()
        self.claim("DOT", session, LONG)
        self.claim("Agent", 1 - session, LONG)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), word=WORDS, session=SESSIONS)
    def come_late(self, data: st.DataObject, word: str, session: int) -> None:
        """A holder that was thought dead speaks when the other has its job, or could have."""
        lease = data.draw(st.sampled_from(self.held()))
        job = self.world.jobs[lease["job_id"]]
        self.run(self.substrate.expire(job.id))
        job.expired = True
        self.reap()
        self.claim(job.executor, 1 - session, LONG)
        self.say(lease, word, session)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), session=SESSIONS)
    def report_with_a_wrong_token(self, data: st.DataObject, session: int) -> None:
        """A token that was never given changes nothing."""
        lease = self.some_lease(data) | {"lease_token": str(uuid4())}
        assert self.run(self.ask(lease, "succeed", session))["reason"] == "stale_lease"

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
        answer = self.run(self.substrate.reap())
        assert {name: answer[name] for name in counted} == counted

    @rule()
    def sweep(self) -> None:
        """Retention is none: what is over is cleaned, unless it is off."""
        expected = 0
        for job in self.world.jobs.values():
            if job.status in {Status.SUCCEEDED, Status.CANCELLED} and self.world.enabled:
                job.ended = job.status
                job.move(Status.CLEANED, self.login)
                expected += 1
        assert self.run(self.substrate.sweep())["cleaned"] == expected

    # What must be true after every step --------------------------------------------------------------------

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        """Every job, with a row of the ledger for each move and renewal, by who made it; and the workflow."""
        rows = self.run(
            self.substrate.superuser.fetch(
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
        assert self.run(self.substrate.workflow_status(self.workflow_id)) == self.world.workflow()

    @invariant()
    def each_move_is_told_but_waits_and_no_renewal(self) -> None:
        """Its event is there, and says the same state."""
        untold = self.run(
            self.substrate.daemon.fetch(
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


async def hurried(database: Database) -> People:
    """Sessions of a database with a policy in which every end is near."""
    administrator, *executors = [await Session.open(database, login) for login in LOGINS]
    await administrator.substrate.configure(
        KIND,
        max_attempts=MAX_ATTEMPTS,
        max_lease_recoveries=MAX_RECOVERIES,
        retention_seconds=0,
        base_delay_seconds=1000,
    )
    return People(administrator, (executors[0], executors[1]))


WORK = Drive(Work, hurried, steps=40)


def test_any_order_of_steps_keeps_the_nine_states(cluster: Cluster) -> None:
    """No order of steps that Hypothesis finds makes the tables differ from the model."""
    WORK.go(cluster, max_examples=EXAMPLES, derandomize=True)


# One small mistake in each function.
MISTAKES = [
    Weakened("fn_job_enqueue", "if not job_substrate_enabled()", "if false"),
    Weakened("fn_job_claim", "order by q.priority desc, q.enqueued_at", "order by q.enqueued_at"),
    Weakened("fn_job_claim", "and q.executor = p_executor"),
    Weakened("fn_job_progress", "job.status not in ('leased','in_progress')", "false"),
    Weakened("fn_job_progress", "if before = 'leased' then", "if true then"),
    Weakened("lease_refusal", "job.lease_token is distinct from token", "false"),
    Weakened("unmoved_by_report", "command = (", "exists ("),
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
@pytest.mark.parametrize("mistake", first_in_gate(MISTAKES), ids=str)
def test_the_machine_finds_a_mistake(cluster: Cluster, mistake: Weakened) -> None:
    """The test above would fail if a function were wrong: here one is."""
    WORK.finds(cluster, mistake)
