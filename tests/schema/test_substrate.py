"""The job substrate's functions: what each answers, moves, writes down and tells; and what it refuses."""

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
from tests.support.substrate import ACTOR, KIND, TTL_SECONDS, Answer, Status, Substrate
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
PAST_MOVES = """
    insert into webhookd.job_command_run (job_id, command, from_status, to_status, actor, attempts)
    select gen_random_uuid(), 'fn_job_claim', 'queued', 'leased', 'past', 0
    from generate_series(1, $1::int)"""


@pytest.fixture
async def substrate(database: "Database") -> Substrate:
    """Give the functions, switched on."""
    return await Substrate.open(database)


def said(answer: Answer, *keys: str) -> tuple[Any, ...]:
    """Some of an answer."""
    return tuple(answer[key] for key in keys)


async def set_enabled(substrate: Substrate, *, enabled: bool) -> None:
    """Turn the switch."""
    await substrate.call("fn_job_enable", p_enabled=enabled, p_actor=ACTOR)


async def contents(substrate: Substrate) -> list[str]:
    """All that the substrate wrote, and the events."""
    tables = ("job_queue", "job_workflow", "job_command_run", "job_event_queue", "events")
    return [
        str(tuple(row))
        for table in tables
        for row in await substrate.superuser.fetch(f"select * from webhookd.{table} order by 1")
    ]


# The switch


async def test_disabled_touches_nothing_and_lets_what_runs_end(database: "Database") -> None:
    """It is off by default; what was started before it was turned off may still end, and be reaped."""
    substrate = await Substrate.open(database, enabled=False)
    value = "select value from webhookd.settings where key = 'queue.job_substrate.enabled'"
    assert await substrate.daemon.fetchval(value) == "false"
    assert await substrate.try_enqueue() == DISABLED
    assert await contents(substrate) == []

    await set_enabled(substrate, enabled=True)
    await substrate.call(
        "fn_job_register_event", p_event_type="a.b", p_kind="spawned", p_executor="Agent", p_actor=ACTOR
    )
    running, failing, lost = [await substrate.enqueue() for _ in range(3)]
    await substrate.enqueue()
    leases = {lease["job_id"]: lease for lease in [await substrate.claim() for _ in range(3)]}
    dead = await substrate.job_in(Status.DEAD_LETTER)
    old = await substrate.job_in(Status.CANCELLED)
    await substrate.configure(retention_seconds=0)
    await set_enabled(substrate, enabled=False)
    await substrate.daemon.execute("select webhookd.publish('a.b', '{}')")

    before = await contents(substrate)
    assert await substrate.try_enqueue() == DISABLED
    assert await substrate.try_claim() == DISABLED
    assert await substrate.requeue(dead) == DISABLED
    assert await substrate.call("fn_job_spawn_from_events") == DISABLED
    opened = await substrate.call(
        "fn_job_workflow_open", p_workflow_kind="w", p_generator="MOT:x", p_actor=ACTOR
    )
    assert opened == DISABLED
    assert await substrate.sweep() == DISABLED | {"cleaned": 0}
    assert await contents(substrate) == before
    assert await substrate.status(old) is Status.CANCELLED

    assert (await substrate.progress(leases[running]))["status"] == "in_progress"
    assert (await substrate.succeed(leases[running]))["status"] == "succeeded"
    assert (await substrate.fail(leases[failing]))["status"] == "retry_waiting"
    assert (await substrate.cancel(failing))["status"] == "cancelled"
    await substrate.expire(lost)
    assert (await substrate.reap())["recovered"] == 1


# Enqueue and claim


async def test_a_key_is_one_job(substrate: Substrate) -> None:
    """The same again is the job there is; other work by that key is refused; another kind has its own."""
    job_id = await substrate.enqueue("k", p_payload_ref="doc-7", p_safe_payload='{"pages": 3}')
    again = await substrate.try_enqueue(
        "k", p_payload_ref="doc-7", p_safe_payload='{"pages": 3}', p_priority=9
    )
    assert said(again, "refused", "duplicate", "job_id", "status") == (False, True, job_id, "queued")
    for other in (
        {"p_payload_ref": "doc-8"},
        {"p_payload_ref": "doc-7", "p_executor": "Agent"},
        {"p_payload_ref": "doc-7", "p_safe_payload": "{}"},
    ):
        answer = await substrate.try_enqueue("k", **({"p_safe_payload": '{"pages": 3}'} | other))
        assert said(answer, "refused", "reason", "job_id") == (True, "idempotency_conflict", job_id)
    assert await substrate.enqueue("k", p_kind="another") != job_id
    assert await substrate.events(job_id) == ["enqueued"]
    assert await substrate.ledger(job_id) == [("fn_job_enqueue", None, "queued")]


async def test_relatives_must_be_known(substrate: Substrate) -> None:
    """A causing event, a workflow or a parent that does not exist is an error."""
    event_id = await substrate.daemon.fetchval("select webhookd.publish('a.b', '{}')")
    workflow_id, parent_id = await substrate.open_workflow(), await substrate.enqueue()
    job_id = await substrate.enqueue(
        p_causation_event_id=event_id, p_workflow_id=workflow_id, p_parent_job_id=parent_id
    )
    row = await substrate.row(job_id)
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
            await substrate.try_enqueue(**unknown)
        assert refused.value.sqlstate == "WH404"


