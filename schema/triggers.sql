-- Owns: the triggers. They say which changes of a row are allowed, also for the tables' owner, and what follows a write. Runs as
-- webhookd_owner. Separate from the functions, because replacing a trigger locks its table and replacing a function does not.
--
-- The conditions are in the WHEN clauses, so an allowed change of a row calls no function (measured: no time, at most 5 % more
-- WAL). A PL/pgSQL function runs once for each INSERT statement of events, sagas, jobs or dead letters, or to refuse a change.
-- The conditions are short, and UPDATE OF limits them to the statements that name a column, because PostgreSQL parses the text
-- of each condition again for each statement: 40 kB of text cost a good part of a millisecond for each batch of results, also
-- for a batch of one. BEFORE triggers of a table run in the order of their names: saga_final and attempt_final come first.

-- events, dead letters: append only -----------------------------------------------------------------------------
-- Triggers instead of revoked privileges of the owner: foreign key checks lock the referenced rows as the owner.

create or replace trigger events_immutable before update or delete or truncate on webhookd.events
    for each statement execute function webhookd.refuse_change();

create or replace trigger dead_letters_immutable before update or delete or truncate on webhookd.dead_letters
    for each statement execute function webhookd.refuse_change();

create or replace trigger events_enqueue after insert on webhookd.events
    referencing new table as new_events for each statement execute function webhookd.enqueue_events();


-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace trigger subscription_url_changed before update on webhookd.subscriptions
    for each row when (old.callback_url is distinct from new.callback_url)
    execute function webhookd.clear_verified();

create or replace trigger subscription_created after insert on webhookd.subscriptions
    for each row execute function webhookd.log_subscription_change();
create or replace trigger subscription_changed after update on webhookd.subscriptions
    for each row when ((old.event_type, old.callback_url, old.active, old.verified)
                       is distinct from (new.event_type, new.callback_url, new.active, new.verified))
    execute function webhookd.log_subscription_change();


-- sagas -----------------------------------------------------------------------------------------------------------

create or replace trigger saga_created before insert on webhookd.webhook_delivery_sagas
    for each row when (new.status <> 'Pending' or new.attempt_count <> 0 or new.final_error_code is not null)
    execute function webhookd.refuse_transition('saga');

create or replace trigger saga_of_event_and_subscription after insert on webhookd.webhook_delivery_sagas
    referencing new table as new_sagas for each statement execute function webhookd.require_event_and_subscription();

create or replace trigger saga_of_jobs after delete on webhookd.webhook_delivery_sagas
    referencing old table as old_sagas for each statement execute function webhookd.refuse_delete_with_jobs();

create or replace trigger saga_final before update on webhookd.webhook_delivery_sagas
    for each row when (old.status in ('Completed', 'DeadLettered'))
    execute function webhookd.refuse_change('saga');

create or replace trigger saga_identity before update of id, event_id, subscription_id, dead_letter_id, created_at
    on webhookd.webhook_delivery_sagas
    for each row when (
        (old.id, old.event_id, old.subscription_id, old.dead_letter_id, old.created_at)
            is distinct from (new.id, new.event_id, new.subscription_id, new.dead_letter_id, new.created_at))
    execute function webhookd.refuse_transition('saga');

-- Only a result adds an attempt. The due time changes with a retry, to a later time, or by an operator (see saga_rescheduled);
-- the error code changes with a failure.
create or replace trigger saga_transition before update on webhookd.webhook_delivery_sagas
    for each row when (not (
        case old.status
            when 'Pending' then new.status in ('Pending', 'InProgress')
            when 'PendingRetry' then new.status in ('PendingRetry', 'InProgress', 'DeadLettered')
            when 'InProgress' then new.status in ('Completed', 'PendingRetry', 'DeadLettered')
            else false  -- saga_final has already refused it
        end
        and new.attempt_count = old.attempt_count + (old.status = 'InProgress')::integer
        and (new.next_attempt_at = old.next_attempt_at or new.status = old.status
             or (old.status = 'InProgress' and new.status = 'PendingRetry'))
        and (new.next_attempt_at > old.next_attempt_at or old.status <> 'InProgress' or new.status <> 'PendingRetry')
        and (new.final_error_code is not distinct from old.final_error_code
             or (old.status = 'InProgress' and new.status <> 'Completed'))))
    execute function webhookd.refuse_transition('saga');

