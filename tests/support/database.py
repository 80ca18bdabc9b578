"""Databases for the tests: logins and a migrated template, a shared copy per module, copies per test.

Takes a running Server; provides Database objects, which know their logins and close their connections.
"""

import contextlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import asyncpg

from tests.support import scram
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS, Server
from webhookd.db.migrations import migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

Login = Literal[
    "superuser", "migrator", "daemon", "application", "executor", "other_executor", "reader", "stranger"
]

# The attributes of each login, and the role that it gets after the migrations created the role.
ATTRIBUTES: dict[Login, str] = {
    "migrator": "LOGIN CREATEROLE",
    "daemon": "LOGIN",
    "application": "LOGIN",
    "executor": "LOGIN",
    "other_executor": "LOGIN",
    "reader": "LOGIN",
    "stranger": "LOGIN",
}
GRANTED_ROLE: dict[Login, str] = {
    "daemon": "webhookd_app",
    "application": "event_ingest_writer",
    "executor": "dot_executor",
    "other_executor": "dot_executor",
    "reader": "webhookd_reader",
}
# The roles of schema/roles.sql; an existing server may have them from an earlier run.
SCHEMA_ROLES = (
    "console_keeper",
    "dead_letter_operator",
    "dot_executor",
    "event_ingest_writer",
    "job_worker",
    "lease_cleaner",
    "router_worker",
    "saga_orchestrator",
    "subscription_admin",
    "webhookd_app",
    "webhookd_ingest",
    "webhookd_jobqueue",
    "retention_keeper",
    "webhookd_owner",
    "webhookd_reader",
    "workflow_admin",
)
# Before this version CREATEROLE alone allows the migrator to grant roles of other creators.
ADMIN_OPTION_MAJOR = 16
ROLES_LOCK_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Credentials:
    """The name and password of a login."""

    name: str
    password: str = field(repr=False)


@dataclass
class Database:
    """A database for tests, with the logins of its cluster."""

    name: str
    cluster: "Cluster"
    _connections: "list[tuple[Login, Connection]]" = field(default_factory=list, repr=False)
    _idle: "dict[Login, list[Connection]]" = field(default_factory=dict, repr=False)

    @property
    def server(self) -> Server:
        """The server on which the database is."""
        return self.cluster.server

    def login_name(self, login: Login) -> str:
        """Return the name of a login on the server, for SQL."""
        return self.cluster.logins[login].name

    def dsn(self, login: Login = "daemon") -> str:
        """Return the address of the database for a login."""
        return self.cluster.dsn(self.name, login)

    async def connect(self, login: Login = "daemon") -> "Connection":
        """Give a connection that no other part of the test uses; the end of the test takes it back."""
        idle = self._idle.get(login)
        connection = idle.pop() if idle else await self._open(login)
        self._connections.append((login, connection))
        return connection

    async def close(self) -> None:
        """Close all connections."""
        for _, connection in self._connections:
            await close_connection(connection)
        for connections in self._idle.values():
            for connection in connections:
                await close_connection(connection)
        self._connections.clear()
        self._idle.clear()

    async def release_connections(self) -> set[int]:
        """Reset the connections of the test and keep them for the next test; return their backends' ids."""
        for login, connection in self._connections:
            if await reset_connection(connection):
                self._idle.setdefault(login, []).append(connection)
        self._connections.clear()
        return {
            connection.get_server_pid() for connections in self._idle.values() for connection in connections
        }

    async def _open(self, login: Login) -> "Connection":
        return await asyncpg.connect(self.dsn(login), timeout=CONNECT_TIMEOUT_SECONDS)


class SharedDatabase:
    """One migrated database for the tests of a module, emptied after each test.

    A copy per test took 100 ms of CPU time: 17 to copy, 11 to drop, 17 to connect twice and disconnect, and
    36 because new sessions must load catalogs and plan every statement. To empty the tables and to keep the
    sessions takes 10 ms. After a test that changed the schema, the next test gets a new copy.
    """

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._database: Database | None = None
        self._superuser: Connection | None = None
        self._empty_statements = ""

    async def take(self) -> Database:
        """Return the database, empty."""
        if self._database is None:
            self._database = await self._cluster.create_database(migrated=True)
            self._superuser = await asyncpg.connect(
                self._database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS
            )
            await self._superuser.execute(WATCH_DDL)
            self._empty_statements = await empty_statements(self._superuser)
        return self._database

    async def give_back(self) -> None:
        """Empty the database, or drop it if the test changed more than rows."""
        assert self._database is not None
        assert self._superuser is not None
        kept_pids = await self._database.release_connections()
        await self._superuser.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = current_database() and backend_type = 'client backend' and pid <> all ($1)",
            [*kept_pids, self._superuser.get_server_pid()],
        )
        if await self._superuser.fetchval(IS_CHANGED):
            await self.drop()
        else:
            await self._superuser.execute(self._empty_statements)

    async def drop(self) -> None:
        """Drop the database, if there is one."""
        if self._database is not None and self._superuser is not None:
            await close_connection(self._superuser)
            await self._cluster.drop_database(self._database)
        self._database = self._superuser = None


