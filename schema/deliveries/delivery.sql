-- owner: job_worker
-- Owns: leases and reports. A worker claims jobs, sends them and reports the results, which the orchestrator applies.

-- Chooses and locks jobs for claim_jobs if some candidates are of held, failing or full subscriptions. Internal.
create or replace function webhookd.choose_jobs(
    first_job_id bigint, wanted integer, subscription_slots integer, busy_subscription_ids bigint[], busy_slots integer[],
    full_ids bigint[])
returns bigint[]
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    candidate_ids bigint[];
    candidate_subscription_ids bigint[];
    failing_ids bigint[];
    probe_ids bigint[] := '{}';
begin
    with candidate as materialized (
        select j.id, j.subscription_id from webhook_delivery_jobs j
        where j.status = 'Pending' and j.lease_until is null and j.id >= first_job_id
            and j.subscription_id <> all(full_ids)
            and exists (select from subscriptions u where u.id = j.subscription_id and u.deliverable)
            and not exists (select from endpoint_health h
                            where h.subscription_id = j.subscription_id and h.failing_since is not null
                                and exists (select from webhook_delivery_sagas s
                                            join webhook_delivery_jobs l on l.id = s.job_id and (l.status = 'Leased') is true
                                            where s.subscription_id = h.subscription_id and s.status = 'InProgress'))
        order by j.lease_until, j.id limit wanted for update skip locked
    )
    select array_agg(c.id order by c.id), array_agg(c.subscription_id order by c.id),
           array(select h.subscription_id from endpoint_health h
                 where h.failing_since is not null and h.subscription_id in (select c.subscription_id from candidate c))
    into candidate_ids, candidate_subscription_ids, failing_ids
    from candidate c;

    -- A failing endpoint gets one request at a time over all instances. The worker that locks the subscription's oldest active
    -- job checks again, in a snapshot after the lock, that no request is in flight. Not an advisory lock, because any login
    -- could take and keep it.
    if failing_ids <> '{}' then
        probe_ids := array(
            select j.subscription_id from webhook_delivery_jobs j
            where j.id = any(array(select (select min(a.id) from webhook_delivery_sagas s
                                           join webhook_delivery_jobs a on a.id = s.job_id and a.status <> all('{Completed,Failed}')
                                           where s.subscription_id = f.id and s.status = 'InProgress')
                                   from unnest(failing_ids) as f (id)))
                and j.status <> all('{Completed,Failed}')
            for update skip locked);
        probe_ids := array(select p.id from unnest(probe_ids) as p (id)
                           where not exists (select from webhook_delivery_sagas s
                                             join webhook_delivery_jobs l on l.id = s.job_id and (l.status = 'Leased') is true
                                             where s.subscription_id = p.id and s.status = 'InProgress'));
    end if;

    return array(
        select r.id
        from (select c.id, c.subscription_id, row_number() over (partition by c.subscription_id order by c.id) as place
              from unnest(candidate_ids, candidate_subscription_ids) as c (id, subscription_id)) r
        left join unnest(busy_subscription_ids, busy_slots) as b (id, used) on b.id = r.subscription_id
        where r.place <= case when r.subscription_id <> all(failing_ids) then subscription_slots - coalesce(b.used, 0)
                              when r.subscription_id = any(probe_ids) then 1 else 0 end);
end
$$;


-- Leases up to `wanted` jobs, oldest first, for a worker, and returns what it needs to send them. Of each subscription at most the
-- worker's free slots (`subscription_slots` minus the requests in flight that `busy_*` names), one job over all instances while its
-- endpoint keeps failing, and none while it is held.
--
-- What is the same for several rows is returned once: URL, secrets (newest first) and headers in the first row of each subscription,
-- and the lease (its token, its end, the time of the claim and `resume_from`) in the first row of all. A lease token is new for each
-- claim, so no two leases of a job have the same.
-- `payload` is the body to send, in the subscription's format. It is null if it is not small: larger than 2 kB as stored (in TOAST), or past 64 kB in total. That fits into a socket
-- buffer; with more, the claim would wait for its reader before its commit. load_payloads returns those in a second statement.
-- If an event cannot be read (a damaged page), claim without payloads: loading them one by one finds it.
--
-- The candidates come from idx_job_status_lease. The order contains lease_until, which is null for all of them, because with
-- `order by id` alone the planner walks through the primary key and the history. It reads no more than `wanted` candidates, because
-- each is locked, which writes WAL: if some of them had no free slot, call again, with those subscriptions full.
-- Candidates of held, failing or full subscriptions are rare, so each subscription of a batch is checked once; only if there are
-- some, the candidates are chosen again by a query that checks each.
-- `resume_from` is the oldest job that was Pending and not held, also if this call leased it. Pass it as the next
-- `first_job_id`: a hint to skip dead and held rows. Pass 0 once every poll interval, because a job that was reset, released,
-- resumed or committed late has a smaller id.
create or replace function webhookd.claim_jobs(
    worker_id text, wanted integer, lease_seconds double precision, subscription_slots integer,
    busy_subscription_ids bigint[] default '{}', busy_slots integer[] default '{}', first_job_id bigint default 0,
    with_payloads boolean default true)
