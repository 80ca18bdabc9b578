"""Decisions of the orchestrator: delays, limits, windows, failing endpoints, and isolation of bad rows."""

import hashlib
import math
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.flow import POLICY, Flow
from webhookd.core.states import SagaStatus
from webhookd.deliveries import attempts, sagas


def backoff_seconds(
    saga_id: int, attempt: int, policy: sagas.RetryPolicy, retry_after_seconds: float | None
) -> float:
    """Compute the documented formula in Python."""
    digest = hashlib.sha256(f"{saga_id}:{attempt}".encode()).hexdigest()
    spread = int(digest[:13], 16) / 2**52
    exponential = (
        policy.base_delay_seconds * 2.0 ** min(max(attempt - 1, 0), 62) * (1 + policy.jitter * spread)
    )
    return min(policy.max_delay_seconds, max(retry_after_seconds or 0, exponential))


POLICIES = st.builds(
    sagas.RetryPolicy, st.just(5), st.floats(0, 31536000), st.floats(0, 31536000), st.floats(0, 1)
)
ATTEMPTS = st.integers(1, 20) | st.integers(1, 2**31 - 1)
RETRY_AFTERS = st.none() | st.floats(0, 31536000)


# The examples share one database, because they change nothing.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 2**62), ATTEMPTS, POLICIES, RETRY_AFTERS)
async def test_delay_follows_the_documented_formula(
    flow: Flow, saga_id: int, attempt: int, policy: sagas.RetryPolicy, retry_after_seconds: float | None
) -> None:
    """For any policy and attempt, PostgreSQL and the formula agree and stay within the limits."""
    delay: timedelta = await flow.superuser.fetchval(
        "select webhookd.backoff($1, $2, $3, $4, $5, $6)", saga_id, attempt, *policy[1:], retry_after_seconds
    )
    expected = backoff_seconds(saga_id, attempt, policy, retry_after_seconds)
    # PostgreSQL keeps 15 digits of a double, and an interval counts microseconds.
    assert math.isclose(delay.total_seconds(), expected, rel_tol=1e-14, abs_tol=2e-6)


@pytest.mark.parametrize(
    ("policy", "retry_after_seconds", "expected_seconds"),
    [
        pytest.param(POLICY._replace(base_delay_seconds=30), None, 30, id="the base delay first"),
        pytest.param(POLICY._replace(base_delay_seconds=30), 100, 100, id="the endpoint asks for longer"),
        pytest.param(POLICY._replace(base_delay_seconds=30), 10, 30, id="the endpoint asks for less"),
        pytest.param(POLICY._replace(base_delay_seconds=30), 1e9, 3600, id="the endpoint asks for too long"),
        pytest.param(
            POLICY._replace(base_delay_seconds=30, max_delay_seconds=20), None, 20, id="the cap is below"
        ),
    ],
)
async def test_retry_is_due_after_its_delay(
    flow: Flow, policy: sagas.RetryPolicy, retry_after_seconds: float | None, expected_seconds: float
) -> None:
    """The due time follows the policy and the Retry-After that the worker reported."""
    await flow.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await flow.claim()
    report = attempts.Report(lease.job_id, lease.lease_token, 503, retry_after_seconds=retry_after_seconds)
    await attempts.report(flow.daemon, [report])
    [retried] = await flow.apply(policy)
    applied_at = await flow.daemon.fetchval("select result_applied_at from webhookd.webhook_delivery_jobs")
    assert retried.next_attempt_at - applied_at == timedelta(seconds=expected_seconds)
    assert await flow.start() == []


async def test_subscription_policy_overrides_the_configuration(flow: Flow) -> None:
    """The delay and the limit of the subscription win over the configuration."""
    await flow.subscribe(max_attempts=2, base_delay_seconds=7)
    await flow.publish()
    await flow.route()
    [retried] = await flow.attempt(500)
    applied_at = await flow.daemon.fetchval("select result_applied_at from webhookd.webhook_delivery_jobs")
    assert retried.next_attempt_at - applied_at == timedelta(seconds=7)
    await flow.superuser.execute("update webhookd.webhook_delivery_sagas set next_attempt_at = now()")
    [dead_lettered] = await flow.attempt(500)
    assert (dead_lettered.status, dead_lettered.attempt_count) == (SagaStatus.DEAD_LETTERED, 2)


