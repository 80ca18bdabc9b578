"""core/limits.py against the database: both sides accept each limit and reject one step beyond it.

Each value goes through the types of API and settings, and through the database's functions and tables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import msgspec
import pytest

from webhookd.console.api import PortalLinkRequest
from webhookd.core import limits
from webhookd.core.settings import Settings
from webhookd.http import fields
from webhookd.jobqueue import fields as job_fields
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.endpoint import EndpointProblem, check_callback_url, check_headers

if TYPE_CHECKING:
    from tests.support.database import Connection, Database

Accepts = Callable[[Any], bool]

URL = "https://receiver.example/"
NO_JOB = "00000000-0000-0000-0000-000000000000"
# A gated function's WH400, a CHECK, a text too long for its column, and a number out of its type's range.
REJECTIONS = ("WH400", "23514", "22001", "22003")

PUBLISH = "select webhookd.publish({event_type}, {payload}, {key}, {correlation_id})"
ENQUEUE = "select webhookd.fn_job_enqueue(p_actor => 'test', {})"
ENQUEUE_NAMES = {"p_kind": "'test.kind'", "p_idempotency_key": "'key'", "p_executor": "'DOT'"}
CLAIM = (
    "select webhookd.fn_job_claim(p_kind => 'test.kind', p_executor => 'DOT', p_lease_name => {name}, "
    "p_lease_holder => 'holder', p_lease_ttl_seconds => {seconds})"
)


@dataclass(frozen=True)
class Limit:
    """Values at a limit and beyond it, with everything that must agree on them."""

    name: str
    accepted: list[Any]
    rejected: list[Any]
    types: list[Accepts]
    statements: list[str]  # with the value as $1


def of_type(kind: Any) -> Accepts:
    """Check with a type of the API."""

    def accepts(value: Any) -> bool:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return False
        return True

    return accepts


def of_setting(section: str, key: str) -> Accepts:
    """Check with a setting's type, without the rules between settings."""
    return lambda value: of_type(Settings)({section: {key: value}})


def accepts_url(url: str) -> bool:
    """Check with the parser of callback URLs."""
    return not isinstance(check_callback_url(url, AddressPolicy.of(())), EndpointProblem)


def accepts_header_value(headers: str) -> bool:
    """Check with the parser of custom headers."""
    return not isinstance(check_headers(msgspec.json.decode(headers, type=dict[str, str])), EndpointProblem)


def publish(**given: str) -> str:
    """Return a statement that publishes an event with `$1` as one argument."""
    usual = {"event_type": "'test.type'", "payload": "'{}'::json", "key": "null", "correlation_id": "null"}
    return PUBLISH.format(**usual | given)


def subscribe(**given: str) -> list[str]:
    """Return a call of create_subscription() and an INSERT, with `$1` as one value."""
    values = {"event_type": "'test.type'", "callback_url": f"'{URL}'"} | given
    named = ", ".join(f"{name} => {value}" for name, value in values.items())
    return [
        f"select webhookd.create_subscription({named})",
        f"insert into webhookd.subscriptions ({', '.join(values)}) values ({', '.join(values.values())})",
    ]


def console_link(**given: str) -> str:
    """Return a call of create_console_link() with `$1` as one argument."""
    usual = {
        "code_sha256": "sha256('code')",
        "kind": "'login'",
        "token_fingerprint": "''",
        "actor": "'test'",
        "expires_in_seconds": "60",
    }
    named = ", ".join(f"{name} => {value}" for name, value in (usual | given).items())
    return f"select webhookd.create_console_link({named})"


def enqueue(**given: str) -> str:
    """Return a call of fn_job_enqueue() with `$1` as one argument."""
    return ENQUEUE.format(", ".join(f"{name} => {value}" for name, value in (ENQUEUE_NAMES | given).items()))


def configure(key: str, sql_type: str) -> list[str]:
    """Return the ways to set a number of the job queue's policy: by function and in the tables."""
    settings = f"jsonb_build_object('{key}', $1::{sql_type})"
    return [
        f"select webhookd.fn_job_configure(p_settings => {settings}, p_actor => 'test', p_kind => {kind})"
        for kind in ("null", "'test.kind'")
    ] + [
        f"insert into webhookd.job_kind_policy (job_kind, {key}) values ('test.kind', $1::{sql_type})",
        f"update webhookd.settings set value = to_jsonb($1::numeric) where key = 'queue.job_substrate.{key}'",
    ]


def texts(length: int) -> tuple[list[Any], list[Any]]:
    """Return a text of the maximum length, and one that is too long."""
    return ["x" * length], ["x" * (length + 1)]


