"""The state machine of attempts, enforced by triggers; a superuser tries every change."""

from itertools import product
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.support.catalog import columns, insert, refusal, update
from webhookd.core.states import AttemptStatus, SagaStatus

if TYPE_CHECKING:
    from tests.support.flow import Flow

PENDING, LEASED, COMPLETED, FAILED = AttemptStatus
SAGAS = "webhookd.webhook_delivery_sagas"
JOBS = "webhookd.webhook_delivery_jobs"

# The columns that change together with each status.
GIVEN_BACK = {"lease_until": "null", "lease_token": "null", "worker_id": "null"}
TAKEN = {
    "lease_until": "now() + interval '1 minute'",
    "lease_token": "gen_random_uuid()",
    "worker_id": "'worker'",
}
DELIVERED = {"response_status": "200", "finished_at": "now()"}
REFUSED = {"response_status": "500", "error_code": "'HTTP_500'", "finished_at": "now()"}
APPLIED = DELIVERED | {"result_applied_at": "now()"}
RESET = GIVEN_BACK | {"lease_resets": "lease_resets + 1"}
GIVEN_UP = {"error_code": "'LEASE_EXPIRED'", "lease_token": "null", "finished_at": "now()"}
EXTENDED = {"lease_until": "lease_until + interval '1 minute'"}

# What only a finished attempt has.
RESULTS = {
    "response_status": "200",
    "error_code": "'HTTP_500'",
    "finished_at": "now()",
    "result_applied_at": "now()",
    "duration_ms": "1",
    "retry_after_seconds": "1",
    "response_excerpt": "'x'",
}

# Every legal edge, with its variants.
EDGES: dict[tuple[AttemptStatus, AttemptStatus], list[dict[str, str]]] = {
    (PENDING, LEASED): [TAKEN],
    (LEASED, COMPLETED): [DELIVERED, APPLIED],
    (LEASED, FAILED): [REFUSED, GIVEN_UP],
    (LEASED, PENDING): [RESET, GIVEN_BACK],
}
# No status change: nothing changes, or the lease is extended.
STAYS: dict[tuple[AttemptStatus, AttemptStatus], list[dict[str, str]]] = {
    (PENDING, PENDING): [{}],
    (LEASED, LEASED): [EXTENDED],
}
LEGAL = EDGES | STAYS
LEGAL_CHANGES = [(*pair, way) for pair, ways in LEGAL.items() for way in ways]
ILLEGAL = [pair for pair in product(AttemptStatus, repeat=2) if pair not in LEGAL]
# All combinations that could make an illegal edge look legal.
WAYS = [way for ways in LEGAL.values() for way in ways] + [TAKEN | DELIVERED, TAKEN | REFUSED]

# One wrong column of an otherwise legal change.
WRONG: list[tuple[AttemptStatus, AttemptStatus, str, str]] = [
    # A lease has an end, a token and a holder, and does not count as a reset.
    (PENDING, LEASED, "lease_until", "null"),
    (PENDING, LEASED, "lease_token", "null"),
    (PENDING, LEASED, "worker_id", "null"),
    (PENDING, LEASED, "lease_resets", "lease_resets + 1"),
    *((PENDING, LEASED, column, value) for column, value in RESULTS.items()),
    # A Pending attempt has no lease columns and no result.
    *((PENDING, PENDING, column, value) for column, value in RESULTS.items()),
    (PENDING, PENDING, "lease_until", "now()"),
    (PENDING, PENDING, "lease_token", "gen_random_uuid()"),
    (PENDING, PENDING, "worker_id", "'worker'"),
    (PENDING, PENDING, "lease_resets", "lease_resets + 1"),
    # A lease keeps its token and its holder; a new lease needs Pending in between.
    (LEASED, LEASED, "lease_token", "gen_random_uuid()"),
    (LEASED, LEASED, "lease_token", "null"),
    (LEASED, LEASED, "worker_id", "'another'"),
    (LEASED, LEASED, "worker_id", "null"),
    (LEASED, LEASED, "lease_until", "null"),
    (LEASED, LEASED, "lease_resets", "lease_resets + 1"),
    *((LEASED, LEASED, column, value) for column, value in RESULTS.items()),
    # Back in Pending the old token is invalid; a reset adds one to the counter, a release does not.
    (LEASED, PENDING, "lease_until", "lease_until"),
    (LEASED, PENDING, "lease_token", "lease_token"),
    (LEASED, PENDING, "worker_id", "worker_id"),
    (LEASED, PENDING, "lease_resets", "lease_resets + 2"),
    (LEASED, PENDING, "lease_resets", "lease_resets - 1"),
    *((LEASED, PENDING, column, value) for column, value in RESULTS.items()),
    # Completed means a 2xx answer, reported by the holder of the lease.
    (LEASED, COMPLETED, "response_status", "199"),
    (LEASED, COMPLETED, "response_status", "300"),
    (LEASED, COMPLETED, "response_status", "500"),
    (LEASED, COMPLETED, "error_code", "'HTTP_500'"),
    (LEASED, COMPLETED, "lease_token", "null"),
    (LEASED, COMPLETED, "lease_token", "gen_random_uuid()"),
    (LEASED, COMPLETED, "finished_at", "null"),
    (LEASED, COMPLETED, "lease_resets", "lease_resets + 1"),
    (LEASED, COMPLETED, "response_status", "null"),
    (LEASED, COMPLETED, "worker_id", "null"),
    (LEASED, COMPLETED, "worker_id", "'another'"),
    # Failed has an error code, and is applied in a second step, which decides about a retry.
    (LEASED, FAILED, "result_applied_at", "now()"),
    (LEASED, FAILED, "worker_id", "null"),
    (LEASED, FAILED, "worker_id", "'another'"),
    (LEASED, FAILED, "error_code", "null"),
    (LEASED, FAILED, "lease_token", "gen_random_uuid()"),
    (LEASED, FAILED, "finished_at", "null"),
    (LEASED, FAILED, "lease_resets", "lease_resets + 1"),
]

