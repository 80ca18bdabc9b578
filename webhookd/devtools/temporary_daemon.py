"""A webhookd for the duration of `demo` or `bench`: a real `serve --local` with a temporary folder."""

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

# The first start creates a database, and the machine may be busy.
START_TIMEOUT_SECONDS = 90.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_INTERVAL_SECONDS = 0.05
# The service manager's variables are meant for the command itself, not for this daemon.
_SERVICE_MANAGER_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder in the parent, or where temporary files go, and remove it at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise WebhookdError(f"cannot create a temporary folder: {error.strerror}") from error
    try:
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root; the account it runs as must be able to enter.
            folder.chmod(0o711)
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise WebhookdError(f"cannot remove {folder}: {error.strerror}") from error


class TemporaryDaemon:
    """The process. `command` is the name of the command that needs it, for error messages."""

    def __init__(self, folder: Path, command: str, config_path: Path, environment: Mapping[str, str]) -> None:
        address = f"127.0.0.1:{_free_port()}"
        self.client: Final = Client(Place(urlsplit(f"http://{address}"), f"started by {command}"))
        self._command = command
        self._folder = folder
        self._config_path = config_path
        self._environment = {
            name: value for name, value in environment.items() if name not in _SERVICE_MANAGER_VARIABLES
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
        """Raise an error with the last line of its log if it has ended."""
        if self._process.poll() is not None:
            raise WebhookdError(f"the daemon of {self._command} ended: {last_line(self._log_path)}")

    def _start(self) -> None:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, "-m", "webhookd", "--config", str(self._config_path), "serve", "--local"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                # Ctrl-C in a terminal must reach only us: we stop it, and a second signal would kill it.
                start_new_session=True,
            )

    def _stop(self) -> bool:
        """Returns false if it had to be killed, or had failed before."""
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
                await self.client.request("GET", "/readyz")
            except ServiceUnavailable as error:
                if time.monotonic() > deadline:
                    raise ServiceUnavailable(
                        f"the daemon of {self._command} did not become ready in time: {error}"
                    ) from error
            else:
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def last_line(log_path: Path) -> str:
    """The last line of a process's log, which says why it ended."""
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("webhookd: ") if lines else "its log is empty"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
