-- owner: webhookd_jobqueue
-- Owns: expired leases, due retries, deadlines, and the retention of finished jobs. Every instance calls these functions
-- periodically; concurrent calls skip each other's rows.

-- Also works while the queue is disabled, so that running jobs can end. A job with an expired lease goes back to the queue without
-- its token, so that its late holder is refused. The expiry after `max_lease_recoveries` is a failed attempt (LEASE_EXPIRED),
-- because the job may be what kills its executors. A deadline cancels waiting jobs; held jobs may still succeed. Scheduled jobs
-- that became due move to the claim order (see fn_job_claim); their status does not change.
create or replace function webhookd.fn_job_lease_reaper(p_batch_size integer default 1000)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    command constant text := 'fn_job_lease_reaper';
    actor constant text := 'webhookd';
    lost_ids uuid[];
    lost_statuses text[];
    lost_details jsonb[];  -- with the last signal of each holder, which the next one replaces
    given_up_ids uuid[];
    given_up_statuses text[];
    given_up_workflow_ids uuid[];
    late_ids uuid[];
    late_statuses text[];
    late_workflow_ids uuid[];
    due_ids uuid[];
    ending_workflow_ids uuid[];
    free_workflow_ids uuid[];
    busy_workflow_ids uuid[] := '{}';
    scheduled_ids uuid[];
    retried integer := 0;
    dead integer := 0;
begin
    perform require(p_batch_size > 0, 'batch_size must be at least 1');

    -- A finished job updates its workflow (derive_workflow_status). Do not wait for a workflow that another transaction has locked:
    -- that transaction may stay open for hours, and may wait for a job that is locked here. Skip its jobs and search again, or a
    -- batch full of them would block all other jobs.
    for round_number in 1..5 loop
        with expired as materialized (
            select q.job_id, q.status, q.job_kind, q.lease_recoveries, q.workflow_id, q.leased_until, q.status_signal
            from job_queue q
            where q.status in ('leased','in_progress') and q.leased_until < now()
                and (q.workflow_id is null or q.workflow_id <> all(busy_workflow_ids)
                     or q.lease_recoveries < (job_policy(q.job_kind)).max_lease_recoveries)
            order by q.leased_until, q.job_id limit p_batch_size for no key update skip locked
        ), judged as (
            select e.*, e.lease_recoveries >= p.max_lease_recoveries as given_up
            from expired e cross join lateral job_policy(e.job_kind) p
        )
        select coalesce(array_agg(j.job_id) filter (where not j.given_up), '{}'),
               coalesce(array_agg(j.status) filter (where not j.given_up), '{}'),
               array_agg(jsonb_strip_nulls(jsonb_build_object('error_code', 'LEASE_EXPIRED', 'signal', j.status_signal)))
                   filter (where not j.given_up),
               coalesce(array_agg(j.job_id) filter (where j.given_up), '{}'),
               array_agg(j.status) filter (where j.given_up), array_agg(j.workflow_id) filter (where j.given_up)
        into lost_ids, lost_statuses, lost_details, given_up_ids, given_up_statuses, given_up_workflow_ids
        from judged j;

        with late as materialized (
            select q.job_id, q.status, q.workflow_id from job_queue q
            where q.status in ('queued','retry_waiting') and q.deadline_at is not null and q.deadline_at <= now()
                and (q.workflow_id is null or q.workflow_id <> all(busy_workflow_ids))
            order by q.deadline_at, q.job_id limit p_batch_size for no key update skip locked
        )
        select coalesce(array_agg(l.job_id), '{}'), array_agg(l.status), array_agg(l.workflow_id)
        into late_ids, late_statuses, late_workflow_ids
        from late l;

        ending_workflow_ids := array_remove(coalesce(given_up_workflow_ids || late_workflow_ids, '{}'), null);
        free_workflow_ids := array(
            select w.workflow_id from job_workflow w where w.workflow_id = any(ending_workflow_ids)
            for no key update skip locked);
        exit when ending_workflow_ids <@ free_workflow_ids;
        busy_workflow_ids := busy_workflow_ids || array(
            select e.id from unnest(ending_workflow_ids) as e (id) except select f.id from unnest(free_workflow_ids) as f (id));
    end loop;
    select coalesce(array_agg(g.job_id), '{}'), array_agg(g.status) into given_up_ids, given_up_statuses
    from unnest(given_up_ids, given_up_statuses, given_up_workflow_ids) as g (job_id, status, workflow_id)
    where g.workflow_id is null or g.workflow_id = any(free_workflow_ids);
    select coalesce(array_agg(g.job_id), '{}'), array_agg(g.status) into late_ids, late_statuses
    from unnest(late_ids, late_statuses, late_workflow_ids) as g (job_id, status, workflow_id)
    where g.workflow_id is null or g.workflow_id = any(free_workflow_ids);

    if lost_ids <> '{}' then
        update job_queue q
        set status = 'queued', lease_name = null, lease_holder = null, lease_token = null, leased_until = null,
            lease_ttl_seconds = null, status_signal = null, lease_recoveries = q.lease_recoveries + 1,
            process_after = greatest(q.process_after, now())  -- it starts to wait now
        where q.job_id = any(lost_ids);
        perform record_job_transitions(
            command, actor, lost_ids, lost_statuses, array_fill('queued'::text, array[cardinality(lost_ids)]),
            array_fill('lease_recovered'::text, array[cardinality(lost_ids)]), lost_details);
    end if;

    if given_up_ids <> '{}' then
        update job_queue q
        set status = 'failed', attempts = q.attempts + 1, lease_token = null, leased_until = null, last_error_at = now(),
            last_error_code = 'LEASE_EXPIRED',
            last_error = format('the lease expired %s times without a report', q.lease_recoveries + 1)
        where q.job_id = any(given_up_ids);
        select s.retried, s.dead into retried, dead
        from settle_failed_jobs(command, actor, given_up_ids, given_up_statuses, false) s;
    end if;

    if late_ids <> '{}' then
        update job_queue q
        set status = 'cancelled', cancel_reason = 'deadline_passed', scheduled = false, finished_at = now()
        where q.job_id = any(late_ids);
        perform record_same_transition(command, actor, late_ids, late_statuses, 'cancelled', 'cancelled',
                                   '{"reason": "deadline_passed"}');
    end if;

    due_ids := array(
        select q.job_id from job_queue q where q.status = 'retry_waiting' and q.process_after <= now()
        order by q.process_after, q.job_id limit p_batch_size for no key update skip locked);
    if due_ids <> '{}' then
        update job_queue q set status = 'queued' where q.job_id = any(due_ids);
        perform record_same_transition(command, actor, due_ids, array_fill('retry_waiting'::text, array[cardinality(due_ids)]),
                                   'queued', 'retry_due');
    end if;

    scheduled_ids := array(
        select q.job_id from job_queue q where q.scheduled::integer = 1 and q.process_after <= now()
        order by q.process_after, q.job_id limit p_batch_size for no key update skip locked);
    if scheduled_ids <> '{}' then
        update job_queue q set scheduled = false where q.job_id = any(scheduled_ids);
    end if;

    return jsonb_build_object(
        'refused', false, 'recovered', cardinality(lost_ids), 'retry_waiting', retried, 'dead_lettered', dead,
        'promoted', cardinality(due_ids), 'cancelled', cardinality(late_ids), 'came_due', cardinality(scheduled_ids),
        'more', p_batch_size in (cardinality(lost_ids) + cardinality(given_up_ids), cardinality(late_ids), cardinality(due_ids),
                                 cardinality(scheduled_ids)));
