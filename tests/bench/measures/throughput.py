"""Deliveries per second: the bare loop, webhookd end to end, and the peers with the same POST.

Each has a warm process and, except for the bare loop, its own database. All work is committed at once, and
the time runs from the commit until the database shows the last piece as done. The receiver's count must
agree. The processor time of the contender and of PostgreSQL belongs to the same period. For webhookd, further
costs of a delivery are measured.
"""

import importlib.util
from collections.abc import Callable

from tests.bench.bed import Bed
from tests.bench.machine import running_processes, tree_ticks
from tests.bench.node import graphile_command
from tests.bench.pipeline import Pipeline, pipeline
from tests.bench.rows import own_processor, server_processor
from tests.bench.scale import COMMITTED, CONCURRENCY, Numbers, alternate
from webhookd.devtools.bench_database import counters
from webhookd.devtools.bench_load import PAYLOAD_BYTES
from webhookd.devtools.processes import (
    ANSWER_TIMEOUT_SECONDS,
    TICKS_PER_SECOND,
    Child,
    memory_bytes,
    python_module,
)

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


class ProcessorMeters:
    """Processor time of a contender and of PostgreSQL, all their processes, from commit to completion."""

    def __init__(self, contender_id: int, server_id: int) -> None:
        self._process_ids = (contender_id, server_id)
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """Call when all work is committed: publishing does not count."""
        self._started = self._read()

    def numbers(self, contender: str, deliveries: int) -> Numbers:
        """Seconds per delivery."""
        own, server = (
            (now - started) / deliveries for now, started in zip(self._read(), self._started, strict=True)
        )
        return {own_processor(contender): own, server_processor(contender): server}

    def _read(self) -> tuple[float, float]:
        processes = running_processes()  # once for both, because it takes some milliseconds
        own, server = (tree_ticks(it, processes) / TICKS_PER_SECOND for it in self._process_ids)
        return own, server


async def deliver(process: Child, deliveries: int, on_commit: Callable[[], None] = lambda: None) -> float:
    """Have a contender make deliveries. Returns the seconds that it took after the commit."""
    committed = await process.request(deliveries)
    if committed != COMMITTED:
        raise RuntimeError(f"expected {COMMITTED!r}, got {committed!r}")
    on_commit()
    return float(await process.read(ANSWER_TIMEOUT_SECONDS))


async def of_child(bed: Bed, contender: str) -> Numbers:
    """The rate and the processor time of a contender that is a child process."""
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
            await deliver(process, warm_up)
            before = await bed.receiver.requests()
            meters = ProcessorMeters(process.process_id, bed.server.process_id)
            seconds = await deliver(process, deliveries, on_commit=meters.start)
            numbers = meters.numbers(contender, deliveries)
            arrived = await bed.receiver.requests() - before
    if arrived != deliveries:
        raise RuntimeError(f"{contender} reported {deliveries} deliveries, but {arrived} arrived")
    if contender == "bare":
        del numbers[server_processor(contender)]  # it has no database
    return {contender: deliveries / seconds} | numbers


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
    meters = ProcessorMeters(daemon.process.pid, bed.server.process_id)
    seconds = await running.run(deliveries, on_commit=meters.start)
    return meters.numbers("webhookd", deliveries) | {
        "webhookd": deliveries / seconds,
        "wal": ((await counters(running.observer)).wal_bytes - before.wal_bytes) / deliveries,
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
