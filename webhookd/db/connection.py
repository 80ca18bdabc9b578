"""Connections to PostgreSQL: error translation, commits a standby may not have, server facts.

asyncpg's exceptions become those of core.errors: the layers above see no driver errors.
"""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import asyncpg

from webhookd.core.errors import (
    ConfigurationError,
    DatabaseBusy,
    DatabaseFault,
    DatabaseFull,
    DatabaseUnavailable,
    Refusal,
    Refused,
    WebhookdError,
)

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


_REFUSALS = {refusal.value: refusal for refusal in Refusal}

# By SQLSTATE and not by exception class: asyncpg shows our own codes as unknown errors.
# 08: connection; 3D: no such database; 53: out of connections, memory or disk; 57: shutdown or cancelled;
# 58: the server's own files.
_UNAVAILABLE_CLASSES = ("08", "3D", "53", "57", "58")
_LOGIN_CLASS = "28"
_NOT_WRITABLE = ("25006", "25P03")  # a standby, or idle in a transaction for too long
_DISK_FULL = "53100"
_BUSY = ("40001", "40P01", "55P03")  # serialization failure, deadlock, lock timeout


@contextmanager
def translated() -> Iterator[None]:
    """Translate errors raised in the block. Misuse of the driver is a bug and stays as it is."""
    try:
        yield
    except asyncpg.PostgresError as error:
        # Without its cause: that prints DETAIL, which may contain a row with a secret.
        raise _of_postgres(error) from None
    except (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError) as error:
        if isinstance(error, asyncpg.ClientConfigurationError):
            raise ConfigurationError(f"database.dsn is invalid: {error}") from error
        if not isinstance(error, OSError) and not _lost_connection(error):  # TimeoutError is an OSError
            raise
        raise DatabaseUnavailable(f"database unavailable: {describe(error)}") from error


def _of_postgres(error: asyncpg.PostgresError) -> WebhookdError:
    sqlstate: str = error.sqlstate or ""
    message = error.message or str(error)  # empty if the connection was lost
    if sqlstate in _REFUSALS:
        return Refused(_REFUSALS[sqlstate], message, error.detail, error.hint)
    if sqlstate[:2] == _LOGIN_CLASS:
        return DatabaseUnavailable(f"the database refused this login: {message}")
    if sqlstate == _DISK_FULL:
        return DatabaseFull(f"database unavailable: {message}")
    if sqlstate[:2] in _UNAVAILABLE_CLASSES or sqlstate in _NOT_WRITABLE:
        return DatabaseUnavailable(f"database unavailable: {message}")
    if sqlstate in _BUSY:
        return DatabaseBusy(f"database busy: {message}")
    return DatabaseFault(f"unexpected database error {sqlstate}: {message}")


def describe(error: Exception) -> str:
    """Describe a connection error without the driver's wording."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, asyncpg.InternalClientError):
        return "the connection was lost"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: is PostgreSQL running there?"
    if isinstance(error, socket.gaierror):
        return f"unknown host: {error.strerror} (write an @ in a password as %40)"
    return str(error) or type(error).__name__


def _lost_connection(error: asyncpg.InterfaceError | asyncpg.InternalClientError) -> bool:
    """Detect a lost connection that asyncpg reports as misuse of its interface; only the text tells.

    After the server's shutdown message on an idle connection, until the socket closes, asyncpg raises
    "cannot switch to state 12; another operation (2) is in progress".
    """
    if isinstance(error, asyncpg.InternalClientError):
        # During a failover, for a moment, no host matches target_session_attrs.
        no_match = isinstance(error, asyncpg.TargetServerAttributeNotMatched)
        return no_match or "cannot switch to state" in str(error)
    return "connection" in str(error) and "closed" in str(error)
