-- Owns: what the job substrate learnt after its first release. Runs as webhookd_owner.

-- DP2 §8's `select *`, without the one column that nobody may read (grants.sql): a view is there to be looked at whole.
drop view webhookd.v_job_queue_dead_letter_open;
create view webhookd.v_job_queue_dead_letter_open as
    select job_id, job_kind, event_domain, idempotency_key, source_ref, target_ref, payload_ref, safe_payload,
           payload_classification, executor, status, attempts, last_error, last_error_at, lease_name, lease_holder, leased_until,
           process_after, deadline_at, priority, correlation_id, causation_event_id, parent_job_id, workflow_id, enqueued_by,
           enqueued_at, started_at, finished_at, source_system, result_ref, last_error_code, lease_ttl_seconds, lease_recoveries,
           status_signal, scheduled, cancel_reason, cleaned_from
    from webhookd.job_queue where status = 'dead_letter';

-- The ledger has a row for each move of a job (renewals are none), and now for each decision of an operator: the switch, the
-- numbers, the registry. A decision is about no job.
alter table webhookd.job_command_run
    alter job_id drop not null,
    alter to_status drop not null,
    alter attempts drop not null,
    add constraint move_or_decision check (num_nulls(job_id, to_status, attempts) in (0, 3));
