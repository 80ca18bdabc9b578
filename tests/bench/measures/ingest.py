"""Events a second into the API: single ones against its handler alone, batches against a bare INSERT.

Nobody subscribes to these events; a daemon with all its services routes them while it takes more. A second
number is of an instance that runs the service `api` alone.
"""

from collections.abc import Sequence
from typing import Any

from tests.bench.bed import Bed
from tests.bench.children import Child, child, python
from tests.bench.measures.turns import Numbers, in_turns
from tests.bench.pipeline import daemons_running, make_daemon
from tests.support.postgres import free_port

CLIENTS = 64
BATCH_CLIENTS = 4
BATCH = 1_000  # the most that the API takes
WARM_SECONDS = 1.0
SINGLES: dict[str, Any] = {"connections": CLIENTS, "batch": 0}
BATCHES: dict[str, Any] = {"connections": BATCH_CLIENTS, "batch": BATCH}
API_ALONE = ("api",)


async def single(bed: Bed, number: int) -> Numbers:
    """One event to a request."""
    return await in_turns(
        number,
        {
            "api": lambda: of_daemon(bed, SINGLES),
            "handler": lambda: of_handler(bed),
            "api alone": lambda: of_daemon(bed, SINGLES, API_ALONE),
        },
    )


async def batch(bed: Bed, number: int) -> Numbers:
    """A thousand events to a request."""
    return await in_turns(
        number,
        {
            "batch": lambda: of_daemon(bed, BATCHES),
            "insert": lambda: of_insert(bed),
            "batch alone": lambda: of_daemon(bed, BATCHES, API_ALONE),
        },
    )


async def of_daemon(bed: Bed, asked: dict[str, Any], services: Sequence[str] = ()) -> float:
    """The real thing, with these services or all."""
    sections: dict[str, dict[str, Any]] = {"services": {"enabled": list(services)}} if services else {}
    async with bed.database(migrated=True) as database:
        daemon = make_daemon(bed, database, **sections)
        async with daemons_running([daemon]):
            accepted = await loaded(bed, asked | {"port": daemon.port})
            observer = await database.connect("superuser")
            stored = await observer.fetchval("select count(*) from webhookd.events")
    if stored < accepted * bed.scale.load_seconds:
        raise RuntimeError(f"{stored} events are stored, fewer than were accepted")
    return accepted


async def of_handler(bed: Bed) -> float:
    """The same handler, with nothing behind it."""
    port = free_port()
    command = python("tests.bench.contenders.handler")
    async with child(command, bed.new_folder("handler"), {"port": port}):
        return await loaded(bed, SINGLES | {"port": port})


async def of_insert(bed: Bed) -> float:
    """The same rows, and nothing but the INSERT."""
    async with bed.database(migrated=True) as database:
        given = {"dsn": database.dsn("superuser"), "connections": BATCH_CLIENTS}
        command = python("tests.bench.contenders.bare_insert")
        async with child(command, bed.new_folder("insert"), given) as inserter:
            return await measured(bed, inserter, BATCHES)


async def loaded(bed: Bed, asked: dict[str, Any]) -> float:
    """Events a second of a load from another process."""
    async with child(python("tests.bench.load"), bed.new_folder("load")) as load:
        return await measured(bed, load, asked)


async def measured(bed: Bed, process: Child, asked: dict[str, Any]) -> float:
    """What it says after it got warm."""
    await process.ask(asked | {"seconds": WARM_SECONDS})
    return float(await process.ask(asked | {"seconds": bed.scale.load_seconds}))
