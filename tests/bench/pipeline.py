"""webhookd itself: a database with subscriptions, real daemons on it, and runs from commit to Completed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

from tests.bench.bed import Bed
from tests.bench.children import ROOT
from tests.bench.receivers import Receiver
from tests.bench.scale import SUBSCRIPTIONS, payload
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.flow import Flow

if TYPE_CHECKING:
    from tests.support.database import Connection

# In one transaction, but not in one statement: an application would not send ten megabytes at once either.
PUBLISH_BATCH = 1_000
RUN_TIMEOUT_SECONDS = 120
RECEIVER_POLL_SECONDS = 0.05
DATABASE_POLL_SECONDS = 0.02
END_TIMEOUT_SECONDS = 60

PUBLISH = "select count(*) from webhookd.publish_many($1, $2, $3, $4)"
CLOCK = "select extract(epoch from clock_timestamp())::float8"
# Both by the primary key alone, for the history may be long.
LAST_SAGA = "select coalesce(max(id), 0) from webhookd.webhook_delivery_sagas"
COMPLETED = """
    select count(*), extract(epoch from max(updated_at))::float8
    from webhookd.webhook_delivery_sagas
    where id > $1 and status = 'Completed'
"""
ON_ITS_WAY = """
    select exists (select from webhookd.event_routing_queue)
        or exists (select from webhookd.webhook_delivery_sagas
                   where status in ('Pending', 'InProgress', 'PendingRetry'))
"""


class Pipeline:
    """Daemons that run, with the connections to feed and watch them."""

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
        """An event for each type given, in one commit; returns the database's time right after it."""
        async with self.application.transaction():
            for start in range(0, len(event_types), PUBLISH_BATCH):
                types = event_types[start : start + PUBLISH_BATCH]
                nothing = [None] * len(types)
                payloads = [payload(next(self._numbers)) for _ in types]
                await self.application.fetchval(PUBLISH, types, payloads, nothing, nothing)
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
        """Publish, and wait until each has arrived and is Completed: seconds from the commit to the last.

        Types given further are published among the others, one for one, and not waited for.
        """
        receiver = receiver or self.bed.receiver
        types = [event_type(number % SUBSCRIPTIONS) for number in range(deliveries)]
        if further_types:
            types = [one for pair in zip(types, cycle(further_types), strict=False) for one in pair]
        arrived = await receiver.requests()
        mark = await self.observer.fetchval(LAST_SAGA)
        committed_at = await self.publish(types)
        on_commit()
        try:
            async with asyncio.timeout(RUN_TIMEOUT_SECONDS):
                # Until all came the receiver is asked, so that the database is not asked while it works.
                while await receiver.requests() < arrived + deliveries:  # noqa: ASYNC110  another process counts
                    await asyncio.sleep(RECEIVER_POLL_SECONDS)
                return await self._completed_at(deliveries, mark) - committed_at
        except TimeoutError as error:
            came = await receiver.requests() - arrived
            message = f"{came} of {deliveries} came within {RUN_TIMEOUT_SECONDS} s, or were not Completed"
            raise RuntimeError(message) from error

    async def _completed_at(self, deliveries: int, mark: int) -> float:
        """When the last of so many sagas after the mark was Completed, by the database's clock."""
        while True:
            completed, last_at = await self.observer.fetchrow(COMPLETED, mark)  # type: ignore[misc]
            if completed >= deliveries:
                return float(last_at)
            await asyncio.sleep(DATABASE_POLL_SECONDS)

    async def until_idle(self) -> None:
        """Wait until no saga is on its way."""
        async with asyncio.timeout(RUN_TIMEOUT_SECONDS):
            while await self.observer.fetchval(ON_ITS_WAY):  # noqa: ASYNC110  the database is asked
                await asyncio.sleep(DATABASE_POLL_SECONDS)

    async def warm_up(self) -> None:
        """Connections are open, plans are made, code is compiled."""
        await self.run(self.bed.scale.warm_up)


def event_type(number: int) -> str:
    """The type of one subscription."""
    return f"bench.n{number}"


def usual_addresses(receiver: Receiver) -> list[tuple[str, str]]:
    """Types and addresses of as many subscriptions as a usual run has."""
    return [(event_type(number), receiver.url(f"/now/{number}")) for number in range(SUBSCRIPTIONS)]


async def subscribe(database: Database, addresses: Sequence[tuple[str, str]]) -> None:
    """A verified subscription for each type and address."""
    flow = await Flow.open(database)
    for kind, url in addresses:
        await flow.subscribe(kind, url)


def make_daemon(bed: Bed, database: Database, **sections: dict[str, Any]) -> DaemonProcess:
    """One instance with its defaults, but for what it must know of the bed and what is given."""
    allowed = {"ca_file": str(bed.certificates.ca_file), "allow_networks": ["127.0.0.0/8"]}
    sections["delivery"] = allowed | sections.get("delivery", {})
    # What is logged at each delivery would be a part of what is measured.
    sections.setdefault("log", {"level": "info"})
    environment = {"PYTHONPATH": str(ROOT)}
    return DaemonProcess(bed.new_folder("daemon"), database.dsn("daemon"), environment, **sections)


@contextlib.asynccontextmanager
async def daemons_running(daemons: Sequence[DaemonProcess]) -> AsyncIterator[None]:
    """Started; and ended in order, or by force where something went wrong."""
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
    """A running webhookd, not warm yet; on a new database, unless one with its subscriptions is given."""
    async with contextlib.AsyncExitStack() as stack:
        if database is None:
            database = await stack.enter_async_context(bed.database(migrated=True))
            await subscribe(database, addresses or usual_addresses(bed.receiver))
        daemons = [make_daemon(bed, database, **sections) for _ in range(instances)]
        await stack.enter_async_context(daemons_running(daemons))
        application, observer = await database.connect("application"), await database.connect("superuser")
        yield Pipeline(bed, database, daemons, application, observer)
