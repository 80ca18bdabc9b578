"""The database as a handler asks it: every question has a time by which it is answered or given up."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool

Answer = TypeVar("Answer")

# A client hears 503 within two seconds, also when 500 ask at once and the processor needs a third of a second
# for them. Each question is milliseconds of work.
ANSWER_TIMEOUT_SECONDS = 1.5


class Database:
    """Asks through the pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._given_up: set[asyncio.Task[object]] = set()

    async def ask(self, question: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        """One use of a connection.

        In a task of its own: a connection whose server is stalled takes seconds to be given back, after the
        cancellation, and nobody needs to wait for that.
        """
        task = asyncio.get_running_loop().create_task(self._use(question))
        try:
            done, _ = await asyncio.wait({task}, timeout=ANSWER_TIMEOUT_SECONDS)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if not done:
            self._give_up(task)
            raise DatabaseUnavailable("the database did not answer in time")
        return task.result()

    async def _use(self, question: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        async with self._pool.connection() as connection:
            return await question(connection)

    def _give_up(self, task: "asyncio.Task[Answer]") -> None:
        task.cancel()
        self._given_up.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Answer]") -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that nobody complains that it was not
