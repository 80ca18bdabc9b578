"""The promises of webhookd as queries that return the rows that break them.

The names are those in the list of promises. The test creates and fills the tables in the schema public:
`receipts` has the requests that endpoints received, and `client` the events that clients published
(tests/support/traffic.py); `resends`, `holds` and `replays` have the actions of a support engineer
(tests/faults/support_client.py).
"""

import re
from typing import TYPE_CHECKING

from webhookd.deliveries.stats import BOUNDS_MS, PLACES

if TYPE_CHECKING:
    from asyncpg import Record

    from tests.support.database import Connection

AUDIT = """
create table public.saga_audit (
    saga_id bigint, old_status webhookd.saga_status, new_status webhookd.saga_status);
create function public.audit_saga() returns trigger language plpgsql security definer as $$
begin
    insert into public.saga_audit values (new.id, old.status, new.status);
    return null;
end
$$;
create trigger zz_audit after update on webhookd.webhook_delivery_sagas
    for each row execute function public.audit_saga();
create table public.receipts (
    saga_id bigint, job_id bigint, response_status integer,
    received_at timestamptz, body bytea, verifies boolean, address text);
create table public.client (event_id bigint, idempotency_key text, payload text);
create table public.resends (saga_id bigint, new_saga_id bigint);
-- Held from `since` (the request was answered) to `until` (before the request to release it), which was
-- answered at `released_at`.
create table public.holds (
    subscription_id bigint, kind text, since timestamptz, until timestamptz, released_at timestamptz);
create table public.replays (
    subscription_id bigint, include_all boolean, since timestamptz, until timestamptz,
    started_at timestamptz, ended_at timestamptz);
"""
MAX_DURATION_MS = 2**31 - 1
# The rows that retention removes are kept next to the tables: the promises hold for them too. The columns are
# those that the queries join by.
REMOVABLE = {
    "events": ("id",),
    "webhook_delivery_sagas": ("id", "event_id", "resent_from"),
    "webhook_delivery_jobs": ("id", "saga_id", "event_id"),
    "dead_letters": ("id", "saga_id", "event_id"),
}
AUDIT += """
create function public.archive() returns trigger language plpgsql security definer as $$
begin
    execute format('insert into public.removed_%s select ($1).*', tg_table_name) using old;
    return null;
end
$$;
"""
AUDIT += "".join(
    f"""
create table public.removed_{table} (like webhookd.{table});
create trigger zz_archive after delete on webhookd.{table} for each row execute function public.archive();
create view public.all_{table} as
    select * from webhookd.{table} union all select * from public.removed_{table};
"""
    + "".join(f"create index on public.removed_{table} ({column});" for column in columns)
    for table, columns in REMOVABLE.items()
)


# At the end, as tables: the planner knows too little about the views to join a hundred thousand rows.
MATERIALIZE = "".join(
    f"""
drop view public.all_{table};
create table public.all_{table} as
    select * from webhookd.{table} union all select * from public.removed_{table};
"""
    + "".join(f"create index on public.all_{table} ({column});" for column in columns)
    for table, columns in REMOVABLE.items()
)


async def is_removing(superuser: "Connection") -> bool:
    """Return whether retention has removed anything."""
    found: bool = await superuser.fetchval(
        "select " + " or ".join(f"exists (select from public.removed_{table})" for table in REMOVABLE)
    )
    return found


async def with_removed(superuser: "Connection", query: str) -> str:
    """Return the query with the rows that retention has removed, if there are any."""
    if await is_removing(superuser):
        for table in REMOVABLE:
            query = re.sub(rf"\bwebhookd\.{table}\b", f"public.all_{table}", query)
    return query


