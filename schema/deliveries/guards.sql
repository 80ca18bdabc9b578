-- owner: webhookd_owner
-- Owns: the trigger functions of the deliveries. They refuse forbidden changes for every role, and do what must follow a
-- write. triggers.sql says which change calls which function.

-- Retention and erasure may delete, and replace a payload by JSON null; the row triggers below check what. Only the functions of
-- retention_keeper run as that role: only the migrator is a member of it.
create or replace function webhookd.refuse_change() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if current_user = 'retention_keeper' and tg_op <> 'TRUNCATE' then
        return null;
    end if;
    raise exception using errcode = 'WH410', message = format('%s on %s is not allowed', tg_op, tg_table_name);
end
$$;

-- Refuses a change of columns that never change. Its triggers run only for a statement that names one of them.
create or replace function webhookd.refuse_transition() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
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
    is_foreign boolean;
    has_bad_tenant boolean;
    has_labels boolean;
begin
    select bool_or(n.id not between 1 and (select q.last_value from events_id_seq q) or n.created_at <> now()),
           bool_or(n.tenant <> '' and n.tenant !~ '^[A-Za-z0-9._:-]+$'), bool_or(n.labels is not null)
    into is_foreign, has_bad_tenant, has_labels
    from new_events n;
    if is_foreign is null then  -- no row, for example only duplicates: no wake-up
        return null;
    elsif is_foreign then
        raise exception using errcode = 'WH400', message = 'id and created_at of an event must be those that the database assigns';
    elsif has_bad_tenant then
        raise exception using errcode = 'WH400', message = 'tenant must be 1 to 100 letters, digits and . _ : -';
    end if;
    if has_labels then
        if exists (select from new_events n where n.labels is not null and not is_labels(n.labels)) then
            raise exception using
                errcode = 'WH400',
                message = 'labels must be an object of at most 20 texts, with names and values of at most 100 characters';
        end if;
        insert into event_labels (event_id, tenant, name, value, created_at)
        select n.id, n.tenant, l.key, l.value, n.created_at from new_events n cross join lateral jsonb_each_text(n.labels) l;
    end if;
    insert into event_routing_queue (event_id, event_type, tenant, labels) select id, event_type, tenant, labels from new_events;
    -- A last time after `present` means that the clock was set back.
    if woken_at not between present - 0.05 and present and woken_at <> 'infinity' then
        perform pg_notify('webhookd_events', '');
        perform set_config('webhookd.woken_at', present::text, false);
    end if;
    return null;
end
$$;

-- Of an event only the payload can be removed, once. `json` cannot be compared, so the columns are named.
create or replace function webhookd.check_payload_removed() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if old.payload_removed_at is not null or new.payload_removed_at is null or new.payload::text <> 'null'
        or (old.id, old.event_type, old.created_at, old.idempotency_key, old.correlation_id, old.tenant, old.labels)
            is distinct from
           (new.id, new.event_type, new.created_at, new.idempotency_key, new.correlation_id, new.tenant, new.labels)
    then
        raise exception using errcode = 'WH410', message = 'UPDATE on events is not allowed';
    end if;
    return null;
end
$$;

create or replace function webhookd.check_snapshot_removed() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if new.payload_snapshot::text <> 'null'
        or not exists (select from webhookd.events e where e.id = new.event_id and e.payload_removed_at is not null)
        or (old.id, old.saga_id, old.event_id, old.subscription_id, old.final_error_code, old.failed_at, old.tenant)
            is distinct from
           (new.id, new.saga_id, new.event_id, new.subscription_id, new.final_error_code, new.failed_at, new.tenant)
    then
        raise exception using errcode = 'WH410', message = 'UPDATE on dead_letters is not allowed';
    end if;
    return null;
end
$$;

-- Replaces the foreign keys of sagas and labels: nothing may refer to a deleted event.
create or replace function webhookd.refuse_event_in_use() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from old_events o
               where exists (select from webhook_delivery_sagas s where s.event_id = o.id and s.resent_from is null offset 0)
                   or exists (select from webhook_delivery_sagas s where s.event_id = o.id and s.resent_from is not null offset 0)
                   or exists (select from event_routing_queue q where q.event_id = o.id offset 0)
                   or exists (select from job_event_queue q where q.event_id = o.id offset 0))
    then
        raise exception using errcode = 'WH411', message = 'an event that has deliveries, or waits for routing, cannot be deleted';
    end if;
    return null;
