"""Processor time at a steady, low rate: one event at a time, as most applications publish.

Batches are small here, so the cost per delivery is higher than in the throughput measure.
"""

import asyncio
import time

from tests.bench.bed import Bed
from tests.bench.measures.throughput import ProcessorMeters
from tests.bench.pipeline import RECEIVER_POLL_SECONDS, RUN_TIMEOUT_SECONDS, Pipeline, event_type, pipeline
from tests.bench.rows import own_processor, server_processor
from tests.bench.scale import PACED_RATE, SUBSCRIPTIONS, Numbers
from webhookd.devtools.processes import python_module

# More than commits of one event need at this rate on a slow disk, so that events leave on time.
CONNECTIONS = 8
WARM_UP_SECONDS = 1.0


async def paced(bed: Bed, _: int) -> Numbers:
    """Publish through SQL from another process, whose own processor time does not count."""
    async with pipeline(bed) as running:
        await running.warm_up()
        return await costs(bed, running)


async def costs(bed: Bed, running: Pipeline) -> Numbers:
    """Read the meters before the first event and after the last arrival."""
    options = {
        "dsn": running.database.dsn("application"),
        "event_types": [event_type(number) for number in range(SUBSCRIPTIONS)],
        "connections": CONNECTIONS,
    }
    [daemon] = running.daemons
    meters = ProcessorMeters(daemon.process.pid, bed.server.process_id)
    request = {"rate": PACED_RATE, "singly": True}
    async with bed.child("publisher", python_module("tests.bench.publisher"), options) as publisher:
        before = await bed.receiver.requests()
        # Each connection plans its statements before the meters start.
        before += await publisher.request(request | {"seconds": WARM_UP_SECONDS})
        await until_arrived(bed, before)
        meters.start()
        started = time.monotonic()
        published = int(await publisher.request(request | {"seconds": bed.scale.paced_seconds}))
        seconds = time.monotonic() - started
        await until_arrived(bed, before + published)
        numbers = meters.numbers("paced", published)
    both = numbers[own_processor("paced")] + numbers[server_processor("paced")]
    return numbers | {"paced": published / seconds, "paced share": both * published / seconds}


async def until_arrived(bed: Bed, requests: int) -> None:
    """Wait until the receiver has counted this many requests."""
    async with asyncio.timeout(RUN_TIMEOUT_SECONDS):
        while await bed.receiver.requests() < requests:  # noqa: ASYNC110  another process counts
            await asyncio.sleep(RECEIVER_POLL_SECONDS)
