-- owner: subscription_admin
-- Owns: tenants, subscriptions, their secrets, headers and verification. Nothing here reads or changes a saga.

create or replace function webhookd.new_secret() returns text
language sql volatile set search_path = pg_catalog, webhookd, pg_temp as $$
    -- 244 bits of the server's strong random source; needs no extension.
    select 'whsec_' || encode(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 'base64')
$$;

-- Checks the fields before the row is written, so that an error names the field. The table's CHECKs hold as well.
create or replace function webhookd.check_subscription(
    event_types text[], callback_url text, max_attempts integer, base_delay_seconds double precision, headers jsonb,
    description text, filter jsonb, format text, max_per_second double precision)
returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform require(are_event_types(event_types),
                    'event_types must be 1 to 100 patterns of at most 100 characters: words of letters, digits and _, joined by'
                    ' dots; the last word can be *');
    perform require(is_callback_url(callback_url),
                    'callback_url must be an https:// address of at most 500 characters, without credentials or fragment');
    perform require(max_attempts is null or max_attempts between 1 and 1000, 'max_attempts must be 1 to 1000');
    perform require(base_delay_seconds is null or base_delay_seconds between 0 and 31536000,
                    'base_delay_seconds must be 0 to 31536000');
    perform require(case when jsonb_typeof(headers) = 'object' then not exists (
                        select from jsonb_each(headers) h
                        where jsonb_typeof(h.value) <> 'string' or h.key !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
                            or h.value #>> '{}' !~ '^[\x20-\x7e]*$' or length(h.value #>> '{}') > 4096) end,
                    'headers must be a JSON object of strings with valid header names and values');
    perform require(description is null or length(description) <= 500, 'description must be at most 500 characters');
    perform require(filter is null or is_labels(filter),
                    'filter must be an object of at most 20 texts, with names and values of at most 100 characters');
    perform require(format in ('raw', 'standard'), 'format must be raw or standard');
    perform require(max_per_second is null or (max_per_second > 0 and max_per_second <= 1000000),
                    'max_per_second must be above 0 and at most 1000000');
end
$$;

-- NO KEY UPDATE does not block transactions that lock only the subscription's key, as foreign key checks do. With `only_tenant`,
-- the subscriptions of others do not exist; each function below passes it on.
create or replace function webhookd.lock_subscription(subscription_id bigint, only_tenant text) returns webhookd.subscriptions
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    locked subscriptions;
begin
    perform require(subscription_id is not null, 'subscription_id must not be null');
    select * into locked from subscriptions s
    where s.id = subscription_id and s.deleted_at is null and (only_tenant is null or s.tenant = only_tenant) for no key update;
    if not found then
        raise exception using errcode = 'WH404', message = format('subscription %s does not exist', subscription_id);
    end if;
    return locked;
end
$$;


-- While a tenant is being erased, it gets no new subscription and no change. The caller has locked the tenant's row.
create or replace function webhookd.refuse_if_erasing(candidate text) returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    if exists (select from erasures e where e.tenant = candidate and e.finished_at is null and e.subscription_id is null) then
        raise exception using errcode = 'WH416', message = format('tenant %s is being erased', candidate);
    end if;
end
$$;
grant execute on function webhookd.refuse_if_erasing(text) to console_keeper;

-- Returns whether the tenant is active, and creates it if it is new. Internal: for a new subscription. The tenant's row is locked, so
-- that two new subscriptions cannot both be the last one allowed, and a change of `active` is completely before or after.
create or replace function webhookd.join_tenant(new_tenant text) returns boolean
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    joined tenants;
begin
    perform require(is_tenant(new_tenant), 'tenant must be 1 to 100 letters, digits and . _ : -');
    loop
        insert into tenants (tenant) values (new_tenant) on conflict do nothing;
        select * into joined from tenants t where t.tenant = new_tenant for no key update;
        exit when found;  -- otherwise an erasure of the tenant has just ended
    end loop;
    perform refuse_if_erasing(new_tenant);
    if (select count(*) from subscriptions s where s.tenant = new_tenant and s.deleted_at is null) >= joined.max_subscriptions then
        raise exception using
            errcode = 'WH414',
            message = format('tenant %s has reached its limit of %s subscriptions', new_tenant, joined.max_subscriptions);
    end if;
    return joined.active;
end
$$;

-- Creates a tenant, or changes the fields that `changes` contains. While a tenant is not active, its events are routed, and its
-- deliveries wait.
create or replace function webhookd.put_tenant(tenant text, changes jsonb) returns boolean
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    changeable constant text[] := array['name', 'active', 'max_subscriptions'];
    created boolean;
    before tenants;
    after tenants;
begin
    perform require(is_tenant(tenant), 'tenant must be 1 to 100 letters, digits and . _ : -');
    perform require(jsonb_typeof(changes) = 'object' and changes - changeable = '{}',
                    'changes must be an object that can contain ' || array_to_string(changeable, ', '));
    loop
        insert into tenants (tenant) values (tenant) on conflict do nothing;
        created := found;
        select * into before from tenants t where t.tenant = put_tenant.tenant for no key update;
        exit when found;  -- otherwise an erasure of the tenant has just ended
    end loop;
    perform refuse_if_erasing(tenant);
    perform require((changes ->> 'max_subscriptions')::numeric between 0 and 2147483647 is not false,
                    'max_subscriptions must be 0 to 2147483647');
    after := jsonb_populate_record(before, changes);
    perform require(length(after.name) <= 200 is not false, 'name must be at most 200 characters');
    perform require(after.active is not null, 'active must be true or false');
    update tenants t
    set name = after.name, active = after.active, max_subscriptions = after.max_subscriptions, updated_at = now()
    where t.tenant = put_tenant.tenant;
    if after.active <> before.active then
        update subscriptions s set tenant_active = after.active, updated_at = now() where s.tenant = put_tenant.tenant;
    end if;
    return created;
end
$$;
grant execute on function webhookd.put_tenant(text, jsonb) to webhookd_app;


-- A new subscription is active and not verified: no event is routed to it before its endpoint answered the challenge. Without a
-- given secret (to migrate from another system) a new secret is generated. `event_type` is the first of `event_types`; one of the two
-- is enough. The first subscription of a tenant creates the tenant.
create or replace function webhookd.create_subscription(
    event_type text, callback_url text, max_attempts integer default null, base_delay_seconds double precision default null,
    headers jsonb default '{}', description text default null, secret text default null, tenant text default '',
    event_types text[] default null, filter jsonb default null, paused boolean default false, format text default 'raw',
    max_per_second double precision default null)
returns table (subscription_id bigint, signing_secret text)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    patterns constant text[] := coalesce(event_types, array[event_type]);
    tenant_is_active boolean;
begin
    perform check_subscription(patterns, callback_url, max_attempts, base_delay_seconds, headers, description, filter, format,
                               max_per_second);
    perform require(event_type is null or event_type = patterns[1], 'event_type must be the first of event_types');
    perform require(tenant is not null, 'tenant must not be null');
    perform require(paused is not null, 'paused must be true or false');
    signing_secret := coalesce(secret, new_secret());
    perform require(is_secret(signing_secret), 'secret must be whsec_ and the base64 of 24 to 64 bytes');
    tenant_is_active := case when tenant = '' then true else join_tenant(tenant) end;
    insert into subscriptions as s (event_type, event_types, callback_url, max_attempts, base_delay_seconds, description, tenant,
                                    tenant_active, filter, paused, format, max_per_second)
    values (patterns[1], patterns, callback_url, max_attempts, base_delay_seconds, description, tenant, tenant_is_active,
            nullif(filter, '{}'), paused, format, max_per_second)
    returning s.id into subscription_id;
    insert into subscription_secrets (subscription_id, secret, headers) values (subscription_id, signing_secret, headers);
    return next;
end
$$;
grant execute on function webhookd.create_subscription(
    text, text, integer, double precision, jsonb, text, text, text, text[], jsonb, boolean, text, double precision) to webhookd_app;


-- Changes the fields that `changes` contains; null removes an override. `event_type` alone replaces all patterns.
-- A new callback_url must be verified. While the old one is verified, the new one waits in pending_callback_url, and deliveries go to
-- the old one, so that moving an endpoint loses nothing. A running verification of another address becomes invalid.
create or replace function webhookd.update_subscription(subscription_id bigint, changes jsonb, only_tenant text default null) returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    changeable constant text[] := array[
        'active', 'paused', 'callback_url', 'event_type', 'event_types', 'filter', 'format', 'max_per_second', 'max_attempts',
        'base_delay_seconds', 'headers', 'description'];
    before subscriptions;
    after subscriptions;
begin
    perform require(jsonb_typeof(changes) = 'object' and changes - changeable = '{}',
                    'changes must be an object that can contain ' || array_to_string(changeable, ', '));
    before := lock_subscription(subscription_id, only_tenant);
    after := jsonb_populate_record(before, changes - 'headers');
    if not changes ? 'event_types' and changes ? 'event_type' then
        after.event_types := array[after.event_type];
    end if;
    perform require(after.event_type = after.event_types[1] or not changes ? 'event_type',
                    'event_type must be the first of event_types');
    perform require(after.active is not null, 'active must be true or false');
    perform require(after.paused is not null, 'paused must be true or false');
    perform check_subscription(after.event_types, after.callback_url, after.max_attempts, after.base_delay_seconds,
                               coalesce(changes -> 'headers', '{}'), after.description, after.filter, after.format,
                               after.max_per_second);
    if changes ? 'callback_url' then
        after.pending_callback_url := null;
        if before.verified and after.callback_url <> before.callback_url then
            after.pending_callback_url := after.callback_url;
            after.callback_url := before.callback_url;
        end if;
    end if;

    update subscriptions s
    set active = after.active, paused = after.paused, callback_url = after.callback_url,
        pending_callback_url = after.pending_callback_url, event_type = after.event_types[1], event_types = after.event_types,
        filter = nullif(after.filter, '{}'), format = after.format, max_per_second = after.max_per_second,
        max_attempts = after.max_attempts, base_delay_seconds = after.base_delay_seconds, description = after.description,
        updated_at = now()
    where s.id = subscription_id;
    update subscription_secrets c
    set headers = coalesce(changes -> 'headers', c.headers),
        challenge = case when (after.callback_url, after.pending_callback_url)
                              is not distinct from (before.callback_url, before.pending_callback_url) then c.challenge end,
        updated_at = now()
    where c.subscription_id = subscription_id
        and (changes ? 'headers' or (after.callback_url, after.pending_callback_url)
                                    is distinct from (before.callback_url, before.pending_callback_url));
end
$$;
grant execute on function webhookd.update_subscription(bigint, jsonb, text) to webhookd_app;


-- Deletes a subscription: nothing is routed or sent from now on, its secret and headers are gone, and it is not listed any more. Its
-- deliveries stay as history; those that are not finished are never sent.
create or replace function webhookd.delete_subscription(subscription_id bigint, only_tenant text default null) returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform lock_subscription(subscription_id, only_tenant);
    update subscriptions s set deleted_at = now(), pending_callback_url = null, updated_at = now() where s.id = subscription_id;
    delete from subscription_secrets c where c.subscription_id = subscription_id;
end
$$;
grant execute on function webhookd.delete_subscription(bigint, text) to webhookd_app, retention_keeper;


-- Returns what a test request needs, which is sent at once and stored nowhere. `now` is the database's time.
create or replace function webhookd.prepare_test(subscription_id bigint, only_tenant text default null)
returns table (callback_url text, format text, secrets text[], headers jsonb, now timestamptz, verified boolean)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
begin
    perform require(prepare_test.subscription_id is not null, 'subscription_id must not be null');
    return query
    select u.callback_url::text, u.format, live_secrets(c), c.headers, clock_timestamp(), u.verified
    from subscriptions u join subscription_secrets c on c.subscription_id = u.id
    where u.id = prepare_test.subscription_id and u.deleted_at is null and (only_tenant is null or u.tenant = only_tenant);
    if not found then
        raise exception using errcode = 'WH404', message = format('subscription %s does not exist', prepare_test.subscription_id);
    end if;
end
$$;
grant execute on function webhookd.prepare_test(bigint, text) to webhookd_app;


-- Returns a new challenge, the address for it, and the secrets that sign it. An earlier challenge becomes invalid.
create or replace function webhookd.begin_verification(subscription_id bigint, only_tenant text default null)
returns table (challenge text, callback_url text, secrets text[], headers jsonb)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
declare
    locked constant subscriptions := lock_subscription(begin_verification.subscription_id, only_tenant);
begin
    callback_url := coalesce(locked.pending_callback_url, locked.callback_url);
    update subscription_secrets c
    set challenge = replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), updated_at = now()
    where c.subscription_id = begin_verification.subscription_id
    returning c.challenge, live_secrets(c), c.headers into challenge, secrets, headers;
    return next;
