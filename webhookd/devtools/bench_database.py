"""The database of a benchmark: created on the configured server under its own name, and dropped at the end.

Reads names and sessions of the other databases, and changes none of them. The counters at the end are shared
with `make bench`.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import anyio
import click
import msgspec

from webhookd.core.configuration import data_dir
from webhookd.core.errors import DatabaseUnavailable, SchemaProblem, WebhookdError
from webhookd.core.settings import Settings, with_database
from webhookd.daemon.database import Database, opened
from webhookd.db import migrations
from webhookd.db.connection import Connection, ServerFacts, connected, fetch_one, fetch_server_facts
from webhookd.devtools.processes import temporary_folder
from webhookd.embedded.folder import is_new

PREFIX = "webhookd_bench_"
# Beside the daemon's connections: the bench's pool of two, and one to create and drop the database.
OWN_CONNECTIONS = 3

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


class BenchDatabase(NamedTuple):
    """The DSN for the daemon, and facts about the server."""

    dsn: str
    facts: ServerFacts


@contextmanager
def open_server(settings: Settings) -> Iterator[Database]:
    """The configured server. An embedded server that does not exist yet is created for the benchmark only."""
    if settings.database.embedded and is_new(folder := data_dir(settings)):
        # On the disk of the data folder, which is to be measured: temporary folders may be in memory.
        parent = next(it for it in folder.parents if it.is_dir())
        with temporary_folder("webhookd-bench-", parent) as temporary:
            database = msgspec.structs.replace(settings.database, data_dir=str(temporary / "data"))
            with opened(msgspec.structs.replace(settings, database=database)) as server:
                yield server
        return
    with opened(settings) as server:
        yield server


async def look_at(dsn: str) -> Server:
    """Read the state of the server."""
    async with connected(dsn) as connection:
        return Server(**dict(await fetch_one(connection, _SERVER, _NAME)))


def require_fit(server: Server, server_facts: ServerFacts, pool_size: int) -> None:
    """Refuse a server on which the login lacks rights, or which has too few free connections."""
    missing = [
        right
        for right, granted in (("CREATEDB", server.may_create), ("CREATEROLE", server.may_migrate))
        if not granted
    ]
    if missing:
        raise SchemaProblem(
            f"bench creates its own database, which the login {server.login} may not do: grant the right"
            f" (ALTER ROLE {server.login} {' '.join(missing)}), or set WEBHOOKD_DATABASE_DSN to a login that"
            " can migrate and has CREATEDB"
        )
    total = server_facts.connections
    needed, free = pool_size + 1 + OWN_CONNECTIONS, total - server_facts.connections_in_use
    if not server_facts.pooled and needed > free:
        raise WebhookdError(
            f"bench needs {needed} connections, and the server has {max(free, 0)} of {total} free"
        )


@asynccontextmanager
async def bench_database(database: Database, tablespace: str | None) -> AsyncIterator[BenchDatabase]:
    """Create and migrate a database. It is dropped at the end, also after an error."""
    name = new_name()
    try:
        with anyio.CancelScope(shield=True):
            # Not interrupted: the server could complete the creation after we have dropped it.
            await _create(database.migrating_dsn, name, tablespace)
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
        yield BenchDatabase(dsn, server_facts)
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await _drop(database.migrating_dsn, name, force=True)
            except WebhookdError as error:
                # Printed, not raised: the first error is the one to report.
                click.echo(
                    f"webhookd: the database {name} was not dropped: {error}. {removal([name])}", err=True
                )


def removal(names: list[str]) -> str:
    """How to remove these databases."""
    statements = " ".join(f"DROP DATABASE {name};" for name in names)
    return f"Remove with `webhookd bench --clean`, or in psql: {statements}"


async def clean(database: Database) -> list[str]:
    """Drop the databases of killed benchmarks that are not in use. Returns their names."""
    server = await look_at(database.migrating_dsn)
    for name in server.left_over:
        await _drop(database.migrating_dsn, name, force=False)
    return server.left_over


def new_name() -> str:
    """A database name that does not exist yet."""
    return PREFIX + secrets.token_hex(_SUFFIX_BYTES)


async def _create(dsn: str, name: str, tablespace: str | None) -> None:
    """Copies the template through WAL: a copy of files would make the server checkpoint twice."""
    _require_bench(name)
    place = f" tablespace {tablespace}" if tablespace else ""
    async with connected(dsn) as connection:
        await connection.execute(
            f"create database {name} template template0 encoding 'UTF8' locale_provider libc locale 'C'"
            f" strategy wal_log{place}"
        )


async def _drop(dsn: str, name: str, *, force: bool) -> None:
    _require_bench(name)
    async with connected(dsn) as connection:
        await connection.execute(f"drop database if exists {name}{' with (force)' if force else ''}")


def _require_bench(name: str) -> None:
    """Make sure that no other database can be created or dropped."""
    suffix = name.removeprefix(PREFIX)
    if suffix == name or len(suffix) != 2 * _SUFFIX_BYTES or not suffix.isalnum():
        raise ValueError(f"{name} is not a database of a benchmark")


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
        return (self.last_completed_at or 0.0) - (self.first_started_at or 0.0)


class CommitTimes(NamedTuple):
    """Medians in milliseconds: of an empty round trip, and of one with a durable commit."""

    round_trip_ms: float
    commit_ms: float


async def counters(connection: Connection) -> Counters:
    """Read the counters now."""
    return Counters(*await fetch_one(connection, _COUNTERS))


async def completed(connection: Connection, after_saga_id: int = 0) -> Completed:
    """Count the completed deliveries after this id."""
    return Completed(*await fetch_one(connection, _COMPLETED, after_saga_id))


async def backend_ids(connection: Connection) -> list[int]:
    """The process ids of the server's sessions in this database."""
    return [row["pid"] for row in await connection.fetch(_BACKENDS)]


async def commit_times(connection: Connection, count: int) -> CommitTimes:
    """Measure with the smallest statement that writes durably."""
    return CommitTimes(
        await _median_ms(connection, "select 1", count),
        await _median_ms(connection, "select pg_logical_emit_message(true, 'webhookd bench', '')", count),
    )


async def _median_ms(connection: Connection, statement: str, count: int) -> float:
    milliseconds = []
    for _ in range(count):
        started_at = time.monotonic()
        await connection.fetchval(statement)
        milliseconds.append((time.monotonic() - started_at) * 1000)
    return sorted(milliseconds)[count // 2]
