"""Milliseconds from publish to arrival: for an idle daemon, and at shares of its maximum rate.

The idle daemon is compared with the least that durable work can take on the same server: the INSERT of one
row, committed, in turn with the events.

Another process publishes. The idle measure uses the arrival times of webhookd's own receiver, the loaded one
those of nginx, which reports whole milliseconds. Both use the clock of this machine.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from tests.bench.bed import Bed
from tests.bench.measures.variants import rate
from tests.bench.pipeline import Pipeline, event_type, pipeline
from tests.bench.scale import SUBSCRIPTIONS, Numbers, alternate
from webhookd.devtools.bench_load import Receiver, latencies_ms, percentile
from webhookd.devtools.processes import Child, python_module

SHARES = (10, 50, 90)
# The first events meet connections that are still opening.
SKIPPED_SHARE = 0.2
ARRIVAL_TIMEOUT_SECONDS = 120


# One row of the size of an event, with a key, as the simplest application would store it.
INSERT_TABLE = """
    create table public.bench_inserts (id bigint generated always as identity primary key, payload json)
"""
INSERT = "insert into public.bench_inserts (payload) values ($1)"


async def idle(bed: Bed, number: int) -> Numbers:
    """One event at a time, through SQL and through the API."""
    receiver = bed.slow_receiver
    async with pipeline(bed, timed_addresses(receiver)) as running:
        await running.run(bed.scale.warm_up, receiver=receiver)
        [daemon] = running.daemons
        await running.observer.execute(INSERT_TABLE)
        ways = {"SQL": None, "API": f"http://127.0.0.1:{daemon.port}/v1/events"}
        numbers: Numbers = {}
        insert_ms: list[float] = []
        for way in alternate(number, ways):
            request = {"events": bed.scale.idle_events, "url": ways[way], "insert": INSERT}
            found, of_inserts = await idle_latencies(bed, running, receiver, request)
            numbers |= percentiles(f"idle {way}", found)
            insert_ms += of_inserts
        return numbers | {"idle insert p50": percentile(insert_ms, 50)}


async def idle_latencies(
    bed: Bed, running: Pipeline, receiver: Receiver, request: Mapping[str, object]
) -> tuple[list[float], list[float]]:
    """Publish as requested. Returns the milliseconds until each event arrived, and those of each INSERT."""
    position = await receiver.log_position()
    async with publisher_process(bed, running) as publisher:
        insert_ms: list[float] = await publisher.request(request)
    return await arrived_ms(receiver, len(insert_ms), position), insert_ms


async def loaded(bed: Bed, _: int) -> Numbers:
    """At 10, 50 and 90 % of the maximum rate."""
    if bed.maximum is None:
        bed.maximum = await rate(bed)
    receiver = bed.receiver
    numbers: Numbers = {}
    for share in SHARES:
        async with pipeline(bed, timed_addresses(receiver)) as running:
            await running.warm_up()
            request = {"rate": bed.maximum * share / 100, "seconds": bed.scale.latency_seconds}
            numbers |= percentiles(f"{share} %", await latencies(bed, running, receiver, request))
    return numbers


def timed_addresses(receiver: Receiver) -> list[tuple[str, str]]:
    """The usual subscriptions, with URLs whose arrivals are logged."""
    return [(event_type(number), receiver.url(f"/timed/{number}")) for number in range(SUBSCRIPTIONS)]


async def latencies(
    bed: Bed, running: Pipeline, receiver: Receiver, request: Mapping[str, object]
) -> list[float]:
    """Publish as requested. Returns the milliseconds until each event arrived."""
    position = await receiver.log_position()
    async with publisher_process(bed, running) as publisher:
        count = await publisher.request(request)
    return await arrived_ms(receiver, count, position)


def publisher_process(bed: Bed, running: Pipeline) -> contextlib.AbstractAsyncContextManager[Child]:
    """Start the publisher."""
    options = {
        "dsn": running.database.dsn("application"),
        "insert_dsn": running.database.dsn("superuser"),
        "event_types": [event_type(number) for number in range(SUBSCRIPTIONS)],
        "connections": 1,
    }
    return bed.child("publisher", python_module("tests.bench.publisher"), options)


async def arrived_ms(receiver: Receiver, count: int, position: int) -> list[float]:
    """Wait for this many arrivals. Returns the milliseconds from publish to arrival."""
    async with asyncio.timeout(ARRIVAL_TIMEOUT_SECONDS):
        return latencies_ms(await receiver.until_arrived(count, position), SKIPPED_SHARE)


def percentiles(name: str, values: list[float]) -> Numbers:
    """The median and the 99th percentile."""
    return {f"{name} p50": percentile(values, 50), f"{name} p99": percentile(values, 99)}
