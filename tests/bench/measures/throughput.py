"""Deliveries a second: the bare loop, webhookd end to end, and the peers with the same POST, in turns.

Each has a warm process and, but for the bare loop, a database of its own; its work is committed at once, and
counted from the commit to the moment when the last piece is done and the database says so. The receiver's own
count must agree. For webhookd also: what a delivery costs.
"""

import importlib.util

from tests.bench.bed import Bed
from tests.bench.children import child, python
from tests.bench.measures.turns import Numbers, in_order
from tests.bench.node import graphile_command
from tests.bench.pipeline import Pipeline, pipeline
from tests.bench.scale import CONCURRENCY, PAYLOAD_BYTES
from tests.bench.usage import memory_bytes, processor_seconds

WAL_POSITION = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8"
# The next transaction's number: only those that write have one, and each of them is a durable commit. Exact,
# which pg_stat_database is not: a backend hands its counts on when it has time.
WRITES = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
# graphile-worker with the fastest client that Node has, and with the one that is in every tutorial.
NODE_CLIENTS = {"graphile": "undici", "graphile https": "https"}
PEERS = ("pgqueuer", "procrastinate", *NODE_CLIENTS)


async def throughput(bed: Bed, number: int) -> Numbers:
    """One round of everybody."""
    numbers: Numbers = {}
    contenders = ["bare", "webhookd", *PEERS]
    for contender in in_order(number, contenders):
        numbers |= await of_webhookd(bed) if contender == "webhookd" else await of_child(bed, contender)
    return numbers


def command_of(contender: str) -> list[str] | None:
    """How it is started; None where it is not installed."""
    if contender == "bare":
        return python("tests.bench.contenders.bare")
    if contender in NODE_CLIENTS:
        return graphile_command()
    if importlib.util.find_spec(contender) is None:
        return None
    return python(f"tests.bench.contenders.{contender}_worker")


async def of_child(bed: Bed, contender: str) -> Numbers:
    """The rate of one that is a child of ours."""
    command = command_of(contender)
    if command is None:
        bed.missing[contender] = "not installed"
        return {}
    deliveries = bed.scale.deliveries[contender]
    # As long as the others' in time: a slow peer's own start counts for less than its plan's.
    warm_up = min(bed.scale.warm_up, deliveries // 4)
    async with bed.database(migrated=False) as database:
        given = {
            "dsn": database.dsn("migrator"),
            "url": bed.receiver.url("/now"),
            "ca_file": str(bed.certificates.ca_file),
            "concurrency": CONCURRENCY,
            "payload_bytes": PAYLOAD_BYTES,
            "client": NODE_CLIENTS.get(contender),
        }
        async with child(command, bed.new_folder(contender.split(maxsplit=1)[0]), given) as process:
            await process.ask(warm_up)
            before = await bed.receiver.requests()
            used = processor_seconds(process.process_id)
            seconds = await process.ask(deliveries)
            used = processor_seconds(process.process_id) - used
            arrived = await bed.receiver.requests() - before
    if arrived != deliveries:
        raise RuntimeError(f"{contender} said that it did {deliveries}, and {arrived} arrived")
    return {contender: deliveries / seconds, f"{contender} processor": used / deliveries}


async def of_webhookd(bed: Bed) -> Numbers:
    """The rate, and the costs."""
    async with pipeline(bed) as running:
        await running.warm_up()
        numbers = await costs_of_run(bed, running, bed.scale.deliveries["webhookd"])
    bed.maximum = max(bed.maximum or 0, numbers["webhookd"])
    return numbers | await statements(bed)


async def costs_of_run(bed: Bed, running: Pipeline, deliveries: int) -> Numbers:
    """A run, and the meters before and after. Publishing is in the WAL, not in the processor time."""
    [daemon] = running.daemons
    wal = await running.observer.fetchval(WAL_POSITION)
    meters = (daemon.process.pid, bed.server.process_id)
    used: list[float] = []

    def look() -> None:
        used[:] = [processor_seconds(process_id) for process_id in meters]

    seconds = await running.run(deliveries, on_commit=look)
    daemon_used, server_used = (
        processor_seconds(process_id) - before for process_id, before in zip(meters, used, strict=True)
    )
    return {
        "webhookd": deliveries / seconds,
        "wal": (await running.observer.fetchval(WAL_POSITION) - wal) / deliveries,
        "daemon processor": daemon_used / deliveries,
        "server processor": server_used / deliveries,
        "memory": float(memory_bytes(daemon.process.pid)),
    }


async def statements(bed: Bed) -> Numbers:
    """Statements of the daemon's login and commits that write, for each delivery, in a run that nobody times.

    By the server's log, which has every statement of the login; apart, because writing it costs something.
    """
    deliveries = bed.scale.deliveries["webhookd"]
    login = bed.cluster.logins["daemon"].name
    async with bed.cluster.superuser() as superuser:
        await superuser.execute(f"alter role {login} set log_statement = 'all'")
        try:
            async with pipeline(bed) as running:
                await running.warm_up()
                writes = await superuser.fetchval(WRITES)
                offset = bed.server.log_bytes()
                await running.run(deliveries)
                logged = bed.server.statements_since(offset)
                writes = await superuser.fetchval(WRITES) - writes
        finally:
            await superuser.execute(f"alter role {login} reset log_statement")
    return {"statements": logged / deliveries, "commits": writes / deliveries}
