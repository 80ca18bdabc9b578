"""The processes of `demo` and `bench`: a temporary webhookd, children that exchange JSON lines, and /proc.

`make bench` shares the children and the numbers of /proc.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar, cast
from urllib.parse import urlsplit

import anyio
import click
import msgspec

from webhookd.cli.client import Client, Place
from webhookd.core.errors import ServiceUnavailable, WebhookdError

# The first start of a daemon creates a database, and the machine may be busy.
START_TIMEOUT_SECONDS = 90.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_INTERVAL_SECONDS = 0.05
# No request to a child takes longer, unless the child hangs.
ANSWER_TIMEOUT_SECONDS = 300.0
END_TIMEOUT_SECONDS = 10.0
# The service manager's variables are meant for the command itself, not for this daemon.
_SERVICE_MANAGER_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/<id>/stat after the name, which proc(5) numbers from 3. The last two count children that
# ended and were waited for: the time of a backend is not lost when it disconnects.
_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = (field - 3 for field in (4, 14, 15, 16, 17))
_IDLE_FIELDS = (3, 4)  # of /proc/stat: idle, and waiting for a disk

_Result = TypeVar("_Result")


async def interruptible(
    run: Callable[[], Awaitable[_Result]], say_interrupted: Callable[[], None]
) -> _Result | None:
    """Run and clean up. The first signal cancels the run, for a result of None; further ones do nothing."""
    with anyio.CancelScope() as scope:

        def stop() -> None:
            if not scope.cancel_called:
                scope.cancel()  # first, because printing fails if the terminal was closed
                say_interrupted()

        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await run()
    return None


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder in the parent, or where temporary files go, and remove it at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise WebhookdError(f"cannot create a temporary folder: {error.strerror}") from error
    try:
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root; the account it runs as must be able to enter.
            folder.chmod(0o711)
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise WebhookdError(f"cannot remove {folder}: {error.strerror}") from error


class TemporaryDaemon:
    """A real `serve --local` with its own folder. `command` is for error messages: demo or bench."""

    def __init__(
        self, folder: Path, command: str, config_path: Path | None, environment: Mapping[str, str]
    ) -> None:
        if config_path is None:
            # An empty file, so that the daemon searches for no other.
            config_path = folder / "webhookd.toml"
            config_path.touch()
        address = f"127.0.0.1:{_free_port()}"
        self.client: Final = Client(Place(urlsplit(f"http://{address}"), f"started by {command}"))
        self._command = command
        self._folder = folder
        self._config_path = config_path
        self._environment = {
            name: value for name, value in environment.items() if name not in _SERVICE_MANAGER_VARIABLES
        } | {"WEBHOOKD_API_LISTEN": address}
        self._log_path = folder / "webhookd.log"

    async def __aenter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603, ASYNC220  our own program; it starts fast
                [sys.executable, "-m", "webhookd", "--config", str(self._config_path), "serve", "--local"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                # Ctrl-C in a terminal must reach only us: we stop it, and a second signal would kill it.
                start_new_session=True,
            )
        try:
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await asyncio.to_thread(self._stop)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def require_running(self) -> None:
        """Raise an error with the last line of its log if it has ended."""
        if self._process.poll() is not None:
            raise WebhookdError(f"the daemon of {self._command} ended: {last_line(self._log_path)}")

    def _stop(self) -> bool:
        """Returns false if it had to be killed, or had failed before."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False

    async def _ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            self.require_running()
            try:
                await self.client.request("GET", "/readyz")
            except ServiceUnavailable as error:
                if time.monotonic() > deadline:
                    problem = f"the daemon of {self._command} did not become ready in time: {error}"
                    raise ServiceUnavailable(problem) from error
            else:
                return
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def last_line(log_path: Path) -> str:
    """The last line of a process's log, which says why it ended."""
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("webhookd: ") if lines else "its log is empty"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# Children of a benchmark: each writes a line when it is ready, and then one answer for each request.


class ChildFailed(WebhookdError):
    """A child ended or did not answer."""


class Child:
    """A running child, with pipes to its stdin and stdout. `ready` is the value of its first line."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._stdin = cast("asyncio.StreamWriter", process.stdin)
        self._stdout = cast("asyncio.StreamReader", process.stdout)
        self._log_path = log_path
        self.ready: Any = None

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def request(self, value: object, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """Send a line and return the value of the line that answers it."""
        with suppress(ConnectionError):  # the missing answer reports it
            self._stdin.write(json.dumps(value).encode() + b"\n")
            await self._stdin.drain()
        return await self.read(timeout_seconds)

    async def read(self, timeout_seconds: float) -> Any:
        """Return the value of the next line."""
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._stdout.readline()
        except TimeoutError as error:
            problem = f"did not answer within {timeout_seconds:.0f} s"
            raise ChildFailed(f"a benchmark process {problem}: {last_line(self._log_path)}") from error
        if not line:
            raise ChildFailed(f"a benchmark process ended: {last_line(self._log_path)}")
        return json.loads(line)

    async def end(self) -> None:
        """Close its input, at which it should end; kill it if it does not."""
        self._stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
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


def child_options() -> Any:
    """In a child: the options that the parent passed to start_child."""
    return json.loads(sys.argv[-1])


async def answer_lines(answer: Callable[[Any], Awaitable[object]], ready: object = "ready") -> None:
    """In a child: say that it is ready, then answer requests until the parent closes the input."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    click.echo(json.dumps(ready))  # which flushes
    while line := await reader.readline():
        click.echo(json.dumps(await answer(json.loads(line))))


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


def sample(daemon_id: int, receiver_id: int, postgresql_ids: Iterable[int]) -> Sample | None:
    """Read the processor times now; None on a system without /proc."""
    daemon, receiver = processor_seconds(daemon_id), processor_seconds(receiver_id)
    machine = _machine_seconds()
    if daemon is None or receiver is None or machine is None:
        return None
    # The ids of a server on another machine may exist here by chance: compare the name.
    postgresql = {
        it: seconds for it in postgresql_ids if (seconds := processor_seconds(it, "postgres")) is not None
    }
    return Sample(time.monotonic(), daemon, receiver, postgresql, machine)


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
