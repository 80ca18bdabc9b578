"""Hooks for schemathesis: generated URLs stay on this machine, and generated waits are short."""

from typing import Any

import schemathesis
from hypothesis import strategies

PORTS = strategies.integers(min_value=1024, max_value=65535)
PATHS = strategies.text("abcdefghijklmnopqrstuvwxyz0123456789-._~/", max_size=40)

schemathesis.openapi.format("uri", strategies.builds("https://127.0.0.1:{}/{}".format, PORTS, PATHS))


@schemathesis.hook
def before_call(_: Any, case: Any, __: Any) -> None:
    """Shorten waits of up to 30 s for a job to 0.1 s."""
    waits = case.body.get("wait_seconds") if isinstance(case.body, dict) else None
    if isinstance(waits, int | float) and 0 < waits <= 30:
        case.body["wait_seconds"] = 0.1
