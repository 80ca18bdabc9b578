"""Runs the embedded PostgreSQL: the first instance starts it, the last instance stops it.

There are three file locks. The kernel releases each when its holders end, even after SIGKILL:

- `start.lock`: exclusive, while an instance checks, starts or stops the server;
- `users.lock`: shared by every instance while it runs; taken only under start.lock;
- `server.lock`: inherited by the server, so whether it runs is known without trusting a process id.

Concurrent starts: the second instance waits for start.lock, finds server.lock taken, and joins the server.
Concurrent start and stop: the stopping instance holds start.lock until the server has ended; the starting
instance waits and starts it again. If the starting instance was first, its share of users.lock keeps the
server running.
Instance killed with SIGKILL, even during a start: the server keeps running, and the next instance joins it.
Server killed: `ensure_running`, which every instance calls, or the next start, starts it again when all of
its processes have ended.
Stale postmaster.pid from before a reboot, with the id of another process: removed, unless the working folder
of that process is our pgdata.

The server listens on a Unix socket only, in a folder that only its account can enter, without passwords.
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
from webhookd.embedded.folder import (
    POLL_INTERVAL_SECONDS,
    PORT,
    Folder,
    Lock,
    embedded_errors,
    open_folder,
    socket_in,
)
from webhookd.embedded.installation import (
    PROGRAM_TIMEOUT_SECONDS,
    Installation,
    setting_arguments,
    start_program,
    wheel_installation,
)

log = logging.getLogger(__name__)

# A start includes crash recovery.
START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 60.0
# On the command line of each start, to override the configuration files: socket, durability, logging.
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
    # A statement may contain a payload or a secret.
    "log_min_error_statement": "panic",
    "jit": "off",
}
# webhookd_app is created before the migrations, which then keep it: the login needs no grant after them.
CREATE_LOGIN = """
do $$
begin
    if to_regrole('webhookd_app') is null then
        create role webhookd_app nologin;
    end if;
    if to_regrole('webhookd') is null then
        create role webhookd login;
    end if;
    grant webhookd_app to webhookd;
end
$$
"""
_MAX_PID_FILE_BYTES = 65536
# Servers left running for other instances: Python warns if a Popen object of a running process is deleted.
_left_running: list[subprocess.Popen[bytes]] = []


@contextmanager
def running(data_dir: Path) -> Iterator["EmbeddedServer"]:
    """Run the folder's server for the block: create, start or join it."""
    folder = open_folder(data_dir)
    with embedded_errors(data_dir):
        start, users = Lock(data_dir / "start.lock"), Lock(data_dir / "users.lock")
    with start, users:
        server = EmbeddedServer(folder, start)
        try:
            with start.exclusive(START_TIMEOUT_SECONDS):
                users.share()
                with embedded_errors(data_dir):
                    server.start_or_join()
            yield server
        finally:
            _leave(server, start, users)


def _leave(server: "EmbeddedServer", start: Lock, users: Lock) -> None:
    """Stop the server if no other instance uses it."""
    try:
        with start.exclusive(STOP_TIMEOUT_SECONDS):
            if users.try_exclusive():
                server.stop()
            else:
                server.leave_running()
    except (EmbeddedError, OSError) as error:
        # Nothing is lost: the next instance joins the server, or starts it again.
        log.warning("could not stop PostgreSQL in %s: %s", server.folder, error)


