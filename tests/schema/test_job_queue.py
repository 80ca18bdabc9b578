"""The gated functions: answers, transitions, ledger rows, events and refusals."""

import json
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from tests.support.catalog import refusal
from tests.support.history import watch
from tests.support.job_queue import ACTOR, KIND, TTL_SECONDS, Answer, JobQueue, Status
from webhookd.core.limits import LABEL
from webhookd.jobqueue import reads as job_reads

if TYPE_CHECKING:
    from tests.support.database import Database

Report: TypeAlias = Callable[[Answer], Awaitable[Answer]]

DISABLED = {"refused": True, "reason": "job_substrate_disabled"}
NOTHING = {"refused": True, "reason": "nothing_to_claim"}
MANY = 20_000
PAST_WORKFLOWS = """
    insert into webhookd.job_command_run (command, actor)
    select 'fn_job_workflow_open', 'past' from generate_series(1, $1::int)"""
PAST_TRANSITIONS = """
    insert into webhookd.job_command_run (job_id, command, from_status, to_status, actor, attempts)
    select gen_random_uuid(), 'fn_job_claim', 'queued', 'leased', 'past', 0
    from generate_series(1, $1::int)"""


@pytest.fixture
async def queue(database: "Database") -> JobQueue:
    """The enabled job queue."""
    return await JobQueue.open(database)


def values(answer: Answer, *keys: str) -> tuple[Any, ...]:
    """These members of an answer."""
    return tuple(answer[key] for key in keys)


async def set_enabled(queue: JobQueue, *, enabled: bool) -> None:
    """Enable or disable the queue."""
    await queue.call("fn_job_enable", p_enabled=enabled, p_actor=ACTOR)


async def contents(queue: JobQueue) -> list[str]:
    """All rows of the job queue, and the events."""
    tables = ("job_queue", "job_workflow", "job_command_run", "job_event_queue", "events")
    return [
        str(tuple(row))
        for table in tables
        for row in await queue.superuser.fetch(f"select * from webhookd.{table} order by 1")
    ]


# The switch


async def test_disabled_queue_changes_nothing_but_lets_running_jobs_finish(database: "Database") -> None:
    """It is disabled by default; jobs started before may still finish and be reaped."""
    queue = await JobQueue.open(database, enabled=False)
    value = "select value from webhookd.settings where key = 'queue.job_substrate.enabled'"
    assert await queue.daemon.fetchval(value) == "false"
    assert await queue.try_enqueue() == DISABLED
    assert await contents(queue) == []

    await set_enabled(queue, enabled=True)
    await queue.call(
        "fn_job_register_event", p_event_type="a.b", p_kind="spawned", p_executor="Agent", p_actor=ACTOR
    )
    running, failing, lost = [await queue.enqueue() for _ in range(3)]
    await queue.enqueue()
    leases = {lease["job_id"]: lease for lease in [await queue.claim() for _ in range(3)]}
    dead = await queue.job_in(Status.DEAD_LETTER)
    old = await queue.job_in(Status.CANCELLED)
    await queue.configure(retention_seconds=0)
    await set_enabled(queue, enabled=False)
    await queue.daemon.execute("select webhookd.publish('a.b', '{}')")

    before = await contents(queue)
    assert await queue.try_enqueue() == DISABLED
    assert await queue.try_claim() == DISABLED
    assert await queue.requeue(dead) == DISABLED
    assert await queue.call("fn_job_spawn_from_events") == DISABLED
    opened = await queue.call("fn_job_workflow_open", p_workflow_kind="w", p_generator="MOT:x", p_actor=ACTOR)
    assert opened == DISABLED
    assert await queue.sweep() == DISABLED | {"cleaned": 0}
    assert await contents(queue) == before
    assert await queue.status(old) is Status.CANCELLED

    assert (await queue.progress(leases[running]))["status"] == "in_progress"
    assert (await queue.succeed(leases[running]))["status"] == "succeeded"
    assert (await queue.fail(leases[failing]))["status"] == "retry_waiting"
    assert (await queue.cancel(failing))["status"] == "cancelled"
    await queue.expire(lost)
    assert (await queue.reap())["recovered"] == 1


# Enqueue and claim


async def test_one_job_per_kind_and_key(queue: JobQueue) -> None:
    """A repeat returns the existing job; other content is refused; another kind has its own keys."""
    job_id = await queue.enqueue("k", p_payload_ref="doc-7", p_safe_payload='{"pages": 3}')
    again = await queue.try_enqueue("k", p_payload_ref="doc-7", p_safe_payload='{"pages": 3}', p_priority=9)
    assert values(again, "refused", "duplicate", "job_id", "status") == (False, True, job_id, "queued")
    for other in (
        {"p_payload_ref": "doc-8"},
        {"p_payload_ref": "doc-7", "p_executor": "Agent"},
        {"p_payload_ref": "doc-7", "p_safe_payload": "{}"},
    ):
        answer = await queue.try_enqueue("k", **({"p_safe_payload": '{"pages": 3}'} | other))
        assert values(answer, "refused", "reason", "job_id") == (True, "idempotency_conflict", job_id)
    assert await queue.enqueue("k", p_kind="another") != job_id
    assert await queue.events(job_id) == ["enqueued"]
    assert await queue.ledger(job_id) == [("fn_job_enqueue", None, "queued")]


async def test_event_workflow_and_parent_must_exist(queue: JobQueue) -> None:
    """An unknown causing event, workflow or parent is an error."""
    event_id = await queue.daemon.fetchval("select webhookd.publish('a.b', '{}')")
    workflow_id, parent_id = await queue.open_workflow(), await queue.enqueue()
    job_id = await queue.enqueue(
        p_causation_event_id=event_id, p_workflow_id=workflow_id, p_parent_job_id=parent_id
    )
    row = await queue.row(job_id)
    assert (row["causation_event_id"], str(row["workflow_id"]), str(row["parent_job_id"])) == (
        event_id,
        workflow_id,
        parent_id,
    )
    for unknown in (
        {"p_causation_event_id": 10**9},
        {"p_workflow_id": uuid4()},
        {"p_parent_job_id": uuid4()},
    ):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await queue.try_enqueue(**unknown)
        assert refused.value.sqlstate == "WH404"


