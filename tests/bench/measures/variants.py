"""webhookd under a difficult condition and without it: the result is the ratio of the two rates or sizes.

Each side of a round has its own database and daemons; a long history is written once for all rounds.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from tests.bench.bed import Bed
from tests.bench.pipeline import Pipeline, event_type, pipeline, subscribe, usual_addresses
from tests.bench.scale import SUBSCRIPTIONS, Numbers, measure_sides
from tests.support.database import Database
from tests.support.history import HISTORY, vacuum
from webhookd.devtools.bench_load import payload
from webhookd.devtools.processes import memory_bytes

SLOW_MILLISECONDS = 200
SLOW_CONCURRENCY = 100
INSTANCES = 4
HANGING_TYPE = "bench.hanging"
# Do not wait for hanging requests at the end of a round.
NO_GRACE = {"shutdown_grace_seconds": 0.5}
REFILL_POLL_SECONDS = 0.02
# The trigger adds them to the routing queue, as for an application's own INSERT.
BACKLOG = """
    insert into webhookd.events (event_type, payload)
    select 'bench.n' || i % $1, $2::json from generate_series(1, $3::bigint) i
"""


async def rate(
    bed: Bed,
    *,
    addresses: Sequence[tuple[str, str]] | None = None,
    database: Database | None = None,
    further_types: Sequence[str] = (),
    services: dict[str, Any] | None = None,
) -> float:
    """Deliveries per second of a warm daemon."""
    deliveries = bed.scale.variant_deliveries
    async with pipeline(bed, addresses, database=database, services=services or {}) as running:
        await running.warm_up()
        return deliveries / await running.run(deliveries, further_types=further_types)


async def history(bed: Bed, number: int) -> Numbers:
    """With many finished deliveries, compared with an empty database."""
    database = await long_history(bed)
    return await measure_sides(
        number,
        {"history": lambda: rate(bed, database=database), "history without": lambda: rate(bed)},
    )


async def long_history(bed: Bed) -> Database:
    """A database with finished deliveries, created on first use."""
    if bed.long_history is None:
        database = await bed.kept.enter_async_context(bed.database(migrated=True))
        superuser = await database.connect("superuser")
        async with superuser.transaction():
            # Without triggers and foreign keys, which would refuse rows in their final state.
            await superuser.execute("set local session_replication_role = replica")
            for statement in HISTORY:
                await superuser.execute(statement.replace(":size", str(bed.scale.history)))
        await vacuum(superuser)
        await superuser.execute("checkpoint")
        await subscribe(database, usual_addresses(bed.receiver))
        bed.long_history = database
    return bed.long_history


async def snapshot(bed: Bed, number: int) -> Numbers:
    """While another transaction holds a snapshot from before the run to its end."""

    async def held() -> float:
        deliveries = bed.scale.variant_deliveries
        async with pipeline(bed) as running, held_snapshot(running.database):
            await running.warm_up()
            return deliveries / await running.run(deliveries)

    return await measure_sides(number, {"snapshot": held, "snapshot without": lambda: rate(bed)})


@contextlib.asynccontextmanager
async def held_snapshot(database: Database) -> AsyncIterator[None]:
    """A transaction with a snapshot that stays open."""
    other = await database.connect("superuser")
    async with other.transaction(isolation="repeatable_read", readonly=True):
        await other.fetchval("select count(*) from webhookd.subscriptions")
        yield


async def hanging(bed: Bed, number: int) -> Numbers:
    """While one endpoint, which gets half of the events, never answers."""
    addresses = [*usual_addresses(bed.receiver), (HANGING_TYPE, bed.slow_receiver.url("/hang"))]

    def side(*further_types: str) -> Callable[[], Awaitable[float]]:
        return lambda: rate(bed, addresses=addresses, further_types=further_types, services=NO_GRACE)

    return await measure_sides(number, {"hanging": side(HANGING_TYPE), "hanging without": side()})


async def instances(bed: Bed, number: int) -> Numbers:
    """Several instances with few slots each, compared with one instance, at slow endpoints."""
    receiver = bed.slow_receiver
    addresses = [
        (event_type(number), receiver.url(f"/slow/{SLOW_MILLISECONDS}/{number}"))
        for number in range(SUBSCRIPTIONS)
    ]

    def side(size: int) -> Callable[[], Awaitable[float]]:
        async def measured() -> float:
            deliveries = bed.scale.slow_deliveries * size
            async with pipeline(
                bed, addresses, instances=size, delivery={"concurrency": SLOW_CONCURRENCY}
            ) as running:
                await running.run(SLOW_CONCURRENCY * size, receiver=receiver)
                return deliveries / await running.run(deliveries, receiver=receiver)

        return measured

    return await measure_sides(number, {"instances": side(INSTANCES), "instances one": side(1)})


async def backlog(bed: Bed, number: int) -> Numbers:
    """Peak memory with a long and a short backlog. Each has its own daemon: a peak never falls."""
    sides = {"backlog memory": lambda: long_backlog(bed), "backlog memory short": lambda: short_backlog(bed)}
    return await measure_sides(number, sides)


async def long_backlog(bed: Bed) -> float:
    """All events exist before the daemon starts."""
    async with bed.database(migrated=True) as database:
        await subscribe(database, usual_addresses(bed.receiver))
        superuser = await database.connect("superuser")
        await superuser.execute("set statement_timeout = '10min'")
        await superuser.fetchval(BACKLOG, SUBSCRIPTIONS, payload(0), bed.scale.backlog)
        async with pipeline(bed, database=database) as running:
            before = await bed.receiver.requests()
            await asyncio.sleep(bed.scale.backlog_seconds)
            if await bed.receiver.requests() == before:
                raise RuntimeError("nothing was delivered")
            return peak_memory(running)


async def short_backlog(bed: Bed) -> float:
    """The backlog is refilled when half of it is delivered."""
    size = bed.scale.small_backlog
    types = [event_type(number % SUBSCRIPTIONS) for number in range(size)]
    async with pipeline(bed) as running:
        ends_at = time.monotonic() + bed.scale.backlog_seconds
        expected = await bed.receiver.requests() + size
        await running.publish(types)
        while time.monotonic() < ends_at:
            if expected - await bed.receiver.requests() <= size // 2:
                await running.publish(types[: size // 2])
                expected += size // 2
            await asyncio.sleep(REFILL_POLL_SECONDS)
        return peak_memory(running)


def peak_memory(running: Pipeline) -> float:
    """The peak memory of the only daemon."""
    [daemon] = running.daemons
    return float(memory_bytes(daemon.process.pid, "VmHWM"))
