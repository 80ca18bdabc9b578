"""A batch of retention reads and writes only its own rows, whatever the planner knows about the tables."""

from typing import TYPE_CHECKING

import pytest

from tests.support.history import watch
from tests.support.sweeps import HOLDER, MONTH, sweep
from webhookd.retention import queries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.database import Connection, Database
    from tests.support.flow import Flow

BATCH = 100
# Of each removed event: its row, saga, job and labels, with their index entries, read several times.
BLOCKS_OF_EVENT = 250
BLOCKS = 500

# Finished deliveries with labels, every tenth a dead letter; and jobs of the job queue, and their events.
HISTORY = """
    set session_replication_role = replica;
    insert into webhookd.events (event_type, payload, created_at, tenant, labels, correlation_id)
    select 'order.n' || n % 10, '{}', now() - interval '40 days' + n * interval '1 s',
           case when n % 100 = 0 then 'acme' else '' end, '{"region": "eu"}', 'trace-' || n % 1000
    from generate_series(1, 20000) n;
    insert into webhookd.event_labels
    select e.id, e.tenant, 'region', 'eu', e.created_at from webhookd.events e;
    insert into webhookd.webhook_delivery_sagas (event_id, subscription_id, status, attempt_count, job_id)
    select e.id, 1 + e.id % 50, case when e.id % 10 = 0 then 'DeadLettered' else 'Completed'
           end::webhookd.saga_status, 1, e.id
    from webhookd.events e order by e.id;
    insert into webhookd.webhook_delivery_jobs
        (saga_id, subscription_id, event_id, attempt, status, attempt_at, result_applied_at, finished_at)
    select s.id, s.subscription_id, s.event_id, 1, 'Completed', now(), now(), now()
    from webhookd.webhook_delivery_sagas s order by s.id;
    insert into webhookd.dead_letters
        (saga_id, event_id, subscription_id, final_error_code, payload_snapshot, failed_at)
    select s.id, s.event_id, s.subscription_id, 'HTTP_500', '{}', now() - interval '1 day'
    from webhookd.webhook_delivery_sagas s where s.status = 'DeadLettered';
    insert into webhookd.retention_kept (kind, event_id, look_again_at)
    select 'payloads', e.id, now() + interval '1 hour' from webhookd.events e where e.id % 2 = 0;
    set session_replication_role = origin;
"""


@pytest.fixture
async def database(fresh_database: "Database") -> "Database":
    """Use a database per test: statistics of an earlier test, about rows that are gone, would be used."""
    return fresh_database


async def swept(connection: "Connection") -> int:
    """Delete a batch of events."""
    batch = await queries.sweep_events(connection, HOLDER, "events", BATCH, MONTH)
    return batch.examined


async def stripped(connection: "Connection") -> int:
    """Remove the payloads of a batch."""
    periods = MONTH.__class__(payloads_days=30, dead_letters_days=90)
    batch = await queries.sweep_events(connection, HOLDER, "payloads", BATCH, periods)
    return batch.examined


async def erased(connection: "Connection") -> int:
    """Erase a batch of a tenant."""
    await queries.request_tenant_erasure(connection, "acme", "me")
    since = await queries.database_time(connection)
    batch, _, _ = await queries.erase(connection, HOLDER, BATCH, since)
    return batch.examined


@pytest.mark.parametrize("call", [swept, stripped, erased], ids=lambda call: call.__name__)
@pytest.mark.parametrize("statistics", ["none", "fresh", "empty"])
async def test_batch_reads_only_its_rows(
    flow: "Flow", statistics: str, call: "Callable[[Connection], Awaitable[int]]"
) -> None:
    """Without statistics, with them, and with plans that the session made when the tables were empty."""
    if statistics == "empty":
        for _ in range(3):
            await sweep(flow)
            await sweep(flow, MONTH.__class__(payloads_days=30, dead_letters_days=90), "payloads")
            await flow.daemon.execute("select webhookd.erase('test', 10, now())")
        await flow.superuser.execute("analyze")
    await flow.superuser.execute(HISTORY)
    if statistics == "fresh":
        await flow.superuser.execute("analyze")
    examined, touched = await watch(flow.daemon, call)
    assert examined >= BATCH
    assert sum(touched.blocks.values()) <= BLOCKS + BLOCKS_OF_EVENT * BATCH, touched.blocks