end
$$;

-- Locks events that get a new saga, a resend or a replay, so that retention does not remove them meanwhile. Returns those that exist
-- and have their payload. A caller reads what it needs to know of them after this. SECURITY DEFINER, because a row lock needs UPDATE,
-- which the callers' roles do not have.
create or replace function webhookd.lock_events(event_ids bigint[]) returns bigint[]
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    return array(
        select e.id from events e where e.id = any(event_ids) and e.payload_removed_at is null order by e.id for key share);
end
$$;
grant execute on function webhookd.lock_events(bigint[]) to router_worker, dead_letter_operator;

-- The same for an event that a job of the job queue refers to, which needs no payload. Returns whether it exists.
create or replace function webhookd.lock_event(event_id bigint) returns boolean
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform from events e where e.id = event_id for key share;
    return found;
end
$$;
grant execute on function webhookd.lock_event(bigint) to webhookd_jobqueue;

-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace function webhookd.refuse_subscription_in_use() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from old_subscriptions o where o.deleted_at is null or has_sagas(o.id)) then
        raise exception using
            errcode = 'WH411', message = 'a subscription that is not deleted, or has deliveries, cannot be removed';
    end if;
    return null;
end
$$;

-- Whether a subscription has deliveries. Each status has its own index by subscription.
create or replace function webhookd.has_sagas(subscription_id bigint) returns boolean
language sql stable set search_path = pg_catalog, webhookd, pg_temp as $$
    select exists (select from webhook_delivery_sagas s where s.subscription_id = has_sagas.subscription_id and s.status = 'Pending')
        or exists (select from webhook_delivery_sagas s where s.subscription_id = has_sagas.subscription_id and s.status = 'InProgress')
        or exists (select from webhook_delivery_sagas s
                   where s.subscription_id = has_sagas.subscription_id and s.status in ('PendingRetry', 'Completed', 'DeadLettered'))
$$;
grant execute on function webhookd.has_sagas(bigint) to retention_keeper;

create or replace function webhookd.clear_verified() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    new.verified := false;
    new.verified_by := null;
    return new;
end
$$;

-- `event_type` is the first of `event_types`: whichever of the two a statement sets, the other follows.
create or replace function webhookd.align_event_types() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if new.event_types is null or (tg_op = 'UPDATE' and new.event_types = old.event_types) then
        new.event_types := array[new.event_type];
    else
        new.event_type := new.event_types[1];
    end if;
    return new;
end
$$;

create or replace function webhookd.log_subscription_change() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    insert into subscription_changes (subscription_id, event_types, filter, callback_url, active, verified)
    values (new.id, new.event_types, new.filter, new.callback_url, new.active, new.verified);
    return null;
end
$$;

-- Routing sees the old patterns or the new ones, and never a part of them: they change in one transaction.
create or replace function webhookd.index_subscription_types() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    delete from subscription_types t where t.subscription_id = new.id;
    insert into subscription_types (tenant, pattern, subscription_id, routable, filter)
    select distinct new.tenant, p.pattern, new.id, new.routable, new.filter
    from unnest(new.event_types) as p (pattern) where new.deleted_at is null;
    return null;
end
$$;

-- sagas -----------------------------------------------------------------------------------------------------------
-- The rules of sagas and jobs: what a new row may contain, once for each statement, and which changes are allowed, for each row.
-- AFTER triggers, because a BEFORE trigger locks each row, which writes WAL. Functions and not WHEN clauses or CHECKs, because
-- PostgreSQL parses the text of those again for each statement, which matters for statements of one row. A function costs about
-- 11,000 instructions for each row.

-- Also replaces foreign keys, which would lock a row for each saga. A saga needs an existing event and an existing subscription. An
-- event in the routing queue is never removed, and a resend or a replay has locked its event (lock_events).
create or replace function webhookd.check_new_sagas() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    is_wrong boolean;
    is_resent boolean;
