"""`make instructions`: what a delivery costs PostgreSQL in each stage, on a busy or an idle machine alike.

Runs a server under callgrind and calls the stages as the daemon does, with its functions and its pool, on one
connection. Prints the instructions of the server process, the WAL and the buffer accesses per delivery. These
numbers repeat within a few per cent, so they show a change that the rates of `make bench` cannot show. The
kernel, disks, locks and other server processes are not included.
"""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.without_stats import WITHOUT_STATS
from tests.support import history
from tests.support.database import Cluster, Database
from tests.support.flow import Flow
from tests.support.installations import installation_of
from tests.support.postgres import LocalServer, ServerError, end_process, free_port, log_tail
from webhookd.core.settings import Settings
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool
from webhookd.deliveries import attempts, ingest, router, sagas
from webhookd.deliveries.starter import Rotation
from webhookd.devtools.bench_load import PAYLOAD_BYTES, payload

if TYPE_CHECKING:
    from tests.support.database import Connection as Session
    from webhookd.embedded.installation import Installation

POSTGRES = 15
BATCHES = (100, 1)
HISTORY = 200_000
SUBSCRIPTIONS = 20
# PostgreSQL chooses a generic plan after five executions.
WARM_UP_CYCLES = 7
# Each cycle passes one batch through all steps. A small batch needs more cycles, because some of them split a
# page of an index or extend a table.
DELIVERIES = 500
MIN_CYCLES, MAX_CYCLES = 5, 40
TIMEOUT_SECONDS = 1800

# A page image after each checkpoint would depend on the time of the checkpoint. Commits are flushed as in
# production, except that the kernel does not wait for the disk.
SERVER_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "on",
    "full_page_writes": "off",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "bgwriter_lru_maxpages": "0",
}
# A server process calls it at the end of each statement, before it answers the client, so that the dump of
# a statement is complete when the client has the result. Each dump resets the counters.
STATEMENT_END = "ReadyForQuery"
DUMPS = "callgrind"

SETTINGS = Settings()
POLICY = sagas.RetryPolicy(
    SETTINGS.retry.max_attempts,
    SETTINGS.retry.base_delay_seconds,
    SETTINGS.retry.max_delay_seconds,
    SETTINGS.retry.jitter,
)


class Costs(NamedTuple):
    """What a step cost the server."""

    instructions: float
    wal_bytes: float
    buffers: float  # pages of tables and indexes looked up, in memory or not


# The steps: each passes a batch on as the daemon would, and returns the number of deliveries.


@dataclass
class Cycle:
    """One batch on its way through the steps."""

    connection: Connection
    events: list[ingest.NewEvent]
    first_job_id: int
    subscription_ids: list[int] = field(default_factory=list)
    leases: list[attempts.Lease] = field(default_factory=list)


async def publish(cycle: Cycle) -> int:
    """As GroupCommit does for events of the API."""
    timeout = ingest.GROUP_LOCK_TIMEOUT_SECONDS
    return len(await ingest.publish(cycle.connection, cycle.events, lock_timeout_seconds=timeout))


async def route(cycle: Cycle) -> int:
    """As the Router does."""
    routed = await router.route(cycle.connection, SETTINGS.routing.batch_size)
    cycle.subscription_ids = routed.subscription_ids
    return routed.sagas


async def start(cycle: Cycle) -> int:
    """As the Starter does."""
    rotation, settings = Rotation(), SETTINGS.orchestration
    rotation.add(cycle.subscription_ids)
    shares = rotation.next_shares(settings.batch_size, settings.subscription_window)
    started = await sagas.start(
        cycle.connection, shares, settings.subscription_window, SETTINGS.retry.max_attempts
    )
    return sum(it.started for it in started)


async def claim(cycle: Cycle) -> int:
    """As the worker does, with all slots free. Small messages come with their leases."""
    settings = SETTINGS.delivery
    claims = await attempts.claim(
        cycle.connection,
        "instructions",
        settings.concurrency,
        settings.lease_seconds,
        settings.subscription_concurrency,
        {},
        cycle.first_job_id,
    )
    cycle.leases = [claim.lease for claim in claims]
    cycle.first_job_id = claims[0].lease.resume_from if claims else 0
    return sum(claim.message is not None for claim in claims)


async def complete(cycle: Cycle) -> int:
    """As the reporter does: every attempt succeeded."""
    reports = [attempts.Report(it.job_id, it.lease_token, 200, duration_ms=5) for it in cycle.leases]
    return len(await sagas.complete(cycle.connection, reports))


Step = Callable[[Cycle], Awaitable[int]]

