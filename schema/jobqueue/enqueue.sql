-- owner: webhookd_jobqueue
-- Owns: enqueuing jobs, requeuing dead letters, and opening workflows.

-- Creates one job per kind and key, also with concurrent callers: later callers get the existing job (`duplicate`), unless the
-- content differs (`idempotency_conflict`).
create or replace function webhookd.fn_job_enqueue(
    p_kind text, p_idempotency_key text, p_executor text, p_source_ref text default null, p_target_ref text default null,
    p_payload_ref text default null, p_safe_payload jsonb default '{}', p_priority integer default 0,
    p_process_after timestamptz default null, p_deadline_at timestamptz default null, p_correlation_id text default null,
    p_causation_event_id bigint default null, p_actor text default null,
    p_event_domain text default 'general', p_source_system text default 'webhookd', p_workflow_id uuid default null,
    p_parent_job_id uuid default null)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    -- Not in the past: it is the time since when the job waits to be claimed (fn_job_queue_health).
    start_at constant timestamptz := greatest(p_process_after, now());
    job job_queue;
begin
    perform require_label('kind', p_kind, 100);
    perform require_label('idempotency_key', p_idempotency_key, 255);
    perform require(not starts_with(p_idempotency_key, 'event:') and not starts_with(p_idempotency_key, 'requeue:'),
                    'idempotency_key must not begin with event: or requeue:, which are reserved for derived keys');
    perform require_executor(p_executor);
    perform require_label('source_ref', p_source_ref, 2000, optional => true);
    perform require_label('target_ref', p_target_ref, 2000, optional => true);
    perform require_label('payload_ref', p_payload_ref, 2000, optional => true);
    perform require(jsonb_typeof(p_safe_payload) = 'object' and octet_length(p_safe_payload::text) <= 16384,
                    'safe_payload must be a JSON object of at most 16384 bytes: a signal, not the data');
    perform require(not p_safe_payload
                    ?| array['body','content','raw','vector','embedding','secret','token','password','ssn','personal_data'],
                    'safe_payload must not have body, content, raw, vector, embedding, secret, token, password, ssn or '
                    'personal_data at its top level: use payload_ref instead');
    perform require(p_priority between -32768 and 32767, 'priority must be -32768 to 32767');
    -- Years that every client language can represent: otherwise an executor could not read the job that it claimed.
    perform require(p_process_after is null or p_process_after between '0001-01-02' and '9999-12-30',
                    'process_after must be in the years 1 to 9999');
    -- A deadline in the past is allowed, as the caller may have waited for a commit; the reaper cancels the job.
    perform require(p_deadline_at is null or p_deadline_at between '0001-01-02' and '9999-12-30',
                    'deadline_at must be in the years 1 to 9999');
    perform require_correlation_id(p_correlation_id);
    perform require_label('actor', p_actor, 200);
    perform require_label('event_domain', p_event_domain, 100);
    perform require_label('source_system', p_source_system, 200);
    if not job_queue_enabled() then
        return refused('job_substrate_disabled');
    end if;
    perform require_references(p_causation_event_id, p_workflow_id, p_parent_job_id);

    loop
        insert into job_queue as q (
            job_kind, event_domain, idempotency_key, source_ref, target_ref, payload_ref, safe_payload, executor, process_after,
            scheduled, deadline_at, priority, correlation_id, causation_event_id, parent_job_id, workflow_id, enqueued_by,
            enqueued_at, source_system)
        values (
            p_kind, p_event_domain, p_idempotency_key, p_source_ref, p_target_ref, p_payload_ref, p_safe_payload, p_executor,
            start_at, start_at > now(), p_deadline_at, p_priority, p_correlation_id, p_causation_event_id, p_parent_job_id,
            p_workflow_id, p_actor,
            clock_timestamp(),  -- not now(): jobs of one transaction keep their order
            p_source_system)
        on conflict (job_kind, idempotency_key) do nothing
        returning q.* into job;
        if found then
            perform record_job_transition('fn_job_enqueue', p_actor, job.job_id, null, 'queued', 'enqueued');
            return jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', job.status, 'duplicate', false,
                                      'process_after', job.process_after);
        end if;

        -- A separate statement: its snapshot sees the row that the insert waited for.
        select q.* into job from job_queue q where q.job_kind = p_kind and q.idempotency_key = p_idempotency_key;
        exit when found;  -- otherwise retention has just removed it
    end loop;
    if (job.executor, job.source_ref, job.target_ref, job.payload_ref, job.workflow_id, job.parent_job_id)
            is distinct from (p_executor, p_source_ref, p_target_ref, p_payload_ref, p_workflow_id, p_parent_job_id)
        or job.status <> 'cleaned' and job.safe_payload <> p_safe_payload
    then
        return refused('idempotency_conflict', jsonb_build_object('job_id', job.job_id, 'status', job.status));
    end if;
    perform wait_for_sync_standby();
    return jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', job.status, 'duplicate', true,
                              'process_after', job.process_after);
end
$$;
grant execute on function webhookd.fn_job_enqueue(
    text, text, text, text, text, text, jsonb, integer, timestamptz, timestamptz, text, bigint, text, text, text, uuid, uuid)
    to workflow_admin;

