-- owner: webhookd_owner
-- Owns: the helper functions that several stages of the deliveries share. They read and write no table.

-- Whether a single row caused an error, so that the rest of the batch can continue without that row. False for conflicts
-- with other transactions (40) and for the server's resources, locks, shutdown and disk (53, 55, 57, 58).
create or replace function webhookd.is_row_error(state text) returns boolean
language sql immutable set search_path = pg_catalog, webhookd, pg_temp as $$
    select left(state, 2) <> all('{40,53,55,57,58}')
$$;
grant execute on function webhookd.is_row_error(text) to saga_orchestrator;

-- The patterns that match an event type, such as a.b.c, a.b.*, a.* and *.
create or replace function webhookd.patterns_of(event_type text) returns text[]
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select array[event_type, '*'] || array(
        select array_to_string(w.words[1:i], '.') || '.*'
        from (select string_to_array(event_type, '.') as words) w, generate_series(1, cardinality(w.words) - 1) i)
$$;
grant execute on function webhookd.patterns_of(text) to router_worker, webhookd_reader;

-- Labels of an event, or a filter of a subscription: up to 20 texts of up to 100 characters with names of up to 100.
create or replace function webhookd.is_labels(candidate jsonb) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select case when jsonb_typeof(candidate) = 'object' then (
        select count(*) <= 20 and coalesce(bool_and(length(l.key) between 1 and 100 and jsonb_typeof(l.value) = 'string'
                                                    and length(l.value #>> '{}') <= 100), true)
        from jsonb_each(candidate) l) else false end
$$;
grant execute on function webhookd.is_labels(jsonb) to subscription_admin;

-- The same patterns as in the tables' CHECKs, for readable messages.
create or replace function webhookd.is_tenant(candidate text) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select coalesce(length(candidate) <= 100 and candidate ~ '^[A-Za-z0-9._:-]+$', false)
$$;

create or replace function webhookd.are_event_types(candidates text[]) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select coalesce(cardinality(candidates) between 1 and 100 and (
        select bool_and(coalesce(length(c.pattern) <= 100 and c.pattern ~ '^([a-zA-Z0-9_]+\.)*([a-zA-Z0-9_]+|\*)$', false))
        from unnest(candidates) as c (pattern)), false)
$$;

create or replace function webhookd.is_callback_url(candidate text) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select coalesce(length(candidate) <= 500
        and candidate ~ '^https://(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z]([0-9A-Za-z.-]*[0-9A-Za-z])?)(:[0-9]{1,5})?([/?][!"$-~]*)?$', false)
$$;

create or replace function webhookd.is_secret(candidate text) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select case when candidate ~ '^whsec_([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
                then octet_length(decode(substr(candidate, 7), 'base64')) between 24 and 64 else false end
$$;
grant execute on function webhookd.is_tenant(text) to console_keeper;
grant execute on function webhookd.is_tenant(text), webhookd.are_event_types(text[]), webhookd.is_callback_url(text),
    webhookd.is_secret(text) to subscription_admin;

-- The secrets that sign now, newest first.
create or replace function webhookd.live_secrets(of webhookd.subscription_secrets) returns text[]
language sql stable set search_path = pg_catalog, webhookd, pg_temp as $$
    select (of).secret || array(
        select p.secret
        from unnest((of).previous_secrets, (of).previous_valid_until) with ordinality as p (secret, valid_until, age)
        where p.valid_until > now() order by p.age)
$$;
grant execute on function webhookd.live_secrets(webhookd.subscription_secrets) to job_worker, subscription_admin;

-- The body of the format `standard`, which Standard Webhooks recommends: the signature covers the event type and its time. The payload
-- stays as it was accepted, byte for byte. An event type needs no escaping.
create or replace function webhookd.standard_body(event_type text, created_at timestamptz, payload text) returns text
language sql stable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select '{"type":"' || event_type || '","timestamp":"'
        || to_char(created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') || '","data":' || payload || '}'
$$;
grant execute on function webhookd.standard_body(text, timestamptz, text) to job_worker, subscription_admin;
