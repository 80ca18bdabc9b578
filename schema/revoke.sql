-- Owns: the clean slate. Every right on our functions is taken back, from everybody but their owners, in the transaction
-- that gives them anew: CREATE OR REPLACE keeps old grants, and one taken out of a file must be gone from the database.

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
