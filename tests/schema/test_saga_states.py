"""The state machine of sagas, enforced by triggers; a superuser tries every change."""

from itertools import product
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.support.catalog import columns, refusal, undone, update
from webhookd.core.states import SagaStatus

if TYPE_CHECKING:
    from tests.support.flow import Flow

PENDING, IN_PROGRESS, PENDING_RETRY, COMPLETED, DEAD_LETTERED = SagaStatus
SAGAS = "webhookd.webhook_delivery_sagas"
LATER = "next_attempt_at + interval '1 minute'"
EARLIER = "next_attempt_at - interval '1 minute'"
NEXT_JOB = "coalesce(job_id, 0) + 1"

# Every legal edge, with the columns that change together with the status.
EDGES: dict[tuple[SagaStatus, SagaStatus], dict[str, str]] = {
    (PENDING, IN_PROGRESS): {"job_id": NEXT_JOB},
    (PENDING_RETRY, IN_PROGRESS): {"job_id": NEXT_JOB},
    (IN_PROGRESS, COMPLETED): {"attempt_count": "attempt_count + 1"},
    (IN_PROGRESS, PENDING_RETRY): {
        "attempt_count": "attempt_count + 1",
        "next_attempt_at": LATER,
        "final_error_code": "'HTTP_500'",
    },
    (IN_PROGRESS, DEAD_LETTERED): {"attempt_count": "attempt_count + 1", "final_error_code": "'HTTP_500'"},
    (PENDING_RETRY, DEAD_LETTERED): {},
}
# No status change: an operator moves the due time of a waiting saga.
STAYS: dict[tuple[SagaStatus, SagaStatus], dict[str, str]] = {
    (PENDING, PENDING): {"next_attempt_at": LATER},
    (PENDING_RETRY, PENDING_RETRY): {"next_attempt_at": LATER},
}
LEGAL = EDGES | STAYS
ILLEGAL = [pair for pair in product(SagaStatus, repeat=2) if pair not in LEGAL]

# One wrong column of an otherwise legal change.
WRONG: list[tuple[SagaStatus, SagaStatus, str, str]] = [
    # An attempt starts: it has a new job, and nothing else changes.
    (PENDING, IN_PROGRESS, "job_id", "null"),
    (PENDING_RETRY, IN_PROGRESS, "job_id", "null"),
    (PENDING_RETRY, IN_PROGRESS, "job_id", "job_id"),
    (PENDING, IN_PROGRESS, "attempt_count", "attempt_count + 1"),
    (PENDING, IN_PROGRESS, "next_attempt_at", LATER),
    (PENDING, IN_PROGRESS, "next_attempt_at", EARLIER),
    (PENDING, IN_PROGRESS, "final_error_code", "'HTTP_500'"),
    (PENDING_RETRY, IN_PROGRESS, "attempt_count", "attempt_count + 1"),
    (PENDING_RETRY, IN_PROGRESS, "attempt_count", "0"),
    (PENDING_RETRY, IN_PROGRESS, "next_attempt_at", LATER),
    (PENDING_RETRY, IN_PROGRESS, "final_error_code", "null"),
    (PENDING_RETRY, IN_PROGRESS, "final_error_code", "'OTHER'"),
    # A success adds one attempt and keeps the due time and the last error.
    (IN_PROGRESS, COMPLETED, "attempt_count", "attempt_count"),
    (IN_PROGRESS, COMPLETED, "attempt_count", "attempt_count + 2"),
    (IN_PROGRESS, COMPLETED, "attempt_count", "attempt_count - 1"),
    (IN_PROGRESS, COMPLETED, "next_attempt_at", LATER),
    (IN_PROGRESS, COMPLETED, "final_error_code", "'HTTP_500'"),
    (IN_PROGRESS, COMPLETED, "job_id", "job_id + 1"),
    (IN_PROGRESS, COMPLETED, "job_id", "null"),
    # A failure adds one attempt, sets the error, and moves the due time later.
    (IN_PROGRESS, PENDING_RETRY, "attempt_count", "attempt_count"),
    (IN_PROGRESS, PENDING_RETRY, "attempt_count", "attempt_count + 2"),
    (IN_PROGRESS, PENDING_RETRY, "next_attempt_at", "next_attempt_at"),
    (IN_PROGRESS, PENDING_RETRY, "next_attempt_at", EARLIER),
    (IN_PROGRESS, PENDING_RETRY, "final_error_code", "null"),
    (IN_PROGRESS, PENDING_RETRY, "job_id", "job_id + 1"),
    (IN_PROGRESS, PENDING_RETRY, "job_id", "null"),
    # The last failure adds one attempt and sets the error.
    (IN_PROGRESS, DEAD_LETTERED, "attempt_count", "attempt_count"),
    (IN_PROGRESS, DEAD_LETTERED, "attempt_count", "attempt_count + 2"),
    (IN_PROGRESS, DEAD_LETTERED, "next_attempt_at", LATER),
    (IN_PROGRESS, DEAD_LETTERED, "final_error_code", "null"),
    (IN_PROGRESS, DEAD_LETTERED, "job_id", "job_id + 1"),
    (IN_PROGRESS, DEAD_LETTERED, "job_id", "null"),
    # After the limit was lowered: no new attempt, and the error of the last attempt stays.
    (PENDING_RETRY, DEAD_LETTERED, "attempt_count", "attempt_count + 1"),
    (PENDING_RETRY, DEAD_LETTERED, "next_attempt_at", LATER),
    (PENDING_RETRY, DEAD_LETTERED, "final_error_code", "'OTHER'"),
    (PENDING_RETRY, DEAD_LETTERED, "final_error_code", "null"),
    (PENDING_RETRY, DEAD_LETTERED, "job_id", "job_id + 1"),
    (PENDING_RETRY, DEAD_LETTERED, "job_id", "null"),
    # While a saga waits, only the due time may change.
    (PENDING, PENDING, "attempt_count", "attempt_count + 1"),
    (PENDING, PENDING, "final_error_code", "'HTTP_500'"),
    (PENDING_RETRY, PENDING_RETRY, "attempt_count", "attempt_count + 1"),
    (PENDING_RETRY, PENDING_RETRY, "attempt_count", "0"),
    (PENDING_RETRY, PENDING_RETRY, "final_error_code", "'OTHER'"),
    (PENDING, PENDING, "job_id", "1"),
    (PENDING_RETRY, PENDING_RETRY, "job_id", "job_id + 1"),
    (PENDING_RETRY, PENDING_RETRY, "job_id", "null"),
]