end
$$;
grant execute on function webhookd.fn_job_lease_reaper(integer) to workflow_admin;


-- Cleans succeeded and cancelled jobs past the retention of their kind: removes payload, signal and error message. The row stays,
-- so that its key is never used again. Dead letters stay until an operator resolves them.
-- Applications choose the kinds, and their number has no bound, so a call handles a hundred. While the answer has `more`, call
-- again with its `last_kind`.
create or replace function webhookd.fn_job_cleanup_sweep(p_batch_size integer default 1000, p_after_kind text default '')
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    last_kind text := p_after_kind;  -- the last kind that is completely swept
    kind text;
    kinds_left integer := 100;
    old_ids uuid[] := '{}';
    old_statuses text[];
begin
    perform require(p_batch_size > 0, 'batch_size must be at least 1');
    perform require(p_after_kind is not null, 'after_kind must not be null');
    if not job_queue_enabled() then
        return refused('job_substrate_disabled', '{"cleaned": 0}');
    end if;

    -- One step of ix_job_queue_retention per kind, and for each kind the jobs that are old enough.
    loop
        select q.job_kind into kind from job_queue q
        where q.status in ('succeeded','cancelled') and q.job_kind > last_kind order by q.job_kind limit 1;
        exit when not found or kinds_left = 0;
        kinds_left := kinds_left - 1;
        old_ids := old_ids || array(
            select q.job_id from job_queue q
            where q.status in ('succeeded','cancelled') and q.job_kind = kind
                and q.finished_at < now() - make_interval(secs => (job_policy(kind)).retention_seconds)
            order by q.finished_at, q.job_id limit p_batch_size - cardinality(old_ids) for no key update skip locked);
        exit when cardinality(old_ids) = p_batch_size;
        last_kind := kind;
    end loop;

    if old_ids <> '{}' then
        select array_agg(q.status order by o.place) into old_statuses
        from unnest(old_ids) with ordinality as o (job_id, place) join job_queue q on q.job_id = o.job_id
        where q.job_id = any(old_ids);
        update job_queue q
        set status = 'cleaned', cleaned_from = q.status, safe_payload = '{}', status_signal = null, last_error = null
        where q.job_id = any(old_ids);
        perform record_same_transition('fn_job_cleanup_sweep', 'webhookd', old_ids, old_statuses, 'cleaned', 'cleaned');
    end if;
    return jsonb_build_object(
        'refused', false, 'cleaned', cardinality(old_ids), 'more', kind is not null, 'last_kind', last_kind);
end
$$;
grant execute on function webhookd.fn_job_cleanup_sweep(integer, text) to workflow_admin;
