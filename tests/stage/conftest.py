"""Fixtures for tests of a single stage: its context, with settings that a test can change."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from tests.support.database import Database
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS
from webhookd.context import Context
from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db import connection as connection_module
from webhookd.db import pool as pool_module
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool
from webhookd.wakeups import WakeUps

SERVER_TIMEOUTS = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the timeouts for slow machines; a test of a timeout sets its own."""
    for module, name in (
        (connection_module, "CONNECT_TIMEOUT_SECONDS"),
        (pool_module, "CONNECT_TIMEOUT_SECONDS"),
        (pool_module, "COMMAND_TIMEOUT_SECONDS"),
        (pool_module, "ACQUIRE_TIMEOUT_SECONDS"),
    ):
        monkeypatch.setattr(module, name, CONDITION_TIMEOUT_SECONDS)
    longer = dict.fromkeys(SERVER_TIMEOUTS, f"{CONDITION_TIMEOUT_SECONDS}s")
    monkeypatch.setattr(pool_module, "SESSION_SETTINGS", pool_module.SESSION_SETTINGS | longer)


@dataclass
class Parts:
    """The shared parts of a process; `settings` can be replaced at any time."""

    pool: Pool
    wakeups: WakeUps = field(default_factory=WakeUps)
    metrics: Metrics = field(default_factory=Metrics)
    settings: Settings = field(default_factory=Settings)

    @property
    def context(self) -> Context:
        """The context of a stage, which reads the settings of the moment."""
        return Context(self.pool, self.wakeups, self.metrics, lambda: self.settings, "worker")


@pytest.fixture
async def parts(database: Database) -> AsyncIterator[Parts]:
    """Give the parts of a process, logged in like the daemon."""
    async with Pool(database.dsn("daemon"), 3) as pool:
        yield Parts(pool)


@contextlib.asynccontextmanager
async def running(run: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run a stage for the length of the block; if it fails, the block ends with its error."""
    task, block = asyncio.ensure_future(run()), asyncio.current_task()
    assert block is not None
    is_inside = True

    def end_block(ended: "asyncio.Future[None]") -> None:
        if is_inside and not ended.cancelled() and ended.exception() is not None:
            block.cancel()

    task.add_done_callback(end_block)
    try:
        yield
    except asyncio.CancelledError:
        if not has_failed(task):
            raise
        block.uncancel()
    finally:
        is_inside = False
        failed = has_failed(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if failed:
        task.result()


def has_failed(task: "asyncio.Future[None]") -> bool:
    """Return whether the task ended with an error."""
    return task.done() and not task.cancelled() and task.exception() is not None


class CountingPool(Pool):
    """Counts its uses, to see how often a loop queries the database."""

    def __init__(self, dsn: str, size: int) -> None:
        super().__init__(dsn, size)
        self.uses = 0
        self._ended = 0
        self._used = asyncio.Event()

    async def used(self, times: int) -> None:
        """Wait until this many uses have ended; none may be running."""
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while self._ended < times:
                self._used.clear()
                await self._used.wait()
        assert self.uses == times

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        self.uses += 1
        async with super().connection() as connection:
            yield connection
        self._ended += 1
        self._used.set()


@pytest.fixture
async def counted(database: Database) -> AsyncIterator[CountingPool]:
    """Give a counting pool, logged in like the daemon."""
    async with CountingPool(database.dsn("daemon"), 2) as pool:
        yield pool
