"""A process that publishes at a fixed pace, by SQL or one event at a time through the API.

Each request says how to publish. The answer is the number of published events, or with `insert` the
milliseconds of the INSERTs in between.
"""

import asyncio
import time
from collections import deque
from typing import Any

import aiohttp
import asyncpg
import uvloop

from webhookd.deliveries import ingest
from webhookd.devtools.bench_load import IDLE_PAUSE_SECONDS, Publisher, payload
from webhookd.devtools.processes import answer_lines, child_options


async def main() -> None:
    """Answer requests until the input ends."""
    options = child_options()
    connections: list[Any] = [await asyncpg.connect(options["dsn"]) for _ in range(options["connections"])]
    inserter: Any = await asyncpg.connect(options["insert_dsn"]) if "insert_dsn" in options else None
    async with aiohttp.ClientSession() as session:

        async def by_sql(new: list[ingest.NewEvent]) -> None:
            await ingest.publish(connections[0], new)

        async def answer(request: dict[str, Any]) -> object:
            url = request.get("url")

            async def by_api(new: list[ingest.NewEvent]) -> None:
                for event in new:
                    await post(session, str(url), event)

            publisher = Publisher(by_api if url else by_sql, options["event_types"])
            if request.get("singly"):
                return await singly(connections, options["event_types"], request["rate"], request["seconds"])
            if "insert" in request:
                return await between_inserts(publisher, inserter, request["insert"], request["events"])
            await publisher.paced(request["rate"], request["seconds"])
            return publisher.published

        await answer_lines(answer)
    for connection in (*connections, inserter):
        if connection is not None:
            await connection.close()


async def post(session: aiohttp.ClientSession, url: str, event: ingest.NewEvent) -> None:
    """Publish one event through the API."""
    head = f'"event_type": "{event.event_type}", "correlation_id": "{event.correlation_id}"'
    body = f'{{{head}, "payload": {event.payload}}}'.encode()
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
        answer.raise_for_status()
        await answer.read()


async def between_inserts(publisher: Publisher, connection: Any, statement: str, events: int) -> list[float]:
    """Publish one event at a time, each followed by an INSERT. Returns the milliseconds of the INSERTs.

    The same pause follows both, so that both meet an idle server.
    """
    milliseconds = []
    for number in range(events):
        await publisher.one_by_one(1)
        started = time.perf_counter()
        await connection.execute(statement, payload(number))
        milliseconds.append((time.perf_counter() - started) * 1000)
        await asyncio.sleep(IDLE_PAUSE_SECONDS)
    return milliseconds


async def singly(connections: list[Any], event_types: list[str], rate: float, seconds: float) -> int:
    """Publish one event per commit at a fixed rate; several connections, so that none is late."""
    count, started_at = int(rate * seconds), time.time()
    due = deque((number, started_at + number / rate) for number in range(count))

    async def publish(connection: Any) -> None:
        while due:
            number, due_at = due.popleft()
            await asyncio.sleep(max(0.0, due_at - time.time()))
            event = ingest.NewEvent(event_types[number % len(event_types)], payload(number))
            await ingest.publish(connection, [event])

    async with asyncio.TaskGroup() as publishing:
        for connection in connections:
            publishing.create_task(publish(connection))
    return count


if __name__ == "__main__":
    uvloop.run(main())
