"""The job's state machine, as triggers and constraints keep it: a superuser asks, so no right decides."""

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

# What goes with a change towards each status, with nothing missing.
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

# Every legal edge, with the ways to go it.
EDGES: dict[tuple[AttemptStatus, AttemptStatus], list[dict[str, str]]] = {
    (PENDING, LEASED): [TAKEN],
    (LEASED, COMPLETED): [DELIVERED],
    (LEASED, FAILED): [REFUSED, GIVEN_UP],
    (LEASED, PENDING): [RESET, GIVEN_BACK],
}
# No edges: nothing changes, or the same lease lasts longer.
STAYS: dict[tuple[AttemptStatus, AttemptStatus], list[dict[str, str]]] = {
    (PENDING, PENDING): [{}],
    (LEASED, LEASED): [EXTENDED],
}
LEGAL = EDGES | STAYS
LEGAL_CHANGES = [(*pair, way) for pair, ways in LEGAL.items() for way in ways]
ILLEGAL = [pair for pair in product(AttemptStatus, repeat=2) if pair not in LEGAL]
# Everything that could make an illegal edge look right.
WAYS = [way for ways in LEGAL.values() for way in ways] + [TAKEN | DELIVERED, TAKEN | REFUSED]

# One wrong companion of an otherwise right change, and what refuses it.
WRONG: list[tuple[AttemptStatus, AttemptStatus, str, str, str]] = [
    # A lease has an end, a token and a holder, and is no reset.
    (PENDING, LEASED, "lease_until", "null", "leased_has_lease"),
    (PENDING, LEASED, "lease_token", "null", "leased_has_lease"),
    (PENDING, LEASED, "worker_id", "null", "leased_has_lease"),
    (PENDING, LEASED, "lease_resets", "lease_resets + 1", "WH411"),
    (PENDING, LEASED, "response_status", "200", "active_has_no_result"),
    (PENDING, LEASED, "error_code", "'HTTP_500'", "active_has_no_result"),
    (PENDING, LEASED, "finished_at", "now()", "finished_when_terminal"),
    # Without a lease, nothing of one.
    (PENDING, PENDING, "lease_until", "now()", "pending_has_no_lease"),
    (PENDING, PENDING, "lease_token", "gen_random_uuid()", "pending_has_no_lease"),
    (PENDING, PENDING, "worker_id", "'worker'", "pending_has_no_lease"),
    (PENDING, PENDING, "lease_resets", "lease_resets + 1", "WH411"),
    (PENDING, PENDING, "response_status", "200", "active_has_no_result"),
    # The same lease keeps its token and its holder; another lease comes by way of Pending.
    (LEASED, LEASED, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, LEASED, "lease_token", "null", "WH411"),
    (LEASED, LEASED, "worker_id", "'another'", "WH411"),
    (LEASED, LEASED, "worker_id", "null", "WH411"),
    (LEASED, LEASED, "lease_until", "null", "leased_has_lease"),
    (LEASED, LEASED, "lease_resets", "lease_resets + 1", "WH411"),
    # Given back, the late holder's token is worth nothing; a reset counts one, a release none.
    (LEASED, PENDING, "lease_until", "lease_until", "pending_has_no_lease"),
    (LEASED, PENDING, "lease_token", "lease_token", "pending_has_no_lease"),
    (LEASED, PENDING, "worker_id", "worker_id", "pending_has_no_lease"),
    (LEASED, PENDING, "lease_resets", "lease_resets + 2", "WH411"),
    (LEASED, PENDING, "lease_resets", "lease_resets - 1", "WH411"),
    (LEASED, PENDING, "error_code", "'HTTP_500'", "active_has_no_result"),
    # Completed is a 2xx, told by the holder of the lease.
    (LEASED, COMPLETED, "response_status", "199", "completed_is_2xx"),
    (LEASED, COMPLETED, "response_status", "300", "completed_is_2xx"),
    (LEASED, COMPLETED, "response_status", "500", "completed_is_2xx"),
    (LEASED, COMPLETED, "error_code", "'HTTP_500'", "completed_is_2xx"),
    (LEASED, COMPLETED, "lease_token", "null", "completed_is_2xx"),
    (LEASED, COMPLETED, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, COMPLETED, "finished_at", "null", "finished_when_terminal"),
    (LEASED, COMPLETED, "lease_resets", "lease_resets + 1", "WH411"),
    # Failed names its error.
    (LEASED, FAILED, "error_code", "null", "failed_has_error"),
    (LEASED, FAILED, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, FAILED, "finished_at", "null", "finished_when_terminal"),
    (LEASED, FAILED, "lease_resets", "lease_resets + 1", "WH411"),
]