async def test_attempts_of_a_saga_have_distinct_due_times(flow: Flow) -> None:
    """Even without a delay, or after the clock moved back, attempts differ in attempt_at."""
    await flow.saga_in(SagaStatus.PENDING)
    ahead = datetime.now(UTC) + timedelta(hours=1)
    # Scheduled by a clock that was an hour ahead; then the attempt starts as if it were due.
    await flow.superuser.execute("update webhookd.webhook_delivery_sagas set next_attempt_at = $1", ahead)
    await flow.superuser.execute(
        """
        with moved as (
            update webhookd.webhook_delivery_sagas
            set status = 'InProgress', job_id = nextval('webhookd.webhook_delivery_jobs_id_seq')
            returning job_id, id, subscription_id, event_id, 1, next_attempt_at)
        insert into webhookd.webhook_delivery_jobs (
            id, saga_id, subscription_id, event_id, attempt, attempt_at)
        overriding system value select * from moved
        """
    )
    [lease] = await flow.claim()
    await flow.report(lease, 500)
    [retried] = await flow.apply()
    assert retried.next_attempt_at == ahead + timedelta(microseconds=1)


async def test_lowered_limit_dead_letters_exhausted_sagas(flow: Flow) -> None:
    """The sweep dead-letters waiting and held sagas in batches, and keeps their error and due time."""
    first = await flow.saga_in(SagaStatus.PENDING_RETRY)
    paused = await flow.daemon.fetchval("select max(id) from webhookd.subscriptions")
    second = await flow.saga_in(SagaStatus.PENDING_RETRY, subscription_id=paused)
    await flow.superuser.execute("update webhookd.subscriptions set active = false")
    due_times = "select array_agg(next_attempt_at order by id) from webhookd.webhook_delivery_sagas"
    before = await flow.daemon.fetchval(due_times)

    assert (await sagas.dead_letter_exhausted(flow.daemon, 0, 10, max_attempts=5)).dead_lettered == []
    swept: list[sagas.Transition] = []
    last_saga_id: int | None = 0
    while last_saga_id is not None:
        last_saga_id, dead_lettered = await sagas.dead_letter_exhausted(
            flow.daemon, last_saga_id, 1, max_attempts=1
        )
        swept += dead_lettered
    assert {transition.saga_id for transition in swept} >= {first, second}
    assert {transition.error_code for transition in swept} == {"HTTP_500"}
    assert await flow.daemon.fetchval(due_times) == before


async def test_exhausted_saga_is_dead_lettered_when_due(flow: Flow) -> None:
    """Without a sweep, the next start dead-letters the saga and creates no attempt."""
    saga_id = await flow.saga_in(SagaStatus.PENDING_RETRY)
    [started] = await flow.start(max_attempts=1)
    assert (started.started, [dead.saga_id for dead in started.dead_lettered]) == (0, [saga_id])
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_jobs") == 1


async def test_flood_does_not_delay_other_subscriptions(flow: Flow) -> None:
    """Every subscription gets its quota per tick, and never more than its window."""
    flooded = await flow.subscribe("flood")
    small = [await flow.subscribe("drop") for _ in range(3)]
    for _ in range(50):
        await flow.publish("flood")
    await flow.publish("drop")
    await flow.route()
    started = {one.subscription_id: one for one in await flow.start(quota=4, window=6)}
    assert {one: started[one].started for one in (flooded, *small)} == {flooded: 4} | dict.fromkeys(small, 1)
    assert started[small[0]].drained
    assert not started[flooded].drained
    [again] = await flow.start(quota=4, window=6)
    assert (again.subscription_id, again.started, again.active) == (flooded, 2, 6)


async def test_attempts_are_created_in_turns(flow: Flow) -> None:
    """Claims go by id, so a subscription with little work does not wait behind another's whole window."""
    first, second = await flow.subscribe("first"), await flow.subscribe("second")
    for _ in range(3):
        await flow.publish("first")
    for _ in range(2):
        await flow.publish("second")
    await flow.route()
    await flow.start([second, first])
    made = await flow.daemon.fetch("select subscription_id from webhookd.webhook_delivery_jobs order by id")
    assert [row[0] for row in made] == [first, second, first, second, first]


async def test_marks_skip_nothing_that_is_due(flow: Flow) -> None:
    """A tick with the marks of the previous tick continues where it stopped."""
    subscription_id = await flow.subscribe()
    for _ in range(5):
        await flow.publish()
    await flow.route()
    share = sagas.Share(subscription_id, quota=2)
    total = 0
    for _ in range(3):
        [started] = await sagas.start(flow.daemon, [share], 64, 5)
        total += started.started
        share = sagas.Share(subscription_id, 2, started.next_saga_mark, started.next_job_mark)
    assert (total, started.active) == (5, 5)


