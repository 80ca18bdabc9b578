"""Migrating: empty and up-to-date databases, concurrent migrations, refusals and failures.

The login `migrator` has CREATEROLE and owns the databases; it is not a superuser.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import asyncpg
import pytest

from tests.conftest import MakeDatabase
from tests.support.database import ADMIN_OPTION_MAJOR, Cluster, Credentials, Database, Login
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS, until_finished
from webhookd import __version__
from webhookd.core.errors import SchemaProblem, WebhookdError
from webhookd.db import migrations
from webhookd.db.connection import Connection
from webhookd.db.migrations import FunctionFile, Migration, Pending, Schema, check, migrate, shipped

NOTHING = Pending((), code=False, triggers=False)
EVERYTHING = Pending(shipped().migrations, code=True, triggers=True)
CODE = Pending((), code=True, triggers=False)

OWNING_ROLES = (
    "webhookd_owner, webhookd_ingest, router_worker, saga_orchestrator, job_worker, lease_cleaner,"
    " dead_letter_operator, subscription_admin, webhookd_jobqueue, retention_keeper, console_keeper"
)

PRE_RELEASE_MIGRATIONS = (
    "0001_tables",
    "0002_pages",
    "0003_speed",
    "0004_job_substrate",
    "0005_jobs",
    "0006_renewals",
    "0007_decisions",
    "0008_scheduled",
)

# The contents of the schema, without oids, so that two databases can be compared.
CATALOG = {
    "schema": "select nspowner::regrole::text from pg_namespace where nspname = 'webhookd'",
    "relations": """
        select c.relname, c.relkind, c.relowner::regrole, c.reloptions, c.relpersistence, c.relrowsecurity
        from pg_class c where c.relnamespace = 'webhookd'::regnamespace""",
    "columns": """
        select c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
               a.attidentity, a.attcollation::regcollation, a.attstorage, pg_get_expr(d.adbin, d.adrelid)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
        where c.relnamespace = 'webhookd'::regnamespace and a.attnum > 0 and not a.attisdropped""",
    "constraints": """
        select conrelid::regclass, conname, convalidated, pg_get_constraintdef(oid)
        from pg_constraint where connamespace = 'webhookd'::regnamespace""",
    "indexes": """
        select pg_get_indexdef(indexrelid), indisvalid from pg_index
        join pg_class c on c.oid = indrelid where c.relnamespace = 'webhookd'::regnamespace""",
    "types": """
        select t.typname, t.typowner::regrole, array(
            select e.enumlabel from pg_enum e where e.enumtypid = t.oid order by e.enumsortorder)
        from pg_type t where t.typnamespace = 'webhookd'::regnamespace""",
    "functions": """
        select proowner::regrole, pg_get_functiondef(oid)
        from pg_proc where pronamespace = 'webhookd'::regnamespace""",
    "triggers": """
        select pg_get_triggerdef(t.oid), t.tgenabled from pg_trigger t join pg_class c on c.oid = t.tgrelid
        where c.relnamespace = 'webhookd'::regnamespace and not t.tgisinternal""",
    "rights": """
        select what, grantor::regrole, case when grantee = 0 then 'public' else grantee::regrole::text end,
               privilege_type, is_grantable
        from (
            select 'schema' as what, coalesce(nspacl, acldefault('n', nspowner)) as acl
            from pg_namespace where nspname = 'webhookd'
            union all
            select c.oid::regclass::text, coalesce(
                c.relacl, acldefault(case when c.relkind = 'S' then 's' else 'r' end::"char", c.relowner))
            from pg_class c where c.relnamespace = 'webhookd'::regnamespace and c.relkind in ('r', 'S')
            union all
            select a.attrelid::regclass || '.' || a.attname, a.attacl
            from pg_attribute a join pg_class c on c.oid = a.attrelid
            where c.relnamespace = 'webhookd'::regnamespace and a.attacl is not null
            union all
            select p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner))
            from pg_proc p where p.pronamespace = 'webhookd'::regnamespace
        ) o cross join aclexplode(o.acl)""",
}


async def described(connection: Connection) -> dict[str, list[str]]:
    """Return everything that is in the schema."""
    return {
        what: sorted(str(tuple(row)) for row in await connection.fetch(query))
        for what, query in CATALOG.items()
    }


async def versions(connection: Connection) -> list[tuple[str, ...]]:
    """Return the xmin of each catalog row of the schema: any write changes the result."""
    rows = await connection.fetch(
        "select 'function', oid::text, xmin::text from pg_proc where pronamespace = 'webhookd'::regnamespace"
        " union all select 'relation', oid::text, xmin::text from pg_class"
        " where relnamespace = 'webhookd'::regnamespace"
        " union all select 'trigger', t.oid::text, t.xmin::text from pg_trigger t"
        " join pg_class c on c.oid = t.tgrelid where c.relnamespace = 'webhookd'::regnamespace"
        " union all select 'schema', oid::text, xmin::text from pg_namespace where nspname = 'webhookd'"
        " union all select 'migration', version::text, xmin::text from webhookd.schema_migrations"
        " union all select 'code', checksum, xmin::text from webhookd.schema_code"
        " order by 1, 2"
    )
    return [tuple(row) for row in rows]


async def has_schema(connection: Connection) -> bool:
    """Return whether the database has the schema webhookd."""
    return bool(
        await connection.fetchval("select exists (select from pg_namespace where nspname = 'webhookd')")
    )


async def until_all_wait(observer: Connection, count: int, holding: Connection) -> None:
    """Return when so many migrations, in any database, wait for the holder."""
    deadline = asyncio.get_running_loop().time() + CONDITION_TIMEOUT_SECONDS
    waiting = 0
    while asyncio.get_running_loop().time() < deadline:
        waiting = await observer.fetchval(
            "select count(*) from pg_stat_activity"
            " where application_name = 'webhookd' and $1 = any(pg_blocking_pids(pid))",
            holding.get_server_pid(),
        )
        if waiting == count:
            return
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    raise AssertionError(f"{waiting} migrations waited, not {count}")


def with_function(schema: Schema, statement: str, owner: str = "job_worker") -> Schema:
    """Return the schema with one more function file, at the end."""
    text = f"-- owner: {owner}\n{statement};"
    return replace(schema, functions=(*schema.functions, FunctionFile("zz_more", owner, text)))


def with_migration(schema: Schema, statement: str) -> Schema:
    """Return the schema with one more migration."""
    number = schema.migrations[-1].version + 1
    return replace(
        schema, migrations=(*schema.migrations, Migration(number, f"{number:04d}_more", statement))
    )


def with_replaced(schema: Schema, old: str, new: str) -> Schema:
    """Return the schema with a changed text in its functions."""
    assert any(old in file.text for file in schema.functions)
    return replace(
        schema,
        functions=tuple(replace(file, text=file.text.replace(old, new)) for file in schema.functions),
    )


def with_role(schema: Schema, role: str, beside: str) -> Schema:
    """Return the schema with one more role, of the same kind as another."""
    roles = schema.roles.replace(f"'{beside}'", f"'{role}', '{beside}'", 1)
    assert roles != schema.roles
    return replace(schema, roles=roles)


@asynccontextmanager
async def dropped_afterwards(cluster: Cluster, role: str) -> AsyncIterator[None]:
    """Drop a role at the end of the block."""
    try:
        yield
    finally:
        async with cluster.superuser() as superuser:
            if await superuser.fetchval("select to_regrole($1) is not null", role):
                await superuser.execute(f"drop owned by {role}")
                await superuser.execute(f"drop role {role}")


@pytest.fixture
async def second(cluster: Cluster) -> AsyncIterator[Credentials]:
    """A login with CREATEROLE that did not create the roles."""
    login = Credentials(f"{cluster.prefix}_second_{secrets.token_hex(4)}", "secret")
    async with dropped_afterwards(cluster, login.name):
        async with cluster.superuser() as superuser:
            await superuser.execute(f"create role {login.name} login createrole password '{login.password}'")
        yield login


# Migrating once


async def test_empty_database_gets_the_whole_schema(empty_database: Database, database: Database) -> None:
    """The result equals the template; everything belongs to the roles, not to the login."""
    assert await migrate(empty_database.dsn("migrator")) == EVERYTHING
    new = await described(await empty_database.connect("superuser"))
    assert new == await described(await database.connect("superuser"))
    assert all(new.values())
    assert empty_database.login_name("migrator") not in str(new)


async def test_applied_files_are_recorded(empty_database: Database) -> None:
    """The database records its migrations and functions, with checksums and webhookd's version."""
    await migrate(empty_database.dsn("migrator"))
    connection = await empty_database.connect("reader")
    rows = await connection.fetch(
        "select version, name, checksum, webhookd_version from webhookd.schema_migrations order by version"
    )
    assert [tuple(row) for row in rows] == [
        (migration.version, migration.name, migration.checksum, __version__)
        for migration in shipped().migrations
    ]
    code = await connection.fetch(
        "select part, checksum, webhookd_version from webhookd.schema_code order by part"
    )
    assert [tuple(row) for row in code] == [
        ("functions", shipped().code_checksum, __version__),
        ("triggers", shipped().triggers_checksum, __version__),
    ]


