"""The test bed of a run: one PostgreSQL, receivers and certificates, and a new database on request.

Everything that it starts ends with its block, also after Ctrl-C.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.bench.receivers import fast_receiver
from tests.bench.scale import Scale
from tests.bench.server import DurableServer
from tests.support.certificates import Certificates
from tests.support.database import Cluster, Database
from webhookd.devtools.bench_load import Receiver, ReceiverProcess, receiver_process
from webhookd.devtools.processes import Child, start_child
from webhookd.embedded.installation import Installation

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Bed:
    """Passed to every measure."""

    scale: Scale
    folder: Path
    certificates: Certificates
    server: DurableServer
    cluster: Cluster
    receiver: Receiver
    slow_receiver: ReceiverProcess
    # The highest rate measured so far, in deliveries per second; the latency measure needs it.
    maximum: float | None = None
    # Why a number is missing, by its name: for example a peer that is not installed.
    missing: dict[str, str] = field(default_factory=dict)
    # A database with a long history, created on first use and kept in `kept` until the run ends.
    long_history: Database | None = None
    kept: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _numbers: "count[int]" = field(default_factory=count)

    def new_folder(self, name: str) -> Path:
        """Create a folder for one process."""
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def child(
        self, name: str, command: Sequence[str], options: object = None
    ) -> contextlib.AbstractAsyncContextManager[Child]:
        """Start a program in a new folder, with this repository as its working folder."""
        return start_child(command, self.new_folder(name), options, cwd=ROOT)

    @contextlib.asynccontextmanager
    async def database(self, *, migrated: bool) -> AsyncIterator[Database]:
        """Create a database, with webhookd's schema or empty, and drop it at the end."""
        database = await self.cluster.create_database(migrated=migrated)
        try:
            yield database
        finally:
            await self.cluster.drop_database(database)


@contextlib.asynccontextmanager
async def open_bed(scale: Scale, postgres: Installation) -> AsyncIterator[Bed]:
    """Start the server and the receivers."""
    server = DurableServer(postgres)
    with tempfile.TemporaryDirectory(prefix="webhookd-bench-") as name:
        folder = Path(name)
        # If root starts nginx, its worker runs as another account.
        folder.chmod(0o755)  # noqa: ASYNC240  before anything else runs
        certificates = Certificates.make(folder)
        await asyncio.to_thread(server.start)
        try:
            cluster = Cluster(server)
            await cluster.prepare()
            async with (
                fast_receiver(folder, certificates) as receiver,
                receiver_process(folder, certificates.good) as slow_receiver,
                contextlib.AsyncExitStack() as kept,
            ):
                yield Bed(scale, folder, certificates, server, cluster, receiver, slow_receiver, kept=kept)
        finally:
            server.stop()
