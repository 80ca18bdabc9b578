"""From publish to arrival at an idle daemon: `make latency`.

A durable PostgreSQL, one instance with its defaults, an HTTPS endpoint with a kept-alive connection; one
event at a time, through SQL from another process and through the API, in turns. Prints milliseconds.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster, Database
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.installations import installation_near
from tests.support.postgres import LocalServer
from webhookd.store import subscriptions

NEWEST = 99
ROUNDS = 3
EVENTS = 200
# Longer than the throttle of wake-ups: each event meets an idle daemon.
PAUSE_SECONDS = 0.06
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

Publish = Callable[[], Awaitable[object]]


async def main() -> None:
    """Measure, and print a line for each round."""
    server = LocalServer(installation_near(NEWEST), durable=True)
    server.start()
    try:
        cluster = Cluster(server)
        await cluster.prepare()
        database = await cluster.create_database(migrated=True)
        with tempfile.TemporaryDirectory() as folder:
            await measure(database, Path(folder))
        await database.close()
    finally:
        server.stop()


async def measure(database: Database, folder: Path) -> None:
    """Both ways in, in turns."""
    certificates = Certificates.make(folder)
    flow = await Flow.open(database)
    application = await database.connect("application")
    with Endpoint(certificates.good) as endpoint:
        created = await subscriptions.create(flow.daemon, EVENT_TYPE, endpoint.url())
        await flow.verify(created.subscription_id)
        delivery = {"ca_file": str(certificates.ca_file), "allow_networks": ["127.0.0.0/8"]}
        daemon = DaemonProcess(folder, database.dsn("daemon"), delivery=delivery, log={"level": "info"})
        await daemon.start()
        try:
            async with aiohttp.ClientSession() as session:

                async def by_sql() -> object:
                    return await application.fetchval("select webhookd.publish($1, '{}')", EVENT_TYPE)

                async def by_api() -> object:
                    url = f"http://127.0.0.1:{daemon.port}/v1/events"
                    async with session.post(url, json={"event_type": EVENT_TYPE, "payload": {}}) as answer:
                        return await answer.read()

                for number in range(ROUNDS):
                    for name, publish in (("SQL", by_sql), ("API", by_api)):
                        await report(f"{number + 1} {name}", endpoint, publish)
        finally:
            daemon.stop()


async def report(name: str, endpoint: Endpoint, publish: Publish) -> None:
    """One round of one way in."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    async def note(_: Request, connection: Connection) -> bool:
        loop.call_soon_threadsafe(arrived.set)
        await connection.send(ANSWER)
        return True

    endpoint.behave(note)
    milliseconds = []
    for _ in range(EVENTS):
        arrived.clear()
        started = time.time()
        await publish()
        await arrived.wait()
        milliseconds.append((endpoint.requests[-1].received_at - started) * 1000)
        await asyncio.sleep(PAUSE_SECONDS)
    p50, p99 = statistics.median(milliseconds), statistics.quantiles(milliseconds, n=100)[-1]
    print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(milliseconds):.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