async def test_failing_endpoint_gets_one_request_at_a_time(flow: Flow) -> None:
    """From the n-th failure in a row on there is one active attempt and one lease, until a success."""
    subscription_id = await flow.subscribe()
    for _ in range(6):
        await flow.publish()
    await flow.route()
    await flow.start(quota=4)
    for lease in await flow.claim(wanted=3):
        await flow.report(lease, 500)
    await flow.apply(failing_after=3)
    health = await flow.daemon.fetchrow("select * from webhookd.endpoint_health")
    assert health is not None
    assert (health["consecutive_failures"], health["last_error_code"]) == (3, "HTTP_500")
    assert health["failing_since"] is not None

    # One attempt existed before the endpoint counted as failing: it fills the window of one and is the probe.
    [tick] = await flow.start([subscription_id])
    assert (tick.started, tick.active, tick.drained) == (0, 1, False)
    [probe] = await flow.claim()
    assert await flow.claim() == []
    await flow.report(probe, 200)
    await flow.apply(failing_after=3)
    health = await flow.daemon.fetchrow("select * from webhookd.endpoint_health")
    assert health is not None
    assert (health["consecutive_failures"], health["failing_since"]) == (0, None)
    [tick] = await flow.start()
    assert tick.started == 5
    assert len(await flow.claim()) == 5


async def test_older_attempts_of_a_failing_endpoint_are_leased_one_at_a_time(flow: Flow) -> None:
    """One request probes the endpoint, even if a full window waits; other subscriptions are not delayed."""
    await flow.subscribe("bad")
    for _ in range(5):
        await flow.publish("bad")
    await flow.route()
    await flow.start()
    [lease] = await flow.claim(wanted=1)
    await flow.report(lease, 500)
    await flow.apply(failing_after=1)
    other = await flow.subscribe("good")
    await flow.publish("good")
    await flow.route()
    await flow.start()
    leased = await flow.claim()
    assert len(leased) == 2
    assert other in {lease.subscription_id for lease in leased}
    assert await flow.claim() == []


async def test_lost_leases_do_not_count_against_the_endpoint(flow: Flow) -> None:
    """A worker that dies or breaks says nothing about the endpoint."""
    await flow.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await flow.claim()
    await attempts.report(
        flow.daemon, [attempts.Report(lease.job_id, lease.lease_token, error_code="INTERNAL")]
    )
    await flow.apply()
    await flow.start()
    [lease] = await flow.claim()
    await flow.expire_lease(lease.job_id)
    await attempts.reset_expired(flow.daemon, 1, max_lease_resets=0)
    [lost] = await flow.apply()
    assert (lost.error_code, lost.attempt_count) == ("LEASE_EXPIRED", 2)
    assert await flow.daemon.fetch("select * from webhookd.endpoint_health") == []


async def test_results_of_one_batch_count_in_their_order(flow: Flow) -> None:
    """Failures in a row are the failures after the last success."""
    await flow.subscribe()
    for _ in range(5):
        await flow.publish()
    await flow.route()
    await flow.start()
    leases = sorted(await flow.claim())
    for lease, answer in zip(leases, [500, 500, 200, 500, 503], strict=True):
        await flow.report(lease, answer)
    await flow.apply(failing_after=2)
    health = await flow.daemon.fetchrow(
        "select consecutive_failures, failing_since is not null, last_error_code "
        "from webhookd.endpoint_health"
    )
    assert health is not None
    assert tuple(health) == (2, True, "HTTP_503")


async def test_bad_result_does_not_block_other_results(flow: Flow) -> None:
    """A result that cannot be applied is reported; all other results are applied, and it can be skipped."""
    await flow.subscribe()
    for _ in range(3):
        await flow.publish()
    await flow.route()
    await flow.start()
    leases = sorted(await flow.claim())
    for lease in leases:
        await flow.report(lease, 500)
    # The counter of the second saga is at its maximum: adding one raises a data error.
    bad = leases[1]
    await flow.superuser.execute("set session_replication_role = replica")
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_sagas set attempt_count = 2147483647 where id = $1", bad.saga_id
    )
    applied = {transition.job_id: transition for transition in await flow.apply()}
    assert applied[bad.job_id].status is None
    assert "out of range" in (applied[bad.job_id].problem or "")
    assert {applied[leases[0].job_id].status, applied[leases[2].job_id].status} == {SagaStatus.PENDING_RETRY}
    assert [transition.job_id for transition in await flow.apply()] == [bad.job_id]
    assert await sagas.apply_results(flow.daemon, 10, POLICY, 10, excluded_job_ids=[bad.job_id]) == []