async def test_migrating_again_does_nothing(database: Database) -> None:
    """On an up-to-date database no row of the catalog is written."""
    superuser = await database.connect("superuser")
    before = await versions(superuser)
    assert await migrate(database.dsn("migrator")) == NOTHING
    assert await versions(superuser) == before


async def test_up_to_date_database_needs_no_privileges(database: Database) -> None:
    """The daemon's login can run migrate if nothing is pending."""
    assert await migrate(database.dsn("daemon")) == NOTHING


async def test_upgraded_database_equals_a_new_one(empty_database: Database, database: Database) -> None:
    """Migrating from older functions and privileges gives exactly what a new database gets."""
    older = with_function(
        with_replaced(shipped(), "must be at least 1", "must be one or more"),
        "create function webhookd.old(a integer default 1) returns integer language sql as 'select a'",
    )
    older = replace(older, grants=f"{older.grants}\ngrant delete on webhookd.events to webhookd_reader;")
    await migrate(empty_database.dsn("migrator"), older)
    superuser = await empty_database.connect("superuser")
    expected = await described(await database.connect("superuser"))
    assert await described(superuser) != expected
    assert await migrate(empty_database.dsn("migrator")) == CODE
    assert await described(superuser) == expected


# Concurrent migrations


async def test_concurrent_migrations_of_one_database(empty_database: Database, database: Database) -> None:
    """Both wait for the lock; then one applies everything, the other nothing, and both succeed."""
    holder, observer = await empty_database.connect("superuser"), await empty_database.connect("superuser")
    async with holder.transaction():
        await holder.execute("select pg_advisory_xact_lock($1)", migrations._LOCK_KEY)
        tasks = [asyncio.create_task(migrate(empty_database.dsn("migrator"))) for _ in range(2)]
        await until_all_wait(observer, 2, holder)
        assert not await has_schema(observer)
    for task in tasks:
        await until_finished(task)
    assert sorted([await task for task in tasks], key=bool) == [NOTHING, EVERYTHING]
    assert await described(observer) == await described(await database.connect("superuser"))