async def test_claim_order(queue: JobQueue) -> None:
    """By priority, then age; only jobs of the kind and executor that are due and not past their deadline."""
    ids = {
        name: await queue.enqueue(name, p_priority=priority)
        for name, priority in [("old", 0), ("urgent", 5), ("new", 0), ("last", -1)]
    }
    later = datetime.now(UTC) + timedelta(hours=1)
    scheduled = await queue.enqueue("scheduled", p_priority=9, p_process_after=later)
    await queue.enqueue("others", p_priority=9, p_executor="Agent")
    await queue.enqueue("other kind", p_priority=9, p_kind="another")
    late = await queue.enqueue(p_priority=9, p_deadline_at=datetime.now(UTC))
    taken = [(await queue.claim())["job_id"] for _ in range(4)]
    assert taken == [ids["urgent"], ids["old"], ids["new"], ids["last"]]
    assert await queue.try_claim() == NOTHING
    assert (await queue.row(scheduled))["scheduled"] is True
    await queue.superuser.execute(
        "update webhookd.job_queue set process_after = now() where job_id = $1", scheduled
    )
    assert (await queue.claim())["job_id"] == scheduled
    assert await queue.status(late) is Status.QUEUED
    assert (await queue.reap())["cancelled"] == 1
    row = await queue.row(late)
    assert (row["status"], row["cancel_reason"]) == ("cancelled", "deadline_passed")


async def test_due_scheduled_jobs_are_claimed_by_priority(queue: JobQueue) -> None:
    """A claim finds at least one of them; after the reaper ran, the highest priority comes first."""
    for priority in range(5):
        await queue.enqueue(p_priority=priority)
    await queue.superuser.execute("update webhookd.job_queue set scheduled = true")
    assert (await queue.claim())["priority"] == 0
    assert (await queue.reap())["came_due"] == 4
    assert [(await queue.claim())["priority"] for _ in range(4)] == [4, 3, 2, 1]
    assert await queue.try_claim() == NOTHING


async def test_claim_without_a_job_changes_nothing(queue: JobQueue) -> None:
    """A due scheduled job past its deadline stays unchanged until the reaper cancels it."""
    job_id = await queue.enqueue()
    await queue.superuser.execute("update webhookd.job_queue set scheduled = true")
    await queue.let_deadline_pass(job_id)
    before = await queue.row(job_id)
    assert await queue.try_claim() == NOTHING
    assert await queue.row(job_id) == before
    assert (await queue.reap())["cancelled"] == 1


async def test_labels_in_the_database_equal_the_api(queue: JobQueue) -> None:
    """Both accept or both refuse each character of the basic plane."""
    plane = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000]
    good = "".join(character for character in plane if re.match(LABEL, character))
    for text in (good[at : at + 2000] for at in range(0, len(good), 2000)):
        await queue.superuser.execute("select webhookd.require_label('label', $1, 2000)", text)
    for character in set(plane) - set(good):
        with pytest.raises(asyncpg.PostgresError, match="control characters"):
            await queue.superuser.execute("select webhookd.require_label('label', $1, 9)", f"a{character}")


async def test_a_key_belongs_to_one_workflow_and_parent(queue: JobQueue) -> None:
    """The same key for another workflow is a conflict: that workflow would wait for a job of another."""
    one, other = await queue.open_workflow(), await queue.open_workflow()
    job_id = await queue.enqueue("step", p_workflow_id=one)
    assert (await queue.try_enqueue("step", p_workflow_id=one))["duplicate"] is True
    for relatives in ({"p_workflow_id": other}, {}, {"p_workflow_id": one, "p_parent_job_id": job_id}):
        answer = await queue.try_enqueue("step", **relatives)
        assert (answer["reason"], answer["job_id"]) == ("idempotency_conflict", job_id)


async def test_jobs_of_one_transaction_keep_their_order(queue: JobQueue) -> None:
    """First in, first out, for enqueued, requeued and spawned jobs."""
    async with queue.daemon.transaction():
        enqueued = [await queue.enqueue() for _ in range(20)]
    leases = [await queue.claim() for _ in enqueued]
    assert [lease["job_id"] for lease in leases] == enqueued

    for lease in leases:
        await queue.fail(lease, permanent=True)
    async with queue.daemon.transaction():
        requeued = [(await queue.requeue(job_id))["job_id"] for job_id in enqueued]
    assert [(await queue.claim())["job_id"] for _ in requeued] == requeued

    await queue.call(
        "fn_job_register_event", p_event_type="a.b", p_kind="spawned", p_executor="DOT", p_actor=ACTOR
    )
    events = await queue.daemon.fetch(
        "select webhookd.publish('a.b', '{}') as id from generate_series(1, 20)"
    )
    assert (await queue.call("fn_job_spawn_from_events"))["jobs"] == len(events)
    spawned = [(await queue.claim(kind="spawned"))["causation_event_id"] for _ in events]
    assert spawned == [event["id"] for event in events]


async def test_claim_returns_the_job_and_its_lease(queue: JobQueue) -> None:
    """With all that an executor needs, and a lease of the requested length."""
    job_id = await queue.enqueue(
        "k",
        p_source_ref="s",
        p_target_ref="t",
        p_payload_ref="p",
        p_safe_payload='{"n": 1}',
        p_priority=3,
        p_correlation_id="c-1",
        p_event_domain="sales",
        p_source_system="shop",
    )
    lease = await queue.claim(holder="me", ttl=90)
    row = await queue.row(job_id)
    assert {key: lease[key] for key in ("attempt", "max_attempts", "refused")} == {
        "attempt": 1,
        "max_attempts": 5,
        "refused": False,
    }
    for name in set(lease) & set(row):
        stored = row[name]
        if name == "safe_payload":
            stored = json.loads(stored)
        elif isinstance(stored, datetime):
            assert datetime.fromisoformat(lease[name]) == stored
            continue
        assert lease[name] == (str(stored) if name in {"job_id", "lease_token"} else stored), name
    assert (row["leased_until"] - datetime.fromisoformat(lease["claimed_at"])).total_seconds() == 90
    assert (row["event_domain"], row["source_system"], row["lease_holder"]) == ("sales", "shop", "me")


