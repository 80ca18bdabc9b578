"""The daemon's connections: a bounded pool, each use with a deadline, every error ours.

Knows whether the database answers. Behind a pooler in transaction mode (PgBouncer) it keeps nothing on the
server from one call to the next: no prepared statements, no settings of the session.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self

import asyncpg

from webhookd.core.errors import DatabaseBusy, DatabaseFull, DatabaseUnavailable
from webhookd.db.confirmed import ConfirmedConnection
from webhookd.db.connection import CONNECT_TIMEOUT_SECONDS, Connection, connected, is_pooled
from webhookd.db.errors import translated

if TYPE_CHECKING:
    from types import TracebackType

    from asyncpg.pool import PoolConnectionProxy

log = logging.getLogger(__name__)

# A gated call takes milliseconds. One that takes this long is stuck, in a stalled server or behind a lock;
# its connection is given up, and what it did is found out by asking again.
COMMAND_TIMEOUT_SECONDS = 10.0
# All connections busy for this long means a database that does not keep up: better said than waited for.
ACQUIRE_TIMEOUT_SECONDS = 5.0

# How long to leave a server alone that has no connection for us, while we have others.
CROWDED_SECONDS = 0.1

# For so long after the database had no room to store something an answer is no sign that it has: it serves
# readers all the same. Who has something to store tries it again more often than that.
FULL_SECONDS = 5.0

# The server's own ends to the same, for when we are stopped, cut off or gone and cannot say so: its locks are
# everybody's. Not behind a pooler: it refuses most settings, and hands the others on to who comes next.
SESSION_SETTINGS = {
    "lock_timeout": "9s",
    "statement_timeout": "12s",
    "idle_in_transaction_session_timeout": "12s",
    # Also where the login or the database has it otherwise: ConfirmedConnection listens for a warning.
    "client_min_messages": "warning",
}
# The others may tell of a commit that a crash, or a failover to a synchronous standby, undoes.
DURABLE = ("on", "remote_apply")
STATEMENTS_KEPT = 100


class Pool:
    """Connections to share; `async with` opens and closes them."""

    def __init__(self, dsn: str, size: int) -> None:
        self._dsn = dsn
        self._size = size
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._process_ids: set[int] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self._away_since: float | None = time.monotonic()
        self._full_until = 0.0

    async def __aenter__(self) -> Self:
        async with connected(self._dsn) as connection:
            pooled = await is_pooled(connection)
            durable = await connection.fetchval("show synchronous_commit") in DURABLE
        settings = {"application_name": "webhookd"}
        if pooled:
            log.info("the database is behind a pooler: statements are not prepared, nor timeouts set")
        else:
            settings |= SESSION_SETTINGS | ({} if durable else {"synchronous_commit": "on"})
        with translated():
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=self._size,
                timeout=CONNECT_TIMEOUT_SECONDS,
                command_timeout=COMMAND_TIMEOUT_SECONDS,
                statement_cache_size=0 if pooled else STATEMENTS_KEPT,
                server_settings=settings,
                connection_class=ConfirmedConnection,
                init=self._opened,
                reset=_nothing_to_reset,
            )
        self._away_since = None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        if self._pool is not None:
            # Not close(): that waits for connections in use, and a stalled server would keep us here.
            self._pool.terminate()

    @property
    def available(self) -> bool:
        """Whether the database answered when it was last asked."""
        return self._away_since is None

    def has_process(self, process_id: int) -> bool:
        """Whether this process of the server is one of ours: what it notifies, we know."""
        return process_id in self._process_ids

    async def _opened(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        process_id = connection.get_server_pid()
        self._process_ids.add(process_id)
        connection.add_termination_listener(lambda _: self._process_ids.discard(process_id))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for the length of the block. Every gated call is a transaction of its own."""
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
                    self._release_apart(self._pool, connection)
                    raise
                # Its use has succeeded, whatever befalls it now: one that is lost in this very moment the
                # driver has cleared away by itself, and then complains of.
                with suppress(asyncpg.InternalClientError):
                    await self._pool.release(connection)
        except DatabaseBusy:
            raise
        except DatabaseUnavailable as error:
            self.lost(error)
            if used:
                # The others are as old, and likely as dead: each half-open one would cost a user its timeout.
                await self._pool.expire_connections()
            raise
        else:
            self._answered()

    async def _acquire(self, pool: "asyncpg.Pool[asyncpg.Record]") -> "PoolConnectionProxy[asyncpg.Record]":
        """One that is free, or a new one; where the server has none for us, one of ours that becomes free."""
        deadline = time.monotonic() + ACQUIRE_TIMEOUT_SECONDS
        while True:
            try:
                return await pool.acquire(timeout=deadline - time.monotonic())
            except asyncpg.TooManyConnectionsError:
                if not self._process_ids or time.monotonic() + CROWDED_SECONDS > deadline:
                    raise
            await asyncio.sleep(CROWDED_SECONDS)

    def _release_apart(
        self, pool: "asyncpg.Pool[asyncpg.Record]", connection: "PoolConnectionProxy[asyncpg.Record]"
    ) -> None:
        """Give back a connection whose use failed or was cancelled, without waiting for it.

        The driver first cancels what still runs on it, and by a dead way that takes seconds, and fails: then
        it has ended the connection, and nobody need hear of it.
        """
        task = asyncio.get_running_loop().create_task(pool.release(connection))
        self._releasing.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: "asyncio.Task[None]") -> None:
        self._releasing.discard(task)
        if not task.cancelled():
            task.exception()

    def lost(self, error: DatabaseUnavailable) -> None:
        """The database does not answer, or is full; the next use that succeeds says otherwise."""
        if isinstance(error, DatabaseFull):
            self._full_until = time.monotonic() + FULL_SECONDS
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("everything waits: %s", error)

    def _answered(self) -> None:
        if self._away_since is not None and time.monotonic() >= self._full_until:
            log.info("the database answers again, after %.1f s", time.monotonic() - self._away_since)
            self._away_since = None


async def _nothing_to_reset(_: object) -> None:
    """The driver's RESET ALL is a round trip, and undoes the one thing a session keeps: when it notified."""