async def test_waiting_migration_continues_after_a_failed_one(empty_database: Database) -> None:
    """If the first of two concurrent migrations fails, the second applies everything."""
    holder, observer = await empty_database.connect("superuser"), await empty_database.connect("superuser")
    dsn = empty_database.dsn("migrator")
    broken = with_migration(shipped(), "select 1 / 0")
    async with holder.transaction():
        await holder.execute("select pg_advisory_xact_lock($1)", migrations._LOCK_KEY)
        failing = asyncio.create_task(migrate(dsn, broken))
        await until_all_wait(observer, 1, holder)
        succeeding = asyncio.create_task(migrate(dsn))
        await until_all_wait(observer, 2, holder)
    for task in (failing, succeeding):
        await until_finished(task)
    assert isinstance(failing.exception(), asyncpg.PostgresError | WebhookdError)
    assert await succeeding == EVERYTHING


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "rolled back"])
async def test_two_databases_create_a_role_concurrently(
    cluster: Cluster, make_database: MakeDatabase, *, committed: bool
) -> None:
    """Two migrations wait for a transaction that creates a role; both succeed, also after its rollback."""
    role = f"{cluster.prefix}_role_{secrets.token_hex(4)}"
    schema = with_role(shipped(), role, "event_ingest_writer")
    first, second, third = [await make_database() for _ in range(3)]
    holder, observer = await third.connect("migrator"), await third.connect("superuser")
    async with dropped_afterwards(cluster, role):
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(f"create role {role} nologin")
        tasks = [asyncio.create_task(migrate(each.dsn("migrator"), schema)) for each in (first, second)]
        await until_all_wait(observer, 2, holder)
        await (transaction.commit() if committed else transaction.rollback())
        for task in tasks:
            await until_finished(task)
        assert [await task for task in tasks] == [EVERYTHING] * 2
        assert await observer.fetchval("select to_regrole($1) is not null", role)
        superusers = [await each.connect("superuser") for each in (first, second)]
        assert await described(superusers[0]) == await described(superusers[1])


