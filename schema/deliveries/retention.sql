-- owner: retention_keeper
-- Owns: the removal of events and of everything that belongs to them, by retention and by erasure. No other role can delete an event, a
-- saga, a job or a dead letter, also not the tables' owner (triggers.sql).
--
-- An event is removed completely, in one transaction, and only when it is finished. The steps of a batch:
--   1. Find finished events without a lock.
--   2. Lock them, FOR UPDATE SKIP LOCKED: an event that another transaction uses is left for later, and nothing waits for the sweep
--      but a resend, a requeue or a replay of one of these very events.
--   3. Look again, in a new statement and so with a new snapshot. A resend locks its event first (lock_events): either it committed
--      before step 2, and its saga is seen now, or it waits and then finds no event.
--   4. Delete.
-- The steps need READ COMMITTED, where each statement has its own snapshot.

-- Returns those of the given events that are finished: routed, without jobs of the job queue, and all deliveries Completed,
-- DeadLettered or abandoned. A delivery is abandoned if its subscription was deleted before a worker got it: it can never end.
-- One statement, because an event that is being routed is in the queue or has its sagas, in every snapshot.
create or replace function webhookd.finished_events(event_ids bigint[]) returns bigint[]
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    return array(
        select e.id from unnest(event_ids) as e (id)
        where not exists (select from event_routing_queue q where q.event_id = e.id offset 0)
            and not exists (select from job_event_queue q where q.event_id = e.id offset 0)
            and not exists (select from job_queue q where q.causation_event_id = e.id offset 0)
            and not exists (
                select from (
                    select s.subscription_id, s.status, s.job_id from webhook_delivery_sagas s
                    where s.event_id = e.id and s.resent_from is null
                    union all
                    select s.subscription_id, s.status, s.job_id from webhook_delivery_sagas s
                    where s.event_id = e.id and s.resent_from is not null) s
                where (s.status in ('Pending', 'InProgress', 'PendingRetry')) is true
                    and not (exists (select from subscriptions u where u.id = s.subscription_id and u.deleted_at is not null)
                             and (s.status <> 'InProgress'
                                  or exists (select from webhook_delivery_jobs j where j.id = s.job_id and (j.status = 'Pending') is true)))));
end
$$;

