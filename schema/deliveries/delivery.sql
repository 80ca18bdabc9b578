-- owner: job_worker
-- Owns: leases and reports. A worker claims jobs, sends them and reports the results, which the orchestrator applies.

-- Leases up to `wanted` jobs, oldest first, for a worker. Of each subscription at most the worker's free slots
-- (`subscription_slots` minus the requests in flight that `busy_*` names), one job over all instances while its endpoint keeps
-- failing, and none while it is held. load_deliveries returns the payloads in a second statement: a claim that returned
-- megabytes would block while sending them, before its commit.
--
-- The candidates come from idx_job_status_lease. The order contains lease_until, which is null for all of them, because with
-- `order by id` alone the planner walks through the primary key and the history. (A prototype took 1.7 ms for 100 jobs behind
-- twenty full subscriptions.) It reads no more than `wanted` candidates, because each is locked, which writes WAL: if some of
-- them had no free slot, call again, with those subscriptions full.
-- `resume_from` is the oldest job that was Pending and not held, also if this call leased it. Pass it as the next
-- `first_job_id`: a hint to skip dead and held rows. Pass 0 once every poll interval, because a job that was reset, released,
-- resumed or committed late has a smaller id.
create or replace function webhookd.claim_jobs(
    worker_id text, wanted integer, lease_seconds double precision, subscription_slots integer,
    busy_subscription_ids bigint[] default '{}', busy_slots integer[] default '{}', first_job_id bigint default 0)
