-- owner: saga_orchestrator
-- Owns: every change of a saga. Reads the results that workers reported; creates jobs; returns the transitions and the hints
-- with which the caller takes turns among the subscriptions. Sends nothing, leases nothing, reads no payload.

-- Returns the next `max_subscriptions` subscriptions with waiting sagas, in the order of their ids, and the oldest due time of
-- each: null if no saga is due or if the subscription is held (paused or not verified). A loose scan of idx_saga_pending and
-- idx_saga_subscription_due, one step for each subscription. For the next page pass the last id; a page that is not full is the
-- last.
create or replace function webhookd.due_subscriptions(after_subscription_id bigint, max_subscriptions integer)
returns table (subscription_id bigint, oldest_due_at timestamptz)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
begin
    perform require(after_subscription_id is not null, 'after_subscription_id must not be null');
    perform require(max_subscriptions > 0, 'max_subscriptions must be at least 1');

    return query
    with recursive waiting (id, place) as (
        select after_subscription_id, 0
        union all
        select least((select s.subscription_id from webhook_delivery_sagas s
                      where s.status = 'Pending' and s.subscription_id > w.id order by s.subscription_id limit 1),
                     (select s.subscription_id from webhook_delivery_sagas s
                      where s.status = 'PendingRetry' and s.subscription_id > w.id order by s.subscription_id limit 1)),
               w.place + 1
        from waiting w where w.id is not null and w.place < max_subscriptions
    )
    select w.id, case when exists (select from subscriptions u where u.id = w.id and u.deliverable) then least(
        (select s.next_attempt_at from webhook_delivery_sagas s
         where s.subscription_id = w.id and s.status = 'Pending' and s.next_attempt_at <= now() order by s.id limit 1),
        (select s.next_attempt_at from webhook_delivery_sagas s
         where s.subscription_id = w.id and s.status = 'PendingRetry' and s.next_attempt_at <= now()
         order by s.next_attempt_at, s.id limit 1)) end
    from waiting w where w.place > 0 and w.id is not null
    order by w.id;
end
$$;
grant execute on function webhookd.due_subscriptions(bigint, integer) to webhookd_app;


-- Adds attempts whose results are applied now to the statistics: of each subscription, and of all together. `statuses` are those of the
-- sagas afterwards; null: all Completed. A duration may be null. Internal: the callers have the privileges. It returns a number because
-- an assignment costs less than PERFORM. Without a search_path of its own, which would cost a tenth of the call; the callers have one.
--
-- One attempt has a statement of its own, because only preparing the aggregates takes 219,000 instructions, a twentieth of the whole
-- cycle of a single delivery. In all, a delivery costs PostgreSQL 17,000 of 623,000 instructions more in batches of 100 (2.8 %, and 43
-- bytes of WAL), and 157,000 of 4.8 million alone (3.3 %, 540 bytes), if it is the first of its subscription in the minute.
create or replace function webhookd.count_attempts(
    subscription_ids bigint[], statuses webhookd.saga_status[], durations_ms integer[]) returns integer
language plpgsql as $$
declare
    -- width_bucket counts the bounds that are not above the value. With a type: otherwise each call parses the text.
    bounds constant integer[] := '{11,26,51,101,251,501,1001,2501,5001,10001,30001}'::integer[];
    this_minute constant timestamptz := date_bin('1 minute', now(), '2000-01-01 00:00:00+00');
    one_failed integer := 0;
    one_dead_lettered integer := 0;
    one_place integer;
    one_count integer := 1;
    one_duration integer[] := '{0,0,0,0,0,0,0,0,0,0,0,0}'::integer[];
