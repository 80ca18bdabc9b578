"""Other users of the database: table locks, open transactions, and all connections taken."""

import asyncio
import contextlib
import time
from random import Random

import asyncpg

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import heal, verb
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

TABLES = (
    "events",
    "event_routing_queue",
    "webhook_delivery_sagas",
    "webhook_delivery_jobs",
    "subscriptions",
)
# Rows in use now or soon: an instance has to wait for them or skip them.
ROWS = (
    """select id from webhookd.webhook_delivery_sagas where status <> 'Completed'
       limit 50 for update skip locked""",
    """select id from webhookd.webhook_delivery_jobs where result_applied_at is null
       limit 50 for update skip locked""",
    "select event_id from webhookd.event_routing_queue limit 50 for update skip locked",
)
WAITERS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and application_name = 'webhookd' and wait_event_type = 'Lock'
"""
TERMINATE_BACKENDS = """
    select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity
    where datname = current_database() and application_name = 'webhookd'
"""
# The connections available to ordinary roles.
AVAILABLE_CONNECTIONS = """
    select current_setting('max_connections')::integer
         - current_setting('superuser_reserved_connections')::integer
"""
MAX_CONNECTIONS = 45


@heal
async def lock_table(bed: Bed, *, table: str, seconds: float) -> int:
    """Lock a table as a foreign migration would; returns how many calls wait for it."""
    async with bed.superuser() as superuser, superuser.transaction():
        await superuser.execute(f"lock table webhookd.{table} in access exclusive mode")
        await asyncio.sleep(seconds)
        waiting: int = await superuser.fetchval(WAITERS)
    bed.effects["calls_waiting"] += waiting
    return waiting


@heal
async def leave_transaction_open(bed: Bed, *, seconds: float) -> None:
    """Leave two transactions open: one holds a snapshot, the other holds row locks.

    Two, because rows in an old snapshot may have changed and could not be locked.
    """
    async with (
        bed.superuser() as reader,
        reader.transaction(isolation="repeatable_read"),
        bed.superuser() as holder,
        holder.transaction(),
    ):
        await reader.fetchval("select count(*) from webhookd.subscriptions")
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            locked = 0
            while not locked:
                for rows in ROWS:
                    locked += len(await holder.fetch(rows))
        bed.effects["rows_locked"] += locked
        await asyncio.sleep(seconds)


@verb
async def take_all_connections(bed: Bed) -> None:
    """Take every connection; terminate those of the instances until they have none."""
    dsn = bed.database.dsn("application")
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    # This connection stays open like the others: an instance would take its place.
    superuser = await asyncpg.connect(bed.database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS)
    bed.holders.append(superuser)
    available: int = await superuser.fetchval(AVAILABLE_CONNECTIONS)
    # Count them. A refused connection does not prove that none is free: another client that is just being
    # refused occupies a place for a moment.
    while len(bed.holders) < available:
        assert time.monotonic() < deadline, "instances still have connections"
        bed.effects["backends_terminated"] += await superuser.fetchval(TERMINATE_BACKENDS)
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while len(bed.holders) < available:
                bed.holders.append(await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_SECONDS))
                bed.effects["connections_taken"] += 1
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    bed.watch.database_lost(bed.running)


@verb
async def block_pools(bed: Bed) -> None:
    """Take a lock for which every connection of every pool waits, until it is released."""
    holder = await asyncpg.connect(bed.database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS)
    bed.holders.append(holder)
    await holder.execute("begin; lock table webhookd.webhook_delivery_jobs in access exclusive mode")
    pool_size = bed.needs.settings["database.pool_size"]
    assert isinstance(pool_size, int)
    await bed.until(f"select ({WAITERS}) >= $1", pool_size * len(bed.running))
    bed.watch.database_lost(bed.running)
    bed.effects["pools_exhausted"] += len(bed.running)


@verb
async def release(bed: Bed) -> None:
    """Release everything that was taken or locked."""
    bed.watch.database_restored(bed.running)
    await bed.release_holders()


def lock(random: Random, rounds: int) -> list[Action]:
    """Lock every table, mostly for less than the lock timeout; once for longer."""
    actions: list[Action] = []
    for number in range(rounds):
        for table in random.sample(TABLES, len(TABLES)):
            seconds = 11.0 if (number, table) == (0, "webhook_delivery_jobs") else random.uniform(0.2, 2)
            actions += [
                fault("lock_table", table=table, seconds=round(seconds, 2)),
                act("accepted", more=random.randint(20, 100)),
            ]
        actions += [
            fault("leave_transaction_open", seconds=round(random.uniform(2, 5), 2)),
            act("accepted", more=random.randint(20, 100)),
        ]
    return actions


def exhaust_connections(random: Random, rounds: int) -> list[Action]:
    """Exhaust the server's connections or the pools, until every instance is unready."""
    actions: list[Action] = []
    for number in range(rounds):
        # Calls wait up to nine seconds for a lock and five for a connection; the fault ends soon after.
        ways = [(fault("take_all_connections"), round(random.uniform(0, 5), 2)), (fault("block_pools"), 0)]
        way, seconds = ways[number % 2]
        actions += [
            way,
            act("refused", more=random.randint(5, 20)),
            act("all_unready"),
            act("wait", seconds=seconds),
            act("release"),
            act("database_recovers"),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "locks",
        "tables locked by another session, and transactions left open with locked rows",
        "calls wait or get 503, and continue afterwards",
        lock,
        effects=("calls_waiting", "rows_locked"),
        rounds=2,
    ),
    Scenario(
        "pool",
        "instances with two connections each: both wait for a lock, or the server has none left",
        "503 meanwhile; instances use the connections when they are free again",
        exhaust_connections,
        effects=("connections_taken", "backends_terminated", "pools_exhausted", "failed_publishes"),
        rounds=4,
        needs=Needs(
            settings={"database.pool_size": 2}, server_settings={"max_connections": str(MAX_CONNECTIONS)}
        ),
    ),
)
