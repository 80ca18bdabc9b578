"""Invalid input to every gated function is refused and changes nothing; the largest valid input is accepted.

Uses the helpers of test_bad_input.py, which covers the other functions.
"""

from typing import TYPE_CHECKING

import pytest

from tests.schema.test_bad_input import (
    BAD_EVENT_TYPES,
    Arguments,
    Bad,
    Function,
    call,
    contents,
    literal,
    missing,
    not_positive,
    out_of_range,
    refusal,
    serve_and_undo,
    wrong,
)
from tests.support.job_queue import KIND, JobQueue

if TYPE_CHECKING:
    from tests.support.database import Database

UNKNOWN_ID = "'00000000-0000-0000-0000-000000000000'"
LABEL = "without control characters"
NOT_LABELS = ("''", "'   '", "E'a\\nb'", "E'\\x7f'")
FORBIDDEN_KEYS = ("body", "content", "raw", "vector", "embedding", "secret", "token", "password", "ssn")


def not_labels(name: str, max_length: int) -> list[Bad]:
    """Texts that are empty, blank, too long, or have control characters."""
    too_long = f"repeat('x', {max_length + 1})"
    return [wrong(LABEL, **{name: value}) for value in (*NOT_LABELS, too_long)]


def executors() -> list[Bad]:
    """Names that DP2 does not define, and MOT, which it forbids."""
    return [
        wrong("MOT: it generates jobs", p_executor="'MOT'"),
        *(wrong("must be one of DOT", p_executor=name) for name in ("''", "'dot'", "'Robot'")),
    ]


CORRELATION_IDS = [
    wrong("correlation_id must be", p_correlation_id=value)
    for value in ("''", "' a'", "'ä'", "E'a\\nb'", "repeat('x', 256)")
]
TIMES = ("'infinity'", "'-infinity'", "'20000-01-01'", "'0100-01-01 BC'")
ENQUEUE: Arguments = {
    "p_kind": f"'{KIND}'",
    "p_idempotency_key": "'new'",
    "p_executor": "'DOT'",
    "p_source_ref": "'s'",
    "p_target_ref": "'t'",
    "p_payload_ref": "'p'",
    "p_safe_payload": "'{}'",
    "p_priority": "0",
    "p_process_after": "now()",
    "p_deadline_at": "now() + interval '1 hour'",
    "p_correlation_id": "'c'",
    "p_causation_event_id": "1",
    "p_actor": "'me'",
    "p_event_domain": "'general'",
    "p_source_system": "'here'",
    "p_workflow_id": "null",
    "p_parent_job_id": "null",
}
REPORT: Arguments = {
    "p_job_id": UNKNOWN_ID,
    "p_lease_token": UNKNOWN_ID,
    "p_error_code": "'X'",
    "p_error_message": "'x'",
    "p_actor": "'me'",
}
REPORTING = Function(REPORT, frozenset({"p_error_code", "p_error_message"}), not_labels("p_actor", 200))

