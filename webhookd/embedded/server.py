"""A PostgreSQL in the data folder: started by the first instance that needs it, stopped by the last to leave.

Three locks, each let go by the kernel when its holders end, however they end:

- `start.lock`, held alone while looking whether the server runs, starting it, or stopping it;
- `users.lock`, shared by every instance from its start to its end, and taken only under start.lock;
- `server.lock`, inherited by the server itself: whether it runs is known without trusting a process id.

Start and start: the second waits for start.lock, finds server.lock taken, and joins.
Start and stop: who leaves holds start.lock until the server has ended; who comes waits, and starts it anew.
Or who comes was first: then its share of users.lock keeps the server.
An instance killed -9, also in the middle of a start: the server runs on. The next joins it, and may be last.
The server killed: `keep`, which every instance calls, or the next start, begins it anew when none of its
processes is left.
A postmaster.pid from before a reboot, whose number another process has now: removed, unless that process
stands in our folder.

It listens on a socket alone, in a folder that only its account can enter; there everybody is trusted.
"""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

from webhookd.core.errors import EmbeddedError
from webhookd.embedded.databases import make_databases, see_to_login
from webhookd.embedded.folder import PORT, Folder, failures_of, opened, socket_in
from webhookd.embedded.installation import Installation, setting_arguments, wheel_installation
from webhookd.embedded.locks import POLL_INTERVAL_SECONDS, Lock

log = logging.getLogger(__name__)

# Recovery after a crash is part of a start.
START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 60.0
# Said at each start, over whatever the folder's own files say: where it is, and that a commit is durable.
SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "off",
    "log_destination": "stderr",
    # A statement's text may hold a payload or a secret.
    "log_min_error_statement": "panic",
    "jit": "off",
}
_LONGEST_PROCESS_FILE = 65536
# Left running for others, by an instance of ours that goes on as a process: Python would warn of losing them.
_left_running: list[subprocess.Popen[bytes]] = []


@contextmanager
def running(data_dir: Path) -> Iterator["EmbeddedServer"]:
    """The server of the folder, for the length of the block: made, started or joined."""
    folder = opened(data_dir)
    with failures_of(data_dir):
        start, users = Lock(data_dir / "start.lock"), Lock(data_dir / "users.lock")
    with start, users:
        server = EmbeddedServer(folder, start)
        try:
            with start.alone(START_TIMEOUT_SECONDS):
                users.share()
                with failures_of(data_dir):
                    server.bring_up()
            yield server
        finally:
            _leave(server, start, users)


def _leave(server: "EmbeddedServer", start: Lock, users: Lock) -> None:
    """Who is alone now stops it."""
    try:
        with start.alone(STOP_TIMEOUT_SECONDS):
            if users.try_alone():
                server.stop()
            else:
                server.leave_running()
    except (EmbeddedError, OSError) as error:
        # Nothing is lost: the next instance joins it, or finds it stopped.
        log.warning("PostgreSQL in %s was left as it is: %s", server.folder, error)


