"""Bad input to every function that the daemon may call: rejected with a message, and nothing changes.

Each function has a good call, and arguments that make it bad. In this database a bad call that went through
would change something.
"""

import base64
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.support.flow import ADDRESS, POLICY, Flow
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.db.connection import Connection
from webhookd.deliveries import attempts, dead_letters, sagas

# Ids of the rows that `world` creates; a copy of the template counts from 1.
SUBSCRIPTION, HELD, DEAD_LETTER, UNKNOWN = 1, 2, 1, 999_999
TOKEN = "'00000000-0000-0000-0000-000000000000'"
GOOD_SECRET = "whsec_" + "A" * 32
# The only leased attempt of `world`; its lease is over but not reset.
LEASED_JOB = "array(select id from webhookd.webhook_delivery_jobs where status = 'Leased')"
LEASE_TOKEN = "array(select lease_token from webhookd.webhook_delivery_jobs where status = 'Leased')"

Arguments = Mapping[str, str]


@dataclass(frozen=True)
class Bad:
    """Arguments, as SQL, that make a good call bad, and the expected error."""

    sqlstate: str
    message: str
    arguments: Arguments


@dataclass(frozen=True)
class Function:
    """A function with a good call, its nullable arguments, and its bad arguments."""

    good: Arguments
    nullable: frozenset[str] = frozenset()
    bad: list[Bad] = field(default_factory=list)


def wrong(message: str, **arguments: str) -> Bad:
    """Return an argument of the wrong format or size."""
    return Bad("WH400", message, arguments)


def missing(message: str, **arguments: str) -> Bad:
    """Return an id that does not exist."""
    return Bad("WH404", message, arguments)


def not_positive(*names: str, message: str = "{} must be at least 1") -> list[Bad]:
    """Return sizes of zero and less."""
    return [wrong(message.format(name), **{name: size}) for name in names for size in ("0", "-1")]


def out_of_range(name: str, message: str, *values: str) -> list[Bad]:
    """Return numbers that are too small, too large, or not a number."""
    return [wrong(message, **{name: value}) for value in values]


def literal(text: str) -> str:
    """Return a text as an SQL literal, whatever its characters."""
    escaped = "".join(
        character if " " <= character <= "~" and character not in "'\\" else f"\\U{ord(character):08x}"
        for character in text
    )
    return f"E'{escaped}'"


BAD_EVENT_TYPES = {
    "empty": "",
    "101 characters": "a" * 101,
    "space": "order created",
    "outer space": " order",
    "newline": "order\n",
    "tab": "order\tcreated",
    "control": "order\x01",
    "empty word": "order..created",
    "leading dot": ".order",
    "trailing dot": "order.",
    "wildcard": "order.*",
    "dash": "order-created",
    "percent": "order%",
    "quote": "order'",
    "Cyrillic": "\u043erder",
    "accent": "ordér",
}
BAD_ADDRESSES = {
    "empty": "",
    "http": "http://receiver.example/",
    "ftp": "ftp://receiver.example/",
    "file": "file:///etc/passwd",
    "javascript": "javascript:alert(1)",
    "no scheme": "receiver.example/hook",
    "no scheme, slashes": "//receiver.example/hook",
    "upper-case scheme": "HTTPS://receiver.example/",
    "one slash": "https:/receiver.example/",
    "no host": "https://",
    "no host, path": "https:///hook",
    "no host, query": "https://?a=b",
    "credentials": "https://user:password@receiver.example/",
    "user": "https://user@receiver.example/",
    "disguised host": "https://receiver.example@127.0.0.1/",
    "fragment": "https://receiver.example/hook#part",
    "fragment after host": "https://127.0.0.1#@receiver.example/",
    "space in path": "https://receiver.example/a b",
    "space in host": "https://receiver example/",
    "leading space": " https://receiver.example/",
    "trailing space": "https://receiver.example/ ",
    "newline at the end": "https://receiver.example/\n",
    "newline before": "\nhttps://receiver.example/",
    "second line": "https://receiver.example/\r\nX: y",
    "tab in host": "https://recei\tver.example/",
    "escape": "https://receiver.example/\x1b",
    "DEL": "https://receiver.example/\x7f",
    "DEL in host": "https://receiver\x7f.example/",
    "501 characters": "https://receiver.example/".ljust(501, "x"),
}


def secret_of(size: int) -> str:
    """Return a secret of so many bytes."""
    return "whsec_" + base64.b64encode(bytes(size)).decode()


BAD_SECRETS = {
    "empty": "",
    "prefix alone": "whsec_",
    "no prefix": GOOD_SECRET.removeprefix("whsec_"),
    "other prefix": GOOD_SECRET.replace("whsec_", "whsk_"),
    "upper-case prefix": GOOD_SECRET.replace("whsec_", "WHSEC_"),
    "23 bytes": secret_of(23),
    "65 bytes": secret_of(65),
    "URL alphabet": "whsec_" + "-_" * 16,
    "no padding": secret_of(32).rstrip("="),
    "too much padding": GOOD_SECRET + "====",
    "padding inside": "whsec_AA==" + "A" * 32,
    "space": GOOD_SECRET + " ",
    "newline": GOOD_SECRET + "\n",
    "newline inside": "whsec_" + "A" * 16 + "\n" + "A" * 16,
    "non-ASCII": GOOD_SECRET + "é",
}
BAD_KEYS = {
    "empty": "",
    "256 characters": "k" * 256,
    "newline": "key\n",
    "control": "k\x01ey",
    "DEL": "key\x7f",
}
BAD_CORRELATION_IDS = {
    "empty": "",
    "256 characters": "c" * 256,
    "newline": "c\n",
    "header": "c\r\nx: y",
    "tab": "a\tb",
    "outer space": " c",
    "trailing space": "c ",
    "only space": " ",
    "DEL": "c\x7f",
    "non-ASCII": "é",
}
BAD_HEADERS = {
    "array": "[]",
    "string": '"x"',
    "null": "null",
    "number inside": '{"x": 1}',
    "null inside": '{"x": null}',
    "object inside": '{"x": {"y": "z"}}',
    "one of two": '{"x": "y", "z": ["y"]}',
}