IDENTITY = {"id", "saga_id", "subscription_id", "event_id", "attempt", "attempt_at", "created_at"}

# A new attempt takes these columns from its saga; only a Pending saga has no job.
BIRTH = {
    "id": "coalesce(job_id, 1000)",
    "saga_id": "id",
    "subscription_id": "subscription_id",
    "event_id": "event_id",
    "attempt": "attempt_count + 1",
    "attempt_at": "next_attempt_at",
}
START = update(
    SAGAS, {"status": "'InProgress'", "job_id": "nextval('webhookd.webhook_delivery_jobs_id_seq')"}
)

# Legal steps by which a superuser moves a saga without any attempt.
STEPS: dict[SagaStatus, list[str]] = {
    SagaStatus.PENDING: [],
    SagaStatus.IN_PROGRESS: [START],
    SagaStatus.PENDING_RETRY: [
        START,
        update(
            SAGAS,
            {
                "status": "'PendingRetry'",
                "attempt_count": "1",
                "final_error_code": "'HTTP_500'",
                "next_attempt_at": "next_attempt_at + interval '1 second'",
            },
        ),
    ],
    SagaStatus.COMPLETED: [
        START,
        update(SAGAS, {"status": "'Completed'", "attempt_count": "1"}),
    ],
    SagaStatus.DEAD_LETTERED: [
        START,
        update(SAGAS, {"status": "'DeadLettered'", "attempt_count": "1", "final_error_code": "'HTTP_500'"}),
        "select webhookd.bury(array[$1::bigint])",
    ],
}


def change_to(status: AttemptStatus, companions: dict[str, str]) -> str:
    """Return the UPDATE to a status."""
    return update(JOBS, {"status": f"'{status}'"} | companions)


def birth(**changes: str) -> str:
    """Return the INSERT of an attempt for saga $1; `changes` make it wrong."""
    return insert(JOBS, BIRTH | changes, SAGAS)


async def test_every_column_is_identity_or_changeable(flow: "Flow") -> None:
    """A new column must be added to one of the lists, here and in the triggers."""
    names = {column.name for column in await columns(flow.superuser, JOBS)}
    assert names == IDENTITY | {"status", "lease_resets"} | TAKEN.keys() | RESULTS.keys()


async def saga_without_attempt(flow: "Flow", status: SagaStatus) -> int:
    """Create a saga that never had an attempt, so that no unique index refuses before the trigger."""
    saga_id = await flow.saga_in(SagaStatus.PENDING)
    async with flow.superuser.transaction():
        for step in STEPS[status]:
            await flow.superuser.execute(step, saga_id)
    assert await flow.saga_status(saga_id) is status
    return saga_id


@pytest.mark.parametrize(("before", "after", "companions"), LEGAL_CHANGES)
async def test_legal_change_is_accepted(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, companions: dict[str, str]
) -> None:
    """Every variant of every legal edge commits, and so do an empty update and a longer lease."""
    job_id = await flow.job_in(before)
    await flow.superuser.execute(change_to(after, companions), job_id)
    assert await flow.job_status(job_id) is after


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
async def test_any_other_change_is_refused(flow: "Flow", before: AttemptStatus, after: AttemptStatus) -> None:
    """No other pair of statuses is accepted, with any combination of columns."""
    job_id = await flow.job_in(before)
    expected = "WH410" if before in {COMPLETED, FAILED} else "WH411"
    for companions in WAYS:
        assert await refusal(flow.superuser, change_to(after, companions), job_id) == expected, companions


