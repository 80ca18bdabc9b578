"""Finds PostgreSQL installations on this machine, besides the embedded wheel.

Reads PATH and Debian's folders; yields an Installation for each.
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
    """Return the preferred installation of a major version, or of the nearest one available."""
    found = itertools.chain(local_installations(), wheel_installations())
    return min(found, key=lambda installation: abs(installation.major - major))


def installation_of(major: int) -> Installation:
    """Return the preferred installation of a major version; raises LookupError if there is none."""
    found = list(itertools.chain(local_installations(), wheel_installations()))
    for installation in found:
        if installation.major == major:
            return installation
    versions = ", ".join(installation.version for installation in found) or "none"
    raise LookupError(f"PostgreSQL {major} was not found; found: {versions}")


def local_installations() -> Iterator[Installation]:
    """Yield the installations of this machine, those in PATH first."""
    seen: set[Path] = set()
    for folder in local_bin_folders():
        if folder not in seen:
            seen.add(folder)
            yield from installation_in(folder, base=folder.parent, parts=(folder.parent,))


def local_bin_folders() -> Iterator[Path]:
    """Yield each folder that may contain server programs, with symbolic links resolved."""
    for name in ("pg_ctl", "initdb"):
        if found := shutil.which(name):
            yield Path(found).resolve().parent
    if found := shutil.which("pg_config"):
        ended = subprocess.run(
            [found, "--bindir"],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROGRAM_TIMEOUT_SECONDS,
        )
        if ended.returncode == 0:
            yield Path(ended.stdout.strip()).resolve()
    for folder in sorted(DEBIAN_ROOT.glob("*/bin")):
        yield folder.resolve()