BAD_PATTERNS = {name: event_type for name, event_type in BAD_EVENT_TYPES.items() if name != "wildcard"} | {
    "wildcard inside": "a.*.b",
    "two wildcards": "**",
    "wildcard in a word": "order*",
    "wildcard first": "*.created",
}
BAD_TENANTS = {"space": "a b", "slash": "a/b", "101 characters": "t" * 101, "newline": "a\n", "accent": "é"}
BAD_LABELS = {
    "array": "[]",
    "number": "1",
    "number inside": '{"x": 1}',
    "null inside": '{"x": null}',
    "object inside": '{"x": {"y": "z"}}',
    "empty name": '{"": "x"}',
    "name of 101 characters": f'{{"{"n" * 101}": "x"}}',
    "value of 101 characters": f'{{"x": "{"v" * 101}"}}',
    "21 labels": "{" + ", ".join(f'"l{number}": "x"' for number in range(21)) + "}",
}

PUBLISHED = {
    "event_type": "'a'",
    "payload": "'{}'",
    "idempotency_key": "'k'",
    "correlation_id": "'c'",
    "tenant": "'acme'",
    "labels": """'{"region": "eu"}'""",
}


def policy_bad(*names: str) -> list[Bad]:
    """Return values that no retry policy may have."""
    bad = {
        "max_attempts": not_positive("max_attempts"),
        "base_delay_seconds": out_of_range(
            "base_delay_seconds", "base_delay_seconds must be 0 to 31536000", "-0.1", "31536001", "'NaN'"
        ),
        "max_delay_seconds": out_of_range(
            "max_delay_seconds", "max_delay_seconds must be 0 to 31536000", "-0.1", "'Infinity'", "'NaN'"
        ),
        "jitter": out_of_range("jitter", "jitter must be 0 to 1", "-0.1", "1.1", "'NaN'"),
    }
    return [each for name in names for each in bad[name]]


def subscription_bad() -> list[Bad]:
    """Return values that no subscription may have, at creation or later."""
    return [
        *(wrong("callback_url must be", callback_url=literal(url)) for url in BAD_ADDRESSES.values()),
        *out_of_range("max_attempts", "max_attempts must be 1 to 1000", "0", "-1", "1001"),
        *policy_bad("base_delay_seconds"),
        *(wrong("headers must be a JSON object", headers=literal(h)) for h in BAD_HEADERS.values()),
        wrong("description must be at most 500 characters", description="repeat('x', 501)"),
    ]


def changed(**changes: object) -> str:
    """Return the literal of an object."""
    return literal(json.dumps(changes))


UNCHANGEABLE = ("activ", "Active", "verified", "tenant", "tenant_active", "deleted_at", "id", "routable")
BAD_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("active must be", {"active": None}),
    ("paused must be", {"paused": None}),
    *(("callback_url must be", {"callback_url": url}) for url in BAD_ADDRESSES.values() if len(url) < 501),
    *(("event_types must be", {"event_types": [each]}) for each in BAD_PATTERNS.values() if len(each) < 101),
    ("event_types must be", {"event_types": []}),
    ("event_types must be", {"event_types": None}),
    ("event_type must be the first", {"event_type": None}),
    ("event_type must be the first", {"event_type": "a", "event_types": ["b", "a"]}),
    *(("filter must be an object", {"filter": json.loads(each)}) for each in BAD_LABELS.values()),
    ("format must be", {"format": None}),
    ("format must be", {"format": "xml"}),
    ("max_per_second must be", {"max_per_second": 0}),
    ("max_per_second must be", {"max_per_second": 1_000_001}),
    ("max_attempts must be 1 to 1000", {"max_attempts": 0}),
    ("max_attempts must be 1 to 1000", {"max_attempts": 1001}),
    ("base_delay_seconds must be", {"base_delay_seconds": -0.1}),
    *(("headers must be a JSON object", {"headers": json.loads(each)}) for each in BAD_HEADERS.values()),
]