# From lease to report


async def test_each_transition_has_an_event_and_a_ledger_row(queue: JobQueue) -> None:
    """A renewal has only a ledger row, as there can be any number of them."""
    job_id = await queue.enqueue(p_correlation_id="c-1")
    lease = await queue.claim()
    first = await queue.progress(lease, "started")
    await queue.superuser.execute(
        "update webhookd.job_queue set leased_until = now() + interval '1 second' where job_id = $1", job_id
    )
    second = await queue.progress(lease, "half done")
    assert (first["started"], second["started"]) == (True, False)
    row = await queue.row(job_id)
    assert row["status_signal"] == "half done"
    third = await queue.progress(lease)
    assert (await queue.row(job_id))["status_signal"] == "half done"
    assert row["leased_until"] > row["started_at"] + timedelta(seconds=TTL_SECONDS - 1)
    done = await queue.succeed(lease, "result-1")
    assert values(done, "status", "attempts", "duplicate") == ("succeeded", 1, False)
    assert await queue.events(job_id) == ["enqueued", "leased", "started", "succeeded"]
    assert await queue.ledger(job_id) == [
        ("fn_job_enqueue", None, "queued"),
        ("fn_job_claim", "queued", "leased"),
        ("fn_job_progress", "leased", "in_progress"),
        ("fn_job_progress", "in_progress", "in_progress"),
        ("fn_job_progress", "in_progress", "in_progress"),
        ("fn_job_succeed", "in_progress", "succeeded"),
    ]
    renewals = await queue.daemon.fetch(
        "select event_id, actor, attempts, detail ->> 'signal', (detail ->> 'leased_until')::timestamptz "
        "from webhookd.job_command_run where from_status = to_status order by run_id"
    )
    assert [tuple(renewal) for renewal in renewals] == [
        (None, ACTOR, 0, signal, datetime.fromisoformat(answer["leased_until"]))
        for signal, answer in (("half done", second), (None, third))
    ]
    events = await queue.daemon.fetch(
        "select e.*, q.event_id is not null as queued from webhookd.events e "
        "left join webhookd.event_routing_queue q on q.event_id = e.id order by e.id"
    )
    assert {(event["correlation_id"], event["queued"]) for event in events} == {("c-1", True)}
    payload = json.loads(events[-1]["payload"])
    assert (payload["job_kind"], payload["status"], payload["result_ref"], payload["actor"]) == (
        KIND,
        "succeeded",
        "result-1",
        ACTOR,
    )
    run = await queue.daemon.fetchrow("select * from webhookd.job_command_run order by run_id desc limit 1")
    assert run is not None
    assert (run["event_id"], run["actor"]) == (events[-1]["id"], ACTOR)
    assert run["called_by"] == await queue.daemon.fetchval("select session_user::text")


async def test_rollback_removes_job_ledger_and_event(queue: JobQueue) -> None:
    """All are written in the caller's transaction."""
    before = await contents(queue)
    transaction = queue.daemon.transaction()
    await transaction.start()
    await queue.enqueue()
    await transaction.rollback()
    assert await contents(queue) == before


async def test_lease_token_decides(queue: JobQueue) -> None:
    """An expired lease still belongs to its holder; reports of a recovered one are refused."""
    job_id = await queue.enqueue()
    first = await queue.claim(holder="first")
    await queue.expire(job_id)
    assert (await queue.progress(first))["refused"] is False
    await queue.expire(job_id)
    assert values(await queue.reap(), "recovered", "promoted") == (1, 0)
    row = await queue.row(job_id)
    assert (row["status"], row["lease_token"], row["lease_holder"], row["lease_recoveries"]) == (
        "queued",
        None,
        None,
        1,
    )
    second = await queue.claim(holder="second")
    assert second["job_id"] == job_id
    before = await contents(queue)
    stale = {"refused": True, "reason": "stale_lease", "status": "leased"}
    assert await queue.progress(first) == stale
    assert await queue.succeed(first) == stale
    assert await queue.fail(first) == stale
    assert await queue.fail(first, permanent=True) == stale
    for report in (queue.progress, queue.succeed, queue.fail):
        assert await report(second | {"lease_token": str(uuid4())}) == stale
        unknown = await report(second | {"job_id": str(uuid4())})
        assert unknown == {"refused": True, "reason": "unknown_job"}
    assert await contents(queue) == before
    assert (await queue.succeed(second))["status"] == "succeeded"
    assert await queue.events(job_id) == [
        "enqueued",
        "leased",
        "started",
        "lease_recovered",
        "leased",
        "succeeded",
    ]


async def test_ledger_keeps_the_last_signal_of_a_dead_holder(queue: JobQueue) -> None:
    """The row of the recovery has it; the next holder starts without a signal."""
    await queue.configure(KIND, max_lease_recoveries=1)
    job_id = await queue.enqueue()
    for last_signal in ("page 40 of 100", "page 41 of 100"):
        lease = await queue.claim()
        await queue.progress(lease, "page 1 of 100")
        await queue.progress(lease, last_signal)
        await queue.expire(job_id)
        await queue.reap()
    details = await queue.daemon.fetch(
        "select detail from webhookd.job_command_run where command = 'fn_job_lease_reaper' order by run_id"
    )
    assert [json.loads(row["detail"]) for row in details] == [
        {"error_code": "LEASE_EXPIRED", "signal": "page 40 of 100"},
        {"error_code": "LEASE_EXPIRED", "signal": "page 41 of 100"},
        {"error_code": "LEASE_EXPIRED", "signal": "page 41 of 100"},
    ]


