"""procrastinate doing the POST for each job: one worker with all concurrency, psycopg's C part, uvloop."""

import asyncio
import time
from typing import Any

import uvloop
from procrastinate import App, PsycopgConnector

from tests.bench.contenders.posting import Countdown, Poster
from tests.bench.lines import answer_lines, options
from tests.bench.scale import CONCURRENCY, payload

POLL_INTERVAL_SECONDS = 0.02
WAITING = "select count(*) as waiting from procrastinate_jobs where status in ('todo', 'doing')"


async def main() -> None:
    """One worker; a line says how many jobs to defer, and is answered when the last has succeeded."""
    given = options()
    poster, countdown = Poster(given["url"], given["ca_file"]), Countdown()
    app = App(connector=PsycopgConnector(conninfo=given["dsn"], min_size=4, max_size=20))

    async def deliver(number: int, body: str) -> None:
        await poster.post(number, body.encode())
        countdown.handled()

    task = app.task(name="deliver")(deliver)

    async def waiting() -> int:
        row: dict[str, Any] = await app.connector.execute_query_one_async(WAITING)
        return int(row["waiting"])

    async def deliver_all(count: int) -> float:
        countdown.begin(count)
        jobs = [{"number": number, "body": payload(number)} for number in range(count)]
        await task.batch_defer_async(*jobs)
        started = time.perf_counter()
        while not countdown.over or await waiting():  # noqa: ASYNC110  the database is asked
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