async def test_the_claim_takes_the_most_urgent_then_the_oldest(substrate: Substrate) -> None:
    """Of its kind and executor, due and before its deadline; in DP2's order; each once."""
    ids = {
        name: await substrate.enqueue(name, p_priority=priority)
        for name, priority in [("old", 0), ("urgent", 5), ("new", 0), ("last", -1)]
    }
    later = datetime.now(UTC) + timedelta(hours=1)
    scheduled = await substrate.enqueue("scheduled", p_priority=9, p_process_after=later)
    await substrate.enqueue("others", p_priority=9, p_executor="Agent")
    await substrate.enqueue("other kind", p_priority=9, p_kind="another")
    late = await substrate.enqueue(p_priority=9, p_deadline_at=datetime.now(UTC))
    taken = [(await substrate.claim())["job_id"] for _ in range(4)]
    assert taken == [ids["urgent"], ids["old"], ids["new"], ids["last"]]
    assert await substrate.try_claim() == NOTHING
    assert (await substrate.row(scheduled))["scheduled"] is True
    await substrate.superuser.execute(
        "update webhookd.job_queue set process_after = now() where job_id = $1", scheduled
    )
    assert (await substrate.claim())["job_id"] == scheduled
    assert await substrate.status(late) is Status.QUEUED
    assert (await substrate.reap())["cancelled"] == 1
    row = await substrate.row(late)
    assert (row["status"], row["cancel_reason"]) == ("cancelled", "deadline_passed")


async def test_scheduled_jobs_that_fall_due_come_by_their_priority(substrate: Substrate) -> None:
    """A claim finds one of them at least; once the reaper came by, the most urgent of all is first."""
    for priority in range(5):
        await substrate.enqueue(p_priority=priority)
    await substrate.superuser.execute("update webhookd.job_queue set scheduled = true")
    assert (await substrate.claim())["priority"] == 0
    assert (await substrate.reap())["came_due"] == 4
    assert [(await substrate.claim())["priority"] for _ in range(4)] == [4, 3, 2, 1]
    assert await substrate.try_claim() == NOTHING


async def test_a_claim_in_vain_changes_nothing(substrate: Substrate) -> None:
    """A scheduled job that fell due and is past its deadline stays as it is: it is the reaper's."""
    job_id = await substrate.enqueue()
    await substrate.superuser.execute("update webhookd.job_queue set scheduled = true")
    await substrate.let_deadline_pass(job_id)
    before = await substrate.row(job_id)
    assert await substrate.try_claim() == NOTHING
    assert await substrate.row(job_id) == before
    assert (await substrate.reap())["cancelled"] == 1


async def test_a_label_is_the_same_here_as_in_the_api(substrate: Substrate) -> None:
    """Every character of the basic plane is one that both take, or that both refuse."""
    plane = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE000]
    good = "".join(character for character in plane if re.match(LABEL, character))
    for text in (good[at : at + 2000] for at in range(0, len(good), 2000)):
        await substrate.superuser.execute("select webhookd.require_label('label', $1, 2000)", text)
    for character in set(plane) - set(good):
        with pytest.raises(asyncpg.PostgresError, match="control character"):
            await substrate.superuser.execute(
                "select webhookd.require_label('label', $1, 9)", f"a{character}"
            )


async def test_a_key_is_of_one_workflow_and_parent(substrate: Substrate) -> None:
    """The same key for another workflow is no duplicate: that would wait for a job it does not have."""
    one, other = await substrate.open_workflow(), await substrate.open_workflow()
    job_id = await substrate.enqueue("step", p_workflow_id=one)
    assert (await substrate.try_enqueue("step", p_workflow_id=one))["duplicate"] is True
    for relatives in ({"p_workflow_id": other}, {}, {"p_workflow_id": one, "p_parent_job_id": job_id}):
        answer = await substrate.try_enqueue("step", **relatives)
        assert (answer["reason"], answer["job_id"]) == ("idempotency_conflict", job_id)


async def test_jobs_of_one_transaction_come_out_as_they_went_in(substrate: Substrate) -> None:
    """Enqueued one by one, spawned of a batch of events, or requeued: the first in is the first out."""
    async with substrate.daemon.transaction():
        enqueued = [await substrate.enqueue() for _ in range(20)]
    leases = [await substrate.claim() for _ in enqueued]
    assert [lease["job_id"] for lease in leases] == enqueued

    for lease in leases:
        await substrate.fail(lease, permanent=True)
    async with substrate.daemon.transaction():
        requeued = [(await substrate.requeue(job_id))["job_id"] for job_id in enqueued]
    assert [(await substrate.claim())["job_id"] for _ in requeued] == requeued

    await substrate.call(
        "fn_job_register_event", p_event_type="a.b", p_kind="spawned", p_executor="DOT", p_actor=ACTOR
    )
    events = await substrate.daemon.fetch(
        "select webhookd.publish('a.b', '{}') as id from generate_series(1, 20)"
    )
    assert (await substrate.call("fn_job_spawn_from_events"))["jobs"] == len(events)
    spawned = [(await substrate.claim(kind="spawned"))["causation_event_id"] for _ in events]
    assert spawned == [event["id"] for event in events]


