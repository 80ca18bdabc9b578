-- owner: console_keeper
-- Owns: the key that signs the console's cookies, and one-time links to the console and to the portal of a tenant.

-- Returns the key that signs cookies. Only the daemon may call it: whoever knows the key can sign a cookie.
create or replace function webhookd.console_key() returns bytea
language plpgsql stable security definer set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    return (select k.key from console_key k);
end
$$;
grant execute on function webhookd.console_key() to webhookd_app;

-- Both functions below end with this, so expired links disappear without a service. Bounded, because a call must stay short.
create or replace function webhookd.remove_expired_console_links() returns void
language plpgsql set search_path = pg_catalog, webhookd, pg_temp as $$
begin
    delete from console_links l
    where l.code_sha256 = any(array(
        select e.code_sha256 from console_links e where e.expires_at <= now() order by e.expires_at limit 100 for update skip locked));
end
$$;

-- Stores a link. A session that it starts ends after `session_seconds`, or with the link if that is null. A token has at most 1,000
-- live links of a kind and tenant; calls at the same moment may exceed this by their number.
create or replace function webhookd.create_console_link(
    code_sha256 bytea, kind text, token_fingerprint text, actor text, expires_in_seconds integer,
    session_seconds double precision default null, tenant text default '', capabilities text[] default '{}',
    out expires_at timestamptz, out session_expires_at timestamptz)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
declare
    max_live_links constant integer := 1000;
begin
    perform require(octet_length(code_sha256) = 32, 'code_sha256 must be 32 bytes');
    perform require(kind in ('login', 'portal'), 'kind must be login or portal');
    perform require(token_fingerprint ~ '^([0-9a-f]{32})?$', 'token_fingerprint must be empty or 32 hexadecimal digits');
    perform require(length(actor) between 1 and 200, 'actor must be 1 to 200 characters');
    perform require(expires_in_seconds between 60 and 604800, 'expires_in_seconds must be 60 to 604800');
    perform require(session_seconds is null or session_seconds between 60 and 31536000, 'session_seconds must be 60 to 31536000');
    perform require(tenant is not null and (tenant = '' or is_tenant(tenant)),
                    'tenant must be 1 to 100 letters, digits and . _ : -');
    perform require(kind = 'login' or tenant <> '', 'a portal link needs a tenant');
    perform require(case when array_position(capabilities, null) is null then
                        case when kind = 'login' then capabilities = '{}'
                             else 'view' = any(capabilities) and capabilities <@ '{view,manage,resend,secrets}'
                                 and cardinality(capabilities) <= 4 end
                    end, 'capabilities of a portal link must be view, and any of manage, resend and secrets');
    if kind = 'portal' then
        -- Locked: the link is completely before an erasure, which deletes it, or after its request, which is seen here.
        perform from tenants t where t.tenant = tenant for key share;
        if not found then
            raise exception using errcode = 'WH404', message = format('tenant %s does not exist', tenant);
        end if;
        perform refuse_if_erasing(tenant);
    end if;
    if (select count(*) from (
            select from console_links l
            where l.tenant = tenant and l.kind = kind and l.token_fingerprint = token_fingerprint and l.expires_at > now()
            limit max_live_links) l) >= max_live_links
    then
        raise exception using
            errcode = 'WH414',
            message = format('this token has %s links that were not used and have not expired', max_live_links);
    end if;
    expires_at := now() + make_interval(secs => expires_in_seconds);
    session_expires_at := coalesce(now() + make_interval(secs => session_seconds), expires_at);
    insert into console_links (code_sha256, kind, token_fingerprint, actor, tenant, capabilities, expires_at, session_expires_at)
    values (code_sha256, kind, token_fingerprint, actor, tenant, capabilities, expires_at, session_expires_at);
    -- After the lock of the tenant, as in an erasure, which deletes expired links too.
    perform remove_expired_console_links();
end
$$;
grant execute on function
    webhookd.create_console_link(bytea, text, text, text, integer, double precision, text, text[]) to webhookd_app;

-- Deletes a link and returns what its session may do; no row if there is no such link, or it has expired. Of two calls at the same
-- time, one waits for the other and then finds nothing. A link of another kind stays.
create or replace function webhookd.redeem_console_link(code_sha256 bytea, kind text)
returns table (token_fingerprint text, actor text, tenant text, capabilities text[], session_expires_at timestamptz)
language plpgsql security definer set search_path = pg_catalog, webhookd, pg_temp as $$
#variable_conflict use_variable
begin
    perform require(octet_length(code_sha256) = 32, 'code_sha256 must be 32 bytes');
    perform require(kind in ('login', 'portal'), 'kind must be login or portal');
    return query
    with redeemed as (
        delete from console_links l where l.code_sha256 = code_sha256 and l.kind = kind
        returning l.token_fingerprint, l.actor, l.tenant, l.capabilities, l.expires_at, l.session_expires_at
    )
    select r.token_fingerprint, r.actor, r.tenant::text, r.capabilities, r.session_expires_at
    from redeemed r where r.expires_at > now();
    perform remove_expired_console_links();
end
$$;
grant execute on function webhookd.redeem_console_link(bytea, text) to webhookd_app;
