"""Claiming, loading and reporting attempts at the database: leases, slots, payload loading and verdicts."""

import asyncio
import secrets
from collections import Counter
from uuid import uuid4

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import ADDRESS, EVENT_TYPE, Flow
from tests.support.guards import Weakened
from tests.support.waiting import until_blocked
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts, subscriptions

HOLDABLE_CLAIM = Weakened(
    "claim_jobs", "return query\n", "perform pg_advisory_xact_lock_shared(7); return query\n"
)
HOLD_CLAIM = "select pg_advisory_xact_lock(7)"


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
    """A message has the exact payload text and the correlation id, its lease the secret and the headers.

    The claim and a load return the same message.
    """
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
    [(lease, message)] = await attempts.claim(flow.daemon, "worker", 10, 60, 10)
    assert message == attempts.Message(
        lease.job_id, "order.created", "trace-7", '{ "b":1.10, "a" : "\\u0000é" }'
    )
    assert [message] == await attempts.load(flow.daemon, [lease])
    assert (lease.secrets, lease.headers) == ([created["signing_secret"]], '{"X-Team": "seven"}')
    await attempts.release(flow.daemon, [lease])
    assert await attempts.load(flow.daemon, [lease]) == []


@pytest.mark.parametrize("usual", [True, False], ids=["usual", "with a held subscription"])
async def test_claim_returns_shared_values_once(flow: Flow, *, usual: bool) -> None:
    """URL, secrets and headers are in the first row of each subscription, the lease in the first of all.

    claims_of gives them to every lease. A held subscription in the batch makes the claim choose again.
    """
    endpoints: dict[int, tuple[str, list[str], str]] = {}
    for number in range(20):
        url, headers = f"https://receiver.example/{number}", f'{{"x-number": "{number}"}}'
        subscription_id = await flow.subscribe(callback_url=url, headers={"x-number": str(number)})
        secret = await flow.superuser.fetchval(
            "select secret from webhookd.subscription_secrets where subscription_id = $1", subscription_id
        )
        secrets_of = [secret]
        if number % 2:  # with an earlier secret they come from another expression
            rotated = await subscriptions.rotate_secret(flow.daemon, subscription_id, 3600)
            secrets_of.insert(0, rotated.signing_secret)
        endpoints[subscription_id] = (url, secrets_of, headers)
    held = min(endpoints)
    for _ in range(5):
        await flow.publish()
    await flow.route()
    await flow.start()
    if not usual:
        await subscriptions.update(flow.daemon, held, {"active": False})
        del endpoints[held]

    rows = await flow.daemon.fetch("select * from webhookd.claim_jobs('worker', 1000, 60, 1000)")
    assert [row["job_id"] for row in rows] == sorted(row["job_id"] for row in rows)
    assert Counter(row["subscription_id"] for row in rows) == dict.fromkeys(endpoints, 5)
    seen = set()
    for row in rows:
        expected: tuple[str, list[str], str] | tuple[None, None, None] = (None, None, None)
        if row["subscription_id"] not in seen:
            expected = endpoints[row["subscription_id"]]
            seen.add(row["subscription_id"])
        assert (row["callback_url"], row["secrets"], row["headers"]) == expected, row["job_id"]
    lease_columns = ("lease_token", "lease_until", "claimed_at", "resume_from")
    assert None not in [rows[0][name] for name in lease_columns]
    assert {row[name] for row in rows[1:] for name in lease_columns} == {None}

    stored = await flow.superuser.fetch(
        "select distinct lease_token, lease_until, lease_until - interval '60 s' from "
        "webhookd.webhook_delivery_jobs where status = 'Leased'"
    )
    assert [tuple(row) for row in stored] == [tuple(rows[0][name] for name in lease_columns[:3])]
    for lease, _ in attempts.claims_of([tuple(row) for row in rows]):
        assert (lease.callback_url, lease.secrets, lease.headers) == endpoints[lease.subscription_id]
        assert (lease.lease_token, lease.resume_from) == (rows[0]["lease_token"], rows[0]["job_id"])
    await attempts.release(
        flow.daemon, [claim.lease for claim in attempts.claims_of([tuple(row) for row in rows])]
    )
    [again, *_] = await flow.claim()
    assert again.lease_token != rows[0]["lease_token"], "a late report of the first lease must be refused"