create or replace trigger saga_rescheduled before update on webhookd.webhook_delivery_sagas
    for each row when (old.status = new.status and old.next_attempt_at <> new.next_attempt_at)
    execute function webhookd.refuse_past_attempt();

drop trigger if exists saga_has_dead_letter on webhookd.webhook_delivery_sagas;  -- a constraint trigger cannot be replaced
create constraint trigger saga_has_dead_letter after update on webhookd.webhook_delivery_sagas
    deferrable initially deferred
    for each row when (new.status = 'DeadLettered')
    execute function webhookd.require_dead_letter();


-- jobs ------------------------------------------------------------------------------------------------------------

create or replace trigger attempt_created before insert on webhookd.webhook_delivery_jobs
    for each row when (new.status <> 'Pending' or new.lease_resets <> 0 or new.result_applied_at is not null)
    execute function webhookd.refuse_transition('job');

create or replace trigger attempt_of_saga_in_progress after insert on webhookd.webhook_delivery_jobs
    referencing new table as new_jobs for each statement execute function webhookd.require_saga_in_progress();

-- Of a finished job only result_applied_at can be set, once, by a statement that names no other column.
create or replace trigger attempt_final before update of
    id, saga_id, subscription_id, status, lease_until, attempt_at, response_status, error_code, worker_id, lease_token,
    lease_resets, created_at, finished_at, duration_ms, retry_after_seconds, response_excerpt
    on webhookd.webhook_delivery_jobs
    for each row when (old.status in ('Completed', 'Failed'))
    execute function webhookd.refuse_change('job');

create or replace trigger attempt_result_applied_once before update of result_applied_at on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Completed', 'Failed') and (old.result_applied_at is not null or new.result_applied_at is null))
    execute function webhookd.refuse_change('job');

create or replace trigger attempt_identity before update of id, saga_id, subscription_id, attempt_at, created_at
    on webhookd.webhook_delivery_jobs
    for each row when (
        (old.id, old.saga_id, old.subscription_id, old.attempt_at, old.created_at)
            is distinct from (new.id, new.saga_id, new.subscription_id, new.attempt_at, new.created_at))
    execute function webhookd.refuse_transition('job');

-- While a lease lasts, it keeps its token, and its end may be moved. A reported job keeps the token; a job that the reaper fails
-- loses it. lease_resets grows by one when a lease is taken back, and only then.
create or replace trigger attempt_transition before update of status, lease_until, worker_id, lease_token, lease_resets
    on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Pending', 'Leased') and not (
            (old.status <> 'Pending' or new.status in ('Pending', 'Leased'))
            and (new.lease_resets = old.lease_resets
                 or (old.status = 'Leased' and new.status = 'Pending' and new.lease_resets = old.lease_resets + 1))
            and (old.status <> 'Leased' or new.status = 'Pending'
                 or (new.worker_id is not distinct from old.worker_id
                     and (new.lease_token is not distinct from old.lease_token
                          or (new.lease_token is null and new.status <> 'Leased'))))))
    execute function webhookd.refuse_transition('job');

-- A report does not apply the result.
create or replace trigger attempt_reported_unapplied before update of result_applied_at on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Pending', 'Leased') and new.status in ('Completed', 'Failed') and new.result_applied_at is not null)
    execute function webhookd.refuse_transition('job');


-- dead letters ----------------------------------------------------------------------------------------------------

create or replace trigger dead_letter_matches_saga after insert on webhookd.dead_letters
    referencing new table as new_dead_letters for each statement execute function webhookd.require_matching_snapshot();


-- the job substrate -----------------------------------------------------------------------------------------------