BAD_BATCHES = [wrong("batch_size must be 1 to 100000", batch_size=each) for each in ("0", "-1", "100001")]
BAD_SWEEPS = [
    *BAD_BATCHES,
    wrong("kind must be events or payloads", kind="'jobs'"),
    *(wrong("period_days must be above 0", period_days=each) for each in ("0", "-1", "36501", "'nan'")),
    *(wrong("dead_letters_days must be 0", dead_letters_days=each) for each in ("-1", "36501", "'nan'")),
]
FUNCTIONS: dict[str, Function] = {
    "publish": Function(
        PUBLISHED,
        frozenset({"idempotency_key", "correlation_id", "tenant", "labels"}),
        [
            *(wrong("event_type must be", event_type=literal(each)) for each in BAD_EVENT_TYPES.values()),
            *(wrong("tenant must be", tenant=literal(each)) for each in BAD_TENANTS.values()),
            *(wrong("labels must be an object", labels=literal(each)) for each in BAD_LABELS.values()),
            *(wrong("idempotency_key must be", idempotency_key=literal(k)) for k in BAD_KEYS.values()),
            *(
                wrong("correlation_id must be", correlation_id=literal(c))
                for c in BAD_CORRELATION_IDS.values()
            ),
            Bad("WH409", "idempotency key 'used' was used", {"idempotency_key": "'used'", "tenant": "''"}),
            Bad("22P02", "invalid input syntax for type json", {"payload": "'{'"}),
            Bad("22P02", "invalid input syntax for type json", {"payload": "''"}),
            Bad("22P02", "invalid input syntax for type json", {"payload": "'NaN'"}),
        ],
    ),
    "publish_many": Function(
        {
            "event_types": "array['a', 'b']",
            "payloads": "array['{}', '{}']::json[]",
            "idempotency_keys": "array['k', null]",
            "correlation_ids": "array['c', null]",
            "tenants": "array['', null]",
            "labels": """array[null, '{"region": "eu"}']::jsonb[]""",
        },
        frozenset({"tenants", "labels"}),
        bad=[
            wrong("one element for each event", tenants="array['']"),
            wrong("one element for each event", labels="'{}'"),
            wrong("tenant must be", tenants="array['a b', null]"),
            wrong("labels must be an object", labels="array['[]', null]::jsonb[]"),
            wrong("one element for each event", event_types="array['a']"),
            wrong("one element for each event", payloads="array['{}', '{}', '{}']::json[]"),
            wrong("one element for each event", idempotency_keys="array['k']"),
            wrong("one element for each event", correlation_ids="'{}'"),
            wrong(
                "at least one",
                event_types="'{}'",
                payloads="'{}'",
                idempotency_keys="'{}'",
                correlation_ids="'{}'",
                tenants="'{}'",
                labels="'{}'",
            ),
            wrong("event_type must be", event_types="array['a', null]"),
            wrong("event_type must be", event_types="array['a', repeat('b', 101)]"),
            wrong("payload must be", payloads="array['{}', null]::json[]"),
            wrong("idempotency_key must be", idempotency_keys="array['k', '']"),
            wrong("correlation_id must be", correlation_ids="array[null, ' ']"),
            Bad("WH409", "idempotency key 'used' was used", {"idempotency_keys": "array[null, 'used']"}),
            Bad(
                "WH409",
                "idempotency key 'k' was used",
                {"idempotency_keys": "array['k', 'k']", "payloads": "array['1', '2']::json[]"},
            ),
        ],
    ),
    "route_events": Function(
        {"batch_size": "10", "first_event_id": "0", "max_sagas": "100"},
        bad=[*not_positive("batch_size"), *not_positive("max_sagas")],
    ),
    "due_subscriptions": Function(
        {"after_subscription_id": "0", "max_subscriptions": "10"},
        bad=not_positive("max_subscriptions"),
    ),
    "start_due_sagas": Function(
        {
            "subscription_ids": f"array[{SUBSCRIPTION}, {UNKNOWN}]",
            "quotas": "array[10, 10]",
            "saga_marks": "array[null, null]::bigint[]",
            "job_marks": "array[null, null]::bigint[]",
            "subscription_window": "64",
            "max_attempts": "5",
        },
        bad=[
            wrong("one element for each subscription", subscription_ids=f"array[{SUBSCRIPTION}]"),
            wrong("one element for each subscription", quotas="array[10]"),
            wrong("one element for each subscription", saga_marks="'{}'"),
            wrong("one element for each subscription", job_marks="array[null, null, 1]"),
            wrong(
                "at least one",
                subscription_ids="'{}'",
                quotas="'{}'",
                saga_marks="'{}'",
                job_marks="'{}'",
            ),
            wrong("must be distinct and not null", subscription_ids=f"array[{SUBSCRIPTION}, {SUBSCRIPTION}]"),
            wrong("must be distinct and not null", subscription_ids=f"array[{SUBSCRIPTION}, null]"),
            *not_positive("subscription_window", "max_attempts"),
        ],
    ),
    "dead_letter_exhausted": Function(
        {"after_saga_id": "0", "batch_size": "10", "max_attempts": "1"},
        bad=not_positive("batch_size", "max_attempts"),
    ),
    "apply_results": Function(
        {
            "batch_size": "10",
            "max_attempts": "5",
            "base_delay_seconds": "30",
            "max_delay_seconds": "3600",
            "jitter": "0",
            "failing_after": "10",
            "reported_job_ids": "null",
            "excluded_job_ids": "'{}'",
        },
        frozenset({"reported_job_ids"}),
        [
            *not_positive("batch_size", "failing_after"),
            *policy_bad("max_attempts", "base_delay_seconds", "max_delay_seconds", "jitter"),
        ],
    ),
    "deliver_now": Function(
        {
            "batch_size": "10",
            "first_event_id": "0",
            "subscription_window": "64",
            "max_attempts": "5",
            "worker_id": "'worker'",
            "wanted": "10",
            "lease_seconds": "60",
            "subscription_slots": "10",
            "busy_subscription_ids": "'{}'",
            "busy_slots": "'{}'",
            "first_job_id": "0",
        },
        bad=not_positive("batch_size"),
    ),
    "claim_jobs": Function(
        {
            "worker_id": "'worker'",
            "wanted": "10",
            "lease_seconds": "60",
            "subscription_slots": "10",
            "busy_subscription_ids": f"array[{UNKNOWN}]",
            "busy_slots": "array[1]",
            "first_job_id": "0",
            "with_payloads": "true",
        },
        bad=[
            wrong("worker_id must be 1 to 200 characters", worker_id="''"),
            wrong("worker_id must be 1 to 200 characters", worker_id="repeat('w', 201)"),
            *not_positive("wanted", "subscription_slots"),
            *out_of_range(
                "lease_seconds",
                "lease_seconds must be above 0 and at most 86400",
                *("0", "-1", "86401", "'NaN'", "'Infinity'"),
            ),
            wrong("one element for each of busy_subscription_ids", busy_subscription_ids="'{}'"),
            wrong("one element for each of busy_subscription_ids", busy_slots="array[1, 2]"),
            *(
                wrong(
                    "busy_subscription_ids must be distinct and not null",
                    busy_subscription_ids=f"array[{SUBSCRIPTION}, {other}]",
                    busy_slots="array[1, 1]",
                )
                for other in (SUBSCRIPTION, "null")
            ),
        ],
    ),
    "load_payloads": Function(
        {"job_ids": f"array[{UNKNOWN}]", "lease_tokens": f"array[{TOKEN}]::uuid[]"},
        bad=[
            wrong("lease_tokens must have one element for each job", job_ids="array[1, 2]"),
            wrong("lease_tokens must have one element for each job", lease_tokens="'{}'"),
        ],
    ),
    "report_results": Function(
        {
            "job_ids": f"array[{UNKNOWN}]",
            "lease_tokens": f"array[{TOKEN}]::uuid[]",
            "response_statuses": "array[200]",
            "error_codes": "array[null]::text[]",
            "durations_ms": "array[1]",
            "retry_after_seconds": "array[null]::double precision[]",
            "response_excerpts": "array[null]::bytea[]",
        },
        bad=[
            *(
                wrong("one element for each job", **{name: "'{}'"})
                for name in (
                    "lease_tokens",
                    "response_statuses",
                    "error_codes",
                    "durations_ms",
                    "retry_after_seconds",
                    "response_excerpts",
                )
            ),
            wrong("one element for each job", job_ids="array[1, 2]"),
            wrong("job_ids must be distinct and not null", job_ids="array[null]::bigint[]"),
            wrong("lease_tokens must not be null", lease_tokens="array[null]::uuid[]"),
            wrong(
                "at least one",
                job_ids="'{}'",
                lease_tokens="'{}'",
                response_statuses="'{}'",
                error_codes="'{}'",
                durations_ms="'{}'",
                retry_after_seconds="'{}'",
                response_excerpts="'{}'",
            ),
            wrong(
                "job_ids must be distinct and not null",
                job_ids="array[1, 1]",
                lease_tokens=f"array[{TOKEN}, {TOKEN}]::uuid[]",
                response_statuses="array[200, 500]",
                error_codes="array[null, null]::text[]",
                durations_ms="array[1, 1]",
                retry_after_seconds="array[null, null]::double precision[]",
                response_excerpts="array[null, null]::bytea[]",
            ),
        ],
    ),
    "complete_deliveries": Function(
        # Completes the leased attempt, so that a bad call that went through would change something.
        {
            "job_ids": LEASED_JOB,
            "lease_tokens": LEASE_TOKEN,
            "response_statuses": "array[200]",
            "durations_ms": "array[1]",
            "response_excerpts": "array[null]::bytea[]",
        },
        bad=[
            *(
                wrong("one element for each job", **{name: "'{}'"})
                for name in ("lease_tokens", "response_statuses", "durations_ms", "response_excerpts")
            ),
            wrong("one element for each job", job_ids=f"{LEASED_JOB} || {UNKNOWN}::bigint"),
            wrong("job_ids must be distinct and not null", job_ids="array[null]::bigint[]"),
            wrong(
                "at least one",
                job_ids="'{}'",
                lease_tokens="'{}'",
                response_statuses="'{}'",
                durations_ms="'{}'",
                response_excerpts="'{}'",
            ),
            *(
                wrong(
                    "job_ids must be distinct and not null",
                    job_ids=f"{LEASED_JOB} || {second}",
                    lease_tokens=f"{LEASE_TOKEN} || {LEASE_TOKEN}",
                    response_statuses="array[200, 200]",
                    durations_ms="array[1, 1]",
                    response_excerpts="array[null, null]::bytea[]",
                )
                for second in (LEASED_JOB, "null::bigint")
            ),
            *(
                wrong("response_statuses must be 200 to 299", response_statuses=f"array[{status}]::integer[]")
                for status in ("199", "300", "500", "0", "-1", "null")
            ),
            # One bad status among good ones, first and last.
            *(
                wrong(
                    "response_statuses must be 200 to 299",
                    job_ids=f"{LEASED_JOB} || {UNKNOWN}::bigint",
                    lease_tokens=f"{LEASE_TOKEN} || {LEASE_TOKEN}",
                    response_statuses=statuses,
                    durations_ms="array[1, 1]",
                    response_excerpts="array[null, null]::bytea[]",
                )
                for statuses in ("array[200, 500]", "array[500, 200]", "array[200, null]")
            ),
        ],
    ),
    "release_jobs": Function(
        {"job_ids": f"array[{UNKNOWN}]", "lease_tokens": f"array[{TOKEN}]::uuid[]"},
        bad=[
            wrong("lease_tokens must have one element for each job", job_ids="array[1, 2]"),
            wrong("lease_tokens must have one element for each job", lease_tokens="'{}'"),
        ],
    ),
    "reset_expired_leases": Function(
        {"batch_size": "10", "max_lease_resets": "5", "first_lease_until": "'-infinity'"},
        bad=[
            *not_positive("batch_size"),
            wrong("max_lease_resets must be 0 or more", max_lease_resets="-1"),
        ],
    ),
    "backlog": Function({"counted_up_to": "10"}, bad=not_positive("counted_up_to")),
    "requeue_dead_letter": Function(
        {"dead_letter_id": f"{DEAD_LETTER}", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        bad=[
            missing(f"dead letter {DEAD_LETTER} does not exist", only_tenant="'acme'"),
            missing(f"dead letter {UNKNOWN} does not exist", dead_letter_id=f"{UNKNOWN}"),
            missing("dead letter 0 does not exist", dead_letter_id="0"),
            missing("dead letter -1 does not exist", dead_letter_id="-1"),
            Bad("WH412", "subscription 2 is not active and verified", {"dead_letter_id": "2"}),
        ],
    ),
    "requeue_dead_letters": Function(
        {
            "only_subscription_id": f"{SUBSCRIPTION}",
            "only_error_code": "'HTTP_500'",
            "failed_after": "'-infinity'",
            "failed_before": "'infinity'",
            "after_id": "0",
            "batch_size": "10",
            "dry_run": "false",
            "only_tenant": "null",
        },
        frozenset(
            {"only_subscription_id", "only_error_code", "failed_after", "failed_before", "only_tenant"}
        ),
        [*not_positive("batch_size"), wrong("only_tenant must not be empty", only_tenant="''")],
    ),
    "resend_delivery": Function(
        {"saga_id": "1", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        [
            missing(f"delivery {UNKNOWN} does not exist", saga_id=f"{UNKNOWN}"),
            missing("delivery 1 does not exist", only_tenant="'acme'"),
            Bad("WH412", "subscription 2 is not active and verified", {"saga_id": "2"}),
            Bad("WH415", "only a finished one can be resent", {"saga_id": "3"}),
        ],
    ),
    "retry_delivery": Function(
        {"saga_id": "3", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        [
            missing(f"delivery {UNKNOWN} does not exist", saga_id=f"{UNKNOWN}"),
            missing("delivery 3 does not exist", only_tenant="'acme'"),
            Bad("WH415", "delivery 1 is DeadLettered", {"saga_id": "1"}),
        ],
    ),
    "replay_events": Function(
        {
            "subscription_id": f"{SUBSCRIPTION}",
            "since": "now() - interval '1 h'",
            "until": "now()",
            "only_types": "array['first.*']",
            "include_all": "true",
            "started_at": "now()",
            "after_event_id": "0",
            "batch_size": "10",
            "dry_run": "false",
            "only_tenant": "null",
        },
        frozenset({"only_types", "only_tenant"}),
        [
            *not_positive("batch_size"),
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}"),
            missing(f"subscription {SUBSCRIPTION} does not exist", only_tenant="'acme'"),
            wrong("since must be before until", since="now()", until="now()"),
            wrong("after_event_id must be 0 or", after_event_id="1", since="now() - interval '1 us'"),
            Bad("WH412", "subscription 2 is not active and verified", {"subscription_id": f"{HELD}"}),
        ],
    ),
    "put_tenant": Function(
        {"tenant": "'acme'", "changes": """'{"name": "Acme", "active": false, "max_subscriptions": 3}'"""},
        bad=[
            *(wrong("tenant must be", tenant=literal(each)) for each in ["", *BAD_TENANTS.values()]),
            wrong("changes must be an object", changes="'[]'"),
            wrong("changes must be an object", changes="""'{"tenant": "b"}'"""),
            wrong("active must be true or false", changes="""'{"active": null}'"""),
            wrong("max_subscriptions must be 0", changes="""'{"max_subscriptions": -1}'"""),
            wrong("max_subscriptions must be 0", changes="""'{"max_subscriptions": 3000000000}'"""),
        ],
    ),
    "delete_subscription": Function(
        {"subscription_id": f"{SUBSCRIPTION}", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        [
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}"),
            missing(f"subscription {SUBSCRIPTION} does not exist", only_tenant="'acme'"),
        ],
    ),
    "prepare_test": Function(
        {"subscription_id": f"{SUBSCRIPTION}", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        [
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}"),
            missing(f"subscription {SUBSCRIPTION} does not exist", only_tenant="'acme'"),
        ],
    ),
    "patterns_of": Function({"event_type": "'a.b'"}, frozenset({"event_type"})),
    "take_retention_turn": Function(
        {"holder": "'me'", "seconds": "60"},
        bad=[wrong("seconds must be 0", seconds=each) for each in ("-1", "3601", "'nan'")],
    ),
    "sweep_events": Function(
        {
            "holder": "'me'",
            "kind": "'events'",
            "batch_size": "10",
            "period_days": "0.000000001",
            "dead_letters_days": "0.000000001",
        },
        bad=BAD_SWEEPS,
    ),
    "preview_sweep": Function(
        {
            "kind": "'events'",
            "batch_size": "10",
            "period_days": "1",
            "dead_letters_days": "1",
            "kept": "false",
            "after_id": "0",
        },
        bad=[*BAD_SWEEPS, wrong("after_id must be 0 or more", after_id="-1")],
    ),
    "sweep_subscriptions": Function(
        {"holder": "'me'", "batch_size": "10", "period_days": "0.000000001"},
        bad=[*BAD_BATCHES, wrong("period_days must be above 0", period_days="0")],
    ),
    "sweep_stats": Function(
        {"holder": "'me'", "batch_size": "10", "period_days": "30"},
        bad=[
            *BAD_BATCHES,
            *(
                wrong("period_days must be 0 to 36500", period_days=each)
                for each in ("-1", "36501", "'nan'", "null")
            ),
        ],
    ),
    "sweep_jobs": Function(
        {
            "holder": "'me'",
            "batch_size": "10",
            "jobs_days": "0.000000001",
            "ledger_days": "0.000000001",
            "workflows_days": "0.000000001",
        },
        bad=[
            *BAD_BATCHES,
            *(
                wrong(f"{name} must be 0 to 36500", **{name: each})
                for name in ("jobs_days", "ledger_days", "workflows_days")
                for each in ("-1", "36501", "'nan'")
            ),
        ],
    ),
    "recheck_kept_events": Function({}),
    "erase": Function({"holder": "'me'", "batch_size": "10", "since": "now()"}, bad=BAD_BATCHES),
    "erase_tenant": Function(
        {"tenant": "'initech'", "requested_by": "'me'"},
        bad=[
            missing("tenant 'globex' does not exist", tenant="'globex'"),
            missing("tenant '' does not exist", tenant="''"),
            wrong("requested_by must be", requested_by="''"),
            wrong("requested_by must be", requested_by="repeat('a', 201)"),
        ],
    ),
    "erase_subscription": Function(
        {"subscription_id": f"{SUBSCRIPTION}", "requested_by": "'me'", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        [
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}"),
            missing(f"subscription {SUBSCRIPTION} does not exist", only_tenant="'acme'"),
            wrong("requested_by must be", requested_by="''"),
        ],
    ),
    "console_key": Function({}),
    "create_console_link": Function(
        {
            "code_sha256": "sha256('code')",
            "kind": "'portal'",
            "token_fingerprint": f"'{'0a' * 16}'",
            "actor": "'shop'",
            "expires_in_seconds": "3600",
            "session_seconds": "600",
            "tenant": "'initech'",
            "capabilities": "'{view,secrets}'",
        },
        frozenset({"session_seconds"}),
        [
            *(
                wrong("code_sha256 must be 32 bytes", code_sha256=each)
                for each in ("''", "decode('00', 'hex')")
            ),
            *(wrong("kind must be login or portal", kind=each) for each in ("''", "'Portal'", "'admin'")),
            *(
                wrong("token_fingerprint must be", token_fingerprint=literal(each))
                for each in ("0", "0a" * 15, "0A" * 16, "0a" * 32, "0a" * 16 + "\n")
            ),
            *(wrong("actor must be 1 to 200", actor=each) for each in ("''", "repeat('a', 201)")),
            *out_of_range("expires_in_seconds", "expires_in_seconds must be", "59", "0", "-1", "604801"),
            *out_of_range("session_seconds", "session_seconds must be", "59", "-1", "31536001", "'nan'"),
            *(wrong("tenant must be", tenant=literal(each)) for each in BAD_TENANTS.values()),
            wrong("a portal link needs a tenant", tenant="''"),
            missing("tenant globex does not exist", tenant="'globex'"),
            *(
                wrong("capabilities of a portal link must be", capabilities=each)
                for each in (
                    "'{}'",
                    "'{manage}'",
                    "'{view,admin}'",
                    "'{view,null}'",
                    "'{view,view,view,view,view}'",
                )
            ),
            wrong("capabilities of a portal link must be", kind="'login'"),
        ],
    ),
    "redeem_console_link": Function(
        {"code_sha256": "sha256('code')", "kind": "'portal'"},
        bad=[
            wrong("code_sha256 must be 32 bytes", code_sha256="''"),
            wrong("kind must be login or portal", kind="''"),
        ],
    ),
    "first_saga_since": Function({"moment": "now()"}, frozenset({"moment"})),
    "create_subscription": Function(
        {
            "event_type": "'order.created'",
            "callback_url": f"'{ADDRESS}'",
            "max_attempts": "5",
            "base_delay_seconds": "30",
            "headers": """'{"x": "y"}'""",
            "description": "'a description'",
            "secret": f"'{GOOD_SECRET}'",
            "tenant": "'acme'",
            "event_types": "array['order.created', 'order.*', '*']",
            "filter": """'{"region": "eu"}'""",
            "paused": "false",
            "format": "'raw'",
            "max_per_second": "0.5",
        },
        frozenset(
            {
                "event_type",
                "max_attempts",
                "base_delay_seconds",
                "description",
                "secret",
                "event_types",
                "filter",
                "max_per_second",
            }
        ),
        [
            *(
                wrong("event_types must be", event_type="null", event_types=f"array[{literal(each)}]")
                for each in BAD_PATTERNS.values()
            ),
            wrong("event_types must be", event_type="null", event_types="'{}'"),
            wrong("event_types must be", event_type="null", event_types="null"),
            wrong("event_types must be", event_type="'a'", event_types="array_fill('a'::text, array[101])"),
            wrong("event_type must be the first", event_type="'order.*'"),
            *(wrong("tenant must be", tenant=literal(each)) for each in BAD_TENANTS.values()),
            *(wrong("filter must be an object", filter=literal(each)) for each in BAD_LABELS.values()),
            wrong("format must be", format="'xml'"),
            *out_of_range(
                "max_per_second", "max_per_second must be above 0", *("0", "-1", "1000001", "'NaN'")
            ),
            *subscription_bad(),
            *(wrong("secret must be whsec_", secret=literal(each)) for each in BAD_SECRETS.values()),
        ],
    ),
    "update_subscription": Function(
        {
            "subscription_id": f"{SUBSCRIPTION}",
            "changes": """'{"active": false, "paused": true, "callback_url": "https://elsewhere.example/",
                            "event_types": ["a", "b.*"], "filter": {"a": "b"}, "format": "standard",
                            "max_per_second": 5, "max_attempts": 5, "base_delay_seconds": 30,
                            "headers": {"x": "y"}, "description": "a description"}'""",
            "only_tenant": "null",
        },
        frozenset({"only_tenant"}),
        [
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}"),
            missing(f"subscription {SUBSCRIPTION} does not exist", only_tenant="'acme'"),
            wrong("changes must be an object", changes="'[]'"),
            *(wrong("that can contain active", changes=changed(**{name: True})) for name in UNCHANGEABLE),
            *(wrong(message, changes=changed(**changes)) for message, changes in BAD_CHANGES),
        ],
    ),
    "begin_verification": Function(
        {"subscription_id": f"{SUBSCRIPTION}", "only_tenant": "null"},
        frozenset({"only_tenant"}),
        bad=[missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}")],
    ),
    "complete_verification": Function(
        {
            "subscription_id": f"{SUBSCRIPTION}",
            "challenge": "(select challenge from webhookd.begin_verification(1))",
            "only_tenant": "null",
            "method": "'ping'",
        },
        frozenset({"only_tenant"}),
        bad=[
            wrong("method must be challenge or ping", method="'trust'"),
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}", challenge="'x'"),
            Bad("WH413", "subscription 1 is no longer valid", {"challenge": "'x'"}),
            Bad("WH413", "subscription 1 is no longer valid", {"challenge": "''"}),
            Bad("WH413", "subscription 1 is no longer valid", {"challenge": "repeat('x', 9999)"}),
        ],
    ),
    "rotate_secret": Function(
        {
            "subscription_id": f"{SUBSCRIPTION}",
            "overlap_seconds": "60",
            "secret": f"'{GOOD_SECRET}'",
            "only_tenant": "null",
        },
        frozenset({"secret", "only_tenant"}),
        [
            missing(f"subscription {UNKNOWN} does not exist", subscription_id=f"{UNKNOWN}"),
            *out_of_range(
                "overlap_seconds",
                "overlap_seconds must be 0 to 31536000",
                *("-1", "31536001", "'NaN'", "'Infinity'"),
            ),
            *(wrong("secret must be whsec_", secret=literal(each)) for each in BAD_SECRETS.values()),
        ],
    ),
}


