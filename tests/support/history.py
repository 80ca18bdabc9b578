"""A long history, a live backlog, and counters of what a call reads of both.

Takes a migrated, empty database; provides history, waiting work, copies, and counts of scans and blocks.
"""

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from tests.support.database import Cluster, Database
from webhookd.deliveries import attempts, ingest, router, sagas

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")

SUBSCRIPTIONS = 400
EVENT_TYPES = 100
SAGAS_OF_EVENT = SUBSCRIPTIONS // EVENT_TYPES
FAILING_SUBSCRIPTIONS = 10
# These two have the same number of dead letters in a long and in a short history, so that paging through them
# is the same work in both. Only the first one has RARE_ERROR.
SUBSCRIPTION_OF_RARE_ERROR = 399
SUBSCRIPTION_OF_FEW_LETTERS = 400
RARE_ERROR = "TLS_FAILED"
FEW_LETTERS = 50

# The backlog: 10,000 sagas, of which half wait for their first attempt, a thousand for their second, and the
# others have an active attempt; and events that are not routed yet.
WAITING_EVENTS = 2500
JOBS_OF_EACH = 13
RETRYING_JOBS = 1000
LEASED_JOBS = 500
QUEUED_EVENTS = 500

LONG_SECONDS = 3600
UNLIMITED = 1_000_000
# A retry is due in an hour, and no endpoint counts as failing.
POLICY = sagas.RetryPolicy(
    max_attempts=5, base_delay_seconds=LONG_SECONDS, max_delay_seconds=LONG_SECONDS, jitter=0
)


async def write_history(superuser: "Connection", size: int) -> None:
    """Write `size` finished sagas with an attempt each, one in eleven dead-lettered; nothing waits.

    Statistics are those of a vacuum at the end. Autovacuum is off, so that results do not depend on timing.
    """
    async with superuser.transaction():
        # Without triggers and foreign keys, because the rows are inserted in their final state.
        await superuser.execute("set local session_replication_role = replica")
        for statement in HISTORY:
            await superuser.execute(statement.replace(":size", str(size)))
    await turn_autovacuum_off(superuser)
    await vacuum(superuser)


async def turn_autovacuum_off(superuser: "Connection") -> None:
    """Keep statistics as the test left them, also on an existing server, which has autovacuum on."""
    for table in await table_names(superuser):
        await superuser.execute(f"alter table webhookd.{table} set (autovacuum_enabled = false)")


async def vacuum(superuser: "Connection", *, analyze: bool = True) -> None:
    """Vacuum every table, by default with new statistics."""
    for table in await table_names(superuser):
        await superuser.execute(f"vacuum (analyze {analyze}) webhookd.{table}")


async def table_names(connection: "Connection") -> list[str]:
    """Return every table of the schema."""
    rows = await connection.fetch("select tablename from pg_tables where schemaname = 'webhookd'")
    return [row["tablename"] for row in rows]


async def write_backlog(daemon: "Connection") -> None:
    """Create events to route, sagas due or waiting for a retry, and Pending and Leased attempts."""
    await publish(daemon, WAITING_EVENTS)
    while (await router.route(daemon, 1000)).events:
        pass
    shares = [sagas.Share(subscription_id, JOBS_OF_EACH) for subscription_id in subscription_ids()]
    await sagas.start(daemon, shares, JOBS_OF_EACH, POLICY.max_attempts)
    failed = await claim(daemon, RETRYING_JOBS)
    await attempts.report(daemon, [attempts.Report(lease.job_id, lease.lease_token, 500) for lease in failed])
    await sagas.apply_results(daemon, RETRYING_JOBS, POLICY, UNLIMITED)
    await claim(daemon, LEASED_JOBS)
    await publish(daemon, QUEUED_EVENTS)


async def claim(
    daemon: "Connection", wanted: int, *, lease_seconds: float = LONG_SECONDS
) -> list[attempts.Lease]:
    """Lease attempts."""
    claims = await attempts.claim(daemon, "worker", wanted, lease_seconds, subscription_slots=UNLIMITED)
    return [claim.lease for claim in claims]


async def publish(daemon: "Connection", number: int) -> None:
    """Publish events, of each type in turn."""
    await ingest.publish(daemon, [new_event(place) for place in range(number)])


def new_event(place: int, idempotency_key: str | None = None) -> ingest.NewEvent:
    """Return an event like that of the history at this place."""
    return ingest.NewEvent(f"type.n{place % EVENT_TYPES}", '{"amount": 1}', idempotency_key)


def past_key(place: int) -> str:
    """Return the idempotency key of the history's event at an even place."""
    return f"past-{place}"


def subscription_ids() -> range:
    """Return the ids of the history's subscriptions."""
    return range(1, SUBSCRIPTIONS + 1)


async def copy_database(original: Database) -> Database:
    """Copy a database without sessions; the end of the cluster drops the copy."""
    cluster: Cluster = original.cluster
    name = f"{cluster.prefix}_{secrets.token_hex(4)}"
    async with cluster.superuser() as superuser:
        await superuser.execute(f"create database {name} template {original.name} strategy file_copy")
    return Database(name, cluster)


@dataclass(frozen=True)
class Touched:
    """How often tables and indexes were scanned, and how many of their blocks were read."""

    # By table or index name: sequential scans of a table, descents of an index. Lookups by ON CONFLICT or a
    # foreign key count, written entries do not.
    scans: dict[str, int]
    # By table name, including its indexes.
    blocks: dict[str, int]

    def since(self, before: "Touched") -> "Touched":
        """Return the difference to earlier counters."""
        return Touched(
            {name: count - before.scans[name] for name, count in self.scans.items()},
            {name: count - before.blocks[name] for name, count in self.blocks.items()},
        )


