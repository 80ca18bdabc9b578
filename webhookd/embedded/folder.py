"""The data folder of the embedded PostgreSQL: its contents, ownership and file locks.

Never deletes files that webhookd did not create.

pgdata/           the databases; owned by the account that runs PostgreSQL
run/              its socket; owned by the same account, because access to it gives full access to the data
programs/         a copy of PostgreSQL, if the account cannot run the wheel's
postgresql.log    output of initdb and the server; the older part is in postgresql.log.1
*.lock            starting, using and running the server: see server.py
certificate/      used by `webhookd listen`
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from webhookd.core.errors import ConfigurationError, EmbeddedError
from webhookd.embedded.installation import (
    PROGRAM_TIMEOUT_SECONDS,
    Account,
    Installation,
    can_run,
    owner_account,
    restrict_to,
    server_account,
    start_program,
    wheel_version,
)

PORT = 5432  # part of the socket's name; there is no TCP port
POLL_INTERVAL_SECONDS = 0.02
MAX_LOG_BYTES = 10 * 1024 * 1024
# The limit for a socket's path on macOS; Linux allows four bytes more.
_MAX_SOCKET_PATH_BYTES = 103
_KNOWN_ENTRIES = frozenset(
    (
        *("pgdata", "pgdata.new", "run", "programs", "certificate", "postgresql.log", "postgresql.log.1"),
        *("start.lock", "users.lock", "server.lock"),
        "lost+found",  # in an empty volume
    )
)
_INITIALIZE_TIMEOUT_SECONDS = 120
_INITDB_OPTIONS = (
    *("--username=postgres", "--auth-local=trust", "--auth-host=reject"),
    *("--encoding=UTF8", "--locale=C", "--data-checksums", "--no-instructions"),
)
# Since this version there is a builtin collation, which does not change with the system's C library, and a
# single sync for all files: on a busy machine syncing each file took 4.0 s of 6.8 s.
_BUILTIN_LOCALE_MAJOR = 17
_ERROR_LINE = re.compile(r"\b(?:FATAL|PANIC|ERROR|error):\s+(.*)")


@dataclass(frozen=True)
class Folder:
    """A checked data folder, and the account that runs PostgreSQL in it (None: the current user)."""

    path: Path
    account: Account | None

    @property
    def pgdata(self) -> Path:
        return self.path / "pgdata"

    @property
    def log(self) -> Path:
        return self.path / "postgresql.log"

    @property
    def major(self) -> int | None:
        """Major version of the databases; None before initdb."""
        if not self.pgdata.exists():
            return None
        version = (self.pgdata / "PG_VERSION").read_text(errors="replace").strip()
        if not version.isdecimal():
            raise EmbeddedError(f"{self.pgdata / 'PG_VERSION'} contains no version: the folder is damaged")
        return int(version)

    def socket_folder(self) -> Path:
        """Create the folder for the server's socket; only its account (and root) can enter it."""
        folder = self.path / "run"
        # In a DSN a comma separates hosts.
        if len(os.fsencode(socket_in(folder))) > _MAX_SOCKET_PATH_BYTES or "," in str(folder):
            name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
            folder = Path("/tmp") / f"webhookd-{name}"  # noqa: S108  private, and its owner is checked
        make_private_folder(folder, self.account)
        return folder

    def initialize(self, installation: Installation, lock: int) -> None:
        """Run initdb in a temporary folder, and rename it to pgdata when it is complete and on disk.

        initdb inherits the server's lock: if this process is killed, the next start waits until initdb ends.
        """
        log_position = self.log_size()
        new = self.path / "pgdata.new"
        if new.exists():
            shutil.rmtree(new)
        make_private_folder(new, self.account)
        arguments = [f"--pgdata={new}", *_INITDB_OPTIONS]
        if installation.major >= _BUILTIN_LOCALE_MAJOR:
            arguments += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
            arguments += ["--sync-method=syncfs"] * (sys.platform == "linux")
        with installation.with_shell_safe_path() as programs:
            process = self.start([programs.program("initdb"), *arguments], pass_fds=(lock,))
            try:
                code = process.wait(_INITIALIZE_TIMEOUT_SECONDS)
            except BaseException:
                process.terminate()
                process.wait(PROGRAM_TIMEOUT_SECONDS)
                raise
        if code != 0:
            raise EmbeddedError(f"initdb failed in {self.path}: {self.error_since(log_position)}")
        new.rename(self.pgdata)

    def start(self, command: list[str], pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a PostgreSQL program here, as the folder's account, with its output in the log."""
        # O_APPEND, so that the log can be truncated while the server writes to it.
        output = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            return start_program(command, self.account, self.path, output, pass_fds=pass_fds)
        finally:
            os.close(output)

    def runnable(self, installation: Installation) -> Installation:
        """Return the installation, or a copy that the account can run, kept until the wheel changes."""
        if can_run(installation, self.account):
            return installation
        programs = self.path / "programs"
        programs.mkdir(exist_ok=True)
        programs.chmod(0o755)
        copy = programs / f"{installation.version}-{wheel_version()}"
        for old in programs.iterdir():
            if old != copy:
                shutil.rmtree(old)
        return installation.copied_to(copy)

    def bound_log(self) -> None:
        """Rotate a large log by copy and truncate, because the server keeps the file open."""
        if self.log_size() > MAX_LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"), follow_symlinks=False)
            os.truncate(self.log, 0)

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def error_since(self, position: int) -> str:
        """Return the first error logged after a position, and the path of the log."""
        with self.log.open("rb") as log:
            log.seek(position)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [found[1] for line in lines if (found := _ERROR_LINE.search(line))]
        # The first, because later errors are its consequences.
        reason = errors[0] if errors else (lines or ["no output"])[-1]
        return f"{reason} (see {self.log})"


class Lock:
    """A file lock. The kernel releases it when every process that holds the descriptor has ended.

    A started program does not inherit it, unless its descriptor is passed on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NOFOLLOW: root may run in a folder that another user can write to.
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)  # a program that inherited it still holds the lock

    def share(self) -> None:
        """Take a shared lock; does not block if exclusive locks are only taken by `try_exclusive`."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Take an exclusive lock if the lock is free. A failed try may lose a shared lock."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def exclusive(self, timeout_seconds: float) -> Iterator[None]:
        """Hold an exclusive lock for the block; waits until the lock is free."""
        deadline = time.monotonic() + timeout_seconds
        while not self.try_exclusive():
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"another webhookd has been starting or stopping PostgreSQL for {timeout_seconds:.0f} s "
                    f"(it holds {self.path})"
                )
            time.sleep(POLL_INTERVAL_SECONDS)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


