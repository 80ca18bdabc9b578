-- Owns: the indexes by which scheduled jobs that came due are found: by whoever claims, of its kind, and by the reaper, of any. Runs
-- as webhookd_owner. Only scheduled jobs have entries. Whoever reads or moves a job waits until they are built, so this comes last.

-- Only what is queued is scheduled, by a CHECK, and each index says so in words of its own, which only the query that it is for
-- uses: with the others' predicate the planner, whose statistics are from a quiet time, takes any of them (a claim walked past
-- 50,000 jobs by ix_job_queue_claimable).
drop index webhookd.ix_job_queue_scheduled;
create index ix_job_queue_scheduled on webhookd.job_queue (job_kind, executor, process_after, job_id)
    where scheduled;
create index ix_job_queue_scheduled_due on webhookd.job_queue (process_after, job_id)
    where scheduled::integer = 1;
