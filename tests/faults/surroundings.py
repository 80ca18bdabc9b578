"""The server of a bed and what is around it: a small disk, a standby, a wrong clock, where a scenario asks.

What it starts and mounts it ends and unmounts, also when the run is interrupted. What cannot be had here is
Missing.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from tests.faults.plan import Needs
from tests.faults.servers import SmallDiskServer, SmallWalServer, StandbyServer
from tests.support.breakable import BreakableServer
from tests.support.database import Database
from tests.support.postgres import CONNECT_TIMEOUT_SECONDS
from webhookd.embedded.installation import Installation

FAKETIME_FOLDERS = ("usr/lib/*/faketime", "usr/lib/faketime", "usr/local/lib/faketime")
# The clocks of the instances: the first is ahead, the second behind, the third right.
CLOCKS = ("+10m", "-10m")


class Missing(Exception):
    """This machine has not what the scenario needs: it is not run, and says so."""


@dataclass
class Surroundings:
    """A server and its neighbours."""

    server: BreakableServer
    needs: Needs
    standby: StandbyServer | None = None

    @classmethod
    @contextlib.contextmanager
    def prepared(cls, installation: Installation, needs: Needs) -> Iterator["Surroundings"]:
        """For the length of the block."""
        with contextlib.ExitStack() as stack:
            server = make_server(installation, needs)
            stack.callback(server.stop)
            server.start()
            surroundings = cls(server, needs)
            if needs.standby:
                surroundings.standby = StandbyServer(installation, server)
                stack.callback(surroundings.standby.stop)
                surroundings.standby.start()
            yield surroundings

    @property
    def servers(self) -> dict[str, BreakableServer]:
        """Each, by the name of the file that keeps its log."""
        found: dict[str, BreakableServer] = {"postgres.log": self.server}
        return found | ({"standby.log": self.standby} if self.standby else {})

    async def place(self, database: Database) -> None:
        """Put a new database where the scenario wants it, and let commits wait for the standby from now."""
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
        """Where instances find it, without their wire: at whichever server takes writes."""
        dsn = database.dsn("daemon")
        if self.standby is None:
            return dsn
        parts = urlsplit(dsn)
        other = urlsplit(self.standby.superuser_dsn)
        return f"postgresql://{parts.netloc},{other.hostname}:{other.port}{parts.path}?target_session_attrs=read-write"

    def environment(self, number: int) -> dict[str, str]:
        """What one instance finds around itself."""
        if not self.needs.wrong_clock or number >= len(CLOCKS):
            return {}
        return {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME": CLOCKS[number],
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def make_server(installation: Installation, needs: Needs) -> BreakableServer:
    """One that is still to be started."""
    if not needs.small_disk:
        return BreakableServer(installation, needs.server_settings)
    if os.geteuid() != 0 or not shutil.which("mount"):
        raise Missing("only root can mount a small disk")
    kind = SmallWalServer if needs.small_disk == "wal" else SmallDiskServer
    return kind(installation, needs.server_settings)


def faketime_library() -> Path:
    """Where libfaketime is."""
    for pattern in FAKETIME_FOLDERS:
        for found in sorted(Path("/").glob(f"{pattern}/libfaketimeMT.so.1")):
            return found
    raise Missing("libfaketime is not installed")