def open_folder(path: Path) -> Folder:
    """Check the data folder, and create it if it is missing. A folder with other contents is refused."""
    with embedded_errors(path):
        new = not path.exists()
        if new:
            _require_reachable(path, server_account())
            path.mkdir(parents=True, exist_ok=True)  # another instance may start at the same time
        _require_known_contents(path)
        if new:
            # The server's account must pass through, but cannot list the folder.
            path.chmod(0o711 if os.geteuid() == 0 else 0o700)
        account = _account_for(path / "pgdata")
        _require_reachable(path, account)
    return Folder(path, account)


def is_new(path: Path) -> bool:
    """Whether there is no database yet. Changes nothing."""
    with embedded_errors(path):
        return not (path / "pgdata").exists()


def socket_in(folder: Path) -> Path:
    """Return the path of the socket, which clients derive from folder and port."""
    return folder / f".s.PGSQL.{PORT}"


def make_private_folder(folder: Path, account: Account | None) -> None:
    """Create a folder that only the account can enter; an existing folder must already be private."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        owners = {os.geteuid(), account.user_id if account else os.geteuid()}
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
            raise EmbeddedError(f"{folder} is not private to the embedded server: remove it") from None
    restrict_to(folder, account)


@contextmanager
def embedded_errors(path: Path) -> Iterator[None]:
    """Turn errors of the file system and timeouts of programs into an EmbeddedError of one line."""
    try:
        yield
    except subprocess.TimeoutExpired as error:
        program = Path(error.cmd[0]).name
        raise EmbeddedError(
            f"the embedded database in {path} cannot be used: {program} timed out after {error.timeout:.0f} s"
        ) from error
    except OSError as error:
        where = error.filename or path
        raise EmbeddedError(
            f"the embedded database in {path} cannot be used: {where}: {error.strerror or error}"
        ) from error


def _require_known_contents(path: Path) -> None:
    if not path.is_dir():
        raise ConfigurationError(f"database.data_dir {path} is not a folder")
    if os.geteuid() == 0 and path.stat().st_uid != 0:
        # Its owner could place symbolic links that make root write or delete files elsewhere.
        raise ConfigurationError(
            f"database.data_dir {path} belongs to another user: run webhookd as that user, or chown it"
        )
    if not (path / "pgdata").exists():
        foreign = sorted({entry.name for entry in path.iterdir()} - _KNOWN_ENTRIES)
        if foreign:
            raise ConfigurationError(
                f"database.data_dir {path} contains other files ({foreign[0]}): use an empty or a new folder"
            )
    elif not (path / "pgdata" / "PG_VERSION").exists():
        raise ConfigurationError(f"database.data_dir {path} contains a pgdata that PostgreSQL did not create")


def _account_for(pgdata: Path) -> Account | None:
    if not pgdata.exists():
        return server_account()
    account = owner_account(pgdata)
    if account is not None and os.geteuid() != 0:
        raise EmbeddedError(
            f"the embedded database in {pgdata.parent} belongs to the user {account.name}: "
            "run webhookd as that user, or set [database] data_dir"
        )
    return account


def _require_reachable(path: Path, account: Account | None) -> None:
    """Check that the account can enter the existing part of a path.

    Tested as the account, because file modes do not show what ACLs and mount options allow.
    """
    if account is None:
        return
    steps = [str(step) for step in (*reversed(path.parents), path)]
    script = 'for step; do [ ! -e "$step" ] || [ -x "$step" ] || { printf %s "$step"; exit 1; }; done'
    process = start_program(["/bin/sh", "-c", script, "sh", *steps], account, Path("/"), subprocess.PIPE)
    blocked, _ = process.communicate(timeout=PROGRAM_TIMEOUT_SECONDS)
    if blocked:
        step = os.fsdecode(blocked)
        raise EmbeddedError(
            f"PostgreSQL runs as {account.name}, which cannot enter {step}: "
            f"allow it (chmod o+x {step}), or set [database] data_dir to another folder"
        )