FUNCTIONS: dict[str, Function] = {
    "fn_job_enqueue": Function(
        ENQUEUE,
        frozenset(ENQUEUE)
        - {
            "p_kind",
            "p_idempotency_key",
            "p_executor",
            "p_safe_payload",
            "p_priority",
            "p_actor",
            "p_event_domain",
            "p_source_system",
        },
        [
            *not_labels("p_kind", 100),
            *not_labels("p_idempotency_key", 255),
            *(wrong("are reserved", p_idempotency_key=key) for key in ("'event:1'", "'requeue:x'")),
            *executors(),
            *(
                bad
                for ref in ("p_source_ref", "p_target_ref", "p_payload_ref")
                for bad in not_labels(ref, 2000)
            ),
            *(
                wrong("must be a JSON object", p_safe_payload=value)
                for value in ("'[]'", "'1'", "'\"body\"'", "'null'")
            ),
            wrong("at most 16384 bytes", p_safe_payload="jsonb_build_object('a', repeat('x', 16384))"),
            *(
                wrong("at its top level", p_safe_payload=literal(f'{{"a": 1, "{key}": null}}'))
                for key in (*FORBIDDEN_KEYS, "personal_data")
            ),
            *out_of_range("p_priority", "priority must be", "-32769", "32768"),
            *out_of_range("p_process_after", "process_after must be", *TIMES),
            *out_of_range("p_deadline_at", "deadline_at must be", *TIMES),
            *CORRELATION_IDS,
            *not_labels("p_actor", 200),
            *not_labels("p_event_domain", 100),
            *not_labels("p_source_system", 200),
            missing("event 999999 does not exist", p_causation_event_id="999999"),
            missing("workflow 00000000-0000-0000-0000-000000000000 does not exist", p_workflow_id=UNKNOWN_ID),
            missing("job 00000000-0000-0000-0000-000000000000 does not exist", p_parent_job_id=UNKNOWN_ID),
        ],
    ),
    "fn_job_claim": Function(
        {
            "p_kind": f"'{KIND}'",
            "p_executor": "'DOT'",
            "p_lease_name": "'lease'",
            "p_lease_holder": "'me'",
            "p_lease_ttl_seconds": "60",
            "p_actor": "'me'",
        },
        frozenset({"p_actor"}),
        [
            *not_labels("p_kind", 100),
            *executors(),
            *not_labels("p_lease_name", 200),
            *not_labels("p_lease_holder", 200),
            *not_labels("p_actor", 200),
            *out_of_range(
                "p_lease_ttl_seconds", "lease_ttl_seconds must be", "0", "-1", "86401", "'NaN'", "'Infinity'"
            ),
        ],
    ),
    "fn_job_progress": Function(
        {
            "p_job_id": UNKNOWN_ID,
            "p_status_signal_only": "'half'",
            "p_lease_token": UNKNOWN_ID,
            "p_actor": "'me'",
        },
        frozenset({"p_status_signal_only"}),
        [*not_labels("p_status_signal_only", 500), *not_labels("p_actor", 200)],
    ),
    "fn_job_succeed": Function(
        {"p_job_id": UNKNOWN_ID, "p_lease_token": UNKNOWN_ID, "p_result_ref": "'r'", "p_actor": "'me'"},
        frozenset({"p_result_ref"}),
        [*not_labels("p_result_ref", 2000), *not_labels("p_actor", 200)],
    ),
    "fn_job_fail_transient": REPORTING,
    "fn_job_fail_permanent": REPORTING,
    "fn_job_cancel": Function(
        {"p_job_id": UNKNOWN_ID, "p_reason": "'r'", "p_actor": "'me'"},
        bad=[*not_labels("p_reason", 500), *not_labels("p_actor", 200)],
    ),
    "fn_job_cleanup_sweep": Function(
        {"p_batch_size": "10", "p_after_kind": "'k'"},
        bad=not_positive("p_batch_size", message="batch_size"),
    ),
    "fn_job_lease_reaper": Function(
        {"p_batch_size": "10"}, bad=not_positive("p_batch_size", message="batch_size")
    ),
    "fn_job_requeue": Function(
        {"p_job_id": UNKNOWN_ID, "p_actor": "'me'", "p_deadline_at": "now() + interval '1 hour'"},
        frozenset({"p_deadline_at"}),
        [
            *not_labels("p_actor", 200),
            *out_of_range("p_deadline_at", "deadline_at must be", *TIMES),
            *out_of_range("p_deadline_at", "must be in the future", "now()", "now() - interval '1 s'"),
        ],
    ),
    "fn_job_workflow_open": Function(
        {
            "p_workflow_kind": "'w'",
            "p_generator": "'MOT:x'",
            "p_actor": "'me'",
            "p_correlation_id": "'c'",
            "p_workflow_id": UNKNOWN_ID,
        },
        frozenset({"p_correlation_id", "p_workflow_id"}),
        [
            *not_labels("p_workflow_kind", 100),
            *not_labels("p_generator", 200),
            *not_labels("p_actor", 200),
            *CORRELATION_IDS,
        ],
    ),
    "fn_job_register_event": Function(
        {
            "p_event_type": "'a.b'",
            "p_kind": "'k'",
            "p_executor": "'DOT'",
            "p_actor": "'me'",
            "p_priority": "0",
            "p_active": "true",
        },
        bad=[
            *(wrong("event_type must be", p_event_type=literal(each)) for each in BAD_EVENT_TYPES.values()),
            *(wrong("endless loop", p_event_type=each) for each in ("'dot.job.x'", "'dot.job.enqueued'")),
            *not_labels("p_kind", 100),
            *executors(),
            *not_labels("p_actor", 200),
            *out_of_range("p_priority", "priority must be", "-32769", "32768"),
        ],
    ),
    "fn_job_spawn_from_events": Function(
        {"p_batch_size": "10"}, bad=not_positive("p_batch_size", message="batch_size")
    ),
    "fn_job_enable": Function({"p_enabled": "true", "p_actor": "'me'"}, bad=not_labels("p_actor", 200)),
    "fn_job_configure": Function(
        {"p_settings": """'{"max_attempts": 3}'""", "p_actor": "'me'", "p_kind": "'k'"},
        frozenset({"p_kind"}),
        [
            *(wrong("must be a JSON object", p_settings=value) for value in ("'[]'", "'1'")),
            wrong("unknown setting", p_settings="""'{"attempts": 3}'"""),
            *(
                wrong("must be a", p_settings=literal(f'{{"{name}": {value}}}'))
                for name, value in [
                    ("max_attempts", "0"),
                    ("max_attempts", "1.5"),
                    ("max_attempts", "1001"),
                    ("max_attempts", '"3"'),
                    ("base_delay_seconds", "-1"),
                    ("max_delay_seconds", "1e10"),
                    ("jitter", "1.1"),
                    ("max_lease_recoveries", "-1"),
                    ("retention_seconds", "true"),
                ]
            ),
            *(
                wrong("must not be above", p_settings=literal(numbers), p_kind=kind)
                for kind in ("null", "'k'")
                for numbers in (
                    '{"base_delay_seconds": 3601}',
                    '{"max_delay_seconds": 29}',
                    '{"base_delay_seconds": 2, "max_delay_seconds": 1}',
                )
            ),
            *not_labels("p_actor", 200),
            *not_labels("p_kind", 100),
        ],
    ),
    "fn_job_queue_health": Function(
        {"p_counted_up_to": "10"}, bad=not_positive("p_counted_up_to", message="counted_up_to")
    ),
}


