"""Run `webhookd` commands as a user does: as a process with captured output, or on a terminal."""

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

# Not inherited from the user who runs the tests: the address of a daemon, the look of a terminal.
UNSET = ("WEBHOOKD_URL", "WEBHOOKD_TOKEN", "WEBHOOKD_CONFIG", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
COLUMNS, LINES = 80, 50


class Ran(NamedTuple):
    """The result of a command."""

    exit_code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        """Return the lines of a table, split into words."""
        return [line.split() for line in self.out.splitlines()]

    @property
    def documents(self) -> list[Any]:
        """Return the JSON documents, one per line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """Return the error message, which must be one line."""
        [line] = self.err.splitlines()
        assert line.startswith("webhookd: "), line
        return line


class Shell:
    """Runs commands in a folder, with the address of the daemon in the environment."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        self._environment |= environment

    def having(self, **environment: str) -> "Shell":
        """Return a shell with additional environment variables."""
        return Shell(self.folder, self._environment | environment)

    async def run(self, *words: str, given: bytes = b"") -> Ran:
        """Run a command and return its result."""
        return await asyncio.to_thread(self._run, words, given)

    async def done(self, *words: str, given: bytes = b"") -> Ran:
        """Run a command that must succeed, and return its result."""
        ran = await self.run(*words, given=given)
        assert ran.exit_code == 0, ran
        return ran

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command with an empty standard input."""
        return subprocess.Popen(
            _command(words),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def on_terminal(self, *words: str) -> "OnTerminal":
        """Start a command on a new terminal."""
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
    """A command on a terminal of 80 columns, with its output."""

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
        """Wait until the command has written a text since the previous call."""
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while text not in self.written:
                assert not self._ended, self.written
                self._read()
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        self.written = self.written.partition(text)[2]

    async def ended(self) -> int:
        """Wait for the end of the command and return its exit code; `written` has the complete output."""
        async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
            while not self._ended or self._process.poll() is None:
                self._read()
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return self._process.returncode

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 65_536):
                self.written += data.decode("utf-8", "replace").replace("\r\n", "\n")
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal open any more
            pass
        self._ended = True


def _command(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "webhookd", *words]
