"""One event to many subscriptions: seconds from first to last arrival, compared with the bare loop."""

import asyncio
import statistics
from typing import NamedTuple

from tests.bench.bed import Bed
from tests.bench.measures.throughput import command_of, deliver
from tests.bench.pipeline import Pipeline, pipeline
from tests.bench.scale import Numbers, alternate

EVENT_TYPE = "bench.fan_out"
REPEATS = 3
ARRIVAL_TIMEOUT_SECONDS = 120


class FanOut(NamedTuple):
    """Seconds of one event."""

    first_to_last: float  # arrival
    publish_to_last: float


async def fan_out(bed: Bed, number: int) -> Numbers:
    """Measure webhookd and the bare loop; medians of a few events each."""
    numbers: Numbers = {}
    for side in alternate(number, (of_webhookd, of_bare)):
        numbers |= await side(bed)
    return numbers


async def of_webhookd(bed: Bed) -> Numbers:
    """Skips the first event, which opens the connections."""
    size = bed.scale.fan_out
    addresses = [(EVENT_TYPE, bed.receiver.url(f"/timed/{number}")) for number in range(size)]
    async with pipeline(bed, addresses) as running:
        results = [await one_event(running, size) for _ in range(1 + REPEATS)][1:]
    return {
        "fan-out": statistics.median(it.first_to_last for it in results),
        "fan-out from publish": statistics.median(it.publish_to_last for it in results),
    }


async def one_event(running: Pipeline, size: int) -> FanOut:
    """Publish one event and wait for its last arrival."""
    receiver = running.bed.receiver
    position = await receiver.log_position()
    published_at = await running.publish([EVENT_TYPE])
    async with asyncio.timeout(ARRIVAL_TIMEOUT_SECONDS):
        arrivals = await receiver.until_arrived(size, position)
    times = sorted(arrival.at for arrival in arrivals)
    # Apply all results before the next event, which they would slow down.
    await running.until_idle()
    return FanOut(times[-1] - times[0], times[-1] - published_at)


async def of_bare(bed: Bed) -> Numbers:
    """The same number of POSTs by a warm loop."""
    options = {"url": bed.receiver.url("/timed"), "ca_file": str(bed.certificates.ca_file)}
    command = command_of("bare")
    assert command is not None
    async with bed.child("bare", command, options) as process:
        await deliver(process, bed.scale.warm_up)
        seconds = [await deliver(process, bed.scale.fan_out) for _ in range(REPEATS)]
    return {"fan-out bare": statistics.median(seconds)}
