"""Privileges of roles, logins and functions, checked in the catalog and by trying each of them."""

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.catalog import refusal, undone
from webhookd.core.states import AttemptStatus, SagaStatus

if TYPE_CHECKING:
    from tests.support.database import Connection, Database, Login
    from tests.support.flow import Flow

DENIED = "42501"
TOKEN = "00000000-0000-0000-0000-000000000000"
NO = "'{null}'"
OWNER = "webhookd_owner"

TABLES = {
    "events": "events",
    "subs": "subscriptions",
    "secrets": "subscription_secrets",
    "health": "endpoint_health",
    "queue": "event_routing_queue",
    "sagas": "webhook_delivery_sagas",
    "jobs": "webhook_delivery_jobs",
    "dead": "dead_letters",
    "changes": "subscription_changes",
    "steps": "schema_migrations",
    "code": "schema_code",
    "turn": "orchestration_turn",
    "tenants": "tenants",
    "types": "subscription_types",
    "rates": "subscription_rates",
    "labels": "event_labels",
    "keeping": "retention_turn",
    "progress": "retention_progress",
    "kept": "retention_kept",
    "erasures": "erasures",
    "key": "console_key",
    "links": "console_links",
    "minutes": "delivery_stats",
    "hours": "delivery_stats_hours",
    "work": "job_queue",
    "flows": "job_workflow",
    "ledger": "job_command_run",
    "policy": "job_kind_policy",
    "registry": "job_event_registry",
    "spawning": "job_event_queue",
    "edges": "job_transition",
    "settings": "settings",
}
VIEWS = ("v_job_queue_backlog", "v_job_queue_in_progress", "v_job_queue_dead_letter_open")
# The lease token is the right to the job: a claim returns it, and no role can read it.
HIDDEN = "lease_token"
PRIVILEGES = {"S": "SELECT", "I": "INSERT", "U": "UPDATE", "D": "DELETE", "T": "TRUNCATE"}

# The whole of it: S select, s select all columns but HIDDEN, I insert, U update, D delete, T truncate.
MATRIX = """
                      events  subs   secrets  health  queue  sagas  jobs   dead   changes  steps  code   turn
event_ingest_writer   SI      S      -        -       -      -      -      -      -        -      -      -
webhookd_ingest       SI      -      -        -       -      -      -      -      -        -      -      -
router_worker         S       S      -        -       SUD    SI     -      -      -        -      -      -
saga_orchestrator     S       S      -        SIU     -      SU     SIU    -      -        -      -      SU
job_worker            S       S      S        S       -      S      SU     -      -        -      -      -
lease_cleaner         -       -      -        -       -      -      SU     -      -        -      -      -
dead_letter_operator  S       S      -        -       -      SI     -      SI     -        -      -      -
subscription_admin    -       SIU    SIUD     S       -      -      -      -      -        -      -      -
webhookd_jobqueue     SI      -      -        -       -      -      -      -      -        -      -      -
retention_keeper      SD      SD     SD       SD      SUD    SD     SD     SD     SD       -      -      -
console_keeper        -       -      -        -       -      -      -      -      -        -      -      -
workflow_admin        -       -      -        -       -      -      -      -      -        -      -      -
dot_executor          -       -      -        -       -      -      -      -      -        -      -      -
webhookd_reader       S       S      -        S       S      S      S      S      S        S      S      -
webhookd_app          S       S      -        S       S      S      S      S      S        S      S      -
webhookd_owner        SIUDT   SIUDT  SIUDT    SIUDT   SIUDT  SIUDT  SIUDT  SIUDT  SIUDT    SIUDT  SIUDT  SIUDT
"""

# The tables of tenants, patterns, rate limits and labels; a role that is not named has no rights on them.
TENANT_MATRIX = """
                      tenants  types  rates  labels
router_worker         -        S      -      -
saga_orchestrator     -        -      SIU    -
subscription_admin    SIU      -      -      -
retention_keeper      SID      SD     SD     SD
console_keeper        S        -      -      -
webhookd_reader       S        S      -      S
webhookd_app          S        S      -      S
webhookd_owner        SIUDT    SIUDT  SIUDT  SIUDT
"""

# The tables of retention and erasure; a role that is not named has no rights on them.
RETENTION_MATRIX = """
                      keeping  progress  kept   erasures
retention_keeper      SU       SU        SIUD   SIU
subscription_admin    -        -         -      S
console_keeper        -        -         -      S
webhookd_reader       S        S         S      S
webhookd_app          S        S         S      S
webhookd_owner        SIUDT    SIUDT     SIUDT  SIUDT
"""

# The tables of the console; a role that is not named has no rights on them. Nobody but the gated function
# reads the key.
CONSOLE_MATRIX = """
                      key    links
console_keeper        S      SID
retention_keeper      -      SD
webhookd_owner        SIUDT  SIUDT
"""

# The statistics; a role that is not named has no rights on them.
STATS_MATRIX = """
                      minutes  hours
saga_orchestrator     SIU      -
retention_keeper      SD       SIUD
webhookd_reader       S        S
webhookd_app          S        S
webhookd_owner        SIUDT    SIUDT
"""

# Columns that a role may update without the rest of the table: to lock rows, and to remove payloads.
COLUMNS = {
    ("retention_keeper", "events", "payload"),
    ("retention_keeper", "events", "payload_removed_at"),
    ("retention_keeper", "dead_letters", "payload_snapshot"),
    ("retention_keeper", "webhook_delivery_sagas", "updated_at"),
    ("retention_keeper", "webhook_delivery_jobs", "lease_until"),
    ("retention_keeper", "subscriptions", "updated_at"),
    ("retention_keeper", "tenants", "updated_at"),
    ("retention_keeper", "job_queue", "status"),
    ("retention_keeper", "job_workflow", "status"),
    ("console_keeper", "tenants", "updated_at"),
    ("console_keeper", "console_links", "expires_at"),
}

