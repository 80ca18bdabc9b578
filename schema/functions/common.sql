-- owner: webhookd_owner
-- Owns: what several stages' functions share. No table is touched here.

-- Arguments are checked before anything is read: a refused call changes nothing.
create or replace function webhookd.require(condition boolean, complaint text) returns void
language plpgsql as $$
begin
    if condition is not true then
        raise exception using errcode = 'WH400', message = complaint;
    end if;
end
$$;
grant execute on function webhookd.require(boolean, text) to
    webhookd_ingest, router_worker, saga_orchestrator, job_worker, lease_cleaner, dead_letter_operator,
    subscription_admin, webhookd_jobs;

-- Whether an error is a row's own fault, so that the others of its batch should go on without it. Not: a conflict with
-- another transaction (40), the server's resources, locks, shutdown or disk (53, 55, 57, 58).
create or replace function webhookd.is_of_one_row(state text) returns boolean
language sql immutable set search_path = pg_catalog, webhookd, pg_temp as $$
    select left(state, 2) <> all('{40,53,55,57,58}')
$$;
grant execute on function webhookd.is_of_one_row(text) to saga_orchestrator, job_worker;

-- Before an answer that tells of an earlier commit. Writes a few bytes, so that this commit waits for a synchronous standby as
-- that one did: its wait may have been cancelled, and a call that writes nothing would acknowledge what only the primary has.
create or replace function webhookd.wait_as_the_first() returns void
language sql as $$
    select pg_logical_emit_message(true, 'webhookd', 'duplicate')
$$;
grant execute on function webhookd.wait_as_the_first() to webhookd_ingest, webhookd_jobs;

-- min(max_delay, max(retry_after, base · 2^(n-1) · (1 + jitter · u))), u in [0, 1) from saga and attempt alone:
-- the same saga waits the same time on every instance. sha256 and not md5, which a FIPS build refuses. The exponent is
-- clamped: from 2^62 on every base above a nanosecond is past any max_delay. In numeric, where no factor is too small:
-- a product of doubles that underflows is an error.
create or replace function webhookd.backoff(
    saga_id bigint, attempt_count integer, base_delay_seconds double precision,
    max_delay_seconds double precision, jitter double precision, retry_after_seconds double precision)
returns interval
language sql immutable parallel safe as $$
    select make_interval(secs => round(least(max_delay_seconds::numeric, greatest(
        coalesce(retry_after_seconds, 0)::numeric,
        base_delay_seconds::numeric * power(2::numeric, least(greatest(attempt_count - 1, 0), 62))
            * (1 + jitter::numeric * (
                ('x' || substr(encode(sha256(convert_to(saga_id || ':' || attempt_count, 'UTF8')), 'hex'), 1, 13))
                ::bit(52)::bigint / power(2::numeric, 52))))), 6)::double precision)
$$;
grant execute on function
    webhookd.backoff(bigint, integer, double precision, double precision, double precision, double precision)
    to saga_orchestrator, webhookd_jobs;


-- The forms that the tables' CHECKs ask for too. Here so that a call is refused in words, and before it changes anything.
create or replace function webhookd.is_event_type(candidate text) returns boolean
language sql immutable parallel safe as $$
    select coalesce(length(candidate) <= 100 and candidate ~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$', false)
$$;

create or replace function webhookd.is_callback_url(candidate text) returns boolean
language sql immutable parallel safe as $$
    select coalesce(length(candidate) <= 500
        and candidate ~ '^https://(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z]([0-9A-Za-z.-]*[0-9A-Za-z])?)(:[0-9]{1,5})?([/?][!"$-~]*)?$', false)
$$;

create or replace function webhookd.is_secret(candidate text) returns boolean
language sql immutable parallel safe as $$
    select case when candidate ~ '^whsec_([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
                then octet_length(decode(substr(candidate, 7), 'base64')) between 24 and 64 else false end
$$;
grant execute on function webhookd.is_event_type(text) to webhookd_ingest, subscription_admin, webhookd_jobs;
grant execute on function webhookd.is_callback_url(text), webhookd.is_secret(text) to subscription_admin;

-- What signs now, newest first.
create or replace function webhookd.live_secrets(of webhookd.subscription_secrets) returns text[]
language sql stable as $$
    select (of).secret || array(
        select p.secret
        from unnest((of).previous_secrets, (of).previous_valid_until) with ordinality as p (secret, valid_until, age)
        where p.valid_until > now() order by p.age)
$$;
grant execute on function webhookd.live_secrets(webhookd.subscription_secrets) to job_worker, subscription_admin;