async def test_two_databases_grant_a_role_concurrently(cluster: Cluster, make_database: MakeDatabase) -> None:
    """The same for the migrator's membership in an owning role."""
    role = f"{cluster.prefix}_role_{secrets.token_hex(4)}"
    schema = with_role(shipped(), role, "webhookd_owner")
    first, second, third = [await make_database() for _ in range(3)]
    holder, observer = await third.connect("migrator"), await third.connect("superuser")
    async with dropped_afterwards(cluster, role):
        await holder.execute(f"create role {role} nologin")
        async with holder.transaction():
            await holder.execute(f"grant {role} to {third.login_name('migrator')}")
            tasks = [asyncio.create_task(migrate(each.dsn("migrator"), schema)) for each in (first, second)]
            await until_all_wait(observer, 2, holder)
        for task in tasks:
            await until_finished(task)
        assert [await task for task in tasks] == [EVERYTHING] * 2


async def test_two_databases_of_one_cluster_are_independent(
    cluster: Cluster, make_database: MakeDatabase
) -> None:
    """Roles are shared, events are not; privileges hold in both, and dropping one keeps the other intact."""
    first, second = await make_database(), await make_database()
    tasks = [asyncio.create_task(migrate(each.dsn("migrator"))) for each in (first, second)]
    for task in tasks:
        await until_finished(task)
        assert await task == EVERYTHING
    for database in (first, second):
        application, daemon = await database.connect("application"), await database.connect("daemon")
        assert await daemon.fetchval("select count(*) from webhookd.events") == 0
        assert await application.fetchval("select webhookd.publish('a', '{}')") == 1
        assert await daemon.fetchval("select events from webhookd.route_events(10)") == 1
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await application.execute("delete from webhookd.events")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await daemon.execute("insert into webhookd.events (event_type, payload) values ('a', '{}')")
    await cluster.drop_database(first)
    application, daemon = await second.connect("application"), await second.connect("daemon")
    assert await application.fetchval("select webhookd.publish('a', '{}')") == 2
    assert await daemon.fetchval("select events from webhookd.route_events(10)") == 1
    assert await migrate(second.dsn("migrator")) == NOTHING


# A failed migration changes nothing


BROKEN: dict[str, Callable[[Schema], Schema]] = {
    "migration": lambda schema: with_migration(schema, "create table webhookd.half (); select 1 / 0"),
    "migration's syntax": lambda schema: with_migration(schema, "create tabel webhookd.half ()"),
    "function": lambda schema: with_function(schema, "create function webhookd.half() returns nonsense"),
    "owner": lambda schema: with_function(schema, "select 1", owner="no_such_role"),
    "planner": lambda schema: replace(schema, planner="alter function webhookd.no set jit = off"),
    "rights": lambda schema: replace(
        schema, grants=f"{schema.grants}\ngrant select on webhookd.no to public"
    ),
}
broken = pytest.mark.parametrize("what", BROKEN)


@broken
async def test_failed_migration_keeps_a_database_empty(empty_database: Database, what: str) -> None:
    """After any failure an empty database is still empty, and can be migrated."""
    dsn = empty_database.dsn("migrator")
    with pytest.raises((asyncpg.PostgresError, WebhookdError)):
        await migrate(dsn, BROKEN[what](shipped()))
    assert not await has_schema(await empty_database.connect("superuser"))
    assert await migrate(dsn) == EVERYTHING


@broken
async def test_failed_migration_keeps_the_schema(database: Database, what: str) -> None:
    """After any failure an existing schema is unchanged, to the row, and works."""
    superuser = await database.connect("superuser")
    before = await described(superuser), await versions(superuser)
    with pytest.raises((asyncpg.PostgresError, WebhookdError)):
        await migrate(
            database.dsn("migrator"), BROKEN[what](with_replaced(shipped(), "at least", "not under"))
        )
    assert (await described(superuser), await versions(superuser)) == before
    assert await check(database.dsn("daemon")) == NOTHING


# Refused databases


async def refused_unchanged(database: Database, schema: Schema | None = None) -> str:
    """Return the message of migrate and check, which change nothing."""
    superuser = await database.connect("superuser")
    before = await versions(superuser)
    messages = []
    for call in (migrate, check):
        with pytest.raises(SchemaProblem) as caught:
            await call(database.dsn("migrator"), schema)
        messages.append(str(caught.value))
    assert await versions(superuser) == before
    assert messages[0] == messages[1]
    assert len(messages[0].splitlines()) == 1
    return messages[0]


