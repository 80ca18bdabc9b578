-- owner: dead_letter_operator
-- Owns: dead letters, and resending and requeueing, which create a new saga. Never changes the old saga, a job or a subscription.

-- Writes the dead letters of sagas that the orchestrator moves to DeadLettered in the same transaction; triggers check both.
create or replace function webhookd.bury(saga_ids bigint[])
returns table (dead_letter_id bigint, saga_id bigint, correlation_id text)
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    with buried as (
        insert into dead_letters (saga_id, event_id, subscription_id, final_error_code, payload_snapshot, tenant)
        select s.id, s.event_id, s.subscription_id, s.final_error_code, e.payload, e.tenant
        from webhook_delivery_sagas s join events e on e.id = s.event_id
        where s.id = any(saga_ids)
        order by s.id
        returning id, saga_id, event_id
    )
    select b.id, b.saga_id, e.correlation_id::text from buried b join events e on e.id = b.event_id
$$;
grant execute on function webhookd.bury(bigint[]) to saga_orchestrator;

create or replace function webhookd.refuse_without_payload(event_id bigint) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    raise exception using
        errcode = 'WH417',
        message = format('the payload of event %s was removed', event_id),
        hint = 'Retention removes payloads after retention.payloads_days.';
end
$$;

-- Creates a new saga for the same event and subscription, at most once for each dead letter. Later and concurrent calls return
-- the existing saga (`created` is false). With `only_tenant`, the dead letters of others do not exist.
create or replace function webhookd.requeue_dead_letter(dead_letter_id bigint, only_tenant text default null)
returns table (saga_id bigint, subscription_id bigint, created boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    letter record;
    event_is_locked boolean;
begin
    perform require(requeue_dead_letter.dead_letter_id is not null, 'dead_letter_id must not be null');
    event_is_locked := lock_events(array(
        select d.event_id from dead_letters d where d.id = requeue_dead_letter.dead_letter_id)) <> '{}';
    -- After the lock: retention may have removed the dead letter until then.
    select d.id, d.saga_id as buried_saga_id, d.event_id, d.subscription_id, u.routable, r.id as saga_id into letter
    from dead_letters d
    join subscriptions u on u.id = d.subscription_id
    left join webhook_delivery_sagas r on r.dead_letter_id = d.id
    where d.id = requeue_dead_letter.dead_letter_id and (only_tenant is null or d.tenant = only_tenant);
    if not found then
        raise exception using errcode = 'WH404', message = format('dead letter %s does not exist', requeue_dead_letter.dead_letter_id);
    end if;
    if letter.saga_id is null and not event_is_locked then
        perform refuse_without_payload(letter.event_id);
    elsif letter.saga_id is null and not letter.routable then
        raise exception using
            errcode = 'WH412',
            message = format('subscription %s is not active and verified', letter.subscription_id),
            hint = 'Enable and verify it first: until then a new delivery would only wait.';
    end if;

    subscription_id := letter.subscription_id;
    saga_id := letter.saga_id;
    created := false;
    if saga_id is null then
        insert into webhook_delivery_sagas as s (event_id, subscription_id, dead_letter_id, resent_from)
        values (letter.event_id, letter.subscription_id, letter.id, letter.buried_saga_id)
        on conflict do nothing  -- of both unique indexes: of the dead letter, and of live resends
        returning s.id into saga_id;
        created := found;
    end if;
    if saga_id is null then  -- a concurrent call was faster: the insert waited for its commit, and this snapshot sees it
        select s.id into saga_id from webhook_delivery_sagas s where s.dead_letter_id = letter.id;
    end if;
    return next;
end
$$;
grant execute on function webhookd.requeue_dead_letter(bigint, text) to webhookd_app;

-- Creates a new saga that repeats a finished one. For a dead letter this is the requeue. At most one resend of a saga is live at a
-- time: later and concurrent calls return that one (`created` is false).
create or replace function webhookd.resend_delivery(saga_id bigint, only_tenant text default null)
returns table (new_saga_id bigint, subscription_id bigint, created boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    finished record;
    event_is_locked boolean;
begin
    perform require(resend_delivery.saga_id is not null, 'saga_id must not be null');
    event_is_locked := lock_events(array(
        select s.event_id from webhook_delivery_sagas s where s.id = resend_delivery.saga_id)) <> '{}';
    -- After the lock: retention may have removed the delivery until then.
    select s.id, s.event_id, s.subscription_id, s.status, u.routable, d.id as dead_letter_id into finished
    from webhook_delivery_sagas s
    join subscriptions u on u.id = s.subscription_id
    left join dead_letters d on d.saga_id = s.id
    where s.id = resend_delivery.saga_id and (only_tenant is null or u.tenant = only_tenant);
    if not found then
        raise exception using errcode = 'WH404', message = format('delivery %s does not exist', resend_delivery.saga_id);
    elsif finished.status not in ('Completed', 'DeadLettered') then
        raise exception using
            errcode = 'WH415',
            message = format('delivery %s is %s, and only a finished one can be resent', finished.id, finished.status);
    elsif finished.dead_letter_id is not null then
        return query select r.saga_id, r.subscription_id, r.created from requeue_dead_letter(finished.dead_letter_id) r;
        return;
    end if;

    if not event_is_locked then
        perform refuse_without_payload(finished.event_id);
    end if;
    subscription_id := finished.subscription_id;
    loop
        select s.id into new_saga_id from webhook_delivery_sagas s
        where s.resent_from = finished.id and s.status in ('Pending', 'InProgress', 'PendingRetry');
        created := not found;
        if created then
            if not finished.routable then
                raise exception using
                    errcode = 'WH412',
                    message = format('subscription %s is not active and verified', finished.subscription_id),
                    hint = 'Enable and verify it first: until then a new delivery would only wait.';
            end if;
            insert into webhook_delivery_sagas as s (event_id, subscription_id, resent_from)
            values (finished.event_id, finished.subscription_id, finished.id)
            on conflict (resent_from) where resent_from is not null and status in ('Pending', 'InProgress', 'PendingRetry') do nothing
            returning s.id into new_saga_id;
        end if;
        -- Otherwise a concurrent call was faster, and its saga may be finished by now: look again.
        exit when new_saga_id is not null;
    end loop;
    return next;
end
$$;
grant execute on function webhookd.resend_delivery(bigint, text) to webhookd_app;

-- Resends finished sagas of a replay, each the latest of its event and subscription. Internal. Skips those that were created since
-- `started_at`, so that a repeated replay creates each saga once, and those that are not finished.
create or replace function webhookd.resend_deliveries(saga_ids bigint[], started_at timestamptz, dry_run boolean) returns integer
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    possible_ids constant bigint[] := array(
        select s.id from webhook_delivery_sagas s
        where s.id = any(saga_ids) and (s.status in ('Completed', 'DeadLettered')) is true and s.created_at < started_at);
    resent integer := cardinality(possible_ids);
begin
    if not dry_run then
        insert into webhook_delivery_sagas (event_id, subscription_id, resent_from, dead_letter_id)
        select s.event_id, s.subscription_id, s.id, d.id
        from webhook_delivery_sagas s left join dead_letters d on d.saga_id = s.id
        where s.id = any(possible_ids) order by s.id
        on conflict do nothing;
        get diagnostics resent = row_count;
    end if;
    return resent;
end
$$;
grant execute on function webhookd.resend_deliveries(bigint[], timestamptz, boolean) to router_worker;

-- Requeues one batch of the dead letters that match the filter, oldest first; a null filter matches all. Call it again with
-- `last_id` until `matched` is less than the batch size. `skipped` counts dead letters that were requeued before, whose payload was
-- removed, or whose subscription is not active and verified; `payload_removed` counts those of them that can never be requeued, because
-- their payload was removed before they were. A dry run only counts.
--
-- A batch is a range of one index, read in its order: idx_dead_failed, idx_dead_subscription, idx_dead_error,
-- idx_dead_subscription_error, idx_dead_tenant or idx_dead_tenant_error. The range starts after the dead letter `after_id`, by a row comparison, which no other index can
-- serve: with `subscription_id = 7` the planner may walk through a year of dead letters of all subscriptions. The end of the
-- range is checked outside of the LIMIT: with an upper row comparison, the scan would end only where the first column changes.
create or replace function webhookd.requeue_dead_letters(
    only_subscription_id bigint, only_error_code text, failed_after timestamptz, failed_before timestamptz,
    after_id bigint, batch_size integer, dry_run boolean, only_tenant text default null)
returns table (matched integer, requeued integer, skipped integer, payload_removed integer, last_id bigint,
               subscription_ids bigint[])
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    since timestamptz := coalesce(failed_after, '-infinity');
    after_at timestamptz;
    before constant timestamptz := coalesce(failed_before, 'infinity');
    since_id bigint := 0;
    matching_ids bigint[];
    possible_ids bigint[];
    saga_ids bigint[];
    event_ids bigint[];
    saga_subscription_ids bigint[];
    locked_ids bigint[];
begin
    perform require(after_id is not null, 'after_id must not be null');
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(dry_run is not null, 'dry_run must not be null');
    perform require(only_tenant is null or only_tenant <> '', 'only_tenant must not be empty');
    if after_id <> 0 then
        -- If retention has removed it, begin again: what was requeued is skipped.
        select greatest(d.failed_at, since), case when d.failed_at >= since then d.id else 0 end into after_at, since_id
        from dead_letters d where d.id = after_id and (only_tenant is null or d.tenant = only_tenant);
        since := coalesce(after_at, since);
        since_id := coalesce(since_id, 0);
    end if;

    if only_tenant is not null and only_subscription_id is not null
        and not exists (select from subscriptions s where s.id = only_subscription_id and s.tenant = only_tenant)
    then
        matching_ids := '{}';
    elsif only_tenant is not null and only_subscription_id is null and only_error_code is null then
        matching_ids := array(
            select d.id from (
                select d.id, d.tenant, d.failed_at from dead_letters d
                where d.tenant <> '' and (d.tenant, d.failed_at, d.id) > (only_tenant, since, since_id)
                order by d.tenant, d.failed_at, d.id limit batch_size) d
            where d.tenant = only_tenant and d.failed_at < before);
    elsif only_tenant is not null and only_subscription_id is null then
        matching_ids := array(
            select d.id from (
                select d.id, d.tenant, d.final_error_code, d.failed_at from dead_letters d
                where d.tenant <> '' and (d.tenant, d.final_error_code, d.failed_at, d.id)
                    > (only_tenant, only_error_code, since, since_id)
                order by d.tenant, d.final_error_code, d.failed_at, d.id limit batch_size) d
            where d.tenant = only_tenant and d.final_error_code = only_error_code and d.failed_at < before);
    elsif only_subscription_id is null and only_error_code is null then
        matching_ids := array(
            select d.id from (
                select d.id, d.failed_at from dead_letters d
                where (d.failed_at, d.id) > (since, since_id)
                order by d.failed_at, d.id limit batch_size) d
            where d.failed_at < before);
    elsif only_error_code is null then
        matching_ids := array(
            select d.id from (
                select d.id, d.subscription_id, d.failed_at from dead_letters d
                where (d.subscription_id, d.failed_at, d.id) > (only_subscription_id, since, since_id)
                order by d.subscription_id, d.failed_at, d.id limit batch_size) d
            where d.subscription_id = only_subscription_id and d.failed_at < before);
    elsif only_subscription_id is null then
        matching_ids := array(
            select d.id from (
                select d.id, d.final_error_code, d.failed_at from dead_letters d
                where (d.final_error_code, d.failed_at, d.id) > (only_error_code, since, since_id)
                order by d.final_error_code, d.failed_at, d.id limit batch_size) d
            where d.final_error_code = only_error_code and d.failed_at < before);
    else
        matching_ids := array(
            select d.id from (
                select d.id, d.subscription_id, d.final_error_code, d.failed_at from dead_letters d
                where (d.subscription_id, d.final_error_code, d.failed_at, d.id)
                    > (only_subscription_id, only_error_code, since, since_id)
                order by d.subscription_id, d.final_error_code, d.failed_at, d.id limit batch_size) d
            where d.subscription_id = only_subscription_id and d.final_error_code = only_error_code
                and d.failed_at < before);
    end if;

    select coalesce(array_agg(d.id order by d.id) filter (where d.is_possible), '{}'),
           array_agg(d.saga_id order by d.id) filter (where d.is_possible),
           array_agg(d.event_id order by d.id) filter (where d.is_possible),
           array_agg(d.subscription_id order by d.id) filter (where d.is_possible), count(*) filter (where d.payload_is_removed)
    into possible_ids, saga_ids, event_ids, saga_subscription_ids, payload_removed
    from (select d.id, d.saga_id, d.event_id, d.subscription_id, s.routable and e.payload_removed_at is null as is_possible,
                 e.payload_removed_at is not null as payload_is_removed
          from dead_letters d join subscriptions s on s.id = d.subscription_id join events e on e.id = d.event_id
          where d.id = any(matching_ids)
              and not exists (select from webhook_delivery_sagas r where r.dead_letter_id = d.id)) d;
    requeued := cardinality(possible_ids);
    subscription_ids := '{}';
    if requeued > 0 and not dry_run then
        -- A locked event still has its dead letters: retention removes both together.
        locked_ids := lock_events(event_ids);
        with made as (
            insert into webhook_delivery_sagas (event_id, subscription_id, dead_letter_id, resent_from)
            select p.event_id, p.subscription_id, p.id, p.saga_id
            from unnest(possible_ids, saga_ids, event_ids, saga_subscription_ids) as p (id, saga_id, event_id, subscription_id)
            where p.event_id = any(locked_ids) order by p.id
            on conflict do nothing
            returning subscription_id
        )
        select count(*), coalesce(array_agg(distinct m.subscription_id), '{}') into requeued, subscription_ids from made m;
    end if;
    matched := cardinality(matching_ids);
    skipped := matched - requeued;
    last_id := coalesce(matching_ids[matched], after_id);
    return next;
end
$$;
grant execute on function webhookd.requeue_dead_letters(bigint, text, timestamptz, timestamptz, bigint, integer, boolean, text)
    to webhookd_app;
