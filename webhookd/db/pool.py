"""The daemon's bounded connection pool. Each use has a deadline; errors are those of core.errors.

Knows whether the database is available. Behind a pooler in transaction mode (PgBouncer) it keeps no state on
the server between calls: no prepared statements and no session settings.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self

import asyncpg

from webhookd.core.errors import DatabaseBusy, DatabaseFull, DatabaseUnavailable
from webhookd.db.connection import (
    CONNECT_TIMEOUT_SECONDS,
    ConfirmedConnection,
    Connection,
    connected,
    is_pooled,
    translated,
)

if TYPE_CHECKING:
    from types import TracebackType

    from asyncpg.pool import PoolConnectionProxy

log = logging.getLogger(__name__)

# A database function takes milliseconds. A call that takes this long is stuck, in a stalled server or behind
# a lock. Its connection is abandoned; repeating the call shows whether the first one took effect.
COMMAND_TIMEOUT_SECONDS = 10.0
# If all connections are busy for this long, the database does not keep up: report that instead of waiting.
ACQUIRE_TIMEOUT_SECONDS = 5.0

# Pause before the next try when the server is at its connection limit and the pool has open connections.
CONNECTION_LIMIT_PAUSE_SECONDS = 0.1

# After "disk full", a successful call does not show for this long that there is space again, because a full
# database still serves reads. Writers try again more often than this.
FULL_SECONDS = 5.0

# The same limits on the server, for when this process is stopped, disconnected or gone and still holds locks.
# Not behind a pooler: it refuses most settings, and would apply the rest to other clients.
SESSION_SETTINGS = {
    "lock_timeout": "9s",
    "statement_timeout": "12s",
    "idle_in_transaction_session_timeout": "12s",
    # Overrides the login and the database: ConfirmedConnection needs the warning.
    "client_min_messages": "warning",
}
# With the other values a crash, or a failover to a synchronous standby, can undo an acknowledged commit.
DURABLE_SYNCHRONOUS_COMMIT = ("on", "remote_apply")
CACHED_STATEMENTS = 100


class Pool:
    """Shared connections; `async with` opens and closes them."""

    def __init__(self, dsn: str, size: int) -> None:
        self._dsn = dsn
        self._size = size
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._process_ids: set[int] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self._unavailable_since: float | None = time.monotonic()
        self._full_until = 0.0

    async def __aenter__(self) -> Self:
        async with connected(self._dsn) as connection:
            pooled = await is_pooled(connection)
            durable = await connection.fetchval("show synchronous_commit") in DURABLE_SYNCHRONOUS_COMMIT
        settings = {"application_name": "webhookd"}
        if pooled:
            log.info("the database is behind a pooler: no prepared statements, no session timeouts")
        else:
            settings |= SESSION_SETTINGS | ({} if durable else {"synchronous_commit": "on"})
        with translated():
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=self._size,
                timeout=CONNECT_TIMEOUT_SECONDS,
                command_timeout=COMMAND_TIMEOUT_SECONDS,
                statement_cache_size=0 if pooled else CACHED_STATEMENTS,
                server_settings=settings,
                connection_class=ConfirmedConnection,
                init=self._opened,
                reset=_skip_reset,
            )
        self._unavailable_since = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        if self._pool is not None:
            # Not close(): it waits for connections in use, which a stalled server may never return.
            self._pool.terminate()

    @property
    def available(self) -> bool:
        """Whether the last call to the database succeeded."""
        return self._unavailable_since is None

    def has_process(self, process_id: int) -> bool:
        """Whether this server process belongs to a connection of this pool: then its NOTIFY is our own."""
        return process_id in self._process_ids

    async def _opened(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        process_id = connection.get_server_pid()
        self._process_ids.add(process_id)
        connection.add_termination_listener(lambda _: self._process_ids.discard(process_id))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection for the block. Each call of a database function is its own transaction."""
        if self._pool is None:
            raise RuntimeError("the pool is not open")
        used = False
        try:
            with translated():
                connection = await self._acquire(self._pool)
                used = True
                try:
                    yield connection
                except BaseException:
                    self._release_in_background(self._pool, connection)
                    raise
                # The call has succeeded. If the connection is lost at this moment, the driver has already
                # removed it and raises an error about that.
                with suppress(asyncpg.InternalClientError):
                    await self._pool.release(connection)
        except DatabaseBusy:
            raise
        except DatabaseUnavailable as error:
            self.report_unavailable(error)
            if used:
                # The rest are probably dead too: each half-open connection would cost a caller its timeout.
                await self._pool.expire_connections()
            raise
        else:
            self._report_available()

    async def _acquire(self, pool: "asyncpg.Pool[asyncpg.Record]") -> "PoolConnectionProxy[asyncpg.Record]":
        """Take a free or a new connection; at the server's connection limit, wait for a free one."""
        deadline = time.monotonic() + ACQUIRE_TIMEOUT_SECONDS
        while True:
            try:
                return await pool.acquire(timeout=deadline - time.monotonic())
            except asyncpg.TooManyConnectionsError:
                if not self._process_ids or time.monotonic() + CONNECTION_LIMIT_PAUSE_SECONDS > deadline:
                    raise
            await asyncio.sleep(CONNECTION_LIMIT_PAUSE_SECONDS)

    def _release_in_background(
        self, pool: "asyncpg.Pool[asyncpg.Record]", connection: "PoolConnectionProxy[asyncpg.Record]"
    ) -> None:
        """Release a connection whose use failed or was cancelled, without waiting.

        The driver first cancels the running statement. On a dead connection that takes seconds and fails; the
        driver has then closed the connection, and the error can be ignored.
        """
        task = asyncio.get_running_loop().create_task(pool.release(connection))
        self._releasing.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: "asyncio.Task[None]") -> None:
        self._releasing.discard(task)
        if not task.cancelled():
            task.exception()

    def report_unavailable(self, error: DatabaseUnavailable) -> None:
        """Mark the database as unavailable or full, until a call succeeds."""
        if isinstance(error, DatabaseFull):
            self._full_until = time.monotonic() + FULL_SECONDS
        if self._unavailable_since is None:
            self._unavailable_since = time.monotonic()
            log.warning("database unavailable, services paused: %s", error)

    def _report_available(self) -> None:
        if self._unavailable_since is not None and time.monotonic() >= self._full_until:
            log.info("database available again after %.1f s", time.monotonic() - self._unavailable_since)
            self._unavailable_since = None


async def _skip_reset(_: object) -> None:
    """Replaces the driver's RESET ALL: a round trip that also loses the time of the session's last NOTIFY."""