async def test_edited_migration_is_refused(database: Database) -> None:
    """A migration that differs by a single character from the applied one is named and refused."""
    later = with_migration(shipped(), "create table webhookd.more ()")
    await migrate(database.dsn("migrator"), later)
    edited = with_migration(shipped(), "create table webhookd.more () ")
    assert await refused_unchanged(database, edited) == (
        "migration 0002_more differs from the one that was applied to the database:"
        " an applied migration must never be edited"
    )


@pytest.mark.parametrize("migrations_known", [1, 8], ids=["before 0002", "latest"])
async def test_database_of_a_pre_release_is_refused(database: Database, migrations_known: int) -> None:
    """The migration table of a pre-release gives one sentence that says what to do."""
    superuser = await database.connect("superuser")
    await superuser.execute("delete from webhookd.schema_migrations")
    for number, name in enumerate(PRE_RELEASE_MIGRATIONS[:migrations_known], start=1):
        await superuser.execute(
            "insert into webhookd.schema_migrations (version, name, checksum, webhookd_version)"
            " values ($1, $2, $3, '0.1.0')",
            number,
            name,
            "another checksum",
        )
    assert await refused_unchanged(database) == (
        "this database was created by a pre-release of webhookd and cannot be migrated: create a new database"
        " (for the embedded server: set database.data_dir to an empty folder)"
    )


async def test_later_migration_is_refused_as_newer(database: Database) -> None:
    """An unknown migration means that webhookd must be upgraded."""
    superuser = await database.connect("superuser")
    await superuser.execute(
        "insert into webhookd.schema_migrations (version, name, checksum, webhookd_version)"
        " values (9998, '9998_future', 'x', '99.0.0'), (9999, '9999_future', 'x', '99.0.0')"
    )
    message = await refused_unchanged(database)
    assert "newer than this webhookd" in message
    assert "migration 9999" in message
    assert f"webhookd {__version__} knows up to {shipped().migrations[-1].version:04d}" in message


async def set_code_version(database: Database, version: str, checksum: str = "another") -> None:
    """Record another version and checksum of the functions."""
    superuser = await database.connect("superuser")
    await superuser.execute(
        "update webhookd.schema_code set webhookd_version = $1, checksum = $2 where part = 'functions'",
        version,
        checksum,
    )


@pytest.mark.parametrize("version", ["99.0.0", "0.10.0", "99.0.0rc1", "99.0"])
async def test_newer_functions_are_refused_as_newer(database: Database, version: str) -> None:
    """Functions of a later release are not replaced by an earlier one."""
    await set_code_version(database, version)
    message = await refused_unchanged(database)
    assert "newer than this webhookd" in message
    assert f"they are from {version}, this is {__version__}" in message


async def test_same_functions_of_a_newer_release_are_accepted(database: Database) -> None:
    """A later release without changed functions is not refused."""
    await set_code_version(database, "99.0.0", shipped().code_checksum)
    assert await check(database.dsn("migrator")) == NOTHING


@pytest.mark.parametrize("version", ["0.0.9", __version__])
async def test_older_functions_are_replaced(database: Database, version: str) -> None:
    """Functions of an earlier release, or of another build of this one, are replaced."""
    await set_code_version(database, version)
    assert await check(database.dsn("migrator")) == CODE
    assert await migrate(database.dsn("migrator")) == CODE
    connection = await database.connect("reader")
    row = await connection.fetchrow(
        "select checksum, webhookd_version from webhookd.schema_code where part = 'functions'"
    )
    assert row is not None
    assert tuple(row) == (shipped().code_checksum, __version__)


def test_planner_settings_are_only_in_planner_sql() -> None:
    """A function file sets nothing but search_path; test_roles.py says which functions do without."""
    for file in shipped().functions:
        headers = re.findall(r"^create or replace function.*?\$\$", file.text, re.MULTILINE | re.DOTALL)
        for header in headers:
            assert set(re.findall(r"\bset (\w+) =", header)) <= {"search_path"}, header


async def test_planner_settings_survive_a_changed_function(database: Database) -> None:
    """CREATE OR REPLACE resets a function's settings; migrating applies planner.sql after it."""
    settings = """
        select proname, array(select s from unnest(proconfig) s order by s) as settings from pg_proc
        where pronamespace = 'webhookd'::regnamespace order by oid
        """
    superuser = await database.connect("superuser")
    before = await superuser.fetch(settings)
    assert sum("jit=off" in row["settings"] for row in before) == shipped().planner.count("alter function")
    changed = with_replaced(shipped(), "batch_size must be at least 1", "batch_size must be one or more")
    assert await migrate(database.dsn("migrator"), changed) == CODE
    assert await superuser.fetch(settings) == before