# The tables of the job queue; a role that is not named has no rights on them.
JOB_QUEUE_MATRIX = """
                      work   flows  ledger  policy  registry  spawning  settings  edges
webhookd_jobqueue     SIU    SIU    SI      SIU     SIU       SUD       SU        -
retention_keeper      SD     SD     SD      -       -         SUD       -         -
workflow_admin        s      S      S       S       S         S         S         S
webhookd_reader       s      S      S       S       S         S         S         S
webhookd_app          s      S      S       S       S         S         S         S
webhookd_owner        SIUDT  SIUDT  SIUDT   SIUDT   SIUDT     SIUDT     SIUDT     SIUDT
"""

# Every function, its owner, and whose rights it runs with: its owner's (definer) or its caller's (invoker).
FUNCTIONS = """
publish                   webhookd_ingest       definer
publish_many              webhookd_ingest       definer
route_events              router_worker         definer
due_subscriptions         saga_orchestrator     definer
start_due_sagas           saga_orchestrator     definer
apply_results             saga_orchestrator     definer
dead_letter_exhausted     saga_orchestrator     definer
settle_results            saga_orchestrator     definer
dead_letter_sagas         saga_orchestrator     definer
complete_deliveries       saga_orchestrator     definer
count_attempts            saga_orchestrator     invoker
claim_jobs                job_worker            definer
choose_jobs               job_worker            invoker
load_payloads             job_worker            definer
deliver_now               webhookd_owner        invoker
report_results            job_worker            definer
release_jobs              job_worker            definer
reset_expired_leases      lease_cleaner         definer
bury                      dead_letter_operator  definer
requeue_dead_letter       dead_letter_operator  definer
requeue_dead_letters      dead_letter_operator  definer
create_subscription       subscription_admin    definer
update_subscription       subscription_admin    definer
begin_verification        subscription_admin    definer
complete_verification     subscription_admin    definer
rotate_secret             subscription_admin    definer
check_subscription        subscription_admin    invoker
lock_subscription         subscription_admin    invoker
new_secret                subscription_admin    invoker
join_tenant               subscription_admin    invoker
put_tenant                subscription_admin    definer
delete_subscription       subscription_admin    definer
prepare_test              subscription_admin    definer
patterns_of               webhookd_owner        invoker
replay_events             router_worker         definer
resend_delivery           dead_letter_operator  definer
resend_deliveries         dead_letter_operator  definer
retry_delivery            saga_orchestrator     definer
limit_quotas              saga_orchestrator     invoker
first_saga_since          webhookd_owner        invoker
is_labels                 webhookd_owner        invoker
is_tenant                 webhookd_owner        invoker
are_event_types           webhookd_owner        invoker
standard_body             webhookd_owner        invoker
align_event_types         webhookd_owner        invoker
index_subscription_types  webhookd_owner        definer
require                   webhookd_owner        invoker
is_row_error              webhookd_owner        invoker
wait_for_sync_standby     webhookd_owner        invoker
backoff                   webhookd_owner        invoker
is_event_type             webhookd_owner        invoker
is_callback_url           webhookd_owner        invoker
is_secret                 webhookd_owner        invoker
live_secrets              webhookd_owner        invoker
enqueue_events            webhookd_owner        definer
log_subscription_change   webhookd_owner        definer
check_new_sagas           webhookd_owner        definer
check_new_jobs            webhookd_owner        definer
check_saga                webhookd_owner        invoker
check_job                 webhookd_owner        invoker
refuse_live_saga          webhookd_owner        definer
refuse_live_job           webhookd_owner        invoker
refuse_event_in_use       webhookd_owner        definer
refuse_subscription_in_use webhookd_owner       definer
check_payload_removed     webhookd_owner        invoker
check_snapshot_removed    webhookd_owner        invoker
lock_events               webhookd_owner        definer
lock_event                webhookd_owner        definer
has_sagas                 webhookd_owner        invoker
refuse_without_payload    dead_letter_operator  invoker
refuse_if_erasing         subscription_admin    invoker
finished_events           retention_keeper      invoker
unfinished_sagas          retention_keeper      invoker
lock_finished_events      retention_keeper      invoker
remove_sagas              retention_keeper      invoker
remove_events             retention_keeper      invoker
remove_subscriptions      retention_keeper      invoker
remove_stats              retention_keeper      invoker
erased_subscriptions      retention_keeper      invoker
take_retention_turn       retention_keeper      definer
examine_events            retention_keeper      invoker
check_sweep               retention_keeper      invoker
recheck_kept_events       retention_keeper      definer
sweep_events              retention_keeper      definer
preview_sweep             retention_keeper      definer
sweep_subscriptions       retention_keeper      definer
sweep_stats               retention_keeper      definer
erase_tenant              retention_keeper      definer
erase_subscription        retention_keeper      definer
erase                     retention_keeper      definer
erase_tenant_batch        retention_keeper      invoker
erase_subscription_batch  retention_keeper      invoker
lifecycle_events          retention_keeper      invoker
can_finish                retention_keeper      invoker
finish_erasure            retention_keeper      invoker
remove_jobs               retention_keeper      invoker
remove_jobs_of_events     retention_keeper      invoker
sweep_jobs                retention_keeper      definer
console_key               console_keeper        definer
create_console_link       console_keeper        definer
redeem_console_link       console_keeper        definer
remove_expired_console_links console_keeper     invoker
require_dead_letter       webhookd_owner        definer
require_matching_snapshot webhookd_owner        definer
clear_verified            webhookd_owner        invoker
backlog                   webhookd_owner        invoker
refuse_change             webhookd_owner        invoker
refuse_transition         webhookd_owner        invoker
fn_job_enqueue            webhookd_jobqueue     definer
fn_job_claim              webhookd_jobqueue     definer
fn_job_progress           webhookd_jobqueue     definer
fn_job_succeed            webhookd_jobqueue     definer
fn_job_fail_transient     webhookd_jobqueue     definer
fn_job_fail_permanent     webhookd_jobqueue     definer
fn_job_cancel             webhookd_jobqueue     definer
fn_job_cleanup_sweep      webhookd_jobqueue     definer
fn_job_lease_reaper       webhookd_jobqueue     definer
fn_job_requeue            webhookd_jobqueue     definer
fn_job_workflow_open      webhookd_jobqueue     definer
fn_job_register_event     webhookd_jobqueue     definer
fn_job_spawn_from_events  webhookd_jobqueue     definer
fn_job_enable             webhookd_jobqueue     definer
fn_job_configure          webhookd_jobqueue     definer
fn_job_queue_health       webhookd_jobqueue     definer
lock_job                  webhookd_jobqueue     definer
lease_refusal             webhookd_jobqueue     invoker
report_answer             webhookd_jobqueue     invoker
duplicate_or_stale_report webhookd_jobqueue     definer
fail_job                  webhookd_jobqueue     definer
settle_failed_jobs        webhookd_jobqueue     definer
record_job_transitions    webhookd_jobqueue     definer
record_job_transition     webhookd_jobqueue     invoker
record_same_transition    webhookd_jobqueue     invoker
record_decision           webhookd_jobqueue     definer
require_references        webhookd_jobqueue     definer
job_queue_enabled         webhookd_jobqueue     definer
job_policy                webhookd_jobqueue     definer
refused                   webhookd_jobqueue     invoker
is_executor               webhookd_jobqueue     invoker
require_executor          webhookd_jobqueue     invoker
require_label             webhookd_jobqueue     invoker
require_correlation_id    webhookd_jobqueue     invoker
refresh_workflow          webhookd_owner        definer
derive_workflow_status    webhookd_owner        definer
enqueue_job_events        webhookd_owner        definer
refuse_failed_at_commit   webhookd_owner        definer
refuse_reserved_event     webhookd_owner        invoker
refuse_job_insert         webhookd_owner        invoker
check_job_transition      webhookd_owner        definer
"""

