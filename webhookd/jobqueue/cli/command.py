"""Runs the command for a job: in its own process group, with the job on stdin; returns how it ended.

The command inherits stdout. Its stderr is copied to ours, and the last part is kept as the error message.
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
# sysexits.h: the input is wrong, so a retry cannot succeed.
EX_DATAERR = 65
# From SIGTERM to SIGKILL; short, because another executor may hold the job by now.
KILL_AFTER_SECONDS = 2.0
# For the rest of stderr, which a child of the command may keep open.
STDERR_TIMEOUT_SECONDS = 1.0
# The database keeps no more.
MAX_MESSAGE_CHARACTERS = 2000
# A longer file is not a reference: a character has at most four bytes, and the rest is white space.
MAX_RESULT_BYTES = 8 * MAX_REF_CHARACTERS
_CHUNK_BYTES = 65_536
_REF = re.compile(LABEL)


class CommandSuccess(NamedTuple):
    """Exit code 0."""

    result_ref: str | None


class CommandFailure(NamedTuple):
    """Another exit code, or the command could not run."""

    error_code: str
    error_message: str
    permanent: bool = False


class RunningCommand:
    """One run of the command. `async with` starts it, and kills its process group if interrupted."""

    def __init__(self, arguments: Sequence[str], job: bytes, environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._job = job
        self._environment = dict(os.environ) | dict(environment)
        self._folder = TemporaryDirectory(prefix="webhookd-job-")
        self._result_file = Path(self._folder.name) / "result_ref"
        self._stderr_tail = bytearray()
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False

    async def __aenter__(self) -> Self:
        with ExitStack() as cleanup:
            cleanup.callback(self._folder.cleanup)
            # Our own pipe, which we close when the command ends: a child left running may keep its end open.
            readable, writable = os.pipe()
            cleanup.callback(os.close, writable)
            stderr = asyncio.StreamReader()
            self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(readable, "rb", buffering=0)
            )
            cleanup.callback(self._pipe.close)
            # Last, because the steps above can fail: after a failure there is no process to clean up.
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stderr=writable,
                env=self._environment | {RESULT_FILE: str(self._result_file)},
                # Ctrl-C at the terminal reaches only us, and the command is killed with all its children.
                start_new_session=True,
            )
            cleanup.pop_all()
        os.close(writable)
        self._copying = [
            asyncio.create_task(self._write_job()),
            asyncio.create_task(self._copy_stderr(stderr)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._is_running:
            await self.kill()
        for task in self._copying:
            task.cancel()
        await asyncio.gather(*self._copying, return_exceptions=True)
        self._pipe.close()
        self._folder.cleanup()

    def kill_now(self) -> bool:
        """Kill the process group without waiting; False if the command is still being started."""
        if self._process is None:
            return False
        if self._is_running or self._is_killed:
            self._signal(signal.SIGKILL)
        self._folder.cleanup()
        return True

    async def wait(self) -> CommandSuccess | CommandFailure:
        """Wait for the end of the command."""
        exit_code = await self._started.wait()
        await asyncio.wait(self._copying, timeout=STDERR_TIMEOUT_SECONDS)
        if exit_code == 0:
            return self._success()
        code = f"SIGNAL_{-exit_code}" if exit_code < 0 else f"EXIT_{exit_code}"
        return CommandFailure(code, self._message(), permanent=exit_code == EX_DATAERR)

    async def kill(self) -> None:
        """End the process group: SIGTERM, then SIGKILL even if the command ended, for its children."""
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
    def _is_running(self) -> bool:
        return self._started.returncode is None

    def _signal(self, order: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._started.pid, order)

    async def _write_job(self) -> None:
        stdin = self._started.stdin
        if stdin is None:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # the command need not read it
            stdin.write(self._job + b"\n")
            await stdin.drain()
            stdin.close()

    async def _copy_stderr(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(_CHUNK_BYTES):
            with suppress(OSError):  # our stderr is closed: keep reading, so that the command does not block
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()
            self._stderr_tail += data
            del self._stderr_tail[: -4 * MAX_MESSAGE_CHARACTERS]

    def _message(self) -> str:
        text = self._stderr_tail.decode("utf-8", "replace").replace("\0", "\ufffd").strip()
        return text[-MAX_MESSAGE_CHARACTERS:]

    def _success(self) -> CommandSuccess | CommandFailure:
        """The reference in the result file, if any. It must be one short line."""
        try:
            data = _read(self._result_file)
        except FileNotFoundError:
            return CommandSuccess(None)
        except OSError as error:
            return CommandFailure("RESULT_REF_INVALID", f"{RESULT_FILE}: {error}", permanent=True)
        # Stripped as bytes: Unicode spaces may belong to a name. Invalid UTF-8 becomes surrogates, which no
        # label has.
        text = data.strip().decode("utf-8", "surrogateescape")
        is_whole = len(data) <= MAX_RESULT_BYTES
        if is_whole and not text:
            return CommandSuccess(None)
        if is_whole and len(text) <= MAX_REF_CHARACTERS and _REF.match(text):
            return CommandSuccess(text)
        message = (
            f"{RESULT_FILE} must contain one line of 1 to {MAX_REF_CHARACTERS} characters in UTF-8, without "
            "control characters"
        )
        return CommandFailure("RESULT_REF_INVALID", message, permanent=True)


def _read(file: Path) -> bytes:
    """One byte more than allowed, to detect a longer file. Regular files only: a FIFO would block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return os.read(descriptor, MAX_RESULT_BYTES + 1)
    finally:
        os.close(descriptor)