@pytest.mark.parametrize(("before", "after", "column", "expression"), WRONG)
async def test_legal_edge_with_a_wrong_column_is_refused(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, column: str, expression: str
) -> None:
    """One wrong column makes a legal edge illegal."""
    job_id = await flow.job_in(before)
    right = LEGAL[before, after][0]
    assert await refusal(flow.superuser, change_to(after, right | {column: expression}), job_id) == "WH411"
    assert await refusal(flow.superuser, change_to(after, right), job_id) is None


@pytest.mark.parametrize("companions", [REFUSED, GIVEN_UP], ids=["reported", "given up"])
async def test_failure_cannot_be_stamped_as_applied_when_it_is_recorded(
    flow: "Flow", companions: dict[str, str]
) -> None:
    """A stamped failure would never be applied, and its saga would stay InProgress without a retry."""
    job_id = await flow.job_in(LEASED)
    change = change_to(FAILED, companions | {"result_applied_at": "now()"})
    assert await refusal(flow.superuser, change, job_id) == "WH411"
    assert await refusal(flow.superuser, change_to(FAILED, companions), job_id) is None


@pytest.mark.parametrize("response_status", [200, 204, 299])
async def test_any_2xx_completes(flow: "Flow", response_status: int) -> None:
    """The limits 200 and 299 count as success."""
    job_id = await flow.job_in(LEASED)
    change = change_to(COMPLETED, DELIVERED | {"response_status": str(response_status)})
    assert await refusal(flow.superuser, change, job_id) is None


@pytest.mark.parametrize(("before", "after", "companions"), LEGAL_CHANGES)
async def test_identity_columns_never_change(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, companions: dict[str, str]
) -> None:
    """No edge may change which saga and time an attempt belongs to."""
    job_id = await flow.job_in(before)
    tried = set()
    for column in await columns(flow.superuser, JOBS):
        if column.name in IDENTITY:
            wrong = change_to(after, companions | {column.name: column.different})
            assert await refusal(flow.superuser, wrong, job_id) == "WH411", column.name
            tried.add(column.name)
    assert tried == IDENTITY


@pytest.mark.parametrize("applied", [False, True], ids=["unapplied", "applied"])
@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_finished_attempt_is_immutable(flow: "Flow", status: AttemptStatus, *, applied: bool) -> None:
    """Every column in the catalog is refused, even with its own value; only the applied stamp may be set."""
    job_id = await flow.job_in(status, applied=applied)
    for column in await columns(flow.superuser, JOBS):
        if column.name != "result_applied_at" or applied:
            changed = update(JOBS, {column.name: column.different})
            assert await refusal(flow.superuser, changed, job_id) == "WH410", column.name
        if not column.is_identity:
            unchanged = update(JOBS, {column.name: column.name})
            assert await refusal(flow.superuser, unchanged, job_id) == "WH410", column.name


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_result_is_stamped_once(flow: "Flow", status: AttemptStatus) -> None:
    """The first stamp is accepted; a second, a different and a removed stamp are refused."""
    job_id = await flow.job_in(status)
    await flow.superuser.execute(update(JOBS, {"result_applied_at": "now()"}), job_id)
    for expression in ("now()", "result_applied_at", "null"):
        again = update(JOBS, {"result_applied_at": expression})
        assert await refusal(flow.superuser, again, job_id) == "WH410", expression


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_stamp_changes_no_other_column(flow: "Flow", status: AttemptStatus) -> None:
    """A stamp together with a change of any other column is refused."""
    job_id = await flow.job_in(status)
    stamp = {"result_applied_at": "now()"}
    for column in await columns(flow.superuser, JOBS):
        if column.name not in stamp:
            both = update(JOBS, stamp | {column.name: column.different})
            assert await refusal(flow.superuser, both, job_id) == "WH410", column.name
    assert await refusal(flow.superuser, update(JOBS, stamp), job_id) is None


@pytest.mark.parametrize("status", [PENDING, LEASED])
async def test_unfinished_attempt_cannot_be_stamped(flow: "Flow", status: AttemptStatus) -> None:
    """There is no result to apply yet."""
    job_id = await flow.job_in(status)
    stamp = update(JOBS, {"result_applied_at": "now()"})
    assert await refusal(flow.superuser, stamp, job_id) == "WH411"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "'Leased'"} | TAKEN,
        {"status": "'Completed'"} | TAKEN | DELIVERED,
        {"status": "'Completed'"} | TAKEN | APPLIED,
        {"status": "'Failed'"} | REFUSED,
        *({"status": f"'{status}'"} for status in (LEASED, COMPLETED, FAILED)),
        {"lease_resets": "1"},
        *({column: value} for column, value in (TAKEN | RESULTS).items()),
    ],
)
async def test_new_attempt_is_pending_without_lease_or_result(flow: "Flow", changes: dict[str, str]) -> None:
    """A new attempt with another status, a lease, a reset, a result or a stamp is refused."""
    saga_id = await saga_without_attempt(flow, SagaStatus.IN_PROGRESS)
    assert await refusal(flow.superuser, birth(**changes), saga_id) == "WH411"
    assert await refusal(flow.superuser, birth(), saga_id) is None


