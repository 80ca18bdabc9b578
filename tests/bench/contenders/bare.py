"""The limit: aiohttp and uvloop post payloads that are in memory, with no database at all."""

import asyncio
import time

import uvloop

from tests.bench.contenders.posting import Poster
from tests.bench.lines import answer_lines, options
from tests.bench.scale import CONCURRENCY, payload


async def main() -> None:
    """As many loops as webhookd has slots; each sends the next payload when its last was answered."""
    given = options()
    poster = Poster(given["url"], given["ca_file"])

    async def post_all(count: int) -> float:
        bodies = enumerate([payload(number).encode() for number in range(count)])

        async def slot() -> None:
            for number, body in bodies:
                await poster.post(number, body)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as slots:
            for _ in range(CONCURRENCY):
                slots.create_task(slot())
        return time.perf_counter() - started

    async with poster.session:
        await answer_lines(post_all)


if __name__ == "__main__":
    uvloop.run(main())