create or replace trigger event_reserved before insert on webhookd.events
    for each row when (starts_with(new.event_type, 'dot.job.')) execute function webhookd.refuse_reserved_event();
create or replace trigger events_generate_jobs after insert on webhookd.events
    referencing new table as new_events for each statement execute function webhookd.enqueue_job_events();

create or replace trigger work_born before insert on webhookd.job_queue
    for each row when (
        new.status <> 'queued' or new.attempts <> 0 or new.lease_recoveries <> 0
        or num_nonnulls(new.last_error, new.last_error_at, new.last_error_code, new.lease_name, new.lease_holder,
                        new.lease_token, new.leased_until, new.lease_ttl_seconds, new.started_at, new.finished_at,
                        new.result_ref, new.status_signal, new.cancel_reason, new.cleaned_from) > 0)
    execute function webhookd.refuse_work_transition();

create or replace trigger work_kept before delete or truncate on webhookd.job_queue
    for each statement execute function webhookd.refuse_change();

-- What work is about never changes; what each edge may change beside the status stands here, and all else is as it was.
-- An edge is a row of the table in schema/README.md.
create or replace trigger work_transition before update on webhookd.job_queue
    for each row when (
        (old.job_id, old.job_kind, old.event_domain, old.idempotency_key, old.source_ref, old.target_ref, old.payload_ref,
         old.payload_classification, old.executor, old.deadline_at, old.priority, old.correlation_id, old.causation_event_id,
         old.parent_job_id, old.workflow_id, old.enqueued_by, old.enqueued_at, old.source_system)
            is distinct from
        (new.job_id, new.job_kind, new.event_domain, new.idempotency_key, new.source_ref, new.target_ref, new.payload_ref,
         new.payload_classification, new.executor, new.deadline_at, new.priority, new.correlation_id, new.causation_event_id,
         new.parent_job_id, new.workflow_id, new.enqueued_by, new.enqueued_at, new.source_system)
        or (new.status <> 'cleaned' and new.safe_payload is distinct from old.safe_payload)
        or not case
            -- its time came, or an operator moves it
            when old.status = 'queued' and new.status = 'queued' then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.lease_name, new.lease_holder,
                 new.lease_token, new.lease_ttl_seconds, new.lease_recoveries, new.started_at, new.result_ref,
                 new.status_signal)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code, old.lease_name, old.lease_holder,
                 old.lease_token, old.lease_ttl_seconds, old.lease_recoveries, old.started_at, old.result_ref,
                 old.status_signal)
            -- claimed: a lease that never was
            when old.status = 'queued' and new.status = 'leased' then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.process_after,
                 new.lease_recoveries, new.started_at, new.result_ref)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code, old.process_after,
                 old.lease_recoveries, old.started_at, old.result_ref)
                and new.lease_token is distinct from old.lease_token
            -- the same lease: renewed, or its end moved; its token stays, and its first word makes it in_progress
            when old.status in ('leased','in_progress') and new.status in (old.status, 'in_progress') then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.process_after, new.lease_name,
                 new.lease_holder, new.lease_token, new.lease_ttl_seconds, new.lease_recoveries, new.result_ref)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code, old.process_after, old.lease_name,
                 old.lease_holder, old.lease_token, old.lease_ttl_seconds, old.lease_recoveries, old.result_ref)
                and (new.status = 'leased' or new.started_at is not null)
                and (old.started_at is null or new.started_at is not distinct from old.started_at)
            when old.status in ('leased','in_progress') and new.status = 'succeeded' then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.process_after, new.lease_name,
                 new.lease_holder, new.lease_token, new.lease_recoveries, new.status_signal)
                    is not distinct from
                (old.attempts + 1, old.last_error, old.last_error_at, old.last_error_code, old.process_after, old.lease_name,
                 old.lease_holder, old.lease_token, old.lease_recoveries, old.status_signal)
            -- reported by its holder, or given up by the reaper, which clears the token
            when old.status in ('leased','in_progress') and new.status = 'failed' then
                (new.attempts, new.process_after, new.lease_recoveries, new.started_at, new.result_ref, new.status_signal)
                    is not distinct from
                (old.attempts + 1, old.process_after, old.lease_recoveries, old.started_at, old.result_ref, old.status_signal)
                and (new.lease_token is null or new.lease_token = old.lease_token)
            -- recovered when its lease has ended: the late holder's token is worth nothing any more
            when old.status in ('leased','in_progress') and new.status = 'queued' then
                old.leased_until < now() and
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code,
                 new.lease_recoveries, new.started_at, new.result_ref, new.lease_token)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code,
                 old.lease_recoveries + 1, old.started_at, old.result_ref, null::uuid)
                and new.process_after between old.process_after and greatest(old.process_after, now())
            when old.status = 'failed' and new.status in ('retry_waiting','dead_letter') then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.lease_token, new.started_at,
                 new.result_ref)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code, old.lease_token, old.started_at,
                 old.result_ref)
                and new.process_after >= old.process_after
                and new.lease_recoveries = case when new.status = 'retry_waiting' then 0 else old.lease_recoveries end
            -- promoted when due, or an operator moves its time
            when old.status = 'retry_waiting' and new.status in ('queued','retry_waiting') then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.lease_token,
                 new.lease_recoveries, new.started_at, new.result_ref)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code, old.lease_token,
                 old.lease_recoveries, old.started_at, old.result_ref)
                and (new.status = 'retry_waiting' or (new.process_after = old.process_after and old.process_after <= now()))
            when old.status in ('queued','retry_waiting','dead_letter') and new.status = 'cancelled' then
                (new.attempts, new.last_error, new.last_error_at, new.last_error_code, new.process_after, new.lease_token,
                 new.lease_recoveries, new.started_at, new.result_ref)
                    is not distinct from
                (old.attempts, old.last_error, old.last_error_at, old.last_error_code, old.process_after, old.lease_token,
                 old.lease_recoveries, old.started_at, old.result_ref)
            when old.status in ('succeeded','cancelled') and new.status = 'cleaned' then
                (new.attempts, new.last_error_at, new.last_error_code, new.process_after, new.lease_token,
                 new.lease_recoveries, new.started_at, new.finished_at, new.result_ref, new.cancel_reason, new.cleaned_from)
                    is not distinct from
                (old.attempts, old.last_error_at, old.last_error_code, old.process_after, old.lease_token,
                 old.lease_recoveries, old.started_at, old.finished_at, old.result_ref, old.cancel_reason, old.status)
            else false
        end)
    execute function webhookd.refuse_work_transition();

