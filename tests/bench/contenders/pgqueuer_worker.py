"""pgqueuer with a job for each POST: the asyncpg pool driver, batches of half the task limit, uvloop."""

import asyncio
import time
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.queries import Queries

from tests.bench.contenders.bare import Countdown, Poster, say_committed
from tests.bench.scale import CONCURRENCY
from webhookd.devtools.bench_load import payload
from webhookd.devtools.processes import answer_lines, child_options

POLL_INTERVAL_SECONDS = 0.005
ENTRYPOINT = "deliver"


async def main() -> None:
    """Run one worker. Each request enqueues jobs and is answered when the queue is empty again."""
    options = child_options()
    poster, countdown = Poster(options["url"], options["ca_file"]), Countdown()
    async with asyncpg.create_pool(options["dsn"], min_size=2, max_size=10) as pool, poster.session:
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
            countdown.start(count)
            await queries.enqueue([ENTRYPOINT] * count, bodies, [0] * count)
            say_committed()
            started = time.perf_counter()
            while not countdown.finished or await queries.queue_size():  # noqa: ASYNC110  polls the database
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
            return time.perf_counter() - started

        # The task limit must be at least twice the batch size.
        running = asyncio.create_task(
            worker.run(batch_size=CONCURRENCY // 2, max_concurrent_tasks=CONCURRENCY)
        )
        await answer_lines(deliver_all)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(main())
