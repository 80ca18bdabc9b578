"""The test bed of a scenario: PostgreSQL with fsync on, webhookd instances, proxies, receivers, publishers.

Everything stops at the end of the block, also after Ctrl-C. The folder keeps every log.
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
from tests.faults.servers import ServerSetup
from tests.faults.support_client import SupportClient
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
# The first type has more subscriptions. It is published rarely, because a failing endpoint gets only one
# request at a time.
PUBLISHED_TYPES = EVENT_TYPES[:1] + EVENT_TYPES[1:] * 12
BAD_ATTEMPTS = 2
ANSWER_DELAY_SECONDS = 0.02
PUBLISH_INTERVAL_SECONDS = 0.01
BATCH_EVERY = 12
# The publishers' token, if tokens are set. In tests a token is the same as its name.
TOKEN = "applications"
# A publisher soon leaves an instance that is stopped, and tries another.
ANSWER_TIMEOUT_SECONDS = 3.0
POLL_INTERVAL_SECONDS = 0.05
# Times are measured from outside: a probe may be one interval late, and may just miss a pass of the reaper.
TOLERANCE_SECONDS = INTERVAL_SECONDS + REAPER_INTERVAL_SECONDS


@dataclass(frozen=True)
class Recovery:
    """How long a recovery took, and its limit."""

    name: str
    seconds: float
    limit_seconds: float

    @property
    def is_late(self) -> bool:
        return self.seconds > self.limit_seconds + TOLERANCE_SECONDS


@dataclass
class Bed:
    """The running test bed."""

    folder: Path
    needs: Needs
    server: BreakableServer
    database: Database
    certificates: Certificates
    endpoint: Endpoint
    receiver: Receiver
    setup: ServerSetup
    instances: list[Instance] = field(default_factory=list)
    publisher: Publisher = field(init=False)
    watch: Watch = field(init=False)
    bad_endpoints: BadEndpoints | None = None
    names: Names | None = None
    support: SupportClient = field(default_factory=SupportClient)
    # Counted by the verbs; checks.py adds counts from the database and the instances.
    effects: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    # CPU use of instances without a database.
    idle_shares: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # Values that a scenario passes from one action to a later action.
    state: dict[str, Any] = field(default_factory=dict)
    # Connections that hold a lock, or a place in max_connections, until they are released.
    holders: "list[Connection]" = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def superuser(self) -> "AsyncIterator[Connection]":
        """Open a new connection without a proxy: an older connection may have died with the server."""
        connection = await asyncpg.connect(self.database.dsn("superuser"), timeout=CONNECT_TIMEOUT_SECONDS)
        try:
            yield connection
        finally:
            await close_connection(connection)

    async def release_holders(self) -> None:
        """Close the connections that hold a lock or a place."""
        while self.holders:
            await close_connection(self.holders.pop())

    async def fetch_value(self, query: str, *arguments: object) -> Any:
        """Return one value."""
        async with self.superuser() as connection:
            return await connection.fetchval(query, *arguments)

    async def until(self, query: str, *arguments: object) -> None:
        """Wait until a query returns true; the server may have to come back first."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        last = "it returned false"
        while time.monotonic() < deadline:
            try:
                async with self.superuser() as connection:
                    while time.monotonic() < deadline:
                        if await connection.fetchval(query, *arguments):
                            return
                        last = "it returned false"
                        await asyncio.sleep(POLL_INTERVAL_SECONDS)
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        raise AssertionError(
            f"not true within {CONDITION_TIMEOUT_SECONDS} s ({last}): {' '.join(query.split())}"
        )

    @property
    def running(self) -> list[Instance]:
        """The instances that should answer."""
        return [instance for instance in self.instances if instance.should_answer]

    def record_recovery(
        self, name: str, started: float, limit_seconds: float, ended: float | None = None
    ) -> None:
        """Record a recovery that ended now or at `ended`; a late recovery is a problem."""
        recovery = Recovery(name, (ended or time.monotonic()) - started, limit_seconds)
        self.recoveries.append(recovery)
        if recovery.is_late:
            self.problems.append(f"late: {name} after {recovery.seconds:.2f} s, limit {limit_seconds:.1f} s")