-- Locks the events, and their unfinished sagas and jobs, without waiting. Returns those that are locked completely and finished.
create or replace function webhookd.lock_finished_events(event_ids bigint[]) returns bigint[]
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    max_deliveries constant integer := 10000;
    locked_ids bigint[];
    open_saga_ids bigint[];
    locked_saga_ids bigint[];
    locked_job_ids bigint[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'WH400', message = 'retention needs transactions with the isolation level read committed';
    end if;
    locked_ids := array(select e.id from events e where e.id = any(event_ids) order by e.id for update skip locked);
    open_saga_ids := unfinished_sagas(locked_ids);
    if open_saga_ids <> '{}' then
        -- Abandoned ones: a transaction that read their subscription before it was deleted may still start or claim one.
        locked_saga_ids := array(select s.id from webhook_delivery_sagas s where s.id = any(open_saga_ids) for update skip locked);
        locked_job_ids := array(
            select j.id from webhook_delivery_jobs j
            where j.id = any(array(select s.job_id from webhook_delivery_sagas s where s.id = any(locked_saga_ids)))
            for update skip locked);
        locked_ids := array(
            select l.id from unnest(locked_ids) as l (id)
            where not exists (
                select from webhook_delivery_sagas s
                where s.id = any(open_saga_ids) and s.event_id = l.id
                    and (s.id <> all(locked_saga_ids) or s.job_id is not null and s.job_id <> all(locked_job_ids))));
    end if;
    locked_ids := finished_events(locked_ids);
    -- Not more deliveries than these in a transaction, but always the first event: the rest comes later.
    if (select count(*) from webhook_delivery_sagas s where s.event_id = any(locked_ids) and s.resent_from is null) > max_deliveries then
        locked_ids := array(
            select c.event_id
            from (select g.event_id, g.deliveries, sum(g.deliveries) over (order by g.event_id) as running
                  from (select l.id as event_id, (select count(*) from webhook_delivery_sagas s
                                                  where s.event_id = l.id and s.resent_from is null) as deliveries
                        from unnest(locked_ids) as l (id)) g) c
            where c.running <= max_deliveries or c.running = c.deliveries);
    end if;
    return locked_ids;
end
$$;

create or replace function webhookd.unfinished_sagas(event_ids bigint[]) returns bigint[]
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    return array(
        select s.id from (
            select s.id, s.status from webhook_delivery_sagas s where s.event_id = any(event_ids) and s.resent_from is null
            union all
            select s.id, s.status from webhook_delivery_sagas s where s.event_id = any(event_ids) and s.resent_from is not null) s
        where (s.status in ('Pending', 'InProgress', 'PendingRetry')) is true);
end
$$;

-- Deletes the sagas with their jobs and dead letters. They must be locked, or finished and of locked events. One statement for the
-- dead letters and the sagas, which refer to each other: PostgreSQL checks foreign keys at its end.
create or replace function webhookd.remove_sagas(
    saga_ids bigint[], out deliveries integer, out attempts integer, out dead_letters integer)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    delete from webhook_delivery_jobs j where j.saga_id = any(saga_ids);
    get diagnostics attempts = row_count;
    with buried as (
        delete from dead_letters d where d.saga_id = any(saga_ids) returning 1
    ), sent as (
        delete from webhook_delivery_sagas s where s.id = any(saga_ids) returning 1
    )
    select (select count(*) from sent), (select count(*) from buried) into deliveries, dead_letters;
end
$$;

-- Deletes the events, which must be locked and finished, with everything that belongs to them.
create or replace function webhookd.remove_events(
    event_ids bigint[], out events integer, out deliveries integer, out attempts integer, out dead_letters integer)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    select r.deliveries, r.attempts, r.dead_letters into deliveries, attempts, dead_letters
    from remove_sagas(array(
        select s.id from webhook_delivery_sagas s where s.event_id = any(event_ids) and s.resent_from is null
        union all
        select s.id from webhook_delivery_sagas s where s.event_id = any(event_ids) and s.resent_from is not null)) r;
    -- Each label by its primary key: as a join, a plan from when the tables were empty walked through all labels. Labels never change, so
    -- their rows stay where they are.
    delete from event_labels l
    where l.ctid = any(array(
        select k.ctid
        from unnest(event_ids) as g (id)
        cross join lateral (select e.id, e.created_at, e.labels from events e where e.id = g.id and e.labels is not null offset 0) e
        cross join lateral jsonb_each_text(e.labels) as n (name, value)
        cross join lateral (select k.ctid from event_labels k
                            where k.name = n.name and k.value = n.value and k.created_at = e.created_at and k.event_id = e.id
                            offset 0) k));
    delete from retention_kept k where k.kind = any('{events,payloads}') and k.event_id = any(event_ids);
    delete from events e where e.id = any(event_ids);
    get diagnostics events = row_count;
end
$$;


-- Takes the turn, or extends it, so that one instance sweeps at a time. Returns false if another has it. Zero seconds give it back.
create or replace function webhookd.take_retention_turn(holder text, seconds double precision) returns boolean
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(holder is not null, 'holder must not be null');
    perform require(seconds between 0 and 3600, 'seconds must be 0 to 3600');
    if seconds = 0 then
        -- The cancelled batch of a caller that stops may still have the row.
        perform from retention_turn for update;
    end if;
    perform from retention_turn t where t.holder = holder or t.held_until <= clock_timestamp() for update skip locked;
    if not found then
        return false;
    end if;
    update retention_turn t set holder = holder, held_until = clock_timestamp() + make_interval(secs => seconds);
    return true;
end
$$;
grant execute on function webhookd.take_retention_turn(text, double precision) to webhookd_app;


-- The events of a batch: which can be removed, and when to look at the others again. With `kept`, those of retention_kept: that are due,
-- or, after an event, all of them. Otherwise the next ones in the order of ids, up to the first that is not old enough. An event with a dead letter
-- is kept, with its payload, until the period of dead letters is over; 0 is forever. Internal; reads only.
create or replace function webhookd.examine_events(
    kind text, batch_size integer, period_days double precision, dead_letters_days double precision, kept boolean, after_id bigint,
    out examined_ids bigint[], out expired_ids bigint[], out kept_ids bigint[], out look_again_at timestamptz[],
    out last_id bigint, out more boolean)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    before constant timestamptz := now() - make_interval(secs => period_days * 86400);
    -- After a tenth of the period, but not later than in an hour.
    later constant timestamptz := now() + least(interval '1 hour', make_interval(secs => period_days * 8640));
    finished_ids bigint[];
begin
    if kept and after_id is null then
        examined_ids := array(
            select k.event_id from retention_kept k
            where k.kind = kind and k.look_again_at <= now() order by k.look_again_at, k.event_id limit batch_size);
    elsif kept then
        examined_ids := array(
            select k.event_id from retention_kept k
            where k.kind = kind and k.event_id > after_id order by k.event_id limit batch_size);
    else
        select coalesce(array_agg(e.id) filter (where e.created_at < before and e.id < coalesce(e.first_young, e.id + 1)), '{}')
        into examined_ids
        from (select e.id, e.created_at, min(e.id) filter (where e.created_at >= before) over () as first_young
              from (select e.id, e.created_at from events e where e.id > after_id order by e.id limit batch_size) e) e;
    end if;
    last_id := coalesce(examined_ids[cardinality(examined_ids)], after_id);
    more := cardinality(examined_ids) = batch_size;
    finished_ids := finished_events(examined_ids);
    select coalesce(array_agg(x.id) filter (where x.is_expired), '{}'), coalesce(array_agg(x.id) filter (where not x.is_expired), '{}'),
           coalesce(array_agg(x.look_again_at) filter (where not x.is_expired), '{}')
    into expired_ids, kept_ids, look_again_at
    from (
        select f.id, e.created_at < before and (d.failed_at is null or d.kept_until <= now()) as is_expired,
               -- Young only if the period was made longer since it was kept.
               case when e.created_at < before then least(d.kept_until, now() + interval '1 day')
                    else e.created_at + (now() - before) end as look_again_at
        from unnest(finished_ids) as f (id)
        cross join lateral (select k.created_at from events k where k.id = f.id offset 0) e
        left join lateral (
            select max(l.failed_at) as failed_at,
                   case when dead_letters_days = 0 then 'infinity'
                        else max(l.failed_at) + make_interval(secs => dead_letters_days * 86400) end as kept_until
            from (select k.failed_at from dead_letters k where k.event_id = f.id offset 0) l) d on true
        union all
        select u.id, false, later from (select unnest(examined_ids) except select unnest(finished_ids)) as u (id)) x;
end
$$;

-- Sweeps one batch: of the kind `events`, deletes finished events that are older than `period_days`; of the kind `payloads`, replaces
-- their payloads by JSON null and keeps the rest. Call it again while `more`. Needs the turn of `holder`: otherwise `refused`.
create or replace function webhookd.sweep_events(
    holder text, kind text, batch_size integer, period_days double precision, dead_letters_days double precision)
returns table (refused boolean, examined integer, events integer, deliveries integer, attempts integer, dead_letters integer,
               payloads integer, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    is_kept boolean;
    progress retention_progress;
    batch record;
    removed record;
    removed_ids bigint[];
begin
    perform check_sweep(kind, batch_size, period_days, dead_letters_days);
    refused := not take_retention_turn(holder, 60);
    select 0, 0, 0, 0, 0, 0, false into examined, events, deliveries, attempts, dead_letters, payloads, more;
    if refused then
        return next;
        return;
    end if;
    select * into progress from retention_progress p where p.kind = kind for no key update;
    -- Kept events and new ones in turn, so that neither waits for the end of the other.
    if (progress.period_days, progress.dead_letters_days) is distinct from (period_days, dead_letters_days) then
        progress.recheck_after_id := 0;
    end if;
    is_kept := progress.kept_is_next;
    for tries in 1..2 loop
        select * into batch from examine_events(kind, batch_size, period_days, dead_letters_days, is_kept,
                                                case when is_kept then progress.recheck_after_id else progress.after_event_id end);
        if is_kept and not batch.more then
            progress.recheck_after_id := null;
        elsif is_kept and progress.recheck_after_id is not null then
            progress.recheck_after_id := batch.last_id;
        end if;
        exit when batch.examined_ids <> '{}' or tries = 2;
        is_kept := not is_kept;
    end loop;
    removed_ids := lock_finished_events(batch.expired_ids);
    examined := cardinality(batch.examined_ids);
    if kind = 'events' then
        select * into removed from remove_events(removed_ids);
        events := removed.events;
        deliveries := removed.deliveries;
        attempts := removed.attempts;
        dead_letters := removed.dead_letters;
    else
        update events e set payload = 'null', payload_removed_at = now()
        where e.id = any(removed_ids) and e.payload_removed_at is null;
        get diagnostics payloads = row_count;
        update dead_letters d set payload_snapshot = 'null' where d.event_id = any(removed_ids);
        delete from retention_kept k where k.kind = kind and k.event_id = any(removed_ids);
    end if;

    -- What is not finished, and what was in use just now.
    insert into retention_kept as k (kind, event_id, look_again_at)
    select kind, c.id, c.look_again_at from unnest(batch.kept_ids, batch.look_again_at) as c (id, look_again_at)
    union all
    select kind, b.id, now() + least(interval '1 minute', make_interval(secs => period_days * 8640))
    from (select unnest(batch.expired_ids) except select unnest(removed_ids)) as b (id)
    on conflict on constraint retention_kept_pkey do update set look_again_at = excluded.look_again_at;

    more := batch.examined_ids <> '{}';
    update retention_progress p
    set kept_is_next = not is_kept, recheck_after_id = progress.recheck_after_id, period_days = sweep_events.period_days,
        dead_letters_days = sweep_events.dead_letters_days,
        after_event_id = case when is_kept then p.after_event_id else batch.last_id end,
        swept_before = case when is_kept or batch.more then p.swept_before else now() - make_interval(secs => period_days * 86400) end,
        pass_finished_at = case when is_kept or batch.more then p.pass_finished_at else now() end
    where p.kind = kind;
    return next;
end
$$;
grant execute on function webhookd.sweep_events(text, text, integer, double precision, double precision) to webhookd_app;

-- Makes the next sweeps look at all kept events again, also at those that are not due.
create or replace function webhookd.recheck_kept_events() returns void
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    update retention_progress set recheck_after_id = 0
$$;
grant execute on function webhookd.recheck_kept_events() to webhookd_app;

-- Counts what sweep_events would remove, a batch at a time: first with `kept`, then without it; each from `after_id` 0, and then from
-- `last_id` on while `more`.
create or replace function webhookd.preview_sweep(
    kind text, batch_size integer, period_days double precision, dead_letters_days double precision, kept boolean, after_id bigint)
returns table (examined integer, expired integer, last_id bigint, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    batch record;
begin
    perform check_sweep(kind, batch_size, period_days, dead_letters_days);
    perform require(kept is not null and after_id >= 0, 'kept must not be null, and after_id must be 0 or more');
    if not kept then
        after_id := greatest(after_id, (select p.after_event_id from retention_progress p where p.kind = kind));
    end if;
    select * into batch from examine_events(kind, batch_size, period_days, dead_letters_days, kept, after_id);
    return query select cardinality(batch.examined_ids), cardinality(batch.expired_ids), batch.last_id, batch.more;
end
$$;
grant execute on function webhookd.preview_sweep(text, integer, double precision, double precision, boolean, bigint) to webhookd_app;

create or replace function webhookd.check_sweep(
    kind text, batch_size integer, period_days double precision, dead_letters_days double precision) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform require(kind in ('events', 'payloads'), 'kind must be events or payloads');
    perform require(batch_size between 1 and 100000, 'batch_size must be 1 to 100000');
    perform require(period_days > 0 and period_days <= 36500, 'period_days must be above 0 and at most 36500');
    perform require(dead_letters_days between 0 and 36500, 'dead_letters_days must be 0 to 36500');
end
$$;


-- Deletes the rows of subscriptions that were deleted before the period and have no deliveries any more.
create or replace function webhookd.sweep_subscriptions(holder text, batch_size integer, period_days double precision)
returns table (refused boolean, subscriptions integer, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    old_ids bigint[];
begin
    perform check_sweep('events', batch_size, period_days, 0);
    refused := not take_retention_turn(holder, 60);
    subscriptions := 0;
    more := false;
    if not refused then
        old_ids := array(
            select u.id from subscriptions u
            where u.deleted_at is not null and u.deleted_at < now() - make_interval(secs => period_days * 86400)
                and not has_sagas(u.id)
            order by u.deleted_at, u.id limit batch_size for update skip locked);
        -- The statistics of many endpoints are too many for one call: first those, then the endpoints.
        more := remove_stats(old_ids, batch_size * 50);
        if not more then
            subscriptions := remove_subscriptions(old_ids);
            more := cardinality(old_ids) = batch_size;
        end if;
    end if;
    return next;
end
$$;
grant execute on function webhookd.sweep_subscriptions(text, integer, double precision) to webhookd_app;

-- Adds up statistics by minute into those by hour, a batch of them, and deletes days that are older than the period (0: none). In one
-- transaction, so that the numbers are always in one of the two. Minutes are kept for at least four hours: the API shows three
-- hours by minute, and no transaction writes to a minute that is so old. `merged` counts rows by minute, `stats` deleted rows.
create or replace function webhookd.sweep_stats(holder text, batch_size integer, period_days double precision)
returns table (refused boolean, merged integer, stats integer, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(batch_size between 1 and 100000, 'batch_size must be 1 to 100000');
    perform require(period_days between 0 and 36500, 'period_days must be 0 to 36500');
    refused := not take_retention_turn(holder, 60);
    merged := 0;
    stats := 0;
    more := false;
    if refused then
        return next;
        return;
    end if;
    with old as materialized (
        select t.subscription_id, t.minute, t.writer from delivery_stats t
        where date_bin('1 hour', t.minute, '2000-01-01 00:00:00+00') <= now() - interval '5 hours'
        order by date_bin('1 hour', t.minute, '2000-01-01 00:00:00+00') limit batch_size
    ), taken as (
        delete from delivery_stats t using old o
        where t.subscription_id = o.subscription_id and t.minute = o.minute and t.writer = o.writer
        returning t.*
    ), added as (
        insert into delivery_stats_hours as h (subscription_id, hour, delivered, failed, dead_lettered, durations)
        select t.subscription_id, date_bin('1 hour', t.minute, '2000-01-01 00:00:00+00'), sum(t.delivered), sum(t.failed), sum(t.dead_lettered),
               array[
                     sum(t.durations[1]), sum(t.durations[2]), sum(t.durations[3]), sum(t.durations[4]), sum(t.durations[5]),
                     sum(t.durations[6]), sum(t.durations[7]), sum(t.durations[8]), sum(t.durations[9]), sum(t.durations[10]),
                     sum(t.durations[11]), sum(t.durations[12])]
        from taken t group by 1, 2
        on conflict on constraint delivery_stats_hours_pkey do update set
            delivered = h.delivered + excluded.delivered, failed = h.failed + excluded.failed,
            dead_lettered = h.dead_lettered + excluded.dead_lettered,
            durations = array[
                h.durations[1] + excluded.durations[1], h.durations[2] + excluded.durations[2],
                h.durations[3] + excluded.durations[3], h.durations[4] + excluded.durations[4],
                h.durations[5] + excluded.durations[5], h.durations[6] + excluded.durations[6],
                h.durations[7] + excluded.durations[7], h.durations[8] + excluded.durations[8],
                h.durations[9] + excluded.durations[9], h.durations[10] + excluded.durations[10],
                h.durations[11] + excluded.durations[11], h.durations[12] + excluded.durations[12]]
    )
    select count(*) into merged from taken;
    if period_days > 0 then
        with old as materialized (
            select t.subscription_id, t.hour from delivery_stats_hours t
            where date_bin('1 day', t.hour, '2000-01-01 00:00:00+00') <= now() - make_interval(secs => (period_days + 1) * 86400)
            order by date_bin('1 day', t.hour, '2000-01-01 00:00:00+00') limit batch_size
        )
        delete from delivery_stats_hours t using old o where t.subscription_id = o.subscription_id and t.hour = o.hour;
        get diagnostics stats = row_count;
    end if;
    more := greatest(merged, stats) = batch_size;
    return next;
end
$$;
grant execute on function webhookd.sweep_stats(text, integer, double precision) to webhookd_app;

-- Removes some of the statistics of subscriptions; returns whether there may be more.
create or replace function webhookd.remove_stats(subscription_ids bigint[], batch_size integer) returns boolean
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    minutes integer;
    hours integer;
begin
    delete from delivery_stats t where t.ctid = any(array(
        select k.ctid from delivery_stats k where k.subscription_id = any(subscription_ids) limit batch_size));
    get diagnostics minutes = row_count;
    delete from delivery_stats_hours t where t.ctid = any(array(
        select k.ctid from delivery_stats_hours k where k.subscription_id = any(subscription_ids) limit batch_size));
    get diagnostics hours = row_count;
    return greatest(minutes, hours) = batch_size;
end
$$;

create or replace function webhookd.remove_subscriptions(subscription_ids bigint[]) returns integer
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    removed integer;
begin
    delete from subscription_types t where t.subscription_id = any(subscription_ids);
    delete from subscription_rates t where t.subscription_id = any(subscription_ids);
    delete from subscription_secrets t where t.subscription_id = any(subscription_ids);
    delete from subscription_changes t where t.subscription_id = any(subscription_ids);
    delete from endpoint_health t where t.subscription_id = any(subscription_ids);
    delete from delivery_stats t where t.subscription_id = any(subscription_ids);
    delete from delivery_stats_hours t where t.subscription_id = any(subscription_ids);
    delete from subscriptions u where u.id = any(subscription_ids);
    get diagnostics removed = row_count;
    return removed;
end
$$;


-- Erasure --------------------------------------------------------------------------------------------------------------

-- Begins the erasure of a tenant: nothing of it is routed or sent any more, and its secrets and headers are gone at once. The rest is
-- removed by `erase`, in the background. Returns the running erasure if there is one.
create or replace function webhookd.erase_tenant(tenant text, requested_by text) returns bigint
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    erasure_id bigint;
begin
    perform require(tenant is not null, 'tenant must not be null');
    perform require(length(requested_by) between 1 and 200, 'requested_by must be 1 to 200 characters');
    if not exists (select from tenants t where t.tenant = tenant)
        and not exists (select from events e where e.tenant <> '' and e.tenant = tenant)
    then
        raise exception using errcode = 'WH404', message = format('tenant %s does not exist', quote_literal(tenant));
    end if;
    -- Its row is locked by new subscriptions too: they come before, or see the erasure.
    loop
        insert into tenants (tenant) values (tenant) on conflict do nothing;
        perform from tenants t where t.tenant = tenant for update;
        exit when found;  -- otherwise another erasure of the tenant has just ended
    end loop;
    select e.id into erasure_id from erasures e where e.tenant = tenant and e.finished_at is null and e.subscription_id is null;
    if not found then
        insert into erasures (tenant, requested_by) values (tenant, requested_by) returning id into erasure_id;
        -- Locked first, in a statement of its own: a concurrent delete is over then.
        perform from subscriptions u where u.tenant <> '' and u.tenant = tenant and u.deleted_at is null
        order by u.id for no key update;
        perform delete_subscription(u.id) from subscriptions u
        where u.tenant <> '' and u.tenant = tenant and u.deleted_at is null;
        delete from console_links l where l.tenant <> '' and l.tenant = tenant;
    end if;
    return erasure_id;
end
$$;
grant execute on function webhookd.erase_tenant(text, text) to webhookd_app;

-- Begins the erasure of a subscription, and deletes it first if needed. Its events stay: they are not its own.
create or replace function webhookd.erase_subscription(subscription_id bigint, requested_by text, only_tenant text default null)
returns bigint
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    erasure_id bigint;
    found_row subscriptions;
begin
    perform require(subscription_id is not null, 'subscription_id must not be null');
    perform require(length(requested_by) between 1 and 200, 'requested_by must be 1 to 200 characters');
    select * into found_row from subscriptions u
    where u.id = subscription_id and (only_tenant is null or u.tenant = only_tenant) for no key update;
    if not found then
        raise exception using errcode = 'WH404', message = format('subscription %s does not exist', subscription_id);
    end if;
    if found_row.deleted_at is null then
        perform delete_subscription(subscription_id);
    end if;
    select e.id into erasure_id from erasures e where e.subscription_id = subscription_id and e.finished_at is null;
    if not found then
        insert into erasures (tenant, subscription_id, requested_by)
        values (nullif(found_row.tenant, ''), subscription_id, requested_by) returning id into erasure_id;
    end if;
    return erasure_id;
end
$$;
grant execute on function webhookd.erase_subscription(bigint, text, text) to webhookd_app;

-- Continues an erasure with one batch: the one that was not tried for longest, up to the end of a walk over its rows. Call it again
-- while `more`, with the same `since`, the time of the first call: then each erasure is tried once. An erasure that is not finished then
-- waits: for a request in flight, a job of the job queue, or a transaction from before its request. Needs the turn of `holder`:
-- otherwise `refused`.
create or replace function webhookd.erase(holder text, batch_size integer, since timestamptz)
returns table (refused boolean, erasure_id bigint, finished boolean, removed integer, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    erasure erasures;
    counts record;
begin
    perform require(batch_size between 1 and 100000, 'batch_size must be 1 to 100000');
    perform require(since is not null, 'since must not be null');
    refused := not take_retention_turn(holder, 60);
    finished := false;
    removed := 0;
    more := false;
    if not refused then
        select * into erasure from erasures e where e.finished_at is null and e.tried_at < since
        order by e.tried_at, e.id limit 1 for update;
    end if;
    if erasure.id is null then
        return next;
        return;
    end if;
    erasure_id := erasure.id;
    if erasure.after_id = 0 then
        -- A transaction from before the request may still publish, or route to a subscription of it. It has an id by then; one that
        -- gets its id later publishes after the request.
        erasure.is_settled := pg_snapshot_xmin(pg_current_snapshot()) > erasure.requested_xid;
        erasure.last_event_id := coalesce((select max(e.id) from events e), 0);
        erasure.left_out := false;
    end if;
    if erasure.subscription_id is not null then
        select * into counts from erase_subscription_batch(erasure, batch_size);
    else
        select * into counts from erase_tenant_batch(erasure, batch_size);
    end if;
    removed := counts.events + counts.deliveries + counts.jobs;
    update erasures e
    set events = e.events + counts.events, deliveries = e.deliveries + counts.deliveries, attempts = e.attempts + counts.attempts,
        dead_letters = e.dead_letters + counts.dead_letters, jobs = e.jobs + counts.jobs,
        after_created_at = case when counts.is_end then '-infinity' else counts.last_created_at end,
        after_id = case when counts.is_end then 0 else counts.last_id end,
        left_out = erasure.left_out or counts.left_out, is_settled = erasure.is_settled, last_event_id = erasure.last_event_id,
        tried_at = case when counts.is_end then clock_timestamp() else e.tried_at end
    where e.id = erasure.id
    returning e.* into erasure;
    finished := counts.is_end and not erasure.left_out and erasure.is_settled and can_finish(erasure);
    if finished and remove_stats(erased_subscriptions(erasure), batch_size * 50) then
        -- The statistics of many endpoints are too many for one call. The next call continues with this erasure.
        finished := false;
        update erasures e set tried_at = '-infinity' where e.id = erasure.id;
    elsif finished then
        perform finish_erasure(erasure);
    end if;
    more := exists (select from erasures e where e.finished_at is null and e.tried_at < since);
    return next;
end
$$;
grant execute on function webhookd.erase(text, integer, timestamptz) to webhookd_app;

-- The events of the job queue about jobs of the given events, as far as they have the event's correlation id and the jobs are gone
-- (remove_jobs_of_events finds those of existing jobs by the ledger). A removed payload does not say which event it was about.
create or replace function webhookd.lifecycle_events(event_ids bigint[]) returns bigint[]
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    return array(
        select l.id from unnest(event_ids) as g (id)
        cross join lateral (select k.correlation_id from events k where k.id = g.id and k.correlation_id is not null offset 0) e
        cross join lateral (select k.id, k.event_type, k.payload, k.payload_removed_at from events k
                            where k.correlation_id = e.correlation_id offset 0) l
        where starts_with(l.event_type, 'dot.job.')
            and (l.payload_removed_at is not null or l.payload ->> 'causation_event_id' = g.id::text));
end
$$;

-- A batch of a tenant's events, in the order of idx_event_tenant.
create or replace function webhookd.erase_tenant_batch(
    erasure webhookd.erasures, batch_size integer, out events integer, out deliveries integer, out attempts integer,
    out dead_letters integer, out jobs integer, out last_created_at timestamptz, out last_id bigint, out is_end boolean,
    out left_out boolean)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    event_ids bigint[];
    free_ids bigint[];
begin
    select coalesce(array_agg(e.id) filter (where e.id <= erasure.last_event_id), '{}'), (array_agg(e.created_at))[count(*)],
           (array_agg(e.id))[count(*)], count(*) < batch_size
    into event_ids, last_created_at, last_id, is_end
    from (select e.id, e.created_at from (
              select e.id, e.created_at, e.tenant from events e
              where e.tenant <> '' and (e.tenant, e.created_at, e.id) > (erasure.tenant, erasure.after_created_at, erasure.after_id)
              order by e.tenant, e.created_at, e.id limit batch_size) e
          where e.tenant = erasure.tenant) e;
    -- Only events of later transactions follow: the tenant goes on publishing.
    is_end := is_end or event_ids = '{}';
    -- No subscription is left to route them to, and no job should be made of them.
    delete from event_routing_queue q
    where q.event_id = any(array(
        select r.event_id from event_routing_queue r where r.event_id = any(event_ids) for update skip locked));
    delete from job_event_queue q
    where q.event_id = any(array(
        select r.event_id from job_event_queue r where r.event_id = any(event_ids) for update skip locked));
    jobs := remove_jobs_of_events(event_ids);
    -- The lifecycle events of its jobs have its correlation id. They go first: without the event they could not be found.
    perform remove_events(lock_finished_events(finished_events(lifecycle_events(event_ids))));
    free_ids := lock_finished_events(finished_events(array(
        select e.id from unnest(event_ids) as e (id) where lifecycle_events(array[e.id]) = '{}')));
    select r.events, r.deliveries, r.attempts, r.dead_letters into events, deliveries, attempts, dead_letters
    from remove_events(free_ids) r;
    left_out := cardinality(free_ids) < cardinality(event_ids);
end
$$;

-- A batch of a subscription's deliveries: those of one status after the other, each with all deliveries of its event to this
-- subscription, because a requeued delivery refers to the dead letter of another. `last_id` is the last saga of the batch.
create or replace function webhookd.erase_subscription_batch(
    erasure webhookd.erasures, batch_size integer, out events integer, out deliveries integer, out attempts integer,
    out dead_letters integer, out jobs integer, out last_created_at timestamptz, out last_id bigint, out is_end boolean,
    out left_out boolean)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    wanted constant bigint := erasure.subscription_id;
    event_ids bigint[];
    saga_ids bigint[];
    locked_ids bigint[];
    job_ids bigint[];
    busy_event_ids bigint[];
begin
    events := 0;
    jobs := 0;
    last_created_at := '-infinity';
    select coalesce(array_agg(distinct s.event_id), '{}'), max(s.id), count(*) < batch_size into event_ids, last_id, is_end
    from (
        select s.id, s.event_id from (
            (select s.id, s.event_id from webhook_delivery_sagas s
             where s.status = 'Pending' and (s.subscription_id, s.id) > (wanted, erasure.after_id)
                 and s.subscription_id = wanted order by s.subscription_id, s.id limit batch_size)
            union all
            (select s.id, s.event_id from webhook_delivery_sagas s
             where s.status in ('PendingRetry', 'Completed', 'DeadLettered') and s.subscription_id = wanted
                 and s.status = 'PendingRetry' and s.id > erasure.after_id
             order by s.subscription_id, s.status, s.id limit batch_size)
            union all
            (select s.id, s.event_id from webhook_delivery_sagas s
             where s.status in ('PendingRetry', 'Completed', 'DeadLettered') and s.subscription_id = wanted
                 and s.status = 'Completed' and s.id > erasure.after_id
             order by s.subscription_id, s.status, s.id limit batch_size)
            union all
            (select s.id, s.event_id from webhook_delivery_sagas s
             where s.status in ('PendingRetry', 'Completed', 'DeadLettered') and s.subscription_id = wanted
                 and s.status = 'DeadLettered' and s.id > erasure.after_id
             order by s.subscription_id, s.status, s.id limit batch_size)
            union all
            -- At most as many as the window of a subscription.
            (select s.id, s.event_id from webhook_delivery_sagas s
             where s.status = 'InProgress' and s.subscription_id = wanted and s.id > erasure.after_id)) s
        order by s.id limit batch_size) s;
    last_id := coalesce(last_id, erasure.after_id);
    saga_ids := array(
        select s.id from webhook_delivery_sagas s
        where s.event_id = any(event_ids) and s.subscription_id = wanted and s.resent_from is null
        union all
        select s.id from webhook_delivery_sagas s
        where s.event_id = any(event_ids) and s.subscription_id = wanted and s.resent_from is not null);
    locked_ids := array(select s.id from webhook_delivery_sagas s where s.id = any(saga_ids) for update skip locked);
    job_ids := array(
        select j.id from webhook_delivery_jobs j
        where j.id = any(array(select s.job_id from webhook_delivery_sagas s where s.id = any(locked_ids)))
            and (j.status = 'Leased' or j.status in ('Completed', 'Failed') and j.result_applied_at is null) is false
        for update skip locked);
    busy_event_ids := array(
        select distinct s.event_id from webhook_delivery_sagas s
        where s.id = any(saga_ids) and (s.id <> all(locked_ids) or s.job_id is not null and s.job_id <> all(job_ids)));
    saga_ids := array(
        select s.id from webhook_delivery_sagas s where s.id = any(saga_ids) and s.event_id <> all(busy_event_ids));
    select r.deliveries, r.attempts, r.dead_letters into deliveries, attempts, dead_letters from remove_sagas(saga_ids) r;
    left_out := busy_event_ids <> '{}';
end
$$;

-- A transaction that read the subscription before it was deleted may still route an event to it, and get its id only then. The
-- daemon's transactions end within 12 seconds (statement_timeout). An event of a tenant is locked by such a transaction.
create or replace function webhookd.can_finish(erasure webhookd.erasures) returns boolean
language sql stable set search_path = pg_catalog, webhookd, pg_temp as $$
    select erasure.subscription_id is null
        or not exists (select from subscriptions u
                       where u.id = erasure.subscription_id and u.deleted_at > now() - interval '15 seconds')
$$;

-- Returns the subscriptions whose rows an erasure removes.
create or replace function webhookd.erased_subscriptions(erasure webhookd.erasures) returns bigint[]
language sql stable set search_path = pg_catalog, webhookd, pg_temp as $$
    select case
        when erasure.subscription_id is not null then array[erasure.subscription_id]
        else array(select u.id from subscriptions u where u.tenant <> '' and u.tenant = erasure.tenant) end
$$;

-- Removes the last rows, and leaves the evidence. The deliveries are gone, which the triggers check.
create or replace function webhookd.finish_erasure(erasure webhookd.erasures) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    removed integer;
begin
    if erasure.subscription_id is not null then
        removed := remove_subscriptions(erased_subscriptions(erasure));
    else
        removed := remove_subscriptions(erased_subscriptions(erasure));
        delete from tenants t where t.tenant = erasure.tenant;
        -- Also the login links that its token made in the meantime, and expired ones, whose actor may have its name.
        delete from console_links l where l.tenant = erasure.tenant;
        delete from console_links l where l.expires_at <= now();
        -- Earlier erasures of its subscriptions name it too, and those that still run are done.
        update erasures e set tenant = null, tenant_sha256 = encode(sha256(convert_to(e.tenant, 'UTF8')), 'hex'),
                              finished_at = coalesce(e.finished_at, now())
        where e.tenant = erasure.tenant;
    end if;
    update erasures e set finished_at = now(), subscriptions = e.subscriptions + removed where e.id = erasure.id;
end
$$;