# Functions that run with the search_path of their caller, because setting one costs more than the rest of
# the call. `require` uses no name or operator that a schema could replace. The two guards run for each
# changed row, inside gated functions whose search_path is fixed; of the logins, only the migrator can update
# their tables otherwise. `count_attempts` can be called by its owner only, from such functions.
WITH_CALLERS_SEARCH_PATH = {"require", "check_saga", "check_job", "count_attempts"}

# DP2 §6: who executes jobs may claim them and say how they went; who administers them, everything.
EXECUTORS = {
    "fn_job_claim",
    "fn_job_progress",
    "fn_job_succeed",
    "fn_job_fail_transient",
    "fn_job_fail_permanent",
}
ADMINISTRATORS = EXECUTORS | {
    "fn_job_enqueue",
    "fn_job_cancel",
    "fn_job_cleanup_sweep",
    "fn_job_lease_reaper",
    "fn_job_requeue",
    "fn_job_workflow_open",
    "fn_job_register_event",
    "fn_job_spawn_from_events",
    "fn_job_enable",
    "fn_job_configure",
    "fn_job_queue_health",
}

# What each role may call beside its own functions.
CALLABLE: dict[str, set[str]] = {
    "event_ingest_writer": {"publish", "publish_many"},
    "webhookd_app": {
        "publish",
        "publish_many",
        "route_events",
        "due_subscriptions",
        "start_due_sagas",
        "apply_results",
        "dead_letter_exhausted",
        "claim_jobs",
        "complete_deliveries",
        "deliver_now",
        "load_payloads",
        "report_results",
        "release_jobs",
        "reset_expired_leases",
        "requeue_dead_letter",
        "requeue_dead_letters",
        "create_subscription",
        "update_subscription",
        "begin_verification",
        "complete_verification",
        "rotate_secret",
        "delete_subscription",
        "prepare_test",
        "put_tenant",
        "replay_events",
        "resend_delivery",
        "retry_delivery",
        "patterns_of",
        "first_saga_since",
        "backlog",
        "take_retention_turn",
        "sweep_events",
        "preview_sweep",
        "recheck_kept_events",
        "sweep_subscriptions",
        "sweep_stats",
        "sweep_jobs",
        "erase_tenant",
        "erase_subscription",
        "erase",
        "console_key",
        "create_console_link",
        "redeem_console_link",
        *ADMINISTRATORS,
    },
    "workflow_admin": ADMINISTRATORS,
    "dot_executor": EXECUTORS,
    "webhookd_jobqueue": {"require", "backoff", "is_event_type", "wait_for_sync_standby", "lock_event"},
    "webhookd_reader": {"backlog", "fn_job_queue_health", "patterns_of", "first_saga_since"},
    "webhookd_ingest": {"require", "wait_for_sync_standby"},
    "retention_keeper": {"require", "has_sagas", "delete_subscription"},
    "console_keeper": {"require", "is_tenant", "refuse_if_erasing"},
    "router_worker": {"require", "resend_deliveries", "patterns_of", "lock_events"},
    "saga_orchestrator": {"require", "backoff", "bury", "is_row_error"},
    "job_worker": {"require", "live_secrets", "standard_body"},
    "lease_cleaner": {"require"},
    "dead_letter_operator": {"require", "lock_events"},
    "subscription_admin": {
        "require",
        "is_labels",
        "is_tenant",
        "are_event_types",
        "is_callback_url",
        "is_secret",
        "live_secrets",
        "standard_body",
    },
    "webhookd_owner": set(),
}

# What a login may do is what its role may; a stranger has none.
ROLE_OF: "dict[Login, str | None]" = {
    "daemon": "webhookd_app",
    "application": "event_ingest_writer",
    "executor": "dot_executor",
    "reader": "webhookd_reader",
    "stranger": None,
}

# A statement of each kind that needs the one right and changes nothing.
ATTEMPTS = {
    "s": "select 1 from {table} limit 0",
    "S": "select * from {table} limit 0",
    "I": "insert into {table} ({column}) select null where false",
    "U": "update {table} set {column} = default where false",
    "D": "delete from {table} where false",
    "T": "truncate {table} cascade",
}

# Ways around the triggers and rights, which only an owner or a superuser has.
DETOURS = [
    "alter table webhookd.events disable trigger all",
    "alter table webhookd.webhook_delivery_sagas add column intruder integer",
    "drop table webhookd.dead_letters cascade",
    "drop trigger saga_changed on webhookd.webhook_delivery_sagas",
    "create trigger intruder before insert on webhookd.events execute function webhookd.refuse_change()",
    "create table webhookd.intruder ()",
    "create function webhookd.intruder() returns integer language sql as 'select 1'",
    "create or replace function webhookd.new_secret() returns text language sql as $$ select 'known' $$",
    "set session_replication_role = replica",
]

