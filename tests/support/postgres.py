"""PostgreSQL servers for the tests: a child process, an existing server, or a container.

Takes an Installation or a DSN; provides a Server, which starts, stops and gives DSNs.
"""

import asyncio
import atexit
import contextlib
import itertools
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import asyncpg

from tests.support import scram
from webhookd.embedded.installation import (
    Account,
    Installation,
    can_run,
    restrict_to,
    server_account,
    setting_arguments,
    start_program,
)

Result = TypeVar("Result")

START_TIMEOUT_SECONDS = 60
STOP_TIMEOUT_SECONDS = 20
CONNECT_TIMEOUT_SECONDS = 60
LOG_TAIL_LINES = 20
# Another process may take a free port before the server does.
PORT_ATTEMPTS = 3
# Below the ephemeral ports, so that the system assigns none of these between the check and the bind, seconds
# later. Each process uses its own part of them.
PORTS = range(12_000, 32_000)
PORTS_PER_PROCESS = 500

# A folder in memory, on Linux; and how much of it must be free.
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108
MEMORY_INFO = Path("/proc/meminfo")
MIN_FREE_MEMORY_BYTES = 8 * 1024**3

# Durability is off: a server never outlives its test run.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    # Whether statistics exist must not depend on the speed of the machine; tests run VACUUM and ANALYZE.
    "autovacuum": "off",
    "jit": "off",
}
# For a server that a test breaks, to check what is still stored.
DURABLE_SETTINGS = SETTINGS | {
    "autovacuum": "on",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
}


class ServerError(Exception):
    """A server could not be started."""


class Server(ABC):
    """A PostgreSQL server to which the tests have a superuser login."""

    def __init__(self, major: int) -> None:
        self.major = major
        self.superuser_dsn = ""

    @abstractmethod
    def start(self) -> None:
        """Start the server, and return when it accepts connections."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server and remove its data. Does nothing if it is stopped."""

    def dsn(self, database: str = "postgres", user: str = "", password: str = "") -> str:
        """Return the DSN of a database, for the superuser unless another user is given."""
        return readdress(self.superuser_dsn, database, user, password)


class ExistingServer(Server):
    """A server that the tests did not start and leave running."""

    def __init__(self, major: int, superuser_dsn: str) -> None:
        super().__init__(major)
        self.superuser_dsn = superuser_dsn

    def start(self) -> None:
        """Do nothing: it is running."""

    def stop(self) -> None:
        """Do nothing: the tests did not start it."""


class ContainerServer(Server):
    """A server in a container, if a Docker engine is available."""

    def __init__(self, major: int) -> None:
        super().__init__(major)
        self._container: Any = None

    def start(self) -> None:
        """Start the container of the official image."""
        # Imported here because it is slow and only needed if Docker is the last resort.
        from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415

        container = PostgresContainer(
            f"postgres:{self.major}",
            username="postgres",
            password=secrets.token_hex(16),
            dbname="postgres",
            driver=None,
        )
        container.with_command(["postgres", *setting_arguments(SETTINGS)])
        self._container = container.start()
        self.superuser_dsn = self._container.get_connection_url()

    def stop(self) -> None:
        """Stop and remove the container."""
        if self._container is not None:
            self._container.stop()
            self._container = None


