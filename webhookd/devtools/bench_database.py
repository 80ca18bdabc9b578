"""The database of a benchmark: created on the configured server under its own name, and dropped at the end.

Reads names and sessions of the other databases, and changes none of them. The counters at the end are shared
with `make bench`.
"""

import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import anyio
import click
import msgspec

from webhookd.core.configuration import data_dir
from webhookd.core.errors import DatabaseUnavailable, SchemaProblem, WebhookdError
from webhookd.core.settings import Settings, with_database
from webhookd.daemon.setup import Database, opened
from webhookd.db import migrations
from webhookd.db.connection import Connection, ServerFacts, connected, fetch_one, fetch_server_facts
from webhookd.devtools.processes import temporary_folder
from webhookd.embedded.folder import is_new

PREFIX = "webhookd_bench_"
# Beside the daemon's connections: one to measure, and one to create and drop the database.
OWN_CONNECTIONS = 2
COMMITS = 50

_SUFFIX_BYTES = 4
_NAME = f"^{PREFIX}[0-9a-f]{{{2 * _SUFFIX_BYTES}}}$"
# Every login can see the application name of a session. The benchmark uses the tablespace of the configured
# database, because another one may be on another disk.
_SERVER = """
select
    current_user as login,
    (select rolsuper or rolcreatedb from pg_roles where rolname = current_user) as may_create,
    (select rolsuper or rolcreaterole from pg_roles where rolname = current_user) as may_migrate,
    to_regrole('webhookd_owner') is null as is_without_roles,
    (select quote_ident(t.spcname)
     from pg_database d join pg_tablespace t on t.oid = d.dattablespace
     where d.datname = current_database() and t.spcname <> 'pg_default'
       and has_tablespace_privilege(t.oid, 'create')) as tablespace,
    array(select distinct a.datname::text
          from pg_stat_activity a
          where a.application_name = 'webhookd' and a.pid <> pg_backend_pid() and a.datname is not null
          order by 1) as served,
    array(select d.datname::text
          from pg_database d
          where d.datname ~ $1 and pg_has_role(d.datdba, 'usage')
            and not exists (select from pg_stat_activity a where a.datid = d.oid)
          order by 1) as left_over
"""
# Copies the template through WAL: a copy of files would make the server checkpoint twice.
_NEW_DATABASE = "template template0 encoding 'UTF8' locale_provider libc locale 'C' strategy wal_log"
_COUNTERS = """
select
    (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as wal_bytes,
    pg_database_size(current_database()) as size_bytes
"""
# By the primary key alone, because the history may be long.
_COMPLETED = """
select count(*) as deliveries,
    extract(epoch from min(created_at))::float8 as first_started_at,
    extract(epoch from max(updated_at))::float8 as last_completed_at
from webhookd.webhook_delivery_sagas
where id > $1 and status = 'Completed'
"""
_BACKENDS = "select pid from pg_stat_activity where datname = current_database()"


@dataclass(frozen=True)
class Server:
    """The server before the benchmark changes anything."""

    login: str
    may_create: bool
    may_migrate: bool
    is_without_roles: bool
    tablespace: str | None  # quoted; None is the server's default
    served: list[str]  # databases to which a webhookd is connected
    left_over: list[str]  # databases of killed benchmarks
    facts: ServerFacts

    def require_fit(self, pool_size: int) -> None:
        """Refuse a server on which the login lacks rights, or which has too few free connections."""
        rights = {"CREATEDB": self.may_create, "CREATEROLE": self.may_migrate}
        if missing := [right for right, granted in rights.items() if not granted]:
            raise SchemaProblem(
                f"bench creates its own database, which the login {self.login} may not do: grant the right"
                f" (ALTER ROLE {self.login} {' '.join(missing)}), or set WEBHOOKD_DATABASE_DSN to a login"
                " that can migrate and has CREATEDB"
            )
        total = self.facts.connections
        needed, free = pool_size + 1 + OWN_CONNECTIONS, total - self.facts.connections_in_use
        if not self.facts.pooled and needed > free:
            raise WebhookdError(
                f"bench needs {needed} connections, and the server has {max(free, 0)} of {total} free"
            )

    def notes(self, *, embedded: bool) -> list[str]:
        """What a reader of the results should know about the server."""
        notes = []
        if not self.facts.survives_a_power_cut:
            notes.append("fsync is off on this server: the results are not those of durable commits")
        if self.left_over:
            names = ", ".join(self.left_over)
            notes.append(f"killed runs left these databases: {names}. {_removal(self.left_over)}")
        if self.is_without_roles and not embedded:
            notes.append("bench created the webhookd roles on this server; `webhookd migrate` will use them")
        return notes