@pytest.fixture
async def queue(database: "Database") -> JobQueue:
    """A queue with a job, a dead letter, and an event that waits to create a job."""
    queue = await JobQueue.open(database)
    await queue.call(
        "fn_job_register_event", p_event_type="a.b", p_kind="spawned", p_executor="DOT", p_actor="me"
    )
    assert await queue.daemon.fetchval("select webhookd.publish('a.b', '{}')") == 1
    await queue.enqueue()
    await queue.fail(await queue.claim(), permanent=True)
    await queue.enqueue()
    return queue


async def test_every_gated_function_is_covered(queue: JobQueue) -> None:
    """FUNCTIONS has each function that webhookd_app may execute, with all its arguments."""
    rows = await queue.superuser.fetch(
        "select proname, proargnames[1:pronargs] from pg_proc where pronamespace = 'webhookd'::regnamespace"
        " and has_function_privilege('webhookd_app', oid, 'execute') and starts_with(proname, 'fn_job_')"
    )
    assert {name: list(arguments) for name, arguments in rows} == {
        name: list(function.good) for name, function in FUNCTIONS.items()
    }


async def test_valid_calls_are_accepted(queue: JobQueue, subtests: pytest.Subtests) -> None:
    """The calls that the invalid ones are derived from are valid, also with null where allowed."""
    for name, function in FUNCTIONS.items():
        for nothing in ({}, *({argument: "null"} for argument in function.nullable)):
            with subtests.test(f"{name} {nothing}"):
                await serve_and_undo(queue.daemon, call(name, {**function.good, **nothing}))


@pytest.mark.once
async def test_invalid_calls_change_nothing(queue: JobQueue, subtests: pytest.Subtests) -> None:
    """Each invalid or missing argument has its SQLSTATE and message, and no table changes."""
    before = await contents(queue.superuser)
    for name, function in FUNCTIONS.items():
        nulls = [wrong("", **{each: "null"}) for each in function.good if each not in function.nullable]
        for bad in (*function.bad, *nulls):
            statement = call(name, {**function.good, **bad.arguments})
            with subtests.test(f"{name} {bad.arguments}"[:200]):
                error = await refusal(queue.daemon, statement)
                assert error is not None, f"not refused: {statement[:500]}"
                assert error.sqlstate == bad.sqlstate, error.message
                assert bad.message in str(error.message)
    assert await contents(queue.superuser) == before


async def test_largest_valid_input_is_accepted(queue: JobQueue) -> None:
    """The longest texts and the largest numbers; an error message of any length is stored."""
    fits = {
        "p_kind": "x" * 100,
        "p_executor": "external_worker",
        "p_source_ref": "x" * 2000,
        "p_safe_payload": '{"a": "' + "x" * (16384 - 9) + '"}',
        "p_priority": 32767,
        "p_correlation_id": "x" * 255,
        "p_actor": "ä" * 200,
        "p_event_domain": "x" * 100,
        "p_source_system": "x" * 200,
    }
    await queue.enqueue("y" * 255, **fits)
    lease = await queue.claim(kind="x" * 100, executor="external_worker", holder="h" * 200, ttl=86400)
    await queue.progress(lease, "s" * 500)
    assert (await queue.fail(lease, "c" * 10_000, message="a\nb\x01" * 5000))["status"] == "retry_waiting"
    row = await queue.row(lease["job_id"])
    assert (len(row["last_error_code"]), len(row["last_error"])) == (100, 2000)
