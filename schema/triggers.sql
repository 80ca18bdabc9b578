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


-- job queue -------------------------------------------------------------------------------------------------------

create or replace trigger event_reserved before insert on webhookd.events
    for each row when (starts_with(new.event_type, 'dot.job.')) execute function webhookd.refuse_reserved_event();
create or replace trigger events_generate_jobs after insert on webhookd.events
    referencing new table as new_events for each statement execute function webhookd.enqueue_job_events();

create or replace trigger job_inserted before insert on webhookd.job_queue
    for each row when (
        new.status <> 'queued' or new.attempts <> 0 or new.lease_recoveries <> 0
        or num_nonnulls(new.last_error, new.last_error_at, new.last_error_code, new.lease_name, new.lease_holder,
                        new.lease_token, new.leased_until, new.lease_ttl_seconds, new.started_at, new.finished_at,
                        new.result_ref, new.status_signal, new.cancel_reason, new.cleaned_from) > 0)
    execute function webhookd.refuse_job_insert();
create or replace trigger job_kept before delete or truncate on webhookd.job_queue
    for each statement execute function webhookd.refuse_change();
-- A function and not a WHEN clause: PostgreSQL parses a clause again for each statement, and this one had 90 lines. Measured on a
-- busy machine, medians, PostgreSQL 15 and 18: claim 2.13 and 1.75 ms instead of 2.31 and 2.24, progress 1.87 and 1.33 instead of
-- 1.98 and 1.82. An update of many rows at once costs 0.1 ms more for each row.
create or replace trigger job_transition before update on webhookd.job_queue
    for each row execute function webhookd.check_job_transition();

drop trigger if exists job_not_left_failed on webhookd.job_queue;  -- a constraint trigger cannot be replaced
create constraint trigger job_not_left_failed after update on webhookd.job_queue
    deferrable initially deferred
    for each row when (new.status = 'failed')
    execute function webhookd.refuse_failed_at_commit();

create or replace trigger job_joined_workflow after insert on webhookd.job_queue
    for each row when (new.workflow_id is not null) execute function webhookd.refresh_workflow();
create or replace trigger job_finished after update on webhookd.job_queue
    for each row when (
        new.workflow_id is not null and new.status <> old.status
        and new.status in ('succeeded','dead_letter','cancelled'))
    execute function webhookd.refresh_workflow();

create or replace trigger workflow_inserted before insert on webhookd.job_workflow
    for each row when (new.status <> 'active') execute function webhookd.refuse_job_insert();
create or replace trigger workflow_status before update on webhookd.job_workflow
    for each row execute function webhookd.derive_workflow_status();
create or replace trigger workflow_kept before delete or truncate on webhookd.job_workflow
    for each statement execute function webhookd.refuse_change();

create or replace trigger settings_kept before delete or truncate on webhookd.settings
    for each statement execute function webhookd.refuse_change();

create or replace trigger job_command_run_immutable before update or delete or truncate on webhookd.job_command_run
    for each statement execute function webhookd.refuse_change();