# In the order of a delivery's life. Change this table when the daemon calls the stages in another way; a step
# may run several statements.
STEPS: dict[str, Step] = {
    "publish": publish,
    "route": route,
    "start": start,
    "claim": claim,
    "complete": complete,
}
# The application pays for this step; the last line of the table leaves it out.
PUBLISHING = "publish"


class CallgrindServer(LocalServer):
    """A server that can be restarted under callgrind. Its processes stay under callgrind after a fork."""

    def __init__(self, installation: "Installation") -> None:
        super().__init__(installation, settings=SERVER_SETTINGS)

    def restart_under_callgrind(self) -> None:
        """Start the same data again on another port. Preparing the data under callgrind would be slow."""
        assert self._folder is not None, "the server is not running"
        assert self._process is not None, "the server is not running"
        end_process(self._process)
        self._wrapper = [
            "valgrind",
            "--tool=callgrind",
            "--vgdb=no",
            f"--dump-before={STATEMENT_END}",
            f"--callgrind-out-file={self._folder / DUMPS}.%p",
        ]
        if not self._launched(self._folder, free_port()):
            raise ServerError(f"PostgreSQL did not start under callgrind:\n{log_tail(self._folder)}")

    def forget_dumps(self) -> None:
        """Remove the dumps of all processes."""
        for path in self._dumps("*"):
            path.unlink(missing_ok=True)

    def instructions_of(self, process_id: int) -> int:
        """Instructions of a server process in the statements since `forget_dumps`."""
        dumps = self._dumps(f"{process_id}.*")
        if not dumps:
            raise ServerError(f"callgrind wrote no dump: {STATEMENT_END} was not called, or has no symbol")
        return sum(parse_totals(path.read_text()) for path in dumps)

    def _dumps(self, pattern: str) -> list[Path]:
        assert self._folder is not None, "the server is not running"
        return list(self._folder.glob(f"{DUMPS}.{pattern}"))


def parse_totals(dump: str) -> int:
    """The instructions in a dump of callgrind, which has one line of totals."""
    for line in dump.splitlines():
        name, _, numbers = line.partition(":")
        if name == "totals":
            return int(numbers.split()[0])
    raise ValueError("the dump of callgrind has no totals")


class Meter:
    """Measures calls on one connection, with the help of a session in another database."""

    def __init__(
        self, server: CallgrindServer, database: str, connection: Connection, observer: "Session"
    ) -> None:
        self._server = server
        self._database = database
        self._connection = connection
        self._observer = observer

    async def costs(self, call: Callable[[], Awaitable[object]]) -> Costs:
        """Run a call and return its costs."""
        wal_bytes, buffers = await self._counters()
        self._server.forget_dumps()
        await call()
        instructions = self._server.instructions_of(self._connection.get_server_pid())
        wal_bytes_after, buffers_after = await self._counters()
        return Costs(instructions, wal_bytes_after - wal_bytes, buffers_after - buffers)

    async def _counters(self) -> tuple[int, int]:
        # Otherwise a session sends its counters once a second.
        await self._connection.execute("select pg_stat_force_next_flush()")
        row = await self._observer.fetchrow(
            "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint, blks_hit + blks_read"
            " from pg_stat_database where datname = $1",
            self._database,
        )
        assert row is not None
        return row[0], row[1]