# An event trigger notes every committed DDL command; rolled back DDL rolls back its note.
WATCH_DDL = """
    create schema test_bed;
    create table test_bed.ddl_commands (tag text);
    create function test_bed.note_ddl() returns event_trigger language plpgsql security definer
        set search_path = pg_catalog, pg_temp
        as $$ begin insert into test_bed.ddl_commands values (tg_tag); end $$;
    create event trigger test_bed_note_ddl on ddl_command_end execute function test_bed.note_ddl();
"""
# ALTER DATABASE ... SET changes a shared catalog, for which event triggers do not fire.
IS_CHANGED = """
    select exists (select from test_bed.ddl_commands)
        or exists (select from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase
            where d.datname = current_database())
"""


async def empty_statements(superuser: "Connection") -> str:
    """Return SQL that brings every table back to the rows and every sequence back to the value it has now.

    DELETE, not TRUNCATE: TRUNCATE makes new files and throws away every cached plan (12 ms instead of 2).
    """
    statements = ["set local session_replication_role = replica"]
    copies = []
    for table in await superuser.fetch(
        "select oid::regclass::text as name, relname from pg_class"
        " where relkind in ('r', 'p') and relnamespace = 'webhookd'::regnamespace"
    ):
        statements.append(f"delete from {table['name']}")
        if await superuser.fetchval(f"select exists (select from {table['name']})"):
            copy = f"test_bed.{table['relname']}"
            columns = await superuser.fetchval(
                "select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute"
                " where attrelid = $1::text::regclass and attnum > 0"
                " and not attisdropped and attgenerated = ''",
                table["name"],
            )
            copies.append(f"create table {copy} as select {columns} from {table['name']}")
            statements.append(
                f"insert into {table['name']} ({columns}) overriding system value"
                f" select {columns} from {copy}"
            )
    sequences = await superuser.fetch("""
        select format('%I.%I', schemaname, sequencename) as name, coalesce(last_value, start_value) as value,
               last_value is not null as is_called
        from pg_sequences where schemaname = 'webhookd'
    """)
    statements.extend(
        f"select setval('{name}', {value}, {is_called})" for name, value, is_called in sequences
    )
    if copies:
        await superuser.execute("; ".join([*copies, "delete from test_bed.ddl_commands"]))
    # The simple query protocol runs all of them in one transaction.
    return "; ".join(statements)


