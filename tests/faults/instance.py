"""One webhookd of the bed: its process, the wire to its database, and what is known of its state."""

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
# Quick to look, to retry and to take back a lease: seconds for what takes minutes with the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "delivery": {
        "timeout_seconds": 2.0,
        "lease_seconds": 7.0,
        # The receiver is one process of Python: with 64 a burst of handshakes after an outage was more than
        # it could answer in time.
        "subscription_concurrency": 8,
        "allow_networks": ["127.0.0.0/8"],
    },
    "retry": {"max_attempts": 1000, "base_delay_seconds": 0.1, "max_delay_seconds": 1.0},
    "services": {"poll_interval_seconds": 0.25, "shutdown_grace_seconds": 10},
    "reaper": {"interval_seconds": 0.5},
    "log": {"level": "info"},
}
LEASE_SECONDS = 7.0
REAPER_INTERVAL_SECONDS = 0.5


class Instance:
    """A daemon that may be killed, stopped and started again, always with the same file and port."""

    def __init__(
        self, number: int, daemon: DaemonProcess, wire: Wire | None, failpoints: Path | None
    ) -> None:
        self.number = number
        self.daemon = daemon
        self._wire = wire
        self._failpoints = failpoints
        self._cut_at: list[int] = []  # how much it had written when it was killed
        self._answers = False
        self.changes = 0  # of whether it is to answer

    @property
    def answers(self) -> bool:
        """Whether it is to answer: neither killed, nor stopped, nor about to."""
        return self._answers

    @answers.setter
    def answers(self, value: bool) -> None:
        self._answers = value
        self.changes += 1

    @property
    def wire(self) -> Wire:
        assert self._wire is not None, "this bed has no wires"
        return self._wire

    @property
    def worker_process(self) -> str:
        """As the worker's name has it."""
        return str(self.daemon.process.pid)

    async def start(self) -> None:
        """Return when it is ready."""
        await self.daemon.start()
        self.answers = True

    async def until_ready(self) -> None:
        """Return when it says so."""
        await self.daemon.until(lambda: self.daemon.get("/readyz")[0] == 200, "ready")

    def kill(self) -> None:
        """As a power cut would."""
        self.answers = False
        self.daemon.kill()
        self._note_cut()

    async def stop_in_order(self) -> int:
        """SIGTERM; its exit code."""
        self.answers = False
        self.daemon.sigterm()
        return await self.daemon.ended()

    async def freeze(self) -> None:
        """SIGSTOP."""
        self.answers = False
        process_id = self.daemon.process.pid
        os.kill(process_id, signal.SIGSTOP)
        await until_true(lambda: is_stopped(process_id))

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.daemon.process.pid, signal.SIGCONT)
        self.answers = True

    async def die_at(self, point: str) -> None:
        """Arm a failpoint, and return when it has died of it."""
        assert self._failpoints is not None, "this bed has no failpoints"
        self.answers = False
        (self._failpoints / point).touch()
        code = await self.daemon.ended()
        assert code == -signal.SIGKILL, f"it ended with {code} at {point}"
        self._note_cut()

    def _note_cut(self) -> None:
        self._cut_at.append(self.daemon.log_path.stat().st_size)

    def lines(self) -> Iterator[str]:
        """What it wrote, without what a kill left of a last line."""
        written = self.daemon.log_path.read_bytes()
        for begin, end in pairwise([0, *self._cut_at, len(written)]):
            whole = written[begin:end].decode(errors="replace").splitlines(keepends=True)
            if end in self._cut_at and whole and not whole[-1].endswith("\n"):
                whole.pop()
            yield from (line.rstrip("\n") for line in whole)

    async def end(self) -> None:
        """At the end of the run, whatever it does."""
        self.answers = False
        await asyncio.to_thread(self.daemon.stop)
        if self._wire is not None:
            await self._wire.close()


def failpoint_environment(folder: Path) -> dict[str, str]:
    """For a daemon whose points lie in this folder."""
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "TEST_FAILPOINTS_FOLDER": str(folder)}
