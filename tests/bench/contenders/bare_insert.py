"""The limit of ingest: `INSERT … SELECT unnest` of the same rows into a plain copy of webhookd.events.

The copy has the same columns, primary key and indexes, but no triggers or checks, and no process reads it.
"""

import asyncio
import time
from itertools import count
from typing import Any

import asyncpg
import uvloop

from webhookd.devtools.bench_load import payload
from webhookd.devtools.processes import answer_lines, child_options

COPY = """
    create table public.events_copy (
        like webhookd.events including defaults including identity including indexes)
"""
INSERT = """
    insert into public.events_copy (event_type, payload, idempotency_key, correlation_id)
    select * from unnest($1::text[], $2::json[], $3::text[], $4::text[])
"""


class Inserter:
    """Inserts one batch after another on each of several connections."""

    def __init__(self, connections: list[Any]) -> None:
        self._connections = connections
        self._numbers = count()

    async def answer(self, request: dict[str, Any]) -> float:
        """Insert for the requested time. Returns the rows per second."""
        batch, ends_at = request["batch"], time.perf_counter() + request["seconds"]
        batches = 0

        async def insert(connection: Any) -> None:
            nonlocal batches
            while time.perf_counter() < ends_at:
                numbers = [next(self._numbers) for _ in range(batch)]
                await connection.execute(
                    INSERT,
                    [f"ingest.n{number % 10}" for number in numbers],
                    [payload(number) for number in numbers],
                    [f"bench-{number}" for number in numbers],
                    [None] * batch,
                )
                batches += 1

        started = time.perf_counter()
        await asyncio.gather(*(insert(connection) for connection in self._connections))
        return float(batches * batch) / (time.perf_counter() - started)


async def main() -> None:
    """Answer requests until the input ends."""
    options = child_options()
    connections = [await asyncpg.connect(options["dsn"]) for _ in range(options["connections"])]
    await connections[0].execute(COPY)
    await answer_lines(Inserter(connections).answer)
    for connection in connections:
        await connection.close()


if __name__ == "__main__":
    uvloop.run(main())