returns table (job_id bigint, saga_id bigint, subscription_id bigint, event_id bigint, attempt integer, lease_resets integer,
               event_type text, correlation_id text, payload text, callback_url text, secrets text[], headers jsonb,
               lease_token uuid, lease_until timestamptz, claimed_at timestamptz, resume_from bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    new_token constant uuid := gen_random_uuid();
    full_ids bigint[] := '{}';
    chosen_ids bigint[];
    chosen_subscription_ids bigint[];
    oldest_pending_id bigint;
    is_usual boolean;
begin
    perform require(length(claim_jobs.worker_id) between 1 and 200, 'worker_id must be 1 to 200 characters');
    perform require(wanted > 0, 'wanted must be at least 1');
    perform require(lease_seconds > 0 and lease_seconds <= 86400, 'lease_seconds must be above 0 and at most 86400');
    perform require(subscription_slots > 0, 'subscription_slots must be at least 1');
    perform require(cardinality(busy_subscription_ids) = cardinality(busy_slots),
                    'busy_slots must have one element for each of busy_subscription_ids');
    perform require(first_job_id is not null, 'first_job_id must not be null');
    perform require(with_payloads is not null, 'with_payloads must not be null');
    if busy_subscription_ids <> '{}' then
        perform require((select count(distinct b.id) = count(*) from unnest(busy_subscription_ids) as b (id)),
                        'busy_subscription_ids must be distinct and not null');
        full_ids := array(
            select b.id from unnest(busy_subscription_ids, busy_slots) as b (id, used) where b.used >= subscription_slots);
    end if;

    -- Also finds a job that another claim has locked and may not lease: the mark must not pass it. Without any, no row is locked.
    select j.id into oldest_pending_id from webhook_delivery_jobs j
    where j.status = 'Pending' and j.lease_until is null and j.id >= first_job_id
        and exists (select from subscriptions u where u.id = j.subscription_id and u.deliverable)
    order by j.lease_until, j.id limit 1;

    select array_agg(c.id), array_agg(c.subscription_id) into chosen_ids, chosen_subscription_ids
    from (select j.id, j.subscription_id from webhook_delivery_jobs j
          where j.status = 'Pending' and j.lease_until is null and j.id >= oldest_pending_id
              and j.subscription_id <> all(full_ids)
          order by j.lease_until, j.id limit wanted for update skip locked) c;
    if chosen_ids is null then
        return;
    end if;
    select coalesce(bool_and(u.id is not null and h.subscription_id is null
                             and c.jobs <= subscription_slots - coalesce(b.used, 0)), false)
    into is_usual
    from (select g.id, count(*) as jobs from unnest(chosen_subscription_ids) as g (id) group by g.id) c
    -- `offset 0` keeps each lookup by key; otherwise the planner reads all subscriptions.
    left join lateral (select k.id from subscriptions k where k.id = c.id and k.deliverable offset 0) u on true
    left join lateral (select k.subscription_id from endpoint_health k
                       where k.subscription_id = c.id and k.failing_since is not null offset 0) h on true
    left join unnest(busy_subscription_ids, busy_slots) as b (id, used) on b.id = c.id;
    if not is_usual then
        chosen_ids := choose_jobs(oldest_pending_id, wanted, subscription_slots, busy_subscription_ids, busy_slots, full_ids);
    end if;

    -- The address and `deliverable` are read in one snapshot, so no request goes to an address that was just changed. A
    -- subscription that was held since the candidates were chosen has no URL: release its jobs.
    return query
    with leased as (
        update webhook_delivery_jobs j
        set status = 'Leased', lease_until = now() + make_interval(secs => lease_seconds), lease_token = new_token,
            worker_id = claim_jobs.worker_id
        where j.id = any(chosen_ids)
        returning j.id, j.saga_id, j.subscription_id, j.event_id, j.attempt, j.lease_resets
    ), endpoint as materialized (
        select f.first_id, f.subscription_id, u.callback_url, u.format, c.headers, c.secrets
        from (select min(l.id) as first_id, l.subscription_id from leased l group by l.subscription_id) f
        cross join lateral (
            select k.callback_url, k.format from subscriptions k where k.id = f.subscription_id and k.deliverable offset 0) u
        cross join lateral (
            select k.headers,  -- without previous secrets no function call is needed
                   case when k.previous_secrets = '{}' then array[k.secret] else live_secrets(k) end as secrets
            from subscription_secrets k where k.subscription_id = f.subscription_id offset 0) c
    )
    select l.id, l.saga_id, l.subscription_id, l.event_id, l.attempt, l.lease_resets, l.event_type::text, l.correlation_id::text,
           case when l.running <= 65536 then l.payload end, p.callback_url::text, p.secrets, p.headers,
           case when l.place = 1 then new_token end, case when l.place = 1 then now() + make_interval(secs => lease_seconds) end,
           case when l.place = 1 then now() end, case when l.place = 1 then oldest_pending_id end
    from (select l.*, e.*, row_number() over (rows unbounded preceding) as place,
                 sum(octet_length(e.payload)) over (rows unbounded preceding) as running
          from leased l
          left join lateral (
              select k.event_type, k.correlation_id,
                     case when pg_column_size(k.payload) > 2048 then null
                          when l.subscription_id = any(array(select s.subscription_id from endpoint s where s.format = 'standard'))
                          then standard_body(k.event_type, k.created_at, k.payload::text)
                          else k.payload::text end as payload
              from events k where k.id = l.event_id and with_payloads offset 0) e on true) l
    left join endpoint p on p.first_id = l.id;
end
$$;
grant execute on function webhookd.claim_jobs(text, integer, double precision, integer, bigint[], integer[], bigint, boolean)
    to webhookd_app;


-- Returns the payloads of claimed jobs, for those that claim_jobs left out. Jobs that lost their lease are left out, and so are jobs,
-- except the first, whose payload would exceed 32 MiB in total: release those.
create or replace function webhookd.load_payloads(job_ids bigint[], lease_tokens uuid[])
returns table (job_id bigint, event_type text, correlation_id text, payload text)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
begin
    perform require(cardinality(job_ids) = cardinality(lease_tokens), 'lease_tokens must have one element for each job');

    return query
    select d.id, d.event_type, d.correlation_id,
           case when d.format = 'standard' then standard_body(d.event_type, d.created_at, d.payload) else d.payload end
    from (select j.id, e.event_type::text, e.correlation_id::text, e.payload::text, e.created_at, u.format,
                 sum(octet_length(e.payload::text)) over (order by j.id) as running, min(j.id) over () as first_id
          from unnest(job_ids, lease_tokens) as g (job_id, lease_token)
          -- `offset 0` keeps the lookups by key, also with a plan from when the tables were empty.
          cross join lateral (
              select k.id, k.event_id, k.subscription_id from webhook_delivery_jobs k
              where k.id = g.job_id and k.lease_token = g.lease_token and k.status <> all('{Completed,Failed}') offset 0) j
          cross join lateral (
              select k.event_type, k.correlation_id, k.payload, k.created_at from events k where k.id = j.event_id offset 0) e
          cross join lateral (select k.format from subscriptions k where k.id = j.subscription_id offset 0) u) d
    where d.running <= 33554432 or d.id = d.first_id;
end
$$;
grant execute on function webhookd.load_payloads(bigint[], uuid[]) to webhookd_app;


-- Stores the results of attempts and returns a verdict for each: `accepted`; `duplicate`, the same report again; `stale`, the
-- lease is lost; `unknown`, no such job. Only `accepted` changes anything. The token decides, not the clock: an expired lease
-- that is not reset yet still belongs to its holder.
--
-- Every result can be stored: otherwise the delivery would be repeated for ever. A 2xx status without an error code completes
-- the job. Everything else fails it; a missing error code is filled in, and long values are cut.
--
-- The rows are found by the primary key. The condition is not `status = 'Leased'`, because the planner would then walk an index
-- of active jobs (5,000 blocks instead of 500); a job with this token that is not finished is leased. `j.id = any(job_ids)` is
-- redundant, but without it a plan from when the table was empty read every job. planner.sql explains why nested loops are off.
create or replace function webhookd.report_results(
    job_ids bigint[], lease_tokens uuid[], response_statuses integer[], error_codes text[], durations_ms integer[],
    retry_after_seconds double precision[], response_excerpts bytea[])
returns table (job_id bigint, verdict webhookd.report_verdict)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    size constant integer := cardinality(job_ids);
    accepted_ids bigint[];
begin
    perform require(size > 0 and size = cardinality(lease_tokens) and size = cardinality(response_statuses)
                    and size = cardinality(error_codes) and size = cardinality(durations_ms)
                    and size = cardinality(report_results.retry_after_seconds) and size = cardinality(response_excerpts),
                    'the arrays must have one element for each job, and at least one');
    perform require((select count(distinct g.id) = count(*) from unnest(job_ids) as g (id)),
                    'job_ids must be distinct and not null');
    perform require(array_position(lease_tokens, null) is null, 'lease_tokens must not be null');

    with given as materialized (
        select g.*, g.error_code is null and coalesce(g.response_status between 200 and 299, false) as delivered
        from unnest(job_ids, lease_tokens, response_statuses, error_codes, durations_ms,
                    report_results.retry_after_seconds, response_excerpts)
            as g (job_id, lease_token, response_status, error_code, duration_ms, retry_after, response_excerpt)
        order by g.job_id  -- so that a repeated report in another order cannot deadlock
    ), accepted as (
        update webhook_delivery_jobs j
        set status = case when g.delivered then 'Completed' else 'Failed' end::job_status,
            response_status = g.response_status,
            error_code = case when not g.delivered then
                coalesce(nullif(left(g.error_code, 100), ''), 'HTTP_' || g.response_status, 'INTERNAL') end,
            duration_ms = case when g.duration_ms >= 0 then g.duration_ms end,
            retry_after_seconds = case when g.retry_after >= 0 and g.retry_after <> 'NaN'
                                       then least(g.retry_after, 31536000) end,
            response_excerpt = substring(g.response_excerpt for 4096),
            finished_at = now()
        from given g
        where j.id = g.job_id and j.lease_token = g.lease_token and j.status <> all('{Completed,Failed}')
            and j.id = any(job_ids)
        returning j.id
    )
    select coalesce(array_agg(a.id), '{}') into accepted_ids from accepted a;

    if cardinality(accepted_ids) = size then
        return query select g.job_id, 'accepted'::report_verdict from unnest(job_ids) as g (job_id);
        return;
    end if;
    -- A new snapshot, which sees the reset or the report that the update waited for.
    return query
    select g.job_id, case when g.job_id = any(accepted_ids) then 'accepted'
                          when j.id is null then 'unknown'
                          when j.lease_token = g.lease_token then 'duplicate'
                          else 'stale' end::report_verdict
    from unnest(job_ids, lease_tokens) as g (job_id, lease_token)
    left join (
        select k.id, k.lease_token from webhook_delivery_jobs k where k.id = any(job_ids)) j on j.id = g.job_id;
end
$$;
grant execute on function webhookd.report_results(
    bigint[], uuid[], integer[], text[], integer[], double precision[], bytea[]) to webhookd_app;


-- Returns unstarted jobs to the queue, for example at a shutdown; this is not a lease reset. Returns the ids of the released jobs.
create or replace function webhookd.release_jobs(job_ids bigint[], lease_tokens uuid[]) returns setof bigint
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform require(cardinality(job_ids) = cardinality(lease_tokens), 'lease_tokens must have one element for each job');
    return query
    update webhook_delivery_jobs j
    set status = 'Pending', lease_until = null, lease_token = null, worker_id = null
    from unnest(job_ids, lease_tokens) as g (job_id, lease_token)
    where j.id = g.job_id and j.lease_token = g.lease_token and j.status <> all('{Completed,Failed}')
    returning j.id;
end
$$;
grant execute on function webhookd.release_jobs(bigint[], uuid[]) to webhookd_app;
