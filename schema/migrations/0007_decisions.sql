-- Owns: the index of what operators decided, now that the ledger has the opening of workflows too. Runs as webhookd_owner.

-- An opened workflow is a row about no job, as a decision is, and a generator opens them by the thousand. Who asks for the last
-- decisions does not walk past them. It begins with job_id, which is null in all of it, so that it alone gives the order asked
-- for: by the primary key's the moves in between would be walked through.
create index ix_job_command_run_decision on webhookd.job_command_run (job_id, run_id)
    where job_id is null and command <> 'fn_job_workflow_open';
