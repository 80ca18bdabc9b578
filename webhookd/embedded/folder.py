"""The data folder: what is in it, whose it is, and whether it is ours. Destroys nothing it did not make.

pgdata/           the databases, as the account that runs PostgreSQL
run/              its socket; the same account's, for whoever may enter it may do everything
programs/         a copy of PostgreSQL, where that account cannot reach the wheel's
postgresql.log    what initdb and the server said lately; what they said before is in postgresql.log.1
*.lock            who starts it, who uses it, whether it runs: see server.py
authority/        of `webhookd listen`
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from webhookd.core.errors import ConfigurationError, EmbeddedError
from webhookd.embedded.installation import (
    PROGRAM_TIMEOUT_SECONDS,
    Account,
    Installation,
    can_run,
    give,
    owner_account,
    server_account,
    start_program,
    wheel_version,
)

PORT = 5432  # of the socket's name; no port is listened on
LARGEST_LOG_BYTES = 10 * 1024 * 1024
# A socket's whole name, on macOS; Linux takes four more.
_LONGEST_SOCKET_NAME_BYTES = 103
_OURS = frozenset(
    (
        *("pgdata", "pgdata.new", "run", "programs", "authority", "postgresql.log", "postgresql.log.1"),
        *("start.lock", "users.lock", "server.lock"),
        "lost+found",  # an empty volume's
    )
)
_COMPLAINT = re.compile(r"\b(?:FATAL|PANIC|ERROR|error):\s+(.*)")


@dataclass(frozen=True)
class Folder:
    """A data folder that was looked at, and the account that runs PostgreSQL in it (None: ours)."""

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
        """What the databases are of; None before there are any."""
        if not self.pgdata.exists():
            return None
        version = (self.pgdata / "PG_VERSION").read_text(errors="replace").strip()
        if not version.isdecimal():
            raise EmbeddedError(f"{self.pgdata / 'PG_VERSION'} names no version: the folder is damaged")
        return int(version)

    def socket_folder(self) -> Path:
        """Where the server's socket is to be: made, and entered by its account alone (and root)."""
        folder = self.path / "run"
        # A client takes a comma for the end of a host.
        if len(os.fsencode(socket_in(folder))) > _LONGEST_SOCKET_NAME_BYTES or "," in str(folder):
            name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
            folder = Path("/tmp") / f"webhookd-{name}"  # noqa: S108  private, and its owner is checked
        make_private(folder, self.account)
        return folder

    def new_pgdata(self) -> Path:
        """An empty folder beside pgdata, to make the databases in: it takes the name when it is whole."""
        folder = self.path / "pgdata.new"
        if folder.exists():
            shutil.rmtree(folder)
        make_private(folder, self.account)
        return folder

    def start(self, command: list[str], pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a program of PostgreSQL here, as its account, with the log for what it says."""
        # Appending, so that the log can be cut while it is written.
        output = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            return start_program(command, self.account, self.path, output, pass_fds=pass_fds)
        finally:
            os.close(output)

    def runnable(self, installation: Installation) -> Installation:
        """The installation, or a copy here that the account can reach, kept until the wheel changes."""
        if can_run(installation, self.account):
            return installation
        programs = self.path / "programs"
        programs.mkdir(exist_ok=True)
        programs.chmod(0o755)
        copy = programs / f"{installation.version}-{wheel_version()}"
        for old in programs.iterdir():
            if old != copy:
                shutil.rmtree(old)
        return installation.runnable_by(self.account, copy)

    def bound_log(self) -> None:
        """Keep the last part of a log that has grown, and cut it: the server goes on writing there."""
        if self.log_size() > LARGEST_LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"), follow_symlinks=False)
            os.truncate(self.log, 0)

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def complaint_since(self, position: int) -> str:
        """What PostgreSQL complained of since, and where the rest of it is."""
        with self.log.open("rb") as log:
            log.seek(position)
            lines = log.read().decode(errors="replace").splitlines()
        complaints = [found[1] for line in lines if (found := _COMPLAINT.search(line))]
        # The first: those after it are its consequences.
        words = complaints[0] if complaints else (lines or ["it said nothing"])[-1]
        return f"{words} (more in {self.log})"


def opened(path: Path) -> Folder:
    """The data folder, made if it is missing. One that holds something else is refused."""
    with failures_of(path):
        new = not path.exists()
        if new:
            _require_reachable(path, server_account())
            path.mkdir(parents=True, exist_ok=True)  # another start may be as quick
        _require_ours(path)
        if new:
            # Another account must pass through, and reads nothing here.
            path.chmod(0o711 if os.geteuid() == 0 else 0o700)
        account = _account_for(path / "pgdata")
        _require_reachable(path, account)
    return Folder(path, account)


def is_new(path: Path) -> bool:
    """Whether no database was made there yet. Changes nothing."""
    with failures_of(path):
        return not (path / "pgdata").exists()


def socket_in(folder: Path) -> Path:
    """The socket's name, as every client makes it of folder and port."""
    return folder / f".s.PGSQL.{PORT}"


def make_private(folder: Path, account: Account | None) -> None:
    """A folder that only the account may enter; one that is there must be such a one."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        owners = {os.geteuid(), account.user_id if account else os.geteuid()}
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
            raise EmbeddedError(
                f"{folder} is not a folder for the embedded server alone: remove it"
            ) from None
    give(folder, account)


@contextmanager
def failures_of(path: Path) -> Iterator[None]:
    """What the file system or a program of PostgreSQL refuses, as one line."""
    try:
        yield
    except subprocess.TimeoutExpired as error:
        program = Path(error.cmd[0]).name
        raise EmbeddedError(
            f"the embedded database in {path} cannot be used: {program} did not end in {error.timeout:.0f} s"
        ) from error
    except OSError as error:
        where = error.filename or path
        raise EmbeddedError(
            f"the embedded database in {path} cannot be used: {where}: {error.strerror or error}"
        ) from error


def _require_ours(path: Path) -> None:
    if not path.is_dir():
        raise ConfigurationError(f"database.data_dir {path} is not a folder")
    if os.geteuid() == 0 and path.stat().st_uid != 0:
        # Its owner could put links in our way, and have root write and remove what is elsewhere.
        raise ConfigurationError(
            f"database.data_dir {path} belongs to another user: run webhookd as that user, or make it root's"
        )
    if not (path / "pgdata").exists():
        foreign = sorted({entry.name for entry in path.iterdir()} - _OURS)
        if foreign:
            raise ConfigurationError(
                f"database.data_dir {path} holds something else ({foreign[0]}): name an empty folder, or none"
            )
    elif not (path / "pgdata" / "PG_VERSION").exists():
        raise ConfigurationError(f"database.data_dir {path} has a pgdata that is not PostgreSQL's")


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
    """As far as it is there. Asked as the account: modes alone do not tell what lists and mounts allow."""
    if account is None:
        return
    way = [str(step) for step in (*reversed(path.parents), path)]
    script = 'for step; do [ ! -e "$step" ] || [ -x "$step" ] || { printf %s "$step"; exit 1; }; done'
    process = start_program(["/bin/sh", "-c", script, "sh", *way], account, Path("/"), subprocess.PIPE)
    closed, _ = process.communicate(timeout=PROGRAM_TIMEOUT_SECONDS)
    if closed:
        step = os.fsdecode(closed)
        raise EmbeddedError(
            f"PostgreSQL runs as {account.name}, which cannot enter {step}: "
            f"allow it (chmod o+x {step}), or set [database] data_dir to a folder elsewhere"
        )
