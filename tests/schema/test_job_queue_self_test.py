"""DP2's self-test (§12), point by point, against the database and the files that make it."""

import re
from typing import TYPE_CHECKING

from tests.support.job_queue import ACTOR, KIND, JobQueue, Status
from webhookd.db.migrations import shipped

if TYPE_CHECKING:
    import pytest
    from asyncpg import Record

    from tests.support.database import Connection, Database, Login

FORBIDDEN_KEYS = [
    "body",
    "content",
    "raw",
    "vector",
    "embedding",
    "secret",
    "token",
    "password",
    "ssn",
    "personal_data",
]
EXECUTORS = ["DOT", "Agent", "Hermes", "Codex", "PG_worker", "external_worker", "future_Kestra_adapter"]
# DP2 §3.2 and §5; its event_outbox is our events table, whose ids are bigint.
COLUMNS = """
job_id uuid not null default gen_random_uuid()
job_kind text not null
event_domain text not null
idempotency_key text not null
source_ref text
target_ref text
payload_ref text
safe_payload jsonb not null default '{}'::jsonb
payload_classification text not null default 'safe_metadata'::text
executor text not null
status text not null default 'queued'::text
attempts integer not null default 0
last_error text
last_error_at timestamp with time zone
lease_name text
lease_holder text
lease_token uuid
leased_until timestamp with time zone
process_after timestamp with time zone not null default now()
deadline_at timestamp with time zone
priority smallint not null default 0
correlation_id text
causation_event_id bigint
parent_job_id uuid
workflow_id uuid
enqueued_by text not null
enqueued_at timestamp with time zone not null default now()
started_at timestamp with time zone
finished_at timestamp with time zone
source_system text not null
"""
WORKFLOW_COLUMNS = """
workflow_id uuid not null default gen_random_uuid()
workflow_kind text not null
generator text not null
status text not null default 'active'::text
correlation_id text
enqueued_by text not null
enqueued_at timestamp with time zone not null default now()
finished_at timestamp with time zone
"""
INDEXES = {
    "ux_job_queue_kind_idempotency_key": "UNIQUE (job_kind, idempotency_key)",
    "ix_job_queue_claimable": "(job_kind, process_after, priority DESC, enqueued_at)"
    " WHERE (status = 'queued'::text)",
    "ix_job_queue_lease_active": "(lease_name, leased_until)"
    " WHERE (status = ANY (ARRAY['leased'::text, 'in_progress'::text]))",
    "ix_job_queue_dead_letter": "(job_kind, last_error_at DESC) WHERE (status = 'dead_letter'::text)",
    "ix_job_queue_workflow_id": "(workflow_id)",
    "ix_job_queue_correlation_id": "(correlation_id)",
}
# All references of its tables: to each other and to our events. No table with vectors.
REFERENCES = {
    ("job_queue", "FOREIGN KEY (causation_event_id) REFERENCES webhookd.events(id)"),
    ("job_queue", "FOREIGN KEY (parent_job_id) REFERENCES webhookd.job_queue(job_id)"),
    ("job_queue", "FOREIGN KEY (workflow_id) REFERENCES webhookd.job_workflow(workflow_id)"),
    ("job_command_run", "FOREIGN KEY (job_id) REFERENCES webhookd.job_queue(job_id)"),
}
# Its CHECKs, except those of states, executors and payloads, which have their own points below.
CHECKS = {
    "job_queue_payload_classification_check": "CHECK ((payload_classification ="
    " ANY (ARRAY['safe_metadata'::text, 'restricted'::text])))",
    "job_queue_attempts_check": "CHECK ((attempts >= 0))",
    "job_queue_enqueued_by_check": "CHECK ((btrim(enqueued_by) <> ''::text))",
    "job_queue_source_system_check": "CHECK ((btrim(source_system) <> ''::text))",
    "job_workflow_status_check": "CHECK ((status = ANY (ARRAY['active'::text, 'succeeded'::text,"
    " 'failed'::text, 'partially_failed'::text, 'cancelled'::text])))",
}
ITS_TABLES = """
    t.relkind = 'r' and t.relnamespace = 'webhookd'::regnamespace
    and (starts_with(t.relname, 'job_') or t.relname = 'settings')"""
LOGINS: tuple["Login", ...] = ("daemon", "application", "executor", "other_executor", "reader")
LEASE_COLUMNS = {"lease_name", "lease_holder", "lease_token", "leased_until"}


def listed(text: str) -> list[str]:
    """The quoted values of a CHECK."""
    return re.findall(r"'([^']+)'::text", text)


async def columns(queue: JobQueue, table: str) -> list[str]:
    """The columns of a table in order: name, type, not null, default."""
    rows = await queue.superuser.fetch(
        """
        select concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod),
                         case when a.attnotnull then 'not null' end,
                         'default ' || pg_get_expr(d.adbin, d.adrelid)) as words
        from pg_attribute a left join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
        where a.attrelid = $1::text::regclass and a.attnum > 0 and not a.attisdropped order by a.attnum
        """,
        f"webhookd.{table}",
    )
    return [row["words"] for row in rows]