async def watch(
    connection: "Connection",
    call: Callable[["Connection"], Awaitable[Result]],
    isolation: Literal["repeatable_read"] | None = None,
) -> tuple[Result, Touched]:
    """Run a call in its own transaction, and return its result and the counters that it added.

    Despite their names the counters belong to the session, until it sends them to the server's statistics; so
    this takes a difference. A session sends nothing inside a transaction, and counters of other sessions are
    never included (tested on PostgreSQL 15 and 18).
    """
    async with connection.transaction(isolation=isolation):
        before = await counters(connection)
        result = await call(connection)
        await connection.execute("set constraints all immediate")  # includes the checks of the commit
        return result, (await counters(connection)).since(before)


async def counters(connection: "Connection") -> Touched:
    """Return the session's counters of every table and index."""
    rows = await connection.fetch("""
        select c.relname as name, t.relname as table_name,
               pg_stat_get_xact_numscans(c.oid) as scans, pg_stat_get_xact_blocks_fetched(c.oid) as blocks
        from pg_class c
        left join pg_index i on i.indexrelid = c.oid
        join pg_class t on t.oid = coalesce(i.indrelid, c.oid)
        where c.relnamespace = 'webhookd'::regnamespace and c.relkind in ('r', 'i')
    """)
    blocks: Counter[str] = Counter()
    for row in rows:
        blocks[row["table_name"]] += row["blocks"]
    return Touched({row["name"]: row["scans"] for row in rows}, dict(blocks))


# Saga i belongs to event i / 4, whose type has four subscriptions.
HISTORY = (
    f"""
    insert into webhookd.subscriptions (event_type, event_types, callback_url, active, verified)
    select 'type.n' || i % {EVENT_TYPES}, array['type.n' || i % {EVENT_TYPES}],
           'https://receiver.example/' || i, true, true
    from generate_series(0, {SUBSCRIPTIONS - 1}) i
    """,
    """
    insert into webhookd.subscription_types (tenant, pattern, subscription_id, routable)
    select s.tenant, s.event_type, s.id, s.routable from webhookd.subscriptions s
    """,
    """
    insert into webhookd.subscription_secrets (subscription_id, secret)
    select s.id, 'whsec_' || encode(sha256(s.id::text::bytea), 'base64') from webhookd.subscriptions s
    """,
    f"""
    insert into webhookd.endpoint_health (subscription_id, consecutive_failures, failing_since)
    select s.id, 100, now() from webhookd.subscriptions s where s.id <= {FAILING_SUBSCRIPTIONS}
    """,
    f"""
    insert into webhookd.events (event_type, payload, created_at, idempotency_key)
    select 'type.n' || i % {EVENT_TYPES}, '{{"amount": 1}}',
           now() - (:size - i * {SAGAS_OF_EVENT}) * interval '1 s',
           case when i % 2 = 0 then 'past-' || i end
    from generate_series(0, :size / {SAGAS_OF_EVENT} - 1) i
    """,
    f"""
    insert into webhookd.webhook_delivery_sagas (
        event_id, subscription_id, status, job_id, attempt_count, next_attempt_at, final_error_code,
        created_at)
    select s.event_id, s.subscription_id,
           case when s.dead then 'DeadLettered' else 'Completed' end::webhookd.saga_status,
           s.i + 1, 1, now() - interval '1 day' + s.i * interval '1 ms',
           case when s.dead and s.subscription_id = {SUBSCRIPTION_OF_RARE_ERROR} then '{RARE_ERROR}'
                when s.dead then 'HTTP_500' end,
           now() - (:size - s.i) * interval '1 s'
    from (
        select p.i, p.event_id, p.subscription_id,
               case when p.subscription_id in ({SUBSCRIPTION_OF_RARE_ERROR}, {SUBSCRIPTION_OF_FEW_LETTERS})
                    then p.i / {SUBSCRIPTIONS} % (:size / {SUBSCRIPTIONS} / {FEW_LETTERS}) = 0
                    else p.i % 11 = 0 end as dead
        from (
            select e.i, e.event + 1 as event_id,
                   e.event % {EVENT_TYPES} + {EVENT_TYPES} * (e.i % {SAGAS_OF_EVENT}) + 1 as subscription_id
            from (select i, i / {SAGAS_OF_EVENT} as event from generate_series(0, :size - 1) i) e) p) s
    order by s.i
    """,
    """
    insert into webhookd.webhook_delivery_jobs (
        saga_id, subscription_id, event_id, attempt, status, lease_until, attempt_at, response_status,
        error_code, worker_id, lease_token, result_applied_at, finished_at)
    select s.id, s.subscription_id, s.event_id, 1,
           case when s.final_error_code is null then 'Completed' else 'Failed' end::webhookd.job_status,
           s.next_attempt_at, s.next_attempt_at, case when s.final_error_code is null then 200 end,
           s.final_error_code, 'worker', gen_random_uuid(), s.next_attempt_at, s.next_attempt_at
    from webhookd.webhook_delivery_sagas s
    order by s.id
    """,
    """
    insert into webhookd.dead_letters (
        saga_id, event_id, subscription_id, final_error_code, failed_at, payload_snapshot)
    select s.id, s.event_id, s.subscription_id, s.final_error_code, s.next_attempt_at, e.payload
    from webhookd.webhook_delivery_sagas s join webhookd.events e on e.id = s.event_id
    where s.status = 'DeadLettered'
    order by s.id
    """,
)