async def measure(meter: Meter, connection: Connection, batch: int, given: argparse.Namespace) -> list[Costs]:
    """Pass batches through all steps. Returns the costs of each step per delivery."""
    numbers = count()
    cycles = min(max(DELIVERIES // batch, MIN_CYCLES), MAX_CYCLES)
    found: list[list[Costs]] = [[] for _ in STEPS]
    first_job_id = 0
    for cycle_number in range(WARM_UP_CYCLES + cycles):
        events = [new_event(next(numbers), given) for _ in range(batch)]
        cycle = Cycle(connection, events, first_job_id)
        for (name, step), costs in zip(STEPS.items(), found, strict=True):
            passed = 0

            async def call(step: Step = step, cycle: Cycle = cycle) -> None:
                nonlocal passed
                passed = await step(cycle)

            spent = await meter.costs(call)
            if passed != batch:
                raise RuntimeError(f"{name}: {passed} of {batch} deliveries")
            if cycle_number >= WARM_UP_CYCLES:
                costs.append(spent)
        first_job_id = cycle.first_job_id
    return [per_delivery(costs, batch) for costs in found]


def new_event(number: int, given: argparse.Namespace) -> ingest.NewEvent:
    """An event with one subscription."""
    return ingest.NewEvent(event_type(number % given.subscriptions), payload(number, given.payload_bytes))


def event_type(number: int) -> str:
    """The event type of a subscription."""
    return f"bench.n{number}"


def per_delivery(costs: Sequence[Costs], batch: int) -> Costs:
    """The mean, because a page split in one of many cycles is a cost of all of them."""
    return Costs(*(statistics.fmean(column) / batch for column in zip(*costs, strict=True)))


def table(batch: int, costs: Sequence[Costs]) -> str:
    """The costs per delivery as text, with the sum of the steps after publishing."""
    own = [spent for name, spent in zip(STEPS, costs, strict=True) if name != PUBLISHING]
    after_publishing = [name for name in STEPS if name != PUBLISHING]
    rows = [
        *zip(STEPS, costs, strict=True),
        (f"{after_publishing[0]} to {after_publishing[-1]}", added(own)),
        ("all", added(costs)),
    ]
    lines = [f"{f'per delivery, batches of {batch}':30}{'instructions':>14}{'WAL bytes':>12}{'buffers':>10}"]
    lines += [
        f"  {name:28}{spent.instructions:14,.0f}{spent.wal_bytes:12,.0f}{spent.buffers:10,.1f}"
        for name, spent in rows
    ]
    return "\n".join(lines)


def added(costs: Sequence[Costs]) -> Costs:
    """The sum of several steps."""
    return Costs(*map(sum, zip(*costs, strict=True)))


async def prepare(cluster: Cluster, given: argparse.Namespace) -> Database:
    """Create a database with a history and verified subscriptions."""
    await cluster.prepare()
    database = await cluster.create_database(migrated=True)
    superuser = await database.connect("superuser")
    if given.history:
        await history.write_history(superuser, given.history)
    flow = await Flow.open(database)
    for number in range(given.subscriptions):
        await flow.subscribe(event_type(number), f"https://receiver.example/{number}")
    if given.without_stats:
        await superuser.execute(WITHOUT_STATS)
    await history.vacuum(superuser)
    await database.close()
    return database


@contextlib.asynccontextmanager
async def running_server(given: argparse.Namespace) -> AsyncIterator[tuple[CallgrindServer, Database]]:
    """A server under callgrind, with the prepared database."""
    server = CallgrindServer(installation_of(given.postgres))
    await asyncio.to_thread(server.start)
    try:
        database = await prepare(Cluster(server), given)
        await asyncio.to_thread(server.restart_under_callgrind)
        yield server, database
    finally:
        server.stop()


async def run(given: argparse.Namespace) -> None:
    """Measure each batch size and print its table."""
    async with running_server(given) as (server, database):
        print(
            f"PostgreSQL {server.version} under callgrind; {given.history:,} finished deliveries, "
            f"{given.subscriptions} subscriptions, payloads of {given.payload_bytes} bytes",
            flush=True,
        )
        async with (
            Pool(database.dsn("daemon"), size=1) as pool,
            pool.connection() as connection,
            database.cluster.superuser() as observer,
        ):
            meter = Meter(server, database.name, connection, observer)
            for batch in given.batch:
                print(f"\n{table(batch, await measure(meter, connection, batch, given))}", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.instructions", description=__doc__)
    parser.add_argument("--postgres", type=int, default=POSTGRES, help=f"major version (default: {POSTGRES})")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=BATCHES, help="deliveries per call (default: 100 and 1)"
    )
    parser.add_argument(
        "--history", type=int, default=HISTORY, help=f"finished deliveries (default: {HISTORY:,})"
    )
    parser.add_argument("--subscriptions", type=int, default=SUBSCRIPTIONS, help=f"default: {SUBSCRIPTIONS}")
    parser.add_argument("--payload-bytes", type=int, default=PAYLOAD_BYTES, help=f"default: {PAYLOAD_BYTES}")
    parser.add_argument(
        "--without-stats", action="store_true", help="leave out the statistics, to see what they cost"
    )
    given = parser.parse_args()
    if not all(1 <= batch <= SETTINGS.delivery.concurrency for batch in given.batch):
        parser.error(f"--batch must be from 1 to {SETTINGS.delivery.concurrency}")
    if given.history and given.history < history.SUBSCRIPTIONS * history.FEW_LETTERS:
        parser.error(f"--history must be 0 or at least {history.SUBSCRIPTIONS * history.FEW_LETTERS}")
    return given


async def main() -> int:
    """Run within a time limit. Returns the exit status."""
    given = arguments()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed", file=sys.stderr)
        return 1
    async with asyncio.timeout(TIMEOUT_SECONDS):
        await run(given)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
