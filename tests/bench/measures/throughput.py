"""Deliveries per second: the bare loop, webhookd end to end, and the peers with the same POST.

Each has a warm process and, except for the bare loop, its own database. All work is committed at once, and
the time runs from the commit until the database shows the last piece as done. The receiver's count must
agree. For webhookd, the costs of a delivery are measured too.
"""

import importlib.util

from tests.bench.bed import Bed
from tests.bench.machine import tree_processor_seconds
from tests.bench.node import graphile_command
from tests.bench.pipeline import Pipeline, pipeline
from tests.bench.scale import CONCURRENCY, Numbers, alternate
from webhookd.devtools.bench_database import counters
from webhookd.devtools.bench_load import PAYLOAD_BYTES
from webhookd.devtools.processes import memory_bytes, python_module

# The next transaction id: only transactions that write get one, and each of them is a durable commit. This is
# exact; pg_stat_database is not, because a backend reports its counts with a delay.
WRITES = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
# graphile-worker with the fastest client for Node, and with the client of most tutorials.
NODE_CLIENTS = {"graphile": "undici", "graphile https": "https"}
PEERS = ("pgqueuer", "procrastinate", *NODE_CLIENTS)


async def throughput(bed: Bed, number: int) -> Numbers:
    """One round of all contenders."""
    numbers: Numbers = {}
    contenders = ["bare", "webhookd", *PEERS]
    for contender in alternate(number, contenders):
        numbers |= await of_webhookd(bed) if contender == "webhookd" else await of_child(bed, contender)
    return numbers


def command_of(contender: str) -> list[str] | None:
    """The command that starts it; None if it is not installed."""
    if contender == "bare":
        return python_module("tests.bench.contenders.bare")
    if contender in NODE_CLIENTS:
        return graphile_command()
    if importlib.util.find_spec(contender) is None:
        return None
    return python_module(f"tests.bench.contenders.{contender}_worker")


async def of_child(bed: Bed, contender: str) -> Numbers:
    """The rate of a contender that is a child process."""
    command = command_of(contender)
    if command is None:
        bed.missing[contender] = "not installed"
        return {}
    deliveries = bed.scale.deliveries[contender]
    # A slow peer makes fewer deliveries, so it warms up with fewer.
    warm_up = min(bed.scale.warm_up, deliveries // 4)
    async with bed.database(migrated=False) as database:
        options = {
            "dsn": database.dsn("migrator"),
            "url": bed.receiver.url("/now"),
            "ca_file": str(bed.certificates.ca_file),
            "concurrency": CONCURRENCY,
            "payload_bytes": PAYLOAD_BYTES,
            "client": NODE_CLIENTS.get(contender),
        }
        async with bed.child(contender.split(maxsplit=1)[0], command, options) as process:
            await process.request(warm_up)
            before = await bed.receiver.requests()
            used = tree_processor_seconds(process.process_id)
            seconds = await process.request(deliveries)
            used = tree_processor_seconds(process.process_id) - used
            arrived = await bed.receiver.requests() - before
    if arrived != deliveries:
        raise RuntimeError(f"{contender} reported {deliveries} deliveries, but {arrived} arrived")
    return {contender: deliveries / seconds, f"{contender} processor": used / deliveries}


async def of_webhookd(bed: Bed) -> Numbers:
    """The rate and the costs of webhookd."""
    async with pipeline(bed) as running:
        await running.warm_up()
        numbers = await costs_of_run(bed, running, bed.scale.deliveries["webhookd"])
    bed.maximum = max(bed.maximum or 0, numbers["webhookd"])
    return numbers | await statements(bed)


async def costs_of_run(bed: Bed, running: Pipeline, deliveries: int) -> Numbers:
    """Run, and read the meters before and after. The WAL includes publishing, the processor time does not."""
    [daemon] = running.daemons
    before = await counters(running.observer)
    meters = (daemon.process.pid, bed.server.process_id)
    used: list[float] = []

    def read_meters() -> None:
        used[:] = [tree_processor_seconds(process_id) for process_id in meters]

    seconds = await running.run(deliveries, on_commit=read_meters)
    daemon_used, server_used = (
        tree_processor_seconds(process_id) - earlier for process_id, earlier in zip(meters, used, strict=True)
    )
    return {
        "webhookd": deliveries / seconds,
        "wal": ((await counters(running.observer)).wal_bytes - before.wal_bytes) / deliveries,
        "daemon processor": daemon_used / deliveries,
        "server processor": server_used / deliveries,
        "memory": float(memory_bytes(daemon.process.pid)),
    }


async def statements(bed: Bed) -> Numbers:
    """Statements and writing commits of the daemon per delivery, in a separate run that is not timed.

    Counted in the server's log, which is slow to write.
    """
    deliveries = bed.scale.deliveries["webhookd"]
    login = bed.cluster.logins["daemon"].name
    async with bed.cluster.superuser() as superuser:
        await superuser.execute(f"alter role {login} set log_statement = 'all'")
        try:
            async with pipeline(bed) as running:
                await running.warm_up()
                writes = await superuser.fetchval(WRITES)
                position = bed.server.log_bytes()
                await running.run(deliveries)
                logged = bed.server.statements_since(position)
                writes = await superuser.fetchval(WRITES) - writes
        finally:
            await superuser.execute(f"alter role {login} reset log_statement")
    return {"statements": logged / deliveries, "commits": writes / deliveries}