IDENTITY = {"id", "event_id", "subscription_id", "dead_letter_id", "resent_from", "created_at"}
CHANGEABLE = {"status", "attempt_count", "next_attempt_at", "final_error_code", "updated_at", "job_id"}


async def drop_foreign_keys(flow: "Flow") -> None:
    """Drop the foreign keys, which refuse some changes of keys first, so that only the triggers are left."""
    await flow.superuser.execute(
        f"alter table {SAGAS} drop constraint saga_of_dead_letter; "
        "alter table webhookd.dead_letters drop constraint dead_letters_saga_id_fkey"
    )


def change_to(status: SagaStatus, companions: dict[str, str]) -> str:
    """Return the UPDATE to a status."""
    return update(SAGAS, {"status": f"'{status}'"} | companions)


@pytest.mark.parametrize(("before", "after"), LEGAL)
async def test_legal_change_is_accepted(flow: "Flow", before: SagaStatus, after: SagaStatus) -> None:
    """Every legal edge commits with the right columns, and so does a later due time."""
    saga_id = await flow.saga_in(before)
    async with flow.superuser.transaction():
        await flow.superuser.execute(change_to(after, LEGAL[before, after]), saga_id)
        if after is DEAD_LETTERED:
            await flow.superuser.execute("select webhookd.bury(array[$1::bigint])", saga_id)
    assert await flow.saga_status(saga_id) is after


@pytest.mark.parametrize(("before", "after"), ILLEGAL)
async def test_any_other_change_is_refused(flow: "Flow", before: SagaStatus, after: SagaStatus) -> None:
    """No other pair of statuses is accepted, with the columns of any legal edge."""
    saga_id = await flow.saga_in(before)
    expected = "WH410" if before in {COMPLETED, DEAD_LETTERED} else "WH411"
    for companions in [*LEGAL.values(), {"final_error_code": "'HTTP_500'"}]:
        assert await refusal(flow.superuser, change_to(after, companions), saga_id) == expected, companions


