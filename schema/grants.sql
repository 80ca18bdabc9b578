-- Owns: the privileges on tables (the matrix in schema/README.md). Applied as a whole when it changes; runs as the migrator.
-- The privileges on a function are next to the function.

revoke all on all tables in schema webhookd from
    public, event_ingest_writer, webhookd_ingest, router_worker, saga_orchestrator, job_worker, lease_cleaner,
    dead_letter_operator, subscription_admin, webhookd_jobqueue, retention_keeper, console_keeper, webhookd_reader, workflow_admin,
    dot_executor, webhookd_app;
revoke all on all sequences in schema webhookd from
    public, event_ingest_writer, webhookd_ingest, router_worker, saga_orchestrator, job_worker, lease_cleaner,
    dead_letter_operator, subscription_admin, webhookd_jobqueue, retention_keeper, console_keeper, webhookd_reader, workflow_admin,
    dot_executor, webhookd_app;
revoke all on schema webhookd from
    public, event_ingest_writer, webhookd_ingest, router_worker, saga_orchestrator, job_worker, lease_cleaner,
    dead_letter_operator, subscription_admin, webhookd_jobqueue, retention_keeper, console_keeper, webhookd_reader, workflow_admin,
    dot_executor, webhookd_app;
revoke execute on all functions in schema webhookd from public;

grant usage on schema webhookd to
    event_ingest_writer, webhookd_ingest, router_worker, saga_orchestrator, job_worker, lease_cleaner,
    dead_letter_operator, subscription_admin, webhookd_jobqueue, retention_keeper, console_keeper, webhookd_reader, workflow_admin,
    dot_executor, webhookd_app;

-- publish() has the privileges of event_ingest_writer, but belongs to webhookd_ingest, which only the migrator is a member of.
grant select, insert on webhookd.events to event_ingest_writer, webhookd_ingest;
grant select on webhookd.subscriptions to event_ingest_writer;
grant usage on sequence webhookd.events_id_seq to webhookd_ingest;

grant select on webhookd.events, webhookd.subscriptions, webhookd.subscription_types to router_worker;
grant select, update, delete on webhookd.event_routing_queue to router_worker;
grant select, insert on webhookd.webhook_delivery_sagas to router_worker;

grant select on webhookd.events, webhookd.subscriptions to saga_orchestrator;
grant select, insert, update on webhookd.endpoint_health, webhookd.subscription_rates, webhookd.delivery_stats to saga_orchestrator;
grant select, update on webhookd.orchestration_turn to saga_orchestrator;
grant select, update on webhookd.webhook_delivery_sagas to saga_orchestrator;
grant select, insert, update on webhookd.webhook_delivery_jobs to saga_orchestrator;
grant usage on sequence webhookd.webhook_delivery_jobs_id_seq to saga_orchestrator;

grant select on webhookd.events, webhookd.subscriptions, webhookd.subscription_secrets, webhookd.endpoint_health,
    webhookd.webhook_delivery_sagas to job_worker;
grant select, update on webhookd.webhook_delivery_jobs to job_worker;

grant select, update on webhookd.webhook_delivery_jobs to lease_cleaner;

grant select on webhookd.events, webhookd.subscriptions to dead_letter_operator;
grant select, insert on webhookd.webhook_delivery_sagas, webhookd.dead_letters to dead_letter_operator;

grant select, insert, update on webhookd.subscriptions, webhookd.subscription_secrets, webhookd.tenants to subscription_admin;
grant delete on webhookd.subscription_secrets to subscription_admin;
grant select on webhookd.endpoint_health to subscription_admin;

-- Retention and erasure. A row lock needs UPDATE on one column; triggers check every change.
grant select, delete on webhookd.events, webhookd.event_labels, webhookd.event_routing_queue, webhookd.job_event_queue,
    webhookd.webhook_delivery_sagas, webhookd.webhook_delivery_jobs, webhookd.dead_letters, webhookd.subscriptions,
    webhookd.subscription_types, webhookd.subscription_rates, webhookd.subscription_secrets, webhookd.subscription_changes,
    webhookd.endpoint_health, webhookd.tenants, webhookd.job_queue, webhookd.job_command_run, webhookd.job_workflow to retention_keeper;
