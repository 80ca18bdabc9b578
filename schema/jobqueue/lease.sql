-- owner: webhookd_jobqueue
-- Owns: a lease from the claim to the report, and cancelling jobs that are not leased. The token decides, not the clock: an expired
-- lease that is not recovered yet still belongs to its holder.

-- Leases the next job of a kind for an executor: by priority, then by age. One job per call; skips jobs that others have locked.
--
-- Queued jobs are in two indexes: ix_job_queue_claim_order has the jobs that can be claimed, in claim order, and
-- ix_job_queue_scheduled those enqueued for a later time. Each claim moves one scheduled job that became due to the claim order, so
-- that a claim costs the same however many become due at once, and finds a job if there is one; the reaper moves the others in
-- batches, and from then on their priority counts. So a claim scans neither finished jobs nor those of next week. Jobs past their
-- deadline are left to the reaper.
-- `p_actor` is the name for the ledger if the caller is not the holder, as in the API; default: the holder.
create or replace function webhookd.fn_job_claim(
    p_kind text, p_executor text, p_lease_name text, p_lease_holder text, p_lease_ttl_seconds double precision,
    p_actor text default null)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job job_queue;
begin
    perform require_label('kind', p_kind, 100);
    perform require_executor(p_executor);
    perform require_label('lease_name', p_lease_name, 200);
    perform require_label('lease_holder', p_lease_holder, 200);
    perform require(p_lease_ttl_seconds > 0 and p_lease_ttl_seconds <= 86400,
                    'lease_ttl_seconds must be above 0 and at most 86400');
    perform require_label('actor', p_actor, 200, optional => true);
    if not job_queue_enabled() then
        return refused('job_substrate_disabled');
    end if;

    update job_queue q set scheduled = false
    where q.job_id = any(array(
        select d.job_id from job_queue d
        where d.scheduled and d.job_kind = p_kind and d.executor = p_executor
            and d.process_after <= now() and (d.deadline_at is null or d.deadline_at > now())
        order by d.process_after, d.job_id limit 1 for no key update skip locked));

    with first as materialized (
        select q.job_id from job_queue q
        where q.status = 'queued' and not q.scheduled and q.job_kind = p_kind and q.executor = p_executor
            and q.process_after <= now() and (q.deadline_at is null or q.deadline_at > now())
        order by q.priority desc, q.enqueued_at, q.job_id limit 1 for no key update skip locked
    )
    update job_queue q
    set status = 'leased', lease_name = p_lease_name, lease_holder = p_lease_holder, lease_token = gen_random_uuid(),
        leased_until = now() + make_interval(secs => p_lease_ttl_seconds), lease_ttl_seconds = p_lease_ttl_seconds,
        status_signal = null
    where q.job_id = any(array(select f.job_id from first f))
    returning q.* into job;
    if not found then
        return refused('nothing_to_claim');
    end if;
    perform record_job_transition('fn_job_claim', coalesce(p_actor, p_lease_holder), job.job_id, 'queued', 'leased', 'leased',
                            jsonb_build_object('lease_name', job.lease_name, 'lease_holder', job.lease_holder,
                                               'leased_until', job.leased_until));
    return jsonb_build_object(
        'refused', false, 'job_id', job.job_id, 'job_kind', job.job_kind, 'executor', job.executor,
        'event_domain', job.event_domain, 'idempotency_key', job.idempotency_key, 'source_ref', job.source_ref,
        'target_ref', job.target_ref, 'payload_ref', job.payload_ref, 'safe_payload', job.safe_payload,
        'payload_classification', job.payload_classification, 'attempt', job.attempts + 1,
        'max_attempts', (job_policy(job.job_kind)).max_attempts, 'priority', job.priority, 'process_after', job.process_after,
        'deadline_at', job.deadline_at, 'correlation_id', job.correlation_id, 'causation_event_id', job.causation_event_id,
        'parent_job_id', job.parent_job_id, 'workflow_id', job.workflow_id, 'source_system', job.source_system,
        'enqueued_by', job.enqueued_by, 'enqueued_at', job.enqueued_at, 'lease_name', job.lease_name,
        'lease_holder', job.lease_holder, 'lease_token', job.lease_token, 'leased_until', job.leased_until,
        'claimed_at', now());
