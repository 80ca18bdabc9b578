"""webhookd with something in its way, and without it, in turns: rates whose ratio is the result.

Each side of a round has a database and daemons of its own; a long history is written once for all rounds.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from tests.bench.bed import Bed
from tests.bench.measures.turns import Numbers, in_turns
from tests.bench.pipeline import event_type, pipeline, subscribe, usual_addresses
from tests.bench.scale import SUBSCRIPTIONS
from tests.support.database import Database
from tests.support.history import HISTORY, vacuum

SLOW_MILLISECONDS = 200
SLOW_CONCURRENCY = 100
INSTANCES = 4
HANGING_TYPE = "bench.hanging"
# Requests that hang are not waited for when a round is over.
NO_GRACE = {"shutdown_grace_seconds": 0.5}


async def rate(
    bed: Bed,
    *,
    addresses: Sequence[tuple[str, str]] | None = None,
    database: Database | None = None,
    further_types: Sequence[str] = (),
    services: dict[str, Any] | None = None,
) -> float:
    """Deliveries a second of a warm daemon."""
    deliveries = bed.scale.variant_deliveries
    async with pipeline(bed, addresses, database=database, services=services or {}) as running:
        await running.warm_up()
        return deliveries / await running.run(deliveries, further_types=further_types)


async def history(bed: Bed, number: int) -> Numbers:
    """Beside many sagas that are over, against an empty database."""
    database = await long_history(bed)
    return await in_turns(
        number,
        {"history": lambda: rate(bed, database=database), "history without": lambda: rate(bed)},
    )


async def long_history(bed: Bed) -> Database:
    """A database with sagas that are over, their jobs and events; written when first asked for."""
    if bed.long_history is None:
        database = await bed.kept.enter_async_context(bed.database(migrated=True))
        superuser = await database.connect("superuser")
        async with superuser.transaction():
            # No triggers and no foreign keys: the rows are born old.
            await superuser.execute("set local session_replication_role = replica")
            for statement in HISTORY:
                await superuser.execute(statement.replace(":size", str(bed.scale.history)))
        await vacuum(superuser)
        await superuser.execute("checkpoint")
        await subscribe(database, usual_addresses(bed.receiver))
        bed.long_history = database
    return bed.long_history


async def snapshot(bed: Bed, number: int) -> Numbers:
    """While a foreign transaction holds a snapshot from before the run to its end."""

    async def held() -> float:
        deliveries = bed.scale.variant_deliveries
        async with pipeline(bed) as running, foreign_snapshot(running.database):
            await running.warm_up()
            return deliveries / await running.run(deliveries)

    return await in_turns(number, {"snapshot": held, "snapshot without": lambda: rate(bed)})


@contextlib.asynccontextmanager
async def foreign_snapshot(database: Database) -> AsyncIterator[None]:
    """A transaction that has looked, and stays open."""
    foreigner = await database.connect("superuser")
    async with foreigner.transaction(isolation="repeatable_read", readonly=True):
        await foreigner.fetchval("select count(*) from webhookd.subscriptions")
        yield


async def hanging(bed: Bed, number: int) -> Numbers:
    """While one endpoint, which has half of the events, takes requests and never answers."""
    addresses = [*usual_addresses(bed.receiver), (HANGING_TYPE, bed.slow_receiver.url("/hang"))]

    def side(*further_types: str) -> Callable[[], Awaitable[float]]:
        return lambda: rate(bed, addresses=addresses, further_types=further_types, services=NO_GRACE)

    return await in_turns(number, {"hanging": side(HANGING_TYPE), "hanging without": side()})


async def instances(bed: Bed, number: int) -> Numbers:
    """Several instances with few places each, and one, at endpoints that take their time."""
    receiver = bed.slow_receiver
    addresses = [
        (event_type(place), receiver.url(f"/slow/{SLOW_MILLISECONDS}/{place}"))
        for place in range(SUBSCRIPTIONS)
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

    return await in_turns(number, {"instances": side(INSTANCES), "instances one": side(1)})
