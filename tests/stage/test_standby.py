"""Commits that wait for a synchronous standby, and somebody who cancels the wait: committed is not safe.

With a server of their own: whom commits wait for is set for all of a server's databases.
"""

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.database import Cluster, Database
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from webhookd.core.errors import DatabaseUnavailable
from webhookd.db.pool import Pool
from webhookd.deliveries import ingest as events
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
    """Give the one of a server of their own, in place of the shared one's."""
    return breakable_cluster


@pytest.fixture
async def superuser(database: Database) -> "AsyncIterator[Connection]":
    """Give a superuser of a server whose commits wait for a standby that is not there."""
    superuser = await database.connect("superuser")
    await wait_for_standby(superuser, "nobody")
    await until_commits_wait(superuser, await database.connect("superuser"))
    yield superuser
    await wait_for_standby(superuser, "")


async def wait_for_standby(superuser: "Connection", name: str) -> None:
    """Let commits wait for it from now on; for none, let those go that wait."""
    await superuser.execute(f"alter system set synchronous_standby_names = '{name}'")
    await superuser.execute("select pg_reload_conf()")
    await until(superuser, "select current_setting('synchronous_standby_names') = $1", name)


async def until_commits_wait(superuser: "Connection", other: "Connection") -> None:
    """It is not the sessions' setting that makes them, but what the checkpointer made of its own."""
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
    """One event, as ingest does."""
    async with pool.connection() as connection:
        [accepted] = await events.publish(connection, [EVENT])
    return accepted


async def test_a_cancelled_wait_is_no_acknowledgement(database: Database, superuser: "Connection") -> None:
    """The server says that it is committed, and warns: what the standby may not have counts as unknown."""
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await superuser.execute(CANCEL)
        with pytest.raises(DatabaseUnavailable, match="standby"):
            await publishing
        assert not pool.available


async def test_a_warning_is_heard_whatever_the_database_is_set_to(
    database: Database, superuser: "Connection"
) -> None:
    """Somebody may have silenced warnings for all sessions; ours listen for this one."""
    await superuser.execute("set synchronous_commit = local")
    await superuser.execute(f"alter database {database.name} set client_min_messages = error")
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await superuser.execute(CANCEL)
        with pytest.raises(DatabaseUnavailable, match="standby"):
            await publishing


async def test_a_commit_that_is_only_local_is_not_enough(database: Database, superuser: "Connection") -> None:
    """Nor do ours wait for less than the standby because the database's default is less."""
    await superuser.execute("set synchronous_commit = local")
    await superuser.execute(f"alter database {database.name} set synchronous_commit = local")
    async with Pool(database.dsn("daemon"), 2) as pool:
        publishing = asyncio.create_task(publish(pool))
        await until(superuser, WAITING)
        await wait_for_standby(superuser, "")
        await asyncio.wait_for(publishing, CONDITION_TIMEOUT_SECONDS)


async def test_a_job_enqueued_again_waits_as_its_first_did(
    database: Database, superuser: "Connection"
) -> None:
    """The same of work: a duplicate is acknowledged when the standby has it."""
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


async def test_a_duplicate_waits_as_its_first_did(database: Database, superuser: "Connection") -> None:
    """What it acknowledges may be on the primary alone: it is answered when the standby has it."""
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
