-- owner: webhookd_jobqueue
-- Owns: creating jobs from events. Reads job_event_queue, which a trigger fills; independent of routing.

-- Registers that each new event of a type creates a job of a kind, with this executor and priority, and replaces an existing
-- registration. With `p_active` false it only deactivates a registration and ignores executor and priority. Returns the
-- registration.
create or replace function webhookd.fn_job_register_event(
    p_event_type text, p_kind text, p_executor text, p_actor text, p_priority integer default 0, p_active boolean default true)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    is_change boolean;
    registered jsonb;
begin
    perform require(is_event_type(p_event_type),
                    'event_type must be 1 to 100 characters: words of letters, digits and _, joined by dots');
    perform require(not starts_with(p_event_type, 'dot.job.'),
                    'event_type must not begin with dot.job.: it would cause an endless loop of jobs and events');
    perform require_label('kind', p_kind, 100);
    perform require(p_active is not null, 'active must not be null');
    perform require_label('actor', p_actor, 200);
    if p_active then
        perform require_executor(p_executor);
        perform require(p_priority between -32768 and 32767, 'priority must be -32768 to 32767');
        insert into job_event_registry as r (event_type, job_kind, executor, priority, active, registered_by)
        values (p_event_type, p_kind, p_executor, p_priority, true, p_actor)
        on conflict (event_type, job_kind) do update
        set executor = excluded.executor, priority = excluded.priority, active = true,
            registered_by = excluded.registered_by, registered_at = now()
        where (r.executor, r.priority, r.active) <> (excluded.executor, excluded.priority, true);
    else
        update job_event_registry r set active = false, registered_by = p_actor, registered_at = now()
        where r.event_type = p_event_type and r.job_kind = p_kind and r.active;
    end if;
    is_change := found;
    select jsonb_build_object('event_type', r.event_type, 'job_kind', r.job_kind, 'executor', r.executor,
                              'priority', r.priority, 'active', r.active)
    into registered
    from job_event_registry r where r.event_type = p_event_type and r.job_kind = p_kind;
    if not found then
        -- Not silently: the name may be mistyped, and the intended registration would stay active.
        return refused('not_registered');
    end if;
    if is_change then
        perform record_decision('fn_job_register_event', p_actor, registered);
    end if;
    return registered || '{"refused": false}';
end
$$;
grant execute on function webhookd.fn_job_register_event(text, text, text, text, integer, boolean) to workflow_admin;

-- Creates the jobs of a batch of queued events, oldest first, by the registrations of now. An event creates one job per kind, even
-- if it is queued twice: the key is the event's id. The job refers to the event and copies nothing of its payload. While the queue
-- is disabled, the events wait.
create or replace function webhookd.fn_job_spawn_from_events(p_batch_size integer default 100)
returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    began_at constant timestamptz := clock_timestamp();
    taken_ids bigint[];
    made_ids uuid[];
begin
    perform require(p_batch_size > 0, 'batch_size must be at least 1');
    if not job_queue_enabled() then
        return refused('job_substrate_disabled');
    end if;
    taken_ids := array(
        select q.event_id from job_event_queue q order by q.event_id limit p_batch_size for update skip locked);

    -- By their ids, not by their type: there may be a year of events of that type.
    with taken as materialized (
        select e.id, e.event_type, e.correlation_id from events e where e.id = any(taken_ids)
    ), made as (
        insert into job_queue (
            job_kind, event_domain, idempotency_key, payload_ref, safe_payload, executor, priority, correlation_id,
            causation_event_id, enqueued_by, enqueued_at, source_system)
        select r.job_kind, 'general', 'event:' || e.id, 'event:' || e.id, jsonb_build_object('event_type', e.event_type),
               r.executor, r.priority, e.correlation_id, e.id, r.registered_by,
               -- The job of the first event is claimed first.
               began_at + row_number() over (order by e.id, r.job_kind) * interval '1 microsecond', 'webhookd'
        from taken e join job_event_registry r on r.event_type = e.event_type and r.active
        on conflict (job_kind, idempotency_key) do nothing
        returning job_id, causation_event_id
    )
    select coalesce(array_agg(m.job_id order by m.causation_event_id), '{}') into made_ids from made m;
    delete from job_event_queue q where q.event_id = any(taken_ids);

    if made_ids <> '{}' then
        perform record_same_transition('fn_job_spawn_from_events', 'webhookd', made_ids,
                                   array_fill(null::text, array[cardinality(made_ids)]), 'queued', 'enqueued');
    end if;
    return jsonb_build_object('refused', false, 'events', cardinality(taken_ids), 'jobs', cardinality(made_ids),
                              'more', cardinality(taken_ids) = p_batch_size);
end
$$;
grant execute on function webhookd.fn_job_spawn_from_events(integer) to workflow_admin;
