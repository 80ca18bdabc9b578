"""Installs graphile-worker as its lock says, where there is npm. `make bench` calls it once."""

import os
import subprocess
import sys
from pathlib import Path

from tests.bench.node import GRAPHILE, program


def main() -> int:
    """Without npm, or if it fails, the peer is left out of the table, and the run goes on."""
    npm = program("npm")
    if npm is None:
        print("npm is not installed: graphile-worker is left out")
        return 0
    # npm starts `node`, which must be the one beside it.
    environment = os.environ | {"PATH": f"{Path(npm).parent}:{os.environ.get('PATH', '')}"}
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    if subprocess.run(command, cwd=GRAPHILE, env=environment, check=False).returncode != 0:
        print("npm failed: graphile-worker is left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
