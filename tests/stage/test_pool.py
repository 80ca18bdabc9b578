"""What the pool makes of the database's answers."""

import asyncio
import contextlib
import gc

import pytest

from tests.stage.conftest import Parts
from tests.support.database import Database
from tests.support.waiting import WAIT_TIMEOUT_SECONDS, until_true
from tests.support.wire import Wire
from webhookd.model.errors import DatabaseFull, DatabaseUnavailable
from webhookd.store import pool as pool_module
from webhookd.store.pool import Pool


async def ask(parts: Parts) -> None:
    """Use it, for something that needs no room."""
    async with parts.pool.connection() as connection:
        await connection.execute("select 1")


async def test_an_answer_says_that_the_database_is_back(parts: Parts) -> None:
    """It had been away."""
    parts.pool.lost(DatabaseUnavailable("away"))
    assert not parts.pool.available
    await ask(parts)
    assert parts.pool.available


async def test_an_answer_does_not_say_that_there_is_room(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full database serves readers: it is ready when nobody was refused for a while."""
    parts.pool.lost(DatabaseFull("no space left on device"))
    await ask(parts)
    assert not parts.pool.available
    monkeypatch.setattr(pool_module, "FULL_SECONDS", 0)
    parts.pool.lost(DatabaseFull("no space left on device"))
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

    async with Pool(database.dsn("daemon"), 3) as pool:
        await superuser.execute(f"alter database {database.name} connection limit 2")  # hers, and one

        async def use() -> int:
            async with pool.connection() as connection:
                return int(await connection.fetchval("select pg_backend_pid()"))

        async with pool.connection() as connection:
            first = await connection.fetchval("select pg_backend_pid()")
            monkeypatch.setattr(asyncio, "sleep", noticed)
            using = [asyncio.create_task(use()) for _ in range(5)]
            await asyncio.wait_for(tried.wait(), WAIT_TIMEOUT_SECONDS)
        assert await asyncio.gather(*using) == [first] * 5
        assert pool.available
        assert "everything waits" not in caplog.text

        # With none at all there is nothing to wait for.
        await superuser.execute("select pg_terminate_backend($1)", first)
        await superuser.execute(f"alter database {database.name} connection limit 0")
        with pytest.raises(DatabaseUnavailable):
            await use()
        with pytest.raises(DatabaseUnavailable, match="too many connections"):
            await use()


def releases() -> list[str]:
    """What the driver's tasks that give a connection back are called."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return [name for one in coroutines if (name := getattr(one, "__qualname__", "")).endswith(".release")]


async def test_a_release_that_nobody_waits_for_may_fail(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its user is cancelled, as at a shutdown, and the way is dead: the loop complains of nothing."""
    monkeypatch.setattr(pool_module, "ACQUIRE_TIMEOUT_SECONDS", 0.5)  # and so of a release
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told["message"]))
    wire = Wire(database.dsn("daemon"))
    await wire.open()
    async with Pool(wire.dsn, 1) as pool:
        asked = asyncio.Event()

        async def use() -> None:
            async with pool.connection() as connection:
                asked.set()
                await connection.execute("select pg_sleep(600)")

        using = asyncio.create_task(use())
        await asyncio.wait_for(asked.wait(), WAIT_TIMEOUT_SECONDS)
        wire.blackhole()
        using.cancel()
        await until_true(lambda: releases() != [])
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await using
        assert releases() != [], "it was to go on by itself"
        await until_true(lambda: releases() == [])
        gc.collect()  # who complains of an exception is the task that nobody asked for it
    await wire.close()
    assert complaints == []
