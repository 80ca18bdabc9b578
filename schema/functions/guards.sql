-- owner: webhookd_owner
-- Owns: what may change in a row, whoever asks, the tables' owner included; and what a write sets in motion.
--
-- Conditions stand in the triggers' WHEN clauses: a legal change costs no function call (measured: no time,
-- 5 % more WAL at most). Only a refusal, an insert of jobs or a dead letter runs PL/pgSQL.

create or replace function webhookd.refuse_change() returns trigger
language plpgsql as $$
begin
    if tg_level = 'STATEMENT' then
        raise exception using errcode = 'WH410', message = format('%s are immutable: no %s', tg_table_name, tg_op);
    end if;
    raise exception using
        errcode = 'WH410', message = format('%s %s is %s and can never change', tg_argv[0], old.id, old.status);
end
$$;

create or replace function webhookd.refuse_transition() returns trigger
language plpgsql as $$
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


-- events, dead letters: append only -----------------------------------------------------------------------------
-- By triggers and not by taking rights from the owner, as whom foreign keys lock the rows they refer to.

create or replace trigger events_immutable before update or delete or truncate on webhookd.events
    for each statement execute function webhookd.refuse_change();

create or replace trigger dead_letters_immutable before update or delete or truncate on webhookd.dead_letters
    for each statement execute function webhookd.refuse_change();

-- Whoever inserts, the queue row is in the same commit. Not ENABLE ALWAYS: a restored dump is not routed again.
--
-- The wake-up is throttled by session, because NOTIFY takes a cluster-wide lock at commit (19,000 single-row
-- commits a second became 3,700): who hears one looks again 50 ms later. Through a shared row it would
-- serialise every application that publishes. A transaction that stays open after its session's last wake-up is
-- found by polling. The mark is undone with its transaction, as is the NOTIFY. A session that uses PREPARE TRANSACTION,
-- which PostgreSQL refuses after a NOTIFY, says SET webhookd.woken_at = 'infinity' and is found by polling.
create or replace function webhookd.enqueue_events() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    woken_at constant timestamptz := coalesce(nullif(current_setting('webhookd.woken_at', true), ''), '-infinity');
begin
    insert into event_routing_queue (event_id) select id from new_events;
    -- A mark ahead of the clock means that the clock was set back.
    if woken_at not between clock_timestamp() - interval '50 milliseconds' and clock_timestamp() and woken_at <> 'infinity' then
        perform pg_notify('webhookd_events', '');
        perform set_config('webhookd.woken_at', clock_timestamp()::text, false);
    end if;
    return null;
end
$$;
create or replace trigger events_enqueue after insert on webhookd.events
    referencing new table as new_events for each statement execute function webhookd.enqueue_events();


-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace function webhookd.distrust_new_address() returns trigger
language plpgsql as $$
begin
    new.verified := false;
    return new;
end
$$;
create or replace trigger subscription_address before update on webhookd.subscriptions
    for each row when (old.callback_url is distinct from new.callback_url)
    execute function webhookd.distrust_new_address();

create or replace function webhookd.log_subscription() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    insert into subscription_changes (subscription_id, event_type, callback_url, active, verified)
    values (new.id, new.event_type, new.callback_url, new.active, new.verified);
    return null;
end
$$;
create or replace trigger subscription_born after insert on webhookd.subscriptions
    for each row execute function webhookd.log_subscription();
create or replace trigger subscription_changed after update on webhookd.subscriptions
    for each row when ((old.event_type, old.callback_url, old.active, old.verified)
                       is distinct from (new.event_type, new.callback_url, new.active, new.verified))
    execute function webhookd.log_subscription();


-- sagas -----------------------------------------------------------------------------------------------------------

create or replace trigger saga_birth before insert on webhookd.webhook_delivery_sagas
    for each row when (new.status <> 'Pending' or new.attempt_count <> 0 or new.final_error_code is not null)
    execute function webhookd.refuse_transition('saga');

create or replace trigger saga_frozen before update on webhookd.webhook_delivery_sagas
    for each row when (old.status in ('Completed', 'DeadLettered'))
    execute function webhookd.refuse_change('saga');