def numbers(low: float, high: float) -> tuple[list[Any], list[Any]]:
    """Return both ends of a range, and the next numbers outside."""
    return [low, high], [low - 1, high + 1]


def json_text(length: int) -> str:
    """Return a JSON string of so many bytes."""
    return f'"{"x" * (length - 2)}"'


def safe_payload(length: int) -> str:
    """Return a JSON object of so many bytes, as PostgreSQL prints it."""
    return f'{{"k": {json_text(length - 7)}}}'


RESULTS = "select webhookd.apply_results(1, 5, {base}, {longest}, {jitter}, 10)"
CANCEL = f"select webhookd.fn_job_cancel('{NO_JOB}'::uuid, $1, 'test')"

LIMITS = [
    Limit(
        "event type",
        *texts(limits.MAX_EVENT_TYPE_CHARACTERS),
        types=[of_type(fields.EventType)],
        statements=[
            publish(event_type="$1"),
            "insert into webhookd.events (event_type, payload) values ($1, '{}')",
            *subscribe(event_type="$1"),
            "select webhookd.fn_job_register_event($1, 'test.kind', 'DOT', 'test')",
        ],
    ),
    Limit(
        "event type pattern",
        ["a", "A_1.b", "a.b.c"],
        ["", ".a", "a.", "a..b", "a-b", "a b", "a\n", "é"],
        types=[of_type(fields.EventType)],
        statements=[
            publish(event_type="$1"),
            "insert into webhookd.events (event_type, payload) values ($1, '{}')",
            *subscribe(event_type="$1"),
            "select webhookd.fn_job_register_event($1, 'test.kind', 'DOT', 'test')",
        ],
    ),
    Limit(
        "lifetime of a console link",
        *numbers(limits.MIN_LINK_SECONDS, limits.MAX_LINK_SECONDS),
        types=[lambda value: of_type(PortalLinkRequest)({"expires_in_seconds": value})],
        statements=[console_link(expires_in_seconds="$1::integer")],
    ),
    Limit(
        "lifetime of a console session",
        [limits.MIN_SESSION_SECONDS, limits.MAX_SESSION_SECONDS],
        [],
        types=[of_setting("console", "session_seconds")],
        statements=[console_link(session_seconds="$1::double precision")],
    ),
    Limit(
        "reserved event types",
        ["dot.jobs", "dot"],
        [f"{limits.RESERVED_EVENT_TYPE_PREFIX}made"],
        types=[lambda value: not value.startswith(limits.RESERVED_EVENT_TYPE_PREFIX)],
        statements=[
            publish(event_type="$1"),
            "select webhookd.fn_job_register_event($1, 'test.kind', 'DOT', 'test')",
        ],
    ),
    Limit(
        "payload",
        [json_text(limits.MAX_PAYLOAD_BYTES)],
        [json_text(limits.MAX_PAYLOAD_BYTES + 1)],
        types=[lambda value: of_setting("api", "max_payload_bytes")(len(value))],
        statements=[
            publish(payload="$1::text::json"),
            "insert into webhookd.events (event_type, payload) values ('test.type', $1::text::json)",
        ],
    ),
    Limit(
        "idempotency key",
        ["x" * limits.MAX_KEY_CHARACTERS, "ä", "a b"],
        ["x" * (limits.MAX_KEY_CHARACTERS + 1), "", "a\nb", "a\x7f", "a\x9f"],
        types=[of_type(fields.IdempotencyKey)],
        statements=[
            publish(key="$1"),
            "insert into webhookd.events (event_type, payload, idempotency_key) values ('a', '{}', $1)",
            enqueue(p_idempotency_key="$1"),
        ],
    ),
    Limit(
        "correlation id",
        ["x" * limits.MAX_KEY_CHARACTERS, "a b"],
        ["x" * (limits.MAX_KEY_CHARACTERS + 1), "", " a", "a ", "ä", "a\n"],
        types=[of_type(fields.CorrelationId)],
        statements=[
            publish(correlation_id="$1"),
            "insert into webhookd.events (event_type, payload, correlation_id) values ('a', '{}', $1)",
            enqueue(p_correlation_id="$1"),
        ],
    ),
    Limit(
        "callback URL",
        [URL + "x" * (limits.MAX_URL_CHARACTERS - len(URL))],
        [URL + "x" * (limits.MAX_URL_CHARACTERS - len(URL) + 1), "http://receiver.example/"],
        types=[accepts_url],
        statements=subscribe(callback_url="$1"),
    ),
    Limit(
        "description",
        *texts(limits.MAX_DESCRIPTION_CHARACTERS),
        types=[of_type(fields.Description)],
        statements=subscribe(description="$1"),
    ),
    Limit(
        "header value",
        [f'{{"X-A": "{"x" * limits.MAX_HEADER_VALUE_CHARACTERS}"}}'],
        [f'{{"X-A": "{"x" * (limits.MAX_HEADER_VALUE_CHARACTERS + 1)}"}}'],
        types=[accepts_header_value],
        statements=subscribe(headers="$1::text::jsonb")[:1],
    ),
    Limit(
        "attempts",
        *numbers(limits.MIN_ATTEMPTS, limits.MAX_ATTEMPTS),
        types=[
            of_type(fields.Attempts),
            of_setting("retry", "max_attempts"),
            of_type(job_fields.Attempts),
            of_setting("jobs", "max_attempts"),
        ],
        statements=[*subscribe(max_attempts="$1::integer"), *configure("max_attempts", "integer")],
    ),
    Limit(
        "delay",
        *numbers(0, limits.MAX_DELAY_SECONDS),
        types=[
            of_type(fields.Delay),
            of_setting("retry", "base_delay_seconds"),
            of_setting("retry", "max_delay_seconds"),
            of_setting("subscriptions", "secret_overlap_seconds"),
        ],
        statements=[
            *subscribe(base_delay_seconds="$1::double precision"),
            RESULTS.format(base="$1", longest="1", jitter="0"),
            RESULTS.format(base="1", longest="$1", jitter="0"),
            "select webhookd.rotate_secret((select min(id) from webhookd.subscriptions), $1)",
        ],
    ),
    Limit(
        "jitter",
        *numbers(0, limits.MAX_JITTER),
        types=[
            of_type(fields.Jitter),
            of_setting("retry", "jitter"),
            of_type(job_fields.Jitter),
            of_setting("jobs", "jitter"),
        ],
        statements=[
            RESULTS.format(base="1", longest="1", jitter="$1"),
            *configure("jitter", "double precision"),
        ],
    ),
    Limit(
        "lease",
        [0.001, limits.MAX_LEASE_SECONDS],
        [0, limits.MAX_LEASE_SECONDS + 1],
        types=[of_setting("delivery", "lease_seconds"), of_type(job_fields.LeaseSeconds)],
        statements=[
            "select webhookd.claim_jobs('worker', 1, $1, 1)",
            CLAIM.format(name="'name'", seconds="$1"),
        ],
    ),
    Limit(
        "job kind",
        ["x" * limits.MAX_JOB_KIND_CHARACTERS],
        ["x" * (limits.MAX_JOB_KIND_CHARACTERS + 1), "", "a\nb"],
        types=[of_type(job_fields.JobKind), of_type(job_fields.Domain)],
        statements=[enqueue(p_kind="$1"), enqueue(p_event_domain="$1")],
    ),
    Limit(
        "job name",
        ["x" * limits.MAX_NAME_CHARACTERS],
        ["x" * (limits.MAX_NAME_CHARACTERS + 1), "", "a\nb"],
        types=[of_type(job_fields.Name)],
        statements=[enqueue(p_source_system="$1"), CLAIM.format(name="$1", seconds="1")],
    ),
    Limit(
        "job reference",
        ["x" * limits.MAX_REF_CHARACTERS],
        ["x" * (limits.MAX_REF_CHARACTERS + 1), "", "a\nb"],
        types=[of_type(job_fields.Ref)],
        statements=[enqueue(**{name: "$1"}) for name in ("p_source_ref", "p_target_ref", "p_payload_ref")],
    ),
    Limit(
        "reason of a cancellation",
        ["x" * limits.MAX_WORDS_CHARACTERS],
        ["x" * (limits.MAX_WORDS_CHARACTERS + 1), "", "a\nb"],
        types=[of_type(job_fields.ShortText)],
        statements=[CANCEL],
    ),
    Limit(
        "job priority",
        *numbers(limits.MIN_PRIORITY, limits.MAX_PRIORITY),
        types=[of_type(job_fields.Priority)],
        statements=[
            enqueue(p_priority="$1"),
            "select webhookd.fn_job_register_event('a', 'test.kind', 'DOT', 'test', $1)",
        ],
    ),
    Limit(
        "safe payload",
        [safe_payload(limits.MAX_SAFE_PAYLOAD_BYTES)],
        [
            safe_payload(limits.MAX_SAFE_PAYLOAD_BYTES + 1),
            *(f'{{"{key}": 1}}' for key in limits.SAFE_PAYLOAD_FORBIDDEN_KEYS),
        ],
        types=[],  # the API leaves this to the database
        statements=[enqueue(p_safe_payload="$1::text::jsonb")],
    ),
    Limit(
        "job delay",
        *numbers(0, limits.MAX_JOB_DELAY_SECONDS),
        types=[
            of_type(job_fields.Seconds),
            of_setting("jobs", "base_delay_seconds"),
            of_setting("jobs", "max_delay_seconds"),
        ],
        statements=[
            *configure("base_delay_seconds", "double precision"),
            *configure("max_delay_seconds", "double precision"),
        ],
    ),
    Limit(
        "job retention",
        *numbers(0, limits.MAX_JOB_RETENTION_SECONDS),
        types=[of_type(job_fields.Retention), of_setting("jobs", "retention_seconds")],
        statements=configure("retention_seconds", "double precision"),
    ),
    Limit(
        "lease recoveries",
        *numbers(0, limits.MAX_LEASE_RECOVERIES),
        types=[of_type(job_fields.Recoveries), of_setting("jobs", "max_lease_recoveries")],
        statements=configure("max_lease_recoveries", "integer"),
    ),
]

