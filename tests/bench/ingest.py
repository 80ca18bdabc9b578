"""`make ingest`: single events from many concurrent clients.

Uses a durable PostgreSQL and one instance with default settings. For each number of clients it prints the
rate and the latency, and checks that the database holds each event once. Then it prints the answers of 500
clients while the database is stalled, and while it is down.
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


class Answer(NamedTuple):
    """The API's answer to one event."""

    key: str
    status: int
    event_id: int | None
    retry_after: str | None
    milliseconds: float


async def main() -> None:
    """Measure and print a line for each round."""
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
                            answers = await post_for(SECONDS, session, daemon.port, clients)
                            await check(database, answers)
                            print(f"{number + 1}: {clients} clients: {summary(answers)}")
                    await without_database(server, session, daemon.port)
            finally:
                daemon.stop()
        await database.close()
    finally:
        server.stop()


def open_session() -> aiohttp.ClientSession:
    """A session with one connection per client."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=20)
    )


async def post_for(seconds: float, session: aiohttp.ClientSession, port: int, clients: int) -> list[Answer]:
    """Each client posts one event after another."""
    answers: list[Answer] = []
    ends = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < ends:
            answers.append(await post(session, port))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def post(session: aiohttp.ClientSession, port: int) -> Answer:
    """Post an event with a new key."""
    key = f"bench-{next(_numbers)}"
    body = {"event_type": "bench", "payload": {"amount": 1}, "idempotency_key": key}
    started = time.monotonic()
    async with session.post(f"http://127.0.0.1:{port}/v1/events", json=body) as response:
        accepted = await response.json(content_type=None)
        milliseconds = (time.monotonic() - started) * 1000
        return Answer(
            key, response.status, accepted.get("id"), response.headers.get("Retry-After"), milliseconds
        )


async def check(database: Database, answers: list[Answer]) -> None:
    """Check that each accepted event is stored once, with the id of its answer."""
    connection = await database.connect()
    rows = await connection.fetch(
        "select idempotency_key, id from webhookd.events where idempotency_key = any($1)",
        [it.key for it in answers],
    )
    stored = {row["idempotency_key"]: row["id"] for row in rows}
    if len(rows) != len(answers) or any(stored[it.key] != it.event_id for it in answers):
        raise SystemExit(f"{len(answers)} events were accepted, {len(rows)} are stored")


async def without_database(server: BreakableServer, session: aiohttp.ClientSession, port: int) -> None:
    """Each client posts once while the database does not answer."""
    outages: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "stalled": (server.stall, server.resume),
        "killed": (server.crash, server.restart),
    }
    for name, (take_down, bring_back) in outages.items():
        await asyncio.to_thread(take_down)
        answers = await asyncio.gather(*(post(session, port) for _ in range(CLIENTS[-1])))
        await asyncio.to_thread(bring_back)
        statuses = Counter((it.status, it.retry_after is not None) for it in answers)
        print(f"{name}: {summary(answers)}, (status, has Retry-After): {dict(statuses)}")
        await until_accepted(lambda: post(session, port))


async def until_accepted(attempt: Callable[[], Awaitable[Answer]]) -> None:
    """Wait until the database is back."""
    async with asyncio.timeout(20):
        while (await attempt()).status == UNAVAILABLE:  # noqa: ASYNC110  polls the daemon
            await asyncio.sleep(0.05)


def summary(answers: list[Answer]) -> str:
    """The number of answers and their latency."""
    milliseconds = [it.milliseconds for it in answers]
    p50, p99 = statistics.median(milliseconds), statistics.quantiles(milliseconds, n=100)[-1]
    return f"{len(answers)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(milliseconds):.1f} ms"


if __name__ == "__main__":
    asyncio.run(main())
