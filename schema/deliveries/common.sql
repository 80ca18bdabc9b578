-- owner: webhookd_owner
-- Owns: the helper functions that several stages of the deliveries share. They read and write no table.

-- Whether a single row caused an error, so that the rest of the batch can continue without that row. False for conflicts
-- with other transactions (40) and for the server's resources, locks, shutdown and disk (53, 55, 57, 58).
create or replace function webhookd.is_row_error(state text) returns boolean
language sql immutable set search_path = pg_catalog, webhookd, pg_temp as $$
    select left(state, 2) <> all('{40,53,55,57,58}')
$$;
grant execute on function webhookd.is_row_error(text) to saga_orchestrator;

-- The same patterns as in the tables' CHECKs, for readable messages.
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
grant execute on function webhookd.is_callback_url(text), webhookd.is_secret(text) to subscription_admin;

-- The secrets that sign now, newest first.
create or replace function webhookd.live_secrets(of webhookd.subscription_secrets) returns text[]
language sql stable set search_path = pg_catalog, webhookd, pg_temp as $$
    select (of).secret || array(
        select p.secret
        from unnest((of).previous_secrets, (of).previous_valid_until) with ordinality as p (secret, valid_until, age)
        where p.valid_until > now() order by p.age)
$$;
grant execute on function webhookd.live_secrets(webhookd.subscription_secrets) to job_worker, subscription_admin;
