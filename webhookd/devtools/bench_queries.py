"""The database that `webhookd bench` makes for itself beside the others, and what the server tells of it.

Reads names and sessions of the other databases; writes to none of them.
"""

import secrets
import time
from dataclasses import dataclass
from typing import NamedTuple

from webhookd.db.connection import Connection, connected, fetch_one
from webhookd.db.pool import Pool

PREFIX = "webhookd_bench_"
_NAME = f"^{PREFIX}[0-9a-f]{{8}}$"

# Sessions tell their application's name to everybody. A tablespace may be on another disk.
_LOOK = """
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
_DELIVERED = """
select count(*) as deliveries,
    coalesce(extract(epoch from max(updated_at) - min(created_at)), 0)::float8 as seconds
from webhookd.webhook_delivery_sagas
where status = 'Completed'
"""
_PROCESSES = "select pid from pg_stat_activity where datname = current_database()"


@dataclass(frozen=True)
class Server:
    """What it is like, before anything is made there."""

    login: str
    may_create: bool
    may_migrate: bool
    is_without_roles: bool
    tablespace: str | None  # quoted; None: the server's usual one
    served: list[str]  # databases that a webhookd is connected to
    left_over: list[str]  # databases of runs that were killed


class Counters(NamedTuple):
    """Bytes: of the whole server's WAL, and of this database."""

    wal_bytes: int
    size_bytes: int


class Delivered(NamedTuple):
    """How many are completed, and the seconds from the first one routed to the last one completed."""

    deliveries: int
    seconds: float


def new_name() -> str:
    """For a database that is nobody's."""
    return PREFIX + secrets.token_hex(4)


async def look(dsn: str) -> Server:
    """Ask. Changes nothing."""
    async with connected(dsn) as connection:
        return Server(**dict(await fetch_one(connection, _LOOK, _NAME)))


async def create(dsn: str, name: str, tablespace: str | None) -> None:
    """Make an empty database. By WAL: a copy of files would have the server checkpoint twice."""
    _require_ours(name)
    place = f" tablespace {tablespace}" if tablespace else ""
    async with connected(dsn) as connection:
        await connection.execute(
            f"create database {name} template template0 encoding 'UTF8' locale_provider libc locale 'C'"
            f" strategy wal_log{place}"
        )


async def drop(dsn: str, name: str, *, even_if_used: bool) -> None:
    """Remove it, if it is there."""
    _require_ours(name)
    force = " with (force)" if even_if_used else ""
    async with connected(dsn) as connection:
        await connection.execute(f"drop database if exists {name}{force}")


async def counters(pool: Pool) -> Counters:
    """As they are now."""
    async with pool.connection() as connection:
        return Counters(*await fetch_one(connection, _COUNTERS))


async def delivered(pool: Pool) -> Delivered:
    """As far as it has come."""
    async with pool.connection() as connection:
        return Delivered(*await fetch_one(connection, _DELIVERED))


async def process_ids(pool: Pool) -> list[int]:
    """Of the server's processes that work for this database."""
    async with pool.connection() as connection:
        return [row["pid"] for row in await connection.fetch(_PROCESSES)]


class Commits(NamedTuple):
    """Medians, in milliseconds: there and back, and with a commit that is durable."""

    round_trip_ms: float
    commit_ms: float


async def commits(pool: Pool, count: int) -> Commits:
    """Ask for nothing, and for the smallest thing that must be on the disk."""
    async with pool.connection() as connection:
        return Commits(
            await _median_ms(connection, "select 1", count),
            await _median_ms(connection, "select pg_logical_emit_message(true, 'webhookd bench', '')", count),
        )


async def _median_ms(connection: Connection, statement: str, count: int) -> float:
    milliseconds = []
    for _ in range(count):
        began_at = time.monotonic()
        await connection.fetchval(statement)
        milliseconds.append((time.monotonic() - began_at) * 1000)
    return sorted(milliseconds)[count // 2]


def _require_ours(name: str) -> None:
    """Whatever else goes wrong: no other database's name gets into such a statement."""
    suffix = name.removeprefix(PREFIX)
    if suffix == name or len(suffix) != len(new_name()) - len(PREFIX) or not suffix.isalnum():
        raise ValueError(f"{name} is no database of a bench")
