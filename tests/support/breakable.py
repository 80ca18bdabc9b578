"""A durable server that a test may break: kill, stop at once, stall; and have back as it was.

Only a child of ours can be broken like this, so an existing server or a container has one of the same major
beside it. Needs /proc, to find the server's processes.
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
    """Keeps its port and its data through everything but `stop`."""

    def __init__(self, installation: Installation, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(installation, durable=True, settings=settings)

    @property
    def log_path(self) -> Path:
        """What the server itself says."""
        assert self._folder is not None
        return self._folder / "log"

    def crash(self) -> None:
        """Kill -9 of every process; returns when all are gone, for before that a restart is refused."""
        processes = self._processes_of_stopped_postmaster()
        signal_all(processes, signal.SIGKILL)
        self._wait()
        wait_for_all(processes, is_gone)

    def stop_at_once(self) -> None:
        """PostgreSQL's immediate shutdown: clients are told, and the next start recovers."""
        os.kill(self.process_id, signal.SIGQUIT)
        self._wait()

    def restart(self) -> None:
        """Start what was ended, and return when it accepts connections."""
        port = urlsplit(self.superuser_dsn).port
        if self._folder is None or port is None:
            raise ServerError("there is nothing to start again")
        if not self._launched(self._folder, port):
            raise ServerError(f"PostgreSQL {self.major} did not start again:\n{log_tail(self._folder)}")

    def stall(self) -> None:
        """Stop every process where it is: connections stay open, new ones are taken, nothing answers."""
        processes = self._processes_of_stopped_postmaster()
        signal_all(processes, signal.SIGSTOP)
        wait_for_all(processes, is_stopped)

    def resume(self) -> None:
        """Let it go on."""
        signal_all([*children(self.process_id), self.process_id], signal.SIGCONT)

    def heal(self) -> None:
        """Have it up again, whatever a test left."""
        if is_gone(self.process_id):
            self.restart()
        else:
            self.resume()

    def stop(self) -> None:
        """Shut down and remove everything; also what is stalled."""
        if self._process is not None:
            self.resume()
        super().stop()

    def _processes_of_stopped_postmaster(self) -> list[int]:
        """All of them, with nobody to start another."""
        postmaster = self.process_id
        os.kill(postmaster, signal.SIGSTOP)
        wait_for_all([postmaster], is_stopped)
        return [postmaster, *children(postmaster)]

    def _wait(self) -> None:
        assert self._process is not None
        self._process.wait(STOP_TIMEOUT_SECONDS)


def signal_all(processes: Iterable[int], order: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for process_id in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, order)


def wait_for_all(processes: Iterable[int], condition: Callable[[int], bool]) -> None:
    """Return when it holds for each."""
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    for process_id in processes:
        while not condition(process_id):
            if time.monotonic() > deadline:
                raise ServerError(f"process {process_id} of the server did not do as it was told")
            time.sleep(POLL_INTERVAL_SECONDS)
