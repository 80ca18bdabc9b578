"""Single events from many clients at once: `make ingest`.

A durable PostgreSQL, one instance with its defaults. Prints a rate and milliseconds for each number of
clients, after a look into the database that each event is there once; then what 500 clients hear, and when,
while the database is stalled and while it is gone.
"""

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import aiohttp

from tests.support.breakable import BreakableServer
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster, Database
from tests.support.installations import installation_near

NEWEST = 99
ROUNDS = 3
SECONDS = 4.0
CLIENTS = (1, 16, 64, 500)
ACCEPTED, UNAVAILABLE = 202, 503

_numbers = count()


class Heard(NamedTuple):
    """One answer."""

    key: str
    status: int
    event_id: int | None
    retry_after: str | None
    milliseconds: float


async def main() -> None:
    """Measure, and print a line for each round."""
    server = BreakableServer(installation_near(NEWEST))
    server.start()
    try:
        cluster = Cluster(server)
        await cluster.prepare()
        database = await cluster.create_database(migrated=True)
        with tempfile.TemporaryDirectory() as folder:
            daemon = DaemonProcess(Path(folder), database.dsn("daemon"), log={"level": "info"})
            await daemon.start()
            try:
                async with open_session() as session:
                    for number in range(ROUNDS):
                        for clients in CLIENTS:
                            heard = await post_for(SECONDS, session, daemon.port, clients)
                            await check(database, heard)
                            print(f"{number + 1}: {clients} clients: {summary(heard)}")
                    await without_database(server, session, daemon.port)
            finally:
                daemon.stop()
        await database.close()
    finally:
        server.stop()


def open_session() -> aiohttp.ClientSession:
    """As many connections as there are clients."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=20)
    )


async def post_for(seconds: float, session: aiohttp.ClientSession, port: int, clients: int) -> list[Heard]:
    """Each client posts one event after the other."""
    heard: list[Heard] = []
    ends = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < ends:
            heard.append(await post(session, port))

    await asyncio.gather(*(client() for _ in range(clients)))
    return heard


async def post(session: aiohttp.ClientSession, port: int) -> Heard:
    """One event with a key of its own."""
    key = f"bench-{next(_numbers)}"
    body = {"event_type": "bench", "payload": {"amount": 1}, "idempotency_key": key}
    started = time.monotonic()
    async with session.post(f"http://127.0.0.1:{port}/v1/events", json=body) as answer:
        told = await answer.json(content_type=None)
        milliseconds = (time.monotonic() - started) * 1000
        return Heard(key, answer.status, told.get("id"), answer.headers.get("Retry-After"), milliseconds)


async def check(database: Database, heard: list[Heard]) -> None:
    """Each accepted event is there once, under the id that was told."""
    connection = await database.connect()
    rows = await connection.fetch(
        "select idempotency_key, id from webhookd.events where idempotency_key = any($1)",
        [one.key for one in heard],
    )
    stored = {row["idempotency_key"]: row["id"] for row in rows}
    if len(rows) != len(heard) or any(stored[one.key] != one.event_id for one in heard):
        raise SystemExit(f"{len(heard)} were accepted, {len(rows)} are stored")


async def without_database(server: BreakableServer, session: aiohttp.ClientSession, port: int) -> None:
    """What all clients hear, posting once each, while the database does not answer."""
    breaks: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "stalled": (server.stall, server.resume),
        "killed": (server.crash, server.restart),
    }
    for name, (end, mend) in breaks.items():
        await asyncio.to_thread(end)
        heard = await asyncio.gather(*(post(session, port) for _ in range(CLIENTS[-1])))
        await asyncio.to_thread(mend)
        statuses = Counter((one.status, one.retry_after is not None) for one in heard)
        print(f"{name}: {summary(heard)}, (status, has Retry-After): {dict(statuses)}")
        await until_accepted(lambda: post(session, port))


async def until_accepted(ask: Callable[[], Awaitable[Heard]]) -> None:
    """Until the database is back."""
    async with asyncio.timeout(20):
        while (await ask()).status == UNAVAILABLE:  # noqa: ASYNC110  it is the daemon that is asked
            await asyncio.sleep(0.05)


def summary(heard: list[Heard]) -> str:
    """How many, how fast."""
    milliseconds = [one.milliseconds for one in heard]
    p50, p99 = statistics.median(milliseconds), statistics.quantiles(milliseconds, n=100)[-1]
    return f"{len(heard)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(milliseconds):.1f} ms"


if __name__ == "__main__":
    asyncio.run(main())
