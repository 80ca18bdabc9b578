"""What a scenario breaks: PostgreSQL with fsync on, instances of webhookd, wires, receivers, publishers.

Everything that it starts ends with its block, also at Ctrl-C. Its folder keeps every log.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from tests.faults.instance import REAPER_INTERVAL_SECONDS, SETTINGS, Instance, failpoint_environment
from tests.faults.plan import Needs
from tests.faults.surroundings import Surroundings
from tests.faults.watch import INTERVAL_SECONDS, Watch
from tests.support.api import tokens
from tests.support.bad_endpoints import BadEndpoints
from tests.support.breakable import BreakableServer
from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster, Database, close_connection
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.invariants import AUDIT
from tests.support.names import Names
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS
from tests.support.publisher import Publisher
from tests.support.traffic import Receiver
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS
from tests.support.wire import Wire
from webhookd.embedded.installation import Installation

if TYPE_CHECKING:
    from tests.support.database import Connection

EVENT_TYPES = tuple(f"order.n{number}" for number in range(6))
# The first has more subscriptions than the good one of each. It is rare: an endpoint that fails gets one
# request at a time.
PUBLISHED_TYPES = EVENT_TYPES[:1] + EVENT_TYPES[1:] * 12
BAD_ATTEMPTS = 2
MOMENT_SECONDS = 0.02
PACE_SECONDS = 0.01
BATCH_EVERY = 12
# Of the publishers, where tokens are set; a test's token is what it is called.
TOKEN = "applications"
# Of a publisher: one that is stopped is left soon, for another.
ANSWER_TIMEOUT_SECONDS = 3.0
LOOK_INTERVAL_SECONDS = 0.05
# Of a time that was measured from outside: one look late, and one pass of the reaper just missed.
ALLOWANCE_SECONDS = INTERVAL_SECONDS + REAPER_INTERVAL_SECONDS


@dataclass(frozen=True)
class Recovery:
    """How long it took until something was as before, and how long it may take."""

    what: str
    seconds: float
    bound_seconds: float

    @property
    def is_late(self) -> bool:
        return self.seconds > self.bound_seconds + ALLOWANCE_SECONDS


@dataclass
class Bed:
    """All of it, running."""

    folder: Path
    needs: Needs
    server: BreakableServer
    database: Database
    certificates: Certificates
    endpoint: Endpoint
    receiver: Receiver
    surroundings: Surroundings
    instances: list[Instance] = field(default_factory=list)
    publisher: Publisher = field(init=False)
    watch: Watch = field(init=False)
    bad_endpoints: BadEndpoints | None = None
    names: Names | None = None
    # What the verbs did, beside what the database and the instances can tell.
    effects: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    # The processor's share of an instance that has no database.
    idle_shares: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # What a scenario keeps from one action to the next.
    kept: dict[str, Any] = field(default_factory=dict)
    # Connections that hold a lock or a place until they are let go.
    holders: "list[Connection]" = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def superuser(self) -> "AsyncIterator[Connection]":
        """A connection of its own, by no wire: another may have died with the server."""
        connection = await asyncpg.connect(self.database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS)
        try:
            yield connection
        finally:
            await close_connection(connection)

    async def let_go(self) -> None:
        """End what holds something."""
        while self.holders:
            await close_connection(self.holders.pop())

    async def ask(self, query: str, *arguments: object) -> Any:
        """One value."""
        async with self.superuser() as connection:
            return await connection.fetchval(query, *arguments)

    async def until(self, query: str, *arguments: object) -> None:
        """Return when a query says true, be it that the server must come back first."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        last = "it said no"
        while time.monotonic() < deadline:
            try:
                async with self.superuser() as connection:
                    while time.monotonic() < deadline:
                        if await connection.fetchval(query, *arguments):
                            return
                        last = "it said no"
                        await asyncio.sleep(LOOK_INTERVAL_SECONDS)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)
        raise AssertionError(f"not within {CONDITION_TIMEOUT_SECONDS} s ({last}): {' '.join(query.split())}")

    @property
    def living(self) -> list[Instance]:
        """Those that are to answer."""
        return [instance for instance in self.instances if instance.answers]

    def recovered(self, what: str, began: float, bound_seconds: float, ended: float | None = None) -> None:
        """Something is as it should be, since now or then; later than it may be, it is a problem."""
        recovery = Recovery(what, (ended or time.monotonic()) - began, bound_seconds)
        self.recoveries.append(recovery)
        if recovery.is_late:
            self.problems.append(f"late: {what} after {recovery.seconds:.2f} s, and not {bound_seconds:.1f}")