class Cluster:
    """Logins and a migrated template on one server.

    All names have a random prefix, so that two runs can share an existing server.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.prefix = f"webhookd_test_{secrets.token_hex(4)}"
        self.template_name = f"{self.prefix}_template"
        self.logins: dict[Login, Credentials] = {
            login: Credentials(f"{self.prefix}_{login}", secrets.token_hex(16)) for login in ATTRIBUTES
        }
        self._databases_made = 0

    def dsn(self, database: str, login: Login) -> str:
        """Return the address of a database for a login."""
        if login == "superuser":
            return self.server.dsn(database)
        credentials = self.logins[login]
        return self.server.dsn(database, credentials.name, credentials.password)

    @contextlib.asynccontextmanager
    async def superuser(self) -> "AsyncIterator[Connection]":
        """Connect as a superuser to the maintenance database."""
        connection = await asyncpg.connect(self.server.dsn(), timeout=CONNECT_TIMEOUT_SECONDS)
        try:
            yield connection
        finally:
            await close_connection(connection)

    async def prepare(self) -> None:
        """Create the logins and the template, and migrate it as the login `migrator`."""
        async with self.superuser() as superuser:
            await wait_for_other_runs(superuser)
            for login, credentials in self.logins.items():
                secret = scram.stored(credentials.password)
                await superuser.execute(
                    f"CREATE ROLE {credentials.name} {ATTRIBUTES[login]} PASSWORD '{secret}'"
                )
            await self._lend_existing_roles(superuser)
            await superuser.execute(self._empty_statement(self.template_name))
            await migrate(self.dsn(self.template_name, "migrator"))
            for login, role in GRANTED_ROLE.items():
                await superuser.execute(f"GRANT {role} TO {self.logins[login].name}")
            # Copying fails while a session is connected to the template.
            await superuser.execute(f"ALTER DATABASE {self.template_name} ALLOW_CONNECTIONS false")

    async def create_database(self, *, migrated: bool, encoding: str = "UTF8") -> Database:
        """Create a database owned by the migrator: a copy of the template, or an empty one."""
        self._databases_made += 1
        name = f"{self.prefix}_{self._databases_made}"
        async with self.superuser() as superuser:
            await superuser.execute(
                self._copy_statement(name) if migrated else self._empty_statement(name, encoding)
            )
        return Database(name, self)

    async def drop_database(self, database: Database) -> None:
        """Close the connections of the test, then drop its database."""
        await database.close()
        async with self.superuser() as superuser:
            await superuser.execute(f"DROP DATABASE IF EXISTS {database.name} WITH (FORCE)")

    async def remove(self) -> None:
        """Drop all databases and roles with this run's prefix."""
        async with self.superuser() as superuser:
            await wait_for_other_runs(superuser)
            for row in await superuser.fetch(
                "SELECT datname FROM pg_database WHERE starts_with(datname, $1)", self.prefix
            ):
                await superuser.execute(f"DROP DATABASE {row['datname']} WITH (FORCE)")
            await self._take_over_grants(superuser)
            for row in await superuser.fetch(
                "SELECT rolname FROM pg_roles WHERE starts_with(rolname, $1)", self.prefix
            ):
                await superuser.execute(f"DROP OWNED BY {row['rolname']}")
                await superuser.execute(f"DROP ROLE {row['rolname']}")

    def _copy_statement(self, name: str) -> str:
        # Medians of 15 copies, two rounds, of 15 tables and 40 functions without rows and without
        # fsync. FILE_COPY: 12 and 13 ms on PostgreSQL 15, 33 and 25 on 18. WAL_LOG: 16 and 16 ms
        # on 15, 36 and 32 on 18. With fsync, on an existing server, neither was measured.
        return (
            f"CREATE DATABASE {name} OWNER {self.logins['migrator'].name}"
            f" TEMPLATE {self.template_name} STRATEGY FILE_COPY"
        )

    def _empty_statement(self, name: str, encoding: str = "UTF8") -> str:
        # Only the locale C works with every encoding.
        locale = "" if encoding == "UTF8" else " LOCALE_PROVIDER libc LOCALE 'C'"
        return (
            f"CREATE DATABASE {name} OWNER {self.logins['migrator'].name}"
            f" TEMPLATE template0 ENCODING '{encoding}'{locale}"
        )

    async def _lend_existing_roles(self, superuser: "Connection") -> None:
        """Give the migrator the admin option on roles that another login created."""
        if self.server.major < ADMIN_OPTION_MAJOR:
            return
        migrator = self.logins["migrator"].name
        for row in await superuser.fetch(
            "SELECT rolname FROM pg_roles WHERE rolname = ANY ($1)", SCHEMA_ROLES
        ):
            # Exactly what the creator of a role gets from PostgreSQL 16 on.
            await superuser.execute(
                f"GRANT {row['rolname']} TO {migrator} WITH ADMIN TRUE, INHERIT FALSE, SET FALSE"
            )

    async def _take_over_grants(self, superuser: "Connection") -> None:
        """Repeat as superuser the migrator's grants between roles that stay after this run.

        From PostgreSQL 16 on dropping the migrator would revoke them, while another run may need them.
        """
        for row in await superuser.fetch(
            """
            SELECT roleid::regrole::text AS role, member::regrole::text AS member
            FROM pg_auth_members
            WHERE grantor = to_regrole($1) AND member::regrole::text = ANY ($2)
            """,
            self.logins["migrator"].name,
            SCHEMA_ROLES,
        ):
            await superuser.execute(f"GRANT {row['role']} TO {row['member']}")


async def wait_for_other_runs(superuser: "Connection") -> None:
    """Block role changes of other runs on the same server until this connection closes.

    Otherwise a role that another run creates between our check and our migration makes the migration fail.
    """
    await superuser.execute(f"SET lock_timeout = '{ROLES_LOCK_TIMEOUT_SECONDS}s'")
    await superuser.execute("SELECT pg_advisory_lock(hashtextextended('webhookd test roles', 0))")


async def reset_connection(connection: "Connection") -> bool:
    """Bring a session back to its first state; close it if it is inside a transaction or a statement."""
    if connection.is_closed():
        return False
    if not connection.is_in_transaction():
        with contextlib.suppress(OSError, asyncpg.InterfaceError, asyncpg.PostgresError):
            # RESET ALL, which is part of reset(), leaves these two alone.
            await connection.execute("reset session authorization; reset role")
            await connection.reset(timeout=CONNECT_TIMEOUT_SECONDS)
            return True
    connection.terminate()
    return False


async def close_connection(connection: "Connection") -> None:
    """Close a connection, or terminate it if a statement is still running."""
    if connection.is_closed():
        return
    try:
        await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)
    except (TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError):
        connection.terminate()