async def test_changed_planner_settings_are_applied(database: Database) -> None:
    """planner.sql belongs to the checksum of the functions and privileges."""
    superuser = await database.connect("superuser")
    planner = shipped().planner.replace("set enable_nestloop = off", "set enable_nestloop = on")
    assert await migrate(database.dsn("migrator"), replace(shipped(), planner=planner)) == CODE
    assert "enable_nestloop=on" in await superuser.fetchval(
        "select proconfig from pg_proc where proname = 'report_results'"
    )


def test_overloads_have_one_owner() -> None:
    """Ownership is transferred by name."""
    owners: dict[str, set[str]] = {}
    for file in shipped().functions:
        for name in migrations.created_names(file):
            owners.setdefault(name, set()).add(file.owner)
    assert len(owners) > 50
    assert [name for name, of in owners.items() if len(of) > 1] == []


@pytest.mark.parametrize("other", ["saga_orchestrator", "webhookd_owner"])
async def test_ownership_of_functions_is_transferred(database: Database, other: str) -> None:
    """Functions of another owner get their right owner, and obsolete overloads are dropped."""
    superuser = await database.connect("superuser")
    before = await described(superuser)
    functions = await superuser.fetch(
        "select oid::regprocedure::text as signature from pg_proc "
        "where pronamespace = 'webhookd'::regnamespace"
    )
    for function in functions:
        await superuser.execute(f"alter function {function['signature']} owner to {other}")
    await superuser.execute(
        "create function webhookd.publish(earlier text) returns text language sql as 'select $1';"
        f"alter function webhookd.publish(text) owner to {other}"
    )
    await set_code_version(database, "0.0.9")
    assert await migrate(database.dsn("migrator")) == CODE
    assert await described(superuser) == before


@pytest.mark.parametrize(
    "content",
    ["", "create table webhookd.events ()", "create table webhookd.schema_migrations (version text)"],
    ids=["empty", "with tables", "with migrations of its own"],
)
async def test_foreign_schema_is_refused(empty_database: Database, content: str) -> None:
    """A schema with our name that webhookd did not create is refused and not changed."""
    migrator = await empty_database.connect("migrator")
    await migrator.execute(f"create schema webhookd; {content}")
    tables = "select array(select relname::text from pg_class where relnamespace = 'webhookd'::regnamespace)"
    before = await migrator.fetchval(tables)
    for call in (migrate, check):
        with pytest.raises(SchemaProblem, match="a schema named webhookd that webhookd did not create"):
            await call(empty_database.dsn("migrator"))
    assert await migrator.fetchval(tables) == before


async def test_other_encoding_is_refused(make_database: MakeDatabase) -> None:
    """A database that cannot store every payload is refused, and stays empty."""
    latin = await make_database(encoding="LATIN1")
    for call in (migrate, check):
        with pytest.raises(SchemaProblem, match=r"^the database's encoding is LATIN1: webhookd needs UTF8$"):
            await call(latin.dsn("migrator"))
    assert not await has_schema(await latin.connect("superuser"))


# Changed functions and privileges


async def test_changed_function_keeps_its_oid(database: Database) -> None:
    """A function is replaced in place, so that references to it stay valid."""
    superuser = await database.connect("superuser")
    oids = "select array(select oid from pg_proc where pronamespace = 'webhookd'::regnamespace order by oid)"
    source = "select prosrc from pg_proc where oid = 'webhookd.route_events'::regproc"
    before = await superuser.fetchval(oids)
    changed = with_replaced(shipped(), "batch_size must be at least 1", "batch_size must be one or more")
    assert await migrate(database.dsn("migrator"), changed) == CODE
    assert await superuser.fetchval(oids) == before
    assert "must be one or more" in await superuser.fetchval(source)
    daemon = await database.connect("daemon")
    with pytest.raises(asyncpg.PostgresError, match="batch_size must be one or more"):
        await daemon.execute("select webhookd.route_events(0)")


async def test_removed_function_is_dropped(database: Database) -> None:
    """A function that is in no file is dropped, whichever role owns it, also an old overload."""
    older = shipped()
    for owner in ("job_worker", "webhookd_owner"):
        older = with_function(
            older,
            f"create function webhookd.of_{owner}(a integer) returns integer language sql as 'select a';"
            f"create function webhookd.of_{owner}(a text) returns text language sql as 'select a'",
            owner,
        )
    superuser = await database.connect("superuser")
    count = "select count(*) from pg_proc where proname like 'of\\_%'"
    expected = await described(superuser)
    await migrate(database.dsn("migrator"), older)
    assert await superuser.fetchval(count) == 4
    await migrate(database.dsn("migrator"))
    assert await superuser.fetchval(count) == 0
    assert await described(superuser) == expected