def call(name: str, arguments: Arguments) -> str:
    """Return the statement that calls a function, with named arguments."""
    given = ", ".join(f"{argument} => {value}" for argument, value in arguments.items())
    return f"select * from webhookd.{name}({given})"


async def contents(superuser: Connection) -> dict[str, list[str]]:
    """Return every row of every table of webhookd, as text."""
    tables = await superuser.fetch("select tablename from pg_tables where schemaname = 'webhookd'")
    assert tables
    return {
        table: [row[0] for row in await superuser.fetch(f"select t::text from webhookd.{table} t order by 1")]
        for (table,) in tables
    }


async def refusal(connection: Connection, statement: str) -> asyncpg.PostgresError | None:
    """Return a statement's error, or None."""
    try:
        await connection.execute(statement)
    except asyncpg.PostgresError as error:
        return error
    return None


async def serve_and_undo(connection: Connection, statement: str) -> None:
    """Run a statement that must not fail, and roll it back."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(statement)
    finally:
        await transaction.rollback()


@pytest.fixture
async def world(flow: Flow) -> Flow:
    """Give a database in which each function has something to do.

    Two subscriptions with a dead letter each, the second one held; an open challenge; sagas Pending,
    InProgress and PendingRetry; jobs Pending, expired, and reported but not applied; an event with a key that
    waits for routing.
    """
    assert await flow.subscribe("first.type", max_attempts=1) == SUBSCRIPTION
    assert await flow.subscribe("second.type", max_attempts=1) == HELD
    for event_type in ("first.type", "second.type"):
        await flow.publish(event_type)
        await flow.route()
        [dead_lettered] = await flow.attempt(500)
        assert dead_lettered.dead_letter_id == dead_lettered.subscription_id
    change = "select webhookd.update_subscription($1, $2)"
    await flow.daemon.execute(change, HELD, '{"active": false}')
    await flow.daemon.execute(change, SUBSCRIPTION, '{"max_attempts": null}')
    await flow.daemon.execute("select webhookd.begin_verification($1)", SUBSCRIPTION)
    await flow.daemon.execute("select webhookd.put_tenant('initech', '{}')")

    await next_job(flow)
    [lease] = await flow.claim()
    await flow.report(lease, 500)
    await flow.apply(POLICY._replace(base_delay_seconds=1000))
    await next_job(flow)
    [lease] = await flow.claim()
    await flow.expire_lease(lease.job_id)
    await next_job(flow)
    [lease] = await flow.claim()
    await flow.report(lease)
    await next_job(flow)
    await flow.publish("first.type")
    await flow.route()
    await flow.publish("first.type", '"used"', "used")
    return flow


async def next_job(flow: Flow) -> None:
    """Create another pending attempt."""
    await flow.publish("first.type")
    await flow.route()
    [started] = await flow.start([SUBSCRIPTION])
    assert started.started == 1


async def test_every_function_of_the_daemon_is_covered(flow: Flow) -> None:
    """The list above has each function that webhookd_app can execute, with all its arguments.

    test_job_queue_bad_input.py covers those of the job queue.
    """
    rows = await flow.superuser.fetch(
        "select proname, proargnames[1:pronargs] from pg_proc where pronamespace = 'webhookd'::regnamespace"
        " and has_function_privilege('webhookd_app', oid, 'execute') and not starts_with(proname, 'fn_job_')"
    )
    assert {name: list(arguments or ()) for name, arguments in rows} == {
        name: list(function.good) for name, function in FUNCTIONS.items()
    }


async def test_good_calls_succeed(world: Flow, subtests: pytest.Subtests) -> None:
    """The calls that the bad ones are derived from are good, also with null where it is allowed."""
    for name, function in FUNCTIONS.items():
        for nothing in ({}, *({argument: "null"} for argument in function.nullable)):
            with subtests.test(f"{name} {nothing}"):
                await serve_and_undo(world.daemon, call(name, {**function.good, **nothing}))


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_bad_calls_are_rejected_and_change_nothing(
    world: Flow, name: str, subtests: pytest.Subtests
) -> None:
    """Each bad or missing argument has its SQLSTATE and message, and no table changes."""
    function = FUNCTIONS[name]
    nulls = [
        wrong("", **{argument: "null"}) for argument in function.good if argument not in function.nullable
    ]
    before = await contents(world.superuser)
    for bad in (*function.bad, *nulls):
        statement = call(name, {**function.good, **bad.arguments})
        with subtests.test(str(bad.arguments)[:200]):
            error = await refusal(world.daemon, statement)
            assert error is not None, f"not refused: {statement[:500]}"
            assert error.sqlstate == bad.sqlstate, error.message
            assert bad.message in str(error.message)
    assert await contents(world.superuser) == before


async def test_largest_size_means_all(world: Flow, subtests: pytest.Subtests) -> None:
    """A size may be as large as its type, and then means "all"."""
    for name, size in (
        ("route_events", "batch_size"),
        ("due_subscriptions", "max_subscriptions"),
        ("start_due_sagas", "subscription_window"),
        ("dead_letter_exhausted", "batch_size"),
        ("apply_results", "batch_size"),
        ("claim_jobs", "wanted"),
        ("claim_jobs", "subscription_slots"),
        ("reset_expired_leases", "batch_size"),
        ("backlog", "counted_up_to"),
        ("requeue_dead_letters", "batch_size"),
    ):
        with subtests.test(f"{name} {size}"):
            await serve_and_undo(world.daemon, call(name, {**FUNCTIONS[name].good, size: "2147483647"}))


async def test_longest_values_are_accepted(flow: Flow) -> None:
    """Functions and tables accept the longest values that the messages promise."""
    address = "https://receiver.example/".ljust(500, "x")
    for secret in (secret_of(24), secret_of(64)):
        await flow.daemon.execute(
            "select webhookd.create_subscription($1, $2, 1000, 31536000, '{}', $3, $4)",
            "t" * 100,
            address,
            "d" * 500,
            secret,
        )
        await flow.daemon.execute("select webhookd.rotate_secret(1, 31536000, $1)", secret)
    await flow.daemon.execute(
        "select webhookd.publish($1, '{}', $2, $3)", "t" * 100, "\U0001f600" * 255, "~" * 255
    )
    await flow.verify(SUBSCRIPTION)
    await flow.route()
    await flow.start()
    [lease] = await flow.claim(worker_id="w" * 200, lease_seconds=86400)
    assert lease.callback_url == address


async def test_table_requires_https_too(flow: Flow, subtests: pytest.Subtests) -> None:
    """An address that the function rejects is also rejected by the table's CHECK."""
    for name, address in BAD_ADDRESSES.items():
        with subtests.test(name):
            error = await refusal(
                flow.superuser,
                "insert into webhookd.subscriptions (event_type, callback_url)"
                f" values ('a', {literal(address)})",
            )
            assert error is not None, "not refused"
            too_long = len(address) > 500
            assert error.sqlstate == ("22001" if too_long else "23514"), error.message
    assert await flow.superuser.fetchval("select count(*) from webhookd.subscriptions") == 0


