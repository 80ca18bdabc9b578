"""Full disks. Under the tables, PostgreSQL returns errors; under the write-ahead log, it goes down."""

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

# Like a forgotten standby: no segment of the log is recycled.
KEEP_LOG = "select pg_create_physical_replication_slot('forgotten', true)"
FORGET_LOG = """
    select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'forgotten'
"""
# Free space on the disk of the log; the load soon fills it.
LEFT_MEBIBYTES = 3


def _disk_server(bed: Bed) -> SmallDiskServer:
    assert isinstance(bed.server, SmallDiskServer)
    return bed.server


@verb
async def fill_heap_disk(bed: Bed) -> None:
    """Fill the disk: no table can grow. Rows can still be read, and changed where a page has room."""
    await asyncio.to_thread(_disk_server(bed).disk.fill)
    bed.watch.database_lost(bed.running)
    bed.effects["disks_filled"] += 1


@verb
async def fill_wal_disk(bed: Bed) -> None:
    """Leave little space for the log, and prevent recycling; returns when the server is down."""
    server = _disk_server(bed)
    log_size = server.log_path.stat().st_size
    await bed.fetch_value(KEEP_LOG)
    await asyncio.to_thread(server.disk.fill, LEFT_MEBIBYTES)
    await until_true(lambda: b"No space left on device" in server.log_path.read_bytes()[log_size:])
    await until_true(lambda: is_gone(server.process_id))
    bed.watch.database_lost(bed.running)
    bed.effects["disks_filled"] += 1
    bed.effects["servers_stopped"] += 1


@verb
async def restart_without_space(bed: Bed) -> None:
    """Try to restart the server, which must fail without space for recovery."""
    try:
        await asyncio.to_thread(bed.server.restart)
    except ServerError:
        bed.effects["restarts_failed"] += 1
    else:
        bed.problems.append("the server started without space for its log")


@verb
async def free_disk(bed: Bed) -> None:
    """Free the disk, and start the server if it is down."""
    server = _disk_server(bed)
    bed.watch.database_restored(bed.running)
    server.disk.free()
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    while True:
        if is_gone(server.process_id):
            await asyncio.to_thread(server.restart)
        try:
            await bed.fetch_value(FORGET_LOG)
        except (OSError, asyncpg.PostgresError):
            assert time.monotonic() < deadline, "the server did not come back"
            await asyncio.sleep(0.1)
        else:
            return


def fill_heap(random: Random, rounds: int) -> list[Action]:
    """Fill the disk until publish requests get 503."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("fill_heap_disk"),
            act("refused", more=random.randint(5, 30)),
            act("all_unready"),
            act("wait", seconds=round(random.uniform(1, 3), 2)),
            act("free_disk"),
            act("database_recovers"),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


def fill_wal(random: Random, rounds: int) -> list[Action]:
    """Fill the disk until the server is down."""
    actions: list[Action] = []
    for _ in range(rounds):
        actions += [
            fault("fill_wal_disk"),
            act("refused", more=10),
            act("all_unready"),
            act("restart_without_space"),
            act("free_disk"),
            act("database_recovers"),
            act("accepted", more=random.randint(100, 300)),
        ]
    return actions


SCENARIOS = (
    Scenario(
        "heap_full",
        "no disk space for the tables",
        "503 meanwhile; with free space everything continues without help",
        fill_heap,
        effects=("disks_filled", "failed_publishes", "unready_probes"),
        rounds=3,
        needs=Needs(small_disk="heap"),
    ),
    Scenario(
        "wal_full",
        "no disk space for the write-ahead log: PostgreSQL goes down and cannot start",
        "503 meanwhile; with free space and a restarted server, no acknowledged event is missing",
        fill_wal,
        effects=("disks_filled", "servers_stopped", "restarts_failed", "failed_publishes", "unready_probes"),
        rounds=2,
        needs=Needs(
            small_disk="wal",
            server_settings={"max_wal_size": "8MB", "min_wal_size": "2MB"},
        ),
    ),
)
