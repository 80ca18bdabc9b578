"""`webhookd demo`, as somebody runs it who has nothing else: the whole story, and nothing of it is left."""

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

# A user's own settings: for another daemon, which the demo must not touch.
ENVIRONMENT = {"WEBHOOKD_DATABASE_DSN": "postgresql://nobody@127.0.0.1:1/nothing", "WEBHOOKD_API_LISTEN": "x"}


class Demo:
    """The command, and the folder in which it makes its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Also again, when it has ended."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "webhookd", "demo"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | {"TMPDIR": str(self.folder)},
        )

    async def until_said(self, words: str) -> None:
        """Return when a line with these words was printed."""
        assert self.process.stdout is not None
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while words not in (line := await asyncio.to_thread(self.process.stdout.readline)):
                assert line, self.process.communicate()

    async def ended_by(self, words: str, end: Callable[[], None]) -> tuple[int, str, str]:
        """As `ended`, after what was done when it had said this; anew if it was over before that was done."""
        for _ in range(3):
            if self.process.poll() is not None:
                self.start()
            await self.until_said(words)
            end()
            ended = await self.ended()
            if ended[0] != 0:
                break
        return ended

    async def ended(self) -> tuple[int, str, str]:
        """Exit code, and the rest of what it wrote to stdout and stderr."""
        output, errors = await asyncio.to_thread(self.process.communicate, timeout=CONDITION_TIMEOUT_SECONDS)
        return self.process.returncode, output, errors

    def left(self) -> list[str]:
        """What is still there of it: files, and processes that stand in its folder."""
        return [*map(str, self.folder.iterdir()), *map(str, standing_in(self.folder))]


@pytest.fixture
def demo() -> Iterator[Demo]:
    """Give a demo that runs, with a temporary folder that every account can pass through."""
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


async def test_the_whole_life(demo: Demo) -> None:
    """Deliveries, retries, dead letters and a requeue, in lines that a pipe can take; then all is gone."""
    exit_code, output, errors = await demo.ended()
    assert (exit_code, errors) == (0, "")
    assert "12 deliveries arrived: 4 at once, 4 after retries, 4 as requeued dead letters." in output
    assert "It took 32 requests, every one of them signed" in output
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
    assert demo.left() == []


async def test_an_interrupted_one_leaves_nothing(demo: Demo) -> None:
    """Ctrl-C in the middle: webhookd and PostgreSQL are stopped, and the folder is gone."""
    there: list[str] = []

    def interrupt() -> None:
        there[:] = demo.left()
        demo.process.send_signal(signal.SIGINT)

    exit_code, _, errors = await demo.ended_by("Publishing", interrupt)
    assert (exit_code, errors) == (130, "")
    assert len(there) > 1
    assert demo.left() == []


async def test_a_failed_one_leaves_nothing(demo: Demo) -> None:
    """Its webhookd is killed: one line tells it, and the PostgreSQL that was left alone is stopped."""

    def kill_daemon() -> None:
        for daemon in children(demo.process.pid):
            os.kill(daemon, signal.SIGKILL)

    exit_code, _, errors = await demo.ended_by("billing has them", kill_daemon)
    assert exit_code == 69, errors
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith("webhookd: no ")
    assert demo.left() == []
