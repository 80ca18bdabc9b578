"""Servers for the tests: a child process of our own, an existing server, or a container.

Takes an Installation or an address; hands on a Server, which starts, stops and gives DSNs.
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
# A free port is known before the server takes it; another process may be quicker.
PORT_ATTEMPTS = 3
# Below those that a system gives to whoever asks for any: between a look and a bind, seconds later, nobody is
# given one of these. Each process has a part of them.
PORTS = range(12_000, 32_000)
PORTS_OF_ONE = 500

# Where files are in memory alone, on Linux; and how much of it must be free.
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108
MEMORY_INFO = Path("/proc/meminfo")
ROOM_BYTES = 8 * 1024**3

# Durability is off: a test's server never outlives its test run.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    # Whether statistics exist must not depend on the speed of the machine; tests run VACUUM and ANALYZE.
    "autovacuum": "off",
    "jit": "off",
}
# For a server that a test breaks, to see what it kept.
DURABLE_SETTINGS = SETTINGS | {
    "autovacuum": "on",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
}


class ServerError(Exception):
    """A server could not be started."""


class Server(ABC):
    """A PostgreSQL server, to which the tests have a superuser's login."""

    def __init__(self, major: int) -> None:
        self.major = major
        self.superuser_dsn = ""

    @abstractmethod
    def start(self) -> None:
        """Start the server, and return when it accepts connections."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server, and remove all that it kept. Harmless when it is stopped."""

    def dsn(self, database: str = "postgres", user: str = "", password: str = "") -> str:
        """Return the address of a database, for the superuser unless another user is named."""
        return readdress(self.superuser_dsn, database, user, password)


class ExistingServer(Server):
    """A server that somebody else runs, and that the tests leave running."""

    def __init__(self, major: int, superuser_dsn: str) -> None:
        super().__init__(major)
        self.superuser_dsn = superuser_dsn

    def start(self) -> None:
        """Do nothing: it runs."""

    def stop(self) -> None:
        """Do nothing: it is not ours."""


class ContainerServer(Server):
    """A server in a container, where a Docker engine answers."""

    def __init__(self, major: int) -> None:
        super().__init__(major)
        self._container: Any = None

    def start(self) -> None:
        """Start the container of the official image."""
        # Imported here because it is slow, and needed only where Docker is the last resort.
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
    """A server which is a direct child of the tests, in a temporary folder."""

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
        self._settings = dict(settings or {})  # beside the tests' own
        self._password = secrets.token_hex(16)
        self._account: Account | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process_id(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Make a new cluster of databases and start its server."""
        # Also when the tests end without their fixtures' ends, as after an internal error.
        atexit.register(self.stop)
        try:
            self._account = server_account()
            self._folder = make_folder(self._account, in_memory=not self._durable and memory_has_room())
            self._installation = self._installation.runnable_by(self._account, self._folder / "installation")
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
        """Run initdb, in the first locale that this machine has."""
        password_file = folder / "password"
        password_file.write_text(scram.stored(self._password))
        restrict_to(password_file, self._account)
        command = [
            self._installation.program("initdb"),
            f"--pgdata={folder / 'data'}",
            "--username=postgres",
            f"--pwfile={password_file}",
            # The server checks each password, and the client is spared SCRAM's rounds.
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
        """Start the server on a free port, once more if the port was taken meanwhile."""
        for _ in range(PORT_ATTEMPTS):
            if self._launched(folder, free_port()):
                return
            if "Address already in use" not in log_tail(folder):
                break
        raise ServerError(f"PostgreSQL {self.major} did not start:\n{log_tail(folder)}")

    def _launched(self, folder: Path, port: int) -> bool:
        """Start the server on this port; whether it accepts connections."""
        settings = {
            **(DURABLE_SETTINGS if self._durable else SETTINGS),
            **self._settings,
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": str(folder),
        }
        command = [self._installation.program("postgres"), "-D", str(folder / "data")]
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
    """Run a coroutine to its end on a loop of its own, in a thread.

    Works whether or not a loop runs here, and leaves the loops of pytest-asyncio alone.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


async def server_major(dsn: str) -> int:
    """Ask a server for its major version."""
    connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_SECONDS)
    try:
        return connection.get_server_version().major
    finally:
        await connection.close(timeout=CONNECT_TIMEOUT_SECONDS)


def wait_until_ready(process: subprocess.Popen[bytes], dsn: str) -> bool:
    """Tell whether the server came to accept a login before it ended or the time was up."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        # 57P03 "the database system is starting up", or nobody listens yet.
        with contextlib.suppress(OSError, asyncpg.CannotConnectNowError):
            run_apart(server_major(dsn))
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    return False


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process in order with SIGINT (PostgreSQL's fast shutdown), or else by force."""
    for order in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(order)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_SECONDS)


def memory_has_room() -> bool:
    """Whether a server's folder may be in memory, beside the three others of a run.

    Each test has a copy of the template, which is 500 files: 35 ms there, and 60 to 370 ms on a disk.
    """
    try:
        shared = os.statvfs(MEMORY_FOLDER)
        available_kib = int(
            re.findall(r"^MemAvailable: +(\d+) kB$", MEMORY_INFO.read_text(), re.MULTILINE)[0]
        )
    except (OSError, ValueError):  # another system
        return False
    # The server's programs may have to be copied there, for another account to run them.
    is_executable = not shared.f_flag & os.ST_NOEXEC and os.access(MEMORY_FOLDER, os.W_OK | os.X_OK)
    return is_executable and min(shared.f_bavail * shared.f_frsize, int(available_kib) * 1024) >= ROOM_BYTES


def make_folder(account: Account | None, *, in_memory: bool = False) -> Path:
    """Make a folder for a server, short enough for a unix socket and owned by its account."""
    # Root's own TMPDIR may be closed to the account; /tmp is open to all.
    parent = MEMORY_FOLDER if in_memory else "/tmp" if account else None  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="webhookd-", dir=parent))
    restrict_to(folder, account)
    return folder


def _part_of_ports() -> Iterator[int]:
    parts = len(PORTS) // PORTS_OF_ONE
    first = PORTS.start + os.getpid() % parts * PORTS_OF_ONE
    # In any order: processes that have the same part are not to go through it side by side.
    return itertools.cycle(random.sample(range(first, first + PORTS_OF_ONE), PORTS_OF_ONE))


_own_ports = _part_of_ports()


def free_port() -> int:
    """Return a port on which nobody listens at this moment."""
    for port in _own_ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable: the ports go round")


def open_log(folder: Path) -> BinaryIO:
    """Open the server's log to append to it."""
    return (folder / "log").open("ab")


def log_tail(folder: Path) -> str:
    """Return the last lines of the server's log."""
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