async def test_bad_saga_does_not_block_start_or_sweep(flow: Flow) -> None:
    """A waiting saga that cannot be dead-lettered is reported with its reason; all others proceed."""
    subscription_id = await flow.subscribe()
    for _ in range(3):
        await flow.publish()
    await flow.route()
    retried = await flow.attempt(500)
    bad = retried[0].saga_id
    await flow.superuser.execute(
        f"alter table webhookd.dead_letters add constraint planted check (saga_id <> {bad}) not valid"
    )
    other = await flow.subscribe("other")
    await flow.publish("other")
    await flow.route()
    started = {one.subscription_id: one for one in await flow.start(max_attempts=1)}
    assert started[other].started == 1
    outcomes = {dead.saga_id: dead.status for dead in started[subscription_id].dead_lettered}
    assert len(outcomes) == 3
    assert outcomes.pop(bad) is None
    assert set(outcomes.values()) == {SagaStatus.DEAD_LETTERED}
    swept = await sagas.dead_letter_exhausted(flow.daemon, 0, 10, max_attempts=1)
    assert swept.last_saga_id is not None
    assert [(dead.saga_id, dead.status) for dead in swept.dead_lettered] == [(bad, None)]


async def test_result_for_a_saga_not_in_progress_is_skipped(flow: Flow) -> None:
    """It is reported, not applied, and blocks nothing."""
    await flow.subscribe()
    for _ in range(2):
        await flow.publish()
    await flow.route()
    await flow.start()
    first, second = sorted(await flow.claim())
    for lease in (first, second):
        await flow.report(lease, 200)
    await flow.superuser.execute("set session_replication_role = replica")
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_sagas set status = 'Pending' where id = $1", first.saga_id
    )
    applied = {transition.job_id: transition for transition in await flow.apply()}
    assert applied[second.job_id].status is SagaStatus.COMPLETED
    assert applied[first.job_id].problem == "the saga is Pending, not InProgress"
    assert await flow.saga_status(first.saga_id) is SagaStatus.PENDING


async def test_known_results_are_applied_by_id(flow: Flow) -> None:
    """Only the named results are applied; unknown, unreported and already applied ids change nothing."""
    await flow.subscribe()
    for _ in range(4):
        await flow.publish()
    await flow.route()
    await flow.start()
    first, second, third, fourth = sorted(await flow.claim())
    for lease in (first, second, third):
        await flow.report(lease)
    named = [third.job_id, fourth.job_id, 10**9]
    applied = await sagas.apply_results(flow.daemon, 10, POLICY, 10, reported_job_ids=named)
    assert [transition.job_id for transition in applied] == [third.job_id]
    assert await sagas.apply_results(flow.daemon, 10, POLICY, 10, reported_job_ids=named) == []
    assert sorted(transition.job_id or 0 for transition in await flow.apply()) == [
        first.job_id,
        second.job_id,
    ]


async def test_due_subscriptions_are_paged(flow: Flow) -> None:
    """The list has every deliverable subscription with work, with its oldest due time, in pages."""
    ids = [await flow.subscribe() for _ in range(4)]
    await flow.publish()
    await flow.route()
    await flow.superuser.execute("update webhookd.subscriptions set active = false where id = $1", ids[1])
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_sagas set next_attempt_at = now() + interval '1 hour' "
        "where subscription_id = $1",
        ids[2],
    )
    waiting = await sagas.due_subscriptions(flow.daemon, 0, 10)
    assert [one for one, _ in waiting] == ids
    assert [one for one, due_at in waiting if due_at is not None] == [ids[0], ids[3]]
    assert await sagas.due_subscriptions(flow.daemon, 0, 1) == waiting[:1]
    assert await sagas.due_subscriptions(flow.daemon, ids[0], 2) == waiting[1:3]


async def test_sequence_behind_its_table_is_an_error(flow: Flow) -> None:
    """Job ids that are taken, as after a switch to a replica: the start fails and does not repeat forever."""
    await flow.saga_in(SagaStatus.COMPLETED)
    await flow.publish()
    await flow.route()
    await flow.superuser.execute("select setval('webhookd.webhook_delivery_jobs_id_seq', 1, false)")
    with pytest.raises(asyncpg.UniqueViolationError, match="webhook_delivery_jobs_pkey"):
        await flow.start()
