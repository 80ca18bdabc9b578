"""The nine states as triggers and constraints enforce them, tested as a superuser."""

import re
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.support.catalog import columns, refusal, undone, update
from tests.support.job_queue import KIND, JobQueue, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.database import Connection, Database

TABLE = "webhookd.job_queue"
README = Path(__file__).parents[2] / "schema" / "README.md"
LEASE = {
    "lease_name": "'lease'",
    "lease_holder": "'holder'",
    "lease_token": "gen_random_uuid()",
    "leased_until": "now() + interval '1 minute'",
    "lease_ttl_seconds": "60",
}
FAILURE = {
    "attempts": "attempts + 1",
    "leased_until": "null",
    "last_error_code": "'BROKEN'",
    "last_error_at": "now()",
}
SUCCESS = {"attempts": "attempts + 1", "leased_until": "null", "finished_at": "now()"}
RECOVERY = {
    "lease_recoveries": "lease_recoveries + 1",
    "lease_token": "null",
    "leased_until": "null",
    "process_after": "now()",
}
CANCELLING = {"cancel_reason": "'not needed'", "finished_at": "now()"}
CLEANING = {"cleaned_from": "status", "safe_payload": "'{}'"}

QUEUED, LEASED, IN_PROGRESS, SUCCEEDED, FAILED, RETRY_WAITING, DEAD_LETTER, CANCELLED, CLEANED = Status

# Every edge, with the columns it changes beside the status.
EDGES: "dict[tuple[Status, Status], Mapping[str, str]]" = {
    (QUEUED, LEASED): LEASE,
    (QUEUED, CANCELLED): CANCELLING,
    (LEASED, IN_PROGRESS): {"started_at": "now()"},
    (LEASED, SUCCEEDED): SUCCESS,
    (LEASED, FAILED): FAILURE,
    (LEASED, QUEUED): RECOVERY,
    (IN_PROGRESS, SUCCEEDED): SUCCESS,
    (IN_PROGRESS, FAILED): FAILURE,
    (IN_PROGRESS, QUEUED): RECOVERY,
    (FAILED, RETRY_WAITING): {"process_after": "process_after + interval '30 s'", "lease_recoveries": "0"},
    (FAILED, DEAD_LETTER): {"finished_at": "now()"},
    (RETRY_WAITING, QUEUED): {},
    (RETRY_WAITING, CANCELLED): CANCELLING,
    (DEAD_LETTER, CANCELLED): CANCELLING,
    (SUCCEEDED, CLEANED): CLEANING,
    (CANCELLED, CLEANED): CLEANING,
}
# The status stays: an operator moves a time, or a lease is renewed.
STAYS: "dict[tuple[Status, Status], Mapping[str, str]]" = {
    (QUEUED, QUEUED): {"process_after": "now() + interval '1 hour'", "scheduled": "true"},
    (LEASED, LEASED): {"leased_until": "leased_until + interval '1 minute'"},
    (IN_PROGRESS, IN_PROGRESS): {
        "leased_until": "leased_until + interval '1 minute'",
        "status_signal": "'half'",
    },
    (RETRY_WAITING, RETRY_WAITING): {"process_after": "now()"},
}
LEGAL = EDGES | STAYS

