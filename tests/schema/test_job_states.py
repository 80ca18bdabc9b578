"""The state machine of attempts, enforced by triggers and constraints; a superuser tries every change."""

from itertools import product
from typing import TYPE_CHECKING

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
RESET = GIVEN_BACK | {"lease_resets": "lease_resets + 1"}
GIVEN_UP = {"error_code": "'LEASE_EXPIRED'", "lease_token": "null", "finished_at": "now()"}
EXTENDED = {"lease_until": "lease_until + interval '1 minute'"}

# Every legal edge, with its variants.
EDGES: dict[tuple[AttemptStatus, AttemptStatus], list[dict[str, str]]] = {
    (PENDING, LEASED): [TAKEN],
    (LEASED, COMPLETED): [DELIVERED],
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

# One wrong column of an otherwise legal change, and the constraint or error code that refuses it.
WRONG: list[tuple[AttemptStatus, AttemptStatus, str, str, str]] = [
    # A lease has an end, a token and a holder, and does not count as a reset.
    (PENDING, LEASED, "lease_until", "null", "leased_has_lease"),
    (PENDING, LEASED, "lease_token", "null", "leased_has_lease"),
    (PENDING, LEASED, "worker_id", "null", "leased_has_lease"),
    (PENDING, LEASED, "lease_resets", "lease_resets + 1", "WH411"),
    (PENDING, LEASED, "response_status", "200", "active_has_no_result"),
    (PENDING, LEASED, "error_code", "'HTTP_500'", "active_has_no_result"),
    (PENDING, LEASED, "finished_at", "now()", "finished_when_terminal"),
    # A Pending attempt has no lease columns.
    (PENDING, PENDING, "lease_until", "now()", "pending_has_no_lease"),
    (PENDING, PENDING, "lease_token", "gen_random_uuid()", "pending_has_no_lease"),
    (PENDING, PENDING, "worker_id", "'worker'", "pending_has_no_lease"),
    (PENDING, PENDING, "lease_resets", "lease_resets + 1", "WH411"),
    (PENDING, PENDING, "response_status", "200", "active_has_no_result"),
    # A lease keeps its token and its holder; a new lease needs Pending in between.
    (LEASED, LEASED, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, LEASED, "lease_token", "null", "WH411"),
    (LEASED, LEASED, "worker_id", "'another'", "WH411"),
    (LEASED, LEASED, "worker_id", "null", "WH411"),
    (LEASED, LEASED, "lease_until", "null", "leased_has_lease"),
    (LEASED, LEASED, "lease_resets", "lease_resets + 1", "WH411"),
    # Back in Pending the old token is invalid; a reset adds one to the counter, a release does not.
    (LEASED, PENDING, "lease_until", "lease_until", "pending_has_no_lease"),
    (LEASED, PENDING, "lease_token", "lease_token", "pending_has_no_lease"),
    (LEASED, PENDING, "worker_id", "worker_id", "pending_has_no_lease"),
    (LEASED, PENDING, "lease_resets", "lease_resets + 2", "WH411"),
    (LEASED, PENDING, "lease_resets", "lease_resets - 1", "WH411"),
    (LEASED, PENDING, "error_code", "'HTTP_500'", "active_has_no_result"),
    # Completed means a 2xx answer, reported by the holder of the lease.
    (LEASED, COMPLETED, "response_status", "199", "completed_is_2xx"),
    (LEASED, COMPLETED, "response_status", "300", "completed_is_2xx"),
    (LEASED, COMPLETED, "response_status", "500", "completed_is_2xx"),
    (LEASED, COMPLETED, "error_code", "'HTTP_500'", "completed_is_2xx"),
    (LEASED, COMPLETED, "lease_token", "null", "completed_is_2xx"),
    (LEASED, COMPLETED, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, COMPLETED, "finished_at", "null", "finished_when_terminal"),
    (LEASED, COMPLETED, "lease_resets", "lease_resets + 1", "WH411"),
    # Failed has an error code.
    (LEASED, FAILED, "error_code", "null", "failed_has_error"),
    (LEASED, FAILED, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, FAILED, "finished_at", "null", "finished_when_terminal"),
    (LEASED, FAILED, "lease_resets", "lease_resets + 1", "WH411"),
]

IDENTITY = {"id", "saga_id", "subscription_id", "attempt_at", "created_at"}

# A new attempt takes these columns from its saga.
BIRTH = {"saga_id": "id", "subscription_id": "subscription_id", "attempt_at": "next_attempt_at"}

# Legal steps by which a superuser moves a saga without any attempt.
STEPS: dict[SagaStatus, list[str]] = {
    SagaStatus.PENDING: [],
    SagaStatus.IN_PROGRESS: [update(SAGAS, {"status": "'InProgress'"})],
    SagaStatus.PENDING_RETRY: [
        update(SAGAS, {"status": "'InProgress'"}),
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
        update(SAGAS, {"status": "'InProgress'"}),
        update(SAGAS, {"status": "'Completed'", "attempt_count": "1"}),
    ],
    SagaStatus.DEAD_LETTERED: [
        update(SAGAS, {"status": "'InProgress'"}),
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


@pytest.mark.parametrize(("before", "after", "column", "expression", "refused_by"), WRONG)
async def test_legal_edge_with_a_wrong_column_is_refused(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, column: str, expression: str, refused_by: str
) -> None:
    """One wrong column makes a legal edge illegal."""
    job_id = await flow.job_in(before)
    right = LEGAL[before, after][0]
    assert await refusal(flow.superuser, change_to(after, right | {column: expression}), job_id) == refused_by
    assert await refusal(flow.superuser, change_to(after, right), job_id) is None


async def test_completed_without_an_answer_is_refused(flow: "Flow") -> None:
    """An attempt without an answer from the endpoint is not delivered."""
    job_id = await flow.job_in(LEASED)
    change = change_to(COMPLETED, DELIVERED | {"response_status": "null"})
    assert await refusal(flow.superuser, change, job_id) is not None


@pytest.mark.parametrize(("after", "companions"), [(COMPLETED, DELIVERED), (FAILED, REFUSED)])
async def test_report_cannot_stamp_the_result_as_applied(
    flow: "Flow", after: AttemptStatus, companions: dict[str, str]
) -> None:
    """A result stamped when it is reported would never be applied, and its saga would stay InProgress."""
    job_id = await flow.job_in(LEASED)
    change = change_to(after, companions | {"result_applied_at": "now()"})
    assert await refusal(flow.superuser, change, job_id) is not None


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
    assert await refusal(flow.superuser, stamp, job_id) == "active_has_no_result"


@pytest.mark.parametrize(
    ("changes", "refused_by"),
    [
        (TAKEN, "pending_has_no_lease"),
        ({"status": "'Leased'"} | TAKEN, "WH411"),
        ({"status": "'Completed'"} | TAKEN | DELIVERED, "WH411"),
        ({"status": "'Failed'"} | REFUSED, "WH411"),
        ({"lease_resets": "1"}, "WH411"),
        ({"result_applied_at": "now()"}, "WH411"),
        ({"response_status": "200"}, "active_has_no_result"),
        ({"error_code": "'HTTP_500'"}, "active_has_no_result"),
        ({"finished_at": "now()"}, "finished_when_terminal"),
    ],
)
async def test_new_attempt_is_pending_without_lease_or_result(
    flow: "Flow", changes: dict[str, str], refused_by: str
) -> None:
    """A new attempt with another status, a lease, a reset, a result or a stamp is refused."""
    saga_id = await saga_without_attempt(flow, SagaStatus.IN_PROGRESS)
    assert await refusal(flow.superuser, birth(**changes), saga_id) == refused_by
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
    ("column", "expression", "refused_by"),
    [
        ("subscription_id", "$2::bigint", "WH411"),
        ("subscription_id", "$2::bigint + 1000", "WH411"),
        ("attempt_at", "next_attempt_at + $2::bigint * interval '1 us'", "WH411"),
        ("attempt_at", "next_attempt_at - $2::bigint * interval '1 us'", "WH411"),
        ("saga_id", "id + 1000 * $2::bigint", "WH411"),
    ],
    ids=["another subscription", "no subscription", "too late", "too early", "no saga"],
)
async def test_attempt_must_match_its_saga(
    flow: "Flow", column: str, expression: str, refused_by: str
) -> None:
    """Another subscription ($2), another due time and a missing saga are refused."""
    saga_id = await saga_without_attempt(flow, SagaStatus.IN_PROGRESS)
    another_id = await flow.subscribe("other.type")
    assert await refusal(flow.superuser, birth(**{column: expression}), saga_id, another_id) == refused_by
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
        insert into webhookd.webhook_delivery_jobs (saga_id, subscription_id, attempt_at)
        select saga_id, subscription_id, attempt_at + interval '1 second'
        from webhookd.webhook_delivery_jobs where id = $1
        """
    assert await refusal(flow.superuser, second, job_id) == "idx_job_saga"


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_due_time_is_used_once(flow: "Flow", status: AttemptStatus) -> None:
    """A finished attempt keeps its due time: no other attempt of its saga may have the same."""
    job_id = await flow.job_in(status)
    again = """
        insert into webhookd.webhook_delivery_jobs (saga_id, subscription_id, attempt_at)
        select saga_id, subscription_id, attempt_at from webhookd.webhook_delivery_jobs where id = $1
        """
    assert await refusal(flow.superuser, again, job_id) == "uniq_job_saga_attempt"
