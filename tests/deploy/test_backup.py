"""A restored dump, made as the runbook says, continues where the original was."""

import asyncio
from itertools import chain
from pathlib import Path

import asyncpg
import pytest

from tests.schema.test_erasure import MARKS, TENANT, create_everything
from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.installations import local_installations
from tests.support.sweeps import erase
from tests.support.tools import run_program
from webhookd.core.errors import Refusal
from webhookd.db import migrations
from webhookd.embedded.installation import Installation, wheel_installations
from webhookd.retention import queries

COUNTS = """
    select (select count(*) from webhookd.events), (select count(*) from webhookd.event_routing_queue),
           (select count(*) from webhookd.webhook_delivery_sagas)
"""


def installation_that_dumps(major: int) -> Installation:
    """Return the oldest installation that is not older than the server: pg_dump refuses a newer server."""
    found = chain(local_installations(), wheel_installations())
    able = (installation for installation in found if installation.major >= major)
    return min(able, key=lambda installation: installation.major)


async def test_restored_dump_continues(
    flow: Flow, database: Database, empty_database: Database, tmp_path: Path
) -> None:
    """No event is routed twice, the waiting event is routed, and events stay immutable."""
    await flow.subscribe()
    routed = await flow.publish()
    await flow.route()
    waiting = await flow.publish()
    programs, dump = installation_that_dumps(database.server.major), str(tmp_path / "app.dump")
    for name, *arguments in (
        ("pg_dump", "--format=custom", f"--file={dump}", database.dsn("superuser")),
        ("pg_restore", "--exit-on-error", f"--dbname={empty_database.dsn('superuser')}", dump),
    ):
        await asyncio.to_thread(run_program, programs.program(name), *arguments)

    assert not await migrations.check(empty_database.dsn("daemon"))
    restored = await Flow.open(empty_database)
    assert tuple(await restored.daemon.fetchrow(COUNTS) or ()) == (2, 1, 1)
    await restored.route()
    sagas = await restored.daemon.fetch(
        "select event_id from webhookd.webhook_delivery_sagas order by event_id"
    )
    assert [row[0] for row in sagas] == [routed, waiting]
    with pytest.raises(asyncpg.PostgresError) as refused:
        await restored.superuser.execute("delete from webhookd.events")
    assert refused.value.sqlstate == Refusal.IMMUTABLE.value


async def test_dump_contains_nothing_of_an_erased_tenant(flow: Flow, database: Database) -> None:
    """The text of the whole database is searched; before the erasure, it has every mark."""
    programs = installation_that_dumps(database.server.major)

    async def dumped() -> str:
        return await asyncio.to_thread(
            run_program, programs.program("pg_dump"), "--format=plain", database.dsn("superuser")
        )

    def found(text: str) -> set[str]:
        return {mark for mark in MARKS.values() if mark in text or mark.encode().hex() in text}

    await create_everything(flow, TENANT, MARKS)
    assert found(await dumped()) == set(MARKS.values())
    await queries.request_tenant_erasure(flow.daemon, TENANT, "support")
    assert len(await erase(flow)) == 1
    assert found(await dumped()) == set()