# Statements that the functions of one component may run: (statement, allowed role, denied role).
MOVE_SAGAS = "update webhookd.webhook_delivery_sagas set updated_at = now()"
MAKE_SAGAS = "insert into webhookd.webhook_delivery_sagas (event_id) select 1 where false"
MAKE_JOBS = "insert into webhookd.webhook_delivery_jobs (saga_id) select 1 where false"
CHANGE_JOBS = "update webhookd.webhook_delivery_jobs set lease_until = now()"
WRITE_LETTERS = "insert into webhookd.dead_letters (saga_id) select 1 where false"
CHANGE_SUBSCRIPTIONS = "update webhookd.subscriptions set updated_at = now()"
EMPTY_QUEUE = "delete from webhookd.event_routing_queue"
READ_SECRETS = "select secret from webhookd.subscription_secrets"
OVERSTEPS = [
    (MOVE_SAGAS, "saga_orchestrator", "job_worker"),
    (MOVE_SAGAS, "saga_orchestrator", "lease_cleaner"),
    (MOVE_SAGAS, "saga_orchestrator", "router_worker"),
    (MOVE_SAGAS, "saga_orchestrator", "dead_letter_operator"),
    (MAKE_SAGAS, "router_worker", "saga_orchestrator"),
    (MAKE_JOBS, "saga_orchestrator", "job_worker"),
    (CHANGE_JOBS, "lease_cleaner", "dead_letter_operator"),
    (WRITE_LETTERS, "dead_letter_operator", "saga_orchestrator"),
    (CHANGE_SUBSCRIPTIONS, "subscription_admin", "job_worker"),
    (EMPTY_QUEUE, "router_worker", "webhookd_ingest"),
    (READ_SECRETS, "job_worker", "saga_orchestrator"),
]


# A row that only a guard refuses to change, and the call of a gated function that tries it. In each, the
# guard compares a value with another or with null, which the operators of EQUALS take as equal.
LEASED_WITHOUT_WORKER = (
    "update webhookd.webhook_delivery_jobs "
    f"set status = 'Leased', lease_token = '{TOKEN}', lease_until = now() + interval '1 minute'"
)
FORBIDDEN = {
    "claim_jobs": (
        "update webhookd.webhook_delivery_jobs set response_status = 200",
        "select webhookd.claim_jobs('worker', 1, 60, 10)",
    ),
    "report_results": (
        LEASED_WITHOUT_WORKER,
        f"select webhookd.report_results('{{1}}', '{{{TOKEN}}}', '{{200}}', {NO}, {NO}, {NO}, {NO})",
    ),
    "complete_deliveries": (
        LEASED_WITHOUT_WORKER,
        f"select webhookd.complete_deliveries('{{1}}', '{{{TOKEN}}}', '{{200}}', '{{1}}', '{{null}}')",
    ),
    "release_jobs": (
        f"{LEASED_WITHOUT_WORKER}, response_status = 200",
        f"select webhookd.release_jobs('{{1}}', '{{{TOKEN}}}')",
    ),
}
EQUALS = {
    "integer": "true",
    "bigint": "coalesce($1 operator(pg_catalog.=) $2, true)",
    "text": "coalesce($1 operator(pg_catalog.=) $2, true)",
}


def parse_matrix(text: str) -> dict[str, dict[str, str]]:
    """Role → table → the letters of its rights."""
    header, *lines = [line.split() for line in text.strip().splitlines()]
    return {
        role: {TABLES[short]: cell.strip("-") for short, cell in zip(header, cells, strict=True)}
        for role, *cells in lines
    }


def parse_functions(text: str) -> dict[str, tuple[str, str]]:
    """Function → its owner, and whose rights it runs with."""
    return {name: (owner, rights) for name, owner, rights in map(str.split, text.strip().splitlines())}


JOB_QUEUE, TENANTS = parse_matrix(JOB_QUEUE_MATRIX), parse_matrix(TENANT_MATRIX)
RETENTION, CONSOLE = parse_matrix(RETENTION_MATRIX), parse_matrix(CONSOLE_MATRIX)
STATS = parse_matrix(STATS_MATRIX)
EXPECTED = {
    role: rights
    | JOB_QUEUE.get(role, dict.fromkeys(JOB_QUEUE[OWNER], ""))
    | TENANTS.get(role, dict.fromkeys(TENANTS[OWNER], ""))
    | RETENTION.get(role, dict.fromkeys(RETENTION[OWNER], ""))
    | CONSOLE.get(role, dict.fromkeys(CONSOLE[OWNER], ""))
    | STATS.get(role, dict.fromkeys(STATS[OWNER], ""))
    for role, rights in parse_matrix(MATRIX).items()
}
OWNED = parse_functions(FUNCTIONS)
ROLES = list(EXPECTED)
# Rights come from grants, and triggers do not stand in the way: all but the owner.
GRANTED = [role for role in ROLES if role != OWNER]
NOTHING = dict.fromkeys(TABLES.values(), "")


def callable_by(role: str | None) -> set[str]:
    """What a role may call, its own functions included."""
    if role is None:
        return set()
    return CALLABLE[role] | {name for name, (owner, _) in OWNED.items() if owner == role}


async def table_columns(connection: "Connection") -> dict[str, str]:
    """Every table of the schema, and a column of it that an INSERT can name."""
    return {
        row["table"]: row["column"]
        for row in await connection.fetch(
            """
            select c.relname as table, (
                select a.attname from pg_attribute a
                where a.attrelid = c.oid and a.attnum > 0 and a.attidentity = '' order by a.attnum limit 1
            ) as column
            from pg_class c
            where c.relnamespace = 'webhookd'::regnamespace and c.relkind in ('r', 'p', 'm', 'f')
            """
        )
    }


