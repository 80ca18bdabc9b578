"""One event to many subscriptions: seconds from first to last arrival, beside the bare loop's for as many."""

import asyncio
import statistics
from typing import NamedTuple

from tests.bench.bed import Bed
from tests.bench.children import child
from tests.bench.measures.throughput import command_of
from tests.bench.measures.turns import Numbers, in_order
from tests.bench.pipeline import Pipeline, pipeline

EVENT_TYPE = "bench.fan_out"
REPEATS = 3
ARRIVAL_TIMEOUT_SECONDS = 120


class Fanned(NamedTuple):
    """How one event arrived."""

    spread: float  # seconds from the first to the last
    last: float  # seconds from its publishing to the last


async def fan_out(bed: Bed, number: int) -> Numbers:
    """Both, the median of a few events each."""
    numbers: Numbers = {}
    for side in in_order(number, (of_webhookd, of_bare)):
        numbers |= await side(bed)
    return numbers


async def of_webhookd(bed: Bed) -> Numbers:
    """The first event is for the connections to open."""
    size = bed.scale.fan_out
    addresses = [(EVENT_TYPE, bed.receiver.url(f"/timed/{place}")) for place in range(size)]
    async with pipeline(bed, addresses) as running:
        fanned = [await one_event(running, size) for _ in range(1 + REPEATS)][1:]
    return {
        "fan-out": statistics.median(one.spread for one in fanned),
        "fan-out from publish": statistics.median(one.last for one in fanned),
    }


async def one_event(running: Pipeline, size: int) -> Fanned:
    """Publish it, and wait for the last."""
    receiver = running.bed.receiver
    offset = receiver.log_bytes()
    published_at = await running.publish([EVENT_TYPE])
    async with asyncio.timeout(ARRIVAL_TIMEOUT_SECONDS):
        arrivals = await receiver.until_arrived(size, offset)
    times = sorted(arrival.at for arrival in arrivals)
    # The last result must be applied before the next begins, or it would be in its way.
    await running.until_idle()
    return Fanned(times[-1] - times[0], times[-1] - published_at)


async def of_bare(bed: Bed) -> Numbers:
    """As many POSTs of a warm loop."""
    given = {"url": bed.receiver.url("/timed"), "ca_file": str(bed.certificates.ca_file)}
    command = command_of("bare")
    assert command is not None
    async with child(command, bed.new_folder("bare"), given) as process:
        await process.ask(bed.scale.warm_up)
        seconds = [float(await process.ask(bed.scale.fan_out)) for _ in range(REPEATS)]
    return {"fan-out bare": statistics.median(seconds)}
