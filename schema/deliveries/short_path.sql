-- owner: webhookd_owner
-- Owns: the short path, for a lone event: route, start and claim in one transaction, which is one commit instead of three. Runs with
-- the caller's privileges, and does nothing itself: each stage's own function does its part with its own role.

-- Routes up to `batch_size` events, starts their sagas and claims their jobs. Always returns a row: the first has the results of
-- routing and starting, and each row with a `job_id` is a row of claim_jobs. What is left over is found by the stages: events if
-- `more`, sagas if `unstarted`, jobs if fewer were claimed of these subscriptions than started.
-- `first_event_id` is the mark of route_events: the first published event, or 0. The sagas are started from the first new one on, so
-- that dead index entries of an open snapshot cost little; an older one waits for the stages.
-- An error undoes all three steps and is returned in `problem`, so that it does not undo what the caller did before in the same
-- transaction, such as publishing. The stages then meet the same error, or not.
-- A wide fan-out is only routed: it is work for the stages, which share it fairly.
create or replace function webhookd.deliver_now(
    batch_size integer, first_event_id bigint, subscription_window integer, max_attempts integer, worker_id text, wanted integer,
    lease_seconds double precision, subscription_slots integer, busy_subscription_ids bigint[], busy_slots integer[],
    first_job_id bigint)
returns table (routed integer, sagas integer, subscription_ids bigint[], more boolean, started integer, unstarted boolean,
               dead_lettered webhookd.saga_transition[], problem text,
               job_id bigint, saga_id bigint, subscription_id bigint, event_id bigint, attempt integer, lease_resets integer,
               event_type text, correlation_id text, payload text, callback_url text, secrets text[], headers jsonb,
               lease_token uuid, lease_until timestamptz, claimed_at timestamptz, resume_from bigint)
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    share record;
    fan_out integer;
    next_event_id bigint;
    first_saga_id bigint;
    is_left boolean := false;
begin
    if num_nulls(batch_size, first_event_id, subscription_window, max_attempts, worker_id, wanted, lease_seconds, subscription_slots,
                 busy_subscription_ids, busy_slots, first_job_id) > 0
    then
        raise exception using errcode = 'WH400', message = 'no argument may be null';
    end if;
    routed := 0;
    sagas := 0;
    subscription_ids := '{}';
    more := false;
    started := 0;
    unstarted := false;
    dead_lettered := '{}';
    begin
        select r.* into routed, sagas, subscription_ids, next_event_id, more, first_saga_id
        from route_events(batch_size, first_event_id) r;
        unstarted := sagas > 0;
        fan_out := cardinality(subscription_ids);
        if fan_out between 1 and wanted then
            for share in
                select s.started, s.drained, s.dead_lettered
                from start_due_sagas(
                    subscription_ids, array_fill(wanted, array[fan_out]), array_fill(first_saga_id, array[fan_out]),
                    array_fill(null::bigint, array[fan_out]), subscription_window, max_attempts) s
            loop
                started := started + share.started;
                is_left := is_left or not share.drained;
                dead_lettered := dead_lettered || share.dead_lettered;
            end loop;
            if found then  -- otherwise another orchestrator has the turn
                unstarted := is_left;
            end if;
        end if;
        if started > 0 then
            return query
            select routed, sagas, subscription_ids, more, started, unstarted, dead_lettered, null::text, c.*
            from claim_jobs(worker_id, wanted, lease_seconds, subscription_slots, busy_subscription_ids, busy_slots,
                            first_job_id) c;
            if found then
                return;
            end if;
        end if;
    exception when others then
        if sqlstate = 'WH400' then  -- the caller's mistake
            raise;
        end if;
        routed := 0;
        sagas := 0;
        subscription_ids := '{}';
        more := true;
        started := 0;
        unstarted := false;
        dead_lettered := '{}';
        problem := format('%s: %s', sqlstate, sqlerrm);
    end;
    return next;
end
$$;
grant execute on function webhookd.deliver_now(
    integer, bigint, integer, integer, text, integer, double precision, integer, bigint[], integer[], bigint) to webhookd_app;