# The lengths of the columns, by name.
COLUMN_LENGTHS = {
    "event_type": limits.MAX_EVENT_TYPE_CHARACTERS,
    "idempotency_key": limits.MAX_KEY_CHARACTERS,
    "correlation_id": limits.MAX_KEY_CHARACTERS,
    "callback_url": limits.MAX_URL_CHARACTERS,
    "description": limits.MAX_DESCRIPTION_CHARACTERS,
    "error_code": limits.MAX_ERROR_CODE_CHARACTERS,
    "final_error_code": limits.MAX_ERROR_CODE_CHARACTERS,
    "last_error_code": limits.MAX_ERROR_CODE_CHARACTERS,
}


async def rejection(connection: "Connection", statement: str, value: Any) -> str | None:
    """Run a statement and roll it back; return the SQLSTATE of its error, or None."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(statement, value)
    except asyncpg.PostgresError as error:
        return str(error.sqlstate)
    except asyncpg.DataError:  # the driver's own check of an integer's range
        return "22003"
    finally:
        await transaction.rollback()
    return None


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.name.replace(" ", "_"))
def test_types_accept_the_limit_and_no_more(limit: Limit) -> None:
    """The API and the settings use the values of core/limits.py."""
    for accepts in limit.types:
        assert all(accepts(value) for value in limit.accepted)
        assert not any(accepts(value) for value in limit.rejected)


async def test_database_accepts_the_limits_and_no_more(database: "Database") -> None:
    """Functions and CHECK constraints have the same limits. Every statement is rolled back."""
    superuser = await database.connect("superuser")
    await superuser.execute("select webhookd.fn_job_enable(true, 'test')")
    await superuser.execute(f"select webhookd.create_subscription('test.type', '{URL}')")
    # The widest range, because base_delay_seconds must not exceed max_delay_seconds.
    widest = f'{{"base_delay_seconds": 0, "max_delay_seconds": {limits.MAX_JOB_DELAY_SECONDS}}}'
    await superuser.execute(f"select webhookd.fn_job_configure('{widest}', 'test')")
    for limit in LIMITS:
        for statement in limit.statements:
            for value in limit.accepted:
                state = await rejection(superuser, statement, value)
                assert state not in REJECTIONS, f"{limit.name}: {statement} rejects {value!r:.50}"
            for value in limit.rejected:
                state = await rejection(superuser, statement, value)
                assert state in REJECTIONS, f"{limit.name}: {statement} accepts {value!r:.50} ({state})"


async def test_columns_have_the_lengths_of_limits(database: "Database") -> None:
    """A column of a listed name has the length that core/limits.py gives."""
    superuser = await database.connect("superuser")
    columns = await superuser.fetch(
        "select table_name, column_name, character_maximum_length from information_schema.columns "
        "where table_schema = 'webhookd' and character_maximum_length is not null and column_name = any($1)",
        list(COLUMN_LENGTHS),
    )
    assert {row["column_name"] for row in columns} == set(COLUMN_LENGTHS)
    assert [
        row for row in columns if row["character_maximum_length"] != COLUMN_LENGTHS[row["column_name"]]
    ] == []
    [excerpt] = await superuser.fetch(
        "select pg_get_constraintdef(oid) as definition from pg_constraint "
        "where conname = 'response_excerpt_bound'"
    )
    assert f"<= {limits.MAX_RESPONSE_EXCERPT_BYTES}" in excerpt["definition"]
