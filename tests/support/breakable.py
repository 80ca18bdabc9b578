"""A durable server that a test can kill, stop or stall, and start again.

Only a child process can be broken like this; for an existing server or a container, one of the same major
version is started next to it. Needs /proc to find the server's processes.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.postgres import STOP_TIMEOUT_SECONDS, LocalServer, ServerError, log_tail
from tests.support.processes import children, is_gone, is_stopped
from webhookd.embedded.installation import Installation

POLL_INTERVAL_SECONDS = 0.005


class BreakableServer(LocalServer):
    """Keeps its port and its data until `stop`."""

    def __init__(self, installation: Installation, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(installation, durable=True, settings=settings)

    @property
    def log_path(self) -> Path:
        """The server's log."""
        assert self._folder is not None
        return self._folder / "log"

    def crash(self) -> None:
        """Send SIGKILL to every process and wait until all have ended: a restart is refused before that."""
        processes = self._processes_of_stopped_postmaster()
        signal_all(processes, signal.SIGKILL)
        self._wait()
        wait_for_all(processes, is_gone)

    def stop_at_once(self) -> None:
        """Do an immediate shutdown: clients are notified, and the next start recovers."""
        os.kill(self.process_id, signal.SIGQUIT)
        self._wait()

    def restart(self) -> None:
        """Start the server again, and return when it accepts connections."""
        port = urlsplit(self.superuser_dsn).port
        if self._folder is None or port is None:
            raise ServerError("the server was never started")
        if not self._launched(self._folder, port):
            raise ServerError(f"PostgreSQL {self.major} did not start again:\n{log_tail(self._folder)}")

    def stall(self) -> None:
        """Stop every process with SIGSTOP: connections stay open or are accepted, but nothing answers."""
        processes = self._processes_of_stopped_postmaster()
        signal_all(processes, signal.SIGSTOP)
        wait_for_all(processes, is_stopped)

    def resume(self) -> None:
        """Continue all stopped processes."""
        signal_all([*children(self.process_id), self.process_id], signal.SIGCONT)

    def heal(self) -> None:
        """Make the server run again, whatever state a test left."""
        if is_gone(self.process_id):
            self.restart()
        else:
            self.resume()

    def stop(self) -> None:
        """Shut down, even if stalled, and remove everything."""
        if self._process is not None:
            self.resume()
        super().stop()

    def _processes_of_stopped_postmaster(self) -> list[int]:
        """Stop the postmaster, so that it starts no process, and list all processes."""
        postmaster = self.process_id
        os.kill(postmaster, signal.SIGSTOP)
        wait_for_all([postmaster], is_stopped)
        return [postmaster, *children(postmaster)]

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait(STOP_TIMEOUT_SECONDS)


def signal_all(processes: Iterable[int], order: signal.Signals) -> None:
    """Send a signal to each process that still exists."""
    for process_id in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, order)


def wait_for_all(processes: Iterable[int], condition: Callable[[int], bool]) -> None:
    """Wait until the condition holds for each process."""
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    for process_id in processes:
        while not condition(process_id):
            if time.monotonic() > deadline:
                raise ServerError(f"process {process_id} of the server did not reach the expected state")
            time.sleep(POLL_INTERVAL_SECONDS)