# A wrong job or token is no error, because the rest of the batch continues


async def test_report_with_wrong_job_or_token_gets_a_verdict(world: Flow) -> None:
    """A wrong token is stale, an unknown job is unknown; neither changes anything."""
    [lease] = await world.claim()
    before = await contents(world.superuser)
    assert await world.report(lease._replace(lease_token=uuid4())) is ReportVerdict.STALE
    assert await world.report(lease._replace(job_id=UNKNOWN)) is ReportVerdict.UNKNOWN
    assert await contents(world.superuser) == before


async def test_bad_report_does_not_stop_a_good_one(world: Flow) -> None:
    """In a batch, each job gets its own verdict."""
    [lease] = await world.claim()
    finished_id = await world.daemon.fetchval(
        "select min(id) from webhookd.webhook_delivery_jobs where status = 'Failed'"
    )
    verdicts = await attempts.report(
        world.daemon,
        [
            attempts.Report(UNKNOWN, lease.lease_token, 200),
            attempts.Report(lease.job_id, lease.lease_token, 200),
            attempts.Report(finished_id, lease.lease_token, 200),
        ],
    )
    assert verdicts == {
        UNKNOWN: ReportVerdict.UNKNOWN,
        lease.job_id: ReportVerdict.ACCEPTED,
        finished_id: ReportVerdict.STALE,
    }
    assert await world.job_status(lease.job_id) is AttemptStatus.COMPLETED
    assert await world.job_status(finished_id) is AttemptStatus.FAILED


