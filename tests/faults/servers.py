"""The PostgreSQL servers of a test bed: normal, on a small disk, or with a standby; and wrong clocks.

Servers unmount their disks when they stop, also when the run is interrupted. If this machine cannot provide
something, MissingRequirement is raised.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from tests.faults.plan import Needs
from tests.support.breakable import BreakableServer
from tests.support.database import Database
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS, ServerError, end_process, log_tail, run_apart
from webhookd.embedded.installation import Installation, restrict_to

DISK_MEBIBYTES = 64
FOLDER_NAME = "small"
BALLAST_CHUNK = bytes(64 * 1024)
FAKETIME_FOLDERS = ("usr/lib/*/faketime", "usr/lib/faketime", "usr/local/lib/faketime")
# The clocks of the instances: the first is ahead, the second behind, the third correct.
CLOCKS = ("+10m", "-10m")


class MissingRequirement(Exception):
    """This machine lacks something that the scenario needs: the scenario does not run."""


class SmallDisk:
    """A small file system in memory that a scenario can `fill` and `free`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mounted = False

    def mount(self) -> None:
        """Mount it; this needs root."""
        self.folder.mkdir()
        size = f"size={DISK_MEBIBYTES}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "webhookd-faults", str(self.folder)], check=True)
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it, if it is mounted."""
        if self._mounted:
            subprocess.run(["umount", str(self.folder)], check=True)
            self._mounted = False

    def fill(self, leave_mebibytes: int = 0) -> None:
        """Fill the disk with a ballast file."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while self._free_bytes() > leave_mebibytes << 20:
                ballast.write(BALLAST_CHUNK)

    def free(self) -> None:
        """Remove the ballast file."""
        (self.folder / "ballast").unlink()

    def _free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize


class SmallDiskServer(BreakableServer):
    """A server with a small disk for a tablespace in its folder."""

    def __init__(self, installation: Installation, settings: Mapping[str, str]) -> None:
        super().__init__(installation, settings)
        self._disk: SmallDisk | None = None

    @property
    def disk(self) -> SmallDisk:
        assert self._disk is not None
        return self._disk

    @property
    def tablespace(self) -> Path:
        """A new empty folder on the small disk, owned by the server's account."""
        folder = self.disk.folder / "space"
        folder.mkdir()
        restrict_to(folder, self._account)
        return folder

    def stop(self) -> None:
        """Stop the server, unmount the disk, and remove everything."""
        if self._process is not None:
            self.resume()
            end_process(self._process)
        if self._disk is not None:
            self._disk.unmount()
        super().stop()

    def _initialize(self, folder: Path) -> None:
        super()._initialize(folder)
        self._disk = SmallDisk(folder / FOLDER_NAME)
        self._disk.mount()
        self._disk.folder.chmod(0o755)


class SmallWalServer(SmallDiskServer):
    """A server with its write-ahead log on the small disk, in small files."""

    INITDB_OPTIONS = ("--wal-segsize=1",)

    def _initialize(self, folder: Path) -> None:
        super()._initialize(folder)
        log = folder / "data" / "pg_wal"
        moved = self.disk.folder / "pg_wal"
        shutil.copytree(log, moved)
        for path in (moved, *moved.rglob("*")):
            restrict_to(path, self._account)
        shutil.rmtree(log)
        log.symlink_to(moved)


class StandbyServer(BreakableServer):
    """A standby that replicates another server until it is promoted."""

    def __init__(self, installation: Installation, primary: BreakableServer) -> None:
        super().__init__(installation)
        self._primary = primary
        self._password = primary._password

    def promote(self) -> None:
        """Make it the primary; returns when it accepts writes."""
        run_apart(self._fetch_value("select pg_promote(true, 60)"))

    def is_synchronous(self) -> bool:
        """Return True if commits on the primary wait for this standby."""
        return bool(
            run_apart(
                self._fetch_value(
                    "select exists (select from pg_stat_replication where sync_state = 'sync')",
                    self._primary.superuser_dsn,
                )
            )
        )

    async def _fetch_value(self, query: str, dsn: str | None = None) -> object:
        connection = await asyncpg.connect(dsn or self.superuser_dsn, timeout=CONNECT_TIMEOUT_SECONDS)
        try:
            return await connection.fetchval(query)
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)

    def _initialize(self, folder: Path) -> None:
        command = [
            self._installation.program("pg_basebackup"),
            f"--pgdata={folder / 'data'}",
            f"--dbname={self._primary.superuser_dsn}",
            "--write-recovery-conf",
            "--checkpoint=fast",
            "--no-sync",
        ]
        if self._run(command, folder) != 0:
            raise ServerError(f"pg_basebackup failed:\n{log_tail(folder)}")


@dataclass
class ServerSetup:
    """The server of a test bed, its standby, and the clocks of its instances."""

    server: BreakableServer
    needs: Needs
    standby: StandbyServer | None = None

    @classmethod
    @contextlib.contextmanager
    def started(cls, installation: Installation, needs: Needs) -> Iterator["ServerSetup"]:
        """Run the servers during the block."""
        with contextlib.ExitStack() as stack:
            server = make_server(installation, needs)
            stack.callback(server.stop)
            server.start()
            setup = cls(server, needs)
            if needs.standby:
                setup.standby = StandbyServer(installation, server)
                stack.callback(setup.standby.stop)
                setup.standby.start()
            yield setup

    @property
    def servers(self) -> dict[str, BreakableServer]:
        """The servers by the name of their log file."""
        found: dict[str, BreakableServer] = {"postgres.log": self.server}
        return found | ({"standby.log": self.standby} if self.standby else {})

    async def place(self, database: Database) -> None:
        """Move a new database to the small disk, or make commits wait for the standby, as needed."""
        connection = await asyncpg.connect(database.server.dsn(), timeout=CONNECT_TIMEOUT_SECONDS)
        try:
            if self.needs.small_disk == "heap":
                assert isinstance(self.server, SmallDiskServer)
                await connection.execute(f"create tablespace small location '{self.server.tablespace}'")
                await connection.execute(f"alter database {database.name} set tablespace small")
            if self.needs.standby:
                await connection.execute("alter system set synchronous_standby_names = '*'")
                await connection.execute("select pg_reload_conf()")
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)

    def dsn(self, database: Database) -> str:
        """Return the DSN without a proxy; with a standby, it finds the server that accepts writes."""
        dsn = database.dsn("daemon")
        if self.standby is None:
            return dsn
        parts = urlsplit(dsn)
        other = urlsplit(self.standby.superuser_dsn)
        return f"postgresql://{parts.netloc},{other.hostname}:{other.port}{parts.path}?target_session_attrs=read-write"

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment variables that set the clock of one instance."""
        if not self.needs.wrong_clock or number >= len(CLOCKS):
            return {}
        return {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME": CLOCKS[number],
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def make_server(installation: Installation, needs: Needs) -> BreakableServer:
    """Create the server without starting it."""
    if not needs.small_disk:
        return BreakableServer(installation, needs.server_settings)
    if os.geteuid() != 0 or not shutil.which("mount"):
        raise MissingRequirement("only root can mount a small disk")
    kind = SmallWalServer if needs.small_disk == "wal" else SmallDiskServer
    return kind(installation, needs.server_settings)


def faketime_library() -> Path:
    """Find libfaketime."""
    for pattern in FAKETIME_FOLDERS:
        for found in sorted(Path("/").glob(f"{pattern}/libfaketimeMT.so.1")):
            return found
    raise MissingRequirement("libfaketime is not installed")
