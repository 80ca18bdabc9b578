"""One webhookd instance of the test bed: its process, the proxy to its database, and its expected state."""

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.daemon import DaemonProcess
from tests.support.processes import is_stopped
from tests.support.waiting import until_true
from tests.support.wire import Wire

SITE = Path(__file__).parent / "site"
LEASE_SECONDS = 7.0
REAPER_INTERVAL_SECONDS = 0.5
# Polls, retries and expired leases take seconds instead of the minutes of the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "delivery": {
        "timeout_seconds": 2.0,
        "lease_seconds": LEASE_SECONDS,
        # The receiver is a single Python process: with 64, it could not answer the burst of TLS handshakes
        # after an outage in time.
        "subscription_concurrency": 8,
        "allow_networks": ["127.0.0.0/8"],
    },
    "retry": {"max_attempts": 1000, "base_delay_seconds": 0.1, "max_delay_seconds": 1.0},
    "services": {"poll_interval_seconds": 0.25, "shutdown_grace_seconds": 10},
    "reaper": {"interval_seconds": REAPER_INTERVAL_SECONDS},
    "log": {"level": "info"},
}


class Instance:
    """A daemon that can be killed, stopped and restarted with the same configuration file and port."""

    def __init__(
        self, number: int, daemon: DaemonProcess, wire: Wire | None, failpoints: Path | None
    ) -> None:
        self.number = number
        self.daemon = daemon
        self._wire = wire
        self._failpoints = failpoints
        self._log_sizes_at_kill: list[int] = []
        self._should_answer = False
        self.changes = 0  # of should_answer

    @property
    def should_answer(self) -> bool:
        """False while the instance is killed or stopped, or about to be."""
        return self._should_answer

    @should_answer.setter
    def should_answer(self, value: bool) -> None:
        self._should_answer = value
        self.changes += 1

    @property
    def wire(self) -> Wire:
        assert self._wire is not None, "this test bed has no proxies"
        return self._wire

    @property
    def process_id(self) -> str:
        """The process id, as it appears in worker_id."""
        return str(self.daemon.process.pid)

    async def start(self) -> None:
        """Start the daemon, and return when it is ready."""
        await self.daemon.start()
        self.should_answer = True

    async def until_ready(self) -> None:
        """Wait until /readyz answers 200."""
        await self.daemon.until(lambda: self.daemon.get("/readyz")[0] == 200, "ready")

    def kill(self) -> None:
        """Send SIGKILL."""
        self.should_answer = False
        self.daemon.kill()
        self._record_kill()

    async def stop_gracefully(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.should_answer = False
        self.daemon.sigterm()
        return await self.daemon.ended()

    async def freeze(self) -> None:
        """Send SIGSTOP."""
        self.should_answer = False
        process_id = self.daemon.process.pid
        os.kill(process_id, signal.SIGSTOP)
        await until_true(lambda: is_stopped(process_id))

    def resume(self) -> None:
        """Send SIGCONT."""
        os.kill(self.daemon.process.pid, signal.SIGCONT)
        self.should_answer = True

    async def die_at(self, point: str) -> None:
        """Arm a failpoint, and return when it has killed the process."""
        assert self._failpoints is not None, "this test bed has no failpoints"
        self.should_answer = False
        (self._failpoints / point).touch()
        code = await self.daemon.ended()
        assert code == -signal.SIGKILL, f"exit code {code} at failpoint {point}"
        self._record_kill()

    def _record_kill(self) -> None:
        self._log_sizes_at_kill.append(self.daemon.log_path.stat().st_size)

    def log_lines(self) -> Iterator[str]:
        """Yield the log lines, without a last line that a kill cut off."""
        log = self.daemon.log_path.read_bytes()
        for begin, end in pairwise([0, *self._log_sizes_at_kill, len(log)]):
            lines = log[begin:end].decode(errors="replace").splitlines(keepends=True)
            if end in self._log_sizes_at_kill and lines and not lines[-1].endswith("\n"):
                lines.pop()
            yield from (line.rstrip("\n") for line in lines)

    async def close(self) -> None:
        """Kill the daemon if it still runs, and close its proxy."""
        self.should_answer = False
        await asyncio.to_thread(self.daemon.stop)
        if self._wire is not None:
            await self._wire.close()


def failpoint_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a daemon whose failpoints are armed by files in this folder."""
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "TEST_FAILPOINTS_FOLDER": str(folder)}
