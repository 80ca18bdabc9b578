"""The most memory that a daemon has while it delivers from a long backlog, and from a short one."""

import asyncio
import time

from tests.bench.bed import Bed
from tests.bench.measures.turns import Numbers, in_turns
from tests.bench.pipeline import Pipeline, event_type, pipeline, subscribe, usual_addresses
from tests.bench.scale import SUBSCRIPTIONS, payload
from tests.bench.usage import peak_memory_bytes

# By the trigger they are in the routing queue, as if an application had inserted them.
BACKLOG = """
    insert into webhookd.events (event_type, payload)
    select 'bench.n' || i % $1, $2::json from generate_series(1, $3::bigint) i
"""
REFILL_POLL_SECONDS = 0.02


async def backlog(bed: Bed, number: int) -> Numbers:
    """Both, for the same time. Memory never falls, so each has a daemon of its own."""
    sides = {"backlog memory": lambda: long_backlog(bed), "backlog memory short": lambda: short_backlog(bed)}
    return await in_turns(number, sides)


async def long_backlog(bed: Bed) -> float:
    """All of it is there before the daemon starts."""
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
    """Refilled by half when half of it has gone."""
    size = bed.scale.small_backlog
    types = [event_type(number % SUBSCRIPTIONS) for number in range(size)]
    async with pipeline(bed) as running:
        ends = time.monotonic() + bed.scale.backlog_seconds
        expected = await bed.receiver.requests() + size
        await running.publish(types)
        while time.monotonic() < ends:
            if expected - await bed.receiver.requests() <= size // 2:
                await running.publish(types[: size // 2])
                expected += size // 2
            await asyncio.sleep(REFILL_POLL_SECONDS)
        return peak_memory(running)


def peak_memory(running: Pipeline) -> float:
    """Of the one daemon that runs."""
    [daemon] = running.daemons
    return float(peak_memory_bytes(daemon.process.pid))