@pytest.mark.parametrize(("before", "after", "column", "expression"), WRONG)
async def test_legal_edge_with_a_wrong_column_is_refused(
    flow: "Flow", before: SagaStatus, after: SagaStatus, column: str, expression: str
) -> None:
    """One wrong column makes a legal edge illegal."""
    saga_id = await flow.saga_in(before)
    right = LEGAL[before, after]
    assert await refusal(flow.superuser, change_to(after, right | {column: expression}), saga_id) == "WH411"
    assert await refusal(flow.superuser, change_to(after, right), saga_id) is None


async def test_success_keeps_the_previous_error(flow: "Flow") -> None:
    """A delivery that failed before keeps its error code when it succeeds."""
    saga_id = await flow.saga_in(PENDING_RETRY)
    await flow.start()
    right = EDGES[IN_PROGRESS, COMPLETED]
    for expression in ("null", "'OTHER'"):
        wrong = change_to(COMPLETED, right | {"final_error_code": expression})
        assert await refusal(flow.superuser, wrong, saga_id) == "WH411", expression
    await flow.superuser.execute(change_to(COMPLETED, right), saga_id)
    assert (
        await flow.daemon.fetchval(
            "select final_error_code from webhookd.webhook_delivery_sagas where id = $1", saga_id
        )
        == "HTTP_500"
    )


@pytest.mark.parametrize(
    ("status", "attempt_count", "final_error_code", "job_id"),
    [
        (IN_PROGRESS, 0, None, None),
        (PENDING_RETRY, 0, "HTTP_500", None),
        (COMPLETED, 0, None, None),
        (DEAD_LETTERED, 0, "HTTP_500", None),
        (PENDING, 1, None, None),
        (PENDING, -1, None, None),
        (PENDING, 0, "HTTP_500", None),
        (PENDING, 0, None, 1),
    ],
)
async def test_new_saga_is_pending_without_attempts(
    flow: "Flow", status: SagaStatus, attempt_count: int, final_error_code: str | None, job_id: int | None
) -> None:
    """A new saga with another status, attempts, an error or a job is refused; any other is accepted."""
    pair = (await flow.publish(), await flow.subscribe())
    birth = """
        insert into webhookd.webhook_delivery_sagas
            (event_id, subscription_id, status, attempt_count, final_error_code, job_id)
        values ($1, $2, $3, $4, $5, $6)
        """
    wrong = (status, attempt_count, final_error_code, job_id)
    assert await refusal(flow.superuser, birth, *pair, *wrong) == "WH411"
    assert await refusal(flow.superuser, birth, *pair, PENDING, 0, None, None) is None


@pytest.mark.parametrize("missing", ["event", "subscription"])
async def test_one_saga_without_event_or_subscription_refuses_the_whole_insert(
    flow: "Flow", missing: str
) -> None:
    """The trigger replaces two foreign keys, and checks every row of a statement."""
    pair = (await flow.publish(), await flow.subscribe())
    birth = f"insert into {SAGAS} (event_id, subscription_id) values ($1, $2), ($3, $4)"
    unknown = (pair[0] + 1000, pair[1]) if missing == "event" else (pair[0], pair[1] + 1000)
    other = (await flow.publish(), pair[1])
    assert await refusal(flow.superuser, birth, *pair, *unknown) == "WH411"
    assert await refusal(flow.superuser, birth, *pair, *other) is None


async def test_one_wrong_saga_refuses_the_whole_update(flow: "Flow") -> None:
    """Every row of a statement is checked, not only the first."""
    subscription_id = await flow.subscribe()
    first, second = [await flow.saga_in(PENDING, subscription_id=subscription_id) for _ in range(2)]
    start = (
        f"update {SAGAS} set status = 'InProgress', job_id = id, "
        "attempt_count = case when id = $1 then 1 else 0 end"
    )
    for wrong_id in (first, second):
        assert await refusal(flow.superuser, start, wrong_id) == "WH411"
    assert await refusal(flow.superuser, start, 0) is None


async def test_every_column_is_identity_or_changeable(flow: "Flow") -> None:
    """A new column must be added to one of the two lists, here and in the trigger."""
    names = {column.name for column in await columns(flow.superuser, SAGAS)}
    assert names == IDENTITY | CHANGEABLE