class LocalServer(Server):
    """A server that is a child process of the tests, in a temporary folder."""

    INITDB_OPTIONS: tuple[str, ...] = ()

    def __init__(
        self,
        installation: Installation,
        *,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(installation.major)
        self._installation = installation
        self._durable = durable
        self._settings = dict(settings or {})  # in addition to the tests' own
        self._wrapper: list[str] = []  # a command that runs the server, such as valgrind
        self._password = secrets.token_hex(16)
        self._account: Account | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def version(self) -> str:
        """The full version, such as 15.8."""
        return self._installation.version

    def start(self) -> None:
        """Create a new database cluster and start its server."""
        # Also if the tests end without fixture teardown, as after an internal error.
        atexit.register(self.stop)
        try:
            self._account = server_account()
            self._folder = make_folder(self._account, in_memory=not self._durable and memory_has_room())
            if not can_run(self._installation, self._account):
                self._installation = self._installation.copied_to(self._folder / "installation")
            self._initialize(self._folder)
            self._launch(self._folder)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Shut down without waiting for clients, then remove the folder."""
        atexit.unregister(self.stop)
        if self._process is not None:
            end_process(self._process)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _initialize(self, folder: Path) -> None:
        """Run initdb, with the first locale that this machine has."""
        password_file = folder / "password"
        password_file.write_text(scram.stored(self._password))
        restrict_to(password_file, self._account)
        command = [
            self._installation.program("initdb"),
            f"--pgdata={folder / 'data'}",
            "--username=postgres",
            f"--pwfile={password_file}",
            # The server checks each password, and the client saves the time of SCRAM's rounds.
            "--auth=password",
            "--encoding=UTF8",
            "--no-sync",
            "--no-instructions",
            *self.INITDB_OPTIONS,
        ]
        for locale in ("C.UTF-8", "C"):
            if self._run([*command, f"--locale={locale}"], folder) == 0:
                return
        raise ServerError(f"initdb of PostgreSQL {self.major} failed:\n{log_tail(folder)}")

    def _run(self, command: list[str], folder: Path) -> int:
        with open_log(folder) as log:
            process = start_program(command, self._account, folder, log.fileno())
            try:
                return process.wait(START_TIMEOUT_SECONDS)
            finally:
                end_process(process)

    def _launch(self, folder: Path) -> None:
        """Start the server on a free port; try another if the port was taken meanwhile."""
        for _ in range(PORT_ATTEMPTS):
            if self._launched(folder, free_port()):
                return
            if "Address already in use" not in log_tail(folder):
                break
        raise ServerError(f"PostgreSQL {self.major} did not start:\n{log_tail(folder)}")

    def _launched(self, folder: Path, port: int) -> bool:
        """Start the server on this port; returns whether it accepts connections."""
        settings = {
            **(DURABLE_SETTINGS if self._durable else SETTINGS),
            **self._settings,
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": str(folder),
        }
        command = [*self._wrapper, self._installation.program("postgres"), "-D", str(folder / "data")]
        with open_log(folder) as log:
            self._process = start_program(
                [*command, *setting_arguments(settings)], self._account, folder, log.fileno()
            )
        self.superuser_dsn = f"postgresql://postgres:{self._password}@127.0.0.1:{port}/postgres"
        if wait_until_ready(self._process, self.superuser_dsn):
            return True
        end_process(self._process)
        return False


def readdress(dsn: str, database: str, user: str, password: str) -> str:
    """Return the DSN with another database and, if one is named, another user."""
    parts = urlsplit(dsn)
    replaced = {"dbname", "database"} | ({"user", "password"} if user else set())
    query = [(key, value) for key, value in parse_qsl(parts.query) if key not in replaced]
    netloc = parts.netloc
    if user:
        host = parts.netloc.rpartition("@")[2]
        netloc = f"{quote(user, safe='')}:{quote(password, safe='')}@{host}"
    return urlunsplit((parts.scheme, netloc, f"/{quote(database, safe='')}", urlencode(query), ""))


def run_apart(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on its own loop in a thread.

    Works with or without a running loop, and does not disturb the loops of pytest-asyncio.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


async def server_major(dsn: str) -> int:
    """Query a server for its major version."""
    connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_SECONDS)
    try:
        return connection.get_server_version().major
    finally:
        await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)


def wait_until_ready(process: subprocess.Popen[bytes], dsn: str) -> bool:
    """Wait until the server accepts a login; False if it ends or the time is up."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        # 57P03 "the database system is starting up", or the port is not open yet. A server that fails in its
        # recovery, because its disk is full, closes the connection in the middle of the login.
        with contextlib.suppress(OSError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
            run_apart(server_major(dsn))
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    return False


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process with SIGINT (PostgreSQL's fast shutdown), then SIGQUIT, then SIGKILL."""
    for order in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(order)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_SECONDS)


def memory_has_room() -> bool:
    """Whether a server's folder may be in memory, besides the three other servers of a test run.

    Copying the template (500 files) for each test takes 35 ms in memory and 60 to 370 ms on disk.
    """
    try:
        shared = os.statvfs(MEMORY_FOLDER)
        available_kib = int(
            re.findall(r"^MemAvailable: +(\d+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)[0]
        )
    except (OSError, ValueError):  # not Linux
        return False
    # The server's programs may have to be copied there, so that another account can run them.
    is_executable = not shared.f_flag & os.ST_NOEXEC and os.access(MEMORY_FOLDER, os.W_OK | os.X_OK)
    free_bytes = min(shared.f_bavail * shared.f_frsize, available_kib * 1024)
    return is_executable and free_bytes >= MIN_FREE_MEMORY_BYTES


def make_folder(account: Account | None, *, in_memory: bool = False) -> Path:
    """Make a folder for a server, with a path short enough for a socket and owned by its account."""
    # Root's own TMPDIR may be closed to the account; /tmp is open to all.
    parent = MEMORY_FOLDER if in_memory else "/tmp" if account else None  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="webhookd-", dir=parent))
    restrict_to(folder, account)
    return folder


def _ports_of_this_process() -> Iterator[int]:
    parts = len(PORTS) // PORTS_PER_PROCESS
    first = PORTS.start + os.getpid() % parts * PORTS_PER_PROCESS
    # In random order, because processes with the same part should not try the same ports at once.
    return itertools.cycle(random.sample(range(first, first + PORTS_PER_PROCESS), PORTS_PER_PROCESS))


_own_ports = _ports_of_this_process()


def free_port() -> int:
    """Return a port that is free at this moment."""
    for port in _own_ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the cycle of ports never ends")


def open_log(folder: Path) -> BinaryIO:
    """Open the server's log to append to it."""
    return (folder / "log").open("ab")


def log_tail(folder: Path) -> str:
    """Return the last lines of the server's log."""
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