# The numbers of each subscription that exists, and of all together: by minute, or by hour when retention has
# added up minutes.
_COUNTED = {
    "delivered": "j.status = 'Completed'",
    "failed": "j.status = 'Failed'",
    "dead_lettered": "j.status = 'dead letter'",
    **{
        f"durations[{place}]": f"j.duration_ms > {above} and j.duration_ms <= {bound}"
        for place, above, bound in zip(
            range(1, PLACES + 1), (-1, *BOUNDS_MS), (*BOUNDS_MS, MAX_DURATION_MS), strict=True
        )
    },
}
_STATS_DIFFER = """
    with step (length) as (
        select case when exists (select from webhookd.delivery_stats_hours)
                    then '1 hour' else '1 minute' end::interval
    ), counted as (
        select coalesce(j.subscription_id, 0) as subscription_id, j.at, {counts}
        from (
            select subscription_id, status::text, duration_ms,
                   date_bin(length, result_applied_at, 'epoch') as at
            from webhookd.webhook_delivery_jobs, step where result_applied_at is not null
            union all
            select subscription_id, 'dead letter', null, date_bin(length, failed_at, 'epoch')
            from webhookd.dead_letters, step) j
        group by grouping sets ((j.subscription_id, j.at), (j.at))
    ), stored as (
        select t.subscription_id, t.at, {sums}
        from (
            select subscription_id, date_bin(length, minute, 'epoch') as at, {names}
            from webhookd.delivery_stats, step
            union all
            select subscription_id, hour, {names} from webhookd.delivery_stats_hours) t
        group by 1, 2
    )
    select subscription_id, at, to_jsonb(c) as counted, to_jsonb(s) as stored
    from counted c full join stored s using (subscription_id, at)
    where to_jsonb(c) is distinct from to_jsonb(s)
        and (subscription_id = 0
             or exists (select from webhookd.subscriptions u where u.id = subscription_id))
""".format(
    counts=", ".join(f'count(*) filter (where {test}) as "{name}"' for name, test in _COUNTED.items()),
    sums=", ".join(f'sum(t.{name}) as "{name}"' for name in _COUNTED),
    names="delivered, failed, dead_lettered, durations",
)