async def test_a_claim_hands_out_the_job_and_its_lease(substrate: Substrate) -> None:
    """All that an executor needs, and a lease of the length that it asked for."""
    job_id = await substrate.enqueue(
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
    lease = await substrate.claim(holder="me", ttl=90)
    row = await substrate.row(job_id)
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


# From lease to end


async def test_the_way_of_a_job_is_told_and_written_down(substrate: Substrate) -> None:
    """Each move has its event and its row of the ledger; a renewal, of which there is no end, the row."""
    job_id = await substrate.enqueue(p_correlation_id="c-1")
    lease = await substrate.claim()
    first = await substrate.progress(lease, "begun")
    await substrate.superuser.execute(
        "update webhookd.job_queue set leased_until = now() + interval '1 second' where job_id = $1", job_id
    )
    second = await substrate.progress(lease, "half done")
    assert (first["started"], second["started"]) == (True, False)
    row = await substrate.row(job_id)
    assert row["status_signal"] == "half done"
    third = await substrate.progress(lease)
    assert (await substrate.row(job_id))["status_signal"] == "half done"
    assert row["leased_until"] > row["started_at"] + timedelta(seconds=TTL_SECONDS - 1)
    done = await substrate.succeed(lease, "result-1")
    assert said(done, "status", "attempts", "duplicate") == ("succeeded", 1, False)
    assert await substrate.events(job_id) == ["enqueued", "leased", "started", "succeeded"]
    assert await substrate.ledger(job_id) == [
        ("fn_job_enqueue", None, "queued"),
        ("fn_job_claim", "queued", "leased"),
        ("fn_job_progress", "leased", "in_progress"),
        ("fn_job_progress", "in_progress", "in_progress"),
        ("fn_job_progress", "in_progress", "in_progress"),
        ("fn_job_succeed", "in_progress", "succeeded"),
    ]
    renewals = await substrate.daemon.fetch(
        "select event_id, actor, attempts, detail ->> 'signal', (detail ->> 'leased_until')::timestamptz "
        "from webhookd.job_command_run where from_status = to_status order by run_id"
    )
    assert [tuple(renewal) for renewal in renewals] == [
        (None, ACTOR, 0, signal, datetime.fromisoformat(answer["leased_until"]))
        for signal, answer in (("half done", second), (None, third))
    ]
    events = await substrate.daemon.fetch(
        "select e.*, q.event_id is not null as queued from webhookd.events e "
        "left join webhookd.event_routing_queue q on q.event_id = e.id order by e.id"
    )
    assert {(event["correlation_id"], event["queued"]) for event in events} == {("c-1", True)}
    told = json.loads(events[-1]["payload"])
    assert (told["job_kind"], told["status"], told["result_ref"], told["actor"]) == (
        KIND,
        "succeeded",
        "result-1",
        ACTOR,
    )
    run = await substrate.daemon.fetchrow(
        "select * from webhookd.job_command_run order by run_id desc limit 1"
    )
    assert run is not None
    assert (run["event_id"], run["actor"]) == (events[-1]["id"], ACTOR)
    assert run["called_by"] == await substrate.daemon.fetchval("select session_user::text")


async def test_a_rollback_takes_the_event_with_it(substrate: Substrate) -> None:
    """Job, ledger and event are one transaction, the caller's."""
    before = await contents(substrate)
    transaction = substrate.daemon.transaction()
    await transaction.start()
    await substrate.enqueue()
    await transaction.rollback()
    assert await contents(substrate) == before


async def test_the_token_decides(substrate: Substrate) -> None:
    """Expired is still the holder's; recovered or leased anew is not, and nothing changes then."""
    job_id = await substrate.enqueue()
    first = await substrate.claim(holder="first")
    await substrate.expire(job_id)
    assert (await substrate.progress(first))["refused"] is False
    await substrate.expire(job_id)
    assert said(await substrate.reap(), "recovered", "promoted") == (1, 0)
    row = await substrate.row(job_id)
    assert (row["status"], row["lease_token"], row["lease_holder"], row["lease_recoveries"]) == (
        "queued",
        None,
        None,
        1,
    )
    second = await substrate.claim(holder="second")
    assert second["job_id"] == job_id
    before = await contents(substrate)
    stale = {"refused": True, "reason": "stale_lease", "status": "leased"}
    assert await substrate.progress(first) == stale
    assert await substrate.succeed(first) == stale
    assert await substrate.fail(first) == stale
    assert await substrate.fail(first, permanent=True) == stale
    for report in (substrate.progress, substrate.succeed, substrate.fail):
        assert await report(second | {"lease_token": str(uuid4())}) == stale
        nobody = await report(second | {"job_id": str(uuid4())})
        assert nobody == {"refused": True, "reason": "unknown_job"}
    assert await contents(substrate) == before
    assert (await substrate.succeed(second))["status"] == "succeeded"
    assert await substrate.events(job_id) == [
        "enqueued",
        "leased",
        "started",
        "lease_recovered",
        "leased",
        "succeeded",
    ]


async def test_the_ledger_keeps_the_last_word_of_a_holder_that_died(substrate: Substrate) -> None:
    """With the recovery of its lease: nobody need look through its renewals. The next holder says its own."""
    await substrate.configure(KIND, max_lease_recoveries=1)
    job_id = await substrate.enqueue()
    for last_word in ("page 40 of 100", "page 41 of 100"):
        lease = await substrate.claim()
        await substrate.progress(lease, "page 1 of 100")
        await substrate.progress(lease, last_word)
        await substrate.expire(job_id)
        await substrate.reap()
    details = await substrate.daemon.fetch(
        "select detail from webhookd.job_command_run where command = 'fn_job_lease_reaper' order by run_id"
    )
    assert [json.loads(row["detail"]) for row in details] == [
        {"error_code": "LEASE_EXPIRED", "signal": "page 40 of 100"},
        {"error_code": "LEASE_EXPIRED", "signal": "page 41 of 100"},
        {"error_code": "LEASE_EXPIRED", "signal": "page 41 of 100"},
    ]


async def test_the_same_report_again_is_a_duplicate(substrate: Substrate) -> None:
    """After its answer was lost: nothing changes, wherever the job has gone since, until others lease it."""
    await substrate.configure(retention_seconds=0)
    reports: list[tuple[Report, list[str]]] = [
        (substrate.succeed, ["succeeded", "cleaned"]),
        (substrate.fail, ["retry_waiting", "queued", "cancelled", "cleaned"]),
        (partial(substrate.fail, permanent=True), ["dead_letter", "cancelled", "cleaned"]),
    ]
    for report, ends in reports:
        job_id = await substrate.enqueue()
        lease = await substrate.claim()
        assert said(await report(lease), "status", "duplicate") == (ends[0], False)
        for end in ends:
            match end:
                case "queued":
                    await substrate.let_retries_fall_due()
                    await substrate.reap()
                case "cancelled":
                    await substrate.cancel(job_id)
                case "cleaned":
                    await substrate.sweep()
            before = await contents(substrate)
            assert said(await report(lease), "refused", "status", "duplicate") == (False, end, True)
            assert await contents(substrate) == before


async def test_a_report_that_contradicts_the_first_is_refused(substrate: Substrate) -> None:
    """Another outcome, or another result; whether a failure was for good, also when no attempt is left."""
    await substrate.configure(max_attempts=2)
    first_time: dict[str, Report] = {
        "succeeded": partial(substrate.succeed, result_ref="result-1"),
        "retried": substrate.fail,
        "buried": partial(substrate.fail, permanent=True),
    }
    for told, report in first_time.items():
        for attempt in (1, 2):
            job_id = await substrate.enqueue()
            if attempt == 2:
                await substrate.fail(await substrate.claim(), permanent=False)
                await substrate.let_retries_fall_due()
                await substrate.reap()
            lease = await substrate.claim()
            await report(lease)
            status, before = await substrate.status(job_id), await contents(substrate)
            contradictions: dict[str, Report] = {
                **{other: word for other, word in first_time.items() if other != told},
                "with another result": partial(substrate.succeed, result_ref="result-2"),
                "without a result": substrate.succeed,
            }
            for other, contradiction in contradictions.items():
                answer = await contradiction(lease)
                assert answer == {"refused": True, "reason": "already_reported", "status": status}, other
            assert said(await substrate.progress(lease), "refused", "reason") == (True, "stale_lease")
            assert await contents(substrate) == before
            await substrate.cancel(job_id)


async def test_failures_are_retried_by_the_sagas_formula_and_then_buried(substrate: Substrate) -> None:
    """Base delay doubled, capped, by kind or default; after max_attempts, or at once, a dead letter."""
    await substrate.configure(max_attempts=4, base_delay_seconds=1000, max_delay_seconds=2500, jitter=0)
    job_id = await substrate.enqueue()
    delays = []
    for _ in range(3):
        failed = await substrate.fail(await substrate.claim(), "BROKEN")
        assert failed["status"] == "retry_waiting"
        row = await substrate.row(job_id)
        delays.append((row["process_after"] - row["last_error_at"]).total_seconds())
        assert await substrate.try_claim() == NOTHING
        assert (await substrate.reap())["promoted"] == 0
        await substrate.let_retries_fall_due()
        assert (await substrate.reap())["promoted"] == 1
    assert delays == [1000, 2000, 2500]
    failed = await substrate.fail(await substrate.claim(), "LAST", message="x" * 5000)
    assert said(failed, "status", "attempts", "max_attempts") == ("dead_letter", 4, 4)
    row = await substrate.row(job_id)
    assert (row["last_error_code"], len(row["last_error"]), row["attempts"]) == ("LAST", 2000, 4)
    assert (await substrate.events(job_id))[-4:] == ["retry_due", "leased", "failed", "dead_lettered"]
    assert (await substrate.ledger(job_id))[-2:] == [
        ("fn_job_fail_transient", "leased", "failed"),
        ("fn_job_fail_transient", "failed", "dead_letter"),
    ]

    await substrate.configure("one.shot", max_attempts=1)
    await substrate.enqueue(p_kind="one.shot")
    failed = await substrate.fail(await substrate.claim(kind="one.shot"), None)
    assert said(failed, "status", "max_attempts") == ("dead_letter", 1)
    assert (await substrate.row(failed["job_id"]))["last_error_code"] == "UNSPECIFIED"
    await substrate.enqueue()
    assert (await substrate.fail(await substrate.claim(), permanent=True))["status"] == "dead_letter"


async def test_a_lowered_limit_leaves_one_more_attempt(substrate: Substrate) -> None:
    """A job that waits with more attempts than its kind now has is tried once more, and then buried."""
    job_id = await substrate.enqueue()
    for _ in range(3):
        await substrate.fail(await substrate.claim())
        await substrate.let_retries_fall_due()
        await substrate.reap()
    await substrate.configure(KIND, max_attempts=1)
    lease = await substrate.claim()
    assert said(lease, "job_id", "attempt", "max_attempts") == (job_id, 4, 1)
    assert said(await substrate.fail(lease), "status", "attempts") == ("dead_letter", 4)


async def test_a_job_that_kills_its_executors_is_given_up(substrate: Substrate) -> None:
    """Recoveries count against a bound, for each attempt anew; then it is a failed attempt (D9)."""
    await substrate.configure(KIND, max_lease_recoveries=1, max_attempts=2)
    job_id = await substrate.enqueue()
    outcomes = []
    for _ in range(4):
        await substrate.claim()
        await substrate.expire(job_id)
        outcomes.append(said(await substrate.reap(), "recovered", "retry_waiting", "dead_lettered"))
        await substrate.let_retries_fall_due()
        await substrate.reap()
    assert outcomes == [(1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]
    row = await substrate.row(job_id)
    assert (row["status"], row["last_error_code"], row["attempts"], row["lease_token"]) == (
        "dead_letter",
        "LEASE_EXPIRED",
        2,
        None,
    )


async def test_cancelling(substrate: Substrate) -> None:
    """What waits, and a dead letter; what somebody holds or has finished is refused; twice is a duplicate."""
    for status in (Status.QUEUED, Status.RETRY_WAITING, Status.DEAD_LETTER):
        job_id = await substrate.job_in(status)
        answer = await substrate.cancel(job_id, "superseded")
        assert said(answer, "refused", "status", "duplicate") == (False, "cancelled", False)
        assert said(await substrate.cancel(job_id), "refused", "duplicate") == (False, True)
        assert (await substrate.row(job_id))["cancel_reason"] == "superseded"
        assert (await substrate.events(job_id))[-1] == "cancelled"
    for status, reason in [
        (Status.LEASED, "running"),
        (Status.IN_PROGRESS, "running"),
        (Status.SUCCEEDED, "finished"),
    ]:
        answer = await substrate.cancel(await substrate.job_in(status))
        assert answer == {"refused": True, "reason": reason, "status": status}
    assert await substrate.cancel(str(uuid4())) == {"refused": True, "reason": "unknown_job"}


async def test_a_dead_letter_is_requeued_once(substrate: Substrate) -> None:
    """As a new job that names its parent, with a derived key; the old one is resolved by it."""
    workflow_id = await substrate.open_workflow()
    dead = await substrate.job_in(
        Status.DEAD_LETTER, p_workflow_id=workflow_id, p_safe_payload='{"n": 1}', p_payload_ref="doc"
    )
    assert await substrate.workflow_status(workflow_id) == "failed"
    answer = await substrate.requeue(dead)
    old, new = await substrate.row(dead), await substrate.row(answer["job_id"])
    assert said(answer, "refused", "status", "parent_job_id") == (False, "queued", dead)
    assert (old["status"], old["cancel_reason"]) == ("cancelled", "requeued")
    assert (str(new["parent_job_id"]), new["idempotency_key"]) == (dead, f"requeue:{dead}")
    for column in ("job_kind", "executor", "safe_payload", "payload_ref", "workflow_id", "event_domain"):
        assert new[column] == old[column], column
    assert await substrate.workflow_status(workflow_id) == "active"
    again = await substrate.requeue(dead)
    assert said(again, "refused", "reason", "job_id") == (True, "already_requeued", answer["job_id"])
    cancelled = await substrate.cancel(dead)
    assert said(cancelled, "refused", "reason", "job_id") == (True, "already_requeued", answer["job_id"])
    other = await substrate.job_in(Status.QUEUED)
    assert await substrate.requeue(other) == {
        "refused": True,
        "reason": "not_dead_letter",
        "status": "queued",
    }


async def test_the_sweep_cleans_what_is_past_its_kinds_retention(substrate: Substrate) -> None:
    """Succeeded and cancelled, of each kind by its own time; payload and messages go, the key stays."""
    await substrate.configure("short", retention_seconds=0)
    jobs = {
        (kind, end): await substrate.enqueue(f"{kind}{end}", p_kind=kind, p_safe_payload='{"n": 1}')
        for kind in ("a.long", "short", "z.long")
        for end in ("succeeded", "cancelled", "dead_letter", "queued")
    }
    for kind in ("a.long", "short", "z.long"):
        await substrate.cancel(jobs[kind, "cancelled"])
        await substrate.succeed(await substrate.claim(kind=kind), "result")
        await substrate.fail(await substrate.claim(kind=kind), permanent=True)
    swept = await substrate.call("fn_job_cleanup_sweep", p_batch_size=1)
    assert said(swept, "cleaned", "more") == (1, True)
    assert said(await substrate.sweep(), "cleaned", "more") == (1, False)
    assert (await substrate.sweep())["cleaned"] == 0
    statuses = {key: await substrate.status(job_id) for key, job_id in jobs.items()}
    assert {key for key, status in statuses.items() if status is Status.CLEANED} == {
        ("short", "succeeded"),
        ("short", "cancelled"),
    }
    row = await substrate.row(jobs["short", "succeeded"])
    assert (row["safe_payload"], row["cleaned_from"], row["result_ref"]) == ("{}", "succeeded", "result")
    assert (await substrate.events(jobs["short", "succeeded"]))[-1] == "cleaned"
    again = await substrate.try_enqueue("shortsucceeded", p_kind="short", p_safe_payload='{"n": 1}')
    assert said(again, "duplicate", "status") == (True, "cleaned")


async def test_the_sweep_goes_on_where_it_stopped(substrate: Substrate) -> None:
    """However many kinds there are, a call looks at a hundred, and says with which the next begins."""
    kinds = [f"kind.n{number:03}" for number in range(250)]
    for kind in kinds:
        await substrate.cancel(await substrate.enqueue(kind, p_kind=kind))
    await substrate.configure(kinds[-1], retention_seconds=0)
    after, looks = "", []
    while True:
        swept = await substrate.call("fn_job_cleanup_sweep", p_after_kind=after)
        looks.append(said(swept, "cleaned", "more", "last_kind"))
        after = swept["last_kind"]
        if not swept["more"]:
            break
    assert looks == [(0, True, kinds[99]), (0, True, kinds[199]), (1, False, kinds[249])]


# Workflows


async def test_a_workflow_follows_its_jobs(substrate: Substrate) -> None:
    """Active while one is open; then how they ended; active again with new work; whatever anybody writes."""
    endings = {
        "succeeded": ["succeeded", "succeeded", "cancelled"],
        "failed": ["dead_letter", "dead_letter", "cancelled"],
        "partially_failed": ["succeeded", "dead_letter"],
        "cancelled": ["cancelled", "cancelled"],
    }
    for expected, ends in endings.items():
        workflow_id = await substrate.open_workflow()
        assert await substrate.workflow_status(workflow_id) == "active"
        opened = [await substrate.enqueue(p_kind=expected, p_workflow_id=workflow_id) for _ in ends]
        for end in ends:
            assert await substrate.workflow_status(workflow_id) == "active"
            match end:
                case "cancelled":
                    await substrate.cancel(opened[-1])
                case "succeeded":
                    await substrate.succeed(await substrate.claim(kind=expected))
                    opened = opened[1:]
                case "dead_letter":
                    await substrate.fail(await substrate.claim(kind=expected), permanent=True)
                    opened = opened[1:]
            waiting = await substrate.daemon.fetch(
                "select job_id::text from webhookd.job_queue where workflow_id = $1 and status = 'queued' "
                "order by enqueued_at",
                workflow_id,
            )
            opened = [row[0] for row in waiting]
        assert await substrate.workflow_status(workflow_id) == expected
        finished = "select finished_at from webhookd.job_workflow where workflow_id = $1"
        ended_at = await substrate.daemon.fetchval(finished, workflow_id)
        assert ended_at is not None

        # A sweep says nothing new, and a hand that writes another status writes this one.
        await substrate.configure(expected, retention_seconds=0)
        await substrate.sweep()
        await substrate.superuser.execute(
            "update webhookd.job_workflow set status = 'active' where workflow_id = $1", workflow_id
        )
        assert await substrate.workflow_status(workflow_id) == expected
        assert await substrate.daemon.fetchval(finished, workflow_id) == ended_at
        change = "update webhookd.job_workflow set generator = 'another' where workflow_id = $1"
        assert await refusal(substrate.superuser, change, workflow_id) == "WH410"

        await substrate.enqueue(p_workflow_id=workflow_id)
        assert await substrate.workflow_status(workflow_id) == "active"
        assert await substrate.daemon.fetchval(finished, workflow_id) is None


async def test_a_workflow_is_opened_once(substrate: Substrate) -> None:
    """By an id of the generator's own: again is a duplicate, another kind a conflict. The ledger says who."""
    asked: dict[str, object] = {
        "p_workflow_kind": "pipeline",
        "p_generator": "MOT:x",
        "p_actor": ACTOR,
        "p_workflow_id": uuid4(),
    }
    assert (await substrate.call("fn_job_workflow_open", **asked))["duplicate"] is False
    assert (await substrate.call("fn_job_workflow_open", **asked))["duplicate"] is True
    conflict = await substrate.call("fn_job_workflow_open", **(asked | {"p_generator": "MOT:y"}))
    assert said(conflict, "refused", "reason") == (True, "workflow_conflict")
    rows = await substrate.daemon.fetch(
        "select actor, called_by, job_id, to_status, detail from webhookd.job_command_run "
        "where command = 'fn_job_workflow_open'"
    )
    login = await substrate.daemon.fetchval("select session_user::text")
    opened = {"workflow_id": str(asked["p_workflow_id"]), "workflow_kind": "pipeline", "generator": "MOT:x"}
    assert [tuple(row)[:4] for row in rows] == [(ACTOR, login, None, None)]
    assert json.loads(rows[0]["detail"]) == opened


# Events


async def test_switching_a_registration_off_changes_nothing_else(substrate: Substrate) -> None:
    """Whatever executor and priority it is given, or none: the answer and the ledger have the row's own."""
    register = {"p_event_type": "order.paid", "p_kind": "invoice", "p_actor": ACTOR}
    registered = {"event_type": "order.paid", "job_kind": "invoice", "executor": "Agent", "priority": 7}
    await substrate.call("fn_job_register_event", p_executor="Agent", p_priority=7, **register)
    for executor in ("DOT", None):
        off = await substrate.call("fn_job_register_event", p_executor=executor, p_active=False, **register)
        assert off == registered | {"active": False, "refused": False}
    row = await substrate.daemon.fetchrow(
        "select event_type, job_kind, executor, priority, active from webhookd.job_event_registry"
    )
    assert dict(row or {}) == registered | {"active": False}
    told = await substrate.daemon.fetchval(
        "select detail from webhookd.job_command_run where command = 'fn_job_register_event' "
        "order by run_id desc limit 1"
    )
    assert json.loads(told) == registered | {"active": False}
    # To register again is to say anew who does it.
    again = await substrate.call("fn_job_register_event", p_executor="DOT", **register)
    assert said(again, "executor", "priority", "active") == ("DOT", 0, True)


async def test_an_event_generates_its_job_once(substrate: Substrate) -> None:
    """Of a registered type, with cause and correlation; routing's queue is not touched by it."""
    register = {"p_event_type": "order.paid", "p_executor": "Agent", "p_actor": ACTOR}
    await substrate.daemon.execute("select webhookd.publish('order.paid', '{}')")
    await substrate.call("fn_job_register_event", p_kind="invoice", **register)
    await substrate.call("fn_job_register_event", p_kind="thank", p_priority=4, **register)
    await substrate.call("fn_job_register_event", p_kind="no more", **register)
    await substrate.call("fn_job_register_event", p_kind="no more", p_active=False, **register)
    never = await substrate.call("fn_job_register_event", p_kind="never", p_active=False, **register)
    assert never == {"refused": True, "reason": "not_registered"}
    kinds = await substrate.daemon.fetch("select job_kind from webhookd.job_event_registry order by 1")
    assert [kind for (kind,) in kinds] == ["invoice", "no more", "thank"]
    event_id = await substrate.daemon.fetchval(
        "select webhookd.publish('order.paid', '{\"body\": \"large\"}', correlation_id => 'c-7')"
    )
    await substrate.daemon.execute("select webhookd.publish('order.lost', '{}')")
    routed = await substrate.daemon.fetchval("select count(*) from webhookd.event_routing_queue")
    assert (await substrate.call("fn_job_queue_health"))["events_waiting"] == 1

    spawned = await substrate.call("fn_job_spawn_from_events")
    assert spawned == {"refused": False, "events": 1, "jobs": 2, "more": False}
    # As if it had come by twice.
    await substrate.superuser.execute("insert into webhookd.job_event_queue values ($1)", event_id)
    spawned = await substrate.call("fn_job_spawn_from_events")
    assert said(spawned, "events", "jobs") == (1, 0)

    lease = await substrate.claim(kind="thank", executor="Agent")
    assert said(
        lease, "idempotency_key", "payload_ref", "causation_event_id", "correlation_id", "priority"
    ) == (
        f"event:{event_id}",
        f"event:{event_id}",
        event_id,
        "c-7",
        4,
    )
    assert lease["safe_payload"] == {"event_type": "order.paid"}
    assert await substrate.events(lease["job_id"]) == ["enqueued", "leased"]
    count = "select count(*) from webhookd.event_routing_queue"
    assert await substrate.daemon.fetchval(count) == routed + 3  # and the lifecycle's own


async def test_lifecycle_events_are_the_substrates_alone(substrate: Substrate, database: "Database") -> None:
    """Nobody else says dot.job.…, by whatever way, and none of them generates a job."""
    application = await database.connect("application")
    for statement in (
        "select webhookd.publish('dot.job.succeeded', '{}')",
        "select webhookd.publish_many('{a.b,dot.job.x}', array['{}'::json, '{}'], '{null,k}', '{null,null}')",
        "insert into webhookd.events (event_type, payload) values ('dot.job.enqueued', '{}')",
    ):
        assert await refusal(application, statement) == "WH400", statement
        assert await refusal(substrate.daemon, statement) in {"WH400", "42501"}, statement
    assert await refusal(application, "select webhookd.publish('dot.jobs', '{}')") is None
    with pytest.raises(asyncpg.PostgresError, match="would never end"):
        await substrate.call(
            "fn_job_register_event",
            p_event_type="dot.job.enqueued",
            p_kind="k",
            p_executor="DOT",
            p_actor=ACTOR,
        )
    by_hand = "insert into webhookd.job_event_registry values ('dot.job.x', 'k', 'DOT', 0, true, 'me')"
    assert await refusal(substrate.superuser, by_hand) == "no_lifecycle_event"


# Who


async def test_the_ledger_says_who_called_beside_what_they_said(substrate: Substrate) -> None:
    """A claim's actor, or else its holder, is the caller's word; the login beside it is PostgreSQL's."""
    login = await substrate.daemon.fetchval("select session_user::text")
    for actor, expected in [(None, "worker-1"), ("token-7", "token-7")]:
        job_id = await substrate.enqueue()
        await substrate.claim(holder="worker-1", actor=actor)
        run = await substrate.daemon.fetchrow(
            "select actor, called_by, detail ->> 'lease_holder' from webhookd.job_command_run "
            "where job_id = $1 and command = 'fn_job_claim'",
            job_id,
        )
        assert tuple(run or ()) == (expected, login, "worker-1")
        event = "select payload ->> 'actor' from webhookd.events where event_type = 'dot.job.leased'"
        assert await substrate.daemon.fetchval(f"{event} order by id desc limit 1") == expected


async def test_the_ledger_has_nothing_of_what_changed_nothing(substrate: Substrate) -> None:
    """Refusals, duplicates, and passes that moved nothing: who polls would flood it."""
    await substrate.enqueue("once", p_target_ref="a")
    lease = await substrate.claim()
    await substrate.succeed(lease, "r")
    dead = await substrate.job_in(Status.DEAD_LETTER)
    count = "select count(*) from webhookd.job_command_run"
    before = await substrate.daemon.fetchval(count)
    assert (await substrate.try_enqueue("once", p_target_ref="a"))["duplicate"] is True
    assert (await substrate.try_enqueue("once", p_target_ref="b"))["reason"] == "idempotency_conflict"
    assert await substrate.try_claim() == NOTHING
    assert (await substrate.progress(lease))["refused"] is True
    assert (await substrate.succeed(lease, "r"))["duplicate"] is True
    assert (await substrate.fail(lease))["reason"] == "already_reported"
    assert (await substrate.cancel(lease["job_id"]))["reason"] == "finished"
    assert (await substrate.requeue(lease["job_id"]))["reason"] == "not_dead_letter"
    assert (await substrate.reap())["recovered"] == 0
    assert (await substrate.sweep())["cleaned"] == 0
    assert (await substrate.call("fn_job_spawn_from_events"))["jobs"] == 0
    assert await substrate.daemon.fetchval(count) == before
    await substrate.cancel(dead)
    assert await substrate.daemon.fetchval(count) == before + 1


async def test_the_ledger_says_who_decided(database: "Database") -> None:
    """The switch, the numbers and the registry: each change has its row; a call that changes nothing none."""
    substrate = await Substrate.open(database, enabled=False)
    register = {"p_event_type": "a.b", "p_kind": "k", "p_executor": "DOT"}
    for _ in range(2):
        await substrate.call("fn_job_enable", p_enabled=True, p_actor="Ada")
        await substrate.call("fn_job_configure", p_settings='{"max_attempts": 7}', p_actor="Ben")
        await substrate.call("fn_job_configure", p_settings='{"jitter": 0.5}', p_actor="Cy", p_kind="k")
        await substrate.call("fn_job_register_event", p_actor="Di", **register)
    await substrate.call("fn_job_configure", p_settings='{"jitter": null}', p_actor="Eve", p_kind="k")
    await substrate.call("fn_job_register_event", p_actor="Flo", p_active=False, **register)
    await substrate.call("fn_job_enable", p_enabled=False, p_actor="Gus")
    # Nothing is asked for, or what a kind without numbers has already.
    for nothing in ("{}", '{"jitter": null}'):
        for kind in ("k", "another"):
            await substrate.call("fn_job_configure", p_settings=nothing, p_actor="Hal", p_kind=kind)
    await substrate.call("fn_job_configure", p_settings="{}", p_actor="Hal")
    rows = await substrate.daemon.fetch("select * from webhookd.job_command_run order by run_id")
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
    kinds = await substrate.daemon.fetch("select job_kind from webhookd.job_kind_policy")
    assert [kind for (kind,) in kinds] == ["k"]
    login = await substrate.daemon.fetchval("select session_user::text")
    assert {(row["called_by"], row["job_id"], row["to_status"]) for row in rows} == {(login, None, None)}
    assert await substrate.daemon.fetchval("select registered_by from webhookd.job_event_registry") == "Flo"


@pytest.mark.parametrize("analyzed", [False, True], ids=["stale", "fresh"])
async def test_who_asks_for_decisions_passes_no_workflows(substrate: Substrate, *, analyzed: bool) -> None:
    """Beside 20,000 that were opened since, and as many moves: a descent of the index, and their rows."""
    await substrate.superuser.execute("analyze webhookd.job_command_run")
    async with substrate.superuser.transaction():
        await substrate.superuser.execute("set local session_replication_role = replica")
        await substrate.superuser.execute(PAST_WORKFLOWS, MANY)
        await substrate.superuser.execute(PAST_MOVES, MANY)
    if analyzed:
        await substrate.superuser.execute("analyze webhookd.job_command_run")
    for _ in range(2):  # the catalog is read in the first
        shown, touched = await watch(substrate.daemon, job_reads.configuration, "repeatable_read")
    assert [one["command"] for one in shown["decisions"]] == ["fn_job_enable"]
    assert touched.blocks["job_command_run"] <= 5


# Numbers


async def test_health_and_views_count_the_same(substrate: Substrate) -> None:
    """DP2 §15.3's figures and ours; counts stop where they are told to."""
    health = await substrate.call("fn_job_queue_health")
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
            await substrate.job_in(status)
    await substrate.enqueue(p_process_after=datetime.now(UTC) + timedelta(hours=1))
    old = await substrate.enqueue(p_kind="z.old")
    await substrate.superuser.execute(
        "update webhookd.job_queue set process_after = now() - interval '100 s' where job_id = $1", old
    )
    await substrate.expire(await substrate.job_in(Status.LEASED))
    health = await substrate.call("fn_job_queue_health")
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
        assert await substrate.daemon.fetchval(f"select {column} from webhookd.{view}") == expected
    less = await substrate.call("fn_job_queue_health", p_counted_up_to=2)
    assert said(less, "backlog", "counted_up_to") == (2, 2)


async def oldest_seconds(substrate: Substrate) -> float:
    """For how long the oldest could have been claimed."""
    return float((await substrate.call("fn_job_queue_health"))["oldest_queued_age_s"])


async def test_no_job_is_older_than_it_is_there(substrate: Substrate) -> None:
    """A time long past is no time for which it waited."""
    await substrate.enqueue(p_process_after=datetime.now(UTC) - timedelta(days=900))
    assert await oldest_seconds(substrate) < 60
    await substrate.claim()


async def test_a_recovered_job_waits_since_its_recovery(substrate: Substrate) -> None:
    """Before that somebody held it; in the order of claiming it keeps its place."""
    first = await substrate.enqueue()
    await substrate.enqueue()
    await substrate.superuser.execute(
        "update webhookd.job_queue set process_after = now() - interval '1 h' where job_id = $1", first
    )
    assert await oldest_seconds(substrate) >= 3600
    assert (await substrate.claim())["job_id"] == first
    await substrate.expire(first)
    assert (await substrate.reap())["recovered"] == 1
    assert await oldest_seconds(substrate) < 60
    assert (await substrate.claim())["job_id"] == first


async def test_the_policy_is_the_settings_or_the_kinds(substrate: Substrate) -> None:
    """A kind's own number wins, until it is taken back; a bad one changes nothing."""
    assert said(await substrate.configure(), "max_attempts", "base_delay_seconds", "max_delay_seconds") == (
        5,
        30,
        3600,
    )
    await substrate.configure("k", max_attempts=9, jitter=0.5)
    assert said(await substrate.configure(max_attempts=7), "max_attempts", "jitter") == (7, 0)
    assert said(await substrate.configure("k"), "kind", "max_attempts", "jitter") == ("k", 9, 0.5)
    assert (await substrate.configure("k", max_attempts=None))["max_attempts"] == 7
    for bad in ({"max_attempts": 0}, {"max_attempts": 1.5}, {"jitter": 2}, {"jitter": None}, {"attempts": 1}):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await substrate.configure(**bad)
        assert refused.value.sqlstate == "WH400"
    # A kind's delay is compared with what holds for the kind; who changes neither is not held up by it.
    await substrate.configure("slow", base_delay_seconds=7200, max_delay_seconds=7200)
    with pytest.raises(asyncpg.PostgresError, match="they would be 7200 and 3600"):
        await substrate.configure("slow", max_delay_seconds=None)
    await substrate.superuser.execute("update webhookd.job_kind_policy set max_delay_seconds = null")
    assert (await substrate.configure("slow", max_attempts=2))["max_attempts"] == 2
    for statement in (
        "update webhookd.settings set value = '\"yes\"' where key = 'queue.job_substrate.enabled'",
        "update webhookd.settings set value = '0' where key = 'queue.job_substrate.max_attempts'",
        "update webhookd.settings set value = 'true' where key = 'queue.job_substrate.jitter'",
    ):
        assert await refusal(substrate.superuser, statement) == "substrate_setting", statement
    assert (await substrate.configure())["max_attempts"] == 7


async def test_an_executor_may_do_its_part_and_no_more(substrate: Substrate, database: "Database") -> None:
    """With dot_executor alone: a job from claim to report is served; the rest is refused by PostgreSQL."""
    job_id = await substrate.enqueue()
    connection = await database.connect("executor")
    executor = Substrate(connection, connection)
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