drop trigger if exists work_not_left_failed on webhookd.job_queue;  -- a constraint trigger cannot be replaced
create constraint trigger work_not_left_failed after update on webhookd.job_queue
    deferrable initially deferred
    for each row when (new.status = 'failed')
    execute function webhookd.refuse_to_stay_failed();

create or replace trigger work_joined after insert on webhookd.job_queue
    for each row when (new.workflow_id is not null) execute function webhookd.ask_workflow();
create or replace trigger work_over after update on webhookd.job_queue
    for each row when (
        new.workflow_id is not null and new.status <> old.status
        and new.status in ('succeeded','dead_letter','cancelled'))
    execute function webhookd.ask_workflow();

create or replace trigger workflow_born before insert on webhookd.job_workflow
    for each row when (new.status <> 'active') execute function webhookd.refuse_work_transition();
create or replace trigger workflow_status before update on webhookd.job_workflow
    for each row execute function webhookd.derive_workflow_status();
create or replace trigger workflow_kept before delete or truncate on webhookd.job_workflow
    for each statement execute function webhookd.refuse_change();

create or replace trigger settings_kept before delete or truncate on webhookd.settings
    for each statement execute function webhookd.refuse_change();

create or replace trigger job_command_run_immutable before update or delete or truncate on webhookd.job_command_run
    for each statement execute function webhookd.refuse_change();