async def function_calls(connection: "Connection") -> dict[str, str]:
    """Every function of the schema, and a call of it in which every argument is null."""
    return {
        row["name"]: row["call"]
        for row in await connection.fetch(
            """
            select p.proname as name, format('select webhookd.%I(%s)', p.proname, (
                select string_agg('null::' || format_type(t.oid, null), ', ' order by t.place)
                from unnest(p.proargtypes) with ordinality as t (oid, place)
            )) as call
            from pg_proc p where p.pronamespace = 'webhookd'::regnamespace
            """
        )
    }


async def served_tables(connection: "Connection", tables: dict[str, str]) -> dict[str, str]:
    """Table → the letters of what the server really serves; any refusal but "permission denied" fails."""
    served: dict[str, str] = {}
    for table, column in tables.items():
        served[table] = ""
        for letter, attempt in ATTEMPTS.items():
            statement = attempt.format(table=f"webhookd.{table}", column=column)
            refused_by = await refusal(connection, statement)
            assert refused_by in {None, DENIED}, statement
            if refused_by is None:
                served[table] += letter
        served[table] = served[table].replace("sS", "S")
    return served


async def served_functions(connection: "Connection", calls: dict[str, str]) -> set[str]:
    """The functions that the server really calls, whatever they then say to nulls."""
    return {name for name, call in calls.items() if await refusal(connection, call) != DENIED}


# Tables


async def test_matrix_has_every_table_and_role(flow: "Flow") -> None:
    """Every table, and every role that owns or was granted something, is in the matrix."""
    assert set(await table_columns(flow.superuser)) == set(TABLES.values())
    rows = await flow.superuser.fetch(
        """
        with acls (owner, acl) as (
            select nspowner, nspacl from pg_namespace where nspname = 'webhookd'
            union all select relowner, relacl from pg_class where relnamespace = 'webhookd'::regnamespace
            union all select proowner, proacl from pg_proc where pronamespace = 'webhookd'::regnamespace
            union all select typowner, typacl from pg_type where typnamespace = 'webhookd'::regnamespace
        )
        select owner::regrole::text as role from acls
        union select grantee::regrole::text from acls cross join lateral aclexplode(acl) where grantee <> 0
        """
    )
    assert {row["role"] for row in rows} == set(ROLES)


@pytest.mark.parametrize("role", ROLES)
async def test_catalog_equals_the_matrix(flow: "Flow", role: str) -> None:
    """has_table_privilege and has_any_column_privilege equal the matrix, for every table."""
    query = "select has_{0}_privilege($1::text, 'webhookd.' || $2::text, $3)"
    held = {}
    for table in await table_columns(flow.superuser):
        held[table] = "".join(
            [
                letter
                for letter, privilege in PRIVILEGES.items()
                if await flow.superuser.fetchval(query.format("table"), role, table, privilege)
            ]
        )
        if not held[table] and await flow.superuser.fetchval(
            query.format("any_column"), role, table, "SELECT"
        ):
            held[table] = "s"
    assert held == EXPECTED[role]


@pytest.mark.parametrize("role", GRANTED)
async def test_role_can_do_exactly_what_the_matrix_allows(flow: "Flow", role: str) -> None:
    """Each statement is tried as the role: it succeeds, or PostgreSQL refuses it with 42501."""
    tables = await table_columns(flow.superuser)
    async with undone(flow.superuser):
        await flow.superuser.execute(f"set local role {role}")
        assert await served_tables(flow.superuser, tables) == EXPECTED[role]


@pytest.mark.parametrize("login", ROLE_OF)
async def test_login_can_do_exactly_what_its_role_can(
    flow: "Flow", database: "Database", login: "Login"
) -> None:
    """The same with a real connection; a stranger can do nothing."""
    role = ROLE_OF[login]
    connection = await database.connect(login)
    tables = await table_columns(flow.superuser)
    assert await served_tables(connection, tables) == (NOTHING if role is None else EXPECTED[role])


async def test_tables_have_no_privileges_beyond_the_matrix(flow: "Flow") -> None:
    """No other kind, no grant option, none for PUBLIC; on columns SELECT of job_queue, and COLUMNS."""
    columns = await flow.superuser.fetch(
        """
        select a.grantee::regrole::text, c.relname, attname
        from pg_attribute join pg_class c on c.oid = attrelid cross join lateral aclexplode(attacl) a
        where c.relnamespace = 'webhookd'::regnamespace and a.privilege_type = 'UPDATE'
        """
    )
    assert {tuple(row) for row in columns} == COLUMNS
    others = await flow.superuser.fetch(
        """
        select c.relname, a.grantee::regrole, a.privilege_type
        from pg_class c cross join lateral aclexplode(c.relacl) a
        where c.relnamespace = 'webhookd'::regnamespace and c.relkind <> 'S' and a.grantee <> c.relowner
            and (a.privilege_type <> all($1) or a.is_grantable or a.grantee = 0)
        union all
        select c.relname, a.grantee::regrole, a.privilege_type
        from pg_attribute join pg_class c on c.oid = attrelid cross join lateral aclexplode(attacl) a
        where c.relnamespace = 'webhookd'::regnamespace
            and (a.is_grantable or a.grantee = 0 or a.privilege_type not in ('SELECT', 'UPDATE')
                 or a.privilege_type = 'SELECT' and c.relname <> 'job_queue')
        """,
        list(PRIVILEGES.values()),
    )
    assert others == []


@pytest.mark.parametrize("login", ["daemon", "reader"])
async def test_lease_token_cannot_be_read(database: "Database", login: "Login") -> None:
    """Every other column can be read, also one that a migration adds; the views can be read completely."""
    connection = await database.connect(login)
    columns = """
        select attname from pg_attribute where attrelid = ('webhookd.' || $1::text)::regclass
            and attnum > 0 and not attisdropped"""
    names = {row["attname"] for row in await connection.fetch(columns, "job_queue")}
    refused = {name: await refusal(connection, f"select {name} from webhookd.job_queue") for name in names}
    assert refused == dict.fromkeys(names) | {HIDDEN: DENIED}
    assert {row["attname"] for row in await connection.fetch(columns, VIEWS[-1])} == names - {HIDDEN}
    for view in VIEWS:
        assert await refusal(connection, f"table webhookd.{view}") is None


