"""Publishes at a pace of its own, whatever becomes of it: by SQL, or one event at a time through the API.

The correlation id of an event is the time at which it was due to be published: a publisher that is held up
hides nothing. Asked by lines; answers how many it published.
"""

import asyncio
import time
from collections import deque
from math import ceil
from typing import Any

import aiohttp
import asyncpg
import uvloop

from tests.bench.lines import answer_lines, options
from tests.bench.scale import payload

TICK_SECONDS = 0.005
# Longer than the daemon's throttle of wake-ups: each event meets an idle daemon.
IDLE_PAUSE_SECONDS = 0.06
PUBLISH = "select count(*) from webhookd.publish_many($1, $2, $3, $4)"


class Publisher:
    """With a connection of the application's login, and a kept-alive one to the API."""

    def __init__(self, connection: Any, session: aiohttp.ClientSession, event_types: list[str]) -> None:
        self._connection = connection
        self._session = session
        self._event_types = event_types
        self._published = 0

    async def answer(self, question: dict[str, Any]) -> int:
        """How it is to publish, in; how many it did, out."""
        before = self._published
        if "rate" in question:
            await self.paced(question["rate"], question["seconds"])
        else:
            await self.one_by_one(question["events"], question.get("url"))
        return self._published - before

    async def paced(self, rate: float, seconds: float) -> None:
        """At each tick what has come due since the last, in one commit: an open loop."""
        ticks = deque(due_times(rate, seconds, time.time()))
        while ticks:
            now, due = time.time(), []
            while ticks and ticks[0] <= now:
                due.append(ticks.popleft())
            if due:
                await self.by_sql(due)
            if ticks:
                await asyncio.sleep(max(0.0, ticks[0] - time.time()))

    async def one_by_one(self, events: int, url: str | None) -> None:
        """An event, then a pause."""
        for _ in range(events):
            now = time.time()
            await (self.by_sql([now]) if url is None else self.by_api(url, now))
            await asyncio.sleep(IDLE_PAUSE_SECONDS)

    async def by_sql(self, due: list[float]) -> None:
        numbers = range(self._published, self._published + len(due))
        await self._connection.fetchval(
            PUBLISH,
            [self._event_type(number) for number in numbers],
            [payload(number) for number in numbers],
            [None] * len(due),
            [f"{moment:.6f}" for moment in due],
        )
        self._published += len(due)

    async def by_api(self, url: str, now: float) -> None:
        number = self._published
        body = f'"event_type": "{self._event_type(number)}", "correlation_id": "{now:.6f}"'
        data = f'{{{body}, "payload": {payload(number)}}}'.encode()
        headers = {"content-type": "application/json"}
        async with self._session.post(url, data=data, headers=headers) as answer:
            answer.raise_for_status()
            await answer.read()
        self._published += 1

    def _event_type(self, number: int) -> str:
        return self._event_types[number % len(self._event_types)]


def due_times(rate: float, seconds: float, began: float) -> list[float]:
    """When each event is due: so many a second, put off to the end of their tick."""
    wanted = int(rate * seconds)
    return [began + ceil((number + 1) / rate / TICK_SECONDS) * TICK_SECONDS for number in range(wanted)]


async def main() -> None:
    """Until the input ends."""
    given = options()
    connection = await asyncpg.connect(given["dsn"])
    async with aiohttp.ClientSession() as session:
        await answer_lines(Publisher(connection, session, given["event_types"]).answer)
    await connection.close()


if __name__ == "__main__":
    uvloop.run(main())
