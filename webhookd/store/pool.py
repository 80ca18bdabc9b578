"""The daemon's connections: a bounded pool, each use with a deadline, every error ours."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import asyncpg

from webhookd.store.connection import CONNECT_TIMEOUT_SECONDS, Connection
from webhookd.store.errors import translated

if TYPE_CHECKING:
    from types import TracebackType

# A gated call takes milliseconds. One that takes this long is stuck, in a stalled server or behind a lock;
# its connection is given up, and what it did is found out by asking again.
COMMAND_TIMEOUT_SECONDS = 10.0
# All connections busy for this long means a database that does not keep up: better said than waited for.
ACQUIRE_TIMEOUT_SECONDS = 5.0


class Pool:
    """Connections to share; `async with` opens and closes them."""

    def __init__(self, dsn: str, size: int) -> None:
        self._dsn = dsn
        self._size = size
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def __aenter__(self) -> Self:
        with translated():
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=1,
                max_size=self._size,
                timeout=CONNECT_TIMEOUT_SECONDS,
                command_timeout=COMMAND_TIMEOUT_SECONDS,
                server_settings={"application_name": "webhookd"},
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        if self._pool is not None:
            # Not close(): that waits for connections in use, and a stalled server would keep us here.
            self._pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for the length of the block. Every gated call is a transaction of its own."""
        if self._pool is None:
            raise RuntimeError("the pool is not open")
        with translated():
            async with self._pool.acquire(timeout=ACQUIRE_TIMEOUT_SECONDS) as connection:
                yield connection
