"""Ways to see that something waits, or has ended, without guessing by sleeping.

Reads pg_blocking_pids through an observer's connection, and asyncio tasks.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.database import Connection

POLL_INTERVAL_SECONDS = 0.01
# On a machine that does much else: only to end a test that hangs.
CONDITION_TIMEOUT_SECONDS = 120


async def until_blocked(observer: "Connection", waiting_pid: int, by_pid: int | None = None) -> None:
    """Return when a backend waits for a lock, held by `by_pid` if that is given."""
    blocking: list[int] = []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
    while loop.time() < deadline:
        blocking = await observer.fetchval("SELECT pg_blocking_pids($1)", waiting_pid)
        if by_pid in blocking or (by_pid is None and blocking):
            return
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    raise AssertionError(
        f"backend {waiting_pid} was not blocked by {by_pid or 'any other'} within"
        f" {CONDITION_TIMEOUT_SECONDS} s; blocked by: {blocking or 'none'}"
    )


async def finished(task: "asyncio.Task[Any]") -> bool:
    """Tell whether a task has ended, after letting every other ready task run once."""
    await asyncio.sleep(0)
    return task.done()


async def until_finished(task: "asyncio.Task[Any]") -> None:
    """Return when a task has ended, in whichever way; a failure in the given time if it has not."""
    done, _ = await asyncio.wait([task], timeout=CONDITION_TIMEOUT_SECONDS)
    if not done:
        raise AssertionError(f"{task.get_name()} did not end within {CONDITION_TIMEOUT_SECONDS} s")


async def until(observer: "Connection", query: str, *arguments: object) -> None:
    """Return when a query says true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
    while not await observer.fetchval(query, *arguments):
        if loop.time() > deadline:
            raise AssertionError(f"not within {CONDITION_TIMEOUT_SECONDS} s: {query}")
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


async def until_true(condition: Callable[[], bool]) -> None:
    """Return when something came true, be it in another thread."""
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110  an event of this loop would not hear the endpoint's thread
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