async def test_only_writers_of_events_and_jobs_can_use_a_sequence(flow: "Flow") -> None:
    """They take ids before the insert; other identity columns need no privilege on their sequence."""
    held = await flow.superuser.fetch(
        """
        select c.relname as sequence, r.role, p.privilege
        from pg_class c cross join unnest($1::text[]) as r (role)
        cross join unnest('{USAGE,SELECT,UPDATE}'::text[]) as p (privilege)
        where c.relnamespace = 'webhookd'::regnamespace and c.relkind = 'S'
            and has_sequence_privilege(r.role, c.oid, p.privilege)
        """,
        GRANTED,
    )
    assert sorted(tuple(row) for row in held) == [
        ("events_id_seq", "webhookd_ingest", "USAGE"),
        ("events_id_seq", "webhookd_jobqueue", "USAGE"),
        ("webhook_delivery_jobs_id_seq", "saga_orchestrator", "USAGE"),
    ]


async def test_views_have_the_readers_of_their_tables(flow: "Flow") -> None:
    """No role can write through a view, and every view is in the list."""
    rows = await flow.superuser.fetch(
        """
        select c.relname, array_agg(r.role || ' ' || p.privilege order by r.role, p.privilege) as held
        from pg_class c cross join unnest($1::text[]) as r (role)
        cross join unnest($2::text[]) as p (privilege)
        where c.relnamespace = 'webhookd'::regnamespace and c.relkind = 'v'
            and has_table_privilege(r.role, c.oid, p.privilege)
        group by c.relname
        """,
        GRANTED,
        list(PRIVILEGES.values()),
    )
    readers = ["webhookd_app SELECT", "webhookd_reader SELECT", "workflow_admin SELECT"]
    assert {row["relname"]: row["held"] for row in rows} == dict.fromkeys(VIEWS, readers)


async def test_every_table_belongs_to_the_owner(flow: "Flow") -> None:
    """Tables, sequences, types and the schema itself belong to one role."""
    owners = await flow.superuser.fetch(
        """
        select relowner::regrole::text as owner from pg_class where relnamespace = 'webhookd'::regnamespace
        union select typowner::regrole::text from pg_type where typnamespace = 'webhookd'::regnamespace
        union select nspowner::regrole::text from pg_namespace where nspname = 'webhookd'
        """
    )
    assert [row["owner"] for row in owners] == [OWNER]


# Functions


async def test_every_function_has_the_expected_owner_and_security(flow: "Flow") -> None:
    """A new function, owner or SECURITY DEFINER must be added to the list above."""
    rows = await flow.superuser.fetch(
        """
        select proname, proowner::regrole::text as owner,
               case when prosecdef then 'definer' else 'invoker' end as rights
        from pg_proc where pronamespace = 'webhookd'::regnamespace
        """
    )
    found = {row["proname"]: (row["owner"], row["rights"]) for row in rows}
    assert found == OWNED
    # Of `publish` there are three, for payloads of type text, json and jsonb.
    names = [row["proname"] for row in rows if row["proname"] != "publish"]
    assert len(names) == len(found) - 1, "two functions of one name: callers could be given the wrong one"


async def test_every_function_has_a_fixed_search_path(flow: "Flow") -> None:
    """Its names and operators are the same for every caller; pg_temp, which a caller can fill, is last.

    The exceptions are listed with their reasons; the tests below prove them.
    """
    rows = await flow.superuser.fetch(
        """
        select proname, array(select c from unnest(proconfig) c where c like 'search_path=%') as paths
        from pg_proc where pronamespace = 'webhookd'::regnamespace
        """
    )
    assert {row["proname"]: row["paths"] for row in rows} == {
        name: [] if name in WITH_CALLERS_SEARCH_PATH else ["search_path=pg_catalog, webhookd, pg_temp"]
        for name in OWNED
    }


async def test_require_uses_no_operator(flow: "Flow") -> None:
    """It uses no name or operator that a schema of the caller could replace."""
    source = await flow.superuser.fetchval(
        "select prosrc from pg_proc where oid = 'webhookd.require'::regproc"
    )
    assert " ".join(source.split()) == (
        "begin if condition is not true then "
        "raise exception using errcode = 'WH400', message = complaint; end if; end"
    )


async def test_only_the_migrator_can_update_guarded_tables(flow: "Flow") -> None:
    """No other login runs check_saga or check_job with a search_path of its own."""
    rows = await flow.superuser.fetch(
        """
        select r.rolname from pg_roles r
        where r.rolcanlogin and not r.rolsuper and exists (
            select from unnest('{webhook_delivery_sagas,webhook_delivery_jobs}'::text[]) as t (name)
            where has_any_column_privilege(r.oid, 'webhookd.' || t.name, 'UPDATE'))
        """
    )
    # Another run of the tests, on a server that both share, has a migrator too.
    names = {re.sub(r"^webhookd_test_.*_", "", row["rolname"]) for row in rows}
    assert names == {"migrator"}


@pytest.mark.parametrize("name", FORBIDDEN)
async def test_operator_of_the_caller_cannot_weaken_the_guards(
    flow: "Flow", database: "Database", name: str
) -> None:
    """A gated function refuses a forbidden change, even if the caller's own `=` would accept it.

    The guards use the search_path of the gated function. Without that, the same call is accepted.
    """
    assert await flow.job_in(AttemptStatus.PENDING) == 1
    planted, call = FORBIDDEN[name]
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(planted)
    schema, login = f"mine_{database.name}", database.login_name("daemon")
    await flow.superuser.execute(f"create schema {schema} authorization {login}")
    for argument, body in EQUALS.items():
        await flow.daemon.execute(
            f"""
            create function {schema}.equal({argument}, {argument}) returns boolean
                language plpgsql as 'begin return {body}; end';
            create operator {schema}.= (
                leftarg = {argument}, rightarg = {argument}, function = {schema}.equal);
            grant usage on schema {schema} to public
            """
        )
    await flow.daemon.execute(f"set search_path = {schema}, pg_catalog, webhookd")
    assert await flow.daemon.fetchval("select null::bigint = 1::bigint"), "the caller's own operator is used"

    assert await refusal(flow.daemon, call) == "WH411"
    await flow.superuser.execute(f"alter function webhookd.{name} reset search_path")
    assert await refusal(flow.daemon, call) is None


