-- owner: webhookd_jobqueue
-- Owns: what the gated functions share: the switch, the policy of a kind, validation, and the ledger. Internal.
--
-- Every gated function returns jsonb. A refusal that the caller could not foresee is a value (`refused`, `reason`) and changes
-- nothing; an invalid argument is an error (WH400, WH404). Each transition of a job writes a ledger row and emits an event in the
-- same transaction, so that a caller that lost the answer can look up both.

create or replace function webhookd.job_queue_enabled() returns boolean
language sql stable security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select exists (select from settings s where s.key = 'queue.job_substrate.enabled' and s.value = 'true')
$$;

create or replace function webhookd.refused(reason text, known jsonb default '{}') returns jsonb
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select jsonb_build_object('refused', true, 'reason', reason) || known
$$;

-- The policy of the kind, with the defaults from settings. Never null: the rows of settings cannot be deleted.
create or replace function webhookd.job_policy(kind text) returns webhookd.job_kind_policy
language sql stable security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    select kind,
           coalesce(k.max_attempts, (d.of -> 'max_attempts')::integer),
           coalesce(k.base_delay_seconds, (d.of -> 'base_delay_seconds')::double precision),
           coalesce(k.max_delay_seconds, (d.of -> 'max_delay_seconds')::double precision),
           coalesce(k.jitter, (d.of -> 'jitter')::double precision),
           coalesce(k.max_lease_recoveries, (d.of -> 'max_lease_recoveries')::integer),
           coalesce(k.retention_seconds, (d.of -> 'retention_seconds')::double precision)
    from (select jsonb_object_agg(split_part(s.key, '.', 3), s.value) as of
          from settings s where starts_with(s.key, 'queue.job_substrate.')) d
    left join job_kind_policy k on k.job_kind = kind
$$;


create or replace function webhookd.is_executor(candidate text) returns boolean
language sql immutable parallel safe set search_path = pg_catalog, webhookd, pg_temp as $$
    select coalesce(candidate in ('DOT','Agent','Hermes','Codex','PG_worker','external_worker','future_Kestra_adapter'), false)
$$;

-- A text that fits in one line of a log.
create or replace function webhookd.require_label(
    name text, candidate text, max_length integer, optional boolean default false) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform webhookd.require(
        case when candidate is null then optional
             else length(candidate) <= max_length and btrim(candidate) <> '' and candidate ~ '^[^[:cntrl:]]+$' end,
        format('%s must be 1 to %s characters, without control characters', name, max_length));
end
$$;

create or replace function webhookd.require_correlation_id(candidate text) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform webhookd.require(
        candidate is null or length(candidate) <= 255 and candidate ~ '^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$',
        'correlation_id must be 1 to 255 visible ASCII characters: it is sent in a header');
end
$$;

create or replace function webhookd.require_executor(executor text) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform webhookd.require(executor is distinct from 'MOT',
        'executor must not be MOT: it generates jobs and never executes them');
    perform webhookd.require(webhookd.is_executor(executor),
        'executor must be one of DOT, Agent, Hermes, Codex, PG_worker, external_worker, future_Kestra_adapter');
end
$$;


-- Records transitions that were just made, in the given order: a ledger row for each, and an event where `lifecycle_events` names
-- one. The event contains the id, status and references of the job, never its payload.
create or replace function webhookd.record_job_transitions(
    command text, actor text, job_ids uuid[], from_statuses text[], to_statuses text[], lifecycle_events text[], details jsonb[])
returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    with given as materialized (
        select m.*, case when m.lifecycle_event is not null then nextval('events_id_seq') end as event_id
        from unnest(job_ids, from_statuses, to_statuses, lifecycle_events, details) with ordinality
            as m (job_id, from_status, to_status, lifecycle_event, detail, place)
    ), job as materialized (
        select * from job_queue q where q.job_id = any(job_ids)
    ), emitted as (
        insert into events (id, event_type, payload, correlation_id) overriding system value
        select g.event_id, 'dot.job.' || g.lifecycle_event,
               json_strip_nulls(json_build_object(
                   'job_id', j.job_id, 'job_kind', j.job_kind, 'executor', j.executor, 'event_domain', j.event_domain,
                   'status', g.to_status, 'attempts', j.attempts, 'process_after', j.process_after,
                   'source_ref', j.source_ref, 'target_ref', j.target_ref, 'payload_ref', j.payload_ref,
                   'result_ref', j.result_ref, 'error_code', g.detail -> 'error_code', 'reason', g.detail -> 'reason',
                   'workflow_id', j.workflow_id, 'parent_job_id', j.parent_job_id,
                   'causation_event_id', j.causation_event_id, 'source_system', j.source_system, 'actor', actor)),
               j.correlation_id
        from given g join job j on j.job_id = g.job_id
        where g.lifecycle_event is not null
        order by g.place
    )
    insert into job_command_run (job_id, command, from_status, to_status, actor, attempts, event_id, detail)
    select g.job_id, record_job_transitions.command, g.from_status, g.to_status, record_job_transitions.actor, j.attempts,
           g.event_id, coalesce(g.detail, '{}')
    from given g join job j on j.job_id = g.job_id
    order by g.place;
end
$$;

-- The same transition of several jobs.
create or replace function webhookd.record_same_transition(
    command text, actor text, job_ids uuid[], from_statuses text[], to_status text, lifecycle_event text,
    detail jsonb default '{}')
returns void
language sql set search_path = pg_catalog, webhookd, pg_temp as $$
    select webhookd.record_job_transitions(
        command, actor, job_ids, from_statuses, array_fill(to_status, array[cardinality(job_ids)]),
        array_fill(lifecycle_event, array[cardinality(job_ids)]), array_fill(detail, array[cardinality(job_ids)]))
$$;

-- One transition of one job.
create or replace function webhookd.record_job_transition(
    command text, actor text, job_id uuid, from_status text, to_status text, lifecycle_event text, detail jsonb default '{}')
returns void
language sql set search_path = pg_catalog, webhookd, pg_temp as $$
    select webhookd.record_same_transition(command, actor, array[job_id], array[from_status], to_status, lifecycle_event, detail)
$$;

-- A change by an operator that belongs to no job.
create or replace function webhookd.record_decision(command text, actor text, detail jsonb) returns void
language sql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
    insert into job_command_run (command, actor, detail)
    values (record_decision.command, record_decision.actor, record_decision.detail)
$$;

-- Locks a job before a transition; a concurrent caller waits and then sees the result. A row of nulls if there is no such job.
create or replace function webhookd.lock_job(wanted_id uuid) returns webhookd.job_queue
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job job_queue;
begin
    perform require(wanted_id is not null, 'job_id must not be null');
    select q.* into job from job_queue q where q.job_id = wanted_id for no key update;
    return job;
end
$$;