INVARIANTS = {
    "stats: the numbers are not those of the jobs and dead letters": _STATS_DIFFER,
    "I1 an event that was acknowledged to a client is missing": """
        select c.event_id from public.client c
        left join webhookd.events e
            on e.id = c.event_id and e.idempotency_key is not distinct from c.idempotency_key
        where e.id is null
    """,
    "I1 an endpoint got an event that is missing": """
        select * from public.receipts where saga_id is null
    """,
    "I1 an idempotency key has two events": """
        select idempotency_key from webhookd.events where idempotency_key is not null
        group by idempotency_key having count(*) > 1
    """,
    "I1 a resend that was acknowledged to a client is missing": """
        select r.* from public.resends r
        left join webhookd.webhook_delivery_sagas s on s.id = r.new_saga_id and s.resent_from = r.saga_id
        where s.id is null
    """,
    # Pausing and moving do not matter: the subscription stays active and verified. `released_at`: changed_at
    # is before the commit, so an event of that moment may have been routed before it.
    "I2 a routed event lacks a saga, or has two, for a subscription that was active and verified since": """
        select e.id, u.id
        from webhookd.events e
        join webhookd.subscriptions u using (event_type)
        left join webhookd.webhook_delivery_sagas s
            on s.event_id = e.id and s.subscription_id = u.id and s.resent_from is null
        where u.active and u.verified and u.deleted_at is null
            and not exists (select from webhookd.event_routing_queue q where q.event_id = e.id)
            and (select c.active and c.verified and c.event_types = u.event_types
                     and c.filter is not distinct from u.filter
                 from webhookd.subscription_changes c
                 where c.subscription_id = u.id and c.changed_at < e.created_at
                 order by c.changed_at desc, c.id desc limit 1)
            and not exists (select from webhookd.subscription_changes c
                            where c.subscription_id = u.id and c.changed_at >= e.created_at
                                and not (c.active and c.verified and c.event_types = u.event_types
                                         and c.filter is not distinct from u.filter))
            and not exists (select from public.holds h
                            where h.subscription_id = u.id and h.kind = 'disabled'
                                and e.created_at between h.since and h.released_at)
        group by e.id, u.id having count(s.id) <> 1
    """,
    "I2 a pair was routed twice": """
        select event_id, subscription_id from webhookd.webhook_delivery_sagas where resent_from is null
        group by event_id, subscription_id having count(*) > 1
    """,
    "I2 a replayed event lacks a saga": """
        select e.id, p.subscription_id from public.replays p
        join webhookd.subscriptions u on u.id = p.subscription_id
        join webhookd.events e
            on e.event_type = u.event_type and e.created_at >= p.since and e.created_at < p.until
        left join webhookd.webhook_delivery_sagas s
            on s.event_id = e.id and s.subscription_id = u.id and s.resent_from is null
        where s.id is null and not exists (select from webhookd.event_routing_queue q where q.event_id = e.id)
            and not exists (select from public.removed_events r where r.id = e.id)
    """,
    "I2 a saga was created while its subscription was disabled": """
        select s.id from public.holds h
        join webhookd.webhook_delivery_sagas s
            on s.subscription_id = h.subscription_id and s.created_at > h.since and s.created_at < h.until
        where h.kind = 'disabled'
    """,
    "I2 a saga for a subscription that was never active and verified": """
        select s.id from webhookd.webhook_delivery_sagas s
        where not exists (select from webhookd.subscription_changes c
                          where c.subscription_id = s.subscription_id and c.active and c.verified)
    """,
    "I3 a terminal saga changed, or a saga took an edge that does not exist": """
        select * from public.saga_audit
        where (old_status, new_status) not in (
            ('Pending', 'InProgress'), ('PendingRetry', 'InProgress'), ('InProgress', 'Completed'),
            ('InProgress', 'PendingRetry'), ('InProgress', 'DeadLettered'), ('PendingRetry', 'DeadLettered'),
            ('Pending', 'Pending'), ('PendingRetry', 'PendingRetry'))
    """,
    "I4 attempt_count is not the number of applied results": """
        select s.id from webhookd.webhook_delivery_sagas s
        left join webhookd.webhook_delivery_jobs j on j.saga_id = s.id and j.result_applied_at is not null
        group by s.id, s.attempt_count having s.attempt_count <> count(j.id)
    """,
    "I5 a saga InProgress has not exactly one open job, or another has one": """
        select s.id from webhookd.webhook_delivery_sagas s
        left join webhookd.webhook_delivery_jobs j on j.saga_id = s.id and j.result_applied_at is null
        group by s.id, s.status having count(j.id) <> case when s.status = 'InProgress' then 1 else 0 end
    """,
    "I5 the job of a saga is not its last one": """
        select s.id from webhookd.webhook_delivery_sagas s
        left join webhookd.webhook_delivery_jobs j on j.saga_id = s.id
        group by s.id, s.job_id having s.job_id is distinct from max(j.id)
    """,
    "I5 an attempt has another event, subscription or number than its saga gives it": """
        select j.id from (
            select *, row_number() over (partition by saga_id order by id) as place
            from webhookd.webhook_delivery_jobs) j
        join webhookd.webhook_delivery_sagas s on s.id = j.saga_id
        where (j.event_id, j.subscription_id, j.attempt)
            is distinct from (s.event_id, s.subscription_id, j.place)
    """,
    "I5 an attempt was started while its subscription was held": """
        select j.id from public.holds h
        join webhookd.webhook_delivery_jobs j
            on j.subscription_id = h.subscription_id and j.created_at > h.since and j.created_at < h.until
    """,
    # Uses the time of the report, which follows the answer: result_applied_at is the start of the transaction
    # that applied the result, and may be before the request. An expired lease explains one late request, and
    # so does a lost answer: a failed attempt whose request may arrive after another attempt succeeded.
    "I6 a request came after its saga was Completed, and neither a lease nor an answer was lost": """
        select r.saga_id from public.receipts r
        join webhookd.webhook_delivery_sagas s on s.id = r.saga_id and s.status = 'Completed'
        join (select saga_id, max(finished_at) as finished_at,
                     sum(lease_resets)
                     + count(*) filter (where status = 'Failed' and response_status is null) as excused
              from webhookd.webhook_delivery_jobs group by saga_id) j on j.saga_id = s.id
        where r.received_at > j.finished_at
        group by r.saga_id, j.excused having count(*) > j.excused
    """,
    "I7 Completed without a 2xx given by a receiver": """
        select s.id from webhookd.webhook_delivery_sagas s
        where s.status = 'Completed' and not exists (
            select from public.receipts r where r.saga_id = s.id and r.response_status between 200 and 299)
    """,
    "I8 dead letters and DeadLettered sagas are not one to one": """
        select s.id, d.id
        from (select * from webhookd.webhook_delivery_sagas where status = 'DeadLettered') s
        full join webhookd.dead_letters d on d.saga_id = s.id
        where s.id is null or d.id is null or d.final_error_code is distinct from s.final_error_code
    """,
    "I8 a snapshot is not the payload": """
        select d.id from webhookd.dead_letters d join webhookd.events e on e.id = d.event_id
        where d.payload_snapshot::text <> e.payload::text
    """,
    "I9 more receipts than applied results, lease resets and leases out": """
        select s.id
        from webhookd.webhook_delivery_sagas s
        join (select saga_id, count(*) as receipts from public.receipts group by saga_id) r
            on r.saga_id = s.id
        left join (select saga_id,
                          count(*) filter (where finished_at is not null or status = 'Leased')
                          + sum(lease_resets) as allowed
                   from webhookd.webhook_delivery_jobs group by saga_id) j on j.saga_id = s.id
        where r.receipts > coalesce(j.allowed, 0)
    """,
    "I10 a body is not the payload, or its signature does not verify": """
        select r.saga_id from public.receipts r
        join webhookd.webhook_delivery_sagas s on s.id = r.saga_id
        join webhookd.events e on e.id = s.event_id
        where r.body <> convert_to(e.payload::text, 'UTF8') or not r.verifies
    """,
    "I10 a payload is not what the client sent": """
        select c.event_id from public.client c join webhookd.events e on e.id = c.event_id
        where e.payload::text <> c.payload
    """,
    # A claim reads the address that the change log has since before the commit.
    "address: a request came to an address before its verification": """
        select r.saga_id, r.address from public.receipts r
        join webhookd.webhook_delivery_sagas s on s.id = r.saga_id
        where r.address is not null and not exists (
            select from webhookd.subscription_changes c
            where c.subscription_id = s.subscription_id and c.callback_url = r.address and c.verified
                and c.changed_at <= r.received_at)
    """,
    # A pair may have more: a resend of its first saga, and at the same time a resend of a resend.
    "resend: a saga has more than one live resend": """
        select resent_from from webhookd.webhook_delivery_sagas
        where resent_from is not null and status not in ('Completed', 'DeadLettered')
        group by resent_from having count(*) > 1
    """,
    "resend: a resent saga does not repeat a finished saga of its event and subscription": """
        select s.id from webhookd.webhook_delivery_sagas s
        left join webhookd.webhook_delivery_sagas o on o.id = s.resent_from
        left join webhookd.dead_letters d on d.saga_id = o.id
        where s.resent_from is not null
            and (o.status, o.event_id, o.subscription_id, d.id is not distinct from s.dead_letter_id)
                is distinct from (case when d.id is null then 'Completed' else 'DeadLettered'
                                  end::webhookd.saga_status, s.event_id, s.subscription_id, true)
    """,
    "replay: a delivery was resent twice": """
        select p.subscription_id, s.event_id from public.replays p
        join webhookd.webhook_delivery_sagas s
            on s.subscription_id = p.subscription_id and s.resent_from is not null
                and s.created_at between p.started_at and p.ended_at
        join webhookd.events e on e.id = s.event_id and e.created_at >= p.since and e.created_at < p.until
        group by p.subscription_id, p.started_at, s.event_id having count(*) > 1
    """,
    # A terminal saga never changes, so updated_at is its end: the start of the transaction that ended it,
    # which may have committed after the replay started. No transaction takes five seconds.
    "replay: a finished delivery was left out": """
        select p.subscription_id, e.id from public.replays p
        join webhookd.subscriptions u on u.id = p.subscription_id
        join webhookd.events e
            on e.event_type = u.event_type and e.created_at >= p.since and e.created_at < p.until
        left join (select event_id, subscription_id, max(updated_at) as ended_at
                   from webhookd.webhook_delivery_sagas group by event_id, subscription_id) s
            on s.event_id = e.id and s.subscription_id = u.id
        where p.include_all and coalesce(s.ended_at < p.started_at - interval '5 seconds', true)
            and not exists (select from public.removed_events r where r.id = e.id)
    """,
}
# Of the tables themselves, without what was removed.
RETENTION = {
    "retention: a delivery was removed before its end": """
        select r.id from public.removed_webhook_delivery_sagas r
        where r.status not in ('Completed', 'DeadLettered')
    """,
    "retention: an attempt was removed before its result was applied": """
        select r.id from public.removed_webhook_delivery_jobs r where r.result_applied_at is null
    """,
    "retention: an event was removed in part": """
        select r.id from (
            select r.event_id as id from public.removed_webhook_delivery_sagas r
            union all select r.event_id from public.removed_webhook_delivery_jobs r
            union all select r.event_id from public.removed_dead_letters r) r
        where exists (select from webhookd.events e where e.id = r.id)
        union all
        select s.id from (
            select s.event_id as id from webhookd.webhook_delivery_sagas s
            union all select j.event_id from webhookd.webhook_delivery_jobs j
            union all select d.event_id from webhookd.dead_letters d
            union all select l.event_id from webhookd.event_labels l
            union all select q.event_id from webhookd.event_routing_queue q
            union all select k.event_id from webhookd.retention_kept k) s
        where not exists (select from webhookd.events e where e.id = s.id)
    """,
    "retention: a removed subscription has statistics": """
        select t.subscription_id from (
            select subscription_id from webhookd.delivery_stats
            union all select subscription_id from webhookd.delivery_stats_hours) t
        where t.subscription_id <> 0
            and not exists (select from webhookd.subscriptions u where u.id = t.subscription_id)
    """,
    "retention: a row was removed twice": """
        select r.id from public.removed_events r group by 1 having count(*) > 1
    """,
}


async def all_queries(superuser: "Connection") -> dict[str, str]:
    """Return every promise with its query."""
    return {name: await with_removed(superuser, query) for name, query in INVARIANTS.items()} | RETENTION


async def broken_invariants(superuser: "Connection") -> list[str]:
    """Return the names of the promises that at least one row breaks."""
    queries = await all_queries(superuser)
    checks = " union all ".join(
        f"select {number} where exists ({query})" for number, query in enumerate(queries.values())
    )
    names = list(queries)
    return [names[row[0]] for row in await superuser.fetch(checks)]


async def broken_rows(
    superuser: "Connection", only: tuple[str, ...] = (), limit: int = 5
) -> "dict[str, list[Record]]":
    """Return the first rows that break each promise; `only` selects promises by the start of their names."""
    chosen = {
        name: query
        for name, query in (await all_queries(superuser)).items()
        if name.startswith(only or ("",))
    }
    found = {name: await superuser.fetch(f"{query} limit {limit}") for name, query in chosen.items()}
    return {name: rows for name, rows in found.items() if rows}
