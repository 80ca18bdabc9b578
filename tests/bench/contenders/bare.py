"""The limit: aiohttp and uvloop post payloads from memory, without a database.

Every Python contender sends with the Poster of this module: the same client, over kept-alive TLS connections,
with as many headers of the same lengths as a delivery of webhookd.
"""

import asyncio
import json
import ssl
import time

import aiohttp
import click
import uvloop
from yarl import URL

from tests.bench.scale import COMMITTED, CONCURRENCY
from webhookd.devtools.bench_load import payload
from webhookd.devtools.processes import answer_lines, child_options

HEADERS = {
    "user-agent": "webhookd/0.0.0",
    "content-type": "application/json",
    "accept": "*/*",
    "accept-encoding": "identity",
}


class Poster:
    """Posts to one URL."""

    def __init__(self, url: str, ca_file: str) -> None:
        self._url = URL(url)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=ssl.create_default_context(cafile=ca_file), limit=CONCURRENCY, keepalive_timeout=60
            ),
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def post(self, number: int, body: bytes) -> None:
        """Make one delivery, which must be answered with 200."""
        headers = {
            "webhook-id": f"evt_{number}",
            "webhook-timestamp": str(int(time.time())),
            "webhook-signature": "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=",
            "webhook-event-type": "bench.n0",
            "webhook-attempt": "1",
        }
        async with self.session.post(self._url, headers=headers, data=body, allow_redirects=False) as answer:
            await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"the receiver answered {answer.status}")


def say_committed() -> None:
    """Say that all work is committed, before the answer: from now on, processor time counts."""
    click.echo(json.dumps(COMMITTED))  # which flushes


class Countdown:
    """Counts handled jobs. The peer's own bookkeeping may still follow."""

    def __init__(self) -> None:
        self._left = 0

    def start(self, count: int) -> None:
        self._left = count

    def handled(self) -> None:
        self._left -= 1

    @property
    def finished(self) -> bool:
        return self._left <= 0


async def main() -> None:
    """Run as many loops as webhookd has slots; each sends its next payload after an answer."""
    options = child_options()
    poster = Poster(options["url"], options["ca_file"])

    async def post_all(count: int) -> float:
        bodies = enumerate([payload(number).encode() for number in range(count)])

        async def slot() -> None:
            for number, body in bodies:
                await poster.post(number, body)

        say_committed()
        started = time.perf_counter()
        async with asyncio.TaskGroup() as slots:
            for _ in range(CONCURRENCY):
                slots.create_task(slot())
        return time.perf_counter() - started

    async with poster.session:
        await answer_lines(post_all)


if __name__ == "__main__":
    uvloop.run(main())
