-- Owns: the triggers. They say which changes of a row are allowed, also for the tables' owner, and what follows a write. Runs as
-- webhookd_owner. Separate from the functions, because replacing a trigger locks its table and replacing a function does not.
--
-- Sagas and jobs have no BEFORE UPDATE trigger, because it locks each row before the update, whatever columns it names: 4,000
-- instructions and 54 bytes of WAL. No statement of the hot path has a trigger with a WHEN clause, except for saga_has_dead_letter, because PostgreSQL parses the
-- text of each clause again for each statement; guards.sql says what that costs.

-- events, dead letters: append only, but for retention ------------------------------------------------------------
-- Triggers instead of revoked privileges of the owner: foreign key checks lock the referenced rows as the owner.

create or replace trigger events_immutable before update or delete or truncate on webhookd.events
    for each statement execute function webhookd.refuse_change();

create or replace trigger dead_letters_immutable before update or delete or truncate on webhookd.dead_letters
    for each statement execute function webhookd.refuse_change();

create or replace trigger event_payload_removed after update on webhookd.events
    for each row execute function webhookd.check_payload_removed();
create or replace trigger snapshot_removed after update on webhookd.dead_letters
    for each row execute function webhookd.check_snapshot_removed();
create or replace trigger event_without_sagas after delete on webhookd.events
    referencing old table as old_events for each statement execute function webhookd.refuse_event_in_use();

create or replace trigger events_enqueue after insert on webhookd.events
    referencing new table as new_events for each statement execute function webhookd.enqueue_events();


-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace trigger subscription_url_changed before update on webhookd.subscriptions
    for each row when (old.callback_url is distinct from new.callback_url
                       and old.pending_callback_url is distinct from new.callback_url)  -- the pending one was verified
    execute function webhookd.clear_verified();

create or replace trigger subscription_created after insert on webhookd.subscriptions
    for each row execute function webhookd.log_subscription_change();
create or replace trigger subscription_changed after update on webhookd.subscriptions
    for each row when ((old.event_types, old.filter, old.callback_url, old.active, old.verified)
                       is distinct from (new.event_types, new.filter, new.callback_url, new.active, new.verified))
    execute function webhookd.log_subscription_change();
create or replace trigger subscription_event_types before insert on webhookd.subscriptions
    for each row when (new.event_types is null or new.event_type is distinct from new.event_types[1])
    execute function webhookd.align_event_types();
create or replace trigger subscription_event_types_changed before update on webhookd.subscriptions
    for each row when (new.event_types is null or new.event_type is distinct from new.event_types[1])
    execute function webhookd.align_event_types();
create or replace trigger subscription_tenant before update on webhookd.subscriptions
    for each row when (old.tenant <> new.tenant) execute function webhookd.refuse_change();
create or replace trigger subscription_types_created after insert on webhookd.subscriptions
    for each row execute function webhookd.index_subscription_types();
create or replace trigger subscription_types_changed after update on webhookd.subscriptions
    for each row when ((old.event_types, old.filter, old.routable, old.deleted_at)
                       is distinct from (new.event_types, new.filter, new.routable, new.deleted_at))
    execute function webhookd.index_subscription_types();


create or replace trigger subscription_without_sagas after delete on webhookd.subscriptions
    referencing old table as old_subscriptions for each statement execute function webhookd.refuse_subscription_in_use();
create or replace trigger subscriptions_kept before delete on webhookd.subscriptions
    for each statement execute function webhookd.refuse_change();


-- sagas -----------------------------------------------------------------------------------------------------------

create or replace trigger saga_created after insert on webhookd.webhook_delivery_sagas
    referencing new table as new_sagas for each statement execute function webhookd.check_new_sagas();

create or replace trigger saga_changed after update on webhookd.webhook_delivery_sagas
    for each row execute function webhookd.check_saga();

create or replace trigger saga_identity after update of id, event_id, subscription_id, dead_letter_id, resent_from, created_at
    on webhookd.webhook_delivery_sagas
    for each row when (
        (old.id, old.event_id, old.subscription_id, old.dead_letter_id, old.resent_from, old.created_at)
            is distinct from (new.id, new.event_id, new.subscription_id, new.dead_letter_id, new.resent_from, new.created_at))
    execute function webhookd.refuse_transition('saga');

create or replace trigger sagas_kept before delete on webhookd.webhook_delivery_sagas
    for each statement execute function webhookd.refuse_change();
create or replace trigger saga_removed after delete on webhookd.webhook_delivery_sagas
    referencing old table as old_sagas for each statement execute function webhookd.refuse_live_saga();

drop trigger if exists saga_has_dead_letter on webhookd.webhook_delivery_sagas;  -- a constraint trigger cannot be replaced
create constraint trigger saga_has_dead_letter after update on webhookd.webhook_delivery_sagas
    deferrable initially deferred
    for each row when (new.status = 'DeadLettered')
    execute function webhookd.require_dead_letter();


-- jobs ------------------------------------------------------------------------------------------------------------

create or replace trigger attempt_created after insert on webhookd.webhook_delivery_jobs
    referencing new table as new_jobs for each statement execute function webhookd.check_new_jobs();

create or replace trigger attempt_changed after update on webhookd.webhook_delivery_jobs
    for each row execute function webhookd.check_job();

create or replace trigger attempt_identity after update of id, saga_id, subscription_id, event_id, attempt, attempt_at, created_at
    on webhookd.webhook_delivery_jobs
    for each row when (
        (old.id, old.saga_id, old.subscription_id, old.event_id, old.attempt, old.attempt_at, old.created_at)
            is distinct from
        (new.id, new.saga_id, new.subscription_id, new.event_id, new.attempt, new.attempt_at, new.created_at))
    execute function webhookd.refuse_transition('job');


create or replace trigger attempts_kept before delete or truncate on webhookd.webhook_delivery_jobs
    for each statement execute function webhookd.refuse_change();
create or replace trigger attempt_removed after delete on webhookd.webhook_delivery_jobs
    referencing old table as old_jobs for each statement execute function webhookd.refuse_live_job();


-- statistics ------------------------------------------------------------------------------------------------------

create or replace trigger delivery_stats_kept before delete or truncate on webhookd.delivery_stats
    for each statement execute function webhookd.refuse_change();
create or replace trigger delivery_stats_hours_kept before delete or truncate on webhookd.delivery_stats_hours
    for each statement execute function webhookd.refuse_change();


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

create or replace trigger erasures_kept before delete or truncate on webhookd.erasures
    for each statement execute function webhookd.refuse_change();

create or replace trigger settings_kept before delete or truncate on webhookd.settings
    for each statement execute function webhookd.refuse_change();

create or replace trigger job_command_run_immutable before update or delete or truncate on webhookd.job_command_run
    for each statement execute function webhookd.refuse_change();
