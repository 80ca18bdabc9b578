"""Waits for conditions without sleeping for a fixed time.

Reads pg_blocking_pids through an observing connection, and asyncio tasks.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.database import Connection

POLL_INTERVAL_SECONDS = 0.01
# Only ends a test that hangs; long enough for a busy machine.
CONDITION_TIMEOUT_SECONDS = 120


async def until_blocked(observer: "Connection", waiting_pid: int, by_pid: int | None = None) -> None:
    """Return when a backend waits for a lock, of `by_pid` if given."""
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
    """Tell whether a task has ended, after every other ready task ran once."""
    await asyncio.sleep(0)
    return task.done()


async def until_finished(task: "asyncio.Task[Any]") -> None:
    """Return when a task has ended or failed; raise after the time limit."""
    done, _ = await asyncio.wait([task], timeout=CONDITION_TIMEOUT_SECONDS)
    if not done:
        raise AssertionError(f"{task.get_name()} did not end within {CONDITION_TIMEOUT_SECONDS} s")


async def until(observer: "Connection", query: str, *arguments: object) -> None:
    """Return when a query returns true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONDITION_TIMEOUT_SECONDS
    while not await observer.fetchval(query, *arguments):
        if loop.time() > deadline:
            raise AssertionError(f"not within {CONDITION_TIMEOUT_SECONDS} s: {query}")
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


async def until_true(condition: Callable[[], bool]) -> None:
    """Return when a condition is true, which may change in another thread."""
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110  another thread cannot set an event of this loop
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
