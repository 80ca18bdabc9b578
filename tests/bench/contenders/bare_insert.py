"""The limit of ingest: `INSERT … SELECT unnest` of the same rows into a plain twin of webhookd.events.

The twin has its columns, primary key and indexes, and neither trigger, check nor anybody who reads it.
"""

import asyncio
import time
from itertools import count
from typing import Any

import asyncpg
import uvloop

from tests.bench.lines import answer_lines, options
from tests.bench.scale import payload

TWIN = """
    create table public.events_twin (
        like webhookd.events including defaults including identity including indexes)
"""
INSERT = """
    insert into public.events_twin (event_type, payload, idempotency_key, correlation_id)
    select * from unnest($1::text[], $2::json[], $3::text[], $4::text[])
"""


class Inserter:
    """Several connections, each inserting one batch after the other."""

    def __init__(self, connections: list[Any]) -> None:
        self._connections = connections
        self._numbers = count()

    async def answer(self, question: dict[str, Any]) -> float:
        """Rows a second."""
        batch, ends = question["batch"], time.perf_counter() + question["seconds"]
        batches = 0

        async def insert(connection: Any) -> None:
            nonlocal batches
            while time.perf_counter() < ends:
                numbers = [next(self._numbers) for _ in range(batch)]
                await connection.execute(
                    INSERT,
                    [f"ingest.n{number % 10}" for number in numbers],
                    [payload(number) for number in numbers],
                    [f"bench-{number}" for number in numbers],
                    [None] * batch,
                )
                batches += 1

        began = time.perf_counter()
        await asyncio.gather(*(insert(connection) for connection in self._connections))
        return float(batches * batch) / (time.perf_counter() - began)


async def main() -> None:
    """Until the input ends."""
    given = options()
    connections = [await asyncpg.connect(given["dsn"]) for _ in range(given["connections"])]
    await connections[0].execute(TWIN)
    await answer_lines(Inserter(connections).answer)
    for connection in connections:
        await connection.close()


if __name__ == "__main__":
    uvloop.run(main())
