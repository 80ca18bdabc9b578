-- owner: lease_cleaner
-- Owns: expired leases. The job becomes Pending again and loses its token, so that a late report of the old holder is refused.

-- After `max_lease_resets` resets, the next expiry fails the job (LEASE_EXPIRED), because the job itself may crash its workers;
-- the saga then counts an attempt. Returns the old leases, for the log. Served by idx_job_status_lease; `first_lease_until` is a
-- low-water mark.
create or replace function webhookd.reset_expired_leases(
    batch_size integer, max_lease_resets integer, first_lease_until timestamptz default '-infinity')
returns table (job_id bigint, saga_id bigint, subscription_id bigint, worker_id text, lease_until timestamptz,
               lease_resets integer, status webhookd.job_status)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
begin
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(max_lease_resets >= 0, 'max_lease_resets must be 0 or more');
    perform require(first_lease_until is not null, 'first_lease_until must not be null');

    return query
    with expired as materialized (
        select j.id, j.worker_id, j.lease_until, j.lease_resets >= max_lease_resets as given_up
        from webhook_delivery_jobs j
        where j.status = 'Leased' and j.lease_until < now() and j.lease_until >= first_lease_until
        order by j.lease_until, j.id limit batch_size for update skip locked
    ), reset as (
        update webhook_delivery_jobs j
        set status = 'Pending', lease_until = null, lease_token = null, worker_id = null, lease_resets = j.lease_resets + 1
        where j.id = any(array(select e.id from expired e where not e.given_up))
        returning j.id, j.saga_id, j.subscription_id, j.lease_resets, j.status
    ), failed as (
        update webhook_delivery_jobs j
        set status = 'Failed', error_code = 'LEASE_EXPIRED', lease_token = null, finished_at = now()
        where j.id = any(array(select e.id from expired e where e.given_up))
        returning j.id, j.saga_id, j.subscription_id, j.lease_resets, j.status
    )
    select e.id, c.saga_id, c.subscription_id, e.worker_id::text, e.lease_until, c.lease_resets, c.status
    from expired e join (select * from reset union all select * from failed) c on c.id = e.id;
end
$$;
grant execute on function webhookd.reset_expired_leases(integer, integer, timestamptz) to webhookd_app;