# One wrong column in an otherwise valid change.
WRONG: list[tuple[Status, Status, str, str, str]] = [
    (QUEUED, LEASED, "attempts", "attempts + 1", "WH411"),
    (QUEUED, LEASED, "lease_token", "null", "WH411"),
    (QUEUED, LEASED, "lease_holder", "null", "leased_has_lease"),
    (QUEUED, LEASED, "leased_until", "null", "leased_has_lease"),
    (QUEUED, LEASED, "process_after", "now() + interval '1 day'", "WH411"),
    (QUEUED, LEASED, "lease_recoveries", "7", "WH411"),
    (QUEUED, LEASED, "result_ref", "'made up'", "WH411"),
    (QUEUED, LEASED, "safe_payload", """'{"a": 1}'""", "WH411"),
    (QUEUED, CANCELLED, "cancel_reason", "null", "cancelled_has_reason"),
    (QUEUED, CANCELLED, "finished_at", "null", "finished_when_over"),
    (QUEUED, CANCELLED, "attempts", "attempts + 1", "WH411"),
    (LEASED, IN_PROGRESS, "started_at", "null", "WH411"),
    (LEASED, IN_PROGRESS, "lease_token", "gen_random_uuid()", "WH411"),
    (LEASED, IN_PROGRESS, "lease_holder", "'another'", "WH411"),
    (LEASED, IN_PROGRESS, "attempts", "attempts + 1", "WH411"),
    (LEASED, LEASED, "lease_token", "gen_random_uuid()", "WH411"),
    (IN_PROGRESS, IN_PROGRESS, "lease_token", "gen_random_uuid()", "WH411"),
    (IN_PROGRESS, IN_PROGRESS, "started_at", "now() + interval '1 s'", "WH411"),
    (IN_PROGRESS, SUCCEEDED, "attempts", "attempts", "WH411"),
    (IN_PROGRESS, SUCCEEDED, "lease_token", "null", "WH411"),
    (IN_PROGRESS, SUCCEEDED, "last_error_code", "'BROKEN'", "WH411"),
    (IN_PROGRESS, SUCCEEDED, "leased_until", "now()", "leased_has_lease"),
    (IN_PROGRESS, FAILED, "attempts", "attempts + 2", "WH411"),
    (IN_PROGRESS, FAILED, "lease_token", "gen_random_uuid()", "WH411"),
    (IN_PROGRESS, FAILED, "last_error_code", "null", "failed_has_error"),
    (LEASED, QUEUED, "lease_recoveries", "lease_recoveries", "WH411"),
    (LEASED, QUEUED, "lease_token", "lease_token", "WH411"),
    (LEASED, QUEUED, "attempts", "attempts + 1", "WH411"),
    (LEASED, QUEUED, "process_after", "now() + interval '1 s'", "WH411"),
    (LEASED, QUEUED, "process_after", "process_after - interval '1 s'", "WH411"),
    (FAILED, RETRY_WAITING, "process_after", "process_after - interval '1 s'", "WH411"),
    (FAILED, RETRY_WAITING, "attempts", "0", "WH411"),
    (FAILED, RETRY_WAITING, "last_error_code", "'OTHER'", "WH411"),
    (FAILED, DEAD_LETTER, "last_error_code", "null", "WH411"),
    (FAILED, DEAD_LETTER, "finished_at", "null", "finished_when_over"),
    (RETRY_WAITING, QUEUED, "attempts", "0", "WH411"),
    (RETRY_WAITING, QUEUED, "process_after", "process_after + interval '1 s'", "WH411"),
    (DEAD_LETTER, CANCELLED, "last_error_code", "'OTHER'", "WH411"),
    (SUCCEEDED, CLEANED, "cleaned_from", "'cancelled'", "WH411"),
    (SUCCEEDED, CLEANED, "cleaned_from", "null", "WH411"),
    (SUCCEEDED, CLEANED, "safe_payload", """'{"a": 1}'""", "cleaned_says_from_what"),
    (SUCCEEDED, CLEANED, "result_ref", "'another'", "WH411"),
]

IDENTITY = {
    "job_id",
    "job_kind",
    "event_domain",
    "idempotency_key",
    "source_ref",
    "target_ref",
    "payload_ref",
    "payload_classification",
    "executor",
    "deadline_at",
    "priority",
    "correlation_id",
    "causation_event_id",
    "parent_job_id",
    "workflow_id",
    "enqueued_by",
    "enqueued_at",
    "source_system",
}
NULL_AT_INSERT = {
    "status": "'leased'",
    "attempts": "1",
    "last_error": "'x'",
    "last_error_at": "now()",
    "last_error_code": "'X'",
    "lease_name": "'x'",
    "lease_holder": "'x'",
    "lease_token": "gen_random_uuid()",
    "leased_until": "now()",
    "lease_ttl_seconds": "1",
    "lease_recoveries": "1",
    "started_at": "now()",
    "finished_at": "now()",
    "result_ref": "'x'",
    "status_signal": "'x'",
    "cancel_reason": "'x'",
    "cleaned_from": "'succeeded'",
}
FREE_AT_INSERT = {"safe_payload", "process_after", "scheduled"}


