-- Owns: the cluster's roles. Reads: who migrates. Hands on: roles that the migrations and functions can belong to.
--
-- Roles are cluster-wide while advisory locks are per database, so two databases migrated at once may both
-- try to make one: "already exists" is success. Runs in a transaction of its own, before the schema's, so that
-- the other database waits for these few statements and not for a whole migration.

do $$
declare
    -- Own functions or tables, so nobody but the migrator may be a member: a member could change them.
    owning constant text[] := array[
        'webhookd_owner', 'webhookd_ingest', 'router_worker', 'saga_orchestrator', 'job_worker',
        'lease_cleaner', 'dead_letter_operator', 'subscription_admin', 'webhookd_jobs'];
    -- Own nothing: made to be granted to people, applications and the daemon's login.
    granted constant text[] := array['event_ingest_writer', 'webhookd_reader', 'workflow_admin', 'dot_executor', 'webhookd_app'];
    role_name text;
begin
    foreach role_name in array owning || granted loop
        if not exists (select from pg_roles where rolname = role_name) then
            begin
                execute format('create role %I nologin', role_name);
            exception when duplicate_object or unique_violation then
                null;  -- another database's migration made it between our look and our try
            end;
        end if;
    end loop;

    foreach role_name in array owning loop
        -- True for a superuser without any grant. From PostgreSQL 16 on, having made a role gives ADMIN on it
        -- but neither its rights nor SET ROLE: the migrator grants it to itself.
        if not pg_has_role(current_user, role_name, 'USAGE') then
            begin
                execute format('grant %I to %I', role_name, current_user);
            exception
                when unique_violation then
                    null;  -- the same login migrates a second database at this moment
                when insufficient_privilege then
                    if not (select rolcreaterole from pg_roles where rolname = current_user) then
                        raise;
                    end if;
                    raise exception using
                        errcode = 'WH403',
                        message = format('role "%s" was made by another login, and "%s" may not use it',
                                         role_name, current_user),
                        hint = format('As that login or a superuser: GRANT %s TO %I WITH ADMIN OPTION',
                                      array_to_string(owning || granted, ', '), current_user);
            end;
        end if;
    end loop;

    -- The daemon reads as webhookd_reader, which sees no signing secret; and its service `jobs` and its API move jobs as
    -- workflow_admin does: what that may is decided once, for people and for the daemon.
    foreach role_name in array '{webhookd_reader,workflow_admin}'::text[] loop
        if not pg_has_role('webhookd_app', role_name, 'USAGE') then
            begin
                execute format('grant %I to webhookd_app', role_name);
            exception when unique_violation then
                null;
            end;
        end if;
    end loop;
end
$$;
