"""The demo's own webhookd: a real `serve --local` on an embedded PostgreSQL, in a folder that is removed.

Whatever ends the demo, short of kill -9, ends both. Nothing of the user's own is touched.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from webhookd.cli.client import Client, Place
from webhookd.embedded.server import running
from webhookd.model.errors import ServiceUnavailable, WebhookdError

# A first start makes a database, and the machine may be busy.
START_TIMEOUT_SECONDS = 90.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_INTERVAL_SECONDS = 0.05


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for all of it."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="webhookd-demo-"))
    except OSError as error:
        raise WebhookdError(f"no temporary folder can be made: {error.strerror}") from error
    try:
        if os.geteuid() == 0:
            # PostgreSQL refuses root; the account that it gets must pass through.
            folder.chmod(0o711)
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise WebhookdError(f"{folder} cannot be removed: {error.strerror}") from error


class DemoDaemon:
    """The process: ready at the beginning of a `with`, gone at its end."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self._address = f"127.0.0.1:{_free_port()}"
        self.client = Client(Place(urlsplit(f"http://{self._address}"), "the demo's"))
        self._folder = folder
        self._log_path = folder / "webhookd.log"

    async def __aenter__(self) -> Self:
        self._start()
        try:
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    def _start(self) -> None:
        # Named and empty: none of the user's is looked for.
        configuration = self._folder / "webhookd.toml"
        configuration.touch()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  ourselves
                [sys.executable, "-m", "webhookd", "--config", str(configuration), "serve", "--local"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment(),
                # A terminal's Ctrl-C is for us, who stop it in order: a second signal would stop it at once.
                start_new_session=True,
            )

    def _stop(self) -> None:
        """In order, which stops PostgreSQL too."""
        self._process.terminate()
        try:
            in_order = self._process.wait(STOP_TIMEOUT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            in_order = False
        if not in_order and (self.data_dir / "pgdata").is_dir():
            with running(self.data_dir):
                pass  # a daemon that was killed leaves it running; the last to leave stops it

    def _environment(self) -> dict[str, str]:
        """Without the user's own settings, which are for another daemon."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("WEBHOOKD_")}
        return others | {
            "WEBHOOKD_DATABASE_DATA_DIR": str(self.data_dir),
            "WEBHOOKD_API_LISTEN": self._address,
            "WEBHOOKD_SERVICES_POLL_INTERVAL_SECONDS": "0.2",
            "WEBHOOKD_LOG_FORMAT": "json",
        }

    async def _ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            if self._process.poll() is not None:
                raise WebhookdError(f"the demo's webhookd ended: {_last_words(self._log_path)}")
            try:
                await asyncio.to_thread(self.client.get, "/readyz")
            except ServiceUnavailable as error:
                if time.monotonic() > deadline:
                    raise ServiceUnavailable(f"the demo's webhookd was not ready in time: {error}") from error
            else:
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def _last_words(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("webhookd: ") if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
