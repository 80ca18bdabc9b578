"""The execution of one job by `jobs work`: its lease, and the command that runs with the job on stdin.

The lease is renewed while the command runs, and ended by a report. The command has its own process group and
inherits stdout. Its stderr is copied to ours, and the last part is kept as the error message.
"""

import asyncio
import os
import random
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Self

from webhookd.cli.client import Answer, Client
from webhookd.core.errors import RequestRefused, ServiceUnavailable
from webhookd.core.limits import LABEL, MAX_REF_CHARACTERS

# A lease is renewed after each third of its length: two renewals may fail.
RENEWALS = 3
FIRST_DELAY_SECONDS = 0.25
MAX_DELAY_SECONDS = 10.0
# How long after the end of the lease a report is retried: it counts until another executor has the job.
REPORT_GRACE_SECONDS = 60.0

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


class LeaseLost(Exception):
    """Another executor may hold the job by now, or the result could not be reported."""


def growing_delays() -> Iterator[float]:
    """Delays in seconds, random, so that workers do not all reconnect at once."""
    delay_seconds = FIRST_DELAY_SECONDS
    while True:
        yield delay_seconds * random.uniform(0.5, 1)  # noqa: S311  not used for security
        delay_seconds = min(delay_seconds * 2, MAX_DELAY_SECONDS)


class JobLease:
    """The lease of one claim."""

    def __init__(self, client: Client, claimed: Answer, lease_seconds: float) -> None:
        self._client = client
        self._lease_seconds = lease_seconds
        self.body: Final = claimed.body
        job: dict[str, Any] = claimed.value
        self.job_id: Final = str(job["job_id"])
        self.attempt: Final = int(job["attempt"])
        self.kind: Final = str(job["job_kind"])
        self._token = str(job["lease_token"])
        now = time.monotonic()
        self._ends_at = now + lease_seconds
        # From two times of the database: this machine's clock may be wrong.
        self._deadline_at = now + _seconds_between(job["claimed_at"], job["deadline_at"])

    async def renew(self) -> None:
        """Renew now, retrying while the daemon is unavailable; raises LeaseLost when the lease has ended."""
        delays = growing_delays()
        while True:
            requested_at = time.monotonic()
            try:
                # A daemon that accepts the request and does not answer must not outlast the lease.
                async with asyncio.timeout(self._ends_at - requested_at):
                    await self._post("progress")
            except TimeoutError as error:
                raise LeaseLost("the lease could not be renewed: no answer in time") from error
            except ServiceUnavailable as error:
                delay_seconds = min(next(delays), self._lease_seconds / RENEWALS)
                if time.monotonic() + delay_seconds >= self._ends_at:
                    raise LeaseLost(f"the lease could not be renewed: {error}") from error
                await asyncio.sleep(delay_seconds)
            else:
                # Counted from the request: the time of the renewal in the database is not known.
                self._ends_at = requested_at + self._lease_seconds
                return

    async def keep(self) -> None:
        """Renew until cancelled, or until LeaseLost is raised."""
        while True:
            await asyncio.sleep(self._lease_seconds / RENEWALS)
            await self.renew()

    async def wait_for_deadline(self) -> None:
        await asyncio.sleep(max(0.0, self._deadline_at - time.monotonic()))

    async def report(self, action: str, is_stopping: Callable[[], bool], **fields: object) -> None:
        """Report `succeed` or `fail`. Retrying is safe: a repeated report changes nothing."""
        delays = growing_delays()
        give_up_at = time.monotonic() + self._lease_seconds + REPORT_GRACE_SECONDS
        while True:
            try:
                await self._post(action, **fields)
            except ServiceUnavailable as error:
                if is_stopping() or time.monotonic() >= give_up_at:
                    raise LeaseLost(f"the result could not be reported: {error}") from error
                await asyncio.sleep(next(delays))
            else:
                return

    async def _post(self, action: str, **fields: object) -> None:
        body = {"lease_token": self._token} | fields
        try:
            await self._client.request("POST", f"/v1/jobs/{self.job_id}/{action}", body)
        except RequestRefused as error:
            raise LeaseLost(str(error)) from error


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
        message = self._stderr_tail.decode("utf-8", "replace").replace("\0", "\ufffd").strip()
        return CommandFailure(code, message[-MAX_MESSAGE_CHARACTERS:], permanent=exit_code == EX_DATAERR)

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


def _seconds_between(start: object, end: object) -> float:
    if not isinstance(end, str):
        return float("inf")
    return (datetime.fromisoformat(end) - datetime.fromisoformat(str(start))).total_seconds()


def _read(file: Path) -> bytes:
    """One byte more than allowed, to detect a longer file. Regular files only: a FIFO would block."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return os.read(descriptor, MAX_RESULT_BYTES + 1)
    finally:
        os.close(descriptor)