IDENTITY = {"id", "saga_id", "subscription_id", "attempt_at", "created_at"}

# A job as it is rightly born, from its saga's columns.
BIRTH = {"saga_id": "id", "subscription_id": "subscription_id", "attempt_at": "next_attempt_at"}

# How a superuser brings a saga on without any job, by legal steps.
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
    """The UPDATE towards a status."""
    return update(JOBS, {"status": f"'{status}'"} | companions)


def birth(**changes: str) -> str:
    """The INSERT of a job for saga $1, right but for the changes."""
    return insert(JOBS, BIRTH | changes, SAGAS)


async def saga_without_job(flow: "Flow", status: SagaStatus) -> int:
    """A saga that never had a job, so that no unique index answers before the trigger."""
    saga_id = await flow.saga_in(SagaStatus.PENDING)
    async with flow.superuser.transaction():
        for step in STEPS[status]:
            await flow.superuser.execute(step, saga_id)
    assert await flow.saga_status(saga_id) is status
    return saga_id


@pytest.mark.parametrize(("before", "after", "companions"), LEGAL_CHANGES)
async def test_a_legal_change_is_served(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, companions: dict[str, str]
) -> None:
    """Each way of each legal edge commits, and so do a touch and a longer lease."""
    job_id = await flow.job_in(before)
    await flow.superuser.execute(change_to(after, companions), job_id)
    assert await flow.job_status(job_id) is after


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
async def test_any_other_change_is_refused(flow: "Flow", before: AttemptStatus, after: AttemptStatus) -> None:
    """No other pair of states passes, whatever goes with it."""
    job_id = await flow.job_in(before)
    expected = "WH410" if before in {COMPLETED, FAILED} else "WH411"
    for companions in WAYS:
        assert await refusal(flow.superuser, change_to(after, companions), job_id) == expected, companions


@pytest.mark.parametrize(("before", "after", "column", "expression", "refused_by"), WRONG)
async def test_a_legal_edge_with_a_wrong_companion_is_refused(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, column: str, expression: str, refused_by: str
) -> None:
    """One wrong column spoils an edge that is served without it."""
    job_id = await flow.job_in(before)
    right = LEGAL[before, after][0]
    assert await refusal(flow.superuser, change_to(after, right | {column: expression}), job_id) == refused_by
    assert await refusal(flow.superuser, change_to(after, right), job_id) is None


async def test_completed_without_an_answer_is_refused(flow: "Flow") -> None:
    """A job whose endpoint answered nothing is not delivered."""
    job_id = await flow.job_in(LEASED)
    change = change_to(COMPLETED, DELIVERED | {"response_status": "null"})
    assert await refusal(flow.superuser, change, job_id) is not None


@pytest.mark.parametrize(("after", "companions"), [(COMPLETED, DELIVERED), (FAILED, REFUSED)])
async def test_a_result_is_not_stamped_in_the_update_that_reports_it(
    flow: "Flow", after: AttemptStatus, companions: dict[str, str]
) -> None:
    """A result stamped at its report would never be applied: the saga would stay InProgress for ever."""
    job_id = await flow.job_in(LEASED)
    change = change_to(after, companions | {"result_applied_at": "now()"})
    assert await refusal(flow.superuser, change, job_id) is not None


@pytest.mark.parametrize("response_status", [200, 204, 299])
async def test_any_2xx_completes(flow: "Flow", response_status: int) -> None:
    """The bounds of 2xx are inside."""
    job_id = await flow.job_in(LEASED)
    change = change_to(COMPLETED, DELIVERED | {"response_status": str(response_status)})
    assert await refusal(flow.superuser, change, job_id) is None