class Jobs:
    """One job in each of the nine states; every update is rolled back."""

    def __init__(self, superuser: "Connection", ids: dict[Status, str]) -> None:
        self.superuser = superuser
        self.ids = ids

    async def refusal(self, before: Status, after: Status, changes: "Mapping[str, str]") -> str | None:
        """The error of an UPDATE from one status to another; None if it is accepted."""
        statement = update(TABLE, {"status": f"'{after}'"} | dict(changes), "job_id")
        if before is not FAILED:
            return await refusal(self.superuser, statement, self.ids[before])
        async with undone(self.superuser):
            # `failed` exists only within a transaction.
            leased = self.ids[IN_PROGRESS]
            await self.superuser.execute(update(TABLE, {"status": "'failed'"} | FAILURE, "job_id"), leased)
            return await refusal(self.superuser, statement, leased)


@pytest.fixture
async def queue(database: "Database") -> JobQueue:
    """The enabled job queue."""
    return await JobQueue.open(database)


@pytest.fixture
async def jobs(queue: JobQueue) -> Jobs:
    """A job in each status but `failed`, with expired leases and due retries."""
    ids = {status: await queue.job_in(status) for status in Status if status is not FAILED}
    for held in (LEASED, IN_PROGRESS):
        await queue.expire(ids[held])
    await queue.make_retries_due()
    return Jobs(queue.superuser, ids)


async def test_exactly_these_edges_are_allowed(jobs: Jobs) -> None:
    """Each edge is accepted with its columns; every other pair of states is refused with any of them."""
    for before, after in product(Status, repeat=2):
        if (before, after) in LEGAL:
            assert await jobs.refusal(before, after, LEGAL[before, after]) is None, (before, after)
            continue
        expected = "WH410" if before is CLEANED else "WH411"
        for changes in LEGAL.values():
            assert await jobs.refusal(before, after, changes) == expected, (before, after, changes)


async def test_edges_table_equals_the_documentation(queue: JobQueue) -> None:
    """The table job_transition, the edge table of schema/README.md and EDGES have the same edges."""
    rows = await queue.superuser.fetch(
        "select from_status, to_status, may_change from webhookd.job_transition"
    )
    stored = {(row["from_status"], row["to_status"]) for row in rows}
    assert stored == set(LEGAL)
    documented = {
        (before, line[2])
        for line in re.finditer(r"^\| ([a-z_, ]+) → ([a-z_]+) \|", README.read_text(), re.MULTILINE)
        for before in line[1].split(", ")
    }
    assert documented == set(EDGES)
    assert {status for edge in stored for status in edge} == set(Status)
    known = {column.name for column in await columns(queue.superuser, TABLE)}
    ruled = {"status", "attempts", "lease_recoveries", "lease_token"}
    assert {name for row in rows for name in row["may_change"]} <= known - ruled - IDENTITY


async def test_timed_edges_are_refused_too_early(queue: JobQueue, jobs: Jobs) -> None:
    """A lease that has not ended is not recovered, and a retry that is not due is not promoted."""
    for before in (LEASED, IN_PROGRESS, RETRY_WAITING):
        jobs.ids[before] = await queue.job_in(before)
        assert await jobs.refusal(before, QUEUED, EDGES[before, QUEUED]) == "WH411", before


async def test_one_wrong_column_is_refused(jobs: Jobs) -> None:
    """An edge is refused if it changes one column in another way."""
    for before, after, column, expression, refused_by in WRONG:
        changes = dict(LEGAL[before, after]) | {column: expression}
        assert await jobs.refusal(before, after, changes) == refused_by, (before, after, column)


async def test_identity_columns_never_change(jobs: Jobs) -> None:
    """No edge may change an identity column; every column of the table is classified here."""
    known = {column.name: column for column in await columns(jobs.superuser, TABLE)}
    assert set(known) == IDENTITY | set(NULL_AT_INSERT) | FREE_AT_INSERT
    for (before, after), right in LEGAL.items():
        for name in IDENTITY:
            wrong = dict(right) | {name: known[name].different}
            assert await jobs.refusal(before, after, wrong) == "WH411", (before, after, name)


