-- Owns: the removal of old privileges. It revokes all privileges on our functions from all roles but the owners, in the
-- transaction that grants them again: CREATE OR REPLACE keeps old grants, and a grant that was removed from a file must
-- disappear from the database.

do $$
declare
    granted record;
begin
    for granted in
        select distinct p.oid::regprocedure as signature, a.grantee
        from pg_proc p cross join lateral aclexplode(p.proacl) a
        where p.pronamespace = 'webhookd'::regnamespace and a.grantee <> p.proowner
    loop
        execute format('revoke all on function %s from %s', granted.signature,
                       case when granted.grantee = 0 then 'public' else granted.grantee::regrole::text end);
    end loop;
end
$$;