end
$$;
grant execute on function webhookd.fn_job_claim(text, text, text, text, double precision, text) to workflow_admin, dot_executor;


-- The refusal if the token does not hold the job; null if it does.
create or replace function webhookd.lease_refusal(job webhookd.job_queue, token uuid) returns jsonb
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform webhookd.require(token is not null, 'lease_token must not be null');
    return case when job.job_id is null then webhookd.refused('unknown_job')
                when job.lease_token is distinct from token then
                    webhookd.refused('stale_lease', jsonb_build_object('status', job.status)) end;
end
$$;

-- Reports progress and renews the lease by its length. The first call moves the job to in_progress.
create or replace function webhookd.fn_job_progress(
    p_job_id uuid, p_status_signal_only text, p_lease_token uuid, p_actor text)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job job_queue;
    refusal jsonb;
    before text;
    detail jsonb;
begin
    perform require_label('status_signal_only', p_status_signal_only, 500, optional => true);
    perform require_label('actor', p_actor, 200);
    job := lock_job(p_job_id);
    refusal := lease_refusal(job, p_lease_token);
    if refusal is not null then
        return refusal;
    elsif job.status not in ('leased','in_progress') then
        return refused('stale_lease', jsonb_build_object('status', job.status));
    end if;
    before := job.status;
    -- Never earlier than before.
    update job_queue q
    set status = 'in_progress', started_at = coalesce(q.started_at, now()),
        leased_until = greatest(q.leased_until, now() + make_interval(secs => q.lease_ttl_seconds)),
        status_signal = coalesce(p_status_signal_only, q.status_signal)
    where q.job_id = p_job_id
    returning q.* into job;
    detail := jsonb_strip_nulls(jsonb_build_object('signal', p_status_signal_only, 'leased_until', job.leased_until));
    if before = 'leased' then
        perform record_job_transition('fn_job_progress', p_actor, job.job_id, before, 'in_progress', 'started', detail);
    else
        -- A renewal has a ledger row from in_progress to itself, but no event: events would flood the table, and a lock on events
        -- must not delay a renewal.
        insert into job_command_run (job_id, command, from_status, to_status, actor, attempts, detail)
        values (job.job_id, 'fn_job_progress', before, 'in_progress', p_actor, job.attempts, detail);
    end if;
    return jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', job.status, 'leased_until', job.leased_until,
                              'started', before = 'leased', 'deadline_at', job.deadline_at);
end
$$;
grant execute on function webhookd.fn_job_progress(uuid, text, uuid, text) to workflow_admin, dot_executor;


-- The answer to a report.
create or replace function webhookd.report_answer(command text, job webhookd.job_queue, is_duplicate boolean) returns jsonb
language sql stable set search_path = pg_catalog, webhookd, pg_temp as $$
    select jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', job.status, 'attempts', job.attempts,
                              'duplicate', is_duplicate)
        || case when command <> 'fn_job_succeed'
                then jsonb_build_object('max_attempts', (webhookd.job_policy(job.job_kind)).max_attempts) else '{}' end
        || case when job.status = 'retry_waiting' then jsonb_build_object('process_after', job.process_after) else '{}' end
$$;