@contextlib.asynccontextmanager
async def open_bed(
    installation: Installation, needs: Needs, folder: Path, certificates: Certificates
) -> AsyncIterator[Bed]:
    """Start it all, under load."""
    async with contextlib.AsyncExitStack() as stack:
        surroundings = stack.enter_context(Surroundings.prepared(installation, needs))
        server = surroundings.server
        cluster = Cluster(server)
        await cluster.prepare()
        database = await cluster.create_database(migrated=True)
        await surroundings.place(database)
        stack.push_async_callback(database.close)
        endpoint = stack.enter_context(Endpoint(certificates.good))
        # A connection that is kept needs no name.
        receiver = Receiver(endpoint, MOMENT_SECONDS, keeps_connections=not needs.names)
        bed = Bed(folder, needs, server, database, certificates, endpoint, receiver, surroundings)
        stack.push_async_callback(bed.let_go)
        for name, each in surroundings.servers.items():
            stack.callback(keep_server_log, each, folder / name)
        if needs.bad_endpoints:
            bed.bad_endpoints = stack.enter_context(BadEndpoints.listening(certificates))
        if needs.names:
            bed.names = Names(made(folder / "names"))
            bed.names.answer("hooks.example", "127.0.0.1")
        await subscribe(bed)
        for number in range(needs.instances):
            instance = await make_instance(bed, number)
            stack.push_async_callback(instance.end)
            bed.instances.append(instance)
        await asyncio.gather(*(instance.start() for instance in bed.instances))
        bed.publisher = Publisher(
            [instance.daemon for instance in bed.instances],
            PUBLISHED_TYPES,
            pace_seconds=PACE_SECONDS,
            answer_timeout_seconds=ANSWER_TIMEOUT_SECONDS,
            batch_every=BATCH_EVERY,
            token=TOKEN if needs.tokens else None,
            log_path=folder / "told.jsonl",
        )
        bed.watch = Watch(bed.instances)
        yield bed


async def subscribe(bed: Bed) -> None:
    """The good receiver, at a path for each type, and an audit of every change of a saga.

    One type has a second good subscription beside, one whose deliveries end as dead letters, and one that
    nobody verified and that gets nothing: whatever is broken, each fares as if the others were not.
    """
    flow = Flow(await bed.database.connect("daemon"), await bed.database.connect("superuser"))
    await flow.superuser.execute(AUDIT)
    host = "hooks.example" if bed.names else "127.0.0.1"
    for event_type in EVENT_TYPES:
        await bed.receiver.subscribe(flow, event_type, host)
    first = EVENT_TYPES[0]
    await bed.receiver.subscribe(flow, first, host, path="/second")
    await bed.receiver.subscribe(
        flow, first, host, path="/failing", fails_with=500, max_attempts=BAD_ATTEMPTS
    )
    await bed.receiver.subscribe(flow, first, host, path="/unverified", verified=False)
    await bed.database.close()


async def make_instance(bed: Bed, number: int) -> Instance:
    """One that is still to be started."""
    folder = made(bed.folder / f"instance{number}")
    failpoints = made(folder / "failpoints") if bed.needs.failpoints else None
    dsn, wire = bed.surroundings.dsn(bed.database), None
    if not bed.needs.standby:  # the way to two servers is their own
        wire = Wire(dsn)
        await wire.open()
        dsn = wire.dsn
    environment = failpoint_environment(failpoints) if failpoints else {}
    environment |= bed.names.environment if bed.names else {}
    environment |= bed.surroundings.environment(number)
    daemon = DaemonProcess(folder, dsn, environment, **SETTINGS)
    # A preloaded library (a wrong clock) needs a new process.
    daemon.is_forked = not bed.surroundings.environment(number)
    daemon.configure(delivery={"ca_file": str(bed.certificates.ca_file)})
    if bed.needs.tokens:
        daemon.token = TOKEN
        daemon.configure(api={"tokens": tokens({TOKEN: ["ingest", "read"]})})
    for key, value in bed.needs.settings.items():
        section, name = key.split(".")
        daemon.configure(**{section: {name: value}})
    return Instance(number, daemon, wire, failpoints)


def keep_server_log(server: BreakableServer, path: Path) -> None:
    """Beside the others, before its folder goes."""
    with contextlib.suppress(OSError):
        path.write_bytes(server.log_path.read_bytes())


def made(folder: Path) -> Path:
    """A folder that is there now."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
