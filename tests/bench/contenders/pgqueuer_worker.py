"""pgqueuer doing the POST for each job: asyncpg's pool driver, batches of half its task limit, uvloop."""

import asyncio
import time
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.queries import Queries

from tests.bench.contenders.posting import Countdown, Poster
from tests.bench.lines import answer_lines, options
from tests.bench.scale import CONCURRENCY, payload

POLL_INTERVAL_SECONDS = 0.005
ENTRYPOINT = "deliver"


async def main() -> None:
    """One worker; a line says how many jobs to enqueue, and is answered when the queue is empty again."""
    given = options()
    poster, countdown = Poster(given["url"], given["ca_file"]), Countdown()
    async with asyncpg.create_pool(given["dsn"], min_size=2, max_size=10) as pool, poster.session:
        driver = AsyncpgPoolDriver(pool)
        queries = Queries(driver)
        await queries.install()
        worker = PgQueuer(driver)

        async def deliver(job: Any) -> None:
            await poster.post(job.id, job.payload)
            countdown.handled()

        worker.entrypoint(ENTRYPOINT)(deliver)

        async def deliver_all(count: int) -> float:
            bodies = [payload(number).encode() for number in range(count)]
            countdown.begin(count)
            await queries.enqueue([ENTRYPOINT] * count, bodies, [0] * count)
            started = time.perf_counter()
            while not countdown.over or await queries.queue_size():  # noqa: ASYNC110  the database is asked
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
            return time.perf_counter() - started

        # Its limit must be twice its batch at least.
        running = asyncio.create_task(
            worker.run(batch_size=CONCURRENCY // 2, max_concurrent_tasks=CONCURRENCY)
        )
        await answer_lines(deliver_all)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(main())
