-- owner: webhookd_owner
-- Owns: what the substrate's triggers do: refuse what is no edge of the nine states, keep a workflow's status true, reserve the
-- lifecycle events, and queue the events that generate jobs. Which change calls which of them is in triggers.sql.

create or replace function webhookd.refuse_work_transition() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if tg_op = 'INSERT' then
        raise exception using
            errcode = 'WH411', message = 'work is born queued, without attempts, lease, error or result';
    end if;
    raise exception using
        errcode = case when old.status = 'cleaned' then 'WH410' else 'WH411' end,
        message = format('work %s may not go from %s to %s like this', old.job_id, old.status, new.status),
        hint = 'The edges of the nine states, and what each may change, are drawn in schema/README.md.';
end
$$;

-- Looked at when the transaction commits: `failed` is a state that work passes through, on its way to a retry or to the dead
-- letters, and never one that it is left in.
create or replace function webhookd.refuse_to_stay_failed() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from job_queue j where j.job_id = new.job_id and (j.status = 'failed') is true) then
        raise exception using
            errcode = 'WH411', message = format('work %s failed, and is neither to be retried nor a dead letter', new.job_id);
    end if;
    return null;
end
$$;

-- workflows -------------------------------------------------------------------------------------------------------

-- A job joined a workflow, or crossed the line between open and over: the workflow is asked anew, by an update that says
-- nothing. The update waits for whoever asks at the same time, and the trigger below looks in a snapshot taken after the wait.
create or replace function webhookd.ask_workflow() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    update job_workflow w set revision = w.revision + 1 where w.workflow_id = new.workflow_id;
    return null;
end
$$;

-- The status from the jobs, whatever the update says. A workflow without jobs, or with one that is not over, is active. Else it
-- counts how they ended; a cancelled job, also a dead letter that an operator resolved, counts for nothing unless all are.
-- Work added later makes it active again.
--
-- Two jobs of one workflow that end at once, or one that ends while one is added: both transactions change their job first and
-- ask second. The one that gets the workflow's row first may not see the other's job as it will be, and leaves it active, or
-- over. The other waits for the row until that has committed; BEFORE ROW triggers run with the row locked, and in READ
-- COMMITTED this function's statements have snapshots of their own: it sees both jobs, and its word is the last. In
-- REPEATABLE READ, whose snapshot is older than the wait, the update is refused (40001), because the first one wrote the row,
-- also where nothing but the revision changed: that is why there is one.
--
-- Deadlocks: a function that has a workflow's row waits for no other row. The reaper, which moves jobs of several, takes the rows
-- that are free and leaves the jobs of the others: who adds a step to a workflow and then reports, in one transaction, holds the
-- workflow's row and waits for the job's.
create or replace function webhookd.derive_workflow_status() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    succeeded_jobs bigint;
    dead_jobs bigint;
    jobs bigint;
begin
    if (old.workflow_id, old.workflow_kind, old.generator, old.correlation_id, old.enqueued_by, old.enqueued_at)
        is distinct from
        (new.workflow_id, new.workflow_kind, new.generator, new.correlation_id, new.enqueued_by, new.enqueued_at)
    then
        raise exception using errcode = 'WH410', message = format('what workflow %s is can never change', old.workflow_id);
    end if;
    if exists (select from job_queue j where j.workflow_id = new.workflow_id
                   and j.status in ('queued','leased','in_progress','failed','retry_waiting'))
    then
        new.status := 'active';
        new.finished_at := null;
        return new;
    end if;
    select count(*), count(*) filter (where j.status = 'succeeded' or j.cleaned_from = 'succeeded'),
           count(*) filter (where j.status = 'dead_letter')
    into jobs, succeeded_jobs, dead_jobs
    from job_queue j where j.workflow_id = new.workflow_id;
    new.status := case
        when jobs = 0 then 'active'
        when dead_jobs > 0 and succeeded_jobs > 0 then 'partially_failed'
        when dead_jobs > 0 then 'failed'
        when succeeded_jobs > 0 then 'succeeded'
        else 'cancelled' end;
    new.finished_at := case when new.status = 'active' then null
                            when new.status = old.status then old.finished_at else now() end;
    return new;
end
$$;

-- events ----------------------------------------------------------------------------------------------------------

-- What `dot.job.…` says is true because only the substrate's functions say it. Asked with the rights of who inserts: inside
-- those functions that is their owner.
create or replace function webhookd.refuse_reserved_event() returns trigger
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if current_user <> 'webhookd_jobs' then
        raise exception using
            errcode = 'WH400', message = 'event_type must not begin with dot.job.: those are the job substrate''s own';
    end if;
    return new;
end
$$;

-- An event of a registered type gives a job, by a queue of its own: routing knows nothing of it. In the hot path of ingest, so
-- the usual answer, that nothing is registered, is one look at a table of no rows. Measured with the trigger above, in CPU time
-- of the server, medians of 20 rounds: 200 events in one call 3.74 ms for 3.70 ms without both; one event 0.21 ms for 0.19 ms,
-- commit not counted.
create or replace function webhookd.enqueue_job_events() returns trigger
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from job_event_registry) then
        insert into job_event_queue (event_id)
        select n.id from new_events n
        where exists (select from job_event_registry r where r.event_type = n.event_type and r.active);
    end if;
    return null;
end
$$;
