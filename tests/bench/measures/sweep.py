"""webhookd while retention removes old events, compared with the same without it.

Measures the highest rate, and the milliseconds from publish to arrival at a steady rate. Each round has its
own history, because the sweep of the round before has removed it.
"""

from tests.bench.bed import Bed
from tests.bench.measures.latency import latencies, percentiles, timed_addresses
from tests.bench.pipeline import pipeline, subscribe
from tests.bench.scale import PACED_RATE, Numbers, alternate
from tests.support.history import vacuum, write_history

RETENTION = {"sweep": {"events_days": 1, "dead_letters_days": 1}, "sweep without": {}}
OLD_EVENTS = "select count(*) from webhookd.events where created_at < now() - interval '1 day'"


async def sweep(bed: Bed, number: int) -> Numbers:
    """One round of both sides on the same database."""
    numbers: Numbers = {}
    async with bed.database(migrated=True) as database:
        superuser = await database.connect("superuser")
        await write_history(superuser, bed.scale.sweep_history)
        await vacuum(superuser)
        await superuser.execute("checkpoint")
        await subscribe(database, timed_addresses(bed.receiver))
        for side in alternate(number, RETENTION):
            before = await superuser.fetchval(OLD_EVENTS)
            async with pipeline(bed, database=database, retention=RETENTION[side]) as running:
                await running.warm_up()
                deliveries = bed.scale.variant_deliveries
                rate = deliveries / await running.run(deliveries)
                request = {"rate": PACED_RATE, "seconds": bed.scale.paced_seconds}
                found = await latencies(bed, running, bed.receiver, request)
            removed = before - await superuser.fetchval(OLD_EVENTS)
            if (removed > 0) != bool(RETENTION[side]):
                raise RuntimeError(f"{side}: {removed} events were removed")
            numbers |= {side: rate} | percentiles(side, found)
            if removed:
                numbers["sweep removed"] = removed
                if removed == before:
                    raise RuntimeError("the sweep ended before the round")
    return numbers