begin
    if cardinality(subscription_ids) = 1 then
        if statuses[1] <> 'Completed' then
            one_failed := 1;
            one_dead_lettered := case statuses[1] when 'DeadLettered' then 1 else 0 end;
        end if;
        one_place := width_bucket(durations_ms[1], bounds) + 1;
        if one_place is null then
            one_place := 1;
            one_count := 0;
        end if;
        one_duration[one_place] := one_count;
        insert into webhookd.delivery_stats as t (
            subscription_id, minute, writer, delivered, failed, dead_lettered, durations)
        select k.id, this_minute, pg_backend_pid(), 1 - one_failed, one_failed, one_dead_lettered, one_duration
        from (values (0), (subscription_ids[1])) as k (id)
        on conflict (subscription_id, minute, writer) do update set
            delivered = t.delivered + excluded.delivered, failed = t.failed + excluded.failed,
            dead_lettered = t.dead_lettered + excluded.dead_lettered,
            durations[one_place] = t.durations[one_place] + one_count;
    elsif cardinality(subscription_ids) > 1 then
        insert into webhookd.delivery_stats as t (
            subscription_id, minute, writer, delivered, failed, dead_lettered, durations)
        select coalesce(c.id, 0), this_minute, pg_backend_pid(),
               count(*) filter (where c.status is null or c.status = 'Completed'),
               count(*) filter (where c.status <> 'Completed'), count(*) filter (where c.status = 'DeadLettered'),
               array[
                     count(*) filter (where c.place = 1), count(*) filter (where c.place = 2), count(*) filter (where c.place = 3),
                     count(*) filter (where c.place = 4), count(*) filter (where c.place = 5), count(*) filter (where c.place = 6),
                     count(*) filter (where c.place = 7), count(*) filter (where c.place = 8), count(*) filter (where c.place = 9),
                     count(*) filter (where c.place = 10), count(*) filter (where c.place = 11),
                     count(*) filter (where c.place = 12)]
        from (select g.id, g.status, width_bucket(g.duration_ms, bounds) + 1 as place
              from unnest(subscription_ids, statuses, durations_ms) as g (id, status, duration_ms)) c
        group by grouping sets ((c.id), ())
        on conflict (subscription_id, minute, writer) do update set
            delivered = t.delivered + excluded.delivered, failed = t.failed + excluded.failed,
            dead_lettered = t.dead_lettered + excluded.dead_lettered,
            durations = array[
                t.durations[1] + excluded.durations[1], t.durations[2] + excluded.durations[2],
                t.durations[3] + excluded.durations[3], t.durations[4] + excluded.durations[4],
                t.durations[5] + excluded.durations[5], t.durations[6] + excluded.durations[6],
                t.durations[7] + excluded.durations[7], t.durations[8] + excluded.durations[8],
                t.durations[9] + excluded.durations[9], t.durations[10] + excluded.durations[10],
                t.durations[11] + excluded.durations[11], t.durations[12] + excluded.durations[12]];
    end if;
    return cardinality(subscription_ids);
end
$$;


-- Moves waiting sagas without attempts left to DeadLettered, with their dead letters. Internal: the callers have locked and
-- chosen the rows. A saga that cannot be moved is returned with a `problem`; the others are moved.
create or replace function webhookd.dead_letter_sagas(saga_ids bigint[]) returns setof webhookd.saga_transition
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    one_id bigint;
begin
    with moved as (
        update webhook_delivery_sagas s set status = 'DeadLettered', updated_at = now() where s.id = any(saga_ids)
        returning s.subscription_id
    )
    insert into delivery_stats as t (subscription_id, minute, writer, dead_lettered)
    select coalesce(m.subscription_id, 0), date_bin('1 minute', now(), '2000-01-01 00:00:00+00'), pg_backend_pid(), count(*)
    from moved m group by grouping sets ((m.subscription_id), ()) having count(*) > 0
    on conflict (subscription_id, minute, writer) do update set dead_lettered = t.dead_lettered + excluded.dead_lettered;
    return query
    select s.id, s.subscription_id, s.event_id, null::bigint, s.status, s.attempt_count, s.next_attempt_at,
           s.final_error_code::text, b.dead_letter_id, b.correlation_id, null::text
    from bury(saga_ids) b join webhook_delivery_sagas s on s.id = b.saga_id;
exception when others then
    if not is_row_error(sqlstate) then
        raise;
    elsif cardinality(saga_ids) = 1 then
        return query
        select s.id, s.subscription_id, s.event_id, null::bigint, null::saga_status, s.attempt_count, s.next_attempt_at,
               s.final_error_code::text, null::bigint, null::text, sqlerrm
        from webhook_delivery_sagas s where s.id = saga_ids[1];
    else
        foreach one_id in array saga_ids loop
            return query select * from dead_letter_sagas(array[one_id]);
        end loop;
    end if;
end
$$;