@pytest.mark.parametrize(
    "right",
    [
        "execute on function webhookd.bury(bigint[]) to webhookd_app",
        "execute on function webhookd.publish(text, json, text, text, text, jsonb) to public",
        "select on webhookd.subscription_secrets to webhookd_reader",
        "update (payload) on webhookd.events to job_worker",
        "select on webhookd.events to public",
        "delete on webhookd.webhook_delivery_jobs to webhookd_app with grant option",
        "usage on sequence webhookd.events_id_seq to webhookd_app",
        "create on schema webhookd to webhookd_app",
    ],
)
async def test_removed_privilege_is_revoked(database: Database, right: str) -> None:
    """A privilege that only an earlier release granted is revoked."""
    superuser = await database.connect("superuser")
    expected = await described(superuser)
    generous = replace(shipped(), grants=f"{shipped().grants}\ngrant {right};")
    await migrate(database.dsn("migrator"), generous)
    assert (await described(superuser))["rights"] != expected["rights"]
    await migrate(database.dsn("migrator"))
    assert await described(superuser) == expected


async def test_owning_roles_cannot_create_after_a_migration(database: Database) -> None:
    """After a migration only the schema's owner has CREATE on it."""
    superuser = await database.connect("superuser")
    creators = await superuser.fetch(
        "select rolname from pg_roles where not rolsuper"
        " and has_schema_privilege(oid, 'webhookd', 'create') and rolname !~ '^webhookd_test'"
    )
    assert [row["rolname"] for row in creators] == ["webhookd_owner"]


# Logins


async def one_problem(call: Awaitable[Pending]) -> str:
    """Return the message of a SchemaProblem, which is one line."""
    with pytest.raises(SchemaProblem) as caught:
        await call
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


async def test_login_without_createrole(empty_database: Database) -> None:
    """If the roles exist, a login without privileges gets one clear line."""
    message = await one_problem(migrate(empty_database.dsn("stranger")))
    assert "this login cannot migrate" in message
    assert "CREATEROLE" in message
    assert not await has_schema(await empty_database.connect("superuser"))


async def test_login_without_createrole_on_a_new_cluster(cluster: Cluster, empty_database: Database) -> None:
    """If a role is missing, too; and the role is not created."""
    role = f"{cluster.prefix}_role_{secrets.token_hex(4)}"
    schema = with_role(shipped(), role, "webhookd_owner")
    message = await one_problem(migrate(empty_database.dsn("stranger"), schema))
    assert "this login cannot migrate" in message
    assert "CREATEROLE" in message
    superuser = await empty_database.connect("superuser")
    assert await superuser.fetchval("select to_regrole($1)", role) is None
    assert not await has_schema(superuser)


async def test_second_migrator_gets_the_grant_to_run(
    cluster: Cluster, empty_database: Database, second: Credentials
) -> None:
    """Since PostgreSQL 16 a second login with CREATEROLE gets the GRANT to run; before, it succeeds."""
    superuser = await empty_database.connect("superuser")
    await superuser.execute(f"grant create on database {empty_database.name} to {second.name}")
    dsn = cluster.server.dsn(empty_database.name, second.name, second.password)
    if cluster.server.major >= ADMIN_OPTION_MAJOR:
        with pytest.raises(SchemaProblem) as caught:
            await migrate(dsn)
        message, grant = str(caught.value).split(" (As that login or a superuser: ")
        assert message == (
            "the migration failed: "
            f'role "webhookd_owner" was created by another login, and "{second.name}" cannot use it'
        )
        assert not await has_schema(superuser)
        await superuser.execute(grant.removesuffix(")"))
    assert await migrate(dsn) == EVERYTHING
    assert await migrate(empty_database.dsn("migrator")) == NOTHING


async def test_second_migrator_can_upgrade(cluster: Cluster, database: Database, second: Credentials) -> None:
    """With the roles granted, another login can upgrade the schema."""
    superuser = await database.connect("superuser")
    expected = await described(superuser)
    await superuser.execute(f"grant {OWNING_ROLES} to {second.name}")
    await set_code_version(database, "0.0.9")
    assert await migrate(cluster.server.dsn(database.name, second.name, second.password)) == CODE
    assert await described(superuser) == expected


