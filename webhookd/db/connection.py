"""One connection to PostgreSQL, opened with bounds and with our kind of error."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import asyncpg

from webhookd.core.errors import ConfigurationError, DatabaseUnavailable
from webhookd.db.errors import plainly, translated

# One of its own, or one of the pool's. Quoted: asyncpg's types are subscripted in its stubs alone.
Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)

# How long a person waits at a terminal before "it does not answer" is the better answer.
CONNECT_TIMEOUT_SECONDS = 10.0


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Connection]:
    """A connection for the length of the block; errors inside come out as ours.

    Without prepared statements, which would outlive their transaction: it may lead through a pooler.
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
            raise DatabaseUnavailable(f"database unavailable{_where(dsn)}: {plainly(error)}") from error
        except (ValueError, OverflowError) as error:
            # Not in the driver's words: what it took for the port may be a piece of the password.
            raise ConfigurationError(
                "database.dsn is no URL like postgresql://user:password@host:5432/name "
                "(special characters in a password are written as %XX)"
            ) from error
        try:
            yield connection
        except BaseException:
            # Not close(): a server that does not answer would keep us here, and hide what happened.
            connection.terminate()
            raise
        await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)


def _where(dsn: str) -> str:
    """Where a DSN leads, as far as it is a URL with one host; without user and password."""
    try:
        host, port = urlsplit(dsn).hostname, urlsplit(dsn).port or 5432
    except ValueError:  # several hosts, or none of this form
        return ""
    return f" at {host}:{port}" if host else ""


async def is_pooled(connection: Connection) -> bool:
    """Whether a pooler stands between: it greets with a process id of its own invention."""
    process_id: int = await connection.fetchval("select pg_backend_pid()")
    return process_id != connection.get_server_pid()


async def fetch_one(connection: Connection, query: str, *arguments: Any) -> asyncpg.Record:
    """The one row of a function that returns one row or raises."""
    row = await connection.fetchrow(query, *arguments)
    if row is None:
        raise LookupError(f"no row from: {query}")
    return row
