-- owner: webhookd_jobqueue
-- Owns: the functions for operators: the switch, the policies, and the health of the queue. Changes are in the ledger; a call that
-- changes nothing is not.

create or replace function webhookd.fn_job_enable(p_enabled boolean, p_actor text) returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform require(p_enabled is not null, 'enabled must not be null');
    perform require_label('actor', p_actor, 200);
    update settings s set value = to_jsonb(p_enabled)
    where s.key = 'queue.job_substrate.enabled' and s.value <> to_jsonb(p_enabled);
    if found then
        perform record_decision('fn_job_enable', p_actor, jsonb_build_object('enabled', p_enabled));
    end if;
    return jsonb_build_object('refused', false, 'enabled', p_enabled);
end
$$;
grant execute on function webhookd.fn_job_enable(boolean, text) to workflow_admin;

-- Changes the default policy, or the policy of a kind, where a JSON null restores the default. Returns the policy in effect.
create or replace function webhookd.fn_job_configure(p_settings jsonb, p_actor text, p_kind text default null) returns jsonb
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    known constant text[] := array[
        'max_attempts', 'base_delay_seconds', 'max_delay_seconds', 'jitter', 'max_lease_recoveries', 'retention_seconds'];
    lowest constant numeric[] := array[1, 0, 0, 0, 0, 0];
    highest constant numeric[] := array[1000, 315360000, 315360000, 1, 1000, 315360000];
    whole constant text[] := array['max_attempts', 'max_lease_recoveries'];
    name text;
    place integer;
    number jsonb;
    given jsonb := '{}';  -- with 3.0 as 3, for integer columns
    policy job_kind_policy;
begin
    perform require(jsonb_typeof(p_settings) = 'object', 'settings must be a JSON object');
    perform require_label('actor', p_actor, 200);
    perform require_label('kind', p_kind, 100, optional => true);
    for name, number in select * from jsonb_each(p_settings) loop
        place := array_position(known, name);
        perform require(place is not null, format('unknown setting %s; known settings: %s', quote_literal(name),
                                                  array_to_string(known, ', ')));
        perform require(
            case jsonb_typeof(number)
                when 'null' then p_kind is not null
                when 'number' then number::numeric between lowest[place] and highest[place]
                                   and (name <> all(whole) or number::numeric % 1 = 0)
                else false end,
            format('%s must be a %snumber from %s to %s', name, case when name = any(whole) then 'whole ' else '' end,
                   lowest[place], highest[place]));
        given := given || jsonb_build_object(
            name, case jsonb_typeof(number) when 'number' then to_jsonb(trim_scale(number::numeric)) else number end);
    end loop;

    if p_kind is null then
        update settings s set value = given -> split_part(s.key, '.', 3)
        where starts_with(s.key, 'queue.job_substrate.') and s.value <> given -> split_part(s.key, '.', 3);
    else
        insert into job_kind_policy as k
        select (jsonb_populate_record(null::job_kind_policy, given || jsonb_build_object('job_kind', p_kind))).*
        -- A kind without a row has the defaults: no row is needed to restore them.
        where jsonb_strip_nulls(given) <> '{}' or exists (select from job_kind_policy o where o.job_kind = p_kind)
        on conflict (job_kind) do update
        set (max_attempts, base_delay_seconds, max_delay_seconds, jitter, max_lease_recoveries, retention_seconds) = (
            select n.max_attempts, n.base_delay_seconds, n.max_delay_seconds, n.jitter, n.max_lease_recoveries,
                   n.retention_seconds
            from jsonb_populate_record(k, given) n)
        where k is distinct from jsonb_populate_record(k, given);
    end if;
    if found then
        perform record_decision('fn_job_configure', p_actor, jsonb_build_object('kind', p_kind, 'settings', given));
    end if;
    policy := job_policy(p_kind);
    -- Compares the values in effect, but only if one of both was given.
    perform require(
        policy.base_delay_seconds <= policy.max_delay_seconds or not given ?| array['base_delay_seconds', 'max_delay_seconds'],
        format('base_delay_seconds must not be above max_delay_seconds: they would be %s and %s',
               policy.base_delay_seconds, policy.max_delay_seconds));
    return to_jsonb(policy) - 'job_kind' || jsonb_build_object('refused', false, 'kind', p_kind);
end
$$;
grant execute on function webhookd.fn_job_configure(jsonb, text, text) to workflow_admin;


-- The counts of DP2 §8 and more. Each count scans the partial index of what it counts, up to the bound; the age of the oldest
-- claimable job takes one step of ix_job_queue_claimable per kind, up to the bound. Every caller uses the same bound, which the
-- answer contains: with two counts at the bound a call took 13 to 36 ms for 100,000 and 1.5 to 4.3 ms for 10,000 (medians,
-- PostgreSQL 15 and 18, before and after a vacuum), and each instance calls it every five seconds.
create or replace function webhookd.fn_job_queue_health(p_counted_up_to integer default 10000) returns jsonb
language plpgsql stable security definer set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    oldest_at timestamptz;
begin
    perform require(p_counted_up_to > 0, 'counted_up_to must be at least 1');
    with recursive kinds (job_kind, place) as (
        select ''::text collate "C", 0
        union all
        select (select q.job_kind from job_queue q where q.status = 'queued' and q.job_kind > k.job_kind
                order by q.job_kind, q.process_after limit 1), k.place + 1
        from kinds k where k.job_kind is not null and k.place < p_counted_up_to
    )
    select min(o.process_after) into oldest_at
    from kinds k cross join lateral (
        select q.process_after from job_queue q where q.status = 'queued' and q.job_kind = k.job_kind and q.process_after <= now()
        order by q.process_after limit 1) o;
    return jsonb_build_object(
        'enabled', job_queue_enabled(),
        'backlog', (select count(*) from (
            select from job_queue q where q.status = 'queued'
            order by q.job_kind, q.process_after limit p_counted_up_to) c),
        'in_progress', (select count(*) from (
            select from job_queue q where q.status in ('leased','in_progress')
            order by q.leased_until, q.job_id limit p_counted_up_to) c),
        'dead_letter_open', (select count(*) from (
            select from job_queue q where q.status = 'dead_letter'
            order by q.job_kind, q.last_error_at desc limit p_counted_up_to) c),
        'oldest_queued_age_s', extract(epoch from now() - oldest_at),
        'lease_active', (select count(*) from (
            select from job_queue q where q.status in ('leased','in_progress') and q.leased_until > now()
            order by q.leased_until, q.job_id limit p_counted_up_to) c),
        'scheduled', (select count(*) from (
            select from job_queue q where q.scheduled  -- and so queued, by a CHECK
            order by q.job_kind, q.executor, q.process_after, q.job_id limit p_counted_up_to) c),
        'retry_waiting', (select count(*) from (
            select from job_queue q where q.status = 'retry_waiting'
            order by q.process_after, q.job_id limit p_counted_up_to) c),
        'events_waiting', (select count(*) from (
            select from job_event_queue e order by e.event_id limit p_counted_up_to) c),
        'counted_up_to', p_counted_up_to);
end
$$;
grant execute on function webhookd.fn_job_queue_health(integer) to workflow_admin, webhookd_reader;