class EmbeddedServer:
    """The server of one folder, from the view of one instance."""

    def __init__(self, folder: Folder, start: Lock) -> None:
        self.folder: Final = folder.path
        self.version = ""
        self.started = False  # by this instance; otherwise joined
        self._folder = folder
        self._start = start
        self._socket_folder = folder.path
        self._process: subprocess.Popen[bytes] | None = None
        self._shutting_down = threading.Event()

    @property
    def dsn(self) -> str:
        """For the daemon: a login that is a member of webhookd_app only."""
        return self._dsn("webhookd")

    @property
    def admin_dsn(self) -> str:
        """For migrations and psql: a superuser."""
        return self._dsn("postgres")

    def ensure_running(self) -> None:
        """Start the server again if it has ended, and rotate its log. Called periodically."""
        with embedded_errors(self.folder):
            if not self._start.try_exclusive():
                return  # another instance is starting or stopping it
            try:
                self._folder.bound_log()
                with Lock(self.folder / "server.lock") as lock:
                    ended = lock.try_exclusive()
                if ended:
                    log.warning("PostgreSQL in %s has ended; restarting", self.folder)
                    self.start_or_join()
            finally:
                self._start.release()

    def shut_down(self) -> None:
        """Make `ensure_running`, in another thread, stop waiting for a server that is still recovering."""
        self._shutting_down.set()

    # The caller holds start.lock.

    def start_or_join(self) -> None:
        """Start the server, or wait until the running one is ready; then ensure its database and login."""
        installation = self._folder.runnable(wheel_installation(self._folder.major))
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            with Lock(self.folder / "server.lock") as lock:
                if lock.try_exclusive():
                    self._launch(installation, lock.descriptor)
                    self.started = True
                    break
            if self._is_ready():
                break
            if self._shutting_down.is_set() or time.monotonic() > deadline:
                raise EmbeddedError(
                    f"PostgreSQL is running, but did not become ready in time (see {self._folder.log})"
                )
            time.sleep(POLL_INTERVAL_SECONDS)
        self._ensure_login(installation)

    def stop(self) -> None:
        """Disconnect all clients, and wait until every process of the server has ended."""
        for order in (signal.SIGINT, signal.SIGQUIT):
            if self._ended_after(order):
                break
        else:
            raise EmbeddedError("it does not stop")
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_SECONDS)
        if not self._socket_folder.is_relative_to(self.folder):
            with suppress(OSError):  # clean up outside of the data folder, if possible
                self._socket_folder.rmdir()

    def leave_running(self) -> None:
        """Leave the server to the other instances that use it."""
        if self._process is not None:
            _left_running.append(self._process)

    # Internal.

    def _dsn(self, user: str) -> str:
        # Without a port, the client would use its PGPORT.
        return f"postgresql://{user}@/webhookd?host={quote(os.fsencode(self._socket_folder))}&port={PORT}"

    def _launch(self, installation: Installation, lock: int) -> None:
        folder = self._folder
        folder.bound_log()
        log_position = folder.log_size()
        if folder.major is None:
            folder.initialize(installation, lock)
        self._remove_stale_pid_file()
        self._socket_folder = folder.socket_folder()
        quoted = str(self._socket_folder).replace('"', '""')
        settings = SETTINGS | {"unix_socket_directories": f'"{quoted}"'}
        command = [installation.program("postgres"), "-D", str(folder.pgdata), *setting_arguments(settings)]
        process = folder.start(command, pass_fds=(lock,))
        self._process = process
        _wait(
            lambda: process.poll() is not None or self._is_ready() or self._shutting_down.is_set(),
            START_TIMEOUT_SECONDS,
        )
        if process.poll() is None and not self._is_ready():
            process.terminate()
            raise EmbeddedError(
                f"PostgreSQL did not become ready in time: {folder.error_since(log_position)}"
            )
        if process.poll() is not None:
            raise EmbeddedError(f"PostgreSQL did not start: {folder.error_since(log_position)}")

    def _ensure_login(self, installation: Installation) -> None:
        """Create the database and the daemon's login if they are missing."""
        count = "select count(*) from pg_database where datname = 'webhookd'"
        [databases, version] = self._psql(installation, CREATE_LOGIN, count, "show server_version")
        if databases == "0":
            self._psql(installation, "create database webhookd")
        self.version = version.split()[0]

    def _psql(self, installation: Installation, *statements: str) -> list[str]:
        command = [
            *(installation.program("psql"), "--no-psqlrc", "--quiet", "--tuples-only", "--no-align"),
            *("--set=ON_ERROR_STOP=1", f"--host={self._socket_folder}", f"--port={PORT}"),
            *("--username=postgres", "--dbname=postgres", "--no-password"),
            *(f"--command={statement}" for statement in statements),
        ]
        process = start_program(command, self._folder.account, self.folder, subprocess.PIPE)
        try:
            output, errors = process.communicate(timeout=PROGRAM_TIMEOUT_SECONDS)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode != 0:
            reason = errors.decode(errors="replace").split("\n")[0] or "psql failed"
            raise EmbeddedError(f"PostgreSQL in {self.folder} cannot be used: {reason}")
        return output.decode().splitlines()

    def _remove_stale_pid_file(self) -> None:
        """Remove a pid file of an unrelated process; refuse a server that was started by hand."""
        process_id = self._process_id()
        if process_id is None:
            return
        if _works_in(process_id, self._folder.pgdata):
            raise EmbeddedError(
                f"a PostgreSQL that webhookd did not start is running in {self._folder.pgdata}: "
                f"stop it first (process {process_id})"
            )
        (self._folder.pgdata / "postmaster.pid").unlink()

    def _pid_file(self) -> list[str]:
        """Lines written so far: process id, folder, start, port, socket folder, address, memory, state."""
        try:
            # The account may have replaced it: follow no symbolic link, and do not block on a FIFO.
            file = os.open(
                self._folder.pgdata / "postmaster.pid", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        except FileNotFoundError:
            return []
        with os.fdopen(file, errors="replace") as lines:
            return lines.read(_MAX_PID_FILE_BYTES).splitlines()

    def _process_id(self) -> int | None:
        lines = self._pid_file()
        return int(lines[0]) if lines and lines[0].isdecimal() else None

    def _is_ready(self) -> bool:
        """Whether the pid file says "ready" and the socket accepts: a killed server leaves the file."""
        match self._pid_file():
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
        """Send the signal and wait for all processes to end. A server that is just starting gets it later."""
        signalled = False

        def ended() -> bool:
            nonlocal signalled
            with Lock(self.folder / "server.lock") as lock:
                if lock.try_exclusive():
                    return True
            process_id = self._process_id()
            # Root may signal any process, and the account wrote the id: check that it is the server.
            if not signalled and process_id is not None and _works_in(process_id, self._folder.pgdata):
                with suppress(ProcessLookupError):
                    os.kill(process_id, order)
                signalled = True
            return False

        return _wait(ended, STOP_TIMEOUT_SECONDS)


def _wait(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL_SECONDS)
    return True


def _works_in(process_id: int, folder: Path) -> bool:
    """Whether this is the working folder of a process, as pgdata is of its server."""
    if Path("/proc/self").exists():
        with suppress(OSError):  # it has ended, or belongs to another account, so it is not our server
            return Path(f"/proc/{process_id}/cwd").readlink() == folder.resolve()
        return False
    listed = subprocess.run(  # noqa: S603  known arguments
        ["/bin/ps", "-o", "command=", "-p", str(process_id)], capture_output=True, text=True, check=False
    )
    return str(folder) in listed.stdout