async def constraints_of(superuser: "Connection") -> "list[Record]":
    """The constraints of all tables of the job queue."""
    return await superuser.fetch(
        f"""
        select t.relname, c.conname, c.contype::text, pg_get_constraintdef(c.oid) as definition
        from pg_constraint c join pg_class t on t.oid = c.conrelid where {ITS_TABLES}
        """
    )


async def writable(login: "Connection") -> list[tuple[str, str]]:
    """The tables that a login may write without the functions, even a single column."""
    rows = await login.fetch(
        f"""
        select t.relname, p.privilege
        from pg_class t cross join unnest('{{insert,update,delete,truncate}}'::text[]) p (privilege)
        where {ITS_TABLES} and case when p.privilege in ('insert', 'update')
            then has_any_column_privilege(t.oid, p.privilege) else has_table_privilege(t.oid, p.privilege) end
        """
    )
    return [tuple(row) for row in rows]


async def test_dp2_self_test(database: "Database", subtests: "pytest.Subtests") -> None:
    """Every point that a database can show; the others are about the document itself."""
    queue = await JobQueue.open(database, enabled=False)
    superuser = queue.superuser
    constraints = await constraints_of(superuser)
    checks = {row["conname"]: row["definition"] for row in constraints if row["contype"] == "c"}

    with subtests.test("the tables have the design's columns, in its order, before any of ours"):
        given = COLUMNS.strip().splitlines()
        assert (await columns(queue, "job_queue"))[: len(given)] == given
        given = WORKFLOW_COLUMNS.strip().splitlines()
        assert (await columns(queue, "job_workflow"))[: len(given)] == given
        assert {name: checks[name] for name in CHECKS} == CHECKS

    with subtests.test("its indexes are there by name, columns and predicate"):
        made = {
            row["indexname"]: row["indexdef"]
            for row in await superuser.fetch("select * from pg_indexes where tablename = 'job_queue'")
        }
        for name, definition in INDEXES.items():
            unique, shape = ("UNIQUE ", definition[7:]) if "UNIQUE" in definition else ("", definition)
            assert made[name] == (f"CREATE {unique}INDEX {name} ON webhookd.job_queue USING btree {shape}"), (
                name
            )

    with subtests.test("defines_status_lifecycle_compatible_with_§6_7"):
        assert listed(checks["job_queue_status_check"]) == [status.value for status in Status]

    with subtests.test("defines_dot_config_disable_flag; rollback_concept"):
        assert await queue.try_enqueue() == {"refused": True, "reason": "job_substrate_disabled"}
        assert (await queue.sweep())["cleaned"] == 0
        await queue.call("fn_job_enable", p_enabled=True, p_actor=ACTOR)

    with subtests.test("defines_idempotency_key"):
        assert await queue.enqueue("once") == (await queue.try_enqueue("once"))["job_id"]

    with subtests.test("defines_lease"):
        lease = await queue.claim()
        assert set(lease) >= LEASE_COLUMNS
        assert {column for column in LEASE_COLUMNS if lease[column] is None} == set()

    with subtests.test("defines_retry_dlq"):
        assert (await queue.fail(lease))["status"] == "retry_waiting"
        await queue.configure(KIND, max_attempts=2)
        await queue.make_retries_due()
        await queue.reap()
        assert (await queue.fail(await queue.claim()))["status"] == "dead_letter"

    with subtests.test("defines_observability_view"):
        for view in ("v_job_queue_backlog", "v_job_queue_in_progress", "v_job_queue_dead_letter_open"):
            await queue.daemon.fetch(f"select * from webhookd.{view}")
        health = await queue.call("fn_job_queue_health")
        assert set(health) >= {
            "backlog",
            "in_progress",
            "dead_letter_open",
            "oldest_queued_age_s",
            "lease_active",
        }

    with subtests.test("defines_executor_set_compatible_with_§11_5"):
        assert listed(checks["job_queue_executor_check"]) == EXECUTORS

    migration = next(each for each in shipped().migrations if each.name == "0001_baseline")
    with subtests.test("no_vector_in_transient; signal_not_data"):
        verbatim = (
            "CHECK (NOT safe_payload ?| ARRAY['body','content','raw','vector','embedding','secret','token',"
            "'password','ssn','personal_data'])"
        )
        assert verbatim in migration.text
        assert listed(checks["job_queue_safe_payload_check"]) == FORBIDDEN_KEYS
        references = {(row["relname"], row["definition"]) for row in constraints if row["contype"] == "f"}
        assert references == REFERENCES

    with subtests.test("pg_sot: each state is PostgreSQL's, and only functions may change it"):
        for login in LOGINS:
            assert await writable(await database.connect(login)) == [], login

    # no_pg_18_dependency: all tests also run on PostgreSQL 15.
    with subtests.test("no_pg_cron_dependency_phase_1: no extension is there, and all of the above worked"):
        assert await superuser.fetch("select from pg_extension where extname <> 'plpgsql'") == []