async def test_repeated_report_is_a_duplicate(queue: JobQueue) -> None:
    """It changes nothing, whatever happened to the job since, until it is leased again."""
    await queue.configure(retention_seconds=0)
    reports: list[tuple[Report, list[str]]] = [
        (queue.succeed, ["succeeded", "cleaned"]),
        (queue.fail, ["retry_waiting", "queued", "cancelled", "cleaned"]),
        (partial(queue.fail, permanent=True), ["dead_letter", "cancelled", "cleaned"]),
    ]
    for report, ends in reports:
        job_id = await queue.enqueue()
        lease = await queue.claim()
        assert values(await report(lease), "status", "duplicate") == (ends[0], False)
        for end in ends:
            match end:
                case "queued":
                    await queue.make_retries_due()
                    await queue.reap()
                case "cancelled":
                    await queue.cancel(job_id)
                case "cleaned":
                    await queue.sweep()
            before = await contents(queue)
            assert values(await report(lease), "refused", "status", "duplicate") == (False, end, True)
            assert await contents(queue) == before


async def test_contradicting_report_is_refused(queue: JobQueue) -> None:
    """Another outcome, another result, or another `permanent`, also after the last attempt."""
    await queue.configure(max_attempts=2)
    first_reports: dict[str, Report] = {
        "succeeded": partial(queue.succeed, result_ref="result-1"),
        "retried": queue.fail,
        "failed permanently": partial(queue.fail, permanent=True),
    }
    for first, report in first_reports.items():
        for attempt in (1, 2):
            job_id = await queue.enqueue()
            if attempt == 2:
                await queue.fail(await queue.claim(), permanent=False)
                await queue.make_retries_due()
                await queue.reap()
            lease = await queue.claim()
            await report(lease)
            status, before = await queue.status(job_id), await contents(queue)
            contradictions: dict[str, Report] = {
                **{other: contradiction for other, contradiction in first_reports.items() if other != first},
                "with another result": partial(queue.succeed, result_ref="result-2"),
                "without a result": queue.succeed,
            }
            for other, contradiction in contradictions.items():
                answer = await contradiction(lease)
                assert answer == {"refused": True, "reason": "already_reported", "status": status}, other
            assert values(await queue.progress(lease), "refused", "reason") == (True, "stale_lease")
            assert await contents(queue) == before
            await queue.cancel(job_id)


async def test_retry_delays_and_dead_letters(queue: JobQueue) -> None:
    """The delay doubles up to a maximum; after max_attempts or a permanent failure, a dead letter."""
    await queue.configure(max_attempts=4, base_delay_seconds=1000, max_delay_seconds=2500, jitter=0)
    job_id = await queue.enqueue()
    delays = []
    for _ in range(3):
        failed = await queue.fail(await queue.claim(), "BROKEN")
        assert failed["status"] == "retry_waiting"
        row = await queue.row(job_id)
        delays.append((row["process_after"] - row["last_error_at"]).total_seconds())
        assert await queue.try_claim() == NOTHING
        assert (await queue.reap())["promoted"] == 0
        await queue.make_retries_due()
        assert (await queue.reap())["promoted"] == 1
    assert delays == [1000, 2000, 2500]
    failed = await queue.fail(await queue.claim(), "LAST", message="x" * 5000)
    assert values(failed, "status", "attempts", "max_attempts") == ("dead_letter", 4, 4)
    row = await queue.row(job_id)
    assert (row["last_error_code"], len(row["last_error"]), row["attempts"]) == ("LAST", 2000, 4)
    assert (await queue.events(job_id))[-4:] == ["retry_due", "leased", "failed", "dead_lettered"]
    assert (await queue.ledger(job_id))[-2:] == [
        ("fn_job_fail_transient", "leased", "failed"),
        ("fn_job_fail_transient", "failed", "dead_letter"),
    ]

    await queue.configure("one.shot", max_attempts=1)
    await queue.enqueue(p_kind="one.shot")
    failed = await queue.fail(await queue.claim(kind="one.shot"), None)
    assert values(failed, "status", "max_attempts") == ("dead_letter", 1)
    assert (await queue.row(failed["job_id"]))["last_error_code"] == "UNSPECIFIED"
    await queue.enqueue()
    assert (await queue.fail(await queue.claim(), permanent=True))["status"] == "dead_letter"


async def test_lowered_max_attempts_allows_one_more_attempt(queue: JobQueue) -> None:
    """A waiting job with more attempts than now allowed is tried once more and becomes a dead letter."""
    job_id = await queue.enqueue()
    for _ in range(3):
        await queue.fail(await queue.claim())
        await queue.make_retries_due()
        await queue.reap()
    await queue.configure(KIND, max_attempts=1)
    lease = await queue.claim()
    assert values(lease, "job_id", "attempt", "max_attempts") == (job_id, 4, 1)
    assert values(await queue.fail(lease), "status", "attempts") == ("dead_letter", 4)