@pytest.mark.parametrize(("before", "after"), LEGAL)
async def test_identity_columns_never_change(flow: "Flow", before: SagaStatus, after: SagaStatus) -> None:
    """No edge may change what a saga is about."""
    await drop_foreign_keys(flow)
    saga_id = await flow.saga_in(before)
    right = LEGAL[before, after]
    for column in await columns(flow.superuser, SAGAS):
        if column.name in IDENTITY:
            wrong = change_to(after, right | {column.name: column.different})
            assert await refusal(flow.superuser, wrong, saga_id) == "WH411", column.name
    assert await refusal(flow.superuser, change_to(after, right), saga_id) is None


@pytest.mark.parametrize("status", [COMPLETED, DEAD_LETTERED])
async def test_terminal_saga_is_immutable(flow: "Flow", status: SagaStatus) -> None:
    """Every column in the catalog is refused, even with its own value."""
    await drop_foreign_keys(flow)
    saga_id = await flow.saga_in(status)
    for column in await columns(flow.superuser, SAGAS):
        changed = update(SAGAS, {column.name: column.different})
        assert await refusal(flow.superuser, changed, saga_id) == "WH410", column.name
        if not column.is_identity:
            unchanged = update(SAGAS, {column.name: column.name})
            assert await refusal(flow.superuser, unchanged, saga_id) == "WH410", column.name


@pytest.mark.parametrize("role", ["webhookd_owner", "saga_orchestrator"])
@pytest.mark.parametrize("status", [COMPLETED, DEAD_LETTERED])
async def test_terminal_saga_is_immutable_for_roles_with_update(
    flow: "Flow", status: SagaStatus, role: str
) -> None:
    """The trigger, not a missing right, refuses the owner and the orchestrator."""
    saga_id = await flow.saga_in(status)
    async with undone(flow.superuser):
        await flow.superuser.execute(f"set local role {role}")
        assert await refusal(flow.superuser, update(SAGAS, {"updated_at": "now()"}), saga_id) == "WH410"


@pytest.mark.parametrize("before", [IN_PROGRESS, PENDING_RETRY])
async def test_dead_lettered_needs_its_dead_letter_at_commit(flow: "Flow", before: SagaStatus) -> None:
    """The UPDATE is accepted, the COMMIT is not, and the saga keeps its status."""
    saga_id = await flow.saga_in(before)
    transaction = flow.superuser.transaction()
    await transaction.start()
    await flow.superuser.execute(change_to(DEAD_LETTERED, EDGES[before, DEAD_LETTERED]), saga_id)
    with pytest.raises(asyncpg.PostgresError, match="without a dead letter") as failed:
        await transaction.commit()
    assert failed.value.sqlstate == "WH411"
    assert await flow.saga_status(saga_id) is before


async def test_due_time_never_moves_back_to_an_earlier_attempt(flow: "Flow") -> None:
    """A due time at or before an existing attempt is refused: the key of the next attempt would be taken."""
    saga_id = await flow.saga_in(PENDING_RETRY)
    await flow.attempt(500)
    first, last = [
        row["attempt_at"]
        for row in await flow.daemon.fetch(
            "select attempt_at from webhookd.webhook_delivery_jobs where saga_id = $1 order by id", saga_id
        )
    ]
    move = update(SAGAS, {"next_attempt_at": "$2::timestamptz + $3::text::interval"})
    for attempt_at, offset in [(first, "-1 s"), (first, "0"), (first, "1 us"), (last, "-1 us"), (last, "0")]:
        assert await refusal(flow.superuser, move, saga_id, attempt_at, offset) == "WH411", (
            attempt_at,
            offset,
        )
    for offset in ("1 us", "1 day"):
        assert await refusal(flow.superuser, move, saga_id, last, offset) is None, offset


async def test_saga_without_attempts_may_be_due_at_any_time(flow: "Flow") -> None:
    """The due time of a Pending saga may move in both directions."""
    saga_id = await flow.saga_in(PENDING)
    for expression in (EARLIER, LATER):
        assert await refusal(flow.superuser, update(SAGAS, {"next_attempt_at": expression}), saga_id) is None


async def test_saga_in_progress_changes_only_by_an_edge(flow: "Flow") -> None:
    """While its attempt runs, no column changes without a status change."""
    await drop_foreign_keys(flow)
    saga_id = await flow.saga_in(IN_PROGRESS)
    for column in await columns(flow.superuser, SAGAS):
        if column.name != "status":
            changed = update(SAGAS, {column.name: column.different})
            assert await refusal(flow.superuser, changed, saga_id) == "WH411", column.name
