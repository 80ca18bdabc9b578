"""A command that does a job: a process in a group of its own, the job on its stdin, its end as a value.

Its stdout is ours. Its stderr too, and the last of it is kept, for whoever asks why it failed.
"""

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self

from webhookd.core.limits import LABEL, MAX_REF_CHARACTERS

RESULT_FILE = "WEBHOOKD_RESULT_FILE"
# sysexits.h: the input was wrong, and will be the next time.
EX_DATAERR = 65
# From SIGTERM to SIGKILL, for a command whose job may be another's by now.
KILL_AFTER_SECONDS = 2.0
# For the rest of its stderr, which need not end with it.
STDERR_TIMEOUT_SECONDS = 1.0
# As much as the database keeps.
MAX_MESSAGE_CHARACTERS = 2000
# A longer file is no reference, whatever it is: a character has at most four, and there is white space.
MAX_RESULT_BYTES = 8 * MAX_REF_CHARACTERS
_CHUNK_BYTES = 65_536
_REF = re.compile(LABEL)


class Success(NamedTuple):
    """It ended with 0."""

    result_ref: str | None


class Failure(NamedTuple):
    """It did not."""

    error_code: str
    error_message: str
    permanent: bool = False


class RunningCommand:
    """One run. `async with` starts it, and leaves no process of its group behind if it is cut off."""

    def __init__(self, words: Sequence[str], job: bytes, environment: Mapping[str, str]) -> None:
        self._words = words
        self._job = job
        self._environment = dict(os.environ) | dict(environment)
        self._folder = TemporaryDirectory(prefix="webhookd-job-")
        self._result_file = Path(self._folder.name) / "result_ref"
        self._said = bytearray()
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False

    async def __aenter__(self) -> Self:
        with ExitStack() as undoing:
            undoing.callback(self._folder.cleanup)
            # A pipe of our own, to close when it has ended: what it left running may keep its end open.
            readable, writable = os.pipe()
            undoing.callback(os.close, writable)
            stderr = asyncio.StreamReader()
            self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(readable, "rb", buffering=0)
            )
            undoing.callback(self._pipe.close)
            # Last of all that can fail: whoever is told of a failure is not to look for a process.
            self._process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE,
                stderr=writable,
                env=self._environment | {RESULT_FILE: str(self._result_file)},
                # A Ctrl-C at the terminal is ours to hear; and what it starts is killed with it.
                start_new_session=True,
            )
            undoing.pop_all()
        os.close(writable)
        self._talking = [asyncio.create_task(self._tell()), asyncio.create_task(self._listen(stderr))]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runs:
            await self.kill()
        for task in self._talking:
            task.cancel()
        await asyncio.gather(*self._talking, return_exceptions=True)
        self._pipe.close()
        self._folder.cleanup()

    def cut_off(self) -> bool:
        """End all of its group at once, for we are leaving; False: not yet, it is being started."""
        if self._process is None:
            return False
        if self._runs or self._is_killed:
            self._signal(signal.SIGKILL)
        self._folder.cleanup()
        return True

    async def ended(self) -> Success | Failure:
        """When it has."""
        exit_code = await self._started.wait()
        await asyncio.wait(self._talking, timeout=STDERR_TIMEOUT_SECONDS)
        if exit_code == 0:
            return self._success()
        code = f"SIGNAL_{-exit_code}" if exit_code < 0 else f"EXIT_{exit_code}"
        return Failure(code, self._message(), permanent=exit_code == EX_DATAERR)

    async def kill(self) -> None:
        """End all of its group: first it is asked to. It may go, and what it started stay."""
        self._is_killed = True
        for order in (signal.SIGTERM, signal.SIGKILL):
            self._signal(order)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_AFTER_SECONDS):
                    await self._started.wait()

    @property
    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None  # noqa: S101  between __aenter__ and __aexit__
        return self._process

    @property
    def _runs(self) -> bool:
        return self._started.returncode is None

    def _signal(self, order: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._started.pid, order)

    async def _tell(self) -> None:
        stdin = self._started.stdin
        if stdin is None:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read it
            stdin.write(self._job + b"\n")
            await stdin.drain()
            stdin.close()

    async def _listen(self, stderr: asyncio.StreamReader) -> None:
        while said := await stderr.read(_CHUNK_BYTES):
            with suppress(OSError):  # ours is gone: the command must not block on a pipe that nobody reads
                sys.stderr.buffer.write(said)
                sys.stderr.buffer.flush()
            self._said += said
            del self._said[: -4 * MAX_MESSAGE_CHARACTERS]

    def _message(self) -> str:
        text = self._said.decode("utf-8", "replace").replace("\0", "\ufffd").strip()
        return text[-MAX_MESSAGE_CHARACTERS:]

    def _success(self) -> Success | Failure:
        """With what it wrote into the file, which must be a reference: one line, and not long."""
        try:
            data = _read(self._result_file)
        except FileNotFoundError:
            return Success(None)
        except OSError as error:
            return Failure("RESULT_REF_INVALID", f"{RESULT_FILE}: {error}", permanent=True)
        # Stripped as bytes: Unicode's spaces may be of a name. What is no UTF-8 becomes what no label has.
        text = data.strip().decode("utf-8", "surrogateescape")
        is_whole = len(data) <= MAX_RESULT_BYTES
        if is_whole and not text:
            return Success(None)
        if is_whole and len(text) <= MAX_REF_CHARACTERS and _REF.match(text):
            return Success(text)
        words = (
            f"{RESULT_FILE} must have one line of 1 to {MAX_REF_CHARACTERS} characters, none of them a "
            "control character, in UTF-8"
        )
        return Failure("RESULT_REF_INVALID", words, permanent=True)


def _read(file: Path) -> bytes:
    """A little more than there may be, so that it is seen; of a file alone: a FIFO might be waited for."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no file")
        return os.read(descriptor, MAX_RESULT_BYTES + 1)
    finally:
        os.close(descriptor)
