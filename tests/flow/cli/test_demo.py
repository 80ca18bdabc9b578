"""Tests of `webhookd demo` on a machine without any other webhookd: the whole story, and the cleanup."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import children, standing_in
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

# Settings of the user for another daemon, which the demo must ignore.
ENVIRONMENT = {"WEBHOOKD_DATABASE_DSN": "postgresql://nobody@127.0.0.1:1/nothing", "WEBHOOKD_API_LISTEN": "x"}


class Demo:
    """The command, and the folder for its temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "webhookd", "demo"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | {"TMPDIR": str(self.folder)},
        )

    async def wait_for_line(self, words: str) -> None:
        """Wait for a line of stdout that contains these words."""
        assert self.process.stdout is not None
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while words not in (line := await asyncio.to_thread(self.process.stdout.readline)):
                assert line, self.process.communicate()

    async def ended_by(self, words: str, action: Callable[[], None]) -> tuple[int, str, str]:
        """Run `action` after a line with these words, then wait for the end.

        Starts the demo again if it had finished before the action took effect.
        """
        for _ in range(3):
            if self.process.poll() is not None:
                self.start()
            await self.wait_for_line(words)
            action()
            ended = await self.ended()
            if ended[0] != 0:
                break
        return ended

    async def ended(self) -> tuple[int, str, str]:
        """The exit code, and the rest of stdout and stderr."""
        output, errors = await asyncio.to_thread(self.process.communicate, timeout=CONDITION_TIMEOUT_SECONDS)
        return self.process.returncode, output, errors

    def remains(self) -> list[str]:
        """Files in its folder, and processes that work there."""
        return [*map(str, self.folder.iterdir()), *map(str, standing_in(self.folder))]


@pytest.fixture
def demo() -> Iterator[Demo]:
    """A running demo, with a temporary folder that every account can enter."""
    folder = Path(tempfile.mkdtemp(prefix="webhookd-test-", dir="/tmp"))
    folder.chmod(0o711)
    demo = Demo(folder)
    try:
        yield demo
    finally:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.communicate()
        shutil.rmtree(folder)


async def test_demo_shows_all_steps(demo: Demo) -> None:
    """Deliveries, retries, dead letters and a requeue, as plain lines; then everything is removed."""
    exit_code, output, errors = await demo.ended()
    assert (exit_code, errors) == (0, "")
    assert "12 deliveries completed: 4 at the first attempt, 4 after retries, 4 as requeued" in output
    assert "They took 32 requests, all with a valid signature" in output
    for number in (1, 2, 3, 4):
        answers = [line.split() for line in output.splitlines() if f" evt_{number} → " in line]
        seen = [(words[4], words[6].rstrip(","), words[-1]) for words in answers]
        for endpoint, statuses in {
            "billing": ["200"],
            "mail": ["500", "500", "200"],
            "warehouse": ["503", "503", "503", "200"],
        }.items():
            assert [status for name, _, status in seen if name == endpoint] == statuses, seen
    assert "webhookd serve --local" in output
    assert "\x1b" not in output
    assert demo.remains() == []


async def test_interrupted_demo_leaves_nothing(demo: Demo) -> None:
    """Ctrl-C stops webhookd and PostgreSQL, and removes the folder."""
    before: list[str] = []

    def interrupt() -> None:
        before[:] = demo.remains()
        demo.process.send_signal(signal.SIGINT)

    exit_code, _, errors = await demo.ended_by("Publishing", interrupt)
    assert (exit_code, errors) == (130, "")
    assert len(before) > 1
    assert demo.remains() == []


async def test_failed_demo_leaves_nothing(demo: Demo) -> None:
    """When its webhookd is killed, it prints one error line and stops PostgreSQL."""

    def kill_daemon() -> None:
        for daemon in children(demo.process.pid):
            os.kill(daemon, signal.SIGKILL)

    exit_code, _, errors = await demo.ended_by("billing received", kill_daemon)
    assert exit_code == 69, errors
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("webhookd: no ")
    assert demo.remains() == []
