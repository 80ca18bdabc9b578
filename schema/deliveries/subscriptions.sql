-- owner: subscription_admin
-- Owns: subscriptions, their secrets, headers and verification. Nothing here reads or changes a saga.

create or replace function webhookd.new_secret() returns text
language sql volatile set search_path = pg_catalog, webhookd, pg_temp as $$
    -- 244 bits of the server's strong random source; needs no extension.
    select 'whsec_' || encode(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 'base64')
$$;

-- Checks the fields before the row is written, so that an error names the field. The table's CHECKs hold as well.
create or replace function webhookd.check_subscription(
    event_type text, callback_url text, max_attempts integer, base_delay_seconds double precision, headers jsonb,
    description text)
returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    perform require(is_event_type(event_type),
                    'event_type must be 1 to 100 characters: words of letters, digits and _, joined by dots');
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
end
$$;

-- NO KEY UPDATE does not block transactions that lock only the subscription's key, as foreign key checks do.
create or replace function webhookd.lock_subscription(subscription_id bigint) returns webhookd.subscriptions
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
declare
    locked subscriptions;
begin
    perform require(subscription_id is not null, 'subscription_id must not be null');
    select * into locked from subscriptions s where s.id = subscription_id for no key update;
    if not found then
        raise exception using errcode = 'WH404', message = format('subscription %s does not exist', subscription_id);
    end if;
    return locked;
end
$$;


-- A new subscription is active and not verified: no event is routed to it before its endpoint answered the challenge. Without a
-- given secret (to migrate from another system) a new secret is generated.
create or replace function webhookd.create_subscription(
    event_type text, callback_url text, max_attempts integer default null, base_delay_seconds double precision default null,
    headers jsonb default '{}', description text default null, secret text default null)
returns table (subscription_id bigint, signing_secret text)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform check_subscription(event_type, callback_url, max_attempts, base_delay_seconds, headers, description);
    signing_secret := coalesce(secret, new_secret());
    perform require(is_secret(signing_secret), 'secret must be whsec_ and the base64 of 24 to 64 bytes');
    insert into subscriptions as s (event_type, callback_url, max_attempts, base_delay_seconds, description)
    values (event_type, callback_url, max_attempts, base_delay_seconds, description)
    returning s.id into subscription_id;
    insert into subscription_secrets (subscription_id, secret, headers) values (subscription_id, signing_secret, headers);
    return next;
end
$$;
grant execute on function webhookd.create_subscription(
    text, text, integer, double precision, jsonb, text, text) to webhookd_app;


-- Changes only the fields that `changed` names; null removes an override. A new callback_url is not verified (a trigger clears
-- the flag), and a running verification of the old one becomes invalid.
create or replace function webhookd.update_subscription(
    subscription_id bigint, changed text[], active boolean default null, callback_url text default null,
    max_attempts integer default null, base_delay_seconds double precision default null, headers jsonb default null,
    description text default null)
returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    changeable constant text[] := array[
        'active', 'callback_url', 'max_attempts', 'base_delay_seconds', 'headers', 'description'];
    before subscriptions;
    after subscriptions;
begin
    perform require(changed <@ changeable and array_position(changed, null) is null, 'changed can contain ' || array_to_string(changeable, ', '));
    perform require((active is null or 'active' = any(changed))
                    and (callback_url is null or 'callback_url' = any(changed))
                    and (max_attempts is null or 'max_attempts' = any(changed))
                    and (base_delay_seconds is null or 'base_delay_seconds' = any(changed))
                    and (headers is null or 'headers' = any(changed))
                    and (description is null or 'description' = any(changed)),
                    'changed must contain every field that has a value');
    perform require(active is not null or 'active' <> all(changed), 'active must be true or false');
    before := lock_subscription(subscription_id);
    after := before;
    if 'active' = any(changed) then after.active := active; end if;
    perform check_subscription(
        before.event_type,
        case when 'callback_url' = any(changed) then callback_url else before.callback_url end,
        case when 'max_attempts' = any(changed) then max_attempts end,
        case when 'base_delay_seconds' = any(changed) then base_delay_seconds end,
        case when 'headers' = any(changed) then headers else '{}' end,
        case when 'description' = any(changed) then description end);
    if 'callback_url' = any(changed) then after.callback_url := callback_url; end if;
    if 'max_attempts' = any(changed) then after.max_attempts := max_attempts; end if;
    if 'base_delay_seconds' = any(changed) then after.base_delay_seconds := base_delay_seconds; end if;
    if 'description' = any(changed) then after.description := description; end if;

    update subscriptions s
    set active = after.active, callback_url = after.callback_url, max_attempts = after.max_attempts,
        base_delay_seconds = after.base_delay_seconds, description = after.description, updated_at = now()
    where s.id = subscription_id;
    update subscription_secrets c
    set headers = case when 'headers' = any(changed) then headers else c.headers end,
        challenge = case when after.callback_url = before.callback_url then c.challenge end,
        updated_at = now()
    where c.subscription_id = subscription_id and ('headers' = any(changed) or after.callback_url <> before.callback_url);
end
$$;
grant execute on function webhookd.update_subscription(
    bigint, text[], boolean, text, integer, double precision, jsonb, text) to webhookd_app;


-- Returns a new challenge, the address for it, and the secrets that sign it. An earlier challenge becomes invalid.
create or replace function webhookd.begin_verification(subscription_id bigint)
returns table (challenge text, callback_url text, secrets text[], headers jsonb)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_column
begin
    callback_url := (lock_subscription(begin_verification.subscription_id)).callback_url;
    update subscription_secrets c
    set challenge = replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), updated_at = now()
    where c.subscription_id = begin_verification.subscription_id
    returning c.challenge, live_secrets(c), c.headers into challenge, secrets, headers;
    return next;
end
$$;
grant execute on function webhookd.begin_verification(bigint) to webhookd_app;

-- Marks the subscription as verified after its endpoint echoed the challenge. Only the latest challenge is valid, and only while
-- the address is the same: the row is locked before the challenge is compared, so a change of address is completely before or
-- completely after.
create or replace function webhookd.complete_verification(subscription_id bigint, challenge text) returns void
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(challenge is not null, 'challenge must not be null');
    perform lock_subscription(subscription_id);
    update subscription_secrets c set challenge = null, updated_at = now()
    where c.subscription_id = subscription_id and c.challenge = challenge;
    if not found then
        raise exception using
            errcode = 'WH413',
            message = format('the challenge of subscription %s is no longer valid', subscription_id),
            hint = 'The address changed or another verification was started: verify again.';
    end if;
    update subscriptions s set verified = true, updated_at = now() where s.id = subscription_id;
end
$$;
grant execute on function webhookd.complete_verification(bigint, text) to webhookd_app;


-- Sets a new secret, which signs at once. Up to three previous secrets also sign, each until its own time. An overlap of 0
-- removes all previous secrets now.
create or replace function webhookd.rotate_secret(
    subscription_id bigint, overlap_seconds double precision, secret text default null)
returns table (signing_secret text, previous_valid_until timestamptz)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(overlap_seconds between 0 and 31536000, 'overlap_seconds must be 0 to 31536000');
    perform lock_subscription(subscription_id);
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
grant execute on function webhookd.rotate_secret(bigint, double precision, text) to webhookd_app;
