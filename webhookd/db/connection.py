"""Connections to PostgreSQL: opening them with a timeout, commits a standby may not have, server facts."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import asyncpg

from webhookd.core.errors import ConfigurationError, DatabaseUnavailable
from webhookd.db.errors import describe, translated

# A single connection, or one of a pool. Quoted, because asyncpg's types are generic in its stubs only.
Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)

# A user at a terminal waits this long before an error message is better.
CONNECT_TIMEOUT_SECONDS = 10.0
# The server function that emits the warning. Its text is translated, and it has no SQLSTATE of its own.
_WAIT_FOR_STANDBY = "SyncRepWaitForLSN"


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    """Open a connection for the block; errors inside are translated to those of core.errors.

    Without prepared statements, which outlive their transaction: the connection may lead through a pooler.
    """
    with translated():
        try:
            connection = await asyncpg.connect(
                dsn,
                timeout=CONNECT_TIMEOUT_SECONDS,
                statement_cache_size=0,
                server_settings={"application_name": "webhookd"},
            )
        except (OSError, TimeoutError) as error:
            raise DatabaseUnavailable(f"database unavailable{_where(dsn)}: {describe(error)}") from error
        except (ValueError, OverflowError) as error:
            # Without the driver's message: what it took for the port may be a part of the password.
            raise ConfigurationError(
                "database.dsn must be a URL like postgresql://user:password@host:5432/name "
                "(write special characters in a password as %XX)"
            ) from error
        try:
            yield connection
        except BaseException:
            # Not close(): a server that does not answer would block here and hide the error.
            connection.terminate()
            raise
        await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)


class ConfirmedConnection(asyncpg.Connection):
    """A connection that raises if a commit may be missing on the synchronous standby.

    If the wait for a synchronous standby is cancelled, the server reports success and a warning: the commit
    is local, and a failover may lose it. The warning becomes an error, because the outcome is unknown: the
    event is not acknowledged, and nothing that was leased is sent.
    """

    async def execute(self, *arguments: Any, **options: Any) -> str:
        with self._confirmed():
            return await super().execute(*arguments, **options)

    async def fetch(self, *arguments: Any, **options: Any) -> Any:
        with self._confirmed():
            return await super().fetch(*arguments, **options)

    async def fetchrow(self, *arguments: Any, **options: Any) -> Any:
        with self._confirmed():
            return await super().fetchrow(*arguments, **options)

    async def fetchval(self, *arguments: Any, **options: Any) -> Any:
        with self._confirmed():
            return await super().fetchval(*arguments, **options)

    async def close(self, **options: Any) -> None:
        """Ignore a server that does not respond: the driver has then closed the connection anyway.

        The driver closes expired connections in tasks whose exceptions are never retrieved.
        """
        with suppress(TimeoutError, OSError):
            await super().close(**options)

    @contextmanager
    def _confirmed(self) -> Iterator[None]:
        # The driver calls log listeners before it resumes the caller.
        unconfirmed = False

        def on_message(_: object, message: Any) -> None:
            nonlocal unconfirmed
            unconfirmed |= message.server_source_function == _WAIT_FOR_STANDBY

        self.add_log_listener(on_message)
        try:
            yield
        finally:
            self.remove_log_listener(on_message)
        if unconfirmed:
            raise DatabaseUnavailable(
                "database unavailable: the wait for the standby was cancelled; it may not have the commit"
            )


def _where(dsn: str) -> str:
    """Describe the host and port of a DSN, if it is a URL with one host; without user and password."""
    try:
        host, port = urlsplit(dsn).hostname, urlsplit(dsn).port or 5432
    except ValueError:  # several hosts, or not a URL
        return ""
    return f" at {host}:{port}" if host else ""


async def is_pooled(connection: Connection) -> bool:
    """Whether there is a pooler in between: it reports an invented process id at login."""
    process_id: int = await connection.fetchval("select pg_backend_pid()")
    return process_id != connection.get_server_pid()


async def fetch_one(connection: Connection, query: str, *arguments: Any) -> asyncpg.Record:
    """Fetch the single row of a function that returns one row or raises."""
    row = await connection.fetchrow(query, *arguments)
    if row is None:
        raise LookupError(f"no row returned by: {query}")
    return row


# functions_missing: functions that webhookd_app may call and this login may not; 0 without the schema.
_SERVER_FACTS = """
select
    current_setting('server_version') as version,
    current_user as login,
    current_setting('synchronous_commit') <> 'off' as commits_are_durable,
    current_setting('fsync')::boolean as survives_a_power_cut,
    current_setting('max_connections')::integer
        - current_setting('superuser_reserved_connections')::integer
        - coalesce(current_setting('reserved_connections', true), '0')::integer as connections,
    (select sum(numbackends) from pg_stat_database)::integer as connections_in_use,
    (select count(*)
     from pg_proc
     where pronamespace = to_regnamespace('webhookd')
       and has_function_privilege(to_regrole('webhookd_app'), oid, 'execute')
       and not has_function_privilege(oid, 'execute'))::integer as functions_missing
"""


@dataclass(frozen=True)
class ServerFacts:
    """Properties of one server, as seen by one login."""

    version: str
    login: str
    pooled: bool
    commits_are_durable: bool
    survives_a_power_cut: bool
    connections: int  # for all clients, without those reserved for superusers
    connections_in_use: int
    functions_missing: int


async def fetch_server_facts(dsn: str) -> ServerFacts:
    """Query the server over a connection of its own."""
    async with connected(dsn) as connection:
        row = await fetch_one(connection, _SERVER_FACTS)
        version = row["version"].split()[0]  # without the distribution's suffix
        return ServerFacts(**dict(row) | {"version": version}, pooled=await is_pooled(connection))
