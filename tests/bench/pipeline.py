"""webhookd in a run: a database with subscriptions, real daemons, and runs from commit to Completed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

from tests.bench.bed import ROOT, Bed
from tests.bench.scale import SUBSCRIPTIONS
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.flow import Flow
from webhookd.deliveries import ingest
from webhookd.devtools import bench_database
from webhookd.devtools.bench_load import BATCH_EVENTS, Receiver, payload

if TYPE_CHECKING:
    from tests.support.database import Connection

RUN_TIMEOUT_SECONDS = 120
RECEIVER_POLL_SECONDS = 0.05
DATABASE_POLL_SECONDS = 0.02
END_TIMEOUT_SECONDS = 60

CLOCK = "select extract(epoch from clock_timestamp())::float8"
# By the primary key alone, because the history may be long.
LAST_SAGA = "select coalesce(max(id), 0) from webhookd.webhook_delivery_sagas"
IN_PROGRESS = """
    select exists (select from webhookd.event_routing_queue)
        or exists (select from webhookd.webhook_delivery_sagas
                   where status in ('Pending', 'InProgress', 'PendingRetry'))
"""


class Pipeline:
    """Running daemons, with a connection to publish and a connection to observe."""

    def __init__(
        self,
        bed: Bed,
        database: Database,
        daemons: Sequence[DaemonProcess],
        application: "Connection",
        observer: "Connection",
    ) -> None:
        self.bed = bed
        self.database = database
        self.daemons = daemons
        self.application = application
        self.observer = observer
        self._numbers = count()

    async def publish(self, event_types: Sequence[str]) -> float:
        """Publish an event of each type in one commit. Returns the database's time after the commit."""
        async with self.application.transaction():
            # In batches, because an application would not send ten megabytes in one statement either.
            for start in range(0, len(event_types), BATCH_EVENTS):
                batch = event_types[start : start + BATCH_EVENTS]
                new = [ingest.NewEvent(it, payload(next(self._numbers))) for it in batch]
                await ingest.publish(self.application, new)
        committed_at: float = await self.observer.fetchval(CLOCK)
        return committed_at

    async def run(
        self,
        deliveries: int,
        *,
        receiver: Receiver | None = None,
        further_types: Sequence[str] = (),
        on_commit: Callable[[], None] = lambda: None,
    ) -> float:
        """Publish events and wait until all are Completed. Returns the seconds since the commit.

        Events of further types are published in between, one for each other event, and not waited for.
        """
        receiver = receiver or self.bed.receiver
        types = [event_type(number % SUBSCRIPTIONS) for number in range(deliveries)]
        if further_types:
            types = [one for pair in zip(types, cycle(further_types), strict=False) for one in pair]
        before = await receiver.requests()
        last_saga = await self.observer.fetchval(LAST_SAGA)
        committed_at = await self.publish(types)
        on_commit()
        try:
            async with asyncio.timeout(RUN_TIMEOUT_SECONDS):
                # Poll the receiver until all have arrived, so that no query disturbs the database.
                while await receiver.requests() < before + deliveries:  # noqa: ASYNC110  another process counts
                    await asyncio.sleep(RECEIVER_POLL_SECONDS)
                return await self._completed_at(deliveries, last_saga) - committed_at
        except TimeoutError as error:
            arrived = await receiver.requests() - before
            raise RuntimeError(
                f"{arrived} of {deliveries} arrived within {RUN_TIMEOUT_SECONDS} s, or were not Completed"
            ) from error

    async def _completed_at(self, deliveries: int, last_saga: int) -> float:
        """When the last of this many sagas after the given one was Completed, by the database's clock."""
        while True:
            done = await bench_database.completed(self.observer, last_saga)
            if done.deliveries >= deliveries and done.last_completed_at is not None:
                return done.last_completed_at
            await asyncio.sleep(DATABASE_POLL_SECONDS)

    async def until_idle(self) -> None:
        """Wait until every saga is finished."""
        async with asyncio.timeout(RUN_TIMEOUT_SECONDS):
            while await self.observer.fetchval(IN_PROGRESS):  # noqa: ASYNC110  polls the database
                await asyncio.sleep(DATABASE_POLL_SECONDS)

    async def warm_up(self) -> None:
        """Open connections, prepare plans and warm the interpreter."""
        await self.run(self.bed.scale.warm_up)


def event_type(number: int) -> str:
    """The event type of a subscription."""
    return f"bench.n{number}"


def usual_addresses(receiver: Receiver) -> list[tuple[str, str]]:
    """Event types and URLs of the usual number of subscriptions."""
    return [(event_type(number), receiver.url(f"/now/{number}")) for number in range(SUBSCRIPTIONS)]


async def subscribe(database: Database, addresses: Sequence[tuple[str, str]]) -> None:
    """Create a verified subscription for each event type and URL."""
    flow = await Flow.open(database)
    for kind, url in addresses:
        await flow.subscribe(kind, url)


def make_daemon(bed: Bed, database: Database, **sections: dict[str, Any]) -> DaemonProcess:
    """Configure an instance with default settings, except for the receivers and the given sections."""
    allowed = {"ca_file": str(bed.certificates.ca_file), "allow_networks": ["127.0.0.0/8"]}
    sections["delivery"] = allowed | sections.get("delivery", {})
    # A log line for each delivery would be part of the measurement.
    sections.setdefault("log", {"level": "info"})
    environment = {"PYTHONPATH": str(ROOT)}
    return DaemonProcess(bed.new_folder("daemon"), database.dsn("daemon"), environment, **sections)


@contextlib.asynccontextmanager
async def daemons_running(daemons: Sequence[DaemonProcess]) -> AsyncIterator[None]:
    """Start the daemons, and stop them at the end; after an error, kill them."""
    try:
        for daemon in daemons:
            await daemon.start()
        yield
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.sigterm()
        async with asyncio.timeout(END_TIMEOUT_SECONDS):
            for daemon in daemons:
                await daemon.ended()
    finally:
        for daemon in daemons:
            daemon.stop()


@contextlib.asynccontextmanager
async def pipeline(
    bed: Bed,
    addresses: Sequence[tuple[str, str]] | None = None,
    *,
    instances: int = 1,
    database: Database | None = None,
    **sections: dict[str, Any],
) -> AsyncIterator[Pipeline]:
    """Start webhookd, not yet warm. Without a database, a new one with subscriptions is created."""
    async with contextlib.AsyncExitStack() as stack:
        if database is None:
            database = await stack.enter_async_context(bed.database(migrated=True))
            await subscribe(database, addresses or usual_addresses(bed.receiver))
        daemons = [make_daemon(bed, database, **sections) for _ in range(instances)]
        await stack.enter_async_context(daemons_running(daemons))
        application, observer = await database.connect("application"), await database.connect("superuser")
        yield Pipeline(bed, database, daemons, application, observer)