-- The answer to a report that changes nothing: the token is stale, or the lease has already reported. A repeated report is a
-- duplicate: by the same function, from the ledger, and with the same content where it matters (`is_same`). A contradicting report
-- is refused. Null: this is the first report of the lease.
create or replace function webhookd.duplicate_or_stale_report(command text, job webhookd.job_queue, token uuid, is_same boolean)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    refusal constant jsonb := lease_refusal(job, token);
begin
    if refusal is not null then
        return refusal;
    elsif job.status in ('leased','in_progress') then
        return null;
    elsif is_same and command = (
        select r.command from job_command_run r
        where r.job_id = job.job_id and r.from_status is distinct from r.to_status and r.to_status in ('succeeded','failed')
        order by r.run_id desc limit 1)
    then
        perform wait_for_sync_standby();
        return report_answer(command, job, true);
    end if;
    return refused('already_reported', jsonb_build_object('status', job.status));
end
$$;

-- Reports success.
create or replace function webhookd.fn_job_succeed(p_job_id uuid, p_lease_token uuid, p_result_ref text, p_actor text)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    command constant text := 'fn_job_succeed';
    job job_queue;
    unmoved jsonb;
    before text;
begin
    perform require_label('result_ref', p_result_ref, 2000, optional => true);
    perform require_label('actor', p_actor, 200);
    job := lock_job(p_job_id);
    unmoved := duplicate_or_stale_report(command, job, p_lease_token, job.result_ref is not distinct from p_result_ref);
    if unmoved is not null then
        return unmoved;
    end if;
    before := job.status;
    update job_queue q
    set status = 'succeeded', attempts = q.attempts + 1, result_ref = p_result_ref, leased_until = null,
        started_at = coalesce(q.started_at, now()), finished_at = now()
    where q.job_id = p_job_id
    returning q.* into job;
    perform record_job_transition(command, p_actor, job.job_id, before, 'succeeded', 'succeeded',
                            jsonb_strip_nulls(jsonb_build_object('result_ref', p_result_ref)));
    return report_answer(command, job, false);
end
$$;
grant execute on function webhookd.fn_job_succeed(uuid, uuid, text, text) to workflow_admin, dot_executor;


-- Accepts any error code and message, because a report that cannot be stored would be repeated for ever: long values are cut, and
-- a missing code becomes UNSPECIFIED.
create or replace function webhookd.fail_job(
    command text, failed_id uuid, token uuid, error_code text, error_message text, actor text, permanent boolean)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job job_queue;
    unmoved jsonb;
begin
    perform require_label('actor', actor, 200);
    job := lock_job(failed_id);
    -- A repeated failure may have another message; only whether it is permanent must be the same.
    unmoved := duplicate_or_stale_report(command, job, token, true);
    if unmoved is not null then
        return unmoved;
    end if;
    update job_queue q
    set status = 'failed', attempts = q.attempts + 1, leased_until = null, last_error_at = now(),
        last_error_code = coalesce(nullif(btrim(left(error_code, 100)), ''), 'UNSPECIFIED'),
        last_error = left(error_message, 2000)
    where q.job_id = failed_id;
    perform settle_failed_jobs(command, actor, array[failed_id], array[job.status], permanent);
    return report_answer(command, lock_job(failed_id), false);
end
$$;

-- Moves failed jobs on in the same transaction: to a retry, with the formula of delivery retries, or to the dead letters.
create or replace function webhookd.settle_failed_jobs(
    command text, actor text, failed_ids uuid[], from_statuses text[], permanent boolean)
returns table (retried integer, dead integer)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    statuses text[];
    details jsonb[];
    failed constant text[] := array_fill('failed'::text, array[cardinality(failed_ids)]);
