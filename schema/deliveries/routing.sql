-- owner: router_worker
-- Owns: routing. Takes events from the routing queue and creates their sagas, in one transaction. And replaying: past events to one
-- subscription.

-- Routes up to `batch_size` events, oldest first, to the subscriptions of their tenant that are routable in the statement's
-- snapshot, have a pattern for the type, and a filter that the labels contain: one saga for each, however many patterns match. An
-- event without a matching subscription only leaves the queue. The batch ends before the event that would exceed
-- `max_sagas`, so that a wide fan-out does not make a long transaction; a single event is always routed completely.
-- Served by the primary keys of the queue and of subscription_types. The subscriptions are looked up once in a batch for all events
-- with the same tenant, type and labels.
-- `first_event_id` is a low-water mark: it skips dead rows at the front of the queue that an open snapshot keeps. Pass the
-- returned `next_event_id`, and 0 once every poll interval, because a transaction that commits late has smaller ids.
create or replace function webhookd.route_events(
    batch_size integer, first_event_id bigint default 0, max_sagas integer default 10000)
returns table (events integer, sagas integer, subscription_ids bigint[], next_event_id bigint, more boolean, first_saga_id bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    taken_ids bigint[];
    saga_event_ids bigint[];
    saga_subscription_ids bigint[];
begin
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(first_event_id is not null, 'first_event_id must not be null');
    perform require(max_sagas > 0, 'max_sagas must be at least 1');

    with locked as materialized (
        select q.event_id, q.event_type, q.tenant, q.labels from event_routing_queue q where q.event_id >= first_event_id
        order by q.event_id limit batch_size for update skip locked
    ), fan_out as materialized (
        select t.event_type, t.tenant, t.labels,
               array(select distinct s.subscription_id from subscription_types s
                     -- patterns_of, written out: a function with a fixed search_path cannot be inlined.
                     where s.tenant = t.tenant and s.routable
                         and s.pattern = any(array[t.event_type, '*'] || array(
                             select array_to_string(w.words[1:i], '.') || '.*'
                             from (select string_to_array(t.event_type, '.') as words) w,
                                  generate_series(1, cardinality(w.words) - 1) i))
                         and (s.filter is null or s.filter <@ t.labels)) as ids
        from (select distinct l.event_type, l.tenant, l.labels from locked l) t
    ), taken as materialized (
        select r.event_id, r.ids
        from (select l.event_id, f.ids, sum(cardinality(f.ids)) over (order by l.event_id) as running
              from locked l
              join fan_out f on f.event_type = l.event_type and f.tenant = l.tenant and f.labels is not distinct from l.labels) r
        where r.running <= max_sagas or r.running = cardinality(r.ids)
    )
    select array(select t.event_id from taken t), array_agg(p.event_id), array_agg(p.subscription_id),
           (select count(*) from locked) = batch_size or (select count(*) from locked) > (select count(*) from taken)
    into taken_ids, saga_event_ids, saga_subscription_ids, more
    from (select t.event_id, u.subscription_id from taken t cross join unnest(t.ids) as u (subscription_id)) p;
    events := cardinality(taken_ids);
    sagas := coalesce(cardinality(saga_event_ids), 0);
    subscription_ids := '{}';

    if sagas > 0 then
        begin
            with made as (
                insert into webhook_delivery_sagas (event_id, subscription_id)
                select p.event_id, p.subscription_id
                from unnest(saga_event_ids, saga_subscription_ids) as p (event_id, subscription_id)
                returning id
            )
            select min(m.id) into first_saga_id from made m;
        exception when unique_violation then
            -- Some of them are routed already, which should never happen. Not ON CONFLICT from the start: it writes each row
            -- twice to the WAL.
            insert into webhook_delivery_sagas (event_id, subscription_id)
            select p.event_id, p.subscription_id from unnest(saga_event_ids, saga_subscription_ids) as p (event_id, subscription_id)
            on conflict (event_id, subscription_id) where resent_from is null do nothing;
            get diagnostics sagas = row_count;
        end;
        subscription_ids := array(select distinct u.id from unnest(saga_subscription_ids) as u (id));
    end if;
    if events > 0 then
        delete from event_routing_queue q where q.event_id = any(taken_ids);
    end if;

    select q.event_id into next_event_id from event_routing_queue q where q.event_id >= first_event_id
    order by q.event_id limit 1;
    next_event_id := coalesce(next_event_id, taken_ids[events] + 1, first_event_id);
    return next;
end
$$;
grant execute on function webhookd.route_events(integer, bigint, integer) to webhookd_app;


-- Replays one batch of past events to a subscription, oldest first: creates sagas of those that match its patterns and filter now and
-- were never routed to it (`missing`), and with `include_all` also resends the finished sagas of the others. Reads `batch_size` events;
-- call it again with `last_event_id` until `examined` is less. The unique indexes of sagas make a repeated or concurrent call harmless.
-- `started_at` is the time of the whole replay's first call: what was sent again since then is skipped.
-- `payload_removed` counts events that would match, but have no payload any more.
-- A batch is a range of idx_event_created, or of idx_event_tenant.
create or replace function webhookd.replay_events(
    subscription_id bigint, since timestamptz, until timestamptz, only_types text[], include_all boolean, started_at timestamptz,
    after_event_id bigint, batch_size integer, dry_run boolean, only_tenant text default null)
returns table (examined integer, matched integer, created integer, payload_removed integer, last_event_id bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    subscription subscriptions;
    after_at timestamptz := since;
    examined_ids bigint[];
    matching_ids bigint[];
    missing_ids bigint[];
    removed_ids bigint[];
begin
    perform require(replay_events.subscription_id is not null, 'subscription_id must not be null');
    perform require(since < until, 'since must be before until');
    perform require(include_all is not null, 'include_all must not be null');
    perform require(started_at is not null, 'started_at must not be null');
    perform require(after_event_id is not null, 'after_event_id must not be null');
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(dry_run is not null, 'dry_run must not be null');
    select * into subscription from subscriptions u
    where u.id = replay_events.subscription_id and u.deleted_at is null and (only_tenant is null or u.tenant = only_tenant);
    if not found then
        raise exception using errcode = 'WH404', message = format('subscription %s does not exist', replay_events.subscription_id);
    elsif not subscription.routable then
        raise exception using
            errcode = 'WH412',
            message = format('subscription %s is not active and verified', subscription.id),
            hint = 'Enable and verify it first: until then new deliveries would only wait.';
    end if;
    if after_event_id <> 0 then
        select e.created_at into after_at from events e
        where e.id = after_event_id and (subscription.tenant = '' or e.tenant = subscription.tenant);
        -- If retention has removed it, begin again: what was replayed is skipped.
        after_at := coalesce(after_at, since);
        perform require(after_at >= since, 'after_event_id must be 0 or an event of the replay');
    end if;

    if subscription.tenant = '' then
        examined_ids := array(
            select e.id from (
                select e.id, e.created_at from events e
                where (e.created_at, e.id) > (after_at, after_event_id)
                order by e.created_at, e.id limit batch_size) e
            where e.created_at < until);
    else
        examined_ids := array(
            select e.id from (
                select e.id, e.tenant, e.created_at from events e
                where e.tenant <> '' and (e.tenant, e.created_at, e.id) > (subscription.tenant, after_at, after_event_id)
                order by e.tenant, e.created_at, e.id limit batch_size) e
            where e.tenant = subscription.tenant and e.created_at < until);
    end if;
    -- An event that waits for routing is about to be routed.
    select coalesce(array_agg(e.id) filter (where e.payload_removed_at is null), '{}'),
           coalesce(array_agg(e.id) filter (where e.payload_removed_at is not null), '{}')
    into matching_ids, removed_ids
    from events e
    where e.id = any(examined_ids) and e.tenant = subscription.tenant
        and subscription.event_types::text[] && patterns_of(e.event_type)
        and (only_types is null or only_types && patterns_of(e.event_type))
        and (subscription.filter is null or subscription.filter <@ e.labels)
        and not exists (select from event_routing_queue q where q.event_id = e.id);
    if not dry_run then
        matching_ids := lock_events(matching_ids);
    end if;
    missing_ids := array(
        select m.id from unnest(matching_ids) as m (id)
        where not exists (select from webhook_delivery_sagas s
                          where s.event_id = m.id and s.subscription_id = subscription.id and s.resent_from is null));
    examined := cardinality(examined_ids);
    last_event_id := coalesce(examined_ids[examined], after_event_id);
    matched := cardinality(matching_ids);
    created := cardinality(missing_ids);
    payload_removed := cardinality(removed_ids);
    if include_all then
        created := created + resend_deliveries(
            array(select greatest(
                      (select s.id from webhook_delivery_sagas s
                       where s.event_id = m.id and s.subscription_id = subscription.id and s.resent_from is null),
                      (select max(s.id) from webhook_delivery_sagas s
                       where s.event_id = m.id and s.subscription_id = subscription.id and s.resent_from is not null))
                  from unnest(matching_ids) as m (id)),
            started_at, dry_run);
    else
        matched := created;
        payload_removed := (
            select count(*) from unnest(removed_ids) as m (id)
            where not exists (select from webhook_delivery_sagas s
                              where s.event_id = m.id and s.subscription_id = subscription.id and s.resent_from is null));
    end if;
    if not dry_run and missing_ids <> '{}' then
        insert into webhook_delivery_sagas (event_id, subscription_id)
        select m.id, subscription.id from unnest(missing_ids) as m (id)
        on conflict (event_id, subscription_id) where resent_from is null do nothing;
    end if;
    return next;
end
$$;
grant execute on function webhookd.replay_events(
    bigint, timestamptz, timestamptz, text[], boolean, timestamptz, bigint, integer, boolean, text) to webhookd_app;
