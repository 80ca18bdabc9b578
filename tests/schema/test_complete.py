"""Successes that complete_deliveries records and applies in one call, and those that it leaves out."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.waiting import until_blocked
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts, sagas
from webhookd.deliveries.attempts import Lease, Report

SAGAS, JOBS = "webhookd.webhook_delivery_sagas", "webhookd.webhook_delivery_jobs"
# Different in each row: ids, and names of other rows.
KEYS = {"id", "saga_id", "job_id", "subscription_id", "event_id"}


async def leases(flow: Flow, number: int, *, worker_id: str = "worker") -> list[Lease]:
    """Create deliveries to one subscription, and lease their attempts."""
    await flow.subscribe()
    for _ in range(number):
        await flow.publish()
    await flow.route()
    await flow.start()
    found = await flow.claim(worker_id=worker_id)
    assert len(found) == number
    return sorted(found)


def report(lease: Lease, **changes: Any) -> Report:
    """Return the report of a success."""
    return Report(lease.job_id, lease.lease_token, 200)._replace(**changes)


async def complete(flow: Flow, *reports: Report) -> list[int]:
    """Complete deliveries, and return the attempts that were completed."""
    return sorted(await sagas.complete(flow.daemon, reports))


async def in_two_steps(flow: Flow, *reports: Report) -> list[int]:
    """Record the results and apply them, as it is done with failures."""
    verdicts = await attempts.report(flow.daemon, reports)
    await flow.apply()
    return sorted(job_id for job_id, verdict in verdicts.items() if verdict is ReportVerdict.ACCEPTED)


async def verdicts(flow: Flow, reports: Sequence[Report]) -> list[ReportVerdict]:
    """Report again in two steps, in the given order."""
    found = await attempts.report(flow.daemon, reports)
    return [found[one.job_id] for one in reports]


async def row(flow: Flow, table: str, row_id: int) -> dict[str, Any]:
    """Return a row as a dict."""
    found = await flow.superuser.fetchrow(f"select * from {table} where id = $1", row_id)
    assert found is not None
    return dict(found)


async def health(flow: Flow, subscription_id: int) -> dict[str, Any] | None:
    """Return the health of an endpoint; None if it has no row."""
    found = await flow.superuser.fetchrow(
        "select * from webhookd.endpoint_health where subscription_id = $1", subscription_id
    )
    return None if found is None else dict(found)


async def everything(flow: Flow) -> list[list[asyncpg.Record]]:
    """Return all rows that a completion may change, with the place of each version."""
    tables = (SAGAS, JOBS, "webhookd.endpoint_health")
    return [await flow.superuser.fetch(f"select ctid, xmin, * from {table} order by 3") for table in tables]


async def plant(flow: Flow, statement: str, *arguments: object) -> None:
    """Change rows without triggers and foreign keys."""
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(statement, *arguments)


def without_keys_and_times(values: dict[str, Any]) -> dict[str, Any]:
    """Replace keys, times and tokens by whether they are set."""
    return {
        name: value is not None if name in KEYS or isinstance(value, datetime | UUID) else value
        for name, value in values.items()
    }


async def test_attempt_and_delivery_complete_in_one_call(flow: Flow) -> None:
    """The job has its result and is applied, the saga one attempt more; other deliveries do not change."""
    first, second, other = await leases(flow, 3)
    others = [await row(flow, SAGAS, other.saga_id), await row(flow, JOBS, other.job_id)]
    before = {lease.job_id: await row(flow, SAGAS, lease.saga_id) for lease in (first, second)}
    async with flow.daemon.transaction():
        done_at = await flow.daemon.fetchval("select now()")
        done = await sagas.complete(
            flow.daemon,
            [
                report(second, response_status=204, duration_ms=7, response_excerpt=b"\x00ok"),
                report(first, response_status=299),
            ],
        )
    assert done == {first.job_id: first.subscription_id, second.job_id: first.subscription_id}
    for lease, result in ((first, (299, None, None)), (second, (204, 7, b"\x00ok"))):
        job = await row(flow, JOBS, lease.job_id)
        assert (job["status"], job["error_code"], job["lease_token"]) == (
            AttemptStatus.COMPLETED,
            None,
            lease.lease_token,
        )
        assert (job["response_status"], job["duration_ms"], job["response_excerpt"]) == result
        assert (job["finished_at"], job["result_applied_at"]) == (done_at, done_at)
        changed = {"status": SagaStatus.COMPLETED, "attempt_count": 1, "updated_at": done_at}
        assert await row(flow, SAGAS, lease.saga_id) == before[lease.job_id] | changed
    assert [await row(flow, SAGAS, other.saga_id), await row(flow, JOBS, other.job_id)] == others
    assert await flow.apply() == [], "nothing is left to apply"


@pytest.mark.parametrize("failures", [0, 2])
async def test_one_step_and_two_steps_leave_equal_rows(flow: Flow, failures: int) -> None:
    """Saga, job and endpoint differ only in keys and times, also after failures of the same delivery."""
    pair = [await flow.subscribe() for _ in range(2)]
    await flow.publish()
    await flow.route()
    for _ in range(failures):
        assert len(await flow.attempt(503)) == len(pair)
    await flow.start()
    by_subscription = {lease.subscription_id: lease for lease in await flow.claim()}
    written = []
    for subscription_id, way in zip(pair, (complete, in_two_steps), strict=True):
        lease = by_subscription[subscription_id]
        given = report(lease, response_status=201, duration_ms=12, response_excerpt=b"thanks")
        assert await way(flow, given) == [lease.job_id]
        rows = [await row(flow, SAGAS, lease.saga_id), await row(flow, JOBS, lease.job_id)]
        if endpoint := await health(flow, subscription_id):
            rows.append(endpoint)
        written.append([without_keys_and_times(values) for values in rows])
    assert written[0] == written[1]
    assert len(written[0]) == (3 if failures else 2)
    assert (written[0][0]["attempt_count"], written[0][0]["final_error_code"]) == (
        failures + 1,
        "HTTP_503" if failures else None,
    )


@pytest.mark.parametrize("way", [complete, in_two_steps])
async def test_unusual_values_are_stored_as_null_or_cut(flow: Flow, way: Callable[..., Any]) -> None:
    """A success can always be stored, whatever the worker measured and the endpoint sent."""
    negative, zero, long = await leases(flow, 3)
    reports = [
        report(negative, duration_ms=-1),
        report(zero, duration_ms=0, response_excerpt=b""),
        report(long, duration_ms=2_147_483_647, response_excerpt=b"x" * 4095 + b"yz"),
    ]
    assert await way(flow, *reports) == [lease.job_id for lease in (negative, zero, long)]
    rows = [await row(flow, JOBS, lease.job_id) for lease in (negative, zero, long)]
    assert [(job["duration_ms"], job["response_excerpt"]) for job in rows] == [
        (None, None),
        (0, b""),
        (2_147_483_647, b"x" * 4095 + b"y"),
    ]


async def test_lost_leases_are_left_out(flow: Flow) -> None:
    """Other leases of the call complete; for those left out, report_results says why."""
    held, stale, reset, taken, repeated = await leases(flow, 5)
    for lease in (reset, taken):
        await flow.expire_lease(lease.job_id)
    assert len(await attempts.reset_expired(flow.daemon, 100, max_lease_resets=5)) == 2
    [again] = await flow.claim(1, worker_id="another")
    by_job = {lease.job_id: lease for lease in (reset, taken)}
    taken = by_job.pop(again.job_id)
    [reset] = by_job.values()
    assert await complete(flow, report(repeated)) == [repeated.job_id]
    left_out = [
        report(stale, lease_token=uuid4()),
        report(reset),
        report(taken),
        report(repeated),
        report(held, job_id=999_999),
    ]
    before = await everything(flow)
    assert await complete(flow, *left_out) == []
    assert await everything(flow) == before
    assert await complete(flow, *left_out[:3], report(held), *left_out[3:]) == [held.job_id]
    assert await verdicts(flow, [*left_out, report(held)]) == [
        ReportVerdict.STALE,
        ReportVerdict.STALE,
        ReportVerdict.STALE,
        ReportVerdict.DUPLICATE,
        ReportVerdict.UNKNOWN,
        ReportVerdict.DUPLICATE,
    ]
    assert await complete(flow, report(again), report(stale)) == sorted([again.job_id, stale.job_id])


async def test_null_token_is_left_out(flow: Flow) -> None:
    """A Pending job has no token, which must not count as equal to a missing one."""
    [lease] = await leases(flow, 1)
    await attempts.release(flow.daemon, [lease])
    before = await everything(flow)
    completed = await flow.daemon.fetch(
        "select * from webhookd.complete_deliveries(array[$1::bigint], '{null}', '{200}', '{1}', '{null}')",
        lease.job_id,
    )
    assert completed == []
    assert await everything(flow) == before


async def test_expired_lease_that_is_not_reset_still_counts(flow: Flow) -> None:
    """The token decides, not the clock."""
    [lease] = await leases(flow, 1)
    await flow.expire_lease(lease.job_id)
    assert await complete(flow, report(lease)) == [lease.job_id]
    assert await flow.saga_status(lease.saga_id) is SagaStatus.COMPLETED


async def test_result_recorded_in_two_steps_is_left_out(flow: Flow) -> None:
    """A repeated report may come by the other way: the result that is recorded is applied once."""
    [lease] = await leases(flow, 1)
    assert await flow.report(lease, 200) is ReportVerdict.ACCEPTED
    assert await complete(flow, report(lease)) == []
    assert len(await flow.apply()) == 1
    assert (await row(flow, SAGAS, lease.saga_id))["attempt_count"] == 1


async def test_repeated_call_waits_and_completes_nothing(flow: Flow, database: Database) -> None:
    """The answer to the first call was lost; the second arrives while that is not committed."""
    lease, other = await leases(flow, 2)
    second = await database.connect("daemon")
    async with flow.daemon.transaction():
        assert await complete(flow, report(lease)) == [lease.job_id]
        repeated = asyncio.create_task(sagas.complete(second, [report(lease), report(other)]))
        await until_blocked(flow.superuser, second.get_server_pid(), flow.daemon.get_server_pid())
    assert await repeated == {other.job_id: other.subscription_id}
    assert (await row(flow, SAGAS, lease.saga_id))["attempt_count"] == 1


async def test_repeated_call_in_another_order_cannot_deadlock(flow: Flow, database: Database) -> None:
    """The second call waits for the first of its attempts before it locks another one."""
    first, second = await leases(flow, 2)
    repeating, observer = await database.connect("daemon"), await database.connect("superuser")
    async with flow.daemon.transaction():
        await complete(flow, report(first))
        repeated = asyncio.create_task(sagas.complete(repeating, [report(second), report(first)]))
        await until_blocked(observer, repeating.get_server_pid(), flow.daemon.get_server_pid())
        assert await complete(flow, report(second)) == [second.job_id]
    assert await repeated == {}


@pytest.mark.parametrize(
    "planted",
    [
        "update {sagas} set status = 'Pending' where id = $1",
        "update {sagas} set status = 'PendingRetry' where id = $1",
        "update {sagas} set status = 'Completed' where id = $1",
        "update {sagas} set status = 'DeadLettered' where id = $1",
        "update {sagas} set job_id = job_id + 1000 where id = $1",
        "update {sagas} set job_id = null where id = $1",
        "delete from {sagas} where id = $1",
    ],
    ids=["Pending", "PendingRetry", "Completed", "DeadLettered", "another job", "no job", "no saga"],
)
async def test_wrong_saga_refuses_the_whole_call(flow: Flow, planted: str) -> None:
    """Nothing changes; in two steps, the other delivery of the call completes."""
    wrong, right = await leases(flow, 2)
    await plant(flow, planted.format(sagas=SAGAS), wrong.saga_id)
    before = await everything(flow)
    for reports in ([wrong, right], [right, wrong]):
        with pytest.raises(asyncpg.PostgresError, match="not InProgress with it") as refused:
            await complete(flow, *map(report, reports))
        assert refused.value.sqlstate == "WH411"
    assert await everything(flow) == before
    assert await verdicts(flow, [report(wrong), report(right)]) == [ReportVerdict.ACCEPTED] * 2
    await flow.apply()
    assert await flow.saga_status(right.saga_id) is SagaStatus.COMPLETED


async def failing(flow: Flow, subscription_id: int, failures: int, failing_after: int) -> Lease:
    """Let an endpoint fail some times, and lease its next attempt."""
    await flow.publish(f"type{subscription_id}")
    await flow.route()
    for _ in range(failures):
        await flow.start([subscription_id])
        [lease] = await flow.claim()
        await flow.report(lease, 503)
        await flow.apply(failing_after=failing_after)
    await flow.start([subscription_id])
    [lease] = await flow.claim()
    assert lease.subscription_id == subscription_id
    return lease


@pytest.mark.parametrize("failing_after", [2, 10], ids=["failing", "not yet failing"])
async def test_success_ends_a_series_of_failures(flow: Flow, failing_after: int) -> None:
    """The endpoint gets parallel requests again; another endpoint that fails stays as it is."""
    recovering, other = await flow.subscribe("type1"), await flow.subscribe("type2")
    await failing(flow, other, 3, failing_after)
    lease = await failing(flow, recovering, 3, failing_after)
    before, of_other = await health(flow, recovering), await health(flow, other)
    assert before is not None
    assert before["consecutive_failures"] == 3
    assert (before["failing_since"] is not None) is (failing_after == 2)
    async with flow.daemon.transaction():
        now = await flow.daemon.fetchval("select now()")
        await complete(flow, report(lease))
    changed = {"consecutive_failures": 0, "failing_since": None, "last_recovery_at": now}
    assert await health(flow, recovering) == before | changed
    assert await health(flow, other) == of_other


async def test_success_of_a_healthy_endpoint_writes_no_health(flow: Flow) -> None:
    """Neither a first row, nor a new version of the row of an endpoint that has recovered."""
    [lease] = await leases(flow, 1)
    await complete(flow, report(lease))
    assert await health(flow, lease.subscription_id) is None
    recovered = await flow.subscribe("type2")
    await complete(flow, report(await failing(flow, recovered, 1, 10)))
    [_, _, before] = await everything(flow)
    assert len(before) == 1
    await complete(flow, report(await failing(flow, recovered, 0, 10)))
    assert (await everything(flow))[2] == before
