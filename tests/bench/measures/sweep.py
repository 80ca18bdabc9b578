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
OLD_EVENTS = "select count(*) from webhookd.events where created_at < $1"


async def sweep(bed: Bed, number: int) -> Numbers:
    """One round of both sides on the same database."""
    numbers: Numbers = {}
    async with bed.database(migrated=True) as database:
        superuser = await database.connect("superuser")
        await write_history(superuser, bed.scale.sweep_history)
        await subscribe(database, timed_addresses(bed.receiver))
        day_ago = await superuser.fetchval("select now() - interval '1 day'")
        for side in alternate(number, RETENTION):
            before = await superuser.fetchval(OLD_EVENTS, day_ago)
            # No side pays for what the one before has left to the server.
            await vacuum(superuser)
            await superuser.execute("checkpoint")
            async with pipeline(bed, database=database, retention=RETENTION[side]) as running:
                await running.warm_up()
                deliveries = bed.scale.variant_deliveries
                rate = deliveries / await running.run(deliveries)
                request = {"rate": PACED_RATE, "seconds": bed.scale.paced_seconds}
                found = await latencies(bed, running, bed.receiver, request)
            left = await superuser.fetchval(OLD_EVENTS, day_ago)
            if (left < before) != bool(RETENTION[side]) or left == 0:
                raise RuntimeError(f"{side}: {left} of {before} old events are left")
            numbers |= {side: rate, f"{side} removed": before - left} | percentiles(side, found)
    return numbers