@pytest.mark.parametrize("status", [status for status in SagaStatus if status is not SagaStatus.IN_PROGRESS])
async def test_attempt_needs_a_saga_in_progress(flow: "Flow", status: SagaStatus) -> None:
    """Subscription and due time are right; only the status of the saga is wrong."""
    saga_id = await saga_without_attempt(flow, status)
    assert await refusal(flow.superuser, birth(), saga_id) == "WH411"


async def test_attempt_is_accepted_for_a_saga_in_progress(flow: "Flow") -> None:
    """The INSERT that is refused in every other status commits in this one."""
    saga_id = await saga_without_attempt(flow, SagaStatus.IN_PROGRESS)
    assert await flow.superuser.execute(birth(), saga_id) == "INSERT 0 1"


@pytest.mark.parametrize(
    ("column", "expression"),
    [
        ("subscription_id", "$2::bigint"),
        ("subscription_id", "$2::bigint + 1000"),
        ("event_id", "event_id + $2::bigint"),
        ("attempt", "attempt_count + $2::integer"),
        ("attempt", "attempt_count + 1 - $2::integer"),
        ("attempt_at", "next_attempt_at + $2::bigint * interval '1 us'"),
        ("attempt_at", "next_attempt_at - $2::bigint * interval '1 us'"),
        ("saga_id", "id + 1000 * $2::bigint"),
        ("id", "job_id + $2::bigint"),
    ],
    ids=[
        "another subscription",
        "no subscription",
        "another event",
        "attempt too high",
        "attempt too low",
        "too late",
        "too early",
        "no saga",
        "another job",
    ],
)
async def test_attempt_must_match_its_saga(flow: "Flow", column: str, expression: str) -> None:
    """Another subscription ($2), event, number, due time or job, and a missing saga are refused."""
    saga_id = await saga_without_attempt(flow, SagaStatus.IN_PROGRESS)
    another_id = await flow.subscribe("other.type")
    assert await refusal(flow.superuser, birth(**{column: expression}), saga_id, another_id) == "WH411"
    assert await refusal(flow.superuser, birth(), saga_id) is None


async def test_one_wrong_attempt_refuses_the_whole_insert(flow: "Flow") -> None:
    """The trigger checks every row of a statement, not only the first."""
    in_progress_id = await saga_without_attempt(flow, SagaStatus.IN_PROGRESS)
    pending_id = await flow.saga_in(SagaStatus.PENDING)
    both = f"{birth()} or id = $2 order by id"
    assert await refusal(flow.superuser, both, in_progress_id, pending_id) == "WH411"


@pytest.mark.parametrize("status", [PENDING, LEASED])
async def test_saga_has_at_most_one_active_attempt(flow: "Flow", status: AttemptStatus) -> None:
    """The unique index refuses a second active attempt, also with another due time."""
    job_id = await flow.job_in(status)
    second = """
        insert into webhookd.webhook_delivery_jobs (saga_id, subscription_id, event_id, attempt, attempt_at)
        select saga_id, subscription_id, event_id, attempt, attempt_at + interval '1 second'
        from webhookd.webhook_delivery_jobs where id = $1
        """
    assert await refusal(flow.superuser, second, job_id) == "idx_job_saga"


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_due_time_is_used_once(flow: "Flow", status: AttemptStatus) -> None:
    """A finished attempt keeps its due time: no other attempt of its saga may have the same."""
    job_id = await flow.job_in(status)
    again = """
        insert into webhookd.webhook_delivery_jobs (saga_id, subscription_id, event_id, attempt, attempt_at)
        select saga_id, subscription_id, event_id, attempt, attempt_at
        from webhookd.webhook_delivery_jobs where id = $1
        """
    assert await refusal(flow.superuser, again, job_id) == "uniq_job_saga_attempt"


async def test_worker_cannot_apply_its_own_success(flow: "Flow") -> None:
    """Only the orchestrator records and applies a success in one step."""
    await flow.job_in(AttemptStatus.LEASED)
    completed = (
        "update webhookd.webhook_delivery_jobs set status = 'Completed', response_status = 200,"
        " finished_at = now(), result_applied_at = now()"
    )
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local role job_worker")
        with pytest.raises(asyncpg.PostgresError) as refused:
            async with flow.superuser.transaction():
                await flow.superuser.execute(completed)
        assert refused.value.sqlstate == "WH411"
        await flow.superuser.execute("set local role saga_orchestrator")
        await flow.superuser.execute(completed)
