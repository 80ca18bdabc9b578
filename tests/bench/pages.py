"""How long each page of the console takes with a long history: `make pages` (PAGES="--history 11000000").

Writes the history, starts a daemon that serves only the API and the console, and requests the first and a
last page of every list. Prints the median of each, and the sequential scans of large tables: there must be
none. One dead letter in eleven deliveries: 11 million have a million.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from tests.support import history
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster, Database
from tests.support.sources import first, sources

if TYPE_CHECKING:
    from tests.support.database import Connection

HISTORY = 11_000_000
POSTGRES = 15
ROUNDS = 15
TIMEOUT_SECONDS = 3600
LIMIT_MS = 100
LARGE = (
    "events",
    "event_labels",
    "webhook_delivery_sagas",
    "webhook_delivery_jobs",
    "dead_letters",
    "delivery_stats",
)
# The cursor of a last page is a row near the beginning of the history.
PATHS = (
    "/",
    "/?span=7d",
    "/events",
    "/events?cursor=100",
    "/events?event_type=type.n7",
    "/events?event_type=type.n7&cursor=308",
    "/events?idempotency_key=past-200",
    "/events/100",
    "/search?q=past-200",
    "/deliveries",
    "/deliveries?cursor=100",
    "/deliveries?status=Completed&cursor=100",
    "/deliveries?status=DeadLettered",
    "/deliveries?status=DeadLettered&cursor=100",
    "/deliveries?status=Pending",
    "/deliveries?status=PendingRetry",
    "/deliveries?status=InProgress",
    "/deliveries?subscription_id=7",
    "/deliveries?subscription_id=7&cursor=1000",
    "/deliveries?error_code=TLS_FAILED",
    "/deliveries?event_type=type.n7",
    "/deliveries?event_type=type.n7&cursor=1000",
    "/deliveries/100",
    "/endpoints",
    "/endpoints?search=receiver.example/39",
    "/endpoints/7",
    "/dead-letters",
    "/dead-letters?cursor=100",
    "/dead-letters?subscription_id=7",
    "/dead-letters?error_code=TLS_FAILED",
    "/tenants",
    "/tenants?cursor=60",
    "/tenants/tenant-77",
    "/erasures",
    "/jobs",
    "/live",
)
# Five hours of minutes and a month of hours, of every subscription and of all together, and many tenants.
MORE_ROWS = (
    """
    insert into webhookd.delivery_stats (subscription_id, minute, writer, delivered, failed)
    select s, date_trunc('minute', now()) - m * interval '1 minute', w, 20, 1
    from generate_series(0, 400) s, generate_series(0, 299) m, generate_series(1, 2) w
    """,
    """
    insert into webhookd.delivery_stats_hours (subscription_id, hour, delivered, failed)
    select s, date_trunc('hour', now()) - h * interval '1 hour', 1200, 60
    from generate_series(0, 400) s, generate_series(5, 719) h
    """,
    "insert into webhookd.tenants (tenant) select 'tenant-' || i from generate_series(1, 10000) i",
)


async def fill(superuser: "Connection", size: int) -> None:
    """Write the history, the statistics and the tenants."""
    await history.write_history(superuser, size)
    for statement in MORE_ROWS:
        await superuser.execute(statement)
    await history.vacuum(superuser)


async def scans(connection: "Connection") -> dict[str, int]:
    """Return the sequential scans of the large tables so far."""
    rows = await connection.fetch(
        """
        select relname, seq_scan from pg_stat_user_tables
        where schemaname = 'webhookd' and relname = any($1)
        """,
        list(LARGE),
    )
    return {row["relname"]: row["seq_scan"] for row in rows}


async def measure(daemon: DaemonProcess, rounds: int) -> dict[str, tuple[int, float]]:
    """Return the status and the median duration in milliseconds of each page."""
    durations: dict[str, list[float]] = {path: [] for path in PATHS}
    statuses: dict[str, int] = {}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{daemon.port}") as session:
        for _ in range(rounds):
            for path in PATHS:
                started = time.perf_counter()
                async with session.get(path, allow_redirects=False) as response:
                    await response.read()
                    statuses[path] = response.status
                durations[path].append((time.perf_counter() - started) * 1000)
    return {path: (statuses[path], statistics.median(found)) for path, found in durations.items()}


async def run(given: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    server = first(sources(), given.postgres).make_server()
    await asyncio.to_thread(server.start)
    cluster = Cluster(server)
    try:
        await cluster.prepare()
        database: Database = await cluster.create_database(migrated=True)
        superuser = await database.connect("superuser")
        started = time.monotonic()
        await fill(superuser, given.history)
        await history.write_backlog(await database.connect("daemon"))
        written = time.monotonic() - started
        print(
            f"PostgreSQL {given.postgres}, {given.history:,} deliveries written in {written:.0f} s",
            flush=True,
        )
        before = await scans(superuser)
        with tempfile.TemporaryDirectory() as folder:
            daemon = DaemonProcess(Path(folder), database.dsn("daemon"), {}, services={"enabled": ["api"]})
            await daemon.start()
            try:
                found = await measure(daemon, given.rounds)
            finally:
                daemon.stop()
        # The sessions of the daemon have sent their counters when they ended.
        await asyncio.sleep(2)
        after = await scans(superuser)
    finally:
        await cluster.remove()
        await asyncio.to_thread(server.stop)
    for path, (status, median) in found.items():
        print(f"{median:8.1f} ms  {status}  {path}{'  SLOW' if median > LIMIT_MS else ''}")
    scanned = {name: after[name] - count for name, count in before.items() if after[name] > count}
    print(f"sequential scans of large tables: {scanned or 'none'}")
    failed = [path for path, (status, median) in found.items() if status >= 400 or median > LIMIT_MS]
    return 1 if failed or scanned else 0


async def main() -> int:
    """Run within a time limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pages", description=__doc__)
    parser.add_argument(
        "--history", type=int, default=HISTORY, help=f"finished deliveries (default: {HISTORY:,})"
    )
    parser.add_argument("--postgres", type=int, default=POSTGRES, help=f"major version (default: {POSTGRES})")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"requests of each page (default: {ROUNDS})"
    )
    given = parser.parse_args()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await run(given)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
