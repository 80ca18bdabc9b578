"""A data folder for the embedded server, outside of pytest's own, which the server's account cannot enter."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.support.processes import is_gone
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS
from webhookd.db.migrations import migrate
from webhookd.embedded.server import running


class Home:
    """A folder that every user can enter, with a data folder in it."""

    def __init__(self, name: str = "data") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wh-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.data = self.folder / name

    def remove(self) -> None:
        """Stop a server that is still running, and remove the folder."""
        server_id = self.server_id()
        if server_id is not None and not is_gone(server_id):
            os.kill(server_id, signal.SIGQUIT)
            self.until_gone(server_id)
        shutil.rmtree(self.folder)

    def fill(self, template: "Home") -> None:
        """Copy the data of another home, keeping the owners."""
        subprocess.run(["cp", "-a", str(template.data), str(self.data)], check=True)

    def server_id(self) -> int | None:
        """The server's process id from its pid file; None without one."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            number = (self.data / "pgdata" / "postmaster.pid").read_text().partition("\n")[0]
            return int(number) if number else None  # empty while it is being written
        return None

    def running_server_id(self) -> int:
        """The process id of the server, which must be running."""
        server_id = self.server_id()
        assert server_id is not None
        assert not is_gone(server_id)
        return server_id

    @staticmethod
    def until_gone(server_id: int) -> None:
        """Wait until a server has ended."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while not is_gone(server_id):
            assert time.monotonic() < deadline, f"server {server_id} has not ended"
            time.sleep(POLL_INTERVAL_SECONDS)


def migrated_home() -> Home:
    """Make a home whose server was created, migrated and stopped: a template for others."""
    home = Home()
    try:
        with running(home.data) as server:
            asyncio.run(migrate(server.admin_dsn))
    except BaseException:
        home.remove()
        raise
    return home
