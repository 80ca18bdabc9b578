"""How the pool reacts to lost connections, full disks and connection limits."""

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


async def query(parts: Parts) -> None:
    """Run a query that needs no disk space."""
    async with parts.pool.connection() as connection:
        await connection.execute("select 1")


async def test_successful_call_marks_the_database_available(parts: Parts) -> None:
    """After an outage, one successful call is enough."""
    parts.pool.report_unavailable(DatabaseUnavailable("connection refused"))
    assert not parts.pool.available
    await query(parts)
    assert parts.pool.available


async def test_successful_call_does_not_show_that_a_full_disk_has_space(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full database serves reads; it counts as available if no write failed for a while."""
    monkeypatch.setattr(pool_module, "FULL_SECONDS", 3600)
    parts.pool.report_unavailable(DatabaseFull("no space left on device"))
    await query(parts)
    assert not parts.pool.available
    monkeypatch.setattr(pool_module, "FULL_SECONDS", 0)
    parts.pool.report_unavailable(DatabaseFull("no space left on device"))
    await query(parts)
    assert parts.pool.available


async def test_callers_wait_at_the_servers_connection_limit(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers share the connections that exist, and the database does not count as unavailable."""
    superuser = await database.connect("superuser")
    waited = asyncio.Event()
    sleep = asyncio.sleep

    async def recording_sleep(seconds: float) -> None:
        waited.set()
        await sleep(seconds)

    async with Pool(database.dsn("daemon"), 3) as pool, limited(superuser, database) as limit:
        await limit(1)

        async def use() -> int:
            async with pool.connection() as connection:
                return int(await connection.fetchval("select pg_backend_pid()"))

        async with pool.connection() as connection:
            first = await connection.fetchval("select pg_backend_pid()")
            monkeypatch.setattr(asyncio, "sleep", recording_sleep)
            using = [asyncio.create_task(use()) for _ in range(5)]
            await asyncio.wait_for(waited.wait(), CONDITION_TIMEOUT_SECONDS)
        assert await asyncio.gather(*using) == [first] * 5
        assert pool.available
        assert "services paused" not in caplog.text

        # Without any connection there is nothing to wait for.
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
    """Limit the connections of the daemon's login for the block.

    Not of the database: in older minor versions an autovacuum worker counts towards that limit.
    """

    async def limit(connections: int) -> None:
        await superuser.execute(f"alter role {database.login_name('daemon')} connection limit {connections}")

    try:
        yield limit
    finally:
        await limit(-1)


def is_running(name: str) -> bool:
    """Whether a task of the driver that runs this coroutine has not ended."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return any(getattr(coroutine, "__qualname__", "").endswith(f".{name}") for coroutine in coroutines)


@pytest.fixture
async def no_loop_errors() -> AsyncIterator[list[str]]:
    """Fail if the event loop reports an unhandled error."""
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    yield errors
    gc.collect()  # a deleted task reports an exception that was never retrieved
    assert errors == []


@pytest.mark.usefixtures("no_loop_errors")
async def test_failed_release_in_the_background_is_silent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is cancelled, as at shutdown, and the connection is dead: the loop reports no error."""
    async with Pool(wire.dsn, 1) as pool:
        used = asyncio.Event()

        async def use(seconds: float) -> None:
            async with pool.connection() as connection:
                used.set()
                await connection.execute(f"select pg_sleep({seconds})")

        await use(0)
        monkeypatch.setattr(pool_module, "ACQUIRE_TIMEOUT_SECONDS", 1.0)  # also the timeout of a release
        used.clear()
        using = asyncio.create_task(use(600))
        await asyncio.wait_for(used.wait(), CONDITION_TIMEOUT_SECONDS)
        wire.blackhole()
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await using
        assert is_running("release"), "the release did not continue in the background"
        await until_true(lambda: not is_running("release"))


@pytest.mark.usefixtures("no_loop_errors")
async def test_failed_close_of_an_expired_connection_is_silent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one connection is lost, the others are closed when used; a dead one fails silently."""
    monkeypatch.setattr(pool_module, "COMMAND_TIMEOUT_SECONDS", 1.0)
    async with Pool(wire.dsn, 2) as pool:
        async with pool.connection(), pool.connection():
            pass
        with pytest.raises(DatabaseUnavailable):
            async with pool.connection() as connection:
                await connection.execute("select pg_terminate_backend(pg_backend_pid())")
        wire.blackhole()
        using = asyncio.create_task(use_once(pool))
        await until_true(lambda: is_running("close"))
        await until_true(lambda: not is_running("close"))
        using.cancel()
        with contextlib.suppress(asyncio.CancelledError, DatabaseUnavailable):
            await using


async def use_once(pool: Pool) -> None:
    """Use the pool once."""
    async with pool.connection() as connection:
        await connection.execute("select 1")


async def test_call_succeeds_if_the_connection_is_lost_afterwards(database: Database) -> None:
    """The driver removes the connection just as it is released and raises; the commit stands."""
    superuser_dsn = database.dsn("superuser")

    async def end(process_id: int) -> None:
        superuser = await asyncpg.connect(superuser_dsn)
        await superuser.execute("select pg_terminate_backend($1, 5000)", process_id)
        await superuser.close()

    for turns in range(6):
        async with Pool(database.dsn("daemon"), 1) as pool:
            async with pool.connection() as connection:
                process_id = await connection.fetchval("select pg_backend_pid()")
                # In its own loop, so that our loop notices the lost connection only now.
                thread = threading.Thread(target=asyncio.run, args=(end(process_id),))
                thread.start()
                thread.join()
                for _ in range(turns):
                    await asyncio.sleep(0)
            assert pool.available