async def test_operator_of_the_caller_cannot_forge_reserved_events(
    flow: "Flow", database: "Database"
) -> None:
    """The trigger that reserves `dot.job.` uses PostgreSQL's `<>`, not one of the caller's schema."""
    schema, login = f"mine_{database.name}", database.login_name("application")
    await flow.superuser.execute(f"create schema {schema} authorization {login}")
    application = await database.connect("application")
    await application.execute(
        f"""
        create function {schema}.never(name, name) returns boolean language sql as 'select false';
        create function {schema}.never(name, text) returns boolean language sql as 'select false';
        create operator {schema}.<> (leftarg = name, rightarg = name, function = {schema}.never);
        create operator {schema}.<> (leftarg = name, rightarg = text, function = {schema}.never);
        set search_path = {schema}, pg_catalog;
        """
    )
    assert not await application.fetchval("select 'a'::name <> 'b'"), "the caller's own operator is used"
    forged = "insert into webhookd.events (event_type, payload) values ('dot.job.succeeded', '{}')"
    assert await refusal(application, forged) == "WH400"


async def test_temporary_table_of_the_caller_is_ignored(flow: "Flow", database: "Database") -> None:
    """publish() writes webhookd.events, even if the caller has a temporary table `events`."""
    application = await database.connect("application")
    await application.execute("create temporary table events (like webhookd.events including all)")
    event_id = await application.fetchval("select webhookd.publish('order.created', '{}')")
    assert await flow.superuser.fetchval("select id from webhookd.events") == event_id
    assert await application.fetchval("select count(*) from pg_temp.events") == 0


async def test_no_function_is_public(flow: "Flow") -> None:
    """PUBLIC, which can call new functions by default, cannot call ours; nor is there a grant option."""
    public = await flow.superuser.fetch(
        """
        select proname, a.grantee::regrole::text
        from pg_proc cross join lateral aclexplode(coalesce(proacl, acldefault('f', proowner))) a
        where pronamespace = 'webhookd'::regnamespace
            and (a.grantee = 0 or a.is_grantable and a.grantee <> proowner)
        """
    )
    assert public == []


@pytest.mark.parametrize("role", ROLES)
async def test_catalog_has_the_expected_callers(flow: "Flow", role: str) -> None:
    """has_function_privilege equals the lists above, for every function."""
    rows = await flow.superuser.fetch(
        """
        select proname from pg_proc
        where pronamespace = 'webhookd'::regnamespace and has_function_privilege($1::text, oid, 'EXECUTE')
        """,
        role,
    )
    assert {row["proname"] for row in rows} == callable_by(role)


@pytest.mark.parametrize("role", ROLES)
async def test_role_can_call_only_its_functions(flow: "Flow", role: str) -> None:
    """Each function is called as the role, with nulls: it runs, or is refused with 42501."""
    calls = await function_calls(flow.superuser)
    async with undone(flow.superuser):
        await flow.superuser.execute(f"set local role {role}")
        assert await served_functions(flow.superuser, calls) == callable_by(role)


@pytest.mark.parametrize("login", ROLE_OF)
async def test_login_can_call_only_the_functions_of_its_role(
    flow: "Flow", database: "Database", login: "Login"
) -> None:
    """The same with a real connection: the daemon cannot call internal functions, a stranger none."""
    connection = await database.connect(login)
    calls = await function_calls(flow.superuser)
    assert await served_functions(connection, calls) == callable_by(ROLE_OF[login])


@pytest.mark.parametrize(("statement", "who_may", "who_may_not"), OVERSTEPS)
async def test_function_has_the_privileges_of_its_owner(
    flow: "Flow", statement: str, who_may: str, who_may_not: str
) -> None:
    """The same function succeeds or is refused according to its owner, when the daemon calls it."""
    await flow.saga_in(SagaStatus.PENDING)
    await flow.superuser.execute(
        "create function webhookd.overstep() returns void language plpgsql security definer as "
        f"$$ begin execute {statement!r}; end $$; "
        "revoke all on function webhookd.overstep from public; "
        "grant execute on function webhookd.overstep to webhookd_app"
    )
    for owner, refused_by in [(who_may, None), (who_may_not, DENIED)]:
        await flow.superuser.execute(f"alter function webhookd.overstep owner to {owner}")
        assert await refusal(flow.daemon, "select webhookd.overstep()") == refused_by, owner


async def test_invoker_functions_read_few_tables(flow: "Flow") -> None:
    """They only compute; a few of them read or lock tables with the caller's privileges.

    Those of retention_keeper are parts of its gated functions, and only that role may call them.
    """
    rows = await flow.superuser.fetch(
        r"""
        select p.proname, t.name
        from pg_proc p join unnest($1::text[]) as t (name) on p.prosrc ~ ('\m' || t.name || '\M')
        where p.pronamespace = 'webhookd'::regnamespace and not p.prosecdef and p.proname <> 'backlog'
            and p.proowner <> 'retention_keeper'::regrole
        """,
        list(TABLES.values()),
    )
    assert {tuple(row) for row in rows} == {
        ("lock_subscription", "subscriptions"),
        ("join_tenant", "subscriptions"),
        ("join_tenant", "tenants"),
        ("first_saga_since", "webhook_delivery_sagas"),
        ("limit_quotas", "subscriptions"),
        ("limit_quotas", "subscription_rates"),
        ("limit_quotas", "webhook_delivery_jobs"),
        ("limit_quotas", "webhook_delivery_sagas"),
        ("count_attempts", "delivery_stats"),
        ("choose_jobs", "endpoint_health"),
        ("choose_jobs", "subscriptions"),
        ("choose_jobs", "webhook_delivery_jobs"),
        ("choose_jobs", "webhook_delivery_sagas"),
        ("check_saga", "webhook_delivery_jobs"),
        ("check_payload_removed", "events"),
        ("check_snapshot_removed", "events"),
        ("check_snapshot_removed", "dead_letters"),
        ("has_sagas", "webhook_delivery_sagas"),
        ("refuse_if_erasing", "erasures"),
        ("remove_expired_console_links", "console_links"),
    }


