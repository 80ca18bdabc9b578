"""A full disk: under the tables an error that passes, under the write-ahead log a server that stays down."""

import asyncio
import time
from random import Random

import asyncpg

from tests.faults.bed import Bed
from tests.faults.plan import Action, Needs, Scenario, act, fault
from tests.faults.servers import SmallDiskServer
from tests.faults.verbs import verb
from tests.support.postgres import ServerError
from tests.support.processes import is_gone
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true

# As a standby that was forgotten would: nothing of the log is used again.
KEEP_LOG = "select pg_create_physical_replication_slot('forgotten', true)"
FORGET_LOG = """
    select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'forgotten'
"""
# Of the log's disk: enough to see it run full.
LEFT_MEBIBYTES = 3


def _disk_server(bed: Bed) -> SmallDiskServer:
    assert isinstance(bed.server, SmallDiskServer)
    return bed.server


@verb
async def fill_heap_disk(bed: Bed) -> None:
    """No table can grow any more; what is there can be read, and changed where a page has room."""
    await asyncio.to_thread(_disk_server(bed).disk.fill)
    bed.watch.away(bed.living)
    bed.effects["disks_filled"] += 1


@verb
async def fill_wal_disk(bed: Bed) -> None:
    """The log cannot grow much more, and may not be used again; returns when the server is down."""
    server = _disk_server(bed)
    written = server.log_path.stat().st_size
    await bed.ask(KEEP_LOG)
    await asyncio.to_thread(server.disk.fill, LEFT_MEBIBYTES)
    await until_true(lambda: b"No space left on device" in server.log_path.read_bytes()[written:])
    await until_true(lambda: is_gone(server.process_id))
    bed.watch.away(bed.living)
    bed.effects["disks_filled"] += 1
    bed.effects["servers_ended"] += 1


@verb
async def restart_in_vain(bed: Bed) -> None:
    """There is no room to recover in."""
    try:
        await asyncio.to_thread(bed.server.restart)
    except ServerError:
        bed.effects["restarts_refused"] += 1
    else:
        bed.problems.append("the server started, with no room for its log")


@verb
async def free_disk(bed: Bed) -> None:
    """Make room, and start the server if it is down."""
    server = _disk_server(bed)
    bed.watch.back(bed.living)
    server.disk.free()
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    while True:
        if is_gone(server.process_id):
            await asyncio.to_thread(server.restart)
        try:
            await bed.ask(FORGET_LOG)
        except (OSError, asyncpg.PostgresError):
            assert time.monotonic() < deadline, "the server did not come back"
            await asyncio.sleep(0.1)
        else:
            return


def filling_heap(random: Random, rounds: int) -> list[Action]:
    """Until publications are refused."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("fill_heap_disk"),
            act("refused", more=random.randint(5, 30)),
            act("all_unready"),
            act("wait", seconds=round(random.uniform(1, 3), 2)),
            act("free_disk"),
            act("database_is_used"),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


def filling_wal(random: Random, rounds: int) -> list[Action]:
    """Until the server is down."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("fill_wal_disk"),
            act("refused", more=10),
            act("all_unready"),
            act("restart_in_vain"),
            act("free_disk"),
            act("database_is_used"),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "heap_full",
        "no room under the tables",
        "503 meanwhile; with room again everything goes on by itself",
        filling_heap,
        effects=("disks_filled", "turned_away", "looks_unready"),
        rounds=3,
        needs=Needs(small_disk="heap"),
    ),
    Scenario(
        "wal_full",
        "no room under the write-ahead log: PostgreSQL goes down, and cannot start",
        "503 meanwhile; with room, and the server started again, nothing acknowledged is missing",
        filling_wal,
        effects=("disks_filled", "servers_ended", "restarts_refused", "turned_away", "looks_unready"),
        rounds=2,
        needs=Needs(
            small_disk="wal",
            server_settings={"max_wal_size": "8MB", "min_wal_size": "2MB"},
        ),
    ),
)
