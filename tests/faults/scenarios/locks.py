"""Who takes more of the database than his share: a table's lock, an open transaction, every connection."""

import asyncio
import contextlib
from random import Random

import asyncpg

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.verbs import verb
from tests.support.database import close_connection
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS

TABLES = (
    "events",
    "event_routing_queue",
    "webhook_delivery_sagas",
    "webhook_delivery_jobs",
    "subscriptions",
)
# Rows that are being worked at, or will be: whoever wants one of them waits, or goes round it.
ROWS = (
    "select id from webhookd.webhook_delivery_sagas where status <> 'Completed' limit 50 for update",
    "select id from webhookd.webhook_delivery_jobs where result_applied_at is null limit 50 for update",
    "select event_id from webhookd.event_routing_queue limit 50 for update",
)
WAITERS = """
    select count(*) from pg_stat_activity
    where datname = current_database() and application_name = 'webhookd' and wait_event_type = 'Lock'
"""
END_BACKENDS = """
    select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity
    where datname = current_database() and application_name = 'webhookd'
"""
MAX_CONNECTIONS = 45


@verb
async def lock_table(bed: Bed, *, table: str, seconds: float) -> None:
    """As somebody's migration would, for so long."""
    async with bed.superuser() as superuser, superuser.transaction():
        await superuser.execute(f"lock table webhookd.{table} in access exclusive mode")
        await asyncio.sleep(seconds)
        bed.effects["calls_waiting"] += await superuser.fetchval(WAITERS)


@verb
async def leave_transaction_open(bed: Bed, *, seconds: float) -> None:
    """With rows locked and a snapshot held, as a forgotten session does."""
    async with bed.superuser() as superuser, superuser.transaction(isolation="repeatable_read"):
        for rows in ROWS:
            # It came to hold them, or another had been quicker: both happen in life.
            with contextlib.suppress(asyncpg.SerializationError):
                async with superuser.transaction():
                    bed.effects["rows_held"] += len(await superuser.fetch(rows))
        await asyncio.sleep(seconds)


@verb
async def take_all_connections(bed: Bed, *, seconds: float) -> None:
    """Every connection that the server has, those of the instances too, which are ended first."""
    taken: list[asyncpg.Connection[asyncpg.Record]] = []
    try:
        async with bed.superuser() as superuser:
            bed.effects["backends_terminated"] += await superuser.fetchval(END_BACKENDS)
            with contextlib.suppress(asyncpg.TooManyConnectionsError):
                while len(taken) < MAX_CONNECTIONS:
                    taken.append(await _connect(bed))
            await asyncio.sleep(seconds)
    finally:
        bed.effects["connections_taken"] += len(taken)
        for connection in taken:
            await close_connection(connection)


async def _connect(bed: Bed) -> "asyncpg.Connection[asyncpg.Record]":
    return await asyncpg.connect(bed.database.dsn("application"), timeout=CONNECT_TIMEOUT_SECONDS)


def locking(random: Random, rounds: int) -> list[Action]:
    """Every table, mostly for less than anybody waits; once for longer."""
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


def exhausting(random: Random, rounds: int) -> list[Action]:
    """For longer than anybody waits for a connection."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("take_all_connections", seconds=round(random.uniform(2, 7), 2)),
            act("database_is_used"),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "locks",
        "tables locked by somebody else, and transactions left open with rows locked",
        "calls wait or are answered 503, and go on afterwards",
        locking,
        effects=("calls_waiting", "rows_held"),
        rounds=2,
    ),
    Scenario(
        "pool",
        "instances with two connections each, and a server that has none left",
        "503 meanwhile; connections that are free again are used",
        exhausting,
        effects=("connections_taken", "turned_away"),
        rounds=4,
        needs=Needs(
            settings={"database.pool_size": 2}, server_settings={"max_connections": str(MAX_CONNECTIONS)}
        ),
    ),
)