async def test_login_without_create_on_the_database(
    cluster: Cluster, empty_database: Database, second: Credentials
) -> None:
    """CREATEROLE and the roles are not enough: the message names CREATE on the database."""
    superuser = await empty_database.connect("superuser")
    await superuser.execute(f"grant {OWNING_ROLES} to {second.name}")
    message = await one_problem(
        migrate(cluster.server.dsn(empty_database.name, second.name, second.password))
    )
    assert "CREATE on the database" in message
    assert not await has_schema(superuser)


# Check, and partial migrations


async def test_check_returns_what_is_pending(empty_database: Database) -> None:
    """At any time check returns what migrate would apply, and changes nothing."""
    dsn = empty_database.dsn("migrator")
    superuser = await empty_database.connect("superuser")
    assert await check(dsn) == EVERYTHING
    assert EVERYTHING.describe() == [
        *(migration.name for migration in shipped().migrations),
        "functions and privileges",
        "triggers",
    ]
    assert not await has_schema(superuser)
    await migrate(dsn)
    before = await versions(superuser)
    assert await check(dsn) == NOTHING
    later = with_migration(shipped(), "create table webhookd.more ()")
    assert await check(dsn, later) == Pending(later.migrations[-1:], code=False, triggers=False)
    changed = with_replaced(shipped(), "at least 1", "one or more")
    assert await check(dsn, changed) == CODE
    assert await versions(superuser) == before


async def test_second_migration_is_applied_alone(database: Database) -> None:
    """A new migration does not apply unchanged functions again."""
    superuser = await database.connect("superuser")
    before = await versions(superuser)
    later = with_migration(shipped(), "create table webhookd.more (id integer)")
    assert await migrate(database.dsn("migrator"), later) == Pending(
        later.migrations[-1:], code=False, triggers=False
    )
    assert set(before) <= set(await versions(superuser))
    owner = await superuser.fetchval("select relowner::regrole::text from pg_class where relname = 'more'")
    assert owner == "webhookd_owner"


@pytest.mark.parametrize("login", ["daemon", "reader"])
async def test_daemon_login_can_check(database: Database, login: Login) -> None:
    """A login with only webhookd_app or webhookd_reader can see what is pending."""
    assert await check(database.dsn(login)) == NOTHING
    assert await check(database.dsn(login), with_replaced(shipped(), "at least 1", "one or more")) == CODE


@pytest.mark.parametrize("login", ["application", "stranger"])
async def test_login_without_read_privileges(database: Database, login: Login) -> None:
    """A login that cannot read the schema gets one line with the role to grant."""
    for call in (check, migrate):
        message = await one_problem(call(database.dsn(login)))
        assert "this login cannot read the schema" in message
        assert "one with the role webhookd_app" in message


async def test_changed_function_locks_no_table(database: Database) -> None:
    """If only functions changed, triggers are not replaced, and open transactions do not block."""
    application = await database.connect("application")
    changed = with_replaced(shipped(), "at least 1", "one or more")
    async with application.transaction():
        await application.execute("select webhookd.publish('order.created', '{}')")
        await application.execute("select 1 from webhookd.subscriptions")
        assert await migrate(database.dsn("migrator"), changed) == CODE


async def test_changed_triggers_are_applied_alone(database: Database) -> None:
    """They wait for an open transaction only briefly, because other sessions queue behind the lock."""
    changed = replace(shipped(), triggers=shipped().triggers + "\n-- changed\n")
    application = await database.connect("application")
    async with application.transaction():
        await application.execute("select webhookd.publish('order.created', '{}')")
        with pytest.raises(SchemaProblem, match="lock timeout"):
            await migrate(database.dsn("migrator"), changed)
    assert await migrate(database.dsn("migrator"), changed) == Pending((), code=False, triggers=True)


async def test_migrating_ignores_operators_of_other_schemas(empty_database: Database) -> None:
    """CHECKs do not use an operator of the schema public on the migrator's search path."""
    superuser = await empty_database.connect("superuser")
    await superuser.execute(
        """
        create function public.always(varchar, varchar) returns boolean language sql as 'select true';
        create operator public.~ (leftarg = varchar, rightarg = varchar, function = public.always);
        """
    )
    await migrate(empty_database.dsn("migrator"))
    with pytest.raises(asyncpg.CheckViolationError):
        await superuser.execute(
            "insert into webhookd.events (event_type, payload) values ('not a type !', '1')"
        )
