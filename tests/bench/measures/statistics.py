"""webhookd with the statistics and without them, alternating: the rate, the processor time and the WAL."""

from collections.abc import Iterator

from tests.bench.bed import Bed
from tests.bench.measures.throughput import costs_of_run
from tests.bench.pipeline import pipeline
from tests.bench.rows import own_processor, server_processor
from tests.bench.scale import Numbers, alternate
from tests.bench.without_stats import WITHOUT_STATS

SIDES = {"stats": "", "stats without": WITHOUT_STATS}


async def statistics(bed: Bed, number: int) -> Numbers:
    """One round of both sides, each with its own database and daemon."""
    numbers: Numbers = {}
    for side in alternate(number, SIDES):
        async with pipeline(bed) as running:
            if SIDES[side]:
                superuser = await running.database.connect("superuser")
                await superuser.execute(SIDES[side])
            await running.warm_up()
            costs = await costs_of_run(bed, running, bed.scale.deliveries["webhookd"])
        numbers |= dict(_named(side, costs))
    return numbers


def _named(side: str, costs: Numbers) -> Iterator[tuple[str, float]]:
    own, server = costs[own_processor("webhookd")], costs[server_processor("webhookd")]
    yield side, costs["webhookd"]
    yield f"{side} WAL", costs["wal"]
    yield server_processor(side), server
    yield f"{side} processor of both", own + server