-- Returns the quotas, reduced to what max_per_second allows now. Internal: start_due_sagas has the turn, and takes what it starts from
-- the bucket. A bucket fills with max_per_second and holds what is allowed in a second, less the attempts that no worker has leased
-- yet: those may all be sent in the next moment. So ten seconds never see more than the limit and one second's burst.
create or replace function webhookd.limit_quotas(subscription_ids bigint[], quotas integer[]) returns integer[]
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    insert into subscription_rates as b (subscription_id, tokens, refilled_at)
    select u.id, greatest(1, u.max_per_second), clock_timestamp()
    from subscriptions u where u.id = any(subscription_ids) and u.max_per_second is not null and u.deleted_at is null
    on conflict (subscription_id) do nothing;
    update subscription_rates b
    set tokens = least(greatest(1, u.max_per_second) - (select count(*) from webhook_delivery_sagas s
                                                        join webhook_delivery_jobs j on j.id = s.job_id and (j.status = 'Pending') is true
                                                        where s.subscription_id = u.id and s.status = 'InProgress'),
                       b.tokens + u.max_per_second * extract(epoch from greatest(clock_timestamp() - b.refilled_at, '0'))),
        refilled_at = clock_timestamp()
    from subscriptions u
    where u.id = b.subscription_id and u.id = any(subscription_ids) and u.max_per_second is not null and u.deleted_at is null;
    return array(
        select case when b.subscription_id is null then g.quota else least(g.quota, greatest(0, floor(b.tokens))::integer) end
        from unnest(subscription_ids, quotas) with ordinality as g (id, quota, place)
        left join subscriptions u on u.id = g.id and u.max_per_second is not null
        left join subscription_rates b on b.subscription_id = u.id
        order by g.place);
end
$$;


-- Creates jobs for due sagas: for each given subscription at most its quota, never more sagas in progress than the window (one
-- while the endpoint keeps failing), and no more in a second than max_per_second. It takes turns among the given subscriptions instead of working down one queue. A
-- prototype took 10, 16 and 14 ms for 500 jobs with 200,000 due sagas of one subscription, 40 each of 5,000 subscriptions, and
-- 500,000 of one beside 10,000 others, where a scan over all subscriptions took 11, 49 and 99 ms.
--
-- Invariant: the sagas in progress of a subscription never exceed its window, whichever instance calls. Only one caller starts
-- sagas at a time; another gets no rows and does not wait. Results are applied in parallel. orchestration_turn is locked in a
-- statement before the count, because a snapshot from before the lock would not see the sagas that the previous holder started.
--
-- A due saga that has reached the attempt limit is dead-lettered instead (after a reload, dead_letter_exhausted does it at once).
-- Marks are hints to skip dead rows at the front of an index: pass back the returned marks, and null once every poll interval.
-- The job mark is exact, because new jobs have higher ids than all others: the window counts every saga in progress.
-- Served by idx_saga_in_progress (count), idx_saga_pending and idx_saga_subscription_due (due).
create or replace function webhookd.start_due_sagas(
    subscription_ids bigint[], quotas integer[], saga_marks bigint[], job_marks bigint[],
    subscription_window integer, max_attempts integer)
