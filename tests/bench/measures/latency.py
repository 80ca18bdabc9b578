"""Milliseconds from publish to arrival: at an idle daemon, and at parts of its maximum.

Publishing is another process's. Idle, the small receiver's clock says when it arrived; under load nginx's,
which tells whole milliseconds. Both are this machine's.
"""

import asyncio
from collections.abc import Mapping

from tests.bench.bed import Bed
from tests.bench.children import child, python
from tests.bench.measures.turns import Numbers, in_order
from tests.bench.measures.variants import rate
from tests.bench.pipeline import Pipeline, event_type, pipeline
from tests.bench.receivers import Arrival, Receiver
from tests.bench.scale import SUBSCRIPTIONS
from tests.bench.summary import percentile

SHARES = (10, 50, 90)
# What came first met connections that were opening.
WARM_SHARE = 0.2
ARRIVAL_TIMEOUT_SECONDS = 120


async def idle(bed: Bed, number: int) -> Numbers:
    """One event at a time, through SQL and through the API."""
    receiver = bed.slow_receiver
    async with pipeline(bed, timed_addresses(receiver)) as running:
        await running.run(bed.scale.warm_up, receiver=receiver)
        [daemon] = running.daemons
        ways = {"SQL": None, "API": f"http://127.0.0.1:{daemon.port}/v1/events"}
        numbers: Numbers = {}
        for way in in_order(number, ways):
            asked = {"events": bed.scale.idle_events, "url": ways[way]}
            numbers |= percentiles(f"idle {way}", await published(bed, running, receiver, asked))
        return numbers


async def loaded(bed: Bed, _: int) -> Numbers:
    """At 10, 50 and 90 % of what it can do."""
    if bed.maximum is None:
        bed.maximum = await rate(bed)
    receiver = bed.receiver
    numbers: Numbers = {}
    for share in SHARES:
        async with pipeline(bed, timed_addresses(receiver)) as running:
            await running.warm_up()
            asked = {"rate": bed.maximum * share / 100, "seconds": bed.scale.latency_seconds}
            numbers |= percentiles(f"{share} %", await published(bed, running, receiver, asked))
    return numbers


def timed_addresses(receiver: Receiver) -> list[tuple[str, str]]:
    """As the usual ones, where the time of arrival is written."""
    return [(event_type(number), receiver.url(f"/timed/{number}")) for number in range(SUBSCRIPTIONS)]


async def published(
    bed: Bed, running: Pipeline, receiver: Receiver, asked: Mapping[str, object]
) -> list[float]:
    """Have events published, and return the milliseconds until each arrived."""
    given = {
        "dsn": running.database.dsn("application"),
        "event_types": [event_type(number) for number in range(SUBSCRIPTIONS)],
    }
    offset = receiver.log_bytes()
    async with child(python("tests.bench.publisher"), bed.new_folder("publisher"), given) as publisher:
        count = await publisher.ask(asked)
    async with asyncio.timeout(ARRIVAL_TIMEOUT_SECONDS):
        return milliseconds(await receiver.until_arrived(count, offset))


def milliseconds(arrivals: list[Arrival]) -> list[float]:
    """From the time that each carries to its arrival, in the order of publishing, without the first."""
    in_order = sorted((float(arrival.stamp), arrival.at) for arrival in arrivals)
    return [(at - due) * 1000 for due, at in in_order[int(len(in_order) * WARM_SHARE) :]]


def percentiles(name: str, values: list[float]) -> Numbers:
    """Both that are asked for."""
    return {f"{name} p50": percentile(values, 50), f"{name} p99": percentile(values, 99)}