begin
    with decided as materialized (
        select q.job_id, permanent or q.attempts >= p.max_attempts as is_dead,
               -- The formula derives the jitter from a number, so the job's id is hashed to one.
               now() + backoff(hashtextextended(q.job_id::text, 0), q.attempts, p.base_delay_seconds, p.max_delay_seconds,
                               p.jitter, null) as due_at
        from job_queue q cross join lateral job_policy(q.job_kind) p
        where q.job_id = any(failed_ids)
    ), moved as (
        update job_queue q
        set status = case when d.is_dead then 'dead_letter' else 'retry_waiting' end,
            process_after = case when d.is_dead then q.process_after else greatest(q.process_after, d.due_at) end,
            lease_recoveries = case when d.is_dead then q.lease_recoveries else 0 end,
            finished_at = case when d.is_dead then now() end
        from decided d
        where q.job_id = d.job_id and q.job_id = any(failed_ids)
        returning q.job_id, q.status, q.last_error_code, q.status_signal
    )
    select array_agg(m.status order by f.place),
           array_agg(jsonb_strip_nulls(jsonb_build_object('error_code', m.last_error_code, 'signal', m.status_signal))
                     order by f.place),
           count(*) filter (where m.status = 'retry_waiting'), count(*) filter (where m.status = 'dead_letter')
    into statuses, details, retried, dead
    from unnest(failed_ids) with ordinality as f (job_id, place) join moved m on m.job_id = f.job_id;

    perform record_job_transitions(command, actor, failed_ids, from_statuses, failed, failed, details);
    perform record_job_transitions(
        command, actor, failed_ids, failed, statuses,
        array_replace(array_replace(statuses, 'retry_waiting', null), 'dead_letter', 'dead_lettered'), details);
    return next;
end
$$;


-- Reports a failure that is retried by the policy of the kind, up to max_attempts.
create or replace function webhookd.fn_job_fail_transient(
    p_job_id uuid, p_lease_token uuid, p_error_code text, p_error_message text, p_actor text)
returns jsonb
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select fail_job('fn_job_fail_transient', p_job_id, p_lease_token, p_error_code, p_error_message, p_actor, false)
$$;
grant execute on function webhookd.fn_job_fail_transient(uuid, uuid, text, text, text) to workflow_admin, dot_executor;

-- Reports a failure that no retry can fix.
create or replace function webhookd.fn_job_fail_permanent(
    p_job_id uuid, p_lease_token uuid, p_error_code text, p_error_message text, p_actor text)
returns jsonb
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select fail_job('fn_job_fail_permanent', p_job_id, p_lease_token, p_error_code, p_error_message, p_actor, true)
$$;
grant execute on function webhookd.fn_job_fail_permanent(uuid, uuid, text, text, text) to workflow_admin, dot_executor;


-- Cancels a waiting job, or resolves a dead letter. A leased job is left to its holder.
create or replace function webhookd.fn_job_cancel(p_job_id uuid, p_reason text, p_actor text)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job job_queue;
    successor job_queue;
begin
    perform require_label('reason', p_reason, 500);
    perform require_label('actor', p_actor, 200);
    job := lock_job(p_job_id);
    if job.job_id is null then
        return refused('unknown_job');
    elsif job.status in ('leased','in_progress') then
        return refused('running', jsonb_build_object('status', job.status));
    elsif job.status = 'succeeded' or job.cleaned_from = 'succeeded' then
        return refused('finished', jsonb_build_object('status', job.status));
    end if;
    if job.status in ('queued','retry_waiting','dead_letter') then
        update job_queue q
        set status = 'cancelled', cancel_reason = p_reason, scheduled = false, finished_at = now()
        where q.job_id = p_job_id;
        perform record_job_transition('fn_job_cancel', p_actor, job.job_id, job.status, 'cancelled', 'cancelled',
                                jsonb_build_object('reason', p_reason));
        return jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', 'cancelled', 'duplicate', false);
    end if;
    -- `cancelled` would be misleading: the job continues under another id.
    select q.* into successor from job_queue q where q.job_kind = job.job_kind and q.idempotency_key = 'requeue:' || job.job_id;
    if found then
        return refused('already_requeued', jsonb_build_object('job_id', successor.job_id, 'status', successor.status));
    end if;
    perform wait_for_sync_standby();
    return jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', job.status, 'duplicate', true);
end
$$;
grant execute on function webhookd.fn_job_cancel(uuid, text, text) to workflow_admin;
