"""Two sides on one database: one holds its transaction open until the other is seen to skip or to wait."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tests.support.waiting import until_blocked

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")


class Side(Protocol):
    """Who takes part: a login of the daemon's, and a superuser who watches."""

    daemon: "Connection"
    superuser: "Connection"


SideType = TypeVar("SideType", bound=Side)


@dataclass(frozen=True)
class Contest(Generic[SideType]):
    """Two daemons on one database, and somebody who watches."""

    first: SideType
    second: SideType

    async def skips(self, step: Coroutine[Any, Any, Result]) -> Result:
        """The second's step, which must end while the first's transaction is open."""
        task = asyncio.create_task(step)
        waits = asyncio.create_task(until_blocked(self.first.superuser, self._second_pid, self._first_pid))
        await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise AssertionError("waited for the other instead of skipping what it holds")
        waits.cancel()
        return await task

    async def waits(self, step: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """The second's step, seen waiting for the first's transaction."""
        task = asyncio.create_task(step)
        waits = asyncio.create_task(until_blocked(self.first.superuser, self._second_pid, self._first_pid))
        await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            waits.cancel()
            raise AssertionError(f"did not wait for the other: {task}")
        await waits
        return task

    async def count(self, query: str) -> int:
        """A number, as everybody sees it."""
        number: int = await self.first.superuser.fetchval(query)
        return number

    @property
    def _first_pid(self) -> int:
        return self.first.daemon.get_server_pid()

    @property
    def _second_pid(self) -> int:
        return self.second.daemon.get_server_pid()