end
$$;
grant execute on function webhookd.begin_verification(bigint, text) to webhookd_app;

-- Marks the subscription as verified after its endpoint echoed the challenge. Only the latest challenge is valid, and only while
-- the address is the same: the row is locked before the challenge is compared, so a change of address is completely before or
-- completely after.
-- `method` says how: the endpoint echoed the challenge, or it answered a ping with success.
create or replace function webhookd.complete_verification(
    subscription_id bigint, challenge text, only_tenant text default null, method text default 'challenge')
returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(challenge is not null, 'challenge must not be null');
    perform require(method in ('challenge', 'ping'), 'method must be challenge or ping');
    perform lock_subscription(subscription_id, only_tenant);
    update subscription_secrets c set challenge = null, updated_at = now()
    where c.subscription_id = subscription_id and c.challenge = challenge;
    if not found then
        raise exception using
            errcode = 'WH413',
            message = format('the challenge of subscription %s is no longer valid', subscription_id),
            hint = 'The address changed or another verification was started: verify again.';
    end if;
    update subscriptions s
    set verified = true, verified_by = method, callback_url = coalesce(s.pending_callback_url, s.callback_url),
        pending_callback_url = null, updated_at = now()
    where s.id = subscription_id;
end
$$;
grant execute on function webhookd.complete_verification(bigint, text, text, text) to webhookd_app;


