"""Who takes more of the database than his share: a table's lock, an open transaction, every connection."""

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
# Rows that are being worked at, or will be: whoever wants one of them waits, or goes round it.
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
END_BACKENDS = """
    select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity
    where datname = current_database() and application_name = 'webhookd'
"""
# That anybody can have but a superuser.
PLACES = """
    select current_setting('max_connections')::integer
         - current_setting('superuser_reserved_connections')::integer
"""
MAX_CONNECTIONS = 45


@heal
async def lock_table(bed: Bed, *, table: str, seconds: float) -> int:
    """As somebody's migration would, for so long; how many calls wait for it."""
    async with bed.superuser() as superuser, superuser.transaction():
        await superuser.execute(f"lock table webhookd.{table} in access exclusive mode")
        await asyncio.sleep(seconds)
        waiting: int = await superuser.fetchval(WAITERS)
    bed.effects["calls_waiting"] += waiting
    return waiting


@heal
async def leave_transaction_open(bed: Bed, *, seconds: float) -> None:
    """With rows locked and a snapshot held, as two forgotten sessions do: a snapshot's rows move on."""
    async with (
        bed.superuser() as reader,
        reader.transaction(isolation="repeatable_read"),
        bed.superuser() as holder,
        holder.transaction(),
    ):
        await reader.fetchval("select count(*) from webhookd.subscriptions")
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            held = 0
            while not held:
                for rows in ROWS:
                    held += len(await holder.fetch(rows))
        bed.effects["rows_held"] += held
        await asyncio.sleep(seconds)


@verb
async def take_all_connections(bed: Bed) -> None:
    """Every connection that the server has: those of instances are ended until none has one any more."""
    dsn = bed.database.dsn("application")
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    # It keeps its place, as what it takes does: one that was given back would be an instance's.
    superuser = await asyncpg.connect(bed.database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS)
    bed.holders.append(superuser)
    places: int = await superuser.fetchval(PLACES)
    # Counted: to be refused is no sign that none is free, for who else is refused has a place meanwhile.
    while len(bed.holders) < places:
        assert time.monotonic() < deadline, "instances have connections still"
        bed.effects["backends_terminated"] += await superuser.fetchval(END_BACKENDS)
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while len(bed.holders) < places:
                bed.holders.append(await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_SECONDS))
                bed.effects["connections_taken"] += 1
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    bed.watch.away(bed.living)


@verb
async def occupy_pools(bed: Bed) -> None:
    """A lock that keeps every connection of every pool waiting, until it is let go."""
    holder = await asyncpg.connect(bed.database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS)
    bed.holders.append(holder)
    await holder.execute("begin; lock table webhookd.webhook_delivery_jobs in access exclusive mode")
    pool_size = bed.needs.settings["database.pool_size"]
    assert isinstance(pool_size, int)
    await bed.until(f"select ({WAITERS}) >= $1", pool_size * len(bed.living))
    bed.watch.away(bed.living)
    bed.effects["pools_exhausted"] += len(bed.living)


@verb
async def let_go(bed: Bed) -> None:
    """Of all that was taken or locked."""
    bed.watch.back(bed.living)
    await bed.let_go()


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
    """The server's connections, and the pools' own: until everybody has said that he has none."""
    actions: list[Action] = []
    for number in range(rounds):
        # A lock is waited for nine seconds, and a connection for five: soon after these it is let go.
        ways = [(fault("take_all_connections"), round(random.uniform(0, 5), 2)), (fault("occupy_pools"), 0)]
        way, seconds = ways[number % 2]
        actions += [
            way,
            act("refused", more=random.randint(5, 20)),
            act("all_unready"),
            act("wait", seconds=seconds),
            act("let_go"),
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
        "instances with two connections each: both wait for a lock, or the server has none left",
        "503 meanwhile; connections that are free again are used",
        exhausting,
        effects=("connections_taken", "backends_terminated", "pools_exhausted", "turned_away"),
        rounds=4,
        needs=Needs(
            settings={"database.pool_size": 2}, server_settings={"max_connections": str(MAX_CONNECTIONS)}
        ),
    ),
)
