"""A webhookd of a command's own, for `demo` and `bench`: a real `serve`, ready in a `with`, gone after it.

Its configuration, log and local authority are in a folder that is removed.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import anyio

from webhookd.cli.client import Client, Place
from webhookd.core.errors import ServiceUnavailable, WebhookdError

# A first start makes a database, and the machine may be busy.
START_TIMEOUT_SECONDS = 90.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_INTERVAL_SECONDS = 0.05
# By which a service manager knows the process that it started: not this one.
_OF_SERVICE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@contextmanager
def temporary_folder(prefix: str, beside: Path | None = None) -> Iterator[Path]:
    """A folder for all of it: where temporary ones are, or in a folder that is named."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
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


class OwnDaemon:
    """The process, with the configuration and the environment that it is given."""

    def __init__(self, folder: Path, owner: str, config_path: Path, environment: Mapping[str, str]) -> None:
        address = f"127.0.0.1:{_free_port()}"
        self.client: Final = Client(Place(urlsplit(f"http://{address}"), f"the {owner}'s"))
        self._owner = owner
        self._folder = folder
        self._config_path = config_path
        self._environment = {
            name: value for name, value in environment.items() if name not in _OF_SERVICE_MANAGER
        } | {"WEBHOOKD_API_LISTEN": address}
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
        with anyio.CancelScope(shield=True):
            await asyncio.to_thread(self._stop)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def require_running(self) -> None:
        """Raise its last words if it has ended."""
        if self._process.poll() is not None:
            raise WebhookdError(f"the {self._owner}'s webhookd ended: {last_words(self._log_path)}")

    def _start(self) -> None:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  ourselves
                [sys.executable, "-m", "webhookd", "--config", str(self._config_path), "serve", "--local"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                # A terminal's Ctrl-C is for us, who stop it in order: a second signal would stop it at once.
                start_new_session=True,
            )

    def _stop(self) -> bool:
        """In order; false if it had to be killed, or had ended by itself."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False

    async def _ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            self.require_running()
            try:
                await asyncio.to_thread(self.client.get, "/readyz")
            except ServiceUnavailable as error:
                if time.monotonic() > deadline:
                    raise ServiceUnavailable(
                        f"the {self._owner}'s webhookd was not ready in time: {error}"
                    ) from error
            else:
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def last_words(log_path: Path) -> str:
    """The last line of a log: why its process ended."""
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("webhookd: ") if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