async def test_repeated_lease_expiry_is_a_failure(queue: JobQueue) -> None:
    """After max_lease_recoveries per attempt, the next expiry is a failed attempt (SPEC D9)."""
    await queue.configure(KIND, max_lease_recoveries=1, max_attempts=2)
    job_id = await queue.enqueue()
    outcomes = []
    for _ in range(4):
        await queue.claim()
        await queue.expire(job_id)
        outcomes.append(values(await queue.reap(), "recovered", "retry_waiting", "dead_lettered"))
        await queue.make_retries_due()
        await queue.reap()
    assert outcomes == [(1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]
    row = await queue.row(job_id)
    assert (row["status"], row["last_error_code"], row["attempts"], row["lease_token"]) == (
        "dead_letter",
        "LEASE_EXPIRED",
        2,
        None,
    )


async def test_cancel(queue: JobQueue) -> None:
    """Waiting jobs and dead letters are cancelled; held and succeeded jobs are not."""
    for status in (Status.QUEUED, Status.RETRY_WAITING, Status.DEAD_LETTER):
        job_id = await queue.job_in(status)
        answer = await queue.cancel(job_id, "superseded")
        assert values(answer, "refused", "status", "duplicate") == (False, "cancelled", False)
        assert values(await queue.cancel(job_id), "refused", "duplicate") == (False, True)
        assert (await queue.row(job_id))["cancel_reason"] == "superseded"
        assert (await queue.events(job_id))[-1] == "cancelled"
    for status, reason in [
        (Status.LEASED, "running"),
        (Status.IN_PROGRESS, "running"),
        (Status.SUCCEEDED, "finished"),
    ]:
        answer = await queue.cancel(await queue.job_in(status))
        assert answer == {"refused": True, "reason": reason, "status": status}
    assert await queue.cancel(str(uuid4())) == {"refused": True, "reason": "unknown_job"}


async def test_a_dead_letter_is_requeued_once(queue: JobQueue) -> None:
    """The new job has the dead letter as parent and a derived key; the dead letter is cancelled."""
    workflow_id = await queue.open_workflow()
    dead = await queue.job_in(
        Status.DEAD_LETTER, p_workflow_id=workflow_id, p_safe_payload='{"n": 1}', p_payload_ref="doc"
    )
    assert await queue.workflow_status(workflow_id) == "failed"
    answer = await queue.requeue(dead)
    old, new = await queue.row(dead), await queue.row(answer["job_id"])
    assert values(answer, "refused", "status", "parent_job_id") == (False, "queued", dead)
    assert (old["status"], old["cancel_reason"]) == ("cancelled", "requeued")
    assert (str(new["parent_job_id"]), new["idempotency_key"]) == (dead, f"requeue:{dead}")
    for column in ("job_kind", "executor", "safe_payload", "payload_ref", "workflow_id", "event_domain"):
        assert new[column] == old[column], column
    assert await queue.workflow_status(workflow_id) == "active"
    again = await queue.requeue(dead)
    assert values(again, "refused", "reason", "job_id") == (True, "already_requeued", answer["job_id"])
    cancelled = await queue.cancel(dead)
    assert values(cancelled, "refused", "reason", "job_id") == (True, "already_requeued", answer["job_id"])
    other = await queue.job_in(Status.QUEUED)
    assert await queue.requeue(other) == {
        "refused": True,
        "reason": "not_dead_letter",
        "status": "queued",
    }


async def test_sweep_cleans_jobs_past_their_retention(queue: JobQueue) -> None:
    """Succeeded and cancelled jobs, by the retention of their kind; the payload goes, the key stays."""
    await queue.configure("short", retention_seconds=0)
    jobs = {
        (kind, end): await queue.enqueue(f"{kind}{end}", p_kind=kind, p_safe_payload='{"n": 1}')
        for kind in ("a.long", "short", "z.long")
        for end in ("succeeded", "cancelled", "dead_letter", "queued")
    }
    for kind in ("a.long", "short", "z.long"):
        await queue.cancel(jobs[kind, "cancelled"])
        await queue.succeed(await queue.claim(kind=kind), "result")
        await queue.fail(await queue.claim(kind=kind), permanent=True)
    swept = await queue.call("fn_job_cleanup_sweep", p_batch_size=1)
    assert values(swept, "cleaned", "more") == (1, True)
    assert values(await queue.sweep(), "cleaned", "more") == (1, False)
    assert (await queue.sweep())["cleaned"] == 0
    statuses = {key: await queue.status(job_id) for key, job_id in jobs.items()}
    assert {key for key, status in statuses.items() if status is Status.CLEANED} == {
        ("short", "succeeded"),
        ("short", "cancelled"),
    }
    row = await queue.row(jobs["short", "succeeded"])
    assert (row["safe_payload"], row["cleaned_from"], row["result_ref"]) == ("{}", "succeeded", "result")
    assert (await queue.events(jobs["short", "succeeded"]))[-1] == "cleaned"
    again = await queue.try_enqueue("shortsucceeded", p_kind="short", p_safe_payload='{"n": 1}')
    assert values(again, "duplicate", "status") == (True, "cleaned")


async def test_sweep_continues_after_the_last_kind(queue: JobQueue) -> None:
    """A call handles a hundred kinds and returns where the next call continues."""
    kinds = [f"kind.n{number:03}" for number in range(250)]
    for kind in kinds:
        await queue.cancel(await queue.enqueue(kind, p_kind=kind))
    await queue.configure(kinds[-1], retention_seconds=0)
    after, calls = "", []
    while True:
        swept = await queue.call("fn_job_cleanup_sweep", p_after_kind=after)
        calls.append(values(swept, "cleaned", "more", "last_kind"))
        after = swept["last_kind"]
        if not swept["more"]:
            break
    assert calls == [(0, True, kinds[99]), (0, True, kinds[199]), (1, False, kinds[249])]


# Workflows


async def test_workflow_status_follows_its_jobs(queue: JobQueue) -> None:
    """Active while a job is open; a new job makes it active again; a written status is ignored."""
    endings = {
        "succeeded": ["succeeded", "succeeded", "cancelled"],
        "failed": ["dead_letter", "dead_letter", "cancelled"],
        "partially_failed": ["succeeded", "dead_letter"],
        "cancelled": ["cancelled", "cancelled"],
    }
    for expected, ends in endings.items():
        workflow_id = await queue.open_workflow()
        assert await queue.workflow_status(workflow_id) == "active"
        opened = [await queue.enqueue(p_kind=expected, p_workflow_id=workflow_id) for _ in ends]
        for end in ends:
            assert await queue.workflow_status(workflow_id) == "active"
            match end:
                case "cancelled":
                    await queue.cancel(opened[-1])
                case "succeeded":
                    await queue.succeed(await queue.claim(kind=expected))
                    opened = opened[1:]
                case "dead_letter":
                    await queue.fail(await queue.claim(kind=expected), permanent=True)
                    opened = opened[1:]
            waiting = await queue.daemon.fetch(
                "select job_id::text from webhookd.job_queue where workflow_id = $1 and status = 'queued' "
                "order by enqueued_at",
                workflow_id,
            )
            opened = [row[0] for row in waiting]
        assert await queue.workflow_status(workflow_id) == expected
        finished = "select finished_at from webhookd.job_workflow where workflow_id = $1"
        ended_at = await queue.daemon.fetchval(finished, workflow_id)
        assert ended_at is not None

        # Neither a sweep nor a direct update changes the status.
        await queue.configure(expected, retention_seconds=0)
        await queue.sweep()
        await queue.superuser.execute(
            "update webhookd.job_workflow set status = 'active' where workflow_id = $1", workflow_id
        )
        assert await queue.workflow_status(workflow_id) == expected
        assert await queue.daemon.fetchval(finished, workflow_id) == ended_at
        change = "update webhookd.job_workflow set generator = 'another' where workflow_id = $1"
        assert await refusal(queue.superuser, change, workflow_id) == "WH410"

        await queue.enqueue(p_workflow_id=workflow_id)
        assert await queue.workflow_status(workflow_id) == "active"
        assert await queue.daemon.fetchval(finished, workflow_id) is None


async def test_a_workflow_is_opened_once(queue: JobQueue) -> None:
    """A repeated id is a duplicate, another generator a conflict; the ledger has one row."""
    arguments: dict[str, object] = {
        "p_workflow_kind": "pipeline",
        "p_generator": "MOT:x",
        "p_actor": ACTOR,
        "p_workflow_id": uuid4(),
    }
    assert (await queue.call("fn_job_workflow_open", **arguments))["duplicate"] is False
    assert (await queue.call("fn_job_workflow_open", **arguments))["duplicate"] is True
    conflict = await queue.call("fn_job_workflow_open", **(arguments | {"p_generator": "MOT:y"}))
    assert values(conflict, "refused", "reason") == (True, "workflow_conflict")
    rows = await queue.daemon.fetch(
        "select actor, called_by, job_id, to_status, detail from webhookd.job_command_run "
        "where command = 'fn_job_workflow_open'"
    )
    login = await queue.daemon.fetchval("select session_user::text")
    opened = {
        "workflow_id": str(arguments["p_workflow_id"]),
        "workflow_kind": "pipeline",
        "generator": "MOT:x",
    }
    assert [tuple(row)[:4] for row in rows] == [(ACTOR, login, None, None)]
    assert json.loads(rows[0]["detail"]) == opened


# Events


async def test_deactivating_a_registration_changes_nothing_else(queue: JobQueue) -> None:
    """Executor and priority of the call are ignored; answer and ledger show the stored ones."""
    register = {"p_event_type": "order.paid", "p_kind": "invoice", "p_actor": ACTOR}
    registered = {"event_type": "order.paid", "job_kind": "invoice", "executor": "Agent", "priority": 7}
    await queue.call("fn_job_register_event", p_executor="Agent", p_priority=7, **register)
    for executor in ("DOT", None):
        off = await queue.call("fn_job_register_event", p_executor=executor, p_active=False, **register)
        assert off == registered | {"active": False, "refused": False}
    row = await queue.daemon.fetchrow(
        "select event_type, job_kind, executor, priority, active from webhookd.job_event_registry"
    )
    assert dict(row or {}) == registered | {"active": False}
    detail = await queue.daemon.fetchval(
        "select detail from webhookd.job_command_run where command = 'fn_job_register_event' "
        "order by run_id desc limit 1"
    )
    assert json.loads(detail) == registered | {"active": False}
    # Registering again replaces executor and priority.
    again = await queue.call("fn_job_register_event", p_executor="DOT", **register)
    assert values(again, "executor", "priority", "active") == ("DOT", 0, True)


async def test_an_event_creates_its_job_once(queue: JobQueue) -> None:
    """With the event as cause and its correlation id; the routing queue is not affected."""
    register = {"p_event_type": "order.paid", "p_executor": "Agent", "p_actor": ACTOR}
    await queue.daemon.execute("select webhookd.publish('order.paid', '{}')")
    await queue.call("fn_job_register_event", p_kind="invoice", **register)
    await queue.call("fn_job_register_event", p_kind="thank", p_priority=4, **register)
    await queue.call("fn_job_register_event", p_kind="no more", **register)
    await queue.call("fn_job_register_event", p_kind="no more", p_active=False, **register)
    never = await queue.call("fn_job_register_event", p_kind="never", p_active=False, **register)
    assert never == {"refused": True, "reason": "not_registered"}
    kinds = await queue.daemon.fetch("select job_kind from webhookd.job_event_registry order by 1")
    assert [kind for (kind,) in kinds] == ["invoice", "no more", "thank"]
    event_id = await queue.daemon.fetchval(
        "select webhookd.publish('order.paid', '{\"body\": \"large\"}', correlation_id => 'c-7')"
    )
    await queue.daemon.execute("select webhookd.publish('order.lost', '{}')")
    routed = await queue.daemon.fetchval("select count(*) from webhookd.event_routing_queue")
    assert (await queue.call("fn_job_queue_health"))["events_waiting"] == 1

    spawned = await queue.call("fn_job_spawn_from_events")
    assert spawned == {"refused": False, "events": 1, "jobs": 2, "more": False}
    # As if the event were queued twice.
    await queue.superuser.execute("insert into webhookd.job_event_queue values ($1)", event_id)
    spawned = await queue.call("fn_job_spawn_from_events")
    assert values(spawned, "events", "jobs") == (1, 0)

    lease = await queue.claim(kind="thank", executor="Agent")
    assert values(
        lease, "idempotency_key", "payload_ref", "causation_event_id", "correlation_id", "priority"
    ) == (
        f"event:{event_id}",
        f"event:{event_id}",
        event_id,
        "c-7",
        4,
    )
    assert lease["safe_payload"] == {"event_type": "order.paid"}
    assert await queue.events(lease["job_id"]) == ["enqueued", "leased"]
    count = "select count(*) from webhookd.event_routing_queue"
    assert await queue.daemon.fetchval(count) == routed + 3  # and three lifecycle events


async def test_only_the_job_queue_emits_lifecycle_events(queue: JobQueue, database: "Database") -> None:
    """No other login can insert dot.job.… events, and no registration can use them."""
    application = await database.connect("application")
    for statement in (
        "select webhookd.publish('dot.job.succeeded', '{}')",
        "select webhookd.publish_many('{a.b,dot.job.x}', array['{}'::json, '{}'], '{null,k}', '{null,null}')",
        "insert into webhookd.events (event_type, payload) values ('dot.job.enqueued', '{}')",
    ):
        assert await refusal(application, statement) == "WH400", statement
        assert await refusal(queue.daemon, statement) in {"WH400", "42501"}, statement
    assert await refusal(application, "select webhookd.publish('dot.jobs', '{}')") is None
    with pytest.raises(asyncpg.PostgresError, match="would cause an endless loop"):
        await queue.call(
            "fn_job_register_event",
            p_event_type="dot.job.enqueued",
            p_kind="k",
            p_executor="DOT",
            p_actor=ACTOR,
        )
    by_hand = "insert into webhookd.job_event_registry values ('dot.job.x', 'k', 'DOT', 0, true, 'me')"
    assert await refusal(queue.superuser, by_hand) == "no_lifecycle_event"


# The ledger


async def test_ledger_has_actor_and_login(queue: JobQueue) -> None:
    """The actor of a claim, or its holder, is given by the caller; the login comes from PostgreSQL."""
    login = await queue.daemon.fetchval("select session_user::text")
    for actor, expected in [(None, "worker-1"), ("token-7", "token-7")]:
        job_id = await queue.enqueue()
        await queue.claim(holder="worker-1", actor=actor)
        run = await queue.daemon.fetchrow(
            "select actor, called_by, detail ->> 'lease_holder' from webhookd.job_command_run "
            "where job_id = $1 and command = 'fn_job_claim'",
            job_id,
        )
        assert tuple(run or ()) == (expected, login, "worker-1")
        event = "select payload ->> 'actor' from webhookd.events where event_type = 'dot.job.leased'"
        assert await queue.daemon.fetchval(f"{event} order by id desc limit 1") == expected


async def test_calls_without_effect_are_not_in_the_ledger(queue: JobQueue) -> None:
    """Refusals, duplicates and empty runs write no row: polling would flood the ledger."""
    await queue.enqueue("once", p_target_ref="a")
    lease = await queue.claim()
    await queue.succeed(lease, "r")
    dead = await queue.job_in(Status.DEAD_LETTER)
    count = "select count(*) from webhookd.job_command_run"
    before = await queue.daemon.fetchval(count)
    assert (await queue.try_enqueue("once", p_target_ref="a"))["duplicate"] is True
    assert (await queue.try_enqueue("once", p_target_ref="b"))["reason"] == "idempotency_conflict"
    assert await queue.try_claim() == NOTHING
    assert (await queue.progress(lease))["refused"] is True
    assert (await queue.succeed(lease, "r"))["duplicate"] is True
    assert (await queue.fail(lease))["reason"] == "already_reported"
    assert (await queue.cancel(lease["job_id"]))["reason"] == "finished"
    assert (await queue.requeue(lease["job_id"]))["reason"] == "not_dead_letter"
    assert (await queue.reap())["recovered"] == 0
    assert (await queue.sweep())["cleaned"] == 0
    assert (await queue.call("fn_job_spawn_from_events"))["jobs"] == 0
    assert await queue.daemon.fetchval(count) == before
    await queue.cancel(dead)
    assert await queue.daemon.fetchval(count) == before + 1


async def test_ledger_has_the_operators_changes(database: "Database") -> None:
    """Each change of the switch, a policy or a registration has a row; a call without a change has none."""
    queue = await JobQueue.open(database, enabled=False)
    register = {"p_event_type": "a.b", "p_kind": "k", "p_executor": "DOT"}
    for _ in range(2):
        await queue.call("fn_job_enable", p_enabled=True, p_actor="Ada")
        await queue.call("fn_job_configure", p_settings='{"max_attempts": 7}', p_actor="Ben")
        await queue.call("fn_job_configure", p_settings='{"jitter": 0.5}', p_actor="Cy", p_kind="k")
        await queue.call("fn_job_register_event", p_actor="Di", **register)
    await queue.call("fn_job_configure", p_settings='{"jitter": null}', p_actor="Eve", p_kind="k")
    await queue.call("fn_job_register_event", p_actor="Flo", p_active=False, **register)
    await queue.call("fn_job_enable", p_enabled=False, p_actor="Gus")
    # No setting, or the values that a kind without a policy already has.
    for nothing in ("{}", '{"jitter": null}'):
        for kind in ("k", "another"):
            await queue.call("fn_job_configure", p_settings=nothing, p_actor="Hal", p_kind=kind)
    await queue.call("fn_job_configure", p_settings="{}", p_actor="Hal")
    rows = await queue.daemon.fetch("select * from webhookd.job_command_run order by run_id")
    registered = {"event_type": "a.b", "job_kind": "k", "executor": "DOT", "priority": 0}
    assert [(row["command"], row["actor"], json.loads(row["detail"])) for row in rows] == [
        ("fn_job_enable", "Ada", {"enabled": True}),
        ("fn_job_configure", "Ben", {"kind": None, "settings": {"max_attempts": 7}}),
        ("fn_job_configure", "Cy", {"kind": "k", "settings": {"jitter": 0.5}}),
        ("fn_job_register_event", "Di", registered | {"active": True}),
        ("fn_job_configure", "Eve", {"kind": "k", "settings": {"jitter": None}}),
        ("fn_job_register_event", "Flo", registered | {"active": False}),
        ("fn_job_enable", "Gus", {"enabled": False}),
    ]
    kinds = await queue.daemon.fetch("select job_kind from webhookd.job_kind_policy")
    assert [kind for (kind,) in kinds] == ["k"]
    login = await queue.daemon.fetchval("select session_user::text")
    assert {(row["called_by"], row["job_id"], row["to_status"]) for row in rows} == {(login, None, None)}
    assert await queue.daemon.fetchval("select registered_by from webhookd.job_event_registry") == "Flo"


@pytest.mark.parametrize("analyzed", [False, True], ids=["stale", "fresh"])
async def test_reading_decisions_skips_workflows(queue: JobQueue, *, analyzed: bool) -> None:
    """With 20,000 opened workflows and as many transitions: one index descent, and the rows."""
    await queue.superuser.execute("analyze webhookd.job_command_run")
    async with queue.superuser.transaction():
        await queue.superuser.execute("set local session_replication_role = replica")
        await queue.superuser.execute(PAST_WORKFLOWS, MANY)
        await queue.superuser.execute(PAST_TRANSITIONS, MANY)
    if analyzed:
        await queue.superuser.execute("analyze webhookd.job_command_run")
    for _ in range(2):  # the first reads the catalog
        shown, touched = await watch(queue.daemon, job_reads.configuration, "repeatable_read")
    assert [row["command"] for row in shown["decisions"]] == ["fn_job_enable"]
    assert touched.blocks["job_command_run"] <= 5


# Health and policies


async def test_health_and_views_agree(queue: JobQueue) -> None:
    """The counts of DP2 §15.3 and ours; counting stops at the given bound."""
    health = await queue.call("fn_job_queue_health")
    assert health == {
        "enabled": True,
        "backlog": 0,
        "in_progress": 0,
        "dead_letter_open": 0,
        "oldest_queued_age_s": None,
        "lease_active": 0,
        "scheduled": 0,
        "retry_waiting": 0,
        "events_waiting": 0,
        "counted_up_to": 10_000,
    }
    for status in Status:
        if status is not Status.FAILED:
            await queue.job_in(status)
    await queue.enqueue(p_process_after=datetime.now(UTC) + timedelta(hours=1))
    old = await queue.enqueue(p_kind="z.old")
    await queue.superuser.execute(
        "update webhookd.job_queue set process_after = now() - interval '100 s' where job_id = $1", old
    )
    await queue.expire(await queue.job_in(Status.LEASED))
    health = await queue.call("fn_job_queue_health")
    assert 100 <= health.pop("oldest_queued_age_s") < 200
    assert health == {
        "enabled": True,
        "backlog": 3,
        "in_progress": 3,
        "dead_letter_open": 1,
        "lease_active": 2,
        "scheduled": 1,
        "retry_waiting": 1,
        "events_waiting": 0,
        "counted_up_to": 10_000,
    }
    for view, column, expected in [
        ("v_job_queue_backlog", "sum(backlog)", 3),
        ("v_job_queue_in_progress", "sum(in_progress)", 3),
        ("v_job_queue_dead_letter_open", "count(*)", 1),
    ]:
        assert await queue.daemon.fetchval(f"select {column} from webhookd.{view}") == expected
    less = await queue.call("fn_job_queue_health", p_counted_up_to=2)
    assert values(less, "backlog", "counted_up_to") == (2, 2)


async def oldest_seconds(queue: JobQueue) -> float:
    """How long the oldest job has been claimable."""
    return float((await queue.call("fn_job_queue_health"))["oldest_queued_age_s"])


async def test_age_starts_at_the_enqueue(queue: JobQueue) -> None:
    """A process_after in the past does not count as waiting time."""
    await queue.enqueue(p_process_after=datetime.now(UTC) - timedelta(days=900))
    assert await oldest_seconds(queue) < 60
    await queue.claim()


async def test_age_of_a_recovered_job_starts_at_the_recovery(queue: JobQueue) -> None:
    """It keeps its place in the claim order."""
    first = await queue.enqueue()
    await queue.enqueue()
    await queue.superuser.execute(
        "update webhookd.job_queue set process_after = now() - interval '1 h' where job_id = $1", first
    )
    assert await oldest_seconds(queue) >= 3600
    assert (await queue.claim())["job_id"] == first
    await queue.expire(first)
    assert (await queue.reap())["recovered"] == 1
    assert await oldest_seconds(queue) < 60
    assert (await queue.claim())["job_id"] == first


async def test_kind_policy_overrides_the_default(queue: JobQueue) -> None:
    """Until it is reset; an invalid value changes nothing."""
    assert values(await queue.configure(), "max_attempts", "base_delay_seconds", "max_delay_seconds") == (
        5,
        30,
        3600,
    )
    await queue.configure("k", max_attempts=9, jitter=0.5)
    assert values(await queue.configure(max_attempts=7), "max_attempts", "jitter") == (7, 0)
    assert values(await queue.configure("k"), "kind", "max_attempts", "jitter") == ("k", 9, 0.5)
    assert (await queue.configure("k", max_attempts=None))["max_attempts"] == 7
    for bad in ({"max_attempts": 0}, {"max_attempts": 1.5}, {"jitter": 2}, {"jitter": None}, {"attempts": 1}):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await queue.configure(**bad)
        assert refused.value.sqlstate == "WH400"
    # Delays are compared by their values in effect, and only when one of them is changed.
    await queue.configure("slow", base_delay_seconds=7200, max_delay_seconds=7200)
    with pytest.raises(asyncpg.PostgresError, match="they would be 7200 and 3600"):
        await queue.configure("slow", max_delay_seconds=None)
    await queue.superuser.execute("update webhookd.job_kind_policy set max_delay_seconds = null")
    assert (await queue.configure("slow", max_attempts=2))["max_attempts"] == 2
    for statement in (
        "update webhookd.settings set value = '\"yes\"' where key = 'queue.job_substrate.enabled'",
        "update webhookd.settings set value = '0' where key = 'queue.job_substrate.max_attempts'",
        "update webhookd.settings set value = 'true' where key = 'queue.job_substrate.jitter'",
    ):
        assert await refusal(queue.superuser, statement) == "job_queue_setting", statement
    assert (await queue.configure())["max_attempts"] == 7


async def test_rights_of_an_executor(queue: JobQueue, database: "Database") -> None:
    """dot_executor may claim and report; PostgreSQL refuses everything else."""
    job_id = await queue.enqueue()
    connection = await database.connect("executor")
    executor = JobQueue(connection, connection)
    lease = await executor.claim()
    await executor.progress(lease)
    assert (await executor.fail(lease))["job_id"] == job_id
    refused = 0
    for attempt in (
        executor.try_enqueue("x"),
        executor.cancel(job_id),
        executor.reap(),
        executor.sweep(),
        executor.requeue(job_id),
        executor.configure(max_attempts=1),
        executor.call("fn_job_queue_health"),
        executor.row(job_id),
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await attempt
        refused += 1
    assert refused == 8
