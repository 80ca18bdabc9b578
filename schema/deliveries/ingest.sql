-- owner: webhookd_ingest
-- Owns: publishing events. Returns their ids; a trigger adds the routing queue row and the wake-up.

-- Publishes many events in one statement, all or nothing, and returns a row for each in the same order. An idempotency key
-- that its tenant used before with the same type, payload text and labels returns the first event's id; with other content the
-- whole call is refused (WH409). If the key belongs to an open transaction, the call waits for its end, but not longer than
-- lock_timeout. Without `tenants` and `labels`, the events have none.
create or replace function webhookd.publish_many(
    event_types text[], payloads json[], idempotency_keys text[], correlation_ids text[], tenants text[] default null,
    labels jsonb[] default null)
returns table (id bigint, created_at timestamptz, duplicate boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    size constant integer := cardinality(event_types);
    complaint text;
    new_ids bigint[];
    inserted integer;
    missing_ids bigint[];
    conflicting_key text;
    conflicting_id bigint;
begin
    perform require(size > 0 and size = cardinality(payloads)
                    and size = cardinality(idempotency_keys) and size = cardinality(correlation_ids)
                    and size = coalesce(cardinality(tenants), size) and size = coalesce(cardinality(labels), size),
                    'the arrays must have one element for each event, and at least one');
    -- One pass checks everything: five passes took a seventh of the time of publishing a single event.
    select w.complaint into complaint
    from unnest(event_types, payloads, idempotency_keys, correlation_ids, tenants)
        as g (event_type, payload, idempotency_key, correlation_id, tenant)
    cross join lateral (select case
        -- The pattern of is_event_type, written out: a function with a fixed search_path cannot be inlined.
        when g.event_type is null or length(g.event_type) > 100 or g.event_type !~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$'
            then 'event_type must be 1 to 100 characters: words of letters, digits and _, joined by dots'
        when g.payload is null then 'payload must be a JSON text, not null'
        when octet_length(g.payload::text) > 8388608 then 'payload must be at most 8388608 bytes'
        when length(g.idempotency_key) not between 1 and 255 or g.idempotency_key !~ '^[^[:cntrl:]]+$'
            then 'idempotency_key must be 1 to 255 characters, none of them a control character'
        when length(g.correlation_id) > 255 or g.correlation_id !~ '^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$'
            then 'correlation_id must be 1 to 255 visible ASCII characters, because it is sent in a header'
        when g.tenant <> '' and (length(g.tenant) > 100 or g.tenant !~ '^[A-Za-z0-9._:-]+$')
            then 'tenant must be 1 to 100 letters, digits and . _ : -'
        end as complaint) w
    where w.complaint is not null limit 1;
    perform require(complaint is null, complaint);

    -- Ids are taken first, because RETURNING does not say which argument a row belongs to.
    new_ids := array(select nextval('events_id_seq') from generate_series(1, size));

    if cardinality(array_remove(idempotency_keys, null)) = 0 then
        -- Without any key no ON CONFLICT is needed, which would write each row twice to the WAL.
        insert into events (id, event_type, payload, correlation_id, tenant, labels) overriding system value
        select g.id, g.event_type, g.payload, g.correlation_id, coalesce(g.tenant, ''), nullif(g.labels, '{}')
        from unnest(new_ids, event_types, payloads, correlation_ids, tenants, labels)
            as g (id, event_type, payload, correlation_id, tenant, labels);
        get diagnostics inserted = row_count;
    else
        -- In the order of the keys, so that two batches that share keys cannot deadlock.
        insert into events (id, event_type, payload, idempotency_key, correlation_id, tenant, labels) overriding system value
        select g.id, g.event_type, g.payload, g.idempotency_key, g.correlation_id, coalesce(g.tenant, ''), nullif(g.labels, '{}')
        from unnest(new_ids, event_types, payloads, idempotency_keys, correlation_ids, tenants, labels)
            as g (id, event_type, payload, idempotency_key, correlation_id, tenant, labels)
        order by g.idempotency_key collate "C" nulls first, coalesce(g.tenant, '') collate "C", g.id
        on conflict (idempotency_key, tenant) where idempotency_key is not null do nothing;
        get diagnostics inserted = row_count;
        -- Retention may remove the event that an insert met, while the insert waits for another key: publish those again.
        while inserted < size loop
            missing_ids := array(
                select g.id from unnest(new_ids, idempotency_keys, tenants) as g (id, idempotency_key, tenant)
                where g.idempotency_key is not null
                    and not exists (select from events k
                                    where k.tenant = coalesce(g.tenant, '') and k.idempotency_key = g.idempotency_key offset 0));
            exit when missing_ids = '{}';
            insert into events (id, event_type, payload, idempotency_key, correlation_id, tenant, labels) overriding system value
            select g.id, g.event_type, g.payload, g.idempotency_key, g.correlation_id, coalesce(g.tenant, ''), nullif(g.labels, '{}')
            from unnest(new_ids, event_types, payloads, idempotency_keys, correlation_ids, tenants, labels)
                as g (id, event_type, payload, idempotency_key, correlation_id, tenant, labels)
            where g.id = any(missing_ids)
            order by g.idempotency_key collate "C", coalesce(g.tenant, '') collate "C", g.id
            on conflict (idempotency_key, tenant) where idempotency_key is not null do nothing;
        end loop;
    end if;
    if inserted = size then
        return query select n.id, now(), false from unnest(new_ids) with ordinality as n (id, place) order by n.place;
        return;
    end if;

    -- A new statement: its snapshot sees the row that the insert waited for. `offset 0` keeps the lookup by key: a plan from when
    -- the table was empty compared each key with all events.
    select g.idempotency_key, e.id into conflicting_key, conflicting_id
    from unnest(new_ids, event_types, payloads, idempotency_keys, tenants, labels)
        as g (id, event_type, payload, idempotency_key, tenant, labels)
    cross join lateral (
        select k.id, k.event_type, k.payload, k.labels, k.payload_removed_at from events k
        where k.tenant = coalesce(g.tenant, '') and k.idempotency_key = g.idempotency_key offset 0) e
    where e.id <> g.id
        and ((e.event_type, e.labels) is distinct from (g.event_type, nullif(g.labels, '{}'))
             -- A removed payload cannot be compared any more.
             or e.payload_removed_at is null and e.payload::text <> g.payload::text)
    limit 1;
    if found then
        raise exception using
            errcode = 'WH409',
            message = format('idempotency key %s was used for an event with other content', quote_literal(conflicting_key)),
            detail = format('event_id=%s', conflicting_id);
    end if;

    perform wait_for_sync_standby();
    return query
    select coalesce(e.id, g.id), coalesce(e.created_at, now()), coalesce(e.id <> g.id, false)
    from unnest(new_ids, idempotency_keys, tenants) with ordinality as g (id, idempotency_key, tenant, place)
    left join lateral (
        select k.id, k.created_at from events k
        where k.tenant = coalesce(g.tenant, '') and k.idempotency_key = g.idempotency_key offset 0) e on true
    order by g.place;
end
$$;
grant execute on function webhookd.publish_many(text[], json[], text[], text[], text[], jsonb[]) to event_ingest_writer, webhookd_app;

-- Publishes one event as part of the application's transaction: it commits or rolls back with it. The payload can be json, jsonb, or
-- text, which a literal without a type and the strings of most drivers are.
create or replace function webhookd.publish(
    event_type text, payload json, idempotency_key text default null, correlation_id text default null, tenant text default '',
    labels jsonb default null)
returns bigint
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select p.id from publish_many(array[event_type], array[payload], array[idempotency_key], array[correlation_id], array[tenant],
                                  array[labels]) p
$$;
create or replace function webhookd.publish(
    event_type text, payload jsonb, idempotency_key text default null, correlation_id text default null, tenant text default '',
    labels jsonb default null)
returns bigint
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select p.id from publish_many(array[event_type], array[payload::json], array[idempotency_key], array[correlation_id],
                                  array[tenant], array[labels]) p
$$;
create or replace function webhookd.publish(
    event_type text, payload text, idempotency_key text default null, correlation_id text default null, tenant text default '',
    labels jsonb default null)
returns bigint
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select p.id from publish_many(array[event_type], array[payload::json], array[idempotency_key], array[correlation_id],
                                  array[tenant], array[labels]) p
$$;
grant execute on function
    webhookd.publish(text, json, text, text, text, jsonb), webhookd.publish(text, jsonb, text, text, text, jsonb),
    webhookd.publish(text, text, text, text, text, jsonb) to event_ingest_writer, webhookd_app;
