"""Claiming, loading and reporting attempts at the database: leases, slots, payload loading and verdicts."""

import secrets
from uuid import uuid4

import asyncpg
import pytest

from tests.support.flow import Flow
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts


async def leased(flow: Flow) -> attempts.Lease:
    """Create one delivery and lease its attempt."""
    await flow.saga_in(SagaStatus.IN_PROGRESS)
    [lease] = await flow.claim()
    return lease


async def test_claim_skips_subscriptions_without_free_slots(flow: Flow) -> None:
    """Free slots are the worker's slots minus its requests in flight; a full subscription blocks no other."""
    busy = await flow.subscribe("busy")
    idle = await flow.subscribe("idle")
    for _ in range(10):
        await flow.publish("busy")
    for _ in range(3):
        await flow.publish("idle")
    await flow.route()
    await flow.start()

    async def claimed(used: int) -> list[int]:
        claims = await attempts.claim(flow.daemon, "worker", 4, 60, 2, {busy: used})
        leases = [claim.lease for claim in claims]
        await attempts.release(flow.daemon, leases)
        return sorted(lease.subscription_id for lease in leases)

    assert await claimed(2) == [idle, idle]
    assert await claimed(1) == [busy, idle, idle]
    assert await claimed(0) == [busy, busy, idle, idle]


async def test_claim_continues_at_its_mark(flow: Flow) -> None:
    """The mark is the oldest attempt that is still waiting, claimed or not."""
    await flow.subscribe()
    for _ in range(6):
        await flow.publish()
    await flow.route()
    await flow.start()
    mark, seen = 0, []
    while claims := await attempts.claim(flow.daemon, "worker", 2, 60, 10, first_job_id=mark):
        seen += [claim.lease.job_id for claim in claims]
        mark = claims[0].lease.resume_from
    assert sorted(seen) == list(range(min(seen), min(seen) + 6))


async def test_loaded_message_is_complete(flow: Flow) -> None:
    """A message has the exact payload text, the correlation id, the secret and the headers."""
    created = await flow.daemon.fetchrow(
        "select * from webhookd.create_subscription('order.created', 'https://receiver.example/', "
        """headers => '{"X-Team": "seven"}')"""
    )
    assert created is not None
    await flow.verify(created["subscription_id"])
    await flow.daemon.fetchval(
        "select webhookd.publish('order.created', $1, correlation_id => 'trace-7')",
        '{ "b":1.10, "a" : "\\u0000é" }',
    )
    await flow.route()
    await flow.start()
    leases = await flow.claim()
    [delivery] = await attempts.load(flow.daemon, leases)
    assert delivery == attempts.Message(
        leases[0].job_id,
        "order.created",
        '{ "b":1.10, "a" : "\\u0000é" }',
        "trace-7",
        [created["signing_secret"]],
        '{"X-Team": "seven"}',
    )
    await attempts.release(flow.daemon, leases)
    assert await attempts.load(flow.daemon, leases) == []


async def test_claim_returns_small_payloads(flow: Flow) -> None:
    """A claim returns small payloads, but no large one and in total no more than a socket buffer holds."""
    await flow.subscribe()
    large = f'"{secrets.token_hex(2000)}"'
    for payload in ['{"n": 1.10}', large, *[f'"{"x" * 1990}"'] * 40]:
        await flow.publish(payload=payload)
    await flow.route()
    await flow.start()
    claims = sorted(await attempts.claim(flow.daemon, "worker", 100, 60, 100))
    with_delivery = [claim.message for claim in claims if claim.message is not None]
    assert [claim.message is not None for claim in claims] == [True, False] + [True] * 32 + [False] * 8
    loaded = await attempts.load(flow.daemon, [claim.lease for claim in claims])
    assert len(loaded) == len(claims)
    assert [one for one in sorted(loaded) if one in with_delivery] == with_delivery


async def test_unreadable_payload_can_be_claimed(flow: Flow) -> None:
    """A claim that failed would repeat forever, so only loading the payload fails, with the reason."""
    await flow.daemon.execute("select webhookd.rotate_secret($1, 86400)", await flow.subscribe())
    await flow.superuser.execute(
        "create or replace function webhookd.live_secrets(of webhookd.subscription_secrets) returns text[] "
        "language plpgsql as $$ begin raise exception using errcode = 'XX001'; end $$"
    )
    await flow.publish()
    await flow.route()
    await flow.start()
    [claim] = await attempts.claim(flow.daemon, "worker", 10, 60, 10)
    assert claim.message is None
    with pytest.raises(asyncpg.DataCorruptedError):
        await attempts.load(flow.daemon, [claim.lease])


async def test_load_is_bounded(flow: Flow) -> None:
    """Payloads beyond the limit wait for the next load, except the first. Reported attempts are skipped."""
    await flow.subscribe()
    large = '"' + "x" * (8 * 1024 * 1024 - 2) + '"'
    for _ in range(6):
        await flow.publish(payload=large)
    await flow.route()
    await flow.start()
    leases = sorted(await flow.claim())
    loaded = await attempts.load(flow.daemon, leases)
    assert sorted(delivery.job_id for delivery in loaded) == [lease.job_id for lease in leases[:4]]
    await flow.report(leases[0])
    assert await attempts.load(flow.daemon, leases[:1]) == []


