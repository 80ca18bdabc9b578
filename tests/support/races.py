"""Two sessions on one database: one keeps its transaction open until the other skips or waits."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tests.support.waiting import until_blocked

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")


class Side(Protocol):
    """A session of the daemon, and a superuser session to observe it."""

    daemon: "Connection"
    superuser: "Connection"


SideType = TypeVar("SideType", bound=Side)


@dataclass(frozen=True)
class Contest(Generic[SideType]):
    """Two daemons on one database."""

    first: SideType
    second: SideType

    async def skips(self, step: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of the second side's step, which must end while the first transaction is open."""
        task = asyncio.create_task(step)
        waits = asyncio.create_task(until_blocked(self.first.superuser, self._second_pid, self._first_pid))
        await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise AssertionError("waited for the locks of the first side instead of skipping them")
        waits.cancel()
        return await task

    async def waits(self, step: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Return the second side's step as a task that waits for the first transaction."""
        task = asyncio.create_task(step)
        waits = asyncio.create_task(until_blocked(self.first.superuser, self._second_pid, self._first_pid))
        await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            waits.cancel()
            raise AssertionError(f"did not wait for the first side: {task}")
        await waits
        return task

    async def count(self, query: str) -> int:
        """Return a number that a committed read sees."""
        number: int = await self.first.superuser.fetchval(query)
        return number

    @property
    def _first_pid(self) -> int:
        return self.first.daemon.get_server_pid()

    @property
    def _second_pid(self) -> int:
        return self.second.daemon.get_server_pid()
