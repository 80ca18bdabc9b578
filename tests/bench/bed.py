"""What every measure stands on: one PostgreSQL, receivers, certificates, and a database for each who asks.

Everything that it starts ends with its block, also at Ctrl-C.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.bench.receivers import Receiver, SmallReceiver, fast_receiver, small_receiver
from tests.bench.scale import Scale
from tests.bench.server import DurableServer
from tests.support.certificates import Certificates
from tests.support.database import Cluster, Database


@dataclass
class Bed:
    """Handed to every measure."""

    scale: Scale
    folder: Path
    certificates: Certificates
    server: DurableServer
    cluster: Cluster
    receiver: Receiver
    slow_receiver: SmallReceiver
    # What one measure found that another needs: deliveries a second at the most.
    maximum: float | None = None
    # Why a number is not there, by its name: a peer that is not installed.
    missing: dict[str, str] = field(default_factory=dict)
    # What lives as long as the run: a database with a long history, once it is written.
    long_history: Database | None = None
    kept: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _numbers: "count[int]" = field(default_factory=count)

    def new_folder(self, name: str) -> Path:
        """A folder for one process."""
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    @contextlib.asynccontextmanager
    async def database(self, *, migrated: bool) -> AsyncIterator[Database]:
        """An empty one, with webhookd's schema or with none; dropped at the end."""
        database = await self.cluster.create_database(migrated=migrated)
        try:
            yield database
        finally:
            await self.cluster.drop_database(database)


@contextlib.asynccontextmanager
async def open_bed(scale: Scale) -> AsyncIterator[Bed]:
    """Start it all."""
    server = DurableServer()
    with tempfile.TemporaryDirectory(prefix="webhookd-bench-") as name:
        folder = Path(name)
        # nginx's worker has another account where root starts it.
        folder.chmod(0o755)  # noqa: ASYNC240  before anything else runs
        certificates = Certificates.make(folder)
        await asyncio.to_thread(server.start)
        try:
            cluster = Cluster(server)
            await cluster.prepare()
            async with (
                fast_receiver(folder, certificates) as receiver,
                small_receiver(folder, certificates) as slow_receiver,
                contextlib.AsyncExitStack() as kept,
            ):
                yield Bed(scale, folder, certificates, server, cluster, receiver, slow_receiver, kept=kept)
        finally:
            server.stop()
