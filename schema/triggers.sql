-- Owns: what may change in a row, the tables' owner included, and which writes set what in motion. Runs as webhookd_owner.
-- Apart from the functions, because replacing a trigger locks its table against writers, and a function does not.
--
-- Conditions stand in the WHEN clauses: a legal change of a row costs no function call (measured: no time, 5 % more WAL at
-- most). What runs PL/pgSQL runs once a statement: an insert of events, jobs or dead letters; or it refuses.

-- events, dead letters: append only -----------------------------------------------------------------------------
-- By triggers and not by taking rights from the owner, as whom foreign keys lock the rows they refer to.

create or replace trigger events_immutable before update or delete or truncate on webhookd.events
    for each statement execute function webhookd.refuse_change();

create or replace trigger dead_letters_immutable before update or delete or truncate on webhookd.dead_letters
    for each statement execute function webhookd.refuse_change();

create or replace trigger events_enqueue after insert on webhookd.events
    referencing new table as new_events for each statement execute function webhookd.enqueue_events();


-- subscriptions ---------------------------------------------------------------------------------------------------

create or replace trigger subscription_address before update on webhookd.subscriptions
    for each row when (old.callback_url is distinct from new.callback_url)
    execute function webhookd.distrust_new_address();

create or replace trigger subscription_born after insert on webhookd.subscriptions
    for each row execute function webhookd.log_subscription();
create or replace trigger subscription_changed after update on webhookd.subscriptions
    for each row when ((old.event_type, old.callback_url, old.active, old.verified)
                       is distinct from (new.event_type, new.callback_url, new.active, new.verified))
    execute function webhookd.log_subscription();


-- sagas -----------------------------------------------------------------------------------------------------------

create or replace trigger saga_birth before insert on webhookd.webhook_delivery_sagas
    for each row when (new.status <> 'Pending' or new.attempt_count <> 0 or new.final_error_code is not null)
    execute function webhookd.refuse_transition('saga');

create or replace trigger saga_frozen before update on webhookd.webhook_delivery_sagas
    for each row when (old.status in ('Completed', 'DeadLettered'))
    execute function webhookd.refuse_change('saga');

create or replace trigger saga_transition before update on webhookd.webhook_delivery_sagas
    for each row when (
        (old.id, old.event_id, old.subscription_id, old.dead_letter_id, old.created_at)
            is distinct from (new.id, new.event_id, new.subscription_id, new.dead_letter_id, new.created_at)
        or not case
            -- a job was made
            when old.status in ('Pending', 'PendingRetry') and new.status = 'InProgress' then
                (new.attempt_count, new.next_attempt_at, new.final_error_code)
                    is not distinct from (old.attempt_count, old.next_attempt_at, old.final_error_code)
            -- a result was applied
            when old.status = 'InProgress' and new.status = 'Completed' then
                (new.attempt_count, new.next_attempt_at, new.final_error_code)
                    is not distinct from (old.attempt_count + 1, old.next_attempt_at, old.final_error_code)
            when old.status = 'InProgress' and new.status = 'PendingRetry' then
                new.attempt_count = old.attempt_count + 1 and new.next_attempt_at > old.next_attempt_at
            when old.status = 'InProgress' and new.status = 'DeadLettered' then
                new.attempt_count = old.attempt_count + 1 and new.next_attempt_at = old.next_attempt_at
            -- the limit was lowered
            when old.status = 'PendingRetry' and new.status = 'DeadLettered' then
                (new.attempt_count, new.next_attempt_at, new.final_error_code)
                    is not distinct from (old.attempt_count, old.next_attempt_at, old.final_error_code)
            -- an operator moves the due time, see saga_rescheduled
            when old.status in ('Pending', 'PendingRetry') and new.status = old.status then
                (new.attempt_count, new.final_error_code) is not distinct from (old.attempt_count, old.final_error_code)
            else false
        end)
    execute function webhookd.refuse_transition('saga');

create or replace trigger saga_rescheduled before update on webhookd.webhook_delivery_sagas
    for each row when (old.status = new.status and old.next_attempt_at <> new.next_attempt_at)
    execute function webhookd.refuse_past_attempt();

drop trigger if exists saga_buried on webhookd.webhook_delivery_sagas;  -- a constraint trigger cannot be replaced
create constraint trigger saga_buried after update on webhookd.webhook_delivery_sagas
    deferrable initially deferred
    for each row when (new.status = 'DeadLettered')
    execute function webhookd.require_dead_letter();


-- jobs ------------------------------------------------------------------------------------------------------------

create or replace trigger job_birth before insert on webhookd.webhook_delivery_jobs
    for each row when (new.status <> 'Pending' or new.lease_resets <> 0 or new.result_applied_at is not null)
    execute function webhookd.refuse_transition('job');

create or replace trigger job_of_saga_in_progress after insert on webhookd.webhook_delivery_jobs
    referencing new table as new_jobs for each statement execute function webhookd.require_saga_in_progress();

-- A finished job takes one stamp, result_applied_at, once.
create or replace trigger job_frozen before update on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Completed', 'Failed')
        and (old.result_applied_at is not null or new.result_applied_at is null
             or (old.id, old.saga_id, old.subscription_id, old.status, old.lease_until, old.attempt_at,
                 old.response_status, old.error_code, old.worker_id, old.lease_token, old.lease_resets,
                 old.created_at, old.finished_at, old.duration_ms, old.retry_after_seconds, old.response_excerpt)
                is distinct from
                (new.id, new.saga_id, new.subscription_id, new.status, new.lease_until, new.attempt_at,
                 new.response_status, new.error_code, new.worker_id, new.lease_token, new.lease_resets,
                 new.created_at, new.finished_at, new.duration_ms, new.retry_after_seconds, new.response_excerpt)))
    execute function webhookd.refuse_change('job');

create or replace trigger job_transition before update on webhookd.webhook_delivery_jobs
    for each row when (
        old.status in ('Pending', 'Leased')
        and ((old.id, old.saga_id, old.subscription_id, old.attempt_at, old.created_at)
                is distinct from (new.id, new.saga_id, new.subscription_id, new.attempt_at, new.created_at)
             or not case
                when old.status = 'Pending' and new.status in ('Pending', 'Leased') then
                    new.lease_resets = old.lease_resets
                -- the same lease: it may be made longer or end early, its token stays
                when old.status = 'Leased' and new.status = 'Leased' then
                    (new.lease_token, new.worker_id, new.lease_resets)
                        is not distinct from (old.lease_token, old.worker_id, old.lease_resets)
                when old.status = 'Leased' and new.status = 'Pending' then
                    new.lease_resets in (old.lease_resets, old.lease_resets + 1)
                -- reported by its holder, or given up by the reaper, which clears the token
                when old.status = 'Leased' and new.status in ('Completed', 'Failed') then
                    (new.worker_id, new.lease_resets) is not distinct from (old.worker_id, old.lease_resets)
                    and new.result_applied_at is null
                    and (new.lease_token is null or new.lease_token = old.lease_token)
                else false
            end))
    execute function webhookd.refuse_transition('job');


-- dead letters ----------------------------------------------------------------------------------------------------

create or replace trigger dead_letter_true after insert on webhookd.dead_letters
    referencing new table as new_dead_letters for each statement execute function webhookd.require_true_snapshot();
