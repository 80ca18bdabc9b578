"""Steps in any order: Hypothesis drives the database functions and a small model side by side.

After every step the tables must equal the model, and no promise may be broken.
"""

import asyncio
import os
from collections.abc import Awaitable
from datetime import timedelta
from operator import attrgetter
from typing import TypeVar
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.database import Cluster, Database
from tests.support.flow import ADDRESS, Flow
from tests.support.guards import Weakened
from tests.support.invariants import AUDIT, broken_invariants
from tests.support.machines import Drive
from tests.support.model import Job, Saga, Subscription, World
from tests.support.nightly import first_in_gate
from webhookd.core.errors import Refusal
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts, dead_letters, ingest, router, sagas, subscriptions

Result = TypeVar("Result")

TYPES = st.sampled_from(["order.created", "order.paid"])
LIMITS = st.integers(1, 3)
SIZES = st.integers(1, 4)
ANSWERS = st.sampled_from([200, 204, 302, 500, 503])
HOLDS = st.sampled_from(["pause", "disable", "unverify"])
MUCH = 1000
# Few examples for the gate; `make machine` runs many more.
EXAMPLES = int(os.environ.get("WEBHOOKD_TEST_EXAMPLES", "20"))
EMPTIED = (
    "webhookd.events",
    "webhookd.event_routing_queue",
    "webhookd.subscriptions",
    "webhookd.endpoint_health",
    "webhookd.webhook_delivery_sagas",
    "webhookd.webhook_delivery_jobs",
    "webhookd.dead_letters",
    "webhookd.delivery_stats",
    "webhookd.delivery_stats_hours",
    "public.saga_audit",
    "public.receipts",
    "public.client",
)