returns table (
    subscription_id bigint,
    started integer,
    active integer,                     -- sagas in progress, including the started ones
    drained boolean,                    -- fewer sagas than room: no more are due, or it is held
    dead_lettered webhookd.saga_transition[],
    next_saga_mark bigint,              -- the newest saga that started its first attempt
    next_job_mark bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    outcome record;
    -- Due sagas whose attempt already has a job, which should never happen.
    unstartable_ids bigint[] := '{}';
    is_limited boolean;
begin
    perform require(cardinality(subscription_ids) > 0 and cardinality(subscription_ids) = cardinality(quotas)
                    and cardinality(subscription_ids) = cardinality(saga_marks)
                    and cardinality(subscription_ids) = cardinality(job_marks),
                    'the arrays must have one element for each subscription, and at least one');
    perform require((select count(distinct u.id) = count(*) from unnest(subscription_ids) as u (id)),
                    'subscription_ids must be distinct and not null');
    perform require((select bool_and(q >= 0) and count(q) = count(*) from unnest(quotas) q), 'quotas must be 0 or more');
    perform require(subscription_window > 0, 'subscription_window must be at least 1');
    perform require(max_attempts > 0, 'max_attempts must be at least 1');

    select exists (select from subscriptions u where u.id = any(subscription_ids) and u.max_per_second is not null)
    into is_limited
    from orchestration_turn for update skip locked;
    if not found then
        return;
    end if;
    if is_limited then
        quotas := limit_quotas(subscription_ids, quotas);
        -- The oldest first: a new event must not take the turn of those that wait for the limit.
        saga_marks := array_fill(null::bigint, array[cardinality(subscription_ids)]);
    end if;

    loop
        begin
            for outcome in
                with allowed as materialized (
                    select g.id as subscription_id, g.saga_mark, a.active, a.oldest_job_id,
                           coalesce(u.max_attempts, start_due_sagas.max_attempts) as attempt_limit,
                           case when u.id is not null then greatest(0, least(
                               g.quota, case when h.failing_since is null then subscription_window else 1 end - a.active))
                           end as room  -- null: the subscription is held
                    from unnest(subscription_ids, quotas, saga_marks, job_marks) as g (id, quota, saga_mark, job_mark)
                    left join subscriptions u on u.id = g.id and u.deliverable
                    left join endpoint_health h on h.subscription_id = g.id
                    cross join lateral (
                        select count(*)::integer as active, min(s.job_id) as oldest_job_id from webhook_delivery_sagas s
                        where s.subscription_id = g.id and s.status = 'InProgress' and s.job_id >= coalesce(g.job_mark, 0)) a
                ), due as materialized (
                    -- In turns, so that claims, which go by id, also take turns among the subscriptions.
                    select d.id, d.event_id, w.subscription_id, d.attempt_count + 1 as attempt, d.next_attempt_at,
                           case when d.attempt_count < w.attempt_limit then nextval('webhook_delivery_jobs_id_seq') end as job_id
                    from allowed w cross join lateral (
                        select c.*, row_number() over (order by c.next_attempt_at, c.id) as turn
                        from (select p.* from (
                                  select s.id, s.event_id, s.attempt_count, s.next_attempt_at from webhook_delivery_sagas s
                                  where s.subscription_id = w.subscription_id and s.status = 'Pending'
                                      and s.next_attempt_at <= now() and s.id >= coalesce(w.saga_mark, 0)
                                      and s.id <> all(unstartable_ids)
                                  order by s.id limit coalesce(w.room, 0) for update skip locked) p
                              union all
                              select r.* from (
                                  select s.id, s.event_id, s.attempt_count, s.next_attempt_at from webhook_delivery_sagas s
                                  where s.subscription_id = w.subscription_id and s.status = 'PendingRetry'
                                      and s.next_attempt_at <= now() and s.id <> all(unstartable_ids)
                                  order by s.next_attempt_at, s.id limit coalesce(w.room, 0) for update skip locked) r) c) d
                    where d.turn <= w.room
                    order by d.turn, w.subscription_id
                ), moved as (
                    update webhook_delivery_sagas s set status = 'InProgress', job_id = d.job_id, updated_at = now()
                    from due d where s.id = d.id and d.job_id is not null
                ), made as (
                    insert into webhook_delivery_jobs (id, saga_id, subscription_id, event_id, attempt, attempt_at)
                        overriding system value
                    select d.job_id, d.id, d.subscription_id, d.event_id, d.attempt, d.next_attempt_at
                    from due d where d.job_id is not null
                )
                -- One aggregate over both kinds of rows: a join of subscriptions and sagas would compare each with each.
                select x.subscription_id, max(x.active) as active, max(x.room) as room, max(x.saga_mark) as saga_mark,
                       max(x.oldest_job_id) as oldest_job_id, count(x.saga_id)::integer as sagas,
                       count(x.job_id)::integer as started, max(x.saga_id) filter (where x.attempt = 1) as latest,
                       array_agg(x.saga_id) filter (where x.saga_id is not null and x.job_id is null) as exhausted
                from (select w.subscription_id, w.active, w.room, w.saga_mark, w.oldest_job_id,
                             null::bigint as saga_id, null::bigint as job_id, null::integer as attempt
                      from allowed w
                      union all
                      select d.subscription_id, null, null, null, null, d.id, d.job_id, d.attempt from due d) x
                group by x.subscription_id
            loop
                subscription_id := outcome.subscription_id;
                started := outcome.started;
                active := outcome.active + started;
                drained := outcome.room is null or outcome.sagas < outcome.room;
                dead_lettered := case when outcome.exhausted is null then '{}'
                                      else array(select t from dead_letter_sagas(outcome.exhausted) t) end;
                next_saga_mark := coalesce(outcome.latest, outcome.saga_mark);
                next_job_mark := outcome.oldest_job_id;
                if is_limited and outcome.started > 0 then
                    update subscription_rates b set tokens = b.tokens - outcome.started
                    where b.subscription_id = outcome.subscription_id;
                end if;
                return next;
            end loop;
            return;
        exception when unique_violation then
            -- They do not stop the others. Not found before the insert, which would cost a lookup for each saga.
            if unstartable_ids <> '{}' then
                raise;
            end if;
            unstartable_ids := array(
                select s.id from webhook_delivery_sagas s
                where s.subscription_id = any(subscription_ids) and s.status in ('Pending', 'PendingRetry')
                    and exists (select from webhook_delivery_jobs j
                                where j.saga_id = s.id and (j.finished_at is null or j.attempt_at = s.next_attempt_at)));
            if unstartable_ids = '{}' then
                raise;  -- something else, such as a sequence that is behind its table
            end if;
        end;
    end loop;
end
$$;
grant execute on function webhookd.start_due_sagas(bigint[], integer[], bigint[], bigint[], integer, integer)
    to webhookd_app;


-- Makes a waiting retry due now. Waits for a result that is being applied.
create or replace function webhookd.retry_delivery(saga_id bigint, only_tenant text default null)
returns table (subscription_id bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    waiting record;
begin
    perform require(retry_delivery.saga_id is not null, 'saga_id must not be null');
    select s.id, s.status, s.subscription_id, s.next_attempt_at into waiting
    from webhook_delivery_sagas s join subscriptions u on u.id = s.subscription_id
    where s.id = retry_delivery.saga_id and (only_tenant is null or u.tenant = only_tenant)
    for no key update of s;
    if not found then
        raise exception using errcode = 'WH404', message = format('delivery %s does not exist', retry_delivery.saga_id);
    elsif waiting.status <> 'PendingRetry' then
        raise exception using
            errcode = 'WH415',
            message = format('delivery %s is %s, and does not wait for a retry', waiting.id, waiting.status);
    end if;
    update webhook_delivery_sagas s set next_attempt_at = now(), updated_at = now()
    where s.id = waiting.id and waiting.next_attempt_at > now();
    return query select waiting.subscription_id;
end
$$;
grant execute on function webhookd.retry_delivery(bigint, text) to webhookd_app;


-- The sweep after a reload that lowered the attempt limit: dead-letters every waiting saga that has reached it, also of held
-- subscriptions. Each call reads `batch_size` rows and is a transaction of its own. Start with 0 and pass `last_saga_id` until
-- it is null. A locked row is skipped: it is being started, and its result will be compared with the new limit.
-- Served by idx_saga_status.
create or replace function webhookd.dead_letter_exhausted(after_saga_id bigint, batch_size integer, max_attempts integer)
returns table (last_saga_id bigint, dead_lettered webhookd.saga_transition[])
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    exhausted bigint[];
begin
    perform require(after_saga_id is not null, 'after_saga_id must not be null');
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(max_attempts > 0, 'max_attempts must be at least 1');

    with looked_at as materialized (
        select s.id, s.subscription_id, s.attempt_count from webhook_delivery_sagas s
        where s.status = 'PendingRetry' and s.id > after_saga_id order by s.id limit batch_size
    ), reached as materialized (
        select l.id from looked_at l join subscriptions u on u.id = l.subscription_id
        where l.attempt_count >= coalesce(u.max_attempts, dead_letter_exhausted.max_attempts)
    ), locked as materialized (
        -- The status is checked again under the lock, because it may have changed in between.
        select s.id from webhook_delivery_sagas s
        where s.id = any(array(select r.id from reached r)) and (s.status = 'PendingRetry') is true for update skip locked
    )
    select (select max(l.id) from looked_at l), array(select k.id from locked k) into last_saga_id, exhausted;
    dead_lettered := case when exhausted = '{}' then '{}' else array(select t from dead_letter_sagas(exhausted) t) end;
    return next;
end
$$;
grant execute on function webhookd.dead_letter_exhausted(bigint, integer, integer) to webhookd_app;


-- Applies the results of jobs that the caller has locked. Internal, see apply_results.
create or replace function webhookd.settle_results(
    job_ids bigint[], max_attempts integer, base_delay_seconds double precision, max_delay_seconds double precision,
    jitter double precision, failing_after integer)
returns setof webhookd.saga_transition
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    moved saga_transition[];
    durations_ms integer[];
    counted integer;
    dead_ids bigint[];
begin
    with decided as materialized (
        select j.id as job_id, j.saga_id, j.error_code, j.duration_ms, j.attempt_at, j.retry_after_seconds, s.attempt_count + 1 as attempt_count,
               coalesce(u.base_delay_seconds, settle_results.base_delay_seconds) as base_delay_seconds,
               case when j.status = 'Completed' then 'Completed'
                    when s.attempt_count + 1 >= coalesce(u.max_attempts, settle_results.max_attempts) then 'DeadLettered'
                    else 'PendingRetry' end::saga_status as status
        from webhook_delivery_jobs j
        -- `offset 0` keeps each lookup by key. Otherwise the planner walks through all sagas InProgress (20,000 blocks instead
        -- of 500) with statistics from a quiet time, through all sagas with a plan from when the table was empty, and through
        -- the whole batch for each subscription if it expects one subscription and there are fifty.
        cross join lateral (
            select k.attempt_count, k.subscription_id from webhook_delivery_sagas k
            where k.id = j.saga_id and (k.status = 'InProgress') is true offset 0) s
        cross join lateral (
            select k.base_delay_seconds, k.max_attempts from subscriptions k where k.id = s.subscription_id offset 0) u
        where j.id = any(job_ids)
    ), changed as (
        update webhook_delivery_sagas s
        set status = d.status,
            attempt_count = d.attempt_count,
            final_error_code = coalesce(d.error_code, s.final_error_code),
            -- Always later than this attempt, also with a delay of 0 or after the clock was set back.
            next_attempt_at = case when d.status = 'PendingRetry' then greatest(
                now() + backoff(s.id, d.attempt_count, d.base_delay_seconds, settle_results.max_delay_seconds, settle_results.jitter,
                                d.retry_after_seconds),
                d.attempt_at + interval '1 microsecond')
                else s.next_attempt_at end,
            updated_at = now()
        from decided d where s.id = d.saga_id
        returning s.id, s.subscription_id, s.event_id, d.job_id, s.status, s.attempt_count, s.next_attempt_at, d.error_code,
                  d.duration_ms
    ), stamped as (
        update webhook_delivery_jobs j set result_applied_at = now()
        where j.id = any(array(select c.job_id from changed c))
    )
    select array_agg(row(c.id, c.subscription_id, c.event_id, c.job_id, c.status, c.attempt_count, c.next_attempt_at,
                         c.error_code, null, null, null)::saga_transition), array_agg(c.duration_ms)
    into moved, durations_ms from changed c;
    counted := count_attempts(array(select t.subscription_id from unnest(moved) t), array(select t.status from unnest(moved) t),
                              durations_ms);

    -- One statement, in the order of the key, so that two orchestrators cannot deadlock. LEASE_EXPIRED and INTERNAL are ignored:
    -- they say nothing about the endpoint. Within a batch, results count in the order of their jobs.
    insert into endpoint_health as h (subscription_id, consecutive_failures, failing_since, last_error_code, last_failure_at,
                                      last_recovery_at)
    select r.subscription_id, r.failures, case when r.failures >= failing_after then now() end, r.last_error_code,
           case when r.last_error_code is not null then now() end, case when r.last_success is not null then now() end
    from (
        select m.subscription_id, max(m.last_success) as last_success,
               (count(*) filter (where m.error_code is not null and m.job_id > coalesce(m.last_success, 0)))::integer as failures,
               (array_agg(m.error_code order by m.job_id desc) filter (where m.error_code is not null))[1] as last_error_code
        from (select t.subscription_id, t.job_id, t.error_code,
                     max(t.job_id) filter (where t.status = 'Completed') over (partition by t.subscription_id) as last_success
              from unnest(moved) t
              where t.error_code is null or t.error_code not in ('LEASE_EXPIRED', 'INTERNAL')) m
        group by m.subscription_id) r
    where r.last_error_code is not null
        or exists (select from endpoint_health k where k.subscription_id = r.subscription_id and k.consecutive_failures > 0)
    order by r.subscription_id
    on conflict (subscription_id) do update set
        consecutive_failures = excluded.consecutive_failures
            + case when excluded.last_recovery_at is null then h.consecutive_failures else 0 end,
        failing_since = case
            when excluded.consecutive_failures
                + case when excluded.last_recovery_at is null then h.consecutive_failures else 0 end < failing_after then null
            when excluded.last_recovery_at is null then coalesce(h.failing_since, now())
            else now() end,
        last_error_code = coalesce(excluded.last_error_code, h.last_error_code),
        last_failure_at = coalesce(excluded.last_failure_at, h.last_failure_at),
        last_recovery_at = coalesce(excluded.last_recovery_at, h.last_recovery_at);

    dead_ids := array(select t.saga_id from unnest(moved) t where t.status = 'DeadLettered');
    if dead_ids <> '{}' then
        return query
        select t.saga_id, t.subscription_id, t.event_id, t.job_id, t.status, t.attempt_count, t.next_attempt_at, t.error_code,
               b.dead_letter_id, b.correlation_id, null::text
        from bury(dead_ids) b join unnest(moved) t on t.saga_id = b.saga_id;
    end if;
    return query
    select t.saga_id, t.subscription_id, t.event_id, t.job_id, t.status, t.attempt_count, t.next_attempt_at, t.error_code,
           null::bigint, case when t.error_code is not null then (select e.correlation_id::text from events e where e.id = t.event_id) end,
           null::text
    from unnest(moved) t where t.saga_id <> all(dead_ids);

    if cardinality(moved) is distinct from cardinality(job_ids) then
        return query
        select s.id, s.subscription_id, s.event_id, j.id, null::saga_status, s.attempt_count, s.next_attempt_at,
               j.error_code::text, null::bigint, null::text, format('the saga is %s, not InProgress', s.status)
        from webhook_delivery_jobs j join webhook_delivery_sagas s on s.id = j.saga_id
        where j.id = any(job_ids) and j.result_applied_at is null;
    end if;
end
$$;


-- Applies reported results to their sagas, each result once (result_applied_at is set in the same transaction). Success and
-- failure both add an attempt. The retry policy comes from the caller; a subscription's own settings have precedence.
--
-- A bad row does not stop the batch: if the batch fails, its jobs are applied one by one, and a job that cannot be applied is
-- returned with a `problem` and without a status. The caller logs and counts it, and passes its id in `excluded_job_ids` until
-- the next poll interval.
--
-- `reported_job_ids` are results that the caller knows of. They are found by the primary key, so dead rows under an open
-- snapshot cost nothing. Null finds all results, oldest first, by idx_job_unapplied: once every poll interval, for the results
-- that other instances reported.
create or replace function webhookd.apply_results(
    batch_size integer, max_attempts integer, base_delay_seconds double precision, max_delay_seconds double precision,
    jitter double precision, failing_after integer, reported_job_ids bigint[] default null,
    excluded_job_ids bigint[] default '{}')
returns setof webhookd.saga_transition
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    job_ids bigint[];
    one_id bigint;
begin
    perform require(batch_size > 0, 'batch_size must be at least 1');
    perform require(max_attempts > 0, 'max_attempts must be at least 1');
    perform require(base_delay_seconds between 0 and 31536000, 'base_delay_seconds must be 0 to 31536000');
    perform require(max_delay_seconds between 0 and 31536000, 'max_delay_seconds must be 0 to 31536000');
    perform require(jitter between 0 and 1, 'jitter must be 0 to 1');
    perform require(failing_after > 0, 'failing_after must be at least 1');
    perform require(excluded_job_ids is not null and array_position(excluded_job_ids, null) is null,
                    'excluded_job_ids must not be null or contain null');

    if reported_job_ids is null then
        job_ids := array(
            select j.id from webhook_delivery_jobs j
            where j.status in ('Completed', 'Failed') and j.result_applied_at is null and j.id <> all(excluded_job_ids)
            order by j.id limit batch_size for update skip locked);
    else
        job_ids := array(
            select j.id from webhook_delivery_jobs j
            where j.id = any(reported_job_ids) and j.finished_at is not null and j.result_applied_at is null
                and j.id <> all(excluded_job_ids)
            order by j.id limit batch_size for update skip locked);
    end if;
    if job_ids = '{}' then
        return;
    end if;

    begin
        return query select * from settle_results(
            job_ids, max_attempts, base_delay_seconds, max_delay_seconds, jitter, failing_after);
        return;
    exception when others then
        if not is_row_error(sqlstate) then
            raise;
        end if;  -- a row of the batch is bad: find it below
    end;
    -- In the order of the endpoint_health rows that this locks, so that two orchestrators cannot deadlock.
    foreach one_id in array array(
        select j.id from webhook_delivery_jobs j where j.id = any(job_ids) order by j.subscription_id, j.id)
    loop
        begin
            return query select * from settle_results(
                array[one_id], max_attempts, base_delay_seconds, max_delay_seconds, jitter, failing_after);
        exception when others then
            if not is_row_error(sqlstate) then
                raise;
            end if;
            return query
            select s.id, s.subscription_id, s.event_id, one_id, null::saga_status, s.attempt_count, s.next_attempt_at,
                   null::text, null::bigint, null::text, sqlerrm
            from webhook_delivery_jobs j join webhook_delivery_sagas s on s.id = j.saga_id where j.id = one_id;
        end;
    end loop;
end
$$;
grant execute on function webhookd.apply_results(
    integer, integer, double precision, double precision, double precision, integer, bigint[], bigint[]) to webhookd_app;


-- Records and applies successes in one pass: the job becomes Completed with its result applied, and the saga Completed. Returns the
-- jobs and their subscriptions. It leaves out jobs that this lease does not hold any more: report_results says why. A saga that is
-- not InProgress refuses the whole call, and the caller reports in two steps instead, which apply what can be applied.
--
-- A row version and a pass less than report_results and apply_results: 178,000 instead of 327,000 instructions for each delivery of
-- a batch of 100. Only for successes, which need no policy; the worker's own functions cannot touch a saga.
create or replace function webhookd.complete_deliveries(
    job_ids bigint[], lease_tokens uuid[], response_statuses integer[], durations_ms integer[], response_excerpts bytea[])
returns table (job_id bigint, subscription_id bigint)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    size constant integer := cardinality(job_ids);
    done integer;
    done_job_ids bigint[];
    done_subscription_ids bigint[];
    done_durations_ms integer[];
    counted integer;
begin
    perform require(size > 0 and size = cardinality(lease_tokens) and size = cardinality(response_statuses)
                    and size = cardinality(durations_ms) and size = cardinality(response_excerpts),
                    'the arrays must have one element for each job, and at least one');
    perform require((select count(distinct g.id) = count(*) from unnest(job_ids) as g (id)),
                    'job_ids must be distinct and not null');
    perform require((select bool_and(coalesce(g.status between 200 and 299, false)) from unnest(response_statuses) as g (status)),
                    'response_statuses must be 200 to 299');

    with done as (
        update webhook_delivery_jobs j
        set status = 'Completed', response_status = g.response_status,
            duration_ms = case when g.duration_ms >= 0 then g.duration_ms end,
            response_excerpt = substring(g.response_excerpt for 4096), finished_at = now(), result_applied_at = now()
        from unnest(job_ids, lease_tokens, response_statuses, durations_ms, response_excerpts)
            as g (job_id, lease_token, response_status, duration_ms, response_excerpt)
        where j.id = g.job_id and j.lease_token = g.lease_token and j.status <> all('{Completed,Failed}')
        returning j.id, j.saga_id, j.subscription_id, j.duration_ms
    ), moved as (
        update webhook_delivery_sagas s set status = 'Completed', attempt_count = s.attempt_count + 1, updated_at = now()
        from done d where s.id = d.saga_id and s.job_id = d.id and (s.status = 'InProgress') is true
        returning d.id, s.subscription_id, d.duration_ms
    )
    select array_agg(m.id), array_agg(m.subscription_id), array_agg(m.duration_ms), (select count(*) from done)
    into done_job_ids, done_subscription_ids, done_durations_ms, done from moved m;
    if coalesce(cardinality(done_job_ids), 0) < done then
        raise exception using errcode = 'WH411', message = 'the saga of a completed job is not InProgress with it';
    end if;
    counted := count_attempts(done_subscription_ids, null, done_durations_ms);

    -- A success ends the endpoint's series of failures. In the order of the key, so that two orchestrators cannot deadlock.
    if exists (select from endpoint_health h
               where h.subscription_id = any(done_subscription_ids) and h.consecutive_failures > 0)
    then
        perform from endpoint_health h where h.subscription_id = any(done_subscription_ids) order by h.subscription_id for update;
        update endpoint_health h set consecutive_failures = 0, failing_since = null, last_recovery_at = now()
        where h.subscription_id = any(done_subscription_ids) and h.consecutive_failures > 0;
    end if;

    return query
    select d.job_id, d.subscription_id from unnest(done_job_ids, done_subscription_ids) as d (job_id, subscription_id);
end
$$;
grant execute on function webhookd.complete_deliveries(bigint[], uuid[], integer[], integer[], bytea[]) to webhookd_app;