async def test_claim_without_payloads_reads_no_event(flow: Flow) -> None:
    """It returns everything to send but the event, and the payloads are loaded afterwards."""
    await flow.subscribe()
    event_id = await flow.publish(payload='{"n": 1.10}')
    await flow.route()
    await flow.start()
    [row] = await flow.daemon.fetch(
        "select * from webhookd.claim_jobs('worker', 10, 60, 10, with_payloads => false)"
    )
    assert (row["event_id"], row["event_type"], row["correlation_id"], row["payload"]) == (
        event_id,
        None,
        None,
        None,
    )
    [(lease, message)] = attempts.claims_of([tuple(row)])
    assert message is None
    assert (lease.callback_url, len(lease.secrets)) == (ADDRESS, 1)
    [loaded] = await attempts.load(flow.daemon, [lease])
    assert loaded == (lease.job_id, EVENT_TYPE, None, '{"n": 1.10}')


async def test_subscription_held_during_the_claim_has_no_url(flow: Flow, database: Database) -> None:
    """Its jobs were chosen before, but nothing may be sent to the new address; others keep theirs."""
    changed, sound = await flow.subscribe(), await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    # The claim waits between the choice of its jobs and the statement that leases them.
    await HOLDABLE_CLAIM.take_away(flow.superuser)
    async with flow.superuser.transaction():
        await flow.superuser.execute(HOLD_CLAIM)
        claiming = asyncio.create_task(flow.claim())
        await until_blocked(flow.superuser, flow.daemon.get_server_pid(), flow.superuser.get_server_pid())
        other = await database.connect("daemon")
        await subscriptions.update(other, changed, {"paused": True})
    urls = {lease.subscription_id: lease.callback_url for lease in await claiming}
    assert urls == {changed: "", sound: ADDRESS}


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


async def test_unreadable_event_can_be_claimed(flow: Flow) -> None:
    """A claim that failed would repeat forever, so only loading that event fails, with the reason."""
    await flow.subscribe()
    damaged, sound = [await flow.publish() for _ in range(2)]
    await flow.route()
    await flow.start()
    # A row security policy runs for each row that is read, as reading a damaged page would.
    await flow.superuser.execute(
        f"""
        create function public.readable(event_id bigint) returns boolean language plpgsql as $$
        begin
            if event_id = {damaged} then raise exception using errcode = 'XX001'; end if;
            return true;
        end $$;
        create policy damaged on webhookd.events using (public.readable(id));
        alter table webhookd.events enable row level security
        """
    )
    claims = {
        claim.lease.event_id: claim for claim in await attempts.claim(flow.daemon, "worker", 10, 60, 10)
    }
    assert {event_id: claim.message for event_id, claim in claims.items()} == {damaged: None, sound: None}
    with pytest.raises(asyncpg.DataCorruptedError):
        await attempts.load(flow.daemon, [claims[damaged].lease])
    [loaded] = await attempts.load(flow.daemon, [claims[sound].lease])
    assert loaded.payload == "{}"


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


async def test_mark_does_not_pass_a_job_that_another_claim_has_locked(flow: Flow) -> None:
    """The other claim may lock more jobs than it leases; the next claim from the mark finds them."""
    await flow.subscribe()
    for _ in range(3):
        await flow.publish()
    await flow.route()
    await flow.start()
    async with flow.superuser.transaction():
        locked = await flow.superuser.fetchval(
            "select id from webhookd.webhook_delivery_jobs order by id limit 1 for update"
        )
        [first, _] = await flow.claim()
    assert first.resume_from == locked


async def test_empty_claim_writes_nothing(flow: Flow) -> None:
    """Jobs of a held subscription are not locked by claims that cannot have them."""
    subscription_id = await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.start()
    await flow.superuser.execute(
        "update webhookd.subscriptions set active = false where id = $1", subscription_id
    )
    async with flow.daemon.transaction():
        assert await flow.claim() == []
        assert await flow.daemon.fetchval("select pg_current_xact_id_if_assigned()") is None