@pytest.mark.parametrize(("before", "after", "companions"), LEGAL_CHANGES)
async def test_no_legal_change_takes_an_identity_column_along(
    flow: "Flow", before: AttemptStatus, after: AttemptStatus, companions: dict[str, str]
) -> None:
    """What a job is an attempt of stays, whichever edge it goes."""
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
async def test_no_column_of_a_finished_job_changes(
    flow: "Flow", status: AttemptStatus, *, applied: bool
) -> None:
    """Each column the catalog lists is refused another value, and even its own; but for the one stamp."""
    job_id = await flow.job_in(status, applied=applied)
    for column in await columns(flow.superuser, JOBS):
        if column.name != "result_applied_at" or applied:
            changed = update(JOBS, {column.name: column.different})
            assert await refusal(flow.superuser, changed, job_id) == "WH410", column.name
        if not column.is_identity:
            unchanged = update(JOBS, {column.name: column.name})
            assert await refusal(flow.superuser, unchanged, job_id) == "WH410", column.name


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_a_finished_job_is_stamped_once(flow: "Flow", status: AttemptStatus) -> None:
    """The stamp is served; a second, another or none in its place is refused."""
    job_id = await flow.job_in(status)
    await flow.superuser.execute(update(JOBS, {"result_applied_at": "now()"}), job_id)
    for expression in ("now()", "result_applied_at", "null"):
        again = update(JOBS, {"result_applied_at": expression})
        assert await refusal(flow.superuser, again, job_id) == "WH410", expression


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_the_stamp_comes_alone(flow: "Flow", status: AttemptStatus) -> None:
    """Together with a change of any other column the catalog lists, the stamp is refused."""
    job_id = await flow.job_in(status)
    stamp = {"result_applied_at": "now()"}
    for column in await columns(flow.superuser, JOBS):
        if column.name not in stamp:
            both = update(JOBS, stamp | {column.name: column.different})
            assert await refusal(flow.superuser, both, job_id) == "WH410", column.name
    assert await refusal(flow.superuser, update(JOBS, stamp), job_id) is None


@pytest.mark.parametrize("status", [PENDING, LEASED])
async def test_an_unfinished_job_takes_no_stamp(flow: "Flow", status: AttemptStatus) -> None:
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
async def test_a_job_is_born_pending_without_lease_or_result(
    flow: "Flow", changes: dict[str, str], refused_by: str
) -> None:
    """Born in another state, with a lease, a reset, a result or a stamp, a job is refused."""
    saga_id = await saga_without_job(flow, SagaStatus.IN_PROGRESS)
    assert await refusal(flow.superuser, birth(**changes), saga_id) == refused_by
    assert await refusal(flow.superuser, birth(), saga_id) is None


@pytest.mark.parametrize("status", [status for status in SagaStatus if status is not SagaStatus.IN_PROGRESS])
async def test_no_job_is_made_for_a_saga_that_is_not_in_progress(flow: "Flow", status: SagaStatus) -> None:
    """Its subscription and due time are right, only the saga's status is not."""
    saga_id = await saga_without_job(flow, status)
    assert await refusal(flow.superuser, birth(), saga_id) == "WH411"


async def test_a_job_is_made_for_a_saga_in_progress(flow: "Flow") -> None:
    """The same INSERT that is refused in every other status commits in this one."""
    saga_id = await saga_without_job(flow, SagaStatus.IN_PROGRESS)
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
async def test_a_job_is_of_its_sagas_subscription_and_due_time(
    flow: "Flow", column: str, expression: str, refused_by: str
) -> None:
    """A job for another subscription ($2), another instant or no saga at all is refused."""
    saga_id = await saga_without_job(flow, SagaStatus.IN_PROGRESS)
    another_id = await flow.subscribe("other.type")
    assert await refusal(flow.superuser, birth(**{column: expression}), saga_id, another_id) == refused_by
    assert await refusal(flow.superuser, birth(), saga_id) is None


async def test_one_wrong_job_refuses_the_whole_insert(flow: "Flow") -> None:
    """The trigger looks at every row of a statement, not at the first."""
    in_progress_id = await saga_without_job(flow, SagaStatus.IN_PROGRESS)
    pending_id = await flow.saga_in(SagaStatus.PENDING)
    both = f"{birth()} or id = $2 order by id"
    assert await refusal(flow.superuser, both, in_progress_id, pending_id) == "WH411"


@pytest.mark.parametrize("status", [PENDING, LEASED])
async def test_a_saga_has_one_active_job(flow: "Flow", status: AttemptStatus) -> None:
    """A second one is refused by the index, also for another instant."""
    job_id = await flow.job_in(status)
    second = """
        insert into webhookd.webhook_delivery_jobs (saga_id, subscription_id, attempt_at)
        select saga_id, subscription_id, attempt_at + interval '1 second'
        from webhookd.webhook_delivery_jobs where id = $1
        """
    assert await refusal(flow.superuser, second, job_id) == "idx_job_saga"


@pytest.mark.parametrize("status", [COMPLETED, FAILED])
async def test_an_attempt_has_one_job(flow: "Flow", status: AttemptStatus) -> None:
    """A finished job keeps its instant: no other of its saga gets the same."""
    job_id = await flow.job_in(status)
    again = """
        insert into webhookd.webhook_delivery_jobs (saga_id, subscription_id, attempt_at)
        select saga_id, subscription_id, attempt_at from webhookd.webhook_delivery_jobs where id = $1
        """
    assert await refusal(flow.superuser, again, job_id) == "uniq_job_saga_attempt"
