-- Owns: the ledger's index, now that it has the renewals of leases too. Runs as webhookd_owner.

-- A renewal has a row as a move has, from in_progress to in_progress, and there is no end to them. So a job's moves stand
-- together and its renewals after them: who asks for the moves, or for the last report, does not walk past a day of renewals.
drop index webhookd.ix_job_command_run_job;
create index ix_job_command_run_job
    on webhookd.job_command_run (job_id, (from_status is distinct from to_status), run_id);
