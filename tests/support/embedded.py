"""A data folder for the embedded server, outside of pytest's own: the server's account must enter it."""

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
    """A folder that everybody may enter, with a data folder in it."""

    def __init__(self, name: str = "data") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wh-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.data = self.folder / name

    def remove(self) -> None:
        """End a server that was left, and remove all."""
        server_id = self.server_id()
        if server_id is not None and not is_gone(server_id):
            os.kill(server_id, signal.SIGQUIT)
            self.until_gone(server_id)
        shutil.rmtree(self.folder)

    def fill(self, made: "Home") -> None:
        """Put a copy of another's data here, each file its owner's."""
        subprocess.run(["cp", "-a", str(made.data), str(self.data)], check=True)

    def server_id(self) -> int | None:
        """The process of the server that runs here; None if none left its number."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            number = (self.data / "pgdata" / "postmaster.pid").read_text().partition("\n")[0]
            return int(number) if number else None  # it is just being written
        return None

    def running_server_id(self) -> int:
        """The process of the server, which must run."""
        server_id = self.server_id()
        assert server_id is not None
        assert not is_gone(server_id)
        return server_id

    @staticmethod
    def until_gone(server_id: int) -> None:
        """Return when a server has ended."""
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        while not is_gone(server_id):
            assert time.monotonic() < deadline, f"server {server_id} has not ended"
            time.sleep(POLL_INTERVAL_SECONDS)


def migrated_home() -> Home:
    """One whose server was made, migrated and stopped: others are copied from it."""
    home = Home()
    try:
        with running(home.data) as server:
            asyncio.run(migrate(server.admin_dsn))
    except BaseException:
        home.remove()
        raise
    return home
