"""Python and this checkout for a user who cannot read ours (as under /root): linked, or else copied."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from webhookd.embedded.installation import Account

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Python:
    """An interpreter that can import webhookd, and its environment."""

    executable: Path
    environment: dict[str, str]

    def works_for(self, account: Account) -> bool:
        """Whether the account can import everything."""
        command = [str(self.executable), "-c", "import webhookd.daemon.daemon"]
        try:
            ended = subprocess.run(
                command,
                user=account.user_id,
                group=account.group_id,
                extra_groups=[],
                env=self.environment,
                cwd="/",
                stderr=subprocess.DEVNULL,
                check=False,
            )
        except PermissionError:
            return False
        return ended.returncode == 0


def python_for(account: Account, folder: Path) -> Python:
    """Return our interpreter if the account can use it, else make one in a folder the account can enter."""
    ours = Python(Path(sys.executable), {"PYTHONPATH": str(ROOT)})
    if ours.works_for(account):
        return ours
    packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    copied = Python(
        _copy_interpreter(folder),
        {
            "PYTHONHOME": str(folder),
            "PYTHONPATH": f"{ROOT}:{packages}",
            "LD_LIBRARY_PATH": str(folder / "lib"),
        },
    )
    if copied.works_for(account):
        return copied
    copy_tree(packages, folder / "packages")
    for part in ("webhookd", "schema"):
        copy_tree(ROOT / part, folder / "checkout" / part)
    copied.environment["PYTHONPATH"] = f"{folder / 'checkout'}:{folder / 'packages'}"
    return copied


def _copy_interpreter(folder: Path) -> Path:
    """Copy the interpreter with its standard library, but without installed packages."""
    base = Path(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for part in ("bin", "lib"):
        (folder / part).mkdir()
    for library in (base / "lib").glob("libpython*.so*"):
        link(library, folder / "lib" / library.name)
    not_needed = shutil.ignore_patterns("site-packages", "test")
    shutil.copytree(base / "lib" / name, folder / "lib" / name, copy_function=link, ignore=not_needed)
    return link(base / "bin" / name, folder / "bin" / name)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a tree with hard links where possible."""
    shutil.copytree(source, target, copy_function=link)


def link(source: str | Path, target: str | Path) -> Path:
    """Make a hard link to a file, or a copy on another file system."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:
        shutil.copy2(source, target)
    return Path(target)