-- Each is locked as the foreign keys of the new job would lock it, but before the insert: if retention is just removing it, the call
-- waits here and then does not find it.
create or replace function webhookd.require_references(event_id bigint, known_workflow_id uuid, parent_id uuid) returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if event_id is not null and not lock_event(event_id) then
        raise exception using errcode = 'WH404', message = format('event %s does not exist', event_id);
    end if;
    if known_workflow_id is not null then
        perform from job_workflow w where w.workflow_id = known_workflow_id for key share;
        if not found then
            raise exception using errcode = 'WH404', message = format('workflow %s does not exist', known_workflow_id);
        end if;
    end if;
    if parent_id is not null then
        perform from job_queue j where j.job_id = parent_id for key share;
        if not found then
            raise exception using errcode = 'WH404', message = format('job %s does not exist', parent_id);
        end if;
    end if;
end
$$;


-- Replaces a dead letter with a new job, once. The new job has the dead letter as its parent and a key derived from its id, and the
-- dead letter is cancelled. The new job belongs to the same workflow, which becomes active again. It does not inherit the
-- deadline, which may have passed.
create or replace function webhookd.fn_job_requeue(p_job_id uuid, p_actor text, p_deadline_at timestamptz default null)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    dead job_queue;
    job job_queue;
begin
    perform require(p_job_id is not null, 'job_id must not be null');  -- also while the queue is disabled
    perform require_label('actor', p_actor, 200);
    perform require(p_deadline_at is null or p_deadline_at between '0001-01-02' and '9999-12-30',
                    'deadline_at must be in the years 1 to 9999');
    -- Unlike for a new job: it would be cancelled at once, and there is no second requeue.
    perform require(p_deadline_at is null or p_deadline_at > clock_timestamp(), 'deadline_at must be in the future');
    if not job_queue_enabled() then
        return refused('job_substrate_disabled');
    end if;
    dead := lock_job(p_job_id);
    if dead.job_id is null then
        return refused('unknown_job');
    end if;
    select q.* into job from job_queue q where q.job_kind = dead.job_kind and q.idempotency_key = 'requeue:' || dead.job_id;
    if found then
        perform wait_for_sync_standby();
        return refused('already_requeued', jsonb_build_object('job_id', job.job_id, 'status', job.status));
    end if;
    if dead.status <> 'dead_letter' then
        return refused('not_dead_letter', jsonb_build_object('status', dead.status));
    end if;

    insert into job_queue as q (
        job_kind, event_domain, idempotency_key, source_ref, target_ref, payload_ref, safe_payload, payload_classification,
        executor, deadline_at, priority, correlation_id, causation_event_id, parent_job_id, workflow_id, enqueued_by,
        enqueued_at, source_system)
    values (
        dead.job_kind, dead.event_domain, 'requeue:' || dead.job_id, dead.source_ref, dead.target_ref, dead.payload_ref,
        dead.safe_payload, dead.payload_classification, dead.executor, p_deadline_at, dead.priority, dead.correlation_id,
        dead.causation_event_id, dead.job_id, dead.workflow_id, p_actor, clock_timestamp(), dead.source_system)
    returning q.* into job;
    update job_queue q set status = 'cancelled', cancel_reason = 'requeued', finished_at = now() where q.job_id = dead.job_id;
    perform record_job_transitions(
        'fn_job_requeue', p_actor, array[dead.job_id, job.job_id], array['dead_letter', null], array['cancelled', 'queued'],
        array['cancelled', 'enqueued'], array['{"reason": "requeued"}'::jsonb, '{}']);
    return jsonb_build_object('refused', false, 'job_id', job.job_id, 'status', job.status, 'parent_job_id', dead.job_id,
                              'duplicate', false);
end
$$;
grant execute on function webhookd.fn_job_requeue(uuid, text, timestamptz) to workflow_admin;


-- Opens a workflow, before the jobs that refer to it. The generator may choose the id: a repeated call with it returns the same
-- workflow.
create or replace function webhookd.fn_job_workflow_open(
    p_workflow_kind text, p_generator text, p_actor text, p_correlation_id text default null, p_workflow_id uuid default null)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    workflow job_workflow;
begin
    perform require_label('workflow_kind', p_workflow_kind, 100);
    perform require_label('generator', p_generator, 200);
    perform require_label('actor', p_actor, 200);
    perform require_correlation_id(p_correlation_id);
    if not job_queue_enabled() then
        return refused('job_substrate_disabled');
    end if;
    insert into job_workflow as w (workflow_id, workflow_kind, generator, correlation_id, enqueued_by)
    values (coalesce(p_workflow_id, gen_random_uuid()), p_workflow_kind, p_generator, p_correlation_id, p_actor)
    on conflict (workflow_id) do nothing
    returning w.* into workflow;
    if found then
        perform record_decision('fn_job_workflow_open', p_actor, jsonb_build_object(
            'workflow_id', workflow.workflow_id, 'workflow_kind', p_workflow_kind, 'generator', p_generator));
        return jsonb_build_object('refused', false, 'workflow_id', workflow.workflow_id, 'status', workflow.status,
                                  'duplicate', false);
    end if;
    select w.* into workflow from job_workflow w where w.workflow_id = p_workflow_id;
    if (workflow.workflow_kind, workflow.generator) is distinct from (p_workflow_kind, p_generator) then
        return refused('workflow_conflict', jsonb_build_object('workflow_id', workflow.workflow_id));
    end if;
    perform wait_for_sync_standby();
    return jsonb_build_object('refused', false, 'workflow_id', workflow.workflow_id, 'status', workflow.status,
                              'duplicate', true);
end
$$;
grant execute on function webhookd.fn_job_workflow_open(text, text, text, text, uuid) to workflow_admin;