async def test_reaper_starts_at_its_mark(flow: Flow) -> None:
    """Leases that ended before the mark are left for the next full search."""
    await flow.subscribe()
    for _ in range(2):
        await flow.publish()
    await flow.route()
    await flow.start()
    old, recent = sorted(await flow.claim())
    await flow.expire_lease(recent.job_id)
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_jobs set lease_until = now() - interval '1 hour' where id = $1",
        old.job_id,
    )
    mark = await flow.daemon.fetchval("select now() - interval '1 minute'")
    assert [reset.job_id for reset in await attempts.reset_expired(flow.daemon, 9, 5, mark)] == [
        recent.job_id
    ]
    assert [reset.job_id for reset in await attempts.reset_expired(flow.daemon, 9, 5)] == [old.job_id]


async def test_report_after_expiry_is_accepted(flow: Flow) -> None:
    """While the lease is not reset, the token decides, not the clock."""
    lease = await leased(flow)
    await flow.expire_lease(lease.job_id)
    assert await flow.report(lease) is ReportVerdict.ACCEPTED


async def test_release_is_not_a_lease_reset(flow: Flow) -> None:
    """A released attempt is Pending again, and its former holder cannot report it."""
    lease = await leased(flow)
    assert await attempts.release(flow.daemon, [lease]) == [lease.job_id]
    assert await attempts.release(flow.daemon, [lease]) == []
    assert await flow.report(lease) is ReportVerdict.STALE
    [again] = await flow.claim()
    assert (again.job_id, again.lease_resets, again.attempt) == (lease.job_id, 0, 1)
    assert again.lease_token != lease.lease_token


async def test_attempt_fails_after_too_many_lease_resets(flow: Flow) -> None:
    """The next expiry after the limit fails the attempt, clears its token and counts it."""
    saga_id = await flow.saga_in(SagaStatus.IN_PROGRESS)
    for resets in range(3):
        [lease] = await flow.claim()
        assert lease.lease_resets == resets
        await flow.expire_lease(lease.job_id)
        [reset] = await attempts.reset_expired(flow.daemon, 10, max_lease_resets=2)
    assert (reset.status, reset.lease_resets) == (AttemptStatus.FAILED, 2)
    assert await flow.report(lease) is ReportVerdict.STALE
    [failed] = await flow.apply()
    assert (failed.saga_id, failed.error_code, failed.attempt_count) == (saga_id, "LEASE_EXPIRED", 1)


@pytest.mark.parametrize(
    ("report", "status", "error_code"),
    [
        pytest.param({"response_status": 204}, "Completed", None, id="2xx"),
        pytest.param({"response_status": 302}, "Failed", "HTTP_302", id="not 2xx"),
        pytest.param({"error_code": "TIMEOUT"}, "Failed", "TIMEOUT", id="no answer"),
        pytest.param(
            {"response_status": 200, "error_code": "TIMEOUT"}, "Failed", "TIMEOUT", id="half an answer"
        ),
        pytest.param({}, "Failed", "INTERNAL", id="nothing at all"),
        pytest.param({"error_code": ""}, "Failed", "INTERNAL", id="an empty code"),
        pytest.param({"error_code": "X" * 300}, "Failed", "X" * 100, id="a long code"),
        pytest.param({"response_status": -1}, "Failed", "HTTP_-1", id="a status that is none"),
        pytest.param(
            {"response_status": 500, "response_excerpt": b"\x00\xff" * 9000}, "Failed", "HTTP_500", id="bytes"
        ),
        pytest.param({"response_status": 500, "duration_ms": -5}, "Failed", "HTTP_500", id="a negative time"),
        pytest.param(
            {"response_status": 500, "retry_after_seconds": float("nan")},
            "Failed",
            "HTTP_500",
            id="no number",
        ),
        pytest.param(
            {"response_status": 500, "retry_after_seconds": float("inf")}, "Failed", "HTTP_500", id="for ever"
        ),
        pytest.param(
            {"response_status": 500, "retry_after_seconds": -1.0}, "Failed", "HTTP_500", id="in the past"
        ),
    ],
)
async def test_every_result_can_be_stored(
    flow: Flow, report: dict[str, object], status: str, error_code: str | None
) -> None:
    """Any reported result is stored and applied; a result that is not would make the worker send forever."""
    lease = await leased(flow)
    reported = attempts.Report(lease.job_id, lease.lease_token, **report)  # type: ignore[arg-type]
    verdicts = await attempts.report(flow.daemon, [reported])
    assert verdicts == {lease.job_id: ReportVerdict.ACCEPTED}
    job = await flow.daemon.fetchrow("select status, error_code from webhookd.webhook_delivery_jobs")
    assert job is not None
    assert tuple(job) == (status, error_code)
    [applied] = await flow.apply()
    assert applied.problem is None


async def test_each_report_of_a_batch_has_its_own_verdict(flow: Flow) -> None:
    """A stale, an unknown and a repeated report leave the other reports accepted."""
    await flow.subscribe()
    for _ in range(4):
        await flow.publish()
    await flow.route()
    await flow.start()
    fresh, repeated, lost, wrong = sorted(await flow.claim())
    await flow.report(repeated)
    await attempts.release(flow.daemon, [lost])
    unknown = wrong._replace(job_id=10**9)
    verdicts = await attempts.report(
        flow.daemon,
        [
            attempts.Report(lease.job_id, lease.lease_token, 200)
            for lease in (fresh, repeated, lost, wrong._replace(lease_token=uuid4()), unknown)
        ],
    )
    assert verdicts == {
        fresh.job_id: ReportVerdict.ACCEPTED,
        repeated.job_id: ReportVerdict.DUPLICATE,
        lost.job_id: ReportVerdict.STALE,
        wrong.job_id: ReportVerdict.STALE,
        unknown.job_id: ReportVerdict.UNKNOWN,
    }
