"""Commits that wait for a synchronous standby, and a cancelled wait: then a commit may be lost.

Uses its own server, because synchronous_standby_names applies to all databases of a server.
"""

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.database import Cluster, Database
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.pool import Pool
from webhookd.deliveries import ingest
from webhookd.deliveries.ingest import Accepted, NewEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.database import Connection

EVENT = NewEvent("order.created", "{}", "order-1")
OURS_WAIT = "from pg_stat_activity where wait_event = 'SyncRep' and datname = current_database()"
WAITING = f"select exists (select {OURS_WAIT})"
CANCEL = f"select pg_cancel_backend(pid) {OURS_WAIT}"


@pytest.fixture(scope="module")
def cluster(breakable_cluster: Cluster) -> Cluster:
    """The cluster of the breakable server, instead of the shared one."""
    return breakable_cluster


@pytest.fixture
async def superuser(database: Database) -> "AsyncIterator[Connection]":
    """A superuser on a server whose commits wait for a missing standby."""
    superuser = await database.connect("superuser")
    await wait_for_standby(superuser, "missing_standby")
    await until_commits_wait(superuser, await database.connect("superuser"))
    yield superuser
    await wait_for_standby(superuser, "")


async def wait_for_standby(superuser: "Connection", name: str) -> None:
    """Make commits wait for this standby; an empty name releases those that wait."""
    await superuser.execute(f"alter system set synchronous_standby_names = '{name}'")
    await superuser.execute("select pg_reload_conf()")
    await until(superuser, "select current_setting('synchronous_standby_names') = $1", name)


async def until_commits_wait(superuser: "Connection", other: "Connection") -> None:
    """Wait until the setting works: the checkpointer applies it, not the sessions."""
    is_seen = False

    async def commit() -> None:
        while not is_seen:
            await other.execute("select pg_logical_emit_message(true, 'probe', '')")

    committing = asyncio.create_task(commit())
    await until(superuser, WAITING)
    is_seen = True
    await superuser.execute(CANCEL)
    await committing


async def publish(pool: Pool) -> Accepted:
    """Publish one event, as ingest does."""
    async with pool.connection() as connection:
        [accepted] = await ingest.publish(connection, [EVENT])
    return accepted


async def test_cancelled_wait_is_not_acknowledged(database: Database, superuser: "Connection") -> None:
    """The server reports success and a warning; the outcome counts as unknown."""
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await superuser.execute(CANCEL)
        with pytest.raises(DatabaseUnavailable, match="standby"):
            await publishing
        assert not pool.available


async def test_warning_is_received_with_any_client_min_messages(
    database: Database, superuser: "Connection"
) -> None:
    """The database may silence warnings; the pool's sessions still receive this one."""
    await superuser.execute("set synchronous_commit = local")
    await superuser.execute(f"alter database {database.name} set client_min_messages = error")
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await superuser.execute(CANCEL)
        with pytest.raises(DatabaseUnavailable, match="standby"):
            await publishing


async def test_commits_wait_for_the_standby_with_synchronous_commit_local(
    database: Database, superuser: "Connection"
) -> None:
    """The pool's sessions override a weaker default of the database."""
    await superuser.execute("set synchronous_commit = local")
    await superuser.execute(f"alter database {database.name} set synchronous_commit = local")
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await wait_for_standby(superuser, "")
        await asyncio.wait_for(publishing, CONDITION_TIMEOUT_SECONDS)


async def test_duplicate_job_waits_for_the_standby(database: Database, superuser: "Connection") -> None:
    """A duplicate job is acknowledged when the standby has the first."""
    await superuser.execute("set synchronous_commit = local")
    await superuser.execute("select webhookd.fn_job_enable(true, 'test')")
    async with Pool(database.dsn("daemon"), 2) as pool:

        async def enqueue() -> str:
            async with pool.connection() as connection:
                answer: str = await connection.fetchval(
                    "select webhookd.fn_job_enqueue("
                    "p_kind => 'kind', p_idempotency_key => 'key', p_executor => 'DOT', p_actor => 'test')"
                )
            return answer

        first = asyncio.create_task(enqueue())
        await until(superuser, WAITING)
        await superuser.execute(CANCEL)
        await asyncio.gather(first, return_exceptions=True)
        again = asyncio.create_task(enqueue())
        await until(superuser, WAITING)
        assert not again.done()
        await wait_for_standby(superuser, "")
        assert '"duplicate": true' in await asyncio.wait_for(again, CONDITION_TIMEOUT_SECONDS)


async def test_duplicate_event_waits_for_the_standby(database: Database, superuser: "Connection") -> None:
    """The first may be on the primary only: the duplicate is acknowledged when the standby has it."""
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await superuser.execute(CANCEL)
        await asyncio.gather(publishing, return_exceptions=True)
        again = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        assert not again.done()
        await wait_for_standby(superuser, "")
        assert (await asyncio.wait_for(again, CONDITION_TIMEOUT_SECONDS)).duplicate
