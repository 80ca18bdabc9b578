"""Installs graphile-worker as its lock says, where there is npm. `make bench` calls it once."""

import subprocess
import sys

from tests.bench.node import GRAPHILE, npm_command

# It has no scripts that run at installation, and needs none.
OPTIONS = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
TIMEOUT_SECONDS = 300


def main() -> int:
    """Without npm, or if it fails, the peer is left out of the table, and the run goes on."""
    npm = npm_command()
    if npm is None:
        print("npm is not installed: graphile-worker is left out")
        return 0
    installed = subprocess.run([*npm, *OPTIONS], cwd=GRAPHILE, check=False, timeout=TIMEOUT_SECONDS)
    if installed.returncode != 0:
        print("npm failed: graphile-worker is left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
