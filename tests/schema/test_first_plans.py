"""Plans of the first minute: made while every table was empty, and kept until statistics exist.

A vacuum of an empty table records zero rows, and a planner that believes it prefers to read a whole index.
Without a vacuum the planner assumes some hundreds. test_plans.py covers later plans.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import pytest

from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.history import turn_autovacuum_off, vacuum
from webhookd.deliveries import attempts, ingest, sagas

if TYPE_CHECKING:
    from tests.support.database import Connection

Result = TypeVar("Result")

BATCH = 50
HALF = BATCH // 2
BATCHES = 30
# A call may read the saga and the attempt of a delivery a few times, but no older ones.
LOOKS = 9

ENTRIES = """
    select sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint from pg_index i
    where i.indrelid = any('{webhookd.webhook_delivery_jobs,webhookd.webhook_delivery_sagas}'::regclass[])
"""


class FirstMinute:
    """A session that has worked since the tables were empty, and the index entries that each call read."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.read: dict[str, int] = {}

    async def deliver(self) -> None:
        """Deliver one batch."""
        daemon = self.flow.daemon
        await ingest.publish(daemon, [ingest.NewEvent("order.created", "{}")] * BATCH)
        await self.watch("route", self.flow.route)
        await self.watch("start", lambda: self.flow.start(quota=BATCH))
        leases = await self.watch("claim", lambda: self.flow.claim(BATCH))
        assert len(leases) == BATCH
        await self.watch("load", lambda: attempts.load(daemon, leases))
        reports = [attempts.Report(lease.job_id, lease.lease_token, 200) for lease in leases]
        done = await self.watch("complete", lambda: sagas.complete(daemon, reports[:HALF]))
        assert len(done) == HALF
        await self.watch("report", lambda: attempts.report(daemon, reports[HALF:]))
        assert len(await self.watch("apply", self.flow.apply)) == BATCH - HALF

    async def watch(self, name: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """Run a call in a transaction, whose counters belong to this session only."""
        daemon: Connection = self.flow.daemon
        async with daemon.transaction():
            before = await daemon.fetchval(ENTRIES)
            result = await call()
            self.read[name] = await daemon.fetchval(ENTRIES) - before
        return result


@pytest.mark.parametrize("vacuumed", [False, True])
async def test_plans_made_on_empty_tables_use_keys(fresh_database: Database, *, vacuumed: bool) -> None:
    """After 1,500 deliveries a session that planned before the first reads only the rows it needs."""
    flow = await Flow.open(fresh_database)
    await turn_autovacuum_off(flow.superuser)
    await flow.subscribe("order.created")
    if vacuumed:
        await vacuum(flow.superuser)
    minute = FirstMinute(flow)
    for _ in range(BATCHES):
        await minute.deliver()
    assert {name: count for name, count in minute.read.items() if count > LOOKS * BATCH} == {}
