-- owner: webhookd_owner
-- Owns: the trigger functions of the deliveries. They refuse forbidden changes for every role, and do what must follow a
-- write. triggers.sql says which change calls which function.

create or replace function webhookd.refuse_change() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if tg_level = 'STATEMENT' then
        raise exception using errcode = 'WH410', message = format('%s on %s is not allowed', tg_op, tg_table_name);
    end if;
    raise exception using
        errcode = 'WH410', message = format('%s %s is %s and cannot change any more', tg_argv[0], old.id, old.status);
end
$$;

create or replace function webhookd.refuse_transition() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if tg_op = 'INSERT' then
        raise exception using
            errcode = 'WH411', message = format('a new %s must be Pending, without attempts, lease or result', tg_argv[0]);
    end if;
    raise exception using
        errcode = 'WH411',
        message = format('%s %s cannot go from %s to %s with these changes', tg_argv[0], old.id, old.status, new.status),
        hint = 'schema/README.md lists the allowed transitions and what each may change.';
end
$$;

-- events ----------------------------------------------------------------------------------------------------------

-- Every insert into events adds its queue row in the same commit. The trigger is not ENABLE ALWAYS, so restoring a dump does
-- not route the events again.
--
-- Id and time come from the database, also for an application's own INSERT. GENERATED ALWAYS does not ensure that (OVERRIDING
-- SYSTEM VALUE): an id ahead of the sequence would make later publishers fail, and an id out of range would stop routing.
--
-- Each session sends at most one NOTIFY every 50 ms, because NOTIFY locks the PostgreSQL cluster at commit (19,000 single-row
-- commits a second became 3,700). After a NOTIFY, the router checks again for 60 ms. A throttle in a shared row would serialise
-- all applications that publish. Polling finds a transaction that commits later. The time of the last NOTIFY is in the setting
-- webhookd.woken_at, which a rollback restores, as it discards the NOTIFY. PostgreSQL refuses PREPARE TRANSACTION after a
-- NOTIFY: a session that uses it runs SET webhookd.woken_at = 'infinity', and polling finds its events.
create or replace function webhookd.enqueue_events() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    -- As seconds: a timestamp's text depends on DateStyle.
    woken_text constant text := current_setting('webhookd.woken_at', true);
    woken_at constant double precision := case when woken_text ~ '^([0-9.]+|infinity)$' then woken_text else '-infinity' end;
    present constant double precision := extract(epoch from clock_timestamp());
begin
    if not exists (select from new_events) then  -- for example only duplicates: no wake-up
        return null;
    end if;
    if exists (select from new_events n
               where n.id not between 1 and (select q.last_value from events_id_seq q) or n.created_at <> now())
    then
        raise exception using errcode = 'WH400', message = 'id and created_at of an event must be those that the database assigns';
    end if;
    insert into event_routing_queue (event_id) select id from new_events;
    -- A last time after `present` means that the clock was set back.
    if woken_at not between present - 0.05 and present and woken_at <> 'infinity' then
        perform pg_notify('webhookd_events', '');
        perform set_config('webhookd.woken_at', present::text, false);
    end if;
    return null;
end
$$;

-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace function webhookd.clear_verified() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    new.verified := false;
    return new;
end
$$;

create or replace function webhookd.log_subscription_change() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    insert into subscription_changes (subscription_id, event_type, callback_url, active, verified)
    values (new.id, new.event_type, new.callback_url, new.active, new.verified);
    return null;
end
$$;

-- sagas -----------------------------------------------------------------------------------------------------------

-- These two functions replace foreign keys, with one check for each statement instead of a lock for each row. A saga needs an
-- existing event and an existing subscription, which cannot be deleted (events are append-only, and the change log refers to
-- the subscription). A saga that has jobs cannot be deleted.
create or replace function webhookd.require_event_and_subscription() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from new_sagas n where not exists (select from events e where e.id = n.event_id))
        or exists (select from (select distinct n.subscription_id from new_sagas n) n
                   where not exists (select from subscriptions u where u.id = n.subscription_id))
    then
        raise exception using errcode = 'WH411', message = 'the event and the subscription of a saga must exist';
    end if;
    return null;
end
$$;

create or replace function webhookd.refuse_delete_with_jobs() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from old_sagas o join webhook_delivery_jobs j on j.saga_id = o.id) then
        raise exception using errcode = 'WH411', message = 'a saga that has jobs cannot be deleted';
    end if;
    return null;
end
$$;

-- A due time at or before an earlier attempt's would give the next job the key of that attempt, so the saga could never start.
create or replace function webhookd.refuse_past_attempt() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from webhook_delivery_jobs j where j.saga_id = new.id and j.attempt_at >= new.next_attempt_at) then
        raise exception using
            errcode = 'WH411', message = format('saga %s already had an attempt at or after %s', new.id, new.next_attempt_at);
    end if;
    return new;
end
$$;

-- Checked at commit: a DeadLettered saga and its dead letter become visible together or not at all.
create or replace function webhookd.require_dead_letter() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if not exists (select from dead_letters d where d.saga_id = new.id) then
        raise exception using errcode = 'WH411', message = format('saga %s is DeadLettered without a dead letter', new.id);
    end if;
    return null;
end
$$;

-- jobs ------------------------------------------------------------------------------------------------------------

-- When the statement ends, the saga of a new job must be InProgress and have the job's subscription and due time. No lock is
-- needed for a saga that another transaction changes at the same time: that attempt already has a job, and
-- uniq_job_saga_attempt refuses this one.
create or replace function webhookd.require_saga_in_progress() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (
        select from new_jobs n left join webhook_delivery_sagas s on s.id = n.saga_id
        where (s.status, s.subscription_id, s.next_attempt_at)
            is distinct from ('InProgress'::saga_status, n.subscription_id, n.attempt_at))
    then
        raise exception using
            errcode = 'WH411', message = 'the saga of a new job must be InProgress, with the same subscription and due time';
    end if;
    return null;
end
$$;

-- dead letters ----------------------------------------------------------------------------------------------------

create or replace function webhookd.require_matching_snapshot() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (
        select from new_dead_letters d
        -- `is true`: by the primary key, not by an index of all DeadLettered sagas.
        left join webhook_delivery_sagas s on s.id = d.saga_id and (s.status = 'DeadLettered') is true
        left join events e on e.id = d.event_id
        where (s.event_id, s.subscription_id, s.final_error_code, e.payload::text)
            is distinct from (d.event_id, d.subscription_id, d.final_error_code, d.payload_snapshot::text))
    then
        raise exception using
            errcode = 'WH411',
            message = 'a dead letter must match its DeadLettered saga: event, subscription, error code, and the event''s payload';
    end if;
    return null;
end
$$;