async def test_only_held_jobs_are_loaded_and_released(world: Flow) -> None:
    """Jobs with a wrong token are left out and unchanged."""
    [lease] = await world.claim()
    wrong_ones = [lease._replace(lease_token=uuid4()), lease._replace(job_id=UNKNOWN)]
    before = await contents(world.superuser)
    assert await attempts.load(world.daemon, wrong_ones) == []
    assert await attempts.release(world.daemon, wrong_ones) == []
    assert await attempts.load(world.daemon, []) == []
    assert await attempts.release(world.daemon, []) == []
    assert await contents(world.superuser) == before
    [loaded] = await attempts.load(world.daemon, [*wrong_ones, lease])
    assert loaded.job_id == lease.job_id
    assert await attempts.release(world.daemon, [*wrong_ones, lease]) == [lease.job_id]
    assert await world.job_status(lease.job_id) is AttemptStatus.PENDING
    assert await attempts.load(world.daemon, [lease]) == []
    assert await attempts.release(world.daemon, [lease]) == []


async def test_any_result_can_be_reported(world: Flow) -> None:
    """No result is unstorable: long texts are cut, impossible values corrected, and all are applied."""
    odd = [
        attempts.Report(0, uuid4(), 500, "E" * 1000, -5, 1e300, b"\x00\xff" * 5000),
        attempts.Report(0, uuid4(), None, None, 1, None, None),
        attempts.Report(0, uuid4(), 200, "TIMEOUT", 1, -1.0, b""),
        attempts.Report(0, uuid4(), -7, "", 2_147_483_647, float("nan"), None),
        attempts.Report(0, uuid4(), 2_147_483_647, None, 1, float("-inf"), None),
        attempts.Report(0, uuid4(), 302, None, 1, float("inf"), None),
    ]
    for _ in odd:
        await world.publish("first.type")
    await world.route()
    await world.start([SUBSCRIPTION])
    leases = (await world.claim())[-len(odd) :]
    await world.apply()
    reports = [
        report._replace(job_id=lease.job_id, lease_token=lease.lease_token)
        for report, lease in zip(odd, leases, strict=True)
    ]
    verdicts = await attempts.report(world.daemon, reports)
    assert set(verdicts.values()) == {ReportVerdict.ACCEPTED}
    rows = await world.superuser.fetch(
        "select status, error_code, duration_ms, length(response_excerpt)"
        " from webhookd.webhook_delivery_jobs where id = any($1) order by id",
        [report.job_id for report in reports],
    )
    assert [tuple(row) for row in rows] == [
        ("Failed", "E" * 100, None, 4096),
        ("Failed", "INTERNAL", 1, None),
        ("Failed", "TIMEOUT", 1, 0),
        ("Failed", "HTTP_-7", 2_147_483_647, None),
        ("Failed", "HTTP_2147483647", 1, None),
        ("Failed", "HTTP_302", 1, None),
    ]
    moved = await world.apply()
    assert [(each.status, each.problem) for each in moved] == [(SagaStatus.PENDING_RETRY, None)] * len(odd)
    latest = max(each.next_attempt_at for each in moved)
    assert await world.superuser.fetchval(
        "select $1::timestamptz <= now() + make_interval(secs => $2)", latest, POLICY.max_delay_seconds
    )


