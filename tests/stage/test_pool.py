"""What the pool makes of the database's answers."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import asyncpg
import pytest

from tests.stage.conftest import Parts
from tests.support.database import Database
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true
from tests.support.wire import Wire
from webhookd.core.errors import DatabaseFull, DatabaseUnavailable
from webhookd.db import pool as pool_module
from webhookd.db.pool import Pool

if TYPE_CHECKING:
    from tests.support.database import Connection


async def ask(parts: Parts) -> None:
    """Use it, for something that needs no room."""
    async with parts.pool.connection() as connection:
        await connection.execute("select 1")


async def test_an_answer_says_that_the_database_is_back(parts: Parts) -> None:
    """It had been away."""
    parts.pool.report_unavailable(DatabaseUnavailable("away"))
    assert not parts.pool.available
    await ask(parts)
    assert parts.pool.available


async def test_an_answer_does_not_say_that_there_is_room(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full database serves readers: it is ready when nobody was refused for a while."""
    monkeypatch.setattr(pool_module, "FULL_SECONDS", 3600)
    parts.pool.report_unavailable(DatabaseFull("no space left on device"))
    await ask(parts)
    assert not parts.pool.available
    monkeypatch.setattr(pool_module, "FULL_SECONDS", 0)
    parts.pool.report_unavailable(DatabaseFull("no space left on device"))
    await ask(parts)
    assert parts.pool.available


async def test_one_connection_of_many_is_shared(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the server has no more for us: who comes waits for it, and the database is not away."""
    superuser = await database.connect("superuser")
    tried = asyncio.Event()
    sleep = asyncio.sleep

    async def noticed(seconds: float) -> None:
        tried.set()
        await sleep(seconds)

    async with Pool(database.dsn("daemon"), 3) as pool, limited(superuser, database) as limit:
        await limit(1)

        async def use() -> int:
            async with pool.connection() as connection:
                return int(await connection.fetchval("select pg_backend_pid()"))

        async with pool.connection() as connection:
            first = await connection.fetchval("select pg_backend_pid()")
            monkeypatch.setattr(asyncio, "sleep", noticed)
            using = [asyncio.create_task(use()) for _ in range(5)]
            await asyncio.wait_for(tried.wait(), CONDITION_TIMEOUT_SECONDS)
        assert await asyncio.gather(*using) == [first] * 5
        assert pool.available
        assert "services paused" not in caplog.text

        # With none at all there is nothing to wait for.
        await superuser.execute("select pg_terminate_backend($1)", first)
        await limit(0)
        with pytest.raises(DatabaseUnavailable):
            await use()
        with pytest.raises(DatabaseUnavailable, match="too many connections"):
            await use()


@contextlib.asynccontextmanager
async def limited(
    superuser: "Connection", database: Database
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Set how many connections the daemon's login may have, until the end of the block.

    Not the database: towards its limit an autovacuum worker counts, too, with the older minor versions.
    """

    async def limit(connections: int) -> None:
        await superuser.execute(f"alter role {database.login_name('daemon')} connection limit {connections}")

    try:
        yield limit
    finally:
        await limit(-1)


def under_way(name: str) -> bool:
    """Whether a task of the driver's, which does this with a connection, has not ended."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return any(getattr(one, "__qualname__", "").endswith(f".{name}") for one in coroutines)


@pytest.fixture
async def complaints() -> AsyncIterator[list[str]]:
    """What the loop is told that nobody else heard; looked at when all is over."""
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    yield told
    gc.collect()  # who complains of an exception is the task that nobody asked for it
    assert told == []


@pytest.mark.usefixtures("complaints")
async def test_a_release_that_nobody_waits_for_may_fail(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user is cancelled, as at a shutdown, and the way is dead: the loop complains of nothing."""
    async with Pool(wire.dsn, 1) as pool:
        asked = asyncio.Event()

        async def use(seconds: float) -> None:
            async with pool.connection() as connection:
                asked.set()
                await connection.execute(f"select pg_sleep({seconds})")

        await use(0)
        monkeypatch.setattr(pool_module, "ACQUIRE_TIMEOUT_SECONDS", 1.0)  # and so of a release
        asked.clear()
        using = asyncio.create_task(use(600))
        await asyncio.wait_for(asked.wait(), CONDITION_TIMEOUT_SECONDS)
        wire.blackhole()
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await using
        assert under_way("release"), "it was to go on by itself"
        await until_true(lambda: not under_way("release"))


@pytest.mark.usefixtures("complaints")
async def test_an_old_connection_need_not_take_its_leave(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is lost, so the others are closed when they are met: by a dead way that fails, and nobody minds."""
    monkeypatch.setattr(pool_module, "COMMAND_TIMEOUT_SECONDS", 1.0)
    async with Pool(wire.dsn, 2) as pool:
        async with pool.connection(), pool.connection():
            pass
        with pytest.raises(DatabaseUnavailable):
            async with pool.connection() as connection:
                await connection.execute("select pg_terminate_backend(pg_backend_pid())")
        wire.blackhole()
        using = asyncio.create_task(ask_pool(pool))
        await until_true(lambda: under_way("close"))
        await until_true(lambda: not under_way("close"))
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError, DatabaseUnavailable):
            await using


async def ask_pool(pool: Pool) -> None:
    """Use it once."""
    async with pool.connection() as connection:
        await connection.execute("select 1")


async def test_a_use_that_succeeded_did_so_also_where_its_connection_is_lost_next(database: Database) -> None:
    """The driver clears it away just when it is given back, and complains: the commit stands."""
    superuser_dsn = database.dsn("superuser")

    async def end(process_id: int) -> None:
        superuser = await asyncpg.connect(superuser_dsn)
        await superuser.execute("select pg_terminate_backend($1, 5000)", process_id)
        await superuser.close()

    for turns in range(6):
        async with Pool(database.dsn("daemon"), 1) as pool:
            async with pool.connection() as connection:
                process_id = await connection.fetchval("select pg_backend_pid()")
                # In a loop of its own, so that ours hears of the end only now.
                thread = threading.Thread(target=asyncio.run, args=(end(process_id),))
                thread.start()
                thread.join()
                for _ in range(turns):
                    await asyncio.sleep(0)
            assert pool.available
