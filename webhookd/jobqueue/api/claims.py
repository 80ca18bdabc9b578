"""Who waits for a job: lines by kind and executor, of which only the first in line looks for one.

Every event rings, whoever it is about: if all who wait looked, each event would cost as many claims.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TypeAlias

from webhookd.context import Context
from webhookd.core.states import Executor
from webhookd.db.connection import Connection
from webhookd.http.problems import unavailable
from webhookd.http.query_runner import QueryRunner
from webhookd.http.server import connection_cap
from webhookd.jobqueue.queries import NOTHING_TO_CLAIM
from webhookd.jobqueue.types import Claim, JobRefusal
from webhookd.wakeups import Work

# Each holds a connection; no more than half of those that may be open here.
MAX_WAITING = 500
# Between two looks of the first in line, however often it rings.
PAUSE_SECONDS = 0.05

Claimed: TypeAlias = Claim | JobRefusal | None


class _Line(asyncio.Lock):
    """Asyncio's locks are got in the order in which they were asked for."""

    length = 0


class Claims:
    """Claims at once, or when a job comes."""

    def __init__(self, context: Context, database: QueryRunner) -> None:
        self._database = database
        self._wakeups = context.wakeups
        context.metrics.job_claims_waiting.set_function(lambda: self.waiting)
        self._settings = context.settings
        self._lines: dict[tuple[str, Executor], _Line] = {}
        self._closed = False

    async def claim(
        self,
        kind: str,
        executor: Executor,
        question: Callable[[Connection], Awaitable[Claim | JobRefusal]],
        wait_seconds: float,
        is_gone: Callable[[], bool],
    ) -> Claimed:
        """A job, a refusal, or None if none came.

        Whoever is gone claims nothing: it would have to wait for the end of its lease. One that goes between
        the claim and the answer cannot be told from one that got it, and does cost a lease.
        """
        claimed = await self._look(question)
        if claimed is not None or not wait_seconds:
            return claimed
        if self.waiting >= self._most_waiting:
            raise unavailable("too many wait for jobs here: ask again later, or another instance")
        deadline = asyncio.get_running_loop().time() + wait_seconds
        line = self._lines.setdefault((kind, executor), _Line())
        line.length += 1
        try:
            async with asyncio.timeout_at(deadline):
                await line.acquire()
        except TimeoutError:
            return None
        else:
            try:
                return await self._wait(question, deadline, is_gone)
            finally:
                line.release()
        finally:
            line.length -= 1
            if not line.length:
                self._lines.pop((kind, executor), None)

    def open(self) -> None:
        """From now on: the API may be begun anew."""
        self._closed = False

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        self._wakeups.wake(Work.EVENTS)

    @property
    def waiting(self) -> int:
        """How many are in line."""
        return sum(line.length for line in self._lines.values())

    @property
    def _most_waiting(self) -> int:
        return min(MAX_WAITING, connection_cap(self._settings()) // 2)

    async def _wait(
        self,
        question: Callable[[Connection], Awaitable[Claim | JobRefusal]],
        deadline: float,
        is_gone: Callable[[], bool],
    ) -> Claimed:
        """First in line: look at every ring, and by itself, until the deadline."""
        loop = asyncio.get_running_loop()
        with closing(self._wakeups.inbox(Work.EVENTS)) as inbox:
            while not (self._closed or is_gone()):
                # Not cut off by the deadline: that might lose a job that was just claimed.
                claimed = await self._look(question)
                left_seconds = deadline - loop.time()
                if claimed is not None or left_seconds <= 0:
                    return claimed
                poll_interval_seconds = self._settings().services.poll_interval_seconds
                pause_seconds = min(PAUSE_SECONDS, left_seconds)
                await inbox.rest(pause_seconds, min(poll_interval_seconds, left_seconds))
        return None

    async def _look(self, question: Callable[[Connection], Awaitable[Claim | JobRefusal]]) -> Claimed:
        claimed = await self._database.run(question)
        if isinstance(claimed, JobRefusal) and claimed.reason == NOTHING_TO_CLAIM:
            return None
        return claimed
