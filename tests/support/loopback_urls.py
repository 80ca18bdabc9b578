"""Runs inside schemathesis, as its hooks: what it makes up stays on this machine, and waits for nothing."""

from typing import Any

import schemathesis
from hypothesis import strategies

PORTS = strategies.integers(min_value=1024, max_value=65535)
PATHS = strategies.text("abcdefghijklmnopqrstuvwxyz0123456789-._~/", max_size=40)

schemathesis.openapi.format("uri", strategies.builds("https://127.0.0.1:{}/{}".format, PORTS, PATHS))


@schemathesis.hook
def before_call(_: Any, case: Any, __: Any) -> None:
    """What could wait half a minute for a job waits a moment."""
    waits = case.body.get("wait_seconds") if isinstance(case.body, dict) else None
    if isinstance(waits, int | float) and 0 < waits <= 30:
        case.body["wait_seconds"] = 0.1