-- Sets a new secret, which signs at once. Up to three previous secrets also sign, each until its own time. An overlap of 0
-- removes all previous secrets now.
create or replace function webhookd.rotate_secret(
    subscription_id bigint, overlap_seconds double precision, secret text default null, only_tenant text default null)
returns table (signing_secret text, previous_valid_until timestamptz)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(overlap_seconds between 0 and 31536000, 'overlap_seconds must be 0 to 31536000');
    perform lock_subscription(subscription_id, only_tenant);
    signing_secret := coalesce(secret, new_secret());
    perform require(is_secret(signing_secret), 'secret must be whsec_ and the base64 of 24 to 64 bytes');
    previous_valid_until := now() + make_interval(secs => overlap_seconds);
    update subscription_secrets c
    set secret = signing_secret, previous_secrets = kept.secrets, previous_valid_until = kept.valid_until, updated_at = now()
    from (select coalesce(array_agg(k.secret order by k.age), '{}') as secrets,
                 coalesce(array_agg(k.valid_until order by k.age), '{}') as valid_until
          from (select p.secret, p.valid_until, p.age
                from subscription_secrets o
                cross join lateral unnest(o.secret || o.previous_secrets,
                                          rotate_secret.previous_valid_until || o.previous_valid_until)
                    with ordinality as p (secret, valid_until, age)
                where o.subscription_id = rotate_secret.subscription_id and p.valid_until > now() and overlap_seconds > 0
                order by p.age limit 3) k) kept
    where c.subscription_id = rotate_secret.subscription_id;
    return next;
end
$$;
grant execute on function webhookd.rotate_secret(bigint, double precision, text, text) to webhookd_app;
