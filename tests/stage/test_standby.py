"""Commits that wait for a synchronous standby, and somebody who cancels the wait: committed is not safe.

With a server of their own: whom commits wait for is set for all of a server's databases.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.breakable import BreakableServer
from tests.support.database import Cluster, Database
from tests.support.installations import installation_near
from tests.support.postgres import Server, run_apart
from tests.support.waiting import until, until_finished
from webhookd.model.errors import DatabaseUnavailable
from webhookd.store import events
from webhookd.store.events import Accepted, NewEvent
from webhookd.store.pool import Pool

if TYPE_CHECKING:
    from tests.support.database import Connection

EVENT = NewEvent("order.created", "{}", "order-1")
WAITING = "select exists (select from pg_stat_activity where wait_event = 'SyncRep')"
CANCEL = "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def server(postgres: Server) -> Iterator[BreakableServer]:
    """Give a server like the selected one, for these tests alone."""
    server = BreakableServer(installation_near(postgres.major))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def cluster(server: BreakableServer) -> Cluster:
    """Give its logins and template, in place of the shared server's."""
    cluster = Cluster(server)
    run_apart(cluster.prepare())
    return cluster


@pytest.fixture
async def superuser(database: Database) -> "AsyncIterator[Connection]":
    """Give a superuser of a server whose commits wait for a standby that is not there."""
    superuser = await database.connect("superuser")
    await wait_for_standby(superuser, "nobody")
    yield superuser
    await wait_for_standby(superuser, "")


async def wait_for_standby(superuser: "Connection", name: str) -> None:
    """Let commits wait for it from now on; for none, let those go that wait."""
    await superuser.execute(f"alter system set synchronous_standby_names = '{name}'")
    await superuser.execute("select pg_reload_conf()")
    await until(superuser, "select current_setting('synchronous_standby_names') = $1", name)


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
        await until_finished(again)
        assert again.result().duplicate
