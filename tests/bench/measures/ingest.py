"""Events per second into the API: single events compared with its handler, batches with a bare INSERT.

The events have no subscriptions; a daemon with all services routes them while it accepts more. A second
number is for an instance that runs only the service `api`.
"""

from collections.abc import Sequence
from typing import Any

from tests.bench.bed import Bed
from tests.bench.pipeline import daemons_running, make_daemon
from tests.bench.scale import Numbers, measure_sides
from tests.support.postgres import free_port
from webhookd.devtools.processes import Child, python_module

CLIENTS = 64
BATCH_CLIENTS = 4
BATCH = 1_000  # the maximum of the API
WARM_SECONDS = 1.0
SINGLES: dict[str, Any] = {"connections": CLIENTS, "batch": 0}
BATCHES: dict[str, Any] = {"connections": BATCH_CLIENTS, "batch": BATCH}
ONLY_API = ("api",)


async def single(bed: Bed, number: int) -> Numbers:
    """One event per request."""
    return await measure_sides(
        number,
        {
            "api": lambda: of_daemon(bed, SINGLES),
            "handler": lambda: of_handler(bed),
            "api alone": lambda: of_daemon(bed, SINGLES, ONLY_API),
        },
    )


async def batch(bed: Bed, number: int) -> Numbers:
    """A thousand events per request."""
    return await measure_sides(
        number,
        {
            "batch": lambda: of_daemon(bed, BATCHES),
            "insert": lambda: of_insert(bed),
            "batch alone": lambda: of_daemon(bed, BATCHES, ONLY_API),
        },
    )


async def of_daemon(bed: Bed, request: dict[str, Any], services: Sequence[str] = ()) -> float:
    """Events per second into a daemon with these services, or all."""
    sections: dict[str, dict[str, Any]] = {"services": {"enabled": list(services)}} if services else {}
    async with bed.database(migrated=True) as database:
        daemon = make_daemon(bed, database, **sections)
        async with daemons_running([daemon]):
            accepted = await loaded(bed, request | {"port": daemon.port})
            observer = await database.connect("superuser")
            stored = await observer.fetchval("select count(*) from webhookd.events")
    if stored < accepted * bed.scale.load_seconds:
        raise RuntimeError(f"{stored} events are stored, fewer than the API accepted")
    return accepted


async def of_handler(bed: Bed) -> float:
    """Events per second into the handler without a database."""
    port = free_port()
    command = python_module("tests.bench.contenders.handler")
    async with bed.child("handler", command, {"port": port}):
        return await loaded(bed, SINGLES | {"port": port})


async def of_insert(bed: Bed) -> float:
    """Rows per second of the INSERT alone."""
    async with bed.database(migrated=True) as database:
        options = {"dsn": database.dsn("superuser"), "connections": BATCH_CLIENTS}
        command = python_module("tests.bench.contenders.bare_insert")
        async with bed.child("insert", command, options) as inserter:
            return await measured(bed, inserter, BATCHES)


async def loaded(bed: Bed, request: dict[str, Any]) -> float:
    """Events per second of a load from another process."""
    async with bed.child("load", python_module("tests.bench.load")) as load:
        return await measured(bed, load, request)


async def measured(bed: Bed, process: Child, request: dict[str, Any]) -> float:
    """Let it warm up, then measure."""
    await process.request(request | {"seconds": WARM_SECONDS})
    return float(await process.request(request | {"seconds": bed.scale.load_seconds}))
