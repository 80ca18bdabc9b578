"""A process that publishes at a fixed pace, by SQL or one event at a time through the API.

Each request says how to publish; the answer is the number of published events.
"""

from typing import Any

import aiohttp
import asyncpg
import uvloop

from webhookd.deliveries import ingest
from webhookd.devtools.bench_load import Publisher
from webhookd.devtools.processes import answer_lines, child_options


async def main() -> None:
    """Answer requests until the input ends."""
    options = child_options()
    connection: Any = await asyncpg.connect(options["dsn"])
    async with aiohttp.ClientSession() as session:

        async def by_sql(new: list[ingest.NewEvent]) -> None:
            await ingest.publish(connection, new)

        async def answer(request: dict[str, Any]) -> int:
            url = request.get("url")

            async def by_api(new: list[ingest.NewEvent]) -> None:
                for event in new:
                    await post(session, str(url), event)

            publisher = Publisher(by_api if url else by_sql, options["event_types"])
            if "rate" in request:
                await publisher.paced(request["rate"], request["seconds"])
            else:
                await publisher.one_by_one(request["events"])
            return publisher.published

        await answer_lines(answer)
    await connection.close()


async def post(session: aiohttp.ClientSession, url: str, event: ingest.NewEvent) -> None:
    """Publish one event through the API."""
    head = f'"event_type": "{event.event_type}", "correlation_id": "{event.correlation_id}"'
    body = f'{{{head}, "payload": {event.payload}}}'.encode()
    async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
        answer.raise_for_status()
        await answer.read()


if __name__ == "__main__":
    uvloop.run(main())