create or replace trigger saga_transition before update on webhookd.webhook_delivery_sagas
    for each row when (
        (old.id, old.event_id, old.subscription_id, old.dead_letter_id, old.created_at)
            is distinct from (new.id, new.event_id, new.subscription_id, new.dead_letter_id, new.created_at)
        or not case
            -- a job was made
            when old.status in ('Pending', 'PendingRetry') and new.status = 'InProgress' then
                (new.attempt_count, new.next_attempt_at, new.final_error_code)
                    is not distinct from (old.attempt_count, old.next_attempt_at, old.final_error_code)
            -- a result was applied
            when old.status = 'InProgress' and new.status = 'Completed' then
                (new.attempt_count, new.next_attempt_at, new.final_error_code)
                    is not distinct from (old.attempt_count + 1, old.next_attempt_at, old.final_error_code)
            when old.status = 'InProgress' and new.status = 'PendingRetry' then
                new.attempt_count = old.attempt_count + 1 and new.next_attempt_at > old.next_attempt_at
            when old.status = 'InProgress' and new.status = 'DeadLettered' then
                new.attempt_count = old.attempt_count + 1 and new.next_attempt_at = old.next_attempt_at
            -- the limit was lowered
            when old.status = 'PendingRetry' and new.status = 'DeadLettered' then
                (new.attempt_count, new.next_attempt_at, new.final_error_code)
                    is not distinct from (old.attempt_count, old.next_attempt_at, old.final_error_code)
            -- an operator moves the due time, see saga_rescheduled
            when old.status in ('Pending', 'PendingRetry') and new.status = old.status then
                (new.attempt_count, new.final_error_code) is not distinct from (old.attempt_count, old.final_error_code)
            else false
        end)
    execute function webhookd.refuse_transition('saga');

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
create or replace trigger saga_rescheduled before update on webhookd.webhook_delivery_sagas
    for each row when (old.status = new.status and old.next_attempt_at <> new.next_attempt_at)
    execute function webhookd.refuse_past_attempt();

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
drop trigger if exists saga_buried on webhookd.webhook_delivery_sagas;  -- a constraint trigger cannot be replaced
create constraint trigger saga_buried after update on webhookd.webhook_delivery_sagas
    deferrable initially deferred
    for each row when (new.status = 'DeadLettered')
    execute function webhookd.require_dead_letter();


-- jobs ------------------------------------------------------------------------------------------------------------

create or replace trigger job_birth before insert on webhookd.webhook_delivery_jobs
    for each row when (new.status <> 'Pending' or new.lease_resets <> 0 or new.result_applied_at is not null)
    execute function webhookd.refuse_transition('job');

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
create or replace trigger job_of_saga_in_progress after insert on webhookd.webhook_delivery_jobs
    referencing new table as new_jobs for each statement execute function webhookd.require_saga_in_progress();

-- A finished job takes one stamp, result_applied_at, once.
create or replace trigger job_frozen before update on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Completed', 'Failed')
        and (old.result_applied_at is not null or new.result_applied_at is null
             or (old.id, old.saga_id, old.subscription_id, old.status, old.lease_until, old.attempt_at,
                 old.response_status, old.error_code, old.worker_id, old.lease_token, old.lease_resets,
                 old.created_at, old.finished_at, old.duration_ms, old.retry_after_seconds, old.response_excerpt)
                is distinct from
                (new.id, new.saga_id, new.subscription_id, new.status, new.lease_until, new.attempt_at,
                 new.response_status, new.error_code, new.worker_id, new.lease_token, new.lease_resets,
                 new.created_at, new.finished_at, new.duration_ms, new.retry_after_seconds, new.response_excerpt)))
    execute function webhookd.refuse_change('job');

create or replace trigger job_transition before update on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Pending', 'Leased')
        and ((old.id, old.saga_id, old.subscription_id, old.attempt_at, old.created_at)
                is distinct from (new.id, new.saga_id, new.subscription_id, new.attempt_at, new.created_at)
             or not case
                when old.status = 'Pending' and new.status in ('Pending', 'Leased') then
                    new.lease_resets = old.lease_resets
                -- the same lease: it may be made longer or end early, its token stays
                when old.status = 'Leased' and new.status = 'Leased' then
                    (new.lease_token, new.worker_id, new.lease_resets)
                        is not distinct from (old.lease_token, old.worker_id, old.lease_resets)
                when old.status = 'Leased' and new.status = 'Pending' then
                    new.lease_resets in (old.lease_resets, old.lease_resets + 1)
                -- reported by its holder, or given up by the reaper, which clears the token
                when old.status = 'Leased' and new.status in ('Completed', 'Failed') then
                    (new.worker_id, new.lease_resets) is not distinct from (old.worker_id, old.lease_resets)
                    and new.result_applied_at is null
                    and (new.lease_token is null or new.lease_token = old.lease_token)
                else false
            end))
    execute function webhookd.refuse_transition('job');


-- dead letters ----------------------------------------------------------------------------------------------------

create or replace function webhookd.require_true_snapshot() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (
        select from new_dead_letters d
        left join webhook_delivery_sagas s on s.id = d.saga_id and s.status = 'DeadLettered'
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
create or replace trigger dead_letter_true after insert on webhookd.dead_letters
    referencing new table as new_dead_letters for each statement execute function webhookd.require_true_snapshot();
