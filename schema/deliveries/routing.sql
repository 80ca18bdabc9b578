-- owner: router_worker
-- Owns: routing. Takes events from the routing queue and creates their sagas, in one transaction.

-- Routes up to `batch_size` events, oldest first, to the subscriptions that are active and verified in the statement's
-- snapshot. An event without a matching subscription only leaves the queue. The batch ends before the event that would exceed
-- `max_sagas`, so that a wide fan-out does not make a long transaction; a single event is always routed completely.
-- Served by the queue's primary key and idx_sub_event_type; the subscriptions of each event type are looked up once for a batch.
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
        select q.event_id, q.event_type from event_routing_queue q where q.event_id >= first_event_id
        order by q.event_id limit batch_size for update skip locked
    ), fan_out as materialized (
        select t.event_type, array(select s.id from subscriptions s
                                   where s.event_type = t.event_type and s.active and s.verified order by s.id) as ids
        from (select distinct l.event_type from locked l) t
    ), taken as materialized (
        select r.event_id, r.ids
        from (select l.event_id, f.ids, sum(cardinality(f.ids)) over (order by l.event_id) as running
              from locked l join fan_out f on f.event_type = l.event_type) r
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
            on conflict (event_id, subscription_id) where dead_letter_id is null do nothing;
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