@contextmanager
def open_server(settings: Settings) -> Iterator[Database]:
    """The configured server. An embedded server that does not exist yet is created for the benchmark only."""
    with ExitStack() as stack:
        if settings.database.embedded and is_new(folder := data_dir(settings)):
            # On the disk of the data folder, which is to be measured: temporary folders may be in memory.
            parent = next(it for it in folder.parents if it.is_dir())
            temporary = stack.enter_context(temporary_folder("webhookd-bench-", parent))
            database = msgspec.structs.replace(settings.database, data_dir=str(temporary / "data"))
            settings = msgspec.structs.replace(settings, database=database)
        yield stack.enter_context(opened(settings))


async def look_at(dsn: str) -> Server:
    """Read the state of the server."""
    async with connected(dsn) as connection:
        row = await fetch_one(connection, _SERVER, _NAME)
    return Server(**dict(row), facts=await fetch_server_facts(dsn))


@asynccontextmanager
async def bench_database(database: Database, tablespace: str | None) -> AsyncIterator[str]:
    """Create and migrate a database, and yield its DSN. It is dropped at the end, also after an error."""
    name = new_name()
    place = f"tablespace {tablespace}" if tablespace else ""
    try:
        with anyio.CancelScope(shield=True):
            # Not interrupted: the server could complete the creation after we have dropped it.
            await _execute(database.migrating_dsn, "create database", name, f"{_NEW_DATABASE} {place}")
        dsn = with_database(database.dsn, name)
        try:
            await migrations.migrate(with_database(database.migrating_dsn, name))
            server_facts = await fetch_server_facts(dsn)
        except DatabaseUnavailable as error:
            if (await fetch_server_facts(database.dsn)).pooled:
                raise DatabaseUnavailable(
                    f"{error} (bench cannot use a pooler: set WEBHOOKD_DATABASE_DSN to the server itself)"
                ) from error
            raise
        if server_facts.functions_missing:
            login = server_facts.login
            raise SchemaProblem(f"{login} lacks rights: GRANT webhookd_app TO {login}")
        yield dsn
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await _execute(database.migrating_dsn, "drop database if exists", name, "with (force)")
            except WebhookdError as error:
                # Printed, not raised: the first error is the one to report.
                problem = f"the database {name} was not dropped: {error}. {_removal([name])}"
                click.echo(f"webhookd: {problem}", err=True)


def _removal(names: list[str]) -> str:
    statements = " ".join(f"DROP DATABASE {name};" for name in names)
    return f"Remove with `webhookd bench --clean`, or in psql: {statements}"


async def clean(database: Database) -> list[str]:
    """Drop the databases of killed benchmarks that are not in use. Returns their names."""
    server = await look_at(database.migrating_dsn)
    for name in server.left_over:
        await _execute(database.migrating_dsn, "drop database if exists", name)
    return server.left_over


def new_name() -> str:
    """A database name that does not exist yet."""
    return PREFIX + secrets.token_hex(_SUFFIX_BYTES)


async def _execute(dsn: str, command: str, name: str, options: str = "") -> None:
    """Create or drop a database of a benchmark, and never any other."""
    if not re.fullmatch(_NAME, name):
        raise ValueError(f"{name} is not a database of a benchmark")
    async with connected(dsn) as connection:
        await connection.execute(f"{command} {name} {options}")


class Counters(NamedTuple):
    """Bytes of WAL that the whole server has written, and the size of this database."""

    wal_bytes: int
    size_bytes: int


class Completed(NamedTuple):
    """Completed deliveries, and when the first started and the last completed, by the database's clock."""

    deliveries: int
    first_started_at: float | None
    last_completed_at: float | None

    @property
    def seconds(self) -> float:
        return max(0.001, (self.last_completed_at or 0.0) - (self.first_started_at or 0.0))

    @property
    def per_second(self) -> float:
        return self.deliveries / self.seconds


async def counters(connection: Connection) -> Counters:
    """Read the counters now."""
    return Counters(*await fetch_one(connection, _COUNTERS))


async def completed(connection: Connection, after_saga_id: int = 0) -> Completed:
    """Count the completed deliveries after this id."""
    return Completed(*await fetch_one(connection, _COMPLETED, after_saga_id))


async def backend_ids(connection: Connection) -> list[int]:
    """The process ids of the server's sessions in this database."""
    return [row["pid"] for row in await connection.fetch(_BACKENDS)]


async def commit_times(connection: Connection) -> tuple[float, float]:
    """Median milliseconds of an empty round trip, and of one with the smallest durable write."""
    medians = []
    for statement in ("select 1", "select pg_logical_emit_message(true, 'webhookd bench', '')"):
        milliseconds = []
        for _ in range(COMMITS):
            started_at = time.monotonic()
            await connection.fetchval(statement)
            milliseconds.append((time.monotonic() - started_at) * 1000)
        medians.append(median(milliseconds))
    return medians[0], medians[1]