async def test_finished_jobs_change_only_by_their_edges(jobs: Jobs) -> None:
    """An update of any single column of a finished job is refused, even to the same value."""
    for status in (SUCCEEDED, DEAD_LETTER, CANCELLED, CLEANED):
        expected = "WH410" if status is CLEANED else "WH411"
        for column in await columns(jobs.superuser, TABLE):
            if column.name == "status":
                continue
            for value in (column.different, column.name):
                assert await jobs.refusal(status, status, {column.name: value}) == expected, (status, column)


async def test_jobs_are_inserted_queued_and_untried(queue: JobQueue) -> None:
    """An insert with another status, or with a value from a later state, is refused."""
    insert = (
        "insert into webhookd.job_queue (job_kind, event_domain, idempotency_key, executor, enqueued_by, "
        "source_system{0}) values ('k', 'd', 'key', 'DOT', 'me', 'here'{1})"
    )
    assert await refusal(queue.superuser, insert.format("", "")) is None
    for column, value in NULL_AT_INSERT.items():
        statement = insert.format(f", {column}", f", {value}")
        assert await refusal(queue.superuser, statement) == "WH411", column


async def test_no_job_stays_failed(queue: JobQueue, jobs: Jobs) -> None:
    """The UPDATE to failed is accepted, but not its COMMIT without the second edge."""
    job_id = jobs.ids[LEASED]
    with pytest.raises(asyncpg.PostgresError, match="must become retry_waiting or dead_letter") as failed:
        await jobs.superuser.execute(update(TABLE, {"status": "'failed'"} | FAILURE, "job_id"), job_id)
    assert failed.value.sqlstate == "WH411"
    assert await queue.status(job_id) is LEASED
    async with jobs.superuser.transaction():
        await jobs.superuser.execute(update(TABLE, {"status": "'failed'"} | FAILURE, "job_id"), job_id)
        dead = {"status": "'dead_letter'"} | dict(EDGES[FAILED, DEAD_LETTER])
        await jobs.superuser.execute(update(TABLE, dead, "job_id"), job_id)
    assert await queue.status(job_id) is DEAD_LETTER


async def test_history_is_kept(jobs: Jobs) -> None:
    """Jobs, workflows and settings cannot be deleted; the ledger cannot change."""
    for statement in (
        "delete from webhookd.job_queue",
        "truncate webhookd.job_queue cascade",
        "delete from webhookd.job_workflow",
        "truncate webhookd.job_workflow cascade",
        "delete from webhookd.settings",
        "update webhookd.job_command_run set actor = 'another'",
        "delete from webhookd.job_command_run",
        "truncate webhookd.job_command_run",
    ):
        assert await refusal(jobs.superuser, statement) == "WH410", statement


async def test_the_tables_refuse_what_dp2_forbids(queue: JobQueue) -> None:
    """By CHECK, even for a superuser: unknown executors, MOT, payload keys, states, empty names."""
    insert = (
        "insert into webhookd.job_queue (job_kind, event_domain, idempotency_key, executor, enqueued_by, "
        "source_system, safe_payload, payload_classification) values ('k', $1, 'key', $2, $3, $4, $5, $6)"
    )
    good = ["d", "DOT", "me", "here", "{}", "safe_metadata"]
    assert await refusal(queue.superuser, insert, *good) is None
    forbidden = ("body", "content", "raw", "vector", "embedding", "secret", "token", "password", "ssn")
    for place, value, constraint in [
        (0, " ", "job_queue_event_domain_check"),
        (1, "MOT", "job_queue_executor_check"),
        (1, "Robot", "job_queue_executor_check"),
        (2, " ", "job_queue_enqueued_by_check"),
        (3, "", "job_queue_source_system_check"),
        (4, "[]", "safe_payload_is_an_object"),
        (4, '{"a": "' + "x" * 16384 + '"}', "safe_payload_bound"),
        (5, "secret", "job_queue_payload_classification_check"),
        *(
            (4, f'{{"a": 1, "{key}": null}}', "job_queue_safe_payload_check")
            for key in (*forbidden, "personal_data")
        ),
    ]:
        wrong = [*good[:place], value, *good[place + 1 :]]
        assert await refusal(queue.superuser, insert, *wrong) == constraint, value
    await queue.enqueue("once")
    again = insert.replace("'key'", "'once'").replace("'k'", f"'{KIND}'")
    assert await refusal(queue.superuser, again, *good) == "ux_job_queue_kind_idempotency_key"
