-- Owns: the tables, types, constraints, indexes and views. Runs as webhookd_owner.
-- triggers.sql says which changes of a row are allowed; grants.sql says which role may read or write a table.
--
-- All times come from the database's clock. The SPEC fixes the names and types of its columns and the names of its indexes.
-- An index of unfinished rows is partial, so its size follows the backlog and not the history.
-- A varchar or text column that is compared but never sorted for people has COLLATE "C": it is faster, and a new libc version
-- cannot corrupt its index.


-- =====================================================================================================================
-- Deliveries
-- =====================================================================================================================

create type webhookd.saga_status as enum ('Pending', 'InProgress', 'PendingRetry', 'Completed', 'DeadLettered');
create type webhookd.job_status as enum ('Pending', 'Leased', 'Completed', 'Failed');
create type webhookd.report_verdict as enum ('accepted', 'duplicate', 'stale', 'unknown');


-- Events -------------------------------------------------------------------------------------------------------------

-- Append only; only retention and erasure remove rows. The payload is `json` and not `jsonb`, so the delivered bytes are the accepted
-- bytes.
create table webhookd.events (
    id              bigint generated always as identity primary key,
    event_type      varchar(100) collate "C" not null,
    created_at      timestamptz not null default now(),
    payload         json not null,
    idempotency_key varchar(255) collate "C",
    correlation_id  varchar(255) collate "C",
    tenant          varchar(100) collate "C" not null default '',  -- empty: of no tenant
    labels          jsonb,                  -- a flat object of strings; null: none
    payload_removed_at timestamptz,         -- when retention replaced the payload by JSON null
    -- Also bounds inserts that do not come through the API: a worker holds many payloads in memory at a time.
    constraint payload_bound check (octet_length(payload::text) <= 8388608),
    constraint event_type_form check (event_type ~ '^[a-zA-Z0-9_]+(\.[a-zA-Z0-9_]+)*$'),
    constraint idempotency_key_form check (idempotency_key ~ '^[^[:cntrl:]]+$'),
    -- It is sent in a header.
    constraint correlation_id_form check (correlation_id ~ '^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$')
    -- The forms of tenant and labels are checked by the trigger that fills the queue, because PostgreSQL parses the text of each
    -- CHECK again for each statement.
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
-- Lists of events. They end with the id where rows of one batch, which have the same time, would need a sort.
-- Without deduplication: all events of a batch have the same time, and the passes over its entries took 4 % of publishing.
create index idx_event_created on webhookd.events (created_at, id) with (deduplicate_items = off);
create index idx_event_type on webhookd.events (event_type, created_at, id);
create unique index uniq_event_idempotency_key on webhookd.events (idempotency_key, tenant)
    where idempotency_key is not null;

create index idx_event_tenant on webhookd.events (tenant, created_at, id) where tenant <> '';
create index idx_event_tenant_type on webhookd.events (tenant, event_type, created_at, id) where tenant <> '';
create index idx_event_correlation on webhookd.events (correlation_id, created_at, id) where correlation_id is not null;

-- The labels of events, for searches. A trigger on events fills it; an event without labels costs nothing. A table and not a GIN
-- index, which cannot give the newest events first. No foreign key: the key would need an index by event.
create table webhookd.event_labels (
    event_id   bigint not null,
    tenant     varchar(100) collate "C" not null,
    name       varchar(100) collate "C" not null,
    value      varchar(100) collate "C" not null,
    created_at timestamptz not null,
    primary key (name, value, created_at, event_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
create index idx_event_label_tenant on webhookd.event_labels (tenant, name, value, created_at, event_id) where tenant <> '';

-- The events that are not routed yet, with what routing needs to know of each, so that it does not read events. A trigger on
-- events fills it, route_events empties it.
-- It has no foreign key: only that trigger writes here, in the transaction that writes the event.
create table webhookd.event_routing_queue (
    event_id   bigint primary key,
    event_type varchar(100) collate "C" not null,
    tenant     varchar(100) collate "C" not null default '',
    labels     jsonb
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000);


-- Tenants ------------------------------------------------------------------------------------------------------------

-- The customers of the users of webhookd. An event of a tenant is routed only to subscriptions of the same tenant. "No tenant" is
-- the empty text and has no row here, so that matching is plain equality.
create table webhookd.tenants (
    tenant            varchar(100) collate "C" primary key,
    id                bigint generated always as identity unique,   -- the order of lists
    name              varchar(200),
    active            boolean not null default true,    -- false: all its subscriptions are held
    max_subscriptions integer,                          -- null: no limit
    created_at        timestamptz not null default now(),
    updated_at        timestamptz not null default now(),
    constraint tenant_form check (tenant ~ '^[A-Za-z0-9._:-]+$'),
    constraint max_subscriptions_range check (max_subscriptions >= 0)
);


-- Subscriptions ------------------------------------------------------------------------------------------------------

-- `routable`: events are routed to it. `deliverable`: its deliveries are sent; otherwise it is held, and they wait.
create table webhookd.subscriptions (
    id                 bigint generated always as identity primary key,
    event_type         varchar(100) collate "C" not null,   -- the first of event_types
    callback_url       varchar(500) not null,
    active             boolean not null default true,       -- false: events are not routed, and deliveries wait
    verified           boolean not null default false,
    tenant             varchar(100) collate "C" not null default '',
    event_types        varchar(100)[] collate "C" not null,  -- patterns: order.created, order.* or *
    filter             jsonb,               -- the labels that an event must have; null: any event
    paused             boolean not null default false,      -- true: events are routed, and deliveries wait
    tenant_active      boolean not null default true,       -- a copy, so that a claim does not read tenants
    deleted_at         timestamptz,         -- not null: nothing is routed or sent, and it is not listed
    routable           boolean not null generated always as (active and verified and deleted_at is null) stored,
    deliverable        boolean not null generated always as
        (active and verified and not paused and tenant_active and deleted_at is null) stored,
    pending_callback_url varchar(500),      -- becomes callback_url when it is verified
    verified_by        text,                -- how the endpoint was verified: challenge or ping
    format             text not null default 'raw',     -- of the body: raw or standard
    max_per_second     double precision,    -- the most attempts a second over all instances; null: no limit
    max_attempts       integer,             -- null: the configured default
    base_delay_seconds double precision,    -- null: the configured default
    description        varchar(500),
    created_at         timestamptz not null default now(),
    updated_at         timestamptz not null default now(),
    constraint first_event_type check (event_type = event_types[1] and cardinality(event_types) <= 100),
    constraint event_types_form check (
        array_to_string(event_types, ' ') ~ '^([a-zA-Z0-9_]+\.)*([a-zA-Z0-9_]+|\*)( ([a-zA-Z0-9_]+\.)*([a-zA-Z0-9_]+|\*))*$'
        and cardinality(string_to_array(array_to_string(event_types, ' '), ' ')) = cardinality(event_types)),
    constraint filter_is_an_object check (jsonb_typeof(filter) = 'object'),
    constraint pending_callback_url_is_https check (
        pending_callback_url ~ '^https://(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z]([0-9A-Za-z.-]*[0-9A-Za-z])?)(:[0-9]{1,5})?([/?][!"$-~]*)?$'),
    constraint verified_by_range check (verified_by in ('challenge', 'ping')),
    constraint format_range check (format in ('raw', 'standard')),
    constraint max_per_second_range check (max_per_second > 0 and max_per_second <= 1000000),
    constraint tenant_form check (tenant = '' or tenant ~ '^[A-Za-z0-9._:-]+$'),
    constraint callback_url_is_https check (
        callback_url ~ '^https://(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z]([0-9A-Za-z.-]*[0-9A-Za-z])?)(:[0-9]{1,5})?([/?][!"$-~]*)?$'),
    constraint max_attempts_range check (max_attempts between 1 and 1000),
    constraint base_delay_range check (base_delay_seconds between 0 and 31536000)
);
create index idx_sub_event_type on webhookd.subscriptions (event_type, id);
create index idx_sub_active on webhookd.subscriptions (active, id);
create index idx_sub_tenant on webhookd.subscriptions (tenant, id) where tenant <> '';
create index idx_sub_rate on webhookd.subscriptions (id) where max_per_second is not null;

-- What routing reads: the patterns of each subscription. A trigger on subscriptions fills it.
create table webhookd.subscription_types (
    tenant          varchar(100) collate "C" not null,
    pattern         varchar(100) collate "C" not null,
    subscription_id bigint not null references webhookd.subscriptions,
    routable        boolean not null,
    filter          jsonb,
    primary key (tenant, pattern, subscription_id)
);
create index idx_subscription_type on webhookd.subscription_types (subscription_id);

-- The token bucket of each subscription with max_per_second. Only the orchestrator changes it, in turn.
create table webhookd.subscription_rates (
    subscription_id bigint primary key references webhookd.subscriptions,
    tokens          double precision not null,
    refilled_at     timestamptz not null
) with (fillfactor = 50);

-- Signing secrets and custom headers: a table of its own, because fewer roles may read it. The current secret and up to three
-- previous secrets sign, each previous secret until its own time.
create table webhookd.subscription_secrets (
    subscription_id      bigint primary key references webhookd.subscriptions,
    secret               text not null,
    previous_secrets     text[] not null default '{}',
    previous_valid_until timestamptz[] not null default '{}',
    headers              jsonb not null default '{}',
    challenge            text,              -- of the running verification
    updated_at           timestamptz not null default now(),
    constraint secret_form check (
        case when secret ~ '^whsec_([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
             then octet_length(decode(substr(secret, 7), 'base64')) between 24 and 64 else false end),
    constraint previous_secrets_paired check (cardinality(previous_secrets) = cardinality(previous_valid_until)
                                              and cardinality(previous_secrets) <= 3),
    constraint headers_are_an_object check (jsonb_typeof(headers) = 'object')
);

-- The history of each subscription, to explain why an event was not routed. A trigger fills it.
create table webhookd.subscription_changes (
    id              bigint generated always as identity primary key,
    subscription_id bigint not null references webhookd.subscriptions,
    changed_at      timestamptz not null default clock_timestamp(),
    event_types     varchar(100)[] collate "C" not null,
    filter          jsonb,
    callback_url    varchar(500) not null,
    active          boolean not null,
    verified        boolean not null
);
create index idx_subscription_change on webhookd.subscription_changes (subscription_id, changed_at);

-- Consecutive failures of each endpoint: shared by all instances, kept across restarts. A row is written at a failure and at
-- the success that ends a series of failures, so a healthy endpoint costs nothing.
create table webhookd.endpoint_health (
    subscription_id      bigint primary key references webhookd.subscriptions,
    consecutive_failures integer not null default 0,
    failing_since        timestamptz,       -- not null: at most one request at a time is sent to the endpoint
    last_error_code      varchar(100),
    last_failure_at      timestamptz,
    last_recovery_at     timestamptz,       -- the last success that ended a series of failures
    constraint consecutive_failures_range check (consecutive_failures >= 0)
) with (fillfactor = 50);
create index idx_endpoint_failing on webhookd.endpoint_health (failing_since)
    where failing_since is not null;


-- Sagas --------------------------------------------------------------------------------------------------------------

-- A saga is the delivery of an event to a subscription.
--
-- No foreign keys to events and subscriptions: sagas are only inserted in bulk, and the keys cost a lock and a lookup for each
-- row (with the key of jobs 20 µs and 110 bytes of WAL a delivery, of about 200 µs of the server's CPU time and 5.2 kB of WAL
-- for the whole cycle without HTTP). The trigger saga_created checks each statement's rows instead, and the triggers
-- event_without_sagas and subscription_without_sagas refuse to delete what a saga refers to.
--
-- The rules of a row and of its changes are in check_saga (guards.sql) and not in CHECK constraints: PostgreSQL parses the text of
-- each CHECK again for each statement, which at one row a statement costs more than the rest of the check.
--
-- fillfactor 50: a batch updates all rows of a page in a transaction, and the next batch prunes the dead versions. With half of
-- the page free, the new versions stay in the page and write less WAL. The price is disk space.
create table webhookd.webhook_delivery_sagas (
    id               bigint generated always as identity primary key,
    event_id         bigint not null,
    subscription_id  bigint not null,
    status           webhookd.saga_status not null default 'Pending',
    attempt_count    integer not null default 0,
    next_attempt_at  timestamptz not null default now(),
    final_error_code varchar(100),
    created_at       timestamptz not null default now(),
    updated_at       timestamptz not null default now(),
    dead_letter_id   bigint,                -- of a requeued saga: the dead letter from which it was created
    job_id           bigint,                -- the attempt in progress, or the last one
    resent_from      bigint                 -- of a resent saga, and so of a requeued one: the finished saga that it repeats
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

-- Routing an event twice creates no second saga. A resend creates a new saga, one at a time; a requeue is the resend of a dead
-- letter, and creates one at most once for each dead letter.
create unique index uniq_saga_event_subscription on webhookd.webhook_delivery_sagas (event_id, subscription_id)
    where resent_from is null;
create unique index uniq_saga_dead_letter on webhookd.webhook_delivery_sagas (dead_letter_id)
    where dead_letter_id is not null;
create unique index uniq_saga_resend on webhookd.webhook_delivery_sagas (resent_from)
    where resent_from is not null and status in ('Pending', 'InProgress', 'PendingRetry');
-- The deliveries of an event: uniq_saga_event_subscription has the routed sagas in the same order, so this index has only the
-- resent sagas. A full index cost three more entries and 230 bytes of WAL for each delivery.
create index idx_saga_event on webhookd.webhook_delivery_sagas (event_id, subscription_id)
    where resent_from is not null;
-- Each change of a saga's status writes an entry into every index whose predicate holds, of about 12,000 instructions and 75 bytes
-- of WAL. So each status has one index by subscription, and a delivery that succeeds at once writes to one of them at a time.
-- The sagas that wait for their first attempt: fairness, and lists.
create index idx_saga_pending on webhookd.webhook_delivery_sagas (subscription_id, id)
    where status = 'Pending';
-- The window: the sagas in progress of a subscription. In the order of their jobs, because job ids only grow, so that a mark can
-- skip dead entries and miss no live one.
create index idx_saga_in_progress on webhookd.webhook_delivery_sagas (subscription_id, job_id)
    where status = 'InProgress';
-- Fairness: the retries of a subscription, earliest first.
create index idx_saga_subscription_due on webhookd.webhook_delivery_sagas (subscription_id, next_attempt_at, id)
    where status = 'PendingRetry';
create index idx_saga_status_retry on webhookd.webhook_delivery_sagas (status, next_attempt_at)
    where status = 'PendingRetry';
-- Lists by subscription: the first question when a customer calls. The other statuses have their indexes above.
create index idx_saga_subscription_status on webhookd.webhook_delivery_sagas (subscription_id, status, id)
    where status in ('PendingRetry', 'Completed', 'DeadLettered');
-- Lists by status, and the sweep after a reload. Without Completed sagas, which are nearly all and are listed by the primary key,
-- and without the two statuses above, which are listed subscription by subscription.
create index idx_saga_status on webhookd.webhook_delivery_sagas (status, id)
    where status in ('PendingRetry', 'DeadLettered');
-- Lists by error: only the sagas that have failed.
create index idx_saga_error on webhookd.webhook_delivery_sagas (final_error_code, status, id)
    where final_error_code is not null;


-- Jobs ---------------------------------------------------------------------------------------------------------------

-- A delivery job is one attempt of a saga. `subscription_id` and `event_id` are the saga's, and `attempt` is the number of this
-- attempt (a trigger checks them at insert), so that a claim does not read sagas. No foreign key to sagas, see there; the trigger
-- attempt_created replaces it. The rules of a row and of its changes are in check_job, see sagas.
-- fillfactor 50, as for sagas: with 70 and a version less of each job (see complete_deliveries) a delivery wrote 85 bytes of WAL and
-- 6,000 instructions more. 35 saves 35 bytes and 9,000 instructions more, but takes, by computation, another 160 bytes of disk for each delivery.
create table webhookd.webhook_delivery_jobs (
    id                  bigint generated always as identity primary key,
    saga_id             bigint not null,
    subscription_id     bigint not null,
    event_id            bigint not null,
    attempt             integer not null,
    status              webhookd.job_status not null default 'Pending',
    lease_until         timestamptz,
    attempt_at          timestamptz not null,   -- the time for which the attempt was scheduled: the saga's next_attempt_at
    response_status     integer,
    error_code          varchar(100),
    worker_id           varchar(200),
    lease_token         uuid,                   -- a reported job keeps it, to recognise the same report
    lease_resets        integer not null default 0,
    result_applied_at   timestamptz,
    created_at          timestamptz not null default now(),
    finished_at         timestamptz,
    duration_ms         integer,
    retry_after_seconds double precision,
    response_excerpt    bytea,                  -- bytes, so that every response can be stored
    constraint duration_range check (duration_ms >= 0),
    constraint retry_after_range check (retry_after_seconds between 0 and 31536000),
    constraint response_excerpt_bound check (octet_length(response_excerpt) <= 4096)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

-- A saga has at most one active job. uniq_job_saga_attempt gives a saga's attempts in order, so a second full index on saga_id
-- would only cost: every change of a job's status writes a new entry into every index.
create unique index idx_job_saga on webhookd.webhook_delivery_jobs (saga_id)
    where status in ('Pending', 'Leased');
create unique index uniq_job_saga_attempt on webhookd.webhook_delivery_jobs (saga_id, attempt_at);
-- Claim and reaper: a Pending job has no lease_until, so (Pending, null, id) is the queue in id order.
create index idx_job_status_lease on webhookd.webhook_delivery_jobs (status, lease_until, id)
    where status in ('Pending', 'Leased');
-- The results that the orchestrator has not applied yet.
create index idx_job_unapplied on webhookd.webhook_delivery_jobs (id)
    where status in ('Completed', 'Failed') and result_applied_at is null;


-- Dead letters -------------------------------------------------------------------------------------------------------

-- The deliveries that failed finally, with the payload. Append only; only retention and erasure remove rows.
create table webhookd.dead_letters (
    id               bigint generated always as identity primary key,
    saga_id          bigint not null references webhookd.webhook_delivery_sagas,
    event_id         bigint not null references webhookd.events,
    subscription_id  bigint not null references webhookd.subscriptions,
    final_error_code varchar(100) not null,
    failed_at        timestamptz not null default now(),
    payload_snapshot json not null,
    tenant           varchar(100) collate "C" not null default '',
    constraint dead_letter_pair unique (id, event_id, subscription_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
create unique index idx_dead_saga on webhookd.dead_letters (saga_id);
create index idx_dead_event on webhookd.dead_letters (event_id);
-- Lists, in the order of time, which is also a filter: the order of ids is nearly the same, and a time window that is nearly
-- right would miss rows. Dead letters are written once, so a further index costs little.
create index idx_dead_failed on webhookd.dead_letters (failed_at, id);
create index idx_dead_subscription on webhookd.dead_letters (subscription_id, failed_at, id);
create index idx_dead_error on webhookd.dead_letters (final_error_code, failed_at, id);
create index idx_dead_subscription_error on webhookd.dead_letters (subscription_id, final_error_code, failed_at, id);
create index idx_dead_tenant on webhookd.dead_letters (tenant, failed_at, id) where tenant <> '';
create index idx_dead_tenant_error on webhookd.dead_letters (tenant, final_error_code, failed_at, id) where tenant <> '';

-- A requeued saga has the event and the subscription of its dead letter.
alter table webhookd.webhook_delivery_sagas
    add constraint saga_of_dead_letter foreign key (dead_letter_id, event_id, subscription_id)
    references webhookd.dead_letters (id, event_id, subscription_id);


-- Orchestration ------------------------------------------------------------------------------------------------------

-- A single row, which start_due_sagas locks while it creates jobs, so that only one orchestrator does. A row and not an
-- advisory lock, because every login of the database could take and keep an advisory lock.
create table webhookd.orchestration_turn (
    only_row boolean primary key default true check (only_row)
);
insert into webhookd.orchestration_turn default values;

-- A change of a saga, as the orchestrator's functions return it.
create type webhookd.saga_transition as (
    saga_id         bigint,
    subscription_id bigint,
    event_id        bigint,
    job_id          bigint,                 -- null: the change has no job's result as its cause
    status          webhookd.saga_status,   -- null: the saga was not changed, see problem
    attempt_count   integer,
    next_attempt_at timestamptz,
    error_code      text,
    dead_letter_id  bigint,
    correlation_id  text,                   -- of the event, for a new dead letter
    problem         text
);


-- Statistics ----------------------------------------------------------------------------------------------------------

-- How many attempts and deliveries ended in each minute, by subscription, and with the subscription 0 of all together. Written in the
-- transaction that applies the results, so the numbers always match a count of the jobs and dead letters. `minute` is that
-- transaction's time, which is also result_applied_at and failed_at: a result that comes late counts when it is applied, and no
-- transaction writes to an old minute.
--
-- `writer` is the server process of the session: two sessions never write the same row, so no transaction waits for the commit of
-- another, and none can deadlock. Six sessions that completed batches of 10 deliveries of one subscription, with commits of 2 ms, made
-- 4,600 to 4,900 a second, with one row for all sessions 2,300 to 2,600, and with eight rows (the process id modulo 8) 2,600 to 5,200.
-- A minute has at most as many rows of a subscription as sessions applied results of it. Retention adds up the rows in
-- delivery_stats_hours when they are five hours old (sweep_stats).
--
-- `durations` is a histogram: the attempts that took up to 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10,000 and 30,000 ms, and
-- longer. Each attempt that has a duration counts in one of them. An array and not twelve columns, whose expressions cost 80,000
-- instructions more for a single delivery, and 5,000 less for each delivery of a batch of 100.
--
-- fillfactor 50 and no index on a counter: an update stays in its page and writes no index entry.
create table webhookd.delivery_stats (
    subscription_id  bigint not null,           -- 0: all subscriptions. No foreign key, which would lock a row for each update
    minute           timestamptz not null,
    writer           integer not null,
    delivered        integer not null default 0,    -- successful attempts, which are the completed deliveries
    failed           integer not null default 0,    -- failed attempts
    dead_lettered    integer not null default 0,    -- deliveries
    durations        integer[] not null default '{0,0,0,0,0,0,0,0,0,0,0,0}',
    primary key (subscription_id, minute, writer)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
-- The oldest rows, for sweep_stats. By an expression: an index of minutes would also serve reads of a subscription, which then read the
-- minutes of all others.
create index idx_delivery_stats_hour on webhookd.delivery_stats (date_bin('1 hour', minute, '2000-01-01 00:00:00+00'));

-- The same numbers by hour, when no transaction changes them any more.
create table webhookd.delivery_stats_hours (
    subscription_id  bigint not null,
    hour             timestamptz not null,
    delivered        integer not null default 0,
    failed           integer not null default 0,
    dead_lettered    integer not null default 0,
    durations        integer[] not null default '{0,0,0,0,0,0,0,0,0,0,0,0}',
    primary key (subscription_id, hour)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
-- The oldest rows, for sweep_stats.
create index idx_delivery_stats_day on webhookd.delivery_stats_hours (date_bin('1 day', hour, '2000-01-01 00:00:00+00'));


-- Retention and erasure ----------------------------------------------------------------------------------------------

-- A single row: the instance that sweeps now. A row and not an advisory lock, see orchestration_turn.
create table webhookd.retention_turn (
    only_row   boolean primary key default true check (only_row),
    holder     text,
    held_until timestamptz not null default '-infinity'
) with (fillfactor = 50);
insert into webhookd.retention_turn default values;

-- How far the sweeps are: two over events, in the order of ids, and one over the ledger. In the database, because any instance can
-- continue.
create table webhookd.retention_progress (
    kind             text collate "C" primary key check (kind in ('events', 'payloads', 'ledger')),
    after_event_id   bigint not null default 0,     -- the sweep continues with the next event; of the ledger, with the next row
    kept_is_next     boolean not null default false,    -- the next batch is of retention_kept
    recheck_after_id bigint,                -- not null: look at all of retention_kept again, from this event on
    period_days      double precision,      -- of the last batch: other periods make it look again
    dead_letters_days double precision,
    swept_before     timestamptz,           -- every event from before this time was examined; null: no pass has ended yet
    pass_finished_at timestamptz,
    -- Of the ledger: its rows of all jobs up to this one, in the order of finished_at, were removed.
    after_finished_at timestamptz not null default '-infinity',
    after_job_id     uuid not null default '00000000-0000-0000-0000-000000000000'
) with (fillfactor = 50);
insert into webhookd.retention_progress (kind) values ('events'), ('payloads'), ('ledger');

-- The events that a sweep examined and left, because a delivery is not finished or a dead letter is kept: when to look again. So no
-- sweep reads an event twice without need.
create table webhookd.retention_kept (
    kind          text collate "C" not null,
    event_id      bigint not null,
    look_again_at timestamptz not null,
    primary key (kind, event_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);
create index idx_retention_kept_due on webhookd.retention_kept (kind, look_again_at, event_id);

-- The removal of everything of a tenant, or of a subscription: work to do, and then the evidence that it was done. The row stays. A
-- finished one has no tenant any more but only the SHA-256 of it, which proves the erasure of a given tenant and reveals none.
create table webhookd.erasures (
    id              bigint generated always as identity primary key,
    tenant          varchar(100) collate "C",   -- of the subscription too; null: no tenant, or erased
    tenant_sha256   text,
    subscription_id bigint,                 -- null: the whole tenant
    requested_by    text not null,
    requested_at    timestamptz not null default now(),
    finished_at     timestamptz,
    events          bigint not null default 0,      -- removed so far, and the other counts likewise
    deliveries      bigint not null default 0,
    attempts        bigint not null default 0,
    dead_letters    bigint not null default 0,
    subscriptions   bigint not null default 0,
    jobs            bigint not null default 0,      -- of the job queue, created from its events
    -- A walk over its rows: where it continues, whether it had to leave out a row, and whether it began after all transactions
    -- from before the request had ended.
    after_created_at timestamptz not null default '-infinity',
    after_id        bigint not null default 0,
    left_out        boolean not null default false,
    is_settled      boolean not null default false,
    last_event_id   bigint not null default 0,      -- the walk ends there: the tenant may go on publishing
    requested_xid   xid8 not null default pg_current_xact_id(),
    tried_at        timestamptz not null default '-infinity',
    constraint subject check (num_nonnulls(tenant, tenant_sha256, subscription_id) > 0),
    constraint finished_names_no_tenant check (finished_at is null or subscription_id is not null or tenant is null)
);
create unique index uniq_erasure_tenant on webhookd.erasures (tenant)
    where finished_at is null and subscription_id is null;
create unique index uniq_erasure_subscription on webhookd.erasures (subscription_id)
    where finished_at is null and subscription_id is not null;
create index idx_erasure_running on webhookd.erasures (tried_at, id) where finished_at is null;
create index idx_erasure_tenant on webhookd.erasures (tenant, id) where tenant is not null;


-- Console ------------------------------------------------------------------------------------------------------------

-- A single row: the key that signs the console's cookies, so that every instance accepts those of the others. Random bytes from the
-- server's strong random source (366 bits), without an extension. An UPDATE by hand ends all sessions.
create table webhookd.console_key (
    only_row boolean primary key default true check (only_row),
    key      bytea not null default
        sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())),
    constraint key_length check (octet_length(key) = 32)
);
insert into webhookd.console_key default values;

-- Links to the console and to a tenant's portal, each good for one session. Only the SHA-256 of the code in a link is stored, so a
-- backup contains no usable link.
create table webhookd.console_links (
    code_sha256        bytea primary key,
    kind               text collate "C" not null,
    token_fingerprint  text collate "C" not null,   -- of the token that requested it; empty: there are no tokens
    actor              text not null,               -- the name of that token
    tenant             varchar(100) collate "C" not null default '',    -- of the portal, or that the token is bound to
    capabilities       text[] not null default '{}',
    created_at         timestamptz not null default now(),
    expires_at         timestamptz not null,
    session_expires_at timestamptz not null,
    constraint code_length check (octet_length(code_sha256) = 32),
    constraint link_kind check (kind in ('login', 'portal')),
    constraint fingerprint_form check (token_fingerprint ~ '^([0-9a-f]{32})?$'),
    constraint actor_length check (length(actor) between 1 and 200),
    constraint tenant_form check (tenant = '' or tenant ~ '^[A-Za-z0-9._:-]+$'),
    constraint capabilities_of_kind check (case kind
        when 'portal' then tenant <> '' and 'view' = any(capabilities)
            and capabilities <@ '{view,manage,resend,secrets}' and cardinality(capabilities) <= 4
        else capabilities = '{}' end)
);
create index idx_console_link_expiry on webhookd.console_links (expires_at);
create index idx_console_link_tenant on webhookd.console_links (tenant, kind, token_fingerprint, expires_at);


-- =====================================================================================================================
-- Job queue (DP2)
-- =====================================================================================================================
-- A queue for executors outside of webhookd. No delivery depends on it, and it is off until an operator enables it.
--
-- The names, columns, CHECKs and indexes of DP2 §3.2 and §5 are as DP2 defines them, except for the schema and
-- `causation_event_id`, which refers to our events. Our columns follow DP2's in each table; our indexes follow DP2's.

-- Settings ------------------------------------------------------------------------------------------------------------

-- Settings that an operator changes in the database and not in a file, because executors that use SQL depend on them too.
create table webhookd.settings (
    key   text primary key,
    value jsonb not null,
    constraint job_queue_setting check (case
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
-- DP3, which would define these numbers, is not part of the seeds. They are those of the delivery saga and of its lease resets
-- (SPEC D4, D9, D14). Retention is a week, in which a question about a job can still be answered.
insert into webhookd.settings (key, value) values
    ('queue.job_substrate.enabled', 'false'),
    ('queue.job_substrate.max_attempts', '5'),
    ('queue.job_substrate.base_delay_seconds', '30'),
    ('queue.job_substrate.max_delay_seconds', '3600'),
    ('queue.job_substrate.jitter', '0'),
    ('queue.job_substrate.max_lease_recoveries', '5'),
    ('queue.job_substrate.retention_seconds', '604800');

-- The same settings for a kind of job. Null: the default from `settings`.
create table webhookd.job_kind_policy (
    job_kind             text collate "C" primary key,
    max_attempts         integer check (max_attempts between 1 and 1000),
    base_delay_seconds   double precision check (base_delay_seconds between 0 and 315360000),
    max_delay_seconds    double precision check (max_delay_seconds between 0 and 315360000),
    jitter               double precision check (jitter between 0 and 1),
    max_lease_recoveries integer check (max_lease_recoveries between 0 and 1000),
    retention_seconds    double precision check (retention_seconds between 0 and 315360000)
);


-- Workflows -----------------------------------------------------------------------------------------------------------

-- A graph of jobs. Its status follows from its jobs: a trigger computes it at every update, so an update only means "compute
-- the status again". `revision` makes that a real write, so that two concurrent updates cannot both miss a job.
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
-- Retention: the oldest finished workflows.
create index ix_job_workflow_finished on webhookd.job_workflow (finished_at, workflow_id) where finished_at is not null;


-- Jobs ----------------------------------------------------------------------------------------------------------------

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
    lease_token            uuid null,           -- a reported job keeps it, to recognise the same report
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

    -- Our columns.
    result_ref             text null,
    last_error_code        text null,
    lease_ttl_seconds      double precision null,   -- a renewal extends the lease by this
    lease_recoveries       integer not null default 0 check (lease_recoveries >= 0),  -- of this attempt
    status_signal          text null,               -- the holder's last progress message
    scheduled              boolean not null default false,  -- enqueued for a later time, and not found due yet
    cancel_reason          text null,
    cleaned_from           text null,

    constraint safe_payload_is_an_object check (jsonb_typeof(safe_payload) = 'object'),
    constraint safe_payload_bound check (octet_length(safe_payload::text) <= 16384),
    -- It is sent in the header of a lifecycle event's delivery.
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
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

-- The edges of the nine states: a trigger refuses every other change of a job. schema/README.md draws them. Beside its status,
-- an edge changes only the columns in `may_change`, and these three as their column here says.
create table webhookd.job_transition (
    from_status      text collate "C" not null,
    to_status        text collate "C" not null,
    attempts         text not null check (attempts in ('keep','add one')),
    lease_recoveries text not null check (lease_recoveries in ('keep','add one','reset')),
    lease_token      text not null check (lease_token in ('keep','new','clear','keep or clear')),
    not_before       text null check (not_before in ('leased_until','process_after')),  -- the old time, which must have passed
    may_change       text[] not null,
    primary key (from_status, to_status)
);
insert into webhookd.job_transition
    (from_status,     to_status,       attempts,  lease_recoveries, lease_token,     not_before,      may_change) values
    ('queued',        'leased',        'keep',    'keep',           'new',           null,
        '{lease_name,lease_holder,leased_until,lease_ttl_seconds,status_signal}'),
    ('queued',        'cancelled',     'keep',    'keep',           'keep',          null, '{cancel_reason,finished_at,scheduled}'),
    ('leased',        'in_progress',   'keep',    'keep',           'keep',          null,
        '{leased_until,started_at,status_signal}'),
    ('leased',        'succeeded',     'add one', 'keep',           'keep',          null,
        '{leased_until,started_at,finished_at,result_ref}'),
    ('in_progress',   'succeeded',     'add one', 'keep',           'keep',          null, '{leased_until,finished_at,result_ref}'),
    ('leased',        'failed',        'add one', 'keep',           'keep or clear', null,
        '{leased_until,last_error,last_error_at,last_error_code}'),
    ('in_progress',   'failed',        'add one', 'keep',           'keep or clear', null,
        '{leased_until,last_error,last_error_at,last_error_code}'),
    ('leased',        'queued',        'keep',    'add one',        'clear',         'leased_until',
        '{lease_name,lease_holder,leased_until,lease_ttl_seconds,status_signal,process_after}'),
    ('in_progress',   'queued',        'keep',    'add one',        'clear',         'leased_until',
        '{lease_name,lease_holder,leased_until,lease_ttl_seconds,status_signal,process_after}'),
    ('failed',        'retry_waiting', 'keep',    'reset',          'keep',          null, '{process_after}'),
    ('failed',        'dead_letter',   'keep',    'keep',           'keep',          null, '{finished_at}'),
    ('retry_waiting', 'queued',        'keep',    'keep',           'keep',          'process_after', '{}'),
    ('retry_waiting', 'cancelled',     'keep',    'keep',           'keep',          null, '{cancel_reason,finished_at}'),
    ('dead_letter',   'cancelled',     'keep',    'keep',           'keep',          null, '{cancel_reason,finished_at}'),
    ('succeeded',     'cleaned',       'keep',    'keep',           'keep',          null,
        '{cleaned_from,safe_payload,status_signal,last_error}'),
    ('cancelled',     'cleaned',       'keep',    'keep',           'keep',          null,
        '{cleaned_from,safe_payload,status_signal,last_error}'),
    -- The status stays: a time moves, or a lease is renewed.
    ('queued',        'queued',        'keep',    'keep',           'keep',          null, '{process_after,scheduled}'),
    ('retry_waiting', 'retry_waiting', 'keep',    'keep',           'keep',          null, '{process_after}'),
    ('leased',        'leased',        'keep',    'keep',           'keep',          null, '{leased_until,status_signal}'),
    ('in_progress',   'in_progress',   'keep',    'keep',           'keep',          null, '{leased_until,status_signal}');

-- DP2 §5; the constraint above makes ux_job_queue_kind_idempotency_key.
create index ix_job_queue_claimable on webhookd.job_queue (job_kind, process_after, priority desc, enqueued_at)
    where status = 'queued';
create index ix_job_queue_lease_active on webhookd.job_queue (lease_name, leased_until)
    where status in ('leased','in_progress');
create index ix_job_queue_dead_letter on webhookd.job_queue (job_kind, last_error_at desc)
    where status = 'dead_letter';
create index ix_job_queue_workflow_id on webhookd.job_queue (workflow_id);
create index ix_job_queue_correlation_id on webhookd.job_queue (correlation_id);

-- The claim's order, which ix_job_queue_claimable does not give: a claim would read and sort everything that waits. Without the
-- jobs that are scheduled for later: those of high priority would be in front of the jobs that can be claimed.
create index ix_job_queue_claim_order on webhookd.job_queue (job_kind, executor, priority desc, enqueued_at, job_id)
    where status = 'queued' and not scheduled;
-- Scheduled jobs that are due: a claim looks for those of its kind, the reaper for all. Only queued jobs are scheduled, by a
-- CHECK, and each index says so in its own words, which only its own query uses. With the predicate of the other indexes, the
-- planner may use any of them when its statistics are from a quiet time (a claim walked past 50,000 jobs in
-- ix_job_queue_claimable).
create index ix_job_queue_scheduled on webhookd.job_queue (job_kind, executor, process_after, job_id)
    where scheduled;
create index ix_job_queue_scheduled_due on webhookd.job_queue (process_after, job_id)
    where scheduled::integer = 1;
-- The reaper's other three queries. DP2's index of leases is by name; a lease of any name can expire.
create index ix_job_queue_lease_end on webhookd.job_queue (leased_until, job_id)
    where status in ('leased','in_progress');
create index ix_job_queue_retry_due on webhookd.job_queue (process_after, job_id)
    where status = 'retry_waiting';
create index ix_job_queue_deadline on webhookd.job_queue (deadline_at, job_id)
    where status in ('queued','retry_waiting') and deadline_at is not null;
-- The retention sweep, kind by kind.
create index ix_job_queue_retention on webhookd.job_queue (job_kind, finished_at, job_id)
    where status in ('succeeded','cancelled');
-- Whether a workflow has an unfinished job.
create index ix_job_queue_workflow_open on webhookd.job_queue (workflow_id)
    where status in ('queued','leased','in_progress','failed','retry_waiting');
-- Lists, each in its order.
create index ix_job_queue_listed on webhookd.job_queue (enqueued_at, job_id);
create index ix_job_queue_status_listed on webhookd.job_queue (status, enqueued_at, job_id);
create index ix_job_queue_kind_listed on webhookd.job_queue (job_kind, status, enqueued_at, job_id);
create index ix_job_queue_parent on webhookd.job_queue (parent_job_id) where parent_job_id is not null;
-- Retention: the oldest finished jobs, and whether an event has jobs.
create index ix_job_queue_finished on webhookd.job_queue (finished_at, job_id)
    where status in ('succeeded','cancelled','cleaned');
create index ix_job_queue_causation on webhookd.job_queue (causation_event_id) where causation_event_id is not null;


-- The ledger ----------------------------------------------------------------------------------------------------------

-- DP2's dot_iu_command_run. Append only. It has a row for each status change of a job that a gated function made, for each
-- renewal of a lease (from in_progress to in_progress), and for each decision of an operator, which is about no job: the switch,
-- the settings, the registry, an opened workflow.
create table webhookd.job_command_run (
    run_id      bigint generated always as identity primary key,
    job_id      uuid null references webhookd.job_queue (job_id),
    command     text not null,
    from_status text null,                  -- null: the job was created
    to_status   text null,
    actor       text not null,              -- as the caller names itself
    called_by   text not null default session_user,
    attempts    integer null,
    event_id    bigint null,                -- the lifecycle event; if there were two, the last
    detail      jsonb not null default '{}',
    run_at      timestamptz not null default now(),
    constraint move_or_decision check (num_nulls(job_id, to_status, attempts) in (0, 3))
);
-- The status changes of a job, and after them its renewals, whose number has no bound: a query for the changes, or for the last
-- report, does not walk past a day of renewals.
create index ix_job_command_run_job
    on webhookd.job_command_run (job_id, (from_status is distinct from to_status), run_id);
-- The operators' decisions. Without opened workflows, which a generator opens by the thousand. It begins with job_id, which is
-- null in all its rows, so that only this index gives the order of the query: by the primary key's order, the planner would walk
-- through all status changes in between.
create index ix_job_command_run_decision on webhookd.job_command_run (job_id, run_id)
    where job_id is null and command <> 'fn_job_workflow_open';


-- Events that create jobs ---------------------------------------------------------------------------------------------

-- Which event type creates a job of which kind. Lifecycle events are excluded: they would create jobs endlessly.
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

-- The events of a registered type that have created no job yet. Separate from event_routing_queue, because neither waits for
-- the other.
create table webhookd.job_event_queue (
    event_id bigint primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000);


-- Views ---------------------------------------------------------------------------------------------------------------

-- DP2 §8. The last has all columns of job_queue but lease_token, which no role can read (grants.sql), so that `select *` works.
create view webhookd.v_job_queue_backlog as
    select job_kind, count(*) as backlog from webhookd.job_queue
    where status = 'queued' group by job_kind;
create view webhookd.v_job_queue_in_progress as
    select job_kind, count(*) as in_progress from webhookd.job_queue
    where status in ('leased','in_progress') group by job_kind;
create view webhookd.v_job_queue_dead_letter_open as
    select job_id, job_kind, event_domain, idempotency_key, source_ref, target_ref, payload_ref, safe_payload,
           payload_classification, executor, status, attempts, last_error, last_error_at, lease_name, lease_holder, leased_until,
           process_after, deadline_at, priority, correlation_id, causation_event_id, parent_job_id, workflow_id, enqueued_by,
           enqueued_at, started_at, finished_at, source_system, result_ref, last_error_code, lease_ttl_seconds, lease_recoveries,
           status_signal, scheduled, cancel_reason, cleaned_from
    from webhookd.job_queue where status = 'dead_letter';