grant update (payload, payload_removed_at) on webhookd.events to retention_keeper;
grant update (payload_snapshot) on webhookd.dead_letters to retention_keeper;
grant update (updated_at) on webhookd.webhook_delivery_sagas, webhookd.subscriptions, webhookd.tenants to retention_keeper;
grant insert on webhookd.tenants to retention_keeper;
grant update (lease_until) on webhookd.webhook_delivery_jobs to retention_keeper;
grant update on webhookd.event_routing_queue, webhookd.job_event_queue to retention_keeper;
grant update (status) on webhookd.job_queue, webhookd.job_workflow to retention_keeper;
grant select, update on webhookd.retention_turn, webhookd.retention_progress to retention_keeper;
grant select, insert, update, delete on webhookd.retention_kept to retention_keeper;
grant select, delete on webhookd.delivery_stats to retention_keeper;
grant select, insert, update, delete on webhookd.delivery_stats_hours to retention_keeper;
grant select, insert, update on webhookd.erasures to retention_keeper;
grant select on webhookd.erasures to subscription_admin;
grant select, delete on webhookd.console_links to retention_keeper;

-- The console. A row lock needs UPDATE on one column.
grant select on webhookd.console_key, webhookd.tenants, webhookd.erasures to console_keeper;
grant select, insert, delete on webhookd.console_links to console_keeper;
grant update (expires_at) on webhookd.console_links to console_keeper;
grant update (updated_at) on webhookd.tenants to console_keeper;

grant select on webhookd.retention_turn, webhookd.retention_progress, webhookd.retention_kept, webhookd.erasures to webhookd_reader;
grant select on webhookd.events, webhookd.event_labels, webhookd.tenants, webhookd.subscriptions, webhookd.subscription_types, webhookd.subscription_changes,
    webhookd.endpoint_health, webhookd.event_routing_queue, webhookd.webhook_delivery_sagas, webhookd.webhook_delivery_jobs, webhookd.dead_letters,
    webhookd.delivery_stats, webhookd.delivery_stats_hours, webhookd.schema_migrations, webhookd.schema_code to webhookd_reader;

-- The job queue. Its functions emit ordinary events. An executor reads nothing: a claim returns the job.
grant select, insert on webhookd.events to webhookd_jobqueue;
grant usage on sequence webhookd.events_id_seq to webhookd_jobqueue;
grant select, insert, update on webhookd.job_queue, webhookd.job_workflow, webhookd.job_kind_policy, webhookd.job_event_registry
    to webhookd_jobqueue;
grant select, update on webhookd.settings to webhookd_jobqueue;
grant select, insert on webhookd.job_command_run to webhookd_jobqueue;
grant select, update, delete on webhookd.job_event_queue to webhookd_jobqueue;
grant select on webhookd.job_workflow, webhookd.job_command_run, webhookd.job_kind_policy, webhookd.job_event_registry,
    webhookd.job_event_queue, webhookd.job_transition, webhookd.settings, webhookd.v_job_queue_backlog,
    webhookd.v_job_queue_in_progress, webhookd.v_job_queue_dead_letter_open to workflow_admin, webhookd_reader;
-- All columns but lease_token, which is the right to report: only a claim returns it.
grant select (
    job_id, job_kind, event_domain, idempotency_key, source_ref, target_ref, payload_ref, safe_payload, payload_classification,
    executor, status, attempts, last_error, last_error_at, lease_name, lease_holder, leased_until, process_after, deadline_at,
    priority, correlation_id, causation_event_id, parent_job_id, workflow_id, enqueued_by, enqueued_at, started_at, finished_at,
    source_system, result_ref, last_error_code, lease_ttl_seconds, lease_recoveries, status_signal, scheduled, cancel_reason,
    cleaned_from)
    on webhookd.job_queue to workflow_admin, webhookd_reader;
