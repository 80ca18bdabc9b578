"""Runs a handler's database queries with a deadline, so that every request gets a response in time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool

Result = TypeVar("Result")

# A client gets its 503 within two seconds, even with 500 concurrent requests that need a third of a second of
# CPU time. A query takes milliseconds.
QUERY_TIMEOUT_SECONDS = 1.5


class QueryRunner:
    """Runs queries on pooled connections, each with a deadline."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._abandoned: set[asyncio.Task[object]] = set()

    async def run(self, query: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Run `query` on a pooled connection.

        It runs in its own task: after a cancellation, a connection to a stalled server takes seconds to be
        released, and the request does not wait for that.
        """
        task = asyncio.get_running_loop().create_task(self._use(query))
        try:
            done, _ = await asyncio.wait({task}, timeout=QUERY_TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise DatabaseUnavailable("the database did not answer in time")
        return task.result()

    async def _use(self, query: Callable[[Connection], Awaitable[Result]]) -> Result:
        async with self._pool.connection() as connection:
            return await query(connection)

    def _abandon(self, task: "asyncio.Task[Result]") -> None:
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Result]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it, so that asyncio does not log it