async def test_invoker_function_gives_no_privileges(flow: "Flow") -> None:
    """Even if granted to the daemon, lock_subscription cannot lock a table that the daemon cannot."""
    subscription_id = await flow.subscribe()
    await flow.superuser.execute("grant execute on function webhookd.lock_subscription to webhookd_app")
    call = "select webhookd.lock_subscription($1, null)"
    assert await refusal(flow.superuser, call, subscription_id) is None
    assert await refusal(flow.daemon, call, subscription_id) == DENIED


# Roles and logins


async def test_roles_have_no_attributes(flow: "Flow") -> None:
    """No role can log in or has any other attribute."""
    able = await flow.superuser.fetch(
        """
        select rolname from pg_roles
        where rolname = any($1)
            and (rolcanlogin or rolsuper or rolcreaterole or rolcreatedb or rolbypassrls or rolreplication)
        """,
        ROLES,
    )
    assert able == []
    assert await flow.superuser.fetchval(
        "select count(*) from pg_roles where rolname = any($1)", ROLES
    ) == len(ROLES)


async def test_owning_roles_are_granted_only_to_the_migrator(flow: "Flow", database: "Database") -> None:
    """A member could change the functions and so use all privileges of the role."""
    rows = await flow.superuser.fetch(
        "select roleid::regrole::text as role, member::regrole::text as member from pg_auth_members "
        "where roleid::regrole::text = any($1)",
        [OWNER, *{owner for owner, _ in OWNED.values()}],
    )
    # Another run of the tests, on a server that both share, has a migrator too.
    strangers = [
        row["member"]
        for row in rows
        if not (row["member"].startswith("webhookd_test_") and row["member"].endswith("_migrator"))
    ]
    assert strangers == []
    assert database.login_name("migrator") in {row["member"] for row in rows}


async def test_only_webhookd_app_is_a_member_of_other_roles(flow: "Flow") -> None:
    """So no role has privileges that the matrix does not show."""
    rows = await flow.superuser.fetch(
        "select distinct roleid::regrole::text as role, member::regrole::text as member from pg_auth_members "
        "where member::regrole::text = any($1)",
        ROLES,
    )
    assert sorted(tuple(row) for row in rows) == [
        ("webhookd_reader", "webhookd_app"),
        ("workflow_admin", "webhookd_app"),
    ]


@pytest.mark.parametrize("login", ROLE_OF)
async def test_login_cannot_set_another_role(database: "Database", login: "Login") -> None:
    """SET ROLE works for the granted roles, and for no role that owns functions."""
    connection = await database.connect(login)
    reached = {role for role in ROLES if await refusal(connection, f"set local role {role}") is None}
    expected: dict[Login, set[str]] = {
        "daemon": {"webhookd_app", "webhookd_reader", "workflow_admin"},
        "application": {"event_ingest_writer"},
        "executor": {"dot_executor"},
        "reader": {"webhookd_reader"},
        "stranger": set(),
    }
    assert reached == expected[login]


async def test_only_the_owner_can_create_in_the_schema(flow: "Flow") -> None:
    """CREATE, which the owners of functions have while migrating, is revoked."""
    creating = await flow.superuser.fetch(
        "select role from unnest($1::text[]) role where has_schema_privilege(role, 'webhookd', 'CREATE')",
        ROLES,
    )
    assert [row["role"] for row in creating] == [OWNER]


@pytest.mark.parametrize("role", GRANTED)
async def test_roles_cannot_bypass_triggers_and_privileges(flow: "Flow", role: str) -> None:
    """Only the owner can disable, drop, create or grant anything, not even a role that owns functions."""
    async with undone(flow.superuser):
        await flow.superuser.execute(f"set local role {role}")
        for detour in DETOURS:
            assert await refusal(flow.superuser, detour) == DENIED, detour


@pytest.mark.parametrize("login", ROLE_OF)
async def test_logins_cannot_bypass_triggers_and_privileges(database: "Database", login: "Login") -> None:
    """The same with a real connection."""
    connection = await database.connect(login)
    for detour in DETOURS:
        assert await refusal(connection, detour) == DENIED, detour


async def test_stranger_cannot_see_the_schema(flow: "Flow", database: "Database") -> None:
    """It cannot use the schema, and the information schema shows it none of our objects."""
    stranger = await database.connect("stranger")
    assert not await stranger.fetchval("select has_schema_privilege('webhookd', 'USAGE')")
    assert await refusal(stranger, "select 'webhookd.events'::regclass") == DENIED
    shown = """
        select table_name from information_schema.columns where table_schema = 'webhookd'
        union select routine_name from information_schema.routines where routine_schema = 'webhookd'
        union select trigger_name from information_schema.triggers where trigger_schema = 'webhookd'
        """
    assert await stranger.fetch(shown) == []
    assert await flow.daemon.fetch(shown) != []


@pytest.mark.parametrize(
    "statement",
    [
        "table webhookd.subscription_secrets",
        "select count(*) from webhookd.subscription_secrets",
        "select webhookd.live_secrets(s) from webhookd.subscription_secrets s",
    ],
)
async def test_daemon_cannot_read_secrets(flow: "Flow", statement: str) -> None:
    """It cannot read or even count signing secrets."""
    await flow.subscribe()
    assert await refusal(flow.daemon, statement) == DENIED
    assert await refusal(flow.superuser, statement) is None


async def test_application_can_publish_and_read_events(database: "Database") -> None:
    """By function and by INSERT, in its own transaction; the tests above show that it can do no more."""
    application = await database.connect("application")
    async with application.transaction():
        published = await application.fetchval("select webhookd.publish('order.created', '{}')")
        inserted = await application.fetchval(
            "insert into webhookd.events (event_type, payload) values ('order.created', '{}') returning id"
        )
    rows = await application.fetch("select id from webhookd.events order by id")
    assert [row["id"] for row in rows] == [published, inserted]
