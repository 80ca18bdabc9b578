-- owner: retention_keeper
-- Owns: the removal of finished jobs, of their ledger and of finished workflows. See deliveries/retention.sql for the turn.

-- Deletes the given jobs with their ledger rows. They must be locked and finished, and have no jobs of their own.
create or replace function webhookd.remove_jobs(job_ids uuid[], out jobs integer, out runs integer)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    delete from job_command_run r where r.job_id = any(job_ids);
    get diagnostics runs = row_count;
    delete from job_queue q where q.job_id = any(job_ids);
    get diagnostics jobs = row_count;
end
$$;

-- Deletes finished jobs of the given events, and the jobs that these enqueued, with their lifecycle events, for an erasure. Jobs that are
-- not finished stay, and so do their parents.
create or replace function webhookd.remove_jobs_of_events(event_ids bigint[]) returns integer
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job_ids uuid[];
    leaf_ids uuid[];
    total integer := 0;
begin
    with recursive family (job_id) as (
        select q.job_id from job_queue q where q.causation_event_id = any(event_ids)
        union
        select c.job_id from family f cross join lateral (select k.job_id from job_queue k where k.parent_job_id = f.job_id offset 0) c
    )
    select array(select f.job_id from family f) into job_ids;
    job_ids := array(
        select q.job_id from job_queue q
        where q.job_id = any(job_ids) and (q.status in ('succeeded', 'cancelled', 'cleaned', 'dead_letter')) is true
        for update skip locked);
    -- Children first: a new statement for each generation sees the deletes of the last.
    while job_ids <> '{}' loop
        leaf_ids := array(
            select j.id from unnest(job_ids) as j (id)
            where not exists (select from job_queue c where c.parent_job_id = j.id offset 0));
        perform remove_events(lock_finished_events(finished_events(array(
            select r.event_id from job_command_run r where r.job_id = any(leaf_ids) and r.event_id is not null))));
        leaf_ids := array(
            select l.id from unnest(leaf_ids) as l (id)
            where not exists (select from job_command_run r
                              where r.job_id = l.id and exists (select from events e where e.id = r.event_id offset 0)));
        exit when leaf_ids = '{}';
        total := total + (select r.jobs from remove_jobs(leaf_ids) r);
        job_ids := array(select unnest(job_ids) except select unnest(leaf_ids));
    end loop;
    return total;
end
$$;

-- Sweeps one batch of the job queue; each period in days, 0 keeps forever. Jobs that succeeded or were cancelled, with their ledger
-- rows, after `jobs_days`; a job with jobs of its own is deleted after them, and a dead letter when an operator has resolved it.
-- Ledger rows of jobs that finished `ledger_days` ago, and decisions of that age. Finished workflows without jobs after `workflows_days`. Call it
-- again while `more`. Needs the turn of `holder`: otherwise `refused`.
create or replace function webhookd.sweep_jobs(
    holder text, batch_size integer, jobs_days double precision, ledger_days double precision, workflows_days double precision)
returns table (refused boolean, jobs integer, runs integer, workflows integer, more boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    job_ids uuid[] := '{}';
    run_ids bigint[] := '{}';
    workflow_ids uuid[] := '{}';
    ledger_job_ids uuid[] := '{}';
    ledger_before timestamptz;
    last_finished_at timestamptz;
    last_job_id uuid;
    removed integer;
    progress retention_progress;
begin
    perform require(batch_size between 1 and 100000, 'batch_size must be 1 to 100000');
    perform require(jobs_days between 0 and 36500, 'jobs_days must be 0 to 36500');
    perform require(ledger_days between 0 and 36500, 'ledger_days must be 0 to 36500');
    perform require(workflows_days between 0 and 36500, 'workflows_days must be 0 to 36500');
    refused := not take_retention_turn(holder, 60);
    select 0, 0, 0, false into jobs, runs, workflows, more;
    if refused then
        return next;
        return;
    end if;
    if jobs_days > 0 then
        job_ids := array(
            select q.job_id from job_queue q
            where q.status in ('succeeded','cancelled','cleaned') and q.finished_at < now() - make_interval(secs => jobs_days * 86400)
                and not exists (select from job_queue c where c.parent_job_id = q.job_id)
            order by q.finished_at, q.job_id limit batch_size for update skip locked);
        select r.jobs, r.runs into jobs, runs from remove_jobs(job_ids) r;
    end if;
    if ledger_days > 0 then
        ledger_before := now() - make_interval(secs => ledger_days * 86400);
        -- The operators' decisions, in a walk along the ledger, and the rows of finished jobs, in the order of ix_job_queue_finished.
        select * into progress from retention_progress p where p.kind = 'ledger' for no key update;
        run_ids := array(
            select r.run_id from (
                select r.run_id, r.run_at from job_command_run r where r.run_id > progress.after_event_id
                order by r.run_id limit batch_size) r
            where r.run_at < ledger_before);
        delete from job_command_run r where r.run_id = any(run_ids) and r.job_id is null;
        get diagnostics removed = row_count;
        runs := runs + removed;
        if run_ids <> '{}' then
            update retention_progress p set after_event_id = run_ids[cardinality(run_ids)] where p.kind = 'ledger';
        end if;
        select coalesce(array_agg(f.job_id), '{}'), (array_agg(f.finished_at))[count(*)], (array_agg(f.job_id))[count(*)]
        into ledger_job_ids, last_finished_at, last_job_id
        from (select q.job_id, q.finished_at from (
                  select q.job_id, q.finished_at from job_queue q
                  where q.status in ('succeeded','cancelled','cleaned')
                      and (q.finished_at, q.job_id) > (progress.after_finished_at, progress.after_job_id)
                  order by q.finished_at, q.job_id limit batch_size) q
              where q.finished_at < ledger_before) f;
        if ledger_job_ids <> '{}' then
            delete from job_command_run r where r.job_id = any(ledger_job_ids);
            get diagnostics removed = row_count;
            runs := runs + removed;
            update retention_progress p set after_finished_at = last_finished_at, after_job_id = last_job_id where p.kind = 'ledger';
        end if;
    end if;
    if workflows_days > 0 then
        workflow_ids := array(
            select w.workflow_id from job_workflow w
            where w.finished_at is not null and w.finished_at < now() - make_interval(secs => workflows_days * 86400)
                and not exists (select from job_queue q where q.workflow_id = w.workflow_id)
            order by w.finished_at, w.workflow_id limit batch_size for update skip locked);
        delete from job_workflow w where w.workflow_id = any(workflow_ids);
        get diagnostics workflows = row_count;
    end if;
    more := batch_size in (cardinality(job_ids), cardinality(run_ids), cardinality(ledger_job_ids), cardinality(workflow_ids));
    return next;
end
$$;
grant execute on function webhookd.sweep_jobs(text, integer, double precision, double precision, double precision) to webhookd_app;