class Delivery(RuleBasedStateMachine):
    """The stages of the daemon in any order."""

    def __init__(self, runner: asyncio.Runner, flow: Flow) -> None:
        super().__init__()
        self.runner = runner
        self.flow = flow
        self.world = World()
        self.leases: list[attempts.Lease] = []  # every lease of this example
        # All leases of a claim have the same token.
        self.sent: set[tuple[int, UUID]] = set()  # leases whose request was sent
        self.released: set[tuple[int, UUID]] = set()  # leases released before sending
        self.run(self.empty())

    def run(self, step: Awaitable[Result]) -> Result:
        """Run a step to its end."""

        async def waited() -> Result:
            return await step

        return self.runner.run(waited())

    async def empty(self) -> None:
        """Empty the database: a new one for each example would take most of the time."""
        superuser = self.flow.superuser
        async with superuser.transaction():
            await superuser.execute("set local session_replication_role = replica")
            await superuser.execute(f"truncate {', '.join(EMPTIED)} restart identity cascade")

    # Subscriptions and events ------------------------------------------------------------------------------

    @initialize(limit=st.none() | LIMITS)
    def begin(self, limit: int | None) -> None:
        """Start in the middle: two subscriptions with leases."""
        self.subscribe("order.created", None, verified=True)
        self.subscribe("order.created", limit, verified=True)
        self.go_round(4, 4, (3, 3), [])

    @precondition(lambda self: len(self.world.subscriptions) < 4)
    @rule(event_type=TYPES, max_attempts=st.none() | LIMITS, verified=st.booleans())
    def subscribe(self, event_type: str, max_attempts: int | None, *, verified: bool) -> None:
        """Add a subscription."""
        made = self.run(self.flow.subscribe(event_type, verified=verified, max_attempts=max_attempts))
        self.world.subscriptions[made] = Subscription(made, event_type, True, verified, max_attempts)

    @rule(data=st.data(), way=HOLDS)
    def hold(self, data: st.DataObject, way: str) -> None:
        """Pause, disable or unverify a subscription."""
        self.hold_one(data.draw(st.sampled_from(list(self.world.subscriptions.values()))), way)

    def hold_one(self, subscription: Subscription, way: str) -> None:
        """Hold this subscription. Only an operator with SQL can take a verification back."""
        match way:
            case "pause":
                self.run(subscriptions.update(self.flow.daemon, subscription.id, {"paused": True}))
                subscription.paused = True
            case "disable":
                self.run(subscriptions.update(self.flow.daemon, subscription.id, {"active": False}))
                subscription.active = False
            case _:
                unverify = "update webhookd.subscriptions set verified = false where id = $1"
                self.run(self.flow.superuser.execute(unverify, subscription.id))
                subscription.verified = False

    @rule(data=st.data(), verify=st.booleans())
    def move(self, data: st.DataObject, *, verify: bool) -> None:
        """Change the address: until the new one is verified, a verified subscription stays as it was."""
        subscription = data.draw(st.sampled_from(list(self.world.subscriptions.values())))
        changes = {"callback_url": f"{ADDRESS}/{uuid4()}"}
        self.run(subscriptions.update(self.flow.daemon, subscription.id, changes))
        if verify:
            self.run(self.flow.verify(subscription.id))
            subscription.verified = True

    @rule()
    def resume(self) -> None:
        """Resume, enable and verify every subscription."""
        for subscription in self.world.subscriptions.values():
            changes = {"active": True, "paused": False}
            self.run(subscriptions.update(self.flow.daemon, subscription.id, changes))
            if not subscription.verified:
                self.run(self.flow.verify(subscription.id))
            subscription.active, subscription.paused, subscription.verified = True, False, True

    @rule(
        size=SIZES,
        slots=SIZES,
        limits=st.tuples(LIMITS, LIMITS),
        answers=st.lists(ANSWERS, min_size=1, max_size=4),
    )
    def go_round(self, size: int, slots: int, limits: tuple[int, int], answers: list[int]) -> None:
        """Run all stages once, so that states at the end of a delivery occur often enough."""
        held = [lease for lease in self.leases if self.held(lease)]
        for place, (lease, answer) in enumerate(zip(held, answers, strict=False)):
            self.send(lease, answer, at_once=place % 2 == 0)
        self.apply(limits[0], 4, due_at_once=True)
        self.publish("order.created", None)
        self.route(size)
        self.start(4, 4, limits[1])
        self.claim(size, slots)

    @rule(limits=st.tuples(LIMITS, LIMITS), slots=SIZES)
    def fail_round(self, limits: tuple[int, int], slots: int) -> None:
        """All leased attempts fail, and are retried or dead-lettered under another limit."""
        self.go_round(4, slots, limits, [500] * 4)

    @rule(event_type=TYPES, key=st.none() | st.sampled_from(["k1", "k2"]))
    def publish(self, event_type: str, key: str | None) -> None:
        """Publish; a used key returns its event, or a refusal for another type."""
        known = self.world.keys.get(key or "")
        call = ingest.publish(self.flow.daemon, [ingest.NewEvent(event_type, '{"n": 1.0}', key)])
        if known is not None and self.world.events[known] != event_type:
            assert self.refusal(call) is Refusal.IDEMPOTENCY_CONFLICT
            return
        [accepted] = self.run(call)
        assert accepted.duplicate == (known is not None)
        if known is not None:
            assert accepted.id == known
            return
        self.world.events[accepted.id] = event_type
        self.world.unrouted.append(accepted.id)
        if key is not None:
            self.world.keys[key] = accepted.id
        self.run(self.flow.superuser.execute("insert into public.client values ($1, $2)", accepted.id, key))

    # Routing and orchestration -----------------------------------------------------------------------------

    @rule(size=SIZES)
    def route(self, size: int) -> None:
        """Route the oldest events."""
        taken, self.world.unrouted = self.world.unrouted[:size], self.world.unrouted[size:]
        expected = {
            (event_id, subscription.id) for event_id in taken for subscription in self.world.routes(event_id)
        }
        routed = self.run(self.flow.route(size))
        assert (routed.events, routed.sagas) == (len(taken), len(expected))
        made = self.new_sagas()
        assert {(saga.event_id, saga.subscription.id) for saga in made} == expected

    @rule(window=SIZES, quota=SIZES, limit=LIMITS)
    def start(self, window: int, quota: int, limit: int) -> None:
        """Run one tick over every subscription: bounded by window, quota and due work."""
        due = {
            subscription.id: self.world.due(subscription)
            for subscription in self.world.subscriptions.values()
        }
        shares = [sagas.Share(subscription_id, quota) for subscription_id in due]
        outcome = self.run(sagas.start(self.flow.daemon, shares, window, limit))
        assert {started.subscription_id for started in outcome} == set(due)
        made = self.new_jobs()
        for started in outcome:
            subscription = self.world.subscriptions[started.subscription_id]
            room = max(0, min(quota, window - self.world.in_progress(subscription)))
            jobs_made = [job for job in made if job.saga.subscription is subscription]
            dead_lettered = [self.world.sagas[dead.saga_id] for dead in started.dead_lettered]
            taken = min(room, len(due[subscription.id])) if subscription.deliverable else 0
            assert len(jobs_made) + len(dead_lettered) == taken
            assert started.started == len(jobs_made)
            assert all(
                job.saga in due[subscription.id] and not self.world.exhausted(job.saga, limit)
                for job in jobs_made
            )
            assert all(
                saga in due[subscription.id] and self.world.exhausted(saga, limit) for saga in dead_lettered
            )
            for job in jobs_made:
                job.saga.move(SagaStatus.IN_PROGRESS)
                self.world.jobs[job.id] = job
            self.add_dead_letters(started.dead_lettered)

    @rule(limit=LIMITS, size=SIZES, due_at_once=st.booleans())
    def apply(self, limit: int, size: int, *, due_at_once: bool) -> None:
        """Apply the oldest results."""
        waiting = sorted(job.id for job in self.world.jobs.values() if job.unapplied)[:size]
        policy = sagas.RetryPolicy(limit, 0 if due_at_once else MUCH, 3600, 0.5)
        applied = self.run(sagas.apply_results(self.flow.daemon, size, policy, failing_after=MUCH))
        assert sorted(transition.job_id or 0 for transition in applied) == waiting
        for transition in applied:
            assert transition.problem is None
            job = self.world.jobs[transition.job_id or 0]
            assert transition.status is self.world.apply(job, limit, due_at_once=due_at_once)
            if transition.status is SagaStatus.DEAD_LETTERED:
                assert transition.dead_letter_id is not None
                self.world.dead_letters[transition.dead_letter_id] = job.saga

    @rule(limit=LIMITS)
    def lower_limit(self, limit: int) -> None:
        """The sweep after a reload dead-letters every waiting saga at the limit, held ones included."""
        expected = {saga.id for saga in self.world.sagas.values() if self.world.exhausted(saga, limit)}
        swept = self.run(sagas.dead_letter_exhausted(self.flow.daemon, 0, MUCH, limit))
        assert {transition.saga_id for transition in swept.dead_lettered} == expected
        self.add_dead_letters(swept.dead_lettered)

    @rule()
    def let_time_pass(self) -> None:
        """Make every retry due."""
        self.run(
            self.flow.superuser.execute(
                "update webhookd.webhook_delivery_sagas set next_attempt_at = now() "
                "where status = 'PendingRetry' and next_attempt_at > now()"
            )
        )
        for saga in self.world.sagas.values():
            saga.due = True

    # Workers and the reaper --------------------------------------------------------------------------------

    @rule(wanted=SIZES, slots=SIZES)
    def claim(self, wanted: int, slots: int) -> None:
        """Lease attempts: none of a held subscription, and per subscription no more than its slots."""
        expected = self.world.claimed(wanted, slots)
        leased = self.run(self.flow.claim(wanted, slots=slots))
        assert sorted(lease.job_id for lease in leased) == expected
        for lease in leased:
            job = self.world.jobs[lease.job_id]
            assert (lease.saga_id, lease.attempt) == (job.saga.id, job.saga.attempt_count + 1)
            job.status, job.lease_token, job.expired = AttemptStatus.LEASED, lease.lease_token, False
        self.leases += leased

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), answer=ANSWERS, at_once=st.booleans())
    def report(self, data: st.DataObject, answer: int, *, at_once: bool) -> None:
        """Send and report: in time, late, again, or after the lease was lost; successes also in one call."""
        lease = self.some_lease(data)
        if key_of(lease) not in self.released:  # a released lease has nothing to report
            self.send(lease, answer, at_once=at_once)

    def send(self, lease: attempts.Lease, response_status: int, *, at_once: bool) -> None:
        """Send the request if it was not sent yet, and report its answer; `at_once` applies a success too."""
        if key_of(lease) not in self.sent:
            self.sent.add(key_of(lease))
            receipt = (lease.saga_id, lease.job_id, response_status)
            self.run(self.flow.superuser.execute("insert into public.receipts values ($1, $2, $3)", *receipt))
        job = self.world.jobs[lease.job_id]
        if at_once and 200 <= response_status < 300:
            self.complete(lease, response_status)
            return
        verdict = self.run(self.flow.report(lease, response_status))
        if job.lease_token != lease.lease_token:
            assert verdict is ReportVerdict.STALE
        elif job.status is not AttemptStatus.LEASED:
            assert verdict is ReportVerdict.DUPLICATE
        else:
            assert verdict is ReportVerdict.ACCEPTED
            delivered = 200 <= response_status < 300
            job.status = AttemptStatus.COMPLETED if delivered else AttemptStatus.FAILED
            job.error_code = None if delivered else f"HTTP_{response_status}"

    def complete(self, lease: attempts.Lease, response_status: int) -> None:
        """Record and apply a success in one call, if the lease is still held."""
        job, held = self.world.jobs[lease.job_id], self.held(lease)
        report = attempts.Report(lease.job_id, lease.lease_token, response_status)
        completed = self.run(sagas.complete(self.flow.daemon, [report]))
        assert completed == ({job.id: job.saga.subscription.id} if held else {})
        if held:
            job.status = AttemptStatus.COMPLETED
            self.world.apply(job, MUCH, due_at_once=False)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def report_with_wrong_token(self, data: st.DataObject) -> None:
        """A report with an unknown token changes nothing."""
        lease = self.some_lease(data)._replace(lease_token=uuid4())
        assert self.run(self.flow.report(lease)) is ReportVerdict.STALE

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Release a lease before sending; a lost lease cannot be released."""
        lease = self.some_lease(data)
        if key_of(lease) in self.sent:
            return
        job = self.world.jobs[lease.job_id]
        held = self.held(lease)
        assert self.run(attempts.release(self.flow.daemon, [lease])) == ([job.id] if held else [])
        self.released.add(key_of(lease))
        if held:
            job.status, job.lease_token = AttemptStatus.PENDING, None

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), max_lease_resets=st.none() | st.integers(0, 1))
    def expire(self, data: st.DataObject, max_lease_resets: int | None) -> None:
        """Let a lease expire, and perhaps reset it at once."""
        lease = self.some_lease(data)
        if self.held(lease):
            self.run(self.flow.expire_lease(lease.job_id))
            self.world.jobs[lease.job_id].expired = True
        if max_lease_resets is not None:
            self.reap(4, max_lease_resets)

    @rule(size=SIZES, max_lease_resets=st.integers(0, 2))
    def reap(self, size: int, max_lease_resets: int) -> None:
        """Reset expired leases; fail an attempt that had too many resets."""
        expired = {
            job.id for job in self.world.jobs.values() if job.status is AttemptStatus.LEASED and job.expired
        }
        resets = self.run(attempts.reset_expired(self.flow.daemon, size, max_lease_resets))
        assert {reset.job_id for reset in resets} <= expired
        assert len(resets) == min(size, len(expired))
        for reset in resets:
            job = self.world.jobs[reset.job_id]
            job.lease_token = None
            if job.lease_resets < max_lease_resets:
                job.status, job.lease_resets = AttemptStatus.PENDING, job.lease_resets + 1
            else:
                job.status, job.error_code = AttemptStatus.FAILED, "LEASE_EXPIRED"
            assert (reset.status, reset.lease_resets) == (job.status, job.lease_resets)

    # Dead letters ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.dead_letters)
    @rule(data=st.data(), hold=st.none() | HOLDS)
    def requeue(self, data: st.DataObject, hold: str | None) -> None:
        """Create a new saga once; later return its id; refuse while nothing is routed to the subscription."""
        dead_letter_id = data.draw(st.sampled_from(sorted(self.world.dead_letters)))
        dead = self.world.dead_letters[dead_letter_id]
        if hold is not None:
            self.hold_one(dead.subscription, hold)
        known = [saga.id for saga in self.world.sagas.values() if saga.dead_letter_id == dead_letter_id]
        call = self.flow.requeue(dead_letter_id)
        if not known and not dead.subscription.routable:
            assert self.refusal(call) is Refusal.SUBSCRIPTION_HELD
            return
        requeued = self.run(call)
        if known:
            assert (requeued.saga_id, requeued.created) == (known[0], False)
            return
        assert requeued.created
        [made] = self.new_sagas()
        assert (made.id, made.event_id, made.subscription) == (
            requeued.saga_id,
            dead.event_id,
            dead.subscription,
        )

    @rule(size=SIZES, dry_run=st.booleans())
    def requeue_many(self, size: int, *, dry_run: bool) -> None:
        """Requeue the oldest dead letters that have no new saga and whose subscription may deliver."""
        matched = sorted(self.world.dead_letters)[:size]
        requeued_before = {saga.dead_letter_id for saga in self.world.sagas.values()}
        possible = [
            dead_letter_id
            for dead_letter_id in matched
            if dead_letter_id not in requeued_before
            and self.world.dead_letters[dead_letter_id].subscription.routable
        ]
        outcome = self.run(
            dead_letters.requeue_many(self.flow.daemon, dead_letters.Filter(), 0, size, dry_run=dry_run)
        )
        assert (outcome.matched, outcome.requeued) == (len(matched), len(possible))
        made = [saga.dead_letter_id for saga in self.new_sagas()]
        assert made == ([] if dry_run else possible)

    # Resends, retries and replays --------------------------------------------------------------------------

    @precondition(lambda self: self.world.sagas)
    @rule(data=st.data(), hold=st.none() | HOLDS)
    def resend(self, data: st.DataObject, hold: str | None) -> None:
        """Repeat a finished saga, one at a time; that of a dead letter is its requeue."""
        saga = data.draw(st.sampled_from(list(self.world.sagas.values())))
        if hold is not None:
            self.hold_one(saga.subscription, hold)
        call = sagas.resend(self.flow.daemon, saga.id)
        if not saga.finished:
            assert self.refusal(call) is Refusal.WRONG_STATUS
            return
        if saga.status is SagaStatus.DEAD_LETTERED:
            again = [other for other in self.world.sagas.values() if other.resent_from == saga.id]
            known = again[0] if again else None
        else:
            known = self.world.live_resend(saga)
        if known is None and not saga.subscription.routable:
            assert self.refusal(call) is Refusal.SUBSCRIPTION_HELD
            return
        resent = self.run(call)
        if known is not None:
            assert (resent.saga_id, resent.created) == (known.id, False)
            return
        [made] = self.new_sagas()
        assert resent == (made.id, saga.subscription.id, True)
        assert (made.event_id, made.subscription, made.resent_from) == (
            saga.event_id,
            saga.subscription,
            saga.id,
        )

    @precondition(lambda self: self.world.sagas)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """Make a waiting retry due; refuse any other saga."""
        saga = data.draw(st.sampled_from(list(self.world.sagas.values())))
        call = sagas.retry(self.flow.daemon, saga.id)
        if saga.status is not SagaStatus.PENDING_RETRY:
            assert self.refusal(call) is Refusal.WRONG_STATUS
            return
        assert self.run(call) == saga.subscription.id
        saga.due = True

    @rule(data=st.data(), include_all=st.booleans(), dry_run=st.booleans(), repeat=st.booleans())
    def replay(self, data: st.DataObject, *, include_all: bool, dry_run: bool, repeat: bool) -> None:
        """Route past events that a subscription did not get, and repeat the others; once, however often."""
        subscription = data.draw(st.sampled_from(list(self.world.subscriptions.values())))
        now = self.run(self.flow.daemon.fetchval("select clock_timestamp()"))
        what = router.Replay(subscription.id, now - timedelta(days=1), now, None, include_all, now)
        if not subscription.routable:
            assert self.refusal(self.replayed(what, dry_run=dry_run)) is Refusal.SUBSCRIPTION_HELD
            return
        mine = [saga for saga in self.world.sagas.values() if saga.subscription is subscription]
        latest = {saga.event_id: saga for saga in sorted(mine, key=attrgetter("id"))}
        matching = {
            event_id
            for event_id, event_type in self.world.events.items()
            if event_type == subscription.event_type and event_id not in self.world.unrouted
        }
        expected: set[tuple[int, int | None]] = {(event_id, None) for event_id in matching - set(latest)}
        if include_all:
            expected |= {
                (saga.event_id, saga.id)
                for saga in latest.values()
                if saga.event_id in matching and saga.finished
            }
        outcome = self.run(self.replayed(what, dry_run=dry_run))
        assert outcome.created == len(expected)
        made = {(saga.event_id, saga.resent_from) for saga in self.new_sagas()}
        assert made == (set() if dry_run else expected)
        if repeat and not dry_run:
            assert self.run(self.replayed(what, dry_run=False)).created == 0
            assert self.new_sagas() == []

    def replayed(self, what: router.Replay, *, dry_run: bool) -> Awaitable[router.Replayed]:
        """Replay everything in one batch."""
        return router.replay(self.flow.daemon, what, 0, MUCH, dry_run=dry_run)

    # Invariants after every step ---------------------------------------------------------------------------

    @invariant()
    def tables_equal_the_model(self) -> None:
        """Compares every saga, attempt and dead letter, and the queue."""
        assert self.rows("select event_id from webhookd.event_routing_queue") == {
            (event_id,) for event_id in self.world.unrouted
        }
        assert self.rows(
            "select id, event_id, subscription_id, dead_letter_id, resent_from, status, attempt_count, "
            "final_error_code, "
            "job_id from webhookd.webhook_delivery_sagas"
        ) == {
            (
                saga.id,
                saga.event_id,
                saga.subscription.id,
                saga.dead_letter_id,
                saga.resent_from,
                saga.status.value,
                saga.attempt_count,
                saga.error_code,
                max((job.id for job in self.world.jobs.values() if job.saga is saga), default=None),
            )
            for saga in self.world.sagas.values()
        }
        assert self.rows(
            "select id, saga_id, status, lease_token, lease_resets, error_code, "
            "result_applied_at is not null from webhookd.webhook_delivery_jobs"
        ) == {
            (
                job.id,
                job.saga.id,
                job.status.value,
                job.lease_token,
                job.lease_resets,
                job.error_code,
                job.applied,
            )
            for job in self.world.jobs.values()
        }
        assert self.rows("select id, saga_id from webhookd.dead_letters") == {
            (dead_letter_id, saga.id) for dead_letter_id, saga in self.world.dead_letters.items()
        }

    @invariant()
    def no_promise_is_broken(self) -> None:
        """The queries of the promises return nothing."""
        assert self.run(broken_invariants(self.flow.superuser)) == []

    # Helpers -----------------------------------------------------------------------------------------------

    def rows(self, query: str) -> set[tuple[object, ...]]:
        """Return the rows of a query."""
        return {tuple(row) for row in self.run(self.flow.daemon.fetch(query))}

    def held(self, lease: attempts.Lease) -> bool:
        """Tell whether the attempt still belongs to this lease."""
        job = self.world.jobs[lease.job_id]
        return job.status is AttemptStatus.LEASED and job.lease_token == lease.lease_token

    def some_lease(self, data: st.DataObject) -> attempts.Lease:
        """Draw a held lease more often than any other."""
        held = [lease for lease in self.leases if self.held(lease)]
        return data.draw(st.sampled_from(held or self.leases) | st.sampled_from(self.leases))

    def refusal(self, call: Awaitable[object]) -> Refusal:
        """Return why a call was refused."""
        try:
            self.run(call)
        except asyncpg.PostgresError as refused:
            return Refusal(refused.sqlstate)
        raise AssertionError("the call was not refused")

    def new_sagas(self) -> list[Saga]:
        """Add the sagas that the last step created to the model."""
        rows = self.run(
            self.flow.daemon.fetch(
                "select id, event_id, subscription_id, dead_letter_id, resent_from "
                "from webhookd.webhook_delivery_sagas where id > $1 order by id",
                max(self.world.sagas, default=0),
            )
        )
        made = [Saga(row[0], row[1], self.world.subscriptions[row[2]], row[3], row[4]) for row in rows]
        self.world.sagas.update((saga.id, saga) for saga in made)
        return made

    def new_jobs(self) -> list[Job]:
        """Return the attempts that the last step created."""
        rows = self.run(
            self.flow.daemon.fetch(
                "select id, saga_id from webhookd.webhook_delivery_jobs where id > $1 order by id",
                max(self.world.jobs, default=0),
            )
        )
        return [Job(row[0], self.world.sagas[row[1]]) for row in rows]

    def add_dead_letters(self, transitions: list[sagas.Transition]) -> None:
        """Add the dead letters of waiting sagas to the model."""
        for transition in transitions:
            assert transition.dead_letter_id is not None
            saga = self.world.sagas[transition.saga_id]
            saga.move(SagaStatus.DEAD_LETTERED)
            self.world.dead_letters[transition.dead_letter_id] = saga


def key_of(lease: attempts.Lease) -> tuple[int, UUID]:
    """Return what identifies a lease."""
    return lease.job_id, lease.lease_token


async def audited(database: Database) -> Flow:
    """Open a database that records every change of a saga."""
    flow = await Flow.open(database)
    await flow.superuser.execute(AUDIT)
    return flow


DELIVERY = Drive(Delivery, audited, steps=60)


def test_any_order_of_steps_keeps_every_promise(cluster: Cluster) -> None:
    """No order of steps makes the tables differ from the model or breaks a promise."""
    DELIVERY.go(cluster, max_examples=EXAMPLES)


# One small mistake per stage.
MISTAKES = [
    Weakened("publish_many", "where e.id <> g.id\n", "where false\n"),
    Weakened("route_events", "and s.routable", ""),
    Weakened("start_due_sagas", "- a.active", "- 0"),
    Weakened("start_due_sagas", "d.attempt_count < w.attempt_limit", "true"),
    Weakened("start_due_sagas", "and u.deliverable"),
    Weakened("claim_jobs", "and k.deliverable"),
    Weakened("claim_jobs", "c.jobs <= subscription_slots - coalesce(b.used, 0)", "true"),
    Weakened("choose_jobs", "and u.deliverable"),
    Weakened("choose_jobs", "subscription_slots - coalesce(b.used, 0)", "1000"),
    Weakened("complete_deliveries", "and j.lease_token = g.lease_token"),
    Weakened("complete_deliveries", "finished_at = now(), result_applied_at = now()", "finished_at = now()"),
    Weakened("report_results", "and j.lease_token = g.lease_token"),
    Weakened("release_jobs", "lease_token = null", "lease_token = j.lease_token"),
    Weakened("settle_results", "when s.attempt_count + 1 >=", "when s.attempt_count >="),
    Weakened(
        "settle_results",
        "coalesce(u.max_attempts, settle_results.max_attempts)",
        "settle_results.max_attempts",
    ),
    Weakened("settle_results", "coalesce(d.error_code, s.final_error_code)", "d.error_code"),
    Weakened("count_attempts", "if cardinality(subscription_ids) = 1 then", "if false then"),
    Weakened("count_attempts", "count(*) filter (where c.status = 'DeadLettered')", "0"),
    Weakened(
        "dead_letter_sagas",
        "dead_lettered = t.dead_lettered + excluded.dead_lettered",
        "dead_lettered = t.dead_lettered",
    ),
    Weakened("dead_letter_exhausted", "l.attempt_count >=", "l.attempt_count >"),
    Weakened(
        "reset_expired_leases", "j.lease_resets >= max_lease_resets", "j.lease_resets > max_lease_resets"
    ),
    Weakened("requeue_dead_letter", "not letter.routable", "false"),
    Weakened("requeue_dead_letters", "requeued > 0 and not dry_run", "requeued > 0"),
    Weakened("resend_delivery", "finished.status not in ('Completed', 'DeadLettered')", "false"),
    Weakened("resend_delivery", "not finished.routable", "false"),
    Weakened("retry_delivery", "waiting.status <> 'PendingRetry'", "false"),
    Weakened("replay_events", "not subscription.routable", "false"),
]


@pytest.mark.once
@pytest.mark.parametrize("mistake", first_in_gate(MISTAKES), ids=str)
def test_machine_finds_a_planted_mistake(cluster: Cluster, mistake: Weakened) -> None:
    """The test above fails if a function is wrong."""
    DELIVERY.finds(cluster, mistake)
