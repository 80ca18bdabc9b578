-- owner: webhookd_owner
-- Owns: the helper functions that deliveries and the job queue share. They read and write no table.

-- Functions check their arguments with this before they read anything, so a refused call changes nothing. Without a fixed
-- search_path, which would cost more than the rest of the call (each gated function makes three to seven): it uses no name and no
-- operator that a schema could replace.
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
    subscription_admin, webhookd_jobqueue, retention_keeper, console_keeper;

-- Called before an answer that reports an earlier commit ("duplicate"). It writes a few bytes of WAL, so that this commit also
-- waits for the synchronous standby. The wait of the earlier commit may have been cancelled, and a transaction that writes
-- nothing would acknowledge data that only the primary has.
create or replace function webhookd.wait_for_sync_standby() returns void
language sql set search_path = pg_catalog, webhookd, pg_temp as $$
    select pg_logical_emit_message(true, 'webhookd', 'duplicate')
$$;
grant execute on function webhookd.wait_for_sync_standby() to webhookd_ingest, webhookd_jobqueue;

-- The delay before the next attempt: min(max_delay, max(retry_after, base · 2^(n-1) · (1 + jitter · u))). u is in [0, 1) and
-- depends only on saga and attempt, so every instance computes the same delay. sha256, because a FIPS build refuses md5.
-- The exponent is clamped at 62: there, every base above a nanosecond exceeds any max_delay. Computed in numeric, because
-- a product of doubles that underflows is an error.
create or replace function webhookd.backoff(
    saga_id bigint, attempt_count integer, base_delay_seconds double precision,
    max_delay_seconds double precision, jitter double precision, retry_after_seconds double precision)
returns interval
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select make_interval(secs => round(least(max_delay_seconds::numeric, greatest(
        coalesce(retry_after_seconds, 0)::numeric,
        base_delay_seconds::numeric * power(2::numeric, least(greatest(attempt_count - 1, 0), 62))
            * (1 + jitter::numeric * (
                ('x' || substr(encode(sha256(convert_to(saga_id || ':' || attempt_count, 'UTF8')), 'hex'), 1, 13))
                ::bit(52)::bigint / power(2::numeric, 52))))), 6)::double precision)
$$;
grant execute on function
    webhookd.backoff(bigint, integer, double precision, double precision, double precision, double precision)
    to saga_orchestrator, webhookd_jobqueue;

-- The same pattern as in the tables' CHECKs. A function that calls it refuses bad input with a readable message, before it
-- changes anything.
create or replace function webhookd.is_event_type(candidate text) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select coalesce(length(candidate) <= 100 and candidate ~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$', false)
$$;
grant execute on function webhookd.is_event_type(text) to webhookd_jobqueue;
