-- owner: webhookd_owner
-- Owns: the backlog of each stage, for the metrics. Reads with the caller's privileges and changes nothing.

-- Returns a saga id that all sagas created at this time or later are at or above. Sagas have no index by time, which would cost each
-- delivery an index entry. `created_at` is the start of a transaction and the id is taken later, so ids are in the order of time
-- except for the length of a transaction, and a binary search along the primary key finds the place. A minute is longer than the
-- daemon's sessions let a transaction run. A saga of a longer transaction, made by hand, or of a clock that was set back can be missed.
create or replace function webhookd.first_saga_since(moment timestamptz) returns bigint
language plpgsql stable set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    low bigint := 0;
    high bigint := coalesce((select max(s.id) from webhook_delivery_sagas s), 0) + 1;
    middle bigint;
    found_id bigint;
    found_at timestamptz;
begin
    while low < high loop
        middle := (low + high) / 2;
        select s.id, s.created_at into found_id, found_at from webhook_delivery_sagas s where s.id >= middle order by s.id limit 1;
        if found_at < moment - interval '1 minute' then
            low := found_id + 1;
        else
            high := middle;
        end if;
    end loop;
    return low;
end
$$;
grant execute on function webhookd.first_saga_since(timestamptz) to webhookd_reader;

-- Returns for each stage the number of waiting rows, counted up to `counted_up_to`, and the time of the oldest. It never scans
-- a table: each count walks a partial index of unfinished rows, independent of the history, and stops at the bound. Each query
-- has the order of its index: without it, the planner may walk any index whose predicate fits.
--
-- routing        events that are not routed yet
-- orchestration  due sagas of subscriptions that are deliverable
-- retry          failed sagas whose next attempt is not due yet (PendingRetry), also of held subscriptions
-- held           due sagas of other subscriptions: they wait for an operator, not for a stage. (The API's `held` also includes
--                sagas that are not due yet, and those with a job that is not leased.)
-- delivery       jobs that can be claimed, of subscriptions that are deliverable
-- in_flight      leased jobs; the oldest is the earliest end of a lease, in the past if the lease has expired
-- results        results that are not applied yet
-- failing        endpoints that keep failing and get one request at a time
--
-- No stage counts the sagas of a deleted subscription, which are never sent, or its endpoint.
create or replace function webhookd.backlog(counted_up_to integer)
returns table (stage text, waiting bigint, oldest_at timestamptz)
language plpgsql stable set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if counted_up_to is null or counted_up_to < 1 then
        raise exception using errcode = 'WH400', message = 'counted_up_to must be at least 1';
    end if;

    return query
    select 'routing', (select count(*) from (select from event_routing_queue q limit counted_up_to) w),
           (select e.created_at from events e where e.id = (select min(q.event_id) from event_routing_queue q));

    -- A loose index scan, one step for each subscription, as in due_subscriptions.
    return query
    with recursive waiting (id, place) as (
        select 0::bigint, 0
        union all
        select least((select s.subscription_id from webhook_delivery_sagas s
                      where s.status = 'Pending' and s.subscription_id > w.id order by s.subscription_id limit 1),
                     (select s.subscription_id from webhook_delivery_sagas s
                      where s.status = 'PendingRetry' and s.subscription_id > w.id order by s.subscription_id limit 1)),
               w.place + 1
        from waiting w where w.id is not null and w.place < counted_up_to
    ), known as materialized (
        select u.id, u.deliverable as delivered from waiting w join subscriptions u on u.id = w.id
        where u.deleted_at is null
    )
    select case when g.delivered then 'orchestration' else 'held' end,
           (select count(*) from (
               select from known k cross join lateral (
                   select from (
                       select from webhook_delivery_sagas s
                       where s.subscription_id = k.id and s.status = 'Pending' and s.next_attempt_at <= now()
                       order by s.id limit counted_up_to) p
                   union all
                   select from (
                       select from webhook_delivery_sagas s
                       where s.subscription_id = k.id and s.status = 'PendingRetry' and s.next_attempt_at <= now()
                       order by s.next_attempt_at, s.id limit counted_up_to) r) d
               where k.delivered = g.delivered limit counted_up_to) c),
           (select min(o.next_attempt_at) from known k cross join lateral (
               select least(
                   (select s.next_attempt_at from webhook_delivery_sagas s
                    where s.subscription_id = k.id and s.status = 'Pending' and s.next_attempt_at <= now()
                    order by s.id limit 1),
                   (select s.next_attempt_at from webhook_delivery_sagas s
                    where s.subscription_id = k.id and s.status = 'PendingRetry' and s.next_attempt_at <= now()
                    order by s.next_attempt_at, s.id limit 1)) as next_attempt_at) o
            where k.delivered = g.delivered)
    from (values (true), (false)) as g (delivered);

    return query
    select 'retry', (select count(*) from (
               select s.subscription_id from webhook_delivery_sagas s
               where s.status = 'PendingRetry' and s.next_attempt_at > now()
               order by s.status, s.next_attempt_at limit counted_up_to) w
           -- Of the rows read, so that those of a deleted subscription cannot make it read more.
           where not exists (select from subscriptions u where u.id = w.subscription_id and u.deleted_at is not null)),
           null::timestamptz;

    return query
    select 'delivery', count(*), min(w.created_at) from (
        select j.created_at from webhook_delivery_jobs j
        where j.status = 'Pending' and j.lease_until is null
            and exists (select from subscriptions u where u.id = j.subscription_id and u.deliverable)
        order by j.lease_until, j.id limit counted_up_to) w;

    return query
    select 'in_flight', count(*), min(w.lease_until) from (
        select j.lease_until from webhook_delivery_jobs j
        where j.status = 'Leased' order by j.lease_until, j.id limit counted_up_to) w;

    return query
    select 'results', count(*), min(w.finished_at) from (
        select j.finished_at from webhook_delivery_jobs j
        where j.status in ('Completed', 'Failed') and j.result_applied_at is null order by j.id limit counted_up_to) w;

    return query
    select 'failing', count(*), min(w.failing_since) from (
        select h.failing_since from endpoint_health h
        where h.failing_since is not null
            and not exists (select from subscriptions u where u.id = h.subscription_id and u.deleted_at is not null)
        order by h.failing_since limit counted_up_to) w;
end
$$;
grant execute on function webhookd.backlog(integer) to webhookd_reader;
