"""A user at a shell: a command as a process, its exit code and what it wrote; or on a terminal."""

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS

# None of the user's: neither where a daemon is, nor how a terminal looks.
UNSET = ("WEBHOOKD_URL", "WEBHOOKD_TOKEN", "WEBHOOKD_CONFIG", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
COLUMNS, LINES = 80, 50


class Ran(NamedTuple):
    """What became of a command."""

    exit_code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """The lines of a table, in words."""
        return [line.split() for line in self.out.splitlines()]

    @property
    def documents(self) -> list[Any]:
        """JSON, a document a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """The one line of a refusal."""
        [line] = self.err.splitlines()
        assert line.startswith("webhookd: "), line
        return line


class Shell:
    """Runs commands in a folder, with an environment that says where the daemon is."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        self._environment |= environment

    def having(self, **environment: str) -> "Shell":
        """The same with more in its environment."""
        return Shell(self.folder, self._environment | environment)

    async def run(self, *words: str, given: bytes = b"") -> Ran:
        """Run it to its end."""
        return await asyncio.to_thread(self._run, words, given)

    async def done(self, *words: str, given: bytes = b"") -> Ran:
        """Run it to its end, which must be good."""
        ran = await self.run(*words, given=given)
        assert ran.exit_code == 0, ran
        return ran

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start it, with nothing to read."""
        return subprocess.Popen(
            _command(words),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def on_terminal(self, *words: str) -> "OnTerminal":
        """Start it on a terminal of its own."""
        return OnTerminal(words, self.folder, self._environment | {"TERM": "xterm-256color"})

    def _run(self, words: tuple[str, ...], given: bytes) -> Ran:
        ran = subprocess.run(
            _command(words),
            cwd=self.folder,
            env=self._environment,
            input=given,
            capture_output=True,
            timeout=CONDITION_TIMEOUT_SECONDS,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())


class OnTerminal:
    """A command on a terminal of 80 columns, and what it has written there."""

    def __init__(self, words: tuple[str, ...], folder: Path, environment: Mapping[str, str]) -> None:
        self._terminal, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            _command(words), cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        os.set_blocking(self._terminal, False)
        self._ended = False
        self.written = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    async def shows(self, text: str) -> None:
        """Wait until it has written this since the last time."""
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while text not in self.written:
                assert not self._ended, self.written
                self._read()
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        self.written = self.written.partition(text)[2]

    async def ended(self) -> int:
        """Its exit code, when it has one; all that it wrote is in `written`."""
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while not self._ended or self._process.poll() is None:
                self._read()
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return self._process.returncode

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 65_536):
                self.written += data.decode("utf-8", "replace").replace("\r\n", "\n")
        except BlockingIOError:
            return
        except OSError:  # EIO: nobody has it open any more
            pass
        self._ended = True


def _command(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "webhookd", *words]
