-- owner: webhookd_owner
-- Owns: what triggers do: refuse what may not change, whoever asks, and set in motion what follows a write. Which change
-- calls which of them is in triggers.sql.

create or replace function webhookd.refuse_change() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if tg_level = 'STATEMENT' then
        raise exception using errcode = 'WH410', message = format('%s are immutable: no %s', tg_table_name, tg_op);
    end if;
    raise exception using
        errcode = 'WH410', message = format('%s %s is %s and can never change', tg_argv[0], old.id, old.status);
end
$$;

create or replace function webhookd.refuse_transition() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if tg_op = 'INSERT' then
        raise exception using
            errcode = 'WH411', message = format('a %s is born Pending, without attempts, lease or result', tg_argv[0]);
    end if;
    raise exception using
        errcode = 'WH411',
        message = format('%s %s may not go from %s to %s like this', tg_argv[0], old.id, old.status, new.status),
        hint = 'The edges, and what each may change, are drawn in schema/README.md.';
end
$$;

-- events ----------------------------------------------------------------------------------------------------------

-- Whoever inserts, the queue row is in the same commit. Not ENABLE ALWAYS: a restored dump is not routed again.
--
-- Id and time are the database's, also where an application inserts by itself, and GENERATED ALWAYS does not see to it: an id
-- ahead of the sequence would make the next publishers fail, and one out of range would stop routing for all.
--
-- The wake-up is throttled by session, because NOTIFY takes a cluster-wide lock at commit (19,000 single-row
-- commits a second became 3,700): who hears one goes on looking for 60 ms. Through a shared row it would
-- serialise every application that publishes. A transaction that stays open after its session's last wake-up is
-- found by polling. The mark is undone with its transaction, as is the NOTIFY. A session that uses PREPARE TRANSACTION,
-- which PostgreSQL refuses after a NOTIFY, says SET webhookd.woken_at = 'infinity' and is found by polling.
create or replace function webhookd.enqueue_events() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    -- Seconds, not a timestamp's text: that is read by the DateStyle of the day.
    woken_text constant text := current_setting('webhookd.woken_at', true);
    woken_at constant double precision := case when woken_text ~ '^([0-9.]+|infinity)$' then woken_text else '-infinity' end;
    present constant double precision := extract(epoch from clock_timestamp());
begin
    if not exists (select from new_events) then  -- a statement that found only duplicates, say: nobody is woken for it
        return null;
    end if;
    if exists (select from new_events n
               where n.id not between 1 and (select q.last_value from events_id_seq q) or n.created_at <> now())
    then
        raise exception using errcode = 'WH400', message = 'an event gets its id and its time from the database';
    end if;
    insert into event_routing_queue (event_id) select id from new_events;
    -- A mark ahead of the clock means that the clock was set back.
    if woken_at not between present - 0.05 and present and woken_at <> 'infinity' then
        perform pg_notify('webhookd_events', '');
        perform set_config('webhookd.woken_at', present::text, false);
    end if;
    return null;
end
$$;

-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace function webhookd.distrust_new_address() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    new.verified := false;
    return new;
end
$$;

create or replace function webhookd.log_subscription() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    insert into subscription_changes (subscription_id, event_type, callback_url, active, verified)
    values (new.id, new.event_type, new.callback_url, new.active, new.verified);
    return null;
end
$$;

-- sagas -----------------------------------------------------------------------------------------------------------

-- What foreign keys would hold, at a look for a statement and not a lock for each row: a saga is of an event and of a
-- subscription that are there, which never go (events are immutable, and a subscription's change log refers to it); and
-- one that has jobs stays.
create or replace function webhookd.require_event_and_subscription() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from new_sagas n where not exists (select from events e where e.id = n.event_id))
        or exists (select from (select distinct n.subscription_id from new_sagas n) n
                   where not exists (select from subscriptions u where u.id = n.subscription_id))
    then
        raise exception using errcode = 'WH411', message = 'a saga is of an event and of a subscription that exist';
    end if;
    return null;
end
$$;

create or replace function webhookd.refuse_jobs_left() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from old_sagas o join webhook_delivery_jobs j on j.saga_id = o.id) then
        raise exception using errcode = 'WH411', message = 'a saga that has jobs cannot be deleted';
    end if;
    return null;
end
$$;

-- A due time at or before an earlier attempt's would give the next job that attempt's key: it could never start.
create or replace function webhookd.refuse_past_attempt() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from webhook_delivery_jobs j where j.saga_id = new.id and j.attempt_at >= new.next_attempt_at) then
        raise exception using
            errcode = 'WH411', message = format('saga %s had an attempt at or after %s', new.id, new.next_attempt_at);
    end if;
    return new;
end
$$;

-- Looked at when the transaction commits: a DeadLettered saga and its dead letter appear together or not at all.
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

-- A job is made for a saga that is InProgress when the statement ends, for its subscription, for its due time. A saga that
-- another is moving at this moment needs no lock: its attempt has a job already, and uniq_job_saga_attempt refuses this one.
create or replace function webhookd.require_saga_in_progress() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (
        select from new_jobs n left join webhook_delivery_sagas s on s.id = n.saga_id
        where (s.status, s.subscription_id, s.next_attempt_at)
            is distinct from ('InProgress'::saga_status, n.subscription_id, n.attempt_at))
    then
        raise exception using
            errcode = 'WH411', message = 'a job is made only for a saga InProgress, with its subscription and due time';
    end if;
    return null;
end
$$;

-- dead letters ----------------------------------------------------------------------------------------------------

create or replace function webhookd.require_true_snapshot() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (
        select from new_dead_letters d
        -- IS TRUE: found by its key, and not among all that ever were DeadLettered.
        left join webhook_delivery_sagas s on s.id = d.saga_id and (s.status = 'DeadLettered') is true
        left join events e on e.id = d.event_id
        where (s.event_id, s.subscription_id, s.final_error_code, e.payload::text)
            is distinct from (d.event_id, d.subscription_id, d.final_error_code, d.payload_snapshot::text))
    then
        raise exception using
            errcode = 'WH411',
            message = 'a dead letter is made of a DeadLettered saga, with its pair, its error and the event''s payload';
    end if;
    return null;
end
$$;
