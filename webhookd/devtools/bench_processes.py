"""The processes of a benchmark: starts children, exchanges JSON lines with them, and reads /proc.

Shared by `webhookd bench` and `make bench`.
"""

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec

from webhookd.core.errors import WebhookdError
from webhookd.devtools.temporary_daemon import last_line

START_TIMEOUT_SECONDS = 60.0
# No request takes longer, unless the child hangs.
ANSWER_TIMEOUT_SECONDS = 300.0
END_TIMEOUT_SECONDS = 10.0

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/<id>/stat after the name, which proc(5) numbers from 3. The last two count children that
# ended and were waited for: the time of a backend is not lost when it disconnects.
_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = (field - 3 for field in (4, 14, 15, 16, 17))
_IDLE_FIELDS = (3, 4)  # of /proc/stat: idle, and waiting for a disk


class ChildFailed(WebhookdError):
    """A child ended or did not answer."""


class Child:
    """A running child. `ready` is the value of its first line."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.ready: Any = None

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def request(self, value: object, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """Send a line and return the value of the line that answers it."""
        if self._process.stdin is None:
            raise RuntimeError("the child has no stdin")
        with contextlib.suppress(ConnectionError):  # the missing answer reports it
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            await self._process.stdin.drain()
        return await self.read(timeout_seconds)

    async def read(self, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """Return the value of the next line."""
        if self._process.stdout is None:
            raise RuntimeError("the child has no stdout")
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise ChildFailed(
                f"a benchmark process did not answer within {timeout_seconds:.0f} s: {self._last_line()}"
            ) from error
        if not line:
            raise ChildFailed(f"a benchmark process ended: {self._last_line()}")
        return json.loads(line)

    async def end(self) -> None:
        """Close its input, at which it should end; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _last_line(self) -> str:
        return last_line(self._log_path)


@contextlib.asynccontextmanager
async def start_child(
    command: Sequence[str], folder: Path, options: object = None, cwd: Path | None = None
) -> AsyncIterator[Child]:
    """Start a program with its options as JSON in the last argument, and wait for its first line."""
    log_path = folder / f"{Path(command[-1]).name}.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=cwd,
            # Ctrl-C in a terminal must reach only the parent, which ends its children.
            start_new_session=True,
        )
    child = Child(process, log_path)
    try:
        child.ready = await child.read(START_TIMEOUT_SECONDS)
        yield child
        await child.end()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await child.kill()
        raise


def python_module(module: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module]


# In a child: the other end of the lines.


def child_options() -> Any:
    """The options that the parent passed to start_child."""
    return json.loads(sys.argv[-1])


async def answer_lines(answer: Callable[[Any], Awaitable[object]], ready: object = "ready") -> None:
    """Tell the parent that we are ready, then answer its requests until it closes our input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _write_line(ready)
    while line := await reader.readline():
        _write_line(await answer(json.loads(line)))


def _write_line(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


# Processor time and memory.


class ProcessStat(NamedTuple):
    """Processor time in ticks: of the process itself, and of its children that ended."""

    name: str
    parent_id: int
    own_ticks: int
    ended_children_ticks: int


def parse_stat(text: str) -> ProcessStat:
    """Parse /proc/<id>/stat. The name is in parentheses and may contain blanks and parentheses."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return ProcessStat(
        head.partition("(")[2],
        int(fields[_PARENT]),
        int(fields[_USER]) + int(fields[_SYSTEM]),
        int(fields[_CHILDREN_USER]) + int(fields[_CHILDREN_SYSTEM]),
    )


def processor_seconds(process_id: int, name: str | None = None) -> float | None:
    """Processor time of one process. None if it does not exist here, or has another name."""
    try:
        stat = parse_stat((PROC / str(process_id) / "stat").read_text())
    except OSError:
        return None
    return None if name not in (None, stat.name) else stat.own_ticks / TICKS_PER_SECOND


def memory_bytes(process_id: int, field: str = "VmRSS") -> int:
    """Resident memory of a process now, or with VmHWM its peak."""
    return parse_memory((PROC / str(process_id) / "status").read_text(), field)


def parse_memory(status: str, field: str) -> int:
    """Parse a field of /proc/<id>/status, such as VmRSS."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc has no {field}")
    return int(found[1]) * 1024


class Sample(NamedTuple):
    """Processor seconds used so far; for PostgreSQL by process id."""

    at: float
    daemon: float
    receiver: float
    postgresql: dict[int, float]
    machine: float


class Processors(msgspec.Struct, frozen=True):
    """The average number of busy processors. PostgreSQL's is None if it runs on another machine."""

    daemon: float
    receiver: float
    postgresql: float | None
    machine: float
    there_are: int  # processors that this process may use

    @property
    def other_programs(self) -> float:
        """The load of programs that do not belong to the benchmark."""
        return max(0.0, self.machine - self.daemon - self.receiver - (self.postgresql or 0.0))


def sample(at: float, daemon_id: int, receiver_id: int, postgresql_ids: Iterable[int]) -> Sample | None:
    """Read the processor times now; None on a system without /proc."""
    daemon, receiver = processor_seconds(daemon_id), processor_seconds(receiver_id)
    machine = _machine_seconds()
    if daemon is None or receiver is None or machine is None:
        return None
    # The ids of a server on another machine may exist here by chance: compare the name.
    postgresql = {
        it: seconds for it in postgresql_ids if (seconds := processor_seconds(it, "postgres")) is not None
    }
    return Sample(at, daemon, receiver, postgresql, machine)


def between(first: Sample | None, last: Sample | None) -> Processors | None:
    """Averages between two samples; None if there are not two."""
    if first is None or last is None or last.at <= first.at:
        return None
    seconds = last.at - first.at
    # A process that is new in the last sample has used all of its time in between.
    postgresql = sum(taken - first.postgresql.get(it, 0.0) for it, taken in last.postgresql.items())
    return Processors(
        daemon=(last.daemon - first.daemon) / seconds,
        receiver=(last.receiver - first.receiver) / seconds,
        postgresql=postgresql / seconds if last.postgresql else None,
        machine=(last.machine - first.machine) / seconds,
        there_are=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def _machine_seconds() -> float | None:
    try:
        ticks = [int(it) for it in (PROC / "stat").read_text().partition("\n")[0].split()[1:9]]
    except OSError:
        return None
    return (sum(ticks) - sum(ticks[it] for it in _IDLE_FIELDS)) / TICKS_PER_SECOND