begin
    select bool_or(n.status <> 'Pending' or n.attempt_count <> 0 or n.final_error_code is not null or n.job_id is not null),
           bool_or(num_nonnulls(n.resent_from, n.dead_letter_id) > 0)
    into is_wrong, is_resent
    from new_sagas n;
    if is_wrong is false then
        is_wrong := exists (select from (select distinct n.subscription_id, e.tenant
                                         from new_sagas n left join events e on e.id = n.event_id) n
                            where not exists (select from subscriptions u where u.id = n.subscription_id and u.tenant = n.tenant));
    end if;
    if is_resent and not is_wrong then
        is_wrong := exists (select from new_sagas n
                            where num_nonnulls(n.resent_from, n.dead_letter_id) > 0
                                and not exists (select from webhook_delivery_sagas o
                                                left join dead_letters d on d.saga_id = o.id
                                                where o.id = n.resent_from and o.event_id = n.event_id
                                                    and o.subscription_id = n.subscription_id
                                                    and (o.status in ('Completed', 'DeadLettered')) is true
                                                    and d.id is not distinct from n.dead_letter_id));
    end if;
    if is_wrong then
        raise exception using
            errcode = 'WH411',
            message = 'a new saga must be Pending, without attempts, job or error; its event and subscription must exist and have'
                ' the same tenant; and a resent one must repeat a finished saga, with its dead letter if it has one';
    end if;
    return null;
end
$$;

-- Only a result adds an attempt. The due time changes with a retry, to a later time, or by an operator, to a time after the last
-- attempt: at or before it, the next job would have the key of that attempt, and the saga could never start. The job changes when
-- an attempt starts. The error code changes with a failure.
create or replace function webhookd.check_saga() returns trigger
language plpgsql as $$
declare
    allowed boolean;
begin
    case old.status
    when 'Pending', 'PendingRetry' then
        if new.status = 'InProgress' then
            allowed := new.job_id is not null and new.job_id is distinct from old.job_id
                and new.next_attempt_at = old.next_attempt_at;
        elsif new.status = old.status then
            allowed := new.job_id is not distinct from old.job_id;
            if allowed and new.next_attempt_at <> old.next_attempt_at
                and exists (select from webhookd.webhook_delivery_jobs j
                            where j.saga_id = new.id and j.attempt_at >= new.next_attempt_at)
            then
                raise exception using errcode = 'WH411',
                    message = format('saga %s already had an attempt at or after %s', new.id, new.next_attempt_at);
            end if;
        else
            allowed := old.status = 'PendingRetry' and new.status = 'DeadLettered' and new.job_id = old.job_id
                and new.next_attempt_at = old.next_attempt_at;
        end if;
        allowed := allowed and new.attempt_count = old.attempt_count
            and new.final_error_code is not distinct from old.final_error_code;
    when 'InProgress' then
        allowed := new.attempt_count = old.attempt_count + 1 and new.job_id = old.job_id
            and case new.status
                when 'Completed' then new.next_attempt_at = old.next_attempt_at
                    and new.final_error_code is not distinct from old.final_error_code
                when 'PendingRetry' then new.next_attempt_at > old.next_attempt_at and new.final_error_code is not null
                when 'DeadLettered' then new.next_attempt_at = old.next_attempt_at and new.final_error_code is not null
                else false
            end;
    else
        raise exception using
            errcode = 'WH410', message = format('saga %s is %s and cannot change any more', old.id, old.status);
    end case;
    if allowed is not true then
        raise exception using
            errcode = 'WH411',
            message = format('saga %s cannot go from %s to %s with these changes', old.id, old.status, new.status),
            hint = 'schema/README.md lists the allowed transitions and what each may change.';
    end if;
    return null;
end
$$;

-- A saga is deleted after its jobs, and only if it is finished or its subscription is deleted.
create or replace function webhookd.refuse_live_saga() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from old_sagas o where exists (select from webhook_delivery_jobs j where j.saga_id = o.id offset 0)) then
        raise exception using errcode = 'WH411', message = 'a saga that has jobs cannot be deleted';
    elsif exists (select from old_sagas o
                  where (o.status in ('Pending', 'InProgress', 'PendingRetry')) is true
                      and not exists (select from subscriptions u where u.id = o.subscription_id and u.deleted_at is not null))
    then
        raise exception using errcode = 'WH411', message = 'a saga that is not finished cannot be deleted';
    end if;
    return null;
end
$$;

-- A leased job is a request in flight, and a result that is not applied yet is about to move its saga.
create or replace function webhookd.refuse_live_job() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from old_jobs o where o.status = 'Leased' or o.status in ('Completed', 'Failed') and o.result_applied_at is null)
    then
        raise exception using errcode = 'WH411', message = 'a job that is leased, or whose result is not applied, cannot be deleted';
    end if;
    return null;
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

