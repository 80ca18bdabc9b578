"""Open live pages of the console: the processor time of the daemon and PostgreSQL with them and without.

Once with hardly any activity, and once at a steady rate, when every page gets messages each second.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

from tests.bench.bed import Bed
from tests.bench.measures.paced import CONNECTIONS, WARM_UP_SECONDS, until_arrived
from tests.bench.measures.throughput import ProcessorMeters
from tests.bench.pipeline import Pipeline, event_type, pipeline
from tests.bench.rows import own_processor, server_processor
from tests.bench.scale import LIVE_RATES, SUBSCRIPTIONS, Numbers, alternate
from tests.support.api import tokens
from webhookd.console.activity import MAX_SESSION_CLIENTS
from webhookd.devtools.processes import Child, python_module

PAGES = 50
# One session may not have more pages.
TOKENS = {f"visitor{number}": ["read"] for number in range(-(-PAGES // MAX_SESSION_CLIENTS))}


class Side(NamedTuple):
    """What is measured: a rate, with the pages or without."""

    rate: int
    pages: int

    @property
    def name(self) -> str:
        return f"live {self.rate}/s" + ("" if self.pages else " without")


@dataclass
class Messages:
    """How many messages all pages together have read."""

    count: int = 0


SIDES = tuple(Side(rate, pages) for rate in LIVE_RATES for pages in (PAGES, 0))


async def live(bed: Bed, number: int) -> Numbers:
    """One round of all sides with one daemon."""
    numbers: Numbers = {}
    async with pipeline(bed, api={"tokens": tokens(TOKENS)}) as running:
        await running.warm_up()
        options = {
            "dsn": running.database.dsn("application"),
            "event_types": [event_type(number) for number in range(SUBSCRIPTIONS)],
            "connections": CONNECTIONS,
        }
        async with bed.child("publisher", python_module("tests.bench.publisher"), options) as publisher:
            for side in alternate(number, SIDES):
                numbers[side.name] = await share(bed, running, publisher, side)
    for rate in LIVE_RATES:
        with_pages, without = (Side(rate, pages).name for pages in (PAGES, 0))
        numbers[f"{with_pages} added"] = numbers[with_pages] - numbers[without]
    return numbers


async def share(bed: Bed, running: Pipeline, publisher: Child, side: Side) -> float:
    """Return the processor time of the daemon and PostgreSQL, as a share of one core."""
    [daemon] = running.daemons
    request = {"rate": side.rate, "singly": True}
    async with open_pages(f"http://127.0.0.1:{daemon.port}", side.pages) as messages:
        before = await bed.receiver.requests()
        before += await publisher.request(request | {"seconds": WARM_UP_SECONDS})
        await until_arrived(bed, before)
        read_before = messages.count
        meters = ProcessorMeters(daemon.process.pid, bed.server.process_id)
        meters.start()
        published = await publisher.request(request | {"seconds": bed.scale.paced_seconds})
        await until_arrived(bed, before + published)
        spent = meters.numbers(side.name, 1)
        # A page without messages would cost nothing, and prove nothing.
        read = messages.count - read_before
        if read < side.pages * bed.scale.paced_seconds / 2:
            raise RuntimeError(f"{side.name}: the pages got {read} messages")
    return (spent[own_processor(side.name)] + spent[server_processor(side.name)]) / bed.scale.paced_seconds


@contextlib.asynccontextmanager
async def open_pages(address: str, count: int) -> AsyncIterator[Messages]:
    """Open so many streams, and read them until the end."""
    messages = Messages()
    are_open = [asyncio.Event() for _ in range(count)]
    every_token = list(TOKENS) * MAX_SESSION_CLIENTS
    async with (
        aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        pages = [
            group.create_task(_read(session, token, is_open, messages))
            for token, is_open in zip(every_token, are_open, strict=False)
        ]
        for is_open in are_open:
            await is_open.wait()
        yield messages
        for page in pages:
            page.cancel()


async def _read(
    session: aiohttp.ClientSession, token: str, is_open: asyncio.Event, messages: Messages
) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    forever = aiohttp.ClientTimeout(total=None)
    async with session.get("/live/stream", headers=headers, timeout=forever) as response:
        response.raise_for_status()
        is_open.set()
        async for line in response.content:
            messages.count += line.startswith(b"data:")
