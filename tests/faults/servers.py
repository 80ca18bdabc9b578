"""Servers that a scenario breaks from below or from beside: on a small disk, and with a standby.

What they mount they unmount when they stop.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import asyncpg

from tests.support.breakable import BreakableServer
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS, ServerError, end_process, log_tail, run_apart
from webhookd.embedded.installation import Installation, restrict_to

DISK_MEBIBYTES = 64
FOLDER_NAME = "small"
BALLAST_CHUNK = bytes(64 * 1024)


class SmallDisk:
    """A file system of its own, in memory; `fill` and `free` it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mounted = False

    def mount(self) -> None:
        """Needs root."""
        self.folder.mkdir()
        size = f"size={DISK_MEBIBYTES}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "webhookd-faults", str(self.folder)], check=True)
        self._mounted = True

    def unmount(self) -> None:
        """Harmless when it is not mounted."""
        if self._mounted:
            subprocess.run(["umount", str(self.folder)], check=True)
            self._mounted = False

    def fill(self, leave_mebibytes: int = 0) -> None:
        """With a file that has no other purpose."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while self._free_bytes() > leave_mebibytes << 20:
                ballast.write(BALLAST_CHUNK)

    def free(self) -> None:
        """Take it away."""
        (self.folder / "ballast").unlink()

    def _free_bytes(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize


class SmallDiskServer(BreakableServer):
    """With a small disk in its folder, for a tablespace."""

    def __init__(self, installation: Installation, settings: Mapping[str, str]) -> None:
        super().__init__(installation, settings)
        self._disk: SmallDisk | None = None

    @property
    def disk(self) -> SmallDisk:
        assert self._disk is not None
        return self._disk

    @property
    def tablespace(self) -> Path:
        """An empty folder of the server's, on the small disk."""
        folder = self.disk.folder / "space"
        folder.mkdir()
        restrict_to(folder, self._account)
        return folder

    def stop(self) -> None:
        """End it, unmount, and remove everything."""
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
    """With its write-ahead log on the small disk, in small files."""

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
    """A copy of another server that follows it, until it is promoted."""

    def __init__(self, installation: Installation, primary: BreakableServer) -> None:
        super().__init__(installation)
        self._primary = primary
        self._password = primary._password

    def promote(self) -> None:
        """Make it the primary; returns when it takes writes."""
        run_apart(self._ask("select pg_promote(true, 60)"))

    def follows(self) -> bool:
        """Whether the primary waits for it."""
        return bool(
            run_apart(
                self._ask(
                    "select exists (select from pg_stat_replication where sync_state = 'sync')",
                    self._primary.superuser_dsn,
                )
            )
        )

    async def _ask(self, query: str, dsn: str | None = None) -> object:
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