class EmbeddedServer:
    """The server of one folder, as one instance sees it."""

    def __init__(self, folder: Folder, start: Lock) -> None:
        self.folder: Final = folder.path
        self.version = ""
        self.started = False  # by us; otherwise joined
        self._folder = folder
        self._start = start
        self._socket_folder = folder.path
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()

    @property
    def dsn(self) -> str:
        """For the daemon: a login that has nothing but webhookd_app."""
        return self._dsn("webhookd")

    @property
    def admin_dsn(self) -> str:
        """For migrating, and to look inside: a superuser."""
        return self._dsn("postgres")

    def keep(self) -> None:
        """Start it again if it has ended, and keep its log within bounds: to be called now and then."""
        with failures_of(self.folder):
            if not self._start.try_alone():
                return  # another instance is at it
            try:
                self._folder.bound_log()
                with Lock(self.folder / "server.lock") as lock:
                    ended = lock.try_alone()
                if ended:
                    log.warning("PostgreSQL in %s has ended, and is started again", self.folder)
                    self.bring_up()
            finally:
                self._start.release()

    def end_keeping(self) -> None:
        """Have `keep`, in another thread, not wait for a server that is still recovering."""
        self._ending.set()

    # Called by who holds start.lock.

    def bring_up(self) -> None:
        """Start it, or wait until the one that runs answers; then see to database and login."""
        installation = self._folder.runnable(wheel_installation(self._folder.major))
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            with Lock(self.folder / "server.lock") as lock:
                if lock.try_alone():
                    self._launch(installation, lock.descriptor)
                    self.started = True
                    break
            if self._is_ready():
                break
            if self._ending.is_set() or time.monotonic() > deadline:
                raise EmbeddedError(f"PostgreSQL runs, but is not ready in time (see {self._folder.log})")
            time.sleep(POLL_INTERVAL_SECONDS)
        self.version = see_to_login(self._folder, installation, self._socket_folder)

    def stop(self) -> None:
        """Cut off who is still connected, and wait until every process of it has ended."""
        for order in (signal.SIGINT, signal.SIGQUIT):
            if self._ended_after(order):
                break
        else:
            raise EmbeddedError("it does not stop")
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_SECONDS)
        if not self._socket_folder.is_relative_to(self.folder):
            with suppress(OSError):  # outside of our folder nothing is left, if it can be helped
                self._socket_folder.rmdir()

    def leave_running(self) -> None:
        """For the others who use it."""
        if self._process is not None:
            _left_running.append(self._process)

    # Inside.

    def _dsn(self, user: str) -> str:
        # The port is named, or PGPORT of whoever connects would be taken.
        return f"postgresql://{user}@/webhookd?host={quote(os.fsencode(self._socket_folder))}&port={PORT}"

    def _launch(self, installation: Installation, lock: int) -> None:
        folder = self._folder
        folder.bound_log()
        said = folder.log_size()
        if folder.major is None:
            make_databases(folder, installation, lock)
        self._forget_stale_process()
        self._socket_folder = folder.socket_folder()
        quoted = str(self._socket_folder).replace('"', '""')
        settings = SETTINGS | {"unix_socket_directories": f'"{quoted}"'}
        command = [installation.program("postgres"), "-D", str(folder.pgdata), *setting_arguments(settings)]
        process = folder.start(command, pass_fds=(lock,))
        self._process = process
        _wait(
            lambda: process.poll() is not None or self._is_ready() or self._ending.is_set(),
            START_TIMEOUT_SECONDS,
        )
        if process.poll() is None and not self._is_ready():
            process.terminate()
            raise EmbeddedError(f"PostgreSQL is not ready in time: {folder.complaint_since(said)}")
        if process.poll() is not None:
            raise EmbeddedError(f"PostgreSQL does not start: {folder.complaint_since(said)}")

    def _forget_stale_process(self) -> None:
        """Nothing of ours runs: a process with postmaster.pid's number is another, or started by hand."""
        process_id = self._process_id()
        if process_id is None:
            return
        if _is_at_work_in(process_id, self._folder.pgdata):
            raise EmbeddedError(
                f"a PostgreSQL that webhookd did not start runs in {self._folder.pgdata}: "
                f"stop it first (process {process_id})"
            )
        (self._folder.pgdata / "postmaster.pid").unlink()

    def _process_file(self) -> list[str]:
        """Process id, folder, start, port, socket's folder, address, memory, state: as much as is written."""
        try:
            # The account's, who may have put anything there: neither followed nor waited for.
            file = os.open(
                self._folder.pgdata / "postmaster.pid", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except FileNotFoundError:
            return []
        with os.fdopen(file, errors="replace") as lines:
            return lines.read(_LONGEST_PROCESS_FILE).splitlines()

    def _process_id(self) -> int | None:
        lines = self._process_file()
        return int(lines[0]) if lines and lines[0].isdecimal() else None

    def _is_ready(self) -> bool:
        """Whether it says so, and listens: what it said stays in the file if it is killed."""
        match self._process_file():
            case [_, _, _, _, socket_folder, _, _, state, *_] if state.strip() == "ready":
                self._socket_folder = Path(socket_folder)
            case _:
                return False
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(socket_in(self._socket_folder)))
            except OSError:
                return False
        return True

    def _ended_after(self, order: signal.Signals) -> bool:
        """Whether every process of it ends in time, once told to. One that is just starting is told later."""
        told = False

        def ended() -> bool:
            nonlocal told
            with Lock(self.folder / "server.lock") as lock:
                if lock.try_alone():
                    return True
            process_id = self._process_id()
            # Root may signal everybody, and the number is what the account wrote: it must be a server's.
            if not told and process_id is not None and _is_at_work_in(process_id, self._folder.pgdata):
                with suppress(ProcessLookupError):
                    os.kill(process_id, order)
                told = True
            return False

        return _wait(ended, STOP_TIMEOUT_SECONDS)


def _wait(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL_SECONDS)
    return True


def _is_at_work_in(process_id: int, folder: Path) -> bool:
    """Whether a process stands in this folder, as a server does in its own."""
    if Path("/proc/self").exists():
        with suppress(OSError):  # it has ended, or is not of our account: then it is no server of ours
            return Path(f"/proc/{process_id}/cwd").readlink() == folder.resolve()
        return False
    told = subprocess.run(  # noqa: S603  its arguments are ours
        ["/bin/ps", "-o", "command=", "-p", str(process_id)], capture_output=True, text=True, check=False
    )
    return str(folder) in told.stdout