returns table (job_id bigint, saga_id bigint, subscription_id bigint, event_id bigint, attempt integer, lease_token uuid,
               lease_until timestamptz, lease_resets integer, callback_url text, claimed_at timestamptz, resume_from bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    full_ids constant bigint[] := array(
        select b.id from unnest(busy_subscription_ids, busy_slots) as b (id, used) where b.used >= subscription_slots);
    candidate_ids bigint[];
    candidate_subscription_ids bigint[];
    failing_ids bigint[];
    probe_ids bigint[] := '{}';
    oldest_pending_id bigint;
begin
    perform require(length(claim_jobs.worker_id) between 1 and 200, 'worker_id must be 1 to 200 characters');
    perform require(wanted > 0, 'wanted must be at least 1');
    perform require(lease_seconds > 0 and lease_seconds <= 86400, 'lease_seconds must be above 0 and at most 86400');
    perform require(subscription_slots > 0, 'subscription_slots must be at least 1');
    perform require(cardinality(busy_subscription_ids) = cardinality(busy_slots),
                    'busy_slots must have one element for each of busy_subscription_ids');
    perform require((select count(distinct b.id) = count(*) from unnest(busy_subscription_ids) as b (id)),
                    'busy_subscription_ids must be distinct and not null');
    perform require(first_job_id is not null, 'first_job_id must not be null');

    select j.id into oldest_pending_id from webhook_delivery_jobs j
    where j.status = 'Pending' and j.lease_until is null and j.id >= first_job_id
        and exists (select from subscriptions u where u.id = j.subscription_id and u.active and u.verified)
    order by j.lease_until, j.id limit 1;

    with candidate as materialized (
        select j.id, j.subscription_id from webhook_delivery_jobs j
        where j.status = 'Pending' and j.lease_until is null and j.id >= oldest_pending_id
            and j.subscription_id <> all(full_ids)
            and exists (select from subscriptions u where u.id = j.subscription_id and u.active and u.verified)
            and not exists (select from endpoint_health h
                            where h.subscription_id = j.subscription_id and h.failing_since is not null
                                and exists (select from webhook_delivery_jobs l
                                            where l.subscription_id = h.subscription_id and l.finished_at is null
                                                and (l.status = 'Leased') is true))
        order by j.lease_until, j.id limit wanted for update skip locked
    )
    select array_agg(c.id order by c.id), array_agg(c.subscription_id order by c.id),
           array(select h.subscription_id from endpoint_health h
                 where h.failing_since is not null and h.subscription_id in (select c.subscription_id from candidate c))
    into candidate_ids, candidate_subscription_ids, failing_ids
    from candidate c;
    if candidate_ids is null then
        return;
    end if;

    -- A failing endpoint gets one request at a time over all instances. The worker that locks the subscription's oldest active
    -- job checks again, in a snapshot after the lock, that no request is in flight. Not an advisory lock, because any login
    -- could take and keep it.
    if failing_ids <> '{}' then
        probe_ids := array(
            select j.subscription_id from webhook_delivery_jobs j
            where j.id = any(array(select (select min(a.id) from webhook_delivery_jobs a
                                           where a.subscription_id = f.id and a.finished_at is null)
                                   from unnest(failing_ids) as f (id)))
                and j.status <> all('{Completed,Failed}')
            for update skip locked);
        probe_ids := array(select p.id from unnest(probe_ids) as p (id)
                           where not exists (select from webhook_delivery_jobs l
                                             where l.subscription_id = p.id and l.finished_at is null
                                                 and (l.status = 'Leased') is true));
    end if;

    -- The address and `active and verified` are read in one snapshot, so no request goes to an address that was just changed.
    return query
    with ranked as (
        select c.id, c.subscription_id, row_number() over (partition by c.subscription_id order by c.id) as place
        from unnest(candidate_ids, candidate_subscription_ids) as c (id, subscription_id)
    ), chosen as materialized (
        select r.id, u.callback_url
        from ranked r
        join subscriptions u on u.id = r.subscription_id and u.active and u.verified
        left join unnest(busy_subscription_ids, busy_slots) as b (id, used) on b.id = r.subscription_id
        where r.place <= case when r.subscription_id <> all(failing_ids) then subscription_slots - coalesce(b.used, 0)
                              when r.subscription_id = any(probe_ids) then 1 else 0 end
    ), leased as (
        update webhook_delivery_jobs j
        set status = 'Leased', lease_until = now() + make_interval(secs => lease_seconds), lease_token = gen_random_uuid(),
            worker_id = claim_jobs.worker_id
        where j.id = any(array(select c.id from chosen c))
        returning j.id, j.saga_id, j.subscription_id, j.lease_token, j.lease_until, j.lease_resets
    )
    select l.id, l.saga_id, l.subscription_id, s.event_id, s.attempt_count + 1, l.lease_token, l.lease_until,
           l.lease_resets, c.callback_url::text, now(), oldest_pending_id
    from leased l join chosen c on c.id = l.id join webhook_delivery_sagas s on s.id = l.saga_id;
end
$$;
grant execute on function webhookd.claim_jobs(text, integer, double precision, integer, bigint[], integer[], bigint)
    to webhookd_app;


-- Returns the payload, headers and signing secrets (newest first) of claimed jobs. Jobs that lost their lease are left out, and
-- so are jobs, except the first, whose payload would exceed 32 MiB in total: release those.
-- `small_only` is for use in the claiming statement: only payloads of at most 2 kB as stored (not in TOAST), and 64 kB in total.
-- That fits into a socket buffer; with more, the claim would wait for its reader before its commit.
create or replace function webhookd.load_deliveries(job_ids bigint[], lease_tokens uuid[], small_only boolean default false)
returns table (job_id bigint, event_type text, payload text, correlation_id text, secrets text[], headers jsonb)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
begin
    perform require(cardinality(job_ids) = cardinality(lease_tokens), 'lease_tokens must have one element for each job');
    perform require(small_only is not null, 'small_only must not be null');

    begin
        return query
        select d.id, d.event_type, d.payload, d.correlation_id, d.secrets, d.headers
        from (select j.id, e.event_type::text, e.payload::text, e.correlation_id::text, c.headers,
                     -- Without previous secrets no function call is needed, which is expensive for each row.
                     case when c.previous_secrets = '{}' then array[c.secret] else live_secrets(c) end as secrets,
                     sum(octet_length(e.payload::text)) over (order by j.id) as running, min(j.id) over () as first_id
              from unnest(job_ids, lease_tokens) as g (job_id, lease_token)
              -- `offset 0` keeps the lookup by key, also with a plan from when the table was empty.
              cross join lateral (
                  select k.id, k.saga_id, k.subscription_id from webhook_delivery_jobs k
                  where k.id = g.job_id and k.lease_token = g.lease_token and k.status <> all('{Completed,Failed}') offset 0) j
              join webhook_delivery_sagas s on s.id = j.saga_id
              join events e on e.id = s.event_id and (not small_only or pg_column_size(e.payload) <= 2048)
              join subscription_secrets c on c.subscription_id = j.subscription_id) d
        where d.running <= case when small_only then 65536 else 33554432 end or (d.id = d.first_id and not small_only);
    exception when others then
        -- An unreadable row must not stop the claim: loading the jobs one by one finds it.
        if not small_only or not is_row_error(sqlstate) then
            raise;
        end if;
    end;
end
$$;
grant execute on function webhookd.load_deliveries(bigint[], uuid[], boolean) to webhookd_app;


-- Stores the results of attempts and returns a verdict for each: `accepted`; `duplicate`, the same report again; `stale`, the
-- lease is lost; `unknown`, no such job. Only `accepted` changes anything. The token decides, not the clock: an expired lease
-- that is not reset yet still belongs to its holder.
--
-- Every result can be stored: otherwise the delivery would be repeated for ever. A 2xx status without an error code completes
-- the job. Everything else fails it; a missing error code is filled in, and long values are cut.
--
-- The rows are found by the primary key. The condition is neither `status = 'Leased'` nor `finished_at is null`, because the
-- planner would then walk an index of active jobs (5,000 blocks instead of 500); a job with this token that is not finished is
-- leased. `j.id = any(job_ids)` is redundant, but without it a plan from when the table was empty read every job. planner.sql
-- explains why nested loops are off.
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