-- When the statement ends, the saga of a new job must be InProgress with this job, and have its subscription, event, due time and
-- number of attempts. No lock is needed for a saga that another transaction changes at the same time: that attempt already has a
-- job, and uniq_job_saga_attempt refuses this one.
create or replace function webhookd.check_new_jobs() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (
        select from new_jobs n left join webhook_delivery_sagas s on s.id = n.saga_id
        where n.status <> 'Pending' or n.lease_resets <> 0
            or num_nonnulls(n.lease_until, n.lease_token, n.worker_id, n.response_status, n.error_code, n.result_applied_at,
                            n.finished_at, n.duration_ms, n.retry_after_seconds, n.response_excerpt) > 0
            or (s.status, s.job_id, s.subscription_id, s.event_id, s.next_attempt_at, s.attempt_count + 1)
                is distinct from ('InProgress'::saga_status, n.id, n.subscription_id, n.event_id, n.attempt_at, n.attempt))
    then
        raise exception using
            errcode = 'WH411',
            message = 'a new job must be Pending, without lease, resets or result, and its saga InProgress with it, with the same'
                ' subscription, event, due time and attempt';
    end if;
    return null;
end
$$;

-- While a lease lasts, it keeps its token, and its end may be moved. A reported job keeps the token; a job that the reaper fails
-- loses it. lease_resets grows by one when a lease is taken back, and only then. A success may be reported and applied in one
-- step. Of a finished job only result_applied_at can be set, once.
create or replace function webhookd.check_job() returns trigger
language plpgsql as $$
declare
    allowed boolean;
begin
    if old.status in ('Completed', 'Failed') then
        allowed := old.result_applied_at is null and new.result_applied_at is not null;
        new.result_applied_at := null;
        if allowed and new is not distinct from old then
            return null;
        end if;
        raise exception using
            errcode = 'WH410', message = format('job %s is %s and cannot change any more', old.id, old.status);
    end if;
    case new.status
    when 'Leased' then
        allowed := new.lease_until is not null and new.lease_resets = old.lease_resets
            and new.finished_at is null and new.result_applied_at is null
            and case old.status when 'Leased' then new.lease_token = old.lease_token and new.worker_id = old.worker_id
                                else new.lease_token is not null and new.worker_id is not null end
            and num_nonnulls(new.response_status, new.error_code, new.duration_ms, new.retry_after_seconds,
                             new.response_excerpt) = 0;
    when 'Completed' then
        allowed := old.status = 'Leased' and new.response_status between 200 and 299 and new.error_code is null
            and new.finished_at is not null and new.lease_token = old.lease_token and new.worker_id = old.worker_id
            and new.lease_resets = old.lease_resets
            and (new.result_applied_at is null or current_user <> 'job_worker');  -- a worker applies nothing
    when 'Failed' then
        allowed := old.status = 'Leased' and new.error_code is not null and new.finished_at is not null
            and new.result_applied_at is null and new.worker_id = old.worker_id and new.lease_resets = old.lease_resets
            and (new.lease_token is null or new.lease_token = old.lease_token);
    when 'Pending' then
        allowed := (new.lease_resets = old.lease_resets
                    or (old.status = 'Leased' and new.lease_resets = old.lease_resets + 1))
            and num_nonnulls(new.lease_until, new.lease_token, new.worker_id, new.finished_at, new.result_applied_at,
                             new.response_status, new.error_code, new.duration_ms, new.retry_after_seconds,
                             new.response_excerpt) = 0;
    end case;
    if allowed is not true then
        raise exception using
            errcode = 'WH411',
            message = format('job %s cannot go from %s to %s with these changes', old.id, old.status, new.status),
            hint = 'schema/README.md lists the allowed transitions and what each may change.';
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
        where (s.event_id, s.subscription_id, s.final_error_code, e.payload::text, e.tenant)
            is distinct from (d.event_id, d.subscription_id, d.final_error_code, d.payload_snapshot::text, d.tenant))
    then
        raise exception using
            errcode = 'WH411',
            message = 'a dead letter must match its DeadLettered saga: event, subscription, error code, and the event''s payload and'
                ' tenant';
    end if;
    return null;
end
$$;
