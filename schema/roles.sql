-- Owns: the roles, which belong to the PostgreSQL cluster. Grants the owning roles to the login that migrates.
--
-- Advisory locks are per database, so two databases that are migrated at the same time may both try to create a role: "already
-- exists" is success. Runs in a transaction of its own, before the migration, so that the other database waits only for these
-- few statements.

do $$
declare
    -- These own tables or functions. Only the migrator may be a member, because a member could change them.
    owning constant text[] := array[
        'webhookd_owner', 'webhookd_ingest', 'router_worker', 'saga_orchestrator', 'job_worker',
        'lease_cleaner', 'dead_letter_operator', 'subscription_admin', 'webhookd_jobqueue', 'retention_keeper', 'console_keeper'];
    -- These own nothing. They are granted to people, applications and the daemon's login.
    granted constant text[] := array['event_ingest_writer', 'webhookd_reader', 'workflow_admin', 'dot_executor', 'webhookd_app'];
    role_name text;
begin
    foreach role_name in array owning || granted loop
        if not exists (select from pg_roles where rolname = role_name) then
            begin
                execute format('create role %I nologin', role_name);
            exception when duplicate_object or unique_violation then
                null;  -- the migration of another database created it in between
            end;
        end if;
    end loop;

    foreach role_name in array owning loop
        -- Always true for a superuser. Since PostgreSQL 16 the creator of a role has ADMIN on it, but neither its privileges
        -- nor SET ROLE, so the migrator grants the role to itself.
        if not pg_has_role(current_user, role_name, 'USAGE') then
            begin
                execute format('grant %I to %I', role_name, current_user);
            exception
                when unique_violation then
                    null;  -- the same login migrates another database at the same time
                when insufficient_privilege then
                    if not (select rolcreaterole from pg_roles where rolname = current_user) then
                        raise;
                    end if;
                    raise exception using
                        errcode = 'WH403',
                        message = format('role "%s" was created by another login, and "%s" cannot use it',
                                         role_name, current_user),
                        hint = format('As that login or a superuser: GRANT %s TO %I WITH ADMIN OPTION',
                                      array_to_string(owning || granted, ', '), current_user);
            end;
        end if;
    end loop;

    -- The daemon reads with the privileges of webhookd_reader, which cannot see signing secrets, and uses the job queue with
    -- those of workflow_admin, the same as people.
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
