-- Owns: the tables, their constraints and their indexes. Runs as webhookd_owner.
-- What may change in a row, and how, is in triggers.sql; who may touch a table, in grants.sql.
--
-- Times are the database's. Names and types of the seeds' columns are fixed; indexes carry the seeds' names.
-- An index over rows that still live is partial, so that its size follows the backlog and not the history.

create type webhookd.saga_status as enum ('Pending', 'InProgress', 'PendingRetry', 'Completed', 'DeadLettered');
create type webhookd.job_status as enum ('Pending', 'Leased', 'Completed', 'Failed');
create type webhookd.report_verdict as enum ('accepted', 'duplicate', 'stale', 'unknown');


-- Facts, kept for ever. `json`, not `jsonb`: the bytes delivered are the bytes accepted.
-- COLLATE "C" on what is compared and never sorted for people: faster, and a new libc cannot corrupt the index.
create table webhookd.events (
    id              bigint generated always as identity primary key,
    event_type      varchar(100) collate "C" not null,
    created_at      timestamptz not null default now(),
    payload         json not null,
    idempotency_key varchar(255) collate "C",
    correlation_id  varchar(255) collate "C",
    -- Bounded also for who does not come through the API: a delivery is held in memory, beside many others.
    constraint payload_bound check (octet_length(payload::text) <= 8388608),
    constraint event_type_form check (event_type ~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$'),
    constraint idempotency_key_form check (idempotency_key ~ '^[^[:cntrl:]]+$'),
    -- It travels in a header.
    constraint correlation_id_form check (correlation_id ~ '^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$')
);
create index idx_event_created on webhookd.events (created_at);
create index idx_event_type on webhookd.events (event_type, created_at);
create unique index uniq_event_idempotency_key on webhookd.events (idempotency_key)
    where idempotency_key is not null;

-- Which events routing has not seen: filled by a trigger on events, emptied by route_events.
-- No foreign key: only the trigger writes here, in the transaction that writes the event.
create table webhookd.event_routing_queue (
    event_id bigint primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000);


create table webhookd.subscriptions (
    id                 bigint generated always as identity primary key,
    event_type         varchar(100) collate "C" not null,
    callback_url       varchar(500) not null,
    active             boolean not null default true,
    verified           boolean not null default false,
    max_attempts       integer,             -- null: the configuration's
    base_delay_seconds double precision,    -- null: the configuration's
    description        varchar(500),
    created_at         timestamptz not null default now(),
    updated_at         timestamptz not null default now(),
    constraint event_type_form check (event_type ~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$'),
    constraint callback_url_is_https check (
        callback_url ~ '^https://(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z]([0-9A-Za-z.-]*[0-9A-Za-z])?)(:[0-9]{1,5})?([/?][!"$-~]*)?$'),
    constraint max_attempts_range check (max_attempts between 1 and 1000),
    constraint base_delay_range check (base_delay_seconds between 0 and 31536000)
);
create index idx_sub_event_type on webhookd.subscriptions (event_type, id);
create index idx_sub_active on webhookd.subscriptions (active, id);

-- Signing secrets and custom headers, apart, because fewer may read them. The newest secret and up to three
-- earlier ones sign, each of those until its own time.
create table webhookd.subscription_secrets (
    subscription_id      bigint primary key references webhookd.subscriptions,
    secret               text not null,
    previous_secrets     text[] not null default '{}',
    previous_valid_until timestamptz[] not null default '{}',
    headers              jsonb not null default '{}',
    challenge            text,              -- of the verification under way
    updated_at           timestamptz not null default now(),
    constraint secret_form check (
        case when secret ~ '^whsec_([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
             then octet_length(decode(substr(secret, 7), 'base64')) between 24 and 64 else false end),
    constraint previous_secrets_paired check (cardinality(previous_secrets) = cardinality(previous_valid_until)
                                              and cardinality(previous_secrets) <= 3),
    constraint headers_are_an_object check (jsonb_typeof(headers) = 'object')
);

-- What a subscription looked like when: answers "why was this not routed?". Filled by a trigger.
create table webhookd.subscription_changes (
    id              bigint generated always as identity primary key,
    subscription_id bigint not null references webhookd.subscriptions,
    changed_at      timestamptz not null default clock_timestamp(),
    event_type      varchar(100) collate "C" not null,
    callback_url    varchar(500) not null,
    active          boolean not null,
    verified        boolean not null
);
create index idx_subscription_change on webhookd.subscription_changes (subscription_id, changed_at);

-- Whether an endpoint keeps failing: the same for every instance, kept over restarts. Written when a failure
-- happens or a run of failures ends, so a healthy endpoint costs nothing.
create table webhookd.endpoint_health (
    subscription_id      bigint primary key references webhookd.subscriptions,
    consecutive_failures integer not null default 0,
    failing_since        timestamptz,       -- not null: probed one request at a time
    last_error_code      varchar(100),
    last_failure_at      timestamptz,
    last_recovery_at     timestamptz,       -- when a success last ended a run of failures
    constraint consecutive_failures_range check (consecutive_failures >= 0)
) with (fillfactor = 50);
create index idx_endpoint_failing on webhookd.endpoint_health (failing_since)
    where failing_since is not null;


-- One delivery of one event to one subscription. Rows change two to a few times: room in the page (fillfactor)
-- keeps the versions together.
create table webhookd.webhook_delivery_sagas (
    id               bigint generated always as identity primary key,
    event_id         bigint not null references webhookd.events,
    subscription_id  bigint not null references webhookd.subscriptions,
    status           webhookd.saga_status not null default 'Pending',
    attempt_count    integer not null default 0,
    next_attempt_at  timestamptz not null default now(),
    final_error_code varchar(100),
    created_at       timestamptz not null default now(),
    updated_at       timestamptz not null default now(),
    dead_letter_id   bigint,                -- of a requeued saga: the dead letter it was made from
    constraint attempt_count_range check (attempt_count >= 0),
    constraint dead_lettered_has_error check (status not in ('PendingRetry', 'DeadLettered')
                                              or final_error_code is not null)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

create index idx_saga_event on webhookd.webhook_delivery_sagas (event_id, subscription_id);
-- Routing twice gives one saga; a requeue is a saga of its own, and one dead letter gives at most one.
create unique index uniq_saga_event_subscription on webhookd.webhook_delivery_sagas (event_id, subscription_id)
    where dead_letter_id is null;
create unique index uniq_saga_dead_letter on webhookd.webhook_delivery_sagas (dead_letter_id)
    where dead_letter_id is not null;
create index idx_saga_status_retry on webhookd.webhook_delivery_sagas (status, next_attempt_at)
    where status in ('Pending', 'PendingRetry');
-- Listing by status and the sweep after a reload. Completed is nearly every row: the primary key lists those.
create index idx_saga_status on webhookd.webhook_delivery_sagas (status, id)
    where status <> 'Completed';
-- Fairness: what is due of one subscription, oldest first.
create index idx_saga_subscription_due on webhookd.webhook_delivery_sagas (subscription_id, next_attempt_at, id)
    where status in ('Pending', 'PendingRetry');


-- One attempt. `subscription_id` is the saga's (checked at birth): the window and the slots count by it.
create table webhookd.webhook_delivery_jobs (
    id                  bigint generated always as identity primary key,
    saga_id             bigint not null references webhookd.webhook_delivery_sagas,
    subscription_id     bigint not null,
    status              webhookd.job_status not null default 'Pending',
    lease_until         timestamptz,
    attempt_at          timestamptz not null,   -- what the attempt was scheduled for: the saga's next_attempt_at
    response_status     integer,
    error_code          varchar(100),
    worker_id           varchar(200),
    lease_token         uuid,                   -- kept by a reported job, to know the same report again
    lease_resets        integer not null default 0,
    result_applied_at   timestamptz,
    created_at          timestamptz not null default now(),
    finished_at         timestamptz,
    duration_ms         integer,
    retry_after_seconds double precision,
    response_excerpt    bytea,                  -- bytes, so that no answer is unstorable
    constraint pending_has_no_lease check (status <> 'Pending'
        or (lease_until is null and lease_token is null and worker_id is null)),
    constraint leased_has_lease check (status <> 'Leased'
        or (lease_until is not null and lease_token is not null and worker_id is not null)),
    constraint finished_when_terminal check ((status in ('Completed', 'Failed')) = (finished_at is not null)),
    constraint completed_is_2xx check (status <> 'Completed'
        or (response_status is not null and response_status between 200 and 299
            and error_code is null and lease_token is not null)),
    constraint failed_has_error check (status <> 'Failed' or error_code is not null),
    constraint active_has_no_result check (status in ('Completed', 'Failed')
        or (response_status is null and error_code is null and result_applied_at is null
            and duration_ms is null and retry_after_seconds is null and response_excerpt is null)),
    constraint lease_resets_range check (lease_resets >= 0),
    constraint duration_range check (duration_ms >= 0),
    constraint retry_after_range check (retry_after_seconds between 0 and 31536000),
    constraint response_excerpt_bound check (octet_length(response_excerpt) <= 4096)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

-- One active job a saga, as a fact. The attempts of a saga, in order, come from uniq_job_saga_attempt, so a
-- second full index on saga_id would only cost: every change of a job's status writes every index anew.
create unique index idx_job_saga on webhookd.webhook_delivery_jobs (saga_id)
    where status in ('Pending', 'Leased');
create unique index uniq_job_saga_attempt on webhookd.webhook_delivery_jobs (saga_id, attempt_at);
-- Claim and reaper: a Pending job has no lease_until, so (Pending, null, id) is the queue in id order.
create index idx_job_status_lease on webhookd.webhook_delivery_jobs (status, lease_until, id)
    where status in ('Pending', 'Leased');
-- The window: active jobs of one subscription. "Not finished" is "active" by a CHECK, and said so here alone: with the
-- others' predicate the planner, whose statistics are from a quiet time, takes any of them (840,000 blocks for 6,000).
create index idx_job_subscription_active on webhookd.webhook_delivery_jobs (subscription_id, id)
    where finished_at is null;
-- Results the orchestrator has not applied yet.
create index idx_job_unapplied on webhookd.webhook_delivery_jobs (id)
    where status in ('Completed', 'Failed') and result_applied_at is null;


-- What failed for good, with the payload as it was. No row ever changes.
create table webhookd.dead_letters (
    id               bigint generated always as identity primary key,
    saga_id          bigint not null references webhookd.webhook_delivery_sagas,
    event_id         bigint not null references webhookd.events,
    subscription_id  bigint not null references webhookd.subscriptions,
    final_error_code varchar(100) not null,
    failed_at        timestamptz not null default now(),
    payload_snapshot json not null,
    constraint dead_letter_pair unique (id, event_id, subscription_id)
);
create unique index idx_dead_saga on webhookd.dead_letters (saga_id);
create index idx_dead_event on webhookd.dead_letters (event_id);
create index idx_dead_subscription on webhookd.dead_letters (subscription_id, id);
create index idx_dead_error on webhookd.dead_letters (final_error_code, id);
create index idx_dead_failed on webhookd.dead_letters (failed_at, id);

-- A requeued saga has the pair of its dead letter.
alter table webhookd.webhook_delivery_sagas
    add constraint saga_of_dead_letter foreign key (dead_letter_id, event_id, subscription_id)
    references webhookd.dead_letters (id, event_id, subscription_id);


-- Whose turn it is to make jobs: one row, locked for the length of a tick. A row and not an advisory lock, which any
-- login of the database could take and keep.
create table webhookd.orchestration_turn (
    only_row boolean primary key default true check (only_row)
);
insert into webhookd.orchestration_turn default values;

-- What the orchestrator did to a saga, as its functions hand it to their caller.
create type webhookd.saga_transition as (
    saga_id         bigint,
    subscription_id bigint,
    event_id        bigint,
    job_id          bigint,                 -- null where no job's result moved it
    status          webhookd.saga_status,   -- null: left as it was, see problem
    attempt_count   integer,
    next_attempt_at timestamptz,
    error_code      text,
    dead_letter_id  bigint,
    correlation_id  text,                   -- of the event, where it ends in a dead letter
    problem         text
);
