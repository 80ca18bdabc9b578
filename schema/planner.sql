-- Owns: the planner settings of each function. Runs as the migrator, after the functions: CREATE OR REPLACE resets them.
-- The function files themselves set only search_path.
--
-- Why any of this is needed: a backlog can grow from nothing to hundreds of thousands of rows before autovacuum updates the
-- statistics, and a session keeps the plans that it made when a table was empty. Every statement of a stage has an index that
-- serves it; these settings keep the planner on it, whatever its statistics say. tests/schema/test_plans.py and
-- test_linear_plans.py count the blocks.
--
--   enable_seqscan, enable_bitmapscan   A table is read through the index that serves the statement and in its order, not as a
--                                       whole. schema/README.md names that index for each function.
--   enable_sort, enable_incremental_sort
--                                       The index gives the order. With statistics from a quiet time the planner would sort all
--                                       rows that wait, for each batch.
--   enable_hashjoin, enable_mergejoin   Rows are looked up by their key, one by one.
--   enable_nestloop                     See report_results.
--   plan_cache_mode                     Planned once for each session. The plans do not depend on the arguments, and planning
--                                       again took a twentieth of the time of publishing a single event.
--   jit                                 Always off together with any enable_…: up to PostgreSQL 17, a plan node that is disabled
--                                       but unavoidable (a sort, the scan of a table with one row) has a cost of ten thousand
--                                       million, and JIT compiles everything above a hundred thousand. On a server with default
--                                       settings the whole cycle took 20 times the CPU time.

-- Deliveries ----------------------------------------------------------------------------------------------------------

-- A batch in the order of an index: the oldest events, sagas, jobs, results, leases or dead letters.
alter function webhookd.route_events set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.replay_events set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.resend_deliveries set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.due_subscriptions set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off;
alter function webhookd.start_due_sagas set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
    set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.limit_quotas set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.dead_letter_exhausted set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.apply_results set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.settle_results set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
    set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.claim_jobs set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.choose_jobs set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.complete_deliveries set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.release_jobs set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.reset_expired_leases set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.requeue_dead_letters set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
-- Each count walks an index and stops at the bound.
alter function webhookd.backlog set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off;

-- Retention: the oldest rows in the order of an index, and everything else by keys. Planned for each call, with the current size of
-- the tables: a plan from when they were empty may use any index, and a batch takes longer than its planning. A table lock of another
-- session ends the batch soon: the sweep tries again with a smaller one, and nothing queues behind it.
alter function webhookd.sweep_events set jit = off set plan_cache_mode = force_custom_plan set lock_timeout = '250ms'
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.preview_sweep set jit = off set plan_cache_mode = force_custom_plan set lock_timeout = '250ms'
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.sweep_subscriptions set jit = off set plan_cache_mode = force_custom_plan set lock_timeout = '250ms';
alter function webhookd.sweep_stats set jit = off set plan_cache_mode = force_custom_plan set lock_timeout = '250ms'
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.erase set jit = off set plan_cache_mode = force_custom_plan set lock_timeout = '250ms'
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
-- The triggers of a delete look up each deleted row by keys.
alter function webhookd.refuse_event_in_use set jit = off set plan_cache_mode = force_custom_plan set enable_seqscan = off
    set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.refuse_live_saga set jit = off set plan_cache_mode = force_custom_plan set enable_seqscan = off
    set enable_hashjoin = off set enable_mergejoin = off;

-- Rows by their keys, and a window over the batch, which may be sorted.
alter function webhookd.load_payloads set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.publish_many set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off;
-- The reported jobs are read by their ids and then hashed against the arguments. With statistics from a quiet time the planner
-- expects one row and compares each of 500 with each in a nested loop (67 ms instead of 9, PostgreSQL 15).
alter function webhookd.report_results set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_nestloop = off;
-- By the primary keys, as a foreign key does, also in a session that planned it when the tables were small.
alter function webhookd.check_new_sagas set jit = off
    set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off;

-- Console -------------------------------------------------------------------------------------------------------------

-- A link by its key, a token's links of a tenant, and the links that expired first.
alter function webhookd.create_console_link set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off;
alter function webhookd.redeem_console_link set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off;
alter function webhookd.remove_expired_console_links set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_hashjoin = off set enable_mergejoin = off;

-- Job queue -----------------------------------------------------------------------------------------------------------

-- A batch, a claim or a bounded count in the order of an index.
alter function webhookd.fn_job_claim set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.fn_job_spawn_from_events set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.fn_job_lease_reaper set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.fn_job_cleanup_sweep set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
alter function webhookd.sweep_jobs set jit = off set plan_cache_mode = force_custom_plan set lock_timeout = '250ms'
    set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off;
alter function webhookd.fn_job_queue_health set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;
-- The job's last report: the end of its part of ix_job_command_run_job.
alter function webhookd.duplicate_or_stale_report set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off;

-- The given jobs by their keys; the results are put into the order of the arguments, which is a sort of the batch.
alter function webhookd.record_job_transitions set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off;
alter function webhookd.settle_failed_jobs set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off;
-- The jobs of one workflow.
alter function webhookd.derive_workflow_status set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off set enable_bitmapscan = off;

-- One job by its id or its idempotency key.
alter function webhookd.fn_job_enqueue set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.fn_job_requeue set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.fn_job_progress set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.fn_job_succeed set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.fn_job_cancel set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.fail_job set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
alter function webhookd.lock_job set jit = off set plan_cache_mode = force_generic_plan
    set enable_seqscan = off;