@contextlib.asynccontextmanager
async def open_bed(
    installation: Installation, needs: Needs, folder: Path, certificates: Certificates
) -> AsyncIterator[Bed]:
    """Start everything; the caller starts the load."""
    async with contextlib.AsyncExitStack() as stack:
        setup = stack.enter_context(ServerSetup.started(installation, needs))
        server = setup.server
        cluster = Cluster(server)
        await cluster.prepare()
        database = await cluster.create_database(migrated=True)
        await setup.place(database)
        stack.push_async_callback(database.close)
        endpoint = stack.enter_context(Endpoint(certificates.good))
        # With kept connections, names would be resolved only once.
        receiver = Receiver(endpoint, ANSWER_DELAY_SECONDS, keeps_connections=not needs.names)
        bed = Bed(folder, needs, server, database, certificates, endpoint, receiver, setup)
        stack.push_async_callback(bed.release_holders)
        for name, each in setup.servers.items():
            stack.callback(copy_server_log, each, folder / name)
        if needs.bad_endpoints:
            bed.bad_endpoints = stack.enter_context(BadEndpoints.listening(certificates))
        if needs.names:
            bed.names = Names(create_folder(folder / "names"))
            bed.names.answer("hooks.example", "127.0.0.1")
        await subscribe(bed)
        for number in range(needs.instances):
            instance = await make_instance(bed, number)
            stack.push_async_callback(instance.close)
            bed.instances.append(instance)
        await asyncio.gather(*(instance.start() for instance in bed.instances))
        bed.publisher = Publisher(
            [instance.daemon for instance in bed.instances],
            PUBLISHED_TYPES,
            pace_seconds=PUBLISH_INTERVAL_SECONDS,
            answer_timeout_seconds=ANSWER_TIMEOUT_SECONDS,
            batch_every=BATCH_EVERY,
            token=TOKEN if needs.tokens else None,
            log_path=folder / "published.jsonl",
        )
        bed.watch = Watch(bed.instances)
        yield bed


async def subscribe(bed: Bed) -> None:
    """Subscribe the good receiver, at one path per event type, and audit every change of a saga.

    One type also has a second good subscription, one whose deliveries end as dead letters, and an unverified
    one that gets nothing: no fault may make one subscription affect another.
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
    """Create an instance without starting it."""
    folder = create_folder(bed.folder / f"instance{number}")
    failpoints = create_folder(folder / "failpoints") if bed.needs.failpoints else None
    dsn, wire = bed.setup.dsn(bed.database), None
    if not bed.needs.standby:  # with a standby, instances connect to both servers directly
        wire = Wire(dsn)
        await wire.open()
        dsn = wire.dsn
    environment = failpoint_environment(failpoints) if failpoints else {}
    environment |= bed.names.environment if bed.names else {}
    environment |= bed.setup.environment(number)
    daemon = DaemonProcess(folder, dsn, environment, **SETTINGS)
    # A preloaded library (a wrong clock) needs a new process.
    daemon.is_forked = not bed.setup.environment(number)
    daemon.configure(delivery={"ca_file": str(bed.certificates.ca_file)})
    if bed.needs.tokens:
        daemon.token = TOKEN
        daemon.configure(api={"tokens": tokens({TOKEN: ["ingest", "read"]})})
    for key, value in bed.needs.settings.items():
        section, name = key.split(".")
        daemon.configure(**{section: {name: value}})
    return Instance(number, daemon, wire, failpoints)


def copy_server_log(server: BreakableServer, path: Path) -> None:
    """Copy the log to the other logs before the server's folder is removed."""
    with contextlib.suppress(OSError):
        path.write_bytes(server.log_path.read_bytes())


def create_folder(folder: Path) -> Path:
    """Create the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
