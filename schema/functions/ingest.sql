-- owner: webhookd_ingest
-- Owns: how an event becomes a row of events. Hands on: ids; the queue row and the wake-up come from a trigger.

-- Many events in one commit, all or nothing; answers in the order given. A key that was used for the same type and
-- payload text gives the first event's id; for other content the whole call is refused (WH409). A key of a
-- transaction still open: waits for its end, no longer than lock_timeout.
create or replace function webhookd.publish_many(
    event_types text[], payloads json[], idempotency_keys text[], correlation_ids text[])
returns table (id bigint, created_at timestamptz, duplicate boolean)
language plpgsql security definer
-- Planned once for a session, by keys: for each call anew it took a twentieth of the time of a lone event.
set search_path = pg_catalog, webhookd, pg_temp set jit = off set plan_cache_mode = force_generic_plan
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    size constant integer := cardinality(event_types);
    new_ids bigint[];
    inserted_ids bigint[];
    conflicting_key text;
    conflicting_id bigint;
begin
    perform require(size > 0 and size = cardinality(payloads)
                    and size = cardinality(idempotency_keys) and size = cardinality(correlation_ids),
                    'one event type, payload, idempotency key and correlation id for each event, and at least one event');
    perform require((select bool_and(is_event_type(t)) from unnest(event_types) t),
                    'event_type must be 1 to 100 characters: words of letters, digits and _, joined by dots');
    perform require(not exists (select from unnest(payloads) p where p is null), 'payload must be a JSON text, not null');
    perform require(not exists (select from unnest(payloads) p where octet_length(p::text) > 8388608),
                    'payload must be at most 8388608 bytes');
    perform require(not exists (select from unnest(idempotency_keys) k
                                where length(k) not between 1 and 255 or k !~ '^[^[:cntrl:]]+$'),
                    'idempotency_key must be 1 to 255 characters, none of them a control character');
    perform require(not exists (select from unnest(correlation_ids) c
                                where length(c) > 255 or c !~ '^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$'),
                    'correlation_id must be 1 to 255 visible ASCII characters: it travels in a header');

    -- Ids are taken first, because RETURNING does not say which of the given rows it speaks of.
    new_ids := array(select nextval('events_id_seq') from generate_series(1, size));

    if cardinality(array_remove(idempotency_keys, null)) = 0 then
        -- No keys at all: an ON CONFLICT would write each row twice to the WAL, to be able to take it back.
        insert into events (id, event_type, payload, correlation_id) overriding system value
        select g.id, g.event_type, g.payload, g.correlation_id
        from unnest(new_ids, event_types, payloads, correlation_ids) as g (id, event_type, payload, correlation_id);
        return query select n.id, now(), false from unnest(new_ids) with ordinality as n (id, place) order by n.place;
        return;
    end if;

    -- In the order of the keys: two batches that share keys then wait for each other, and cannot deadlock.
    with given as (
        select * from unnest(new_ids, event_types, payloads, idempotency_keys, correlation_ids)
            as g (id, event_type, payload, idempotency_key, correlation_id)
    ), inserted as (
        insert into events (id, event_type, payload, idempotency_key, correlation_id) overriding system value
        select g.id, g.event_type, g.payload, g.idempotency_key, g.correlation_id
        from given g order by g.idempotency_key collate "C" nulls first, g.id
        on conflict (idempotency_key) where idempotency_key is not null do nothing
        returning events.id
    )
    select array_agg(i.id) into inserted_ids from inserted i;

    if cardinality(inserted_ids) = size then
        return query select n.id, now(), false from unnest(new_ids) with ordinality as n (id, place) order by n.place;
        return;
    end if;

    -- A statement of its own: its snapshot sees the row that the insert waited for.
    select g.idempotency_key, e.id into conflicting_key, conflicting_id
    from unnest(new_ids, event_types, payloads, idempotency_keys) as g (id, event_type, payload, idempotency_key)
    join events e on e.idempotency_key = g.idempotency_key
    where e.id <> g.id and (e.event_type, e.payload::text) is distinct from (g.event_type, g.payload::text)
    limit 1;
    if found then
        raise exception using
            errcode = 'WH409',
            message = format('idempotency key %s was used for an event with other content', quote_literal(conflicting_key)),
            detail = format('event_id=%s', conflicting_id);
    end if;

    perform wait_as_the_first();
    return query
    select coalesce(e.id, g.id), coalesce(e.created_at, now()), coalesce(e.id <> g.id, false)
    from unnest(new_ids, idempotency_keys) with ordinality as g (id, idempotency_key, place)
    left join events e on e.idempotency_key = g.idempotency_key
    order by g.place;
end
$$;
grant execute on function webhookd.publish_many(text[], json[], text[], text[]) to event_ingest_writer, webhookd_app;

-- One event, inside whatever transaction the application has open: committed with it, gone with it.
create or replace function webhookd.publish(
    event_type text, payload json, idempotency_key text default null, correlation_id text default null)
returns bigint
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select p.id from publish_many(array[event_type], array[payload], array[idempotency_key], array[correlation_id]) p
$$;
grant execute on function webhookd.publish(text, json, text, text) to event_ingest_writer, webhookd_app;
