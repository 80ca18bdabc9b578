"""procrastinate with a job for each POST: one worker with all concurrency, psycopg in C, uvloop."""

import asyncio
import time
from typing import Any

import uvloop
from procrastinate import App, PsycopgConnector

from tests.bench.contenders.bare import Countdown, Poster, say_committed
from tests.bench.scale import CONCURRENCY
from webhookd.devtools.bench_load import payload
from webhookd.devtools.processes import answer_lines, child_options

POLL_INTERVAL_SECONDS = 0.02
WAITING = "select count(*) as waiting from procrastinate_jobs where status in ('todo', 'doing')"


async def main() -> None:
    """Run one worker. Each request defers jobs and is answered when the last one has succeeded."""
    options = child_options()
    poster, countdown = Poster(options["url"], options["ca_file"]), Countdown()
    app = App(connector=PsycopgConnector(conninfo=options["dsn"], min_size=4, max_size=20))

    async def deliver(number: int, body: str) -> None:
        await poster.post(number, body.encode())
        countdown.handled()

    task = app.task(name="deliver")(deliver)

    async def waiting() -> int:
        row: dict[str, Any] = await app.connector.execute_query_one_async(WAITING)
        return int(row["waiting"])

    async def deliver_all(count: int) -> float:
        countdown.start(count)
        jobs = [{"number": number, "body": payload(number)} for number in range(count)]
        await task.batch_defer_async(*jobs)
        say_committed()
        started = time.perf_counter()
        while not countdown.finished or await waiting():  # noqa: ASYNC110  polls the database
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return time.perf_counter() - started

    async with app.open_async(), poster.session:
        await app.schema_manager.apply_schema_async()
        running = asyncio.create_task(
            app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)
        )
        await answer_lines(deliver_all)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(main())