async def test_unknown_subscription_or_job_returns_nothing(world: Flow) -> None:
    """Filters and shares with unknown ids return nothing and change nothing."""
    before = await contents(world.superuser)
    assert await sagas.apply_results(world.daemon, 10, POLICY, 10, [UNKNOWN]) == []
    [share] = await world.start([UNKNOWN])
    assert (share.started, share.active, share.drained) == (0, 0, True)
    which = dead_letters.Filter(subscription_id=UNKNOWN)
    bulk = await dead_letters.requeue_many(world.daemon, which, 0, 10, dry_run=False)
    assert (bulk.matched, bulk.requeued, bulk.skipped) == (0, 0, 0)
    assert await contents(world.superuser) == before


async def test_zero_quota_starts_nothing(world: Flow) -> None:
    """A share of zero is not an error and starts no attempt."""
    before = await contents(world.superuser)
    [share] = await world.start([SUBSCRIPTION], quota=0)
    assert share.started == 0
    assert await contents(world.superuser) == before
    [share] = await world.start([SUBSCRIPTION], quota=1)
    assert share.started == 1


async def test_repeated_busy_subscription_doubles_no_lease(world: Flow) -> None:
    """A subscription that is listed twice as busy is rejected, or its jobs are leased once each."""
    claimed: list[int] = []
    with contextlib.suppress(asyncpg.PostgresError):
        rows = await world.daemon.fetch(
            "select job_id from webhookd.claim_jobs('worker', 10, 60, 10, array[$1, $1]::bigint[], '{1,2}')",
            SUBSCRIPTION,
        )
        claimed = [row["job_id"] for row in rows]
    assert len(claimed) == len(set(claimed))
