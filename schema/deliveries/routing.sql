-- owner: router_worker
-- Owns: routing. Takes events from the routing queue and creates their sagas, in one transaction.

-- Routes up to `batch_size` events, oldest first, to the subscriptions that are active and verified in the statement's
-- snapshot. An event without a matching subscription only leaves the queue. The batch ends before the event that would exceed
-- `max_sagas`, so that a wide fan-out does not make a long transaction; a single event is always routed completely.
-- Served by the queue's primary key, the primary key of events and idx_sub_event_type.
-- `first_event_id` is a low-water mark: it skips dead rows at the front of the queue that an open snapshot keeps. Pass the
-- returned `next_event_id`, and 0 once every poll interval, because a transaction that commits late has smaller ids.
create or replace function webhookd.route_events(
    batch_size integer, first_event_id bigint default 0, max_sagas integer default 10000)
returns table (events integer, sagas integer, subscription_ids bigint[], next_event_id bigint, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    last_taken_id bigint;
begin
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(first_event_id is not null, 'first_event_id must not be null');
    perform require(max_sagas > 0, 'max_sagas must be at least 1');

    with locked as materialized (
        select q.event_id from event_routing_queue q where q.event_id >= first_event_id
        order by q.event_id limit batch_size for update skip locked
    ), typed as materialized (
        -- `offset 0` keeps the lookup by key: without statistics the planner read all events for each batch.
        select l.event_id, e.event_type
        from locked l cross join lateral (select k.event_type from events k where k.id = l.event_id offset 0) e
    ), fan_out as materialized (
        select t.event_type, count(s.id) as sagas
        from (select distinct d.event_type from typed d) t
        left join subscriptions s on s.event_type = t.event_type and s.active and s.verified
        group by t.event_type
    ), taken as materialized (
        select r.event_id, r.event_type
        from (select t.event_id, t.event_type, f.sagas, sum(f.sagas) over (order by t.event_id) as running
              from typed t join fan_out f on f.event_type = t.event_type) r
        where r.running <= max_sagas or r.running = r.sagas
    ), routed as (
        insert into webhook_delivery_sagas (event_id, subscription_id)
        select t.event_id, s.id
        from taken t join subscriptions s on s.event_type = t.event_type and s.active and s.verified
        order by t.event_id, s.id  -- sagas with the same due time start in the order of their ids
        on conflict (event_id, subscription_id) where dead_letter_id is null do nothing
        returning subscription_id
    ), done as (
        delete from event_routing_queue q where q.event_id = any(array(select t.event_id from taken t)) returning 1
    )
    select (select count(*) from done), (select count(*) from routed),
           coalesce((select array_agg(distinct r.subscription_id) from routed r), '{}'),
           (select max(t.event_id) from taken t),
           (select count(*) from locked) = batch_size or (select count(*) from locked) > (select count(*) from taken)
    into events, sagas, subscription_ids, last_taken_id, more;

    select q.event_id into next_event_id from event_routing_queue q where q.event_id >= first_event_id
    order by q.event_id limit 1;
    next_event_id := coalesce(next_event_id, last_taken_id + 1, first_event_id);
    return next;
end
$$;
grant execute on function webhookd.route_events(integer, bigint, integer) to webhookd_app;
