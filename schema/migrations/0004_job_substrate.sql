-- Owns: the tables of the job substrate (DP2), their constraints, indexes and views. Runs as webhookd_owner.
-- A queue of its own, for executors outside of webhookd: no delivery depends on it, and it is off until enabled.
--
-- Names, columns, CHECKs and indexes of DP2 §3.2 and §5 are as it has them, but for schema and `causation_event_id`, which
-- refers to our events. Further columns stand below its own in each table, further indexes after its own, with their reason.

-- What an operator decides in the database and not in a file, because executors that speak SQL ask it too.
create table webhookd.settings (
    key   text primary key,
    value jsonb not null,
    constraint substrate_setting check (case
        when key = 'queue.job_substrate.enabled' then jsonb_typeof(value) = 'boolean'
        when starts_with(key, 'queue.job_substrate.') then jsonb_typeof(value) = 'number'
            and (value #>> '{}')::numeric between
                case when key = 'queue.job_substrate.max_attempts' then 1 else 0 end
                and case when key in ('queue.job_substrate.max_attempts', 'queue.job_substrate.max_lease_recoveries') then 1000
                         when key = 'queue.job_substrate.jitter' then 1
                         else 315360000 end
            and (key not in ('queue.job_substrate.max_attempts', 'queue.job_substrate.max_lease_recoveries')
                 or (value #>> '{}')::numeric % 1 = 0)
        else true end)
);
-- DP3, which would set the numbers, is not among the seeds: they are the delivery saga's, and its lease resets' (SPEC D4, D9,
-- D14). Retention: a week, in which somebody may still ask what a job was about.
insert into webhookd.settings (key, value) values
    ('queue.job_substrate.enabled', 'false'),
    ('queue.job_substrate.max_attempts', '5'),
    ('queue.job_substrate.base_delay_seconds', '30'),
    ('queue.job_substrate.max_delay_seconds', '3600'),
    ('queue.job_substrate.jitter', '0'),
    ('queue.job_substrate.max_lease_recoveries', '5'),
    ('queue.job_substrate.retention_seconds', '604800');

-- The same for one kind of job; null: the setting's.
create table webhookd.job_kind_policy (
    job_kind             text collate "C" primary key,
    max_attempts         integer check (max_attempts between 1 and 1000),
    base_delay_seconds   double precision check (base_delay_seconds between 0 and 315360000),
    max_delay_seconds    double precision check (max_delay_seconds between 0 and 315360000),
    jitter               double precision check (jitter between 0 and 1),
    max_lease_recoveries integer check (max_lease_recoveries between 0 and 1000),
    retention_seconds    double precision check (retention_seconds between 0 and 315360000)
);


-- A graph of jobs that somebody generated. Its status follows from its jobs: a trigger computes it at every update, so an
-- update is only ever the question "how is it now?", and `revision` what makes it a write that two askers cannot both miss.
create table webhookd.job_workflow (
    workflow_id    uuid primary key default gen_random_uuid(),
    workflow_kind  text not null,
    generator      text not null,
    status         text not null default 'active'
        check (status in ('active','succeeded','failed','partially_failed','cancelled')),
    correlation_id text null,
    enqueued_by    text not null,
    enqueued_at    timestamptz not null default now(),
    finished_at    timestamptz null,

    revision       bigint not null default 0,
    constraint finished_when_not_active check ((status = 'active') = (finished_at is null))
) with (fillfactor = 70);


create table webhookd.job_queue (
    job_id                 uuid primary key default gen_random_uuid(),
    job_kind               text collate "C" not null,
    event_domain           text not null check (btrim(event_domain) <> ''),
    idempotency_key        text collate "C" not null,
    source_ref             text null,
    target_ref             text null,
    payload_ref            text null,
    safe_payload           jsonb not null default '{}'::jsonb
        CHECK (NOT safe_payload ?| ARRAY['body','content','raw','vector','embedding','secret','token','password','ssn','personal_data']),
    payload_classification text not null default 'safe_metadata'
        check (payload_classification in ('safe_metadata','restricted')),

    executor               text collate "C" not null
        check (executor in ('DOT','Agent','Hermes','Codex','PG_worker','external_worker','future_Kestra_adapter')),
    status                 text collate "C" not null default 'queued'
        check (status in ('queued','leased','in_progress','succeeded','failed','retry_waiting','dead_letter','cancelled','cleaned')),

    attempts               integer not null default 0 check (attempts >= 0),
    last_error             text null,
    last_error_at          timestamptz null,

    lease_name             text null,
    lease_holder           text null,
    lease_token            uuid null,           -- kept by a reported job, to know the same report again
    leased_until           timestamptz null,

    process_after          timestamptz not null default now(),
    deadline_at            timestamptz null,
    priority               smallint not null default 0,

    correlation_id         text null,
    causation_event_id     bigint null references webhookd.events (id),
    parent_job_id          uuid null references webhookd.job_queue (job_id),
    workflow_id            uuid null references webhookd.job_workflow (workflow_id),

    enqueued_by            text not null check (btrim(enqueued_by) <> ''),
    enqueued_at            timestamptz not null default now(),
    started_at             timestamptz null,
    finished_at            timestamptz null,
    source_system          text not null check (btrim(source_system) <> ''),

    -- Ours.
    result_ref             text null,
    last_error_code        text null,
    lease_ttl_seconds      double precision null,   -- what a renewal adds
    lease_recoveries       integer not null default 0 check (lease_recoveries >= 0),  -- of this attempt
    status_signal          text null,               -- the holder's last word on how it goes
    scheduled              boolean not null default false,  -- born for a later time, and not found due yet
    cancel_reason          text null,
    cleaned_from           text null,

    constraint safe_payload_is_an_object check (jsonb_typeof(safe_payload) = 'object'),
    constraint safe_payload_bound check (octet_length(safe_payload::text) <= 16384),
    -- They travel in an event: its correlation id in a header.
    constraint correlation_id_form check (length(correlation_id) <= 255
                                          and correlation_id ~ '^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$'),
    constraint leased_has_lease check (case when status in ('leased','in_progress')
        then num_nulls(lease_name, lease_holder, lease_token, leased_until, lease_ttl_seconds) = 0
        else leased_until is null end),
    constraint finished_when_over check
        ((status in ('succeeded','dead_letter','cancelled','cleaned')) = (finished_at is not null)),
    constraint failed_has_error check (status not in ('failed','retry_waiting','dead_letter')
        or (last_error_code is not null and last_error_at is not null and attempts > 0)),
    constraint cancelled_has_reason check
        ((status = 'cancelled' or coalesce(cleaned_from = 'cancelled', false)) = (cancel_reason is not null)),
    constraint cleaned_says_from_what check (case when status = 'cleaned'
        then coalesce(cleaned_from in ('succeeded','cancelled'), false) and safe_payload = '{}' else cleaned_from is null end),
    constraint only_queued_is_scheduled check (not scheduled or status = 'queued'),
    constraint ux_job_queue_kind_idempotency_key unique (job_kind, idempotency_key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

-- DP2 §5; ux_job_queue_kind_idempotency_key is made by the constraint above.
create index ix_job_queue_claimable on webhookd.job_queue (job_kind, process_after, priority desc, enqueued_at)
    where status = 'queued';
create index ix_job_queue_lease_active on webhookd.job_queue (lease_name, leased_until)
    where status in ('leased','in_progress');
create index ix_job_queue_dead_letter on webhookd.job_queue (job_kind, last_error_at desc)
    where status = 'dead_letter';
create index ix_job_queue_workflow_id on webhookd.job_queue (workflow_id);
create index ix_job_queue_correlation_id on webhookd.job_queue (correlation_id);

-- The claim's order, which ix_job_queue_claimable does not give: it would read and sort all that waits. Without what is
-- scheduled for later, which would otherwise lie in front for as long as its priority is high.
create index ix_job_queue_claim_order on webhookd.job_queue (job_kind, executor, priority desc, enqueued_at, job_id)
    where status = 'queued' and not scheduled;
create index ix_job_queue_scheduled on webhookd.job_queue (job_kind, executor, process_after, job_id)
    where status = 'queued' and scheduled;
-- The reaper's four looks. DP2's index of leases is by name; expired are leases of any name.
create index ix_job_queue_lease_end on webhookd.job_queue (leased_until, job_id)
    where status in ('leased','in_progress');
create index ix_job_queue_retry_due on webhookd.job_queue (process_after, job_id)
    where status = 'retry_waiting';
create index ix_job_queue_deadline on webhookd.job_queue (deadline_at, job_id)
    where status in ('queued','retry_waiting') and deadline_at is not null;
-- The sweep's: retention is a kind's.
create index ix_job_queue_retention on webhookd.job_queue (job_kind, finished_at, job_id)
    where status in ('succeeded','cancelled');
-- Whether a workflow has a job that is not over.
create index ix_job_queue_workflow_open on webhookd.job_queue (workflow_id)
    where status in ('queued','leased','in_progress','failed','retry_waiting');
-- Lists, each in the order in which it shows its rows.
create index ix_job_queue_listed on webhookd.job_queue (enqueued_at, job_id);
create index ix_job_queue_status_listed on webhookd.job_queue (status, enqueued_at, job_id);
create index ix_job_queue_kind_listed on webhookd.job_queue (job_kind, status, enqueued_at, job_id);
create index ix_job_queue_parent on webhookd.job_queue (parent_job_id) where parent_job_id is not null;


-- DP2's dot_iu_command_run: one row for each move of a job that a gated function made, and each renewal. Never changes.
create table webhookd.job_command_run (
    run_id      bigint generated always as identity primary key,
    job_id      uuid not null references webhookd.job_queue (job_id),
    command     text not null,
    from_status text null,                  -- null: a birth
    to_status   text not null,
    actor       text not null,              -- who says so
    called_by   text not null default session_user,
    attempts    integer not null,
    event_id    bigint null,                -- the lifecycle event emitted with it; the last, where there were two
    detail      jsonb not null default '{}',
    run_at      timestamptz not null default now()
);
create index ix_job_command_run_job on webhookd.job_command_run (job_id, run_id);


-- Events generate jobs: which type gives which kind. Never a lifecycle event, which would feed on itself.
create table webhookd.job_event_registry (
    event_type    varchar(100) collate "C" not null,
    job_kind      text collate "C" not null,
    executor      text not null
        check (executor in ('DOT','Agent','Hermes','Codex','PG_worker','external_worker','future_Kestra_adapter')),
    priority      smallint not null default 0,
    active        boolean not null default true,
    registered_by text not null,
    registered_at timestamptz not null default now(),
    primary key (event_type, job_kind),
    constraint event_type_form check (event_type ~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$'),
    constraint no_lifecycle_event check (not starts_with(event_type, 'dot.job.'))
);

-- Which events of a registered type gave no job yet: as event_routing_queue, and beside it, for neither waits for the other.
create table webhookd.job_event_queue (
    event_id bigint primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000);


-- DP2 §8.
create view webhookd.v_job_queue_backlog as
    select job_kind, count(*) as backlog from webhookd.job_queue
    where status = 'queued' group by job_kind;
create view webhookd.v_job_queue_in_progress as
    select job_kind, count(*) as in_progress from webhookd.job_queue
    where status in ('leased','in_progress') group by job_kind;
create view webhookd.v_job_queue_dead_letter_open as
    select * from webhookd.job_queue where status = 'dead_letter';
