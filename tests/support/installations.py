"""PostgreSQL binaries on this machine beside the embedded wheel's: where they are.

Reads PATH and Debian's folders; hands on an Installation for each.
"""

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from webhookd.embedded.installation import (
    PROGRAM_TIMEOUT_SECONDS,
    Installation,
    installation_in,
    wheel_installations,
)

DEBIAN_ROOT = Path("/usr/lib/postgresql")


def installation_near(major: int) -> Installation:
    """Return the preferred installation of a major, or of the nearest that this machine or the wheel has."""
    found = itertools.chain(local_installations(), wheel_installations())
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
