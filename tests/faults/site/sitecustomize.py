"""Runs inside a daemon under test, before it: ends the process at a named point, as a power cut would.

A file of the point's name in $TEST_FAILPOINTS_FOLDER arms it, once. Around the store's calls, from outside:
the daemon's own code has no such door.
"""

import functools
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from webhookd.deliveries import attempts, router, sagas

FOLDER = Path(os.environ["TEST_FAILPOINTS_FOLDER"])

Call = Callable[..., Coroutine[Any, Any, Any]]


def die_at(point: str) -> None:
    """End here, if the point is armed; who takes its file away dies of it."""
    try:
        (FOLDER / point).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before(point: str, call: Call) -> Call:
    """What led here has happened, and is not in the database."""

    @functools.wraps(call)
    async def around(*arguments: Any) -> Any:
        die_at(point)
        return await call(*arguments)

    return around


def dies_after(point: str, call: Call, did_something: Callable[[Any], object] = bool) -> Call:
    """It is committed, and nobody here knows."""

    @functools.wraps(call)
    async def around(*arguments: Any) -> Any:
        answer = await call(*arguments)
        if did_something(answer):
            die_at(point)
        return answer

    return around


router.route = dies_after("after_route", router.route, lambda routed: routed.sagas)
sagas.start = dies_after("after_start", sagas.start, lambda started: any(one.started for one in started))
attempts.claim = dies_after("after_claim", attempts.claim)
attempts.report = dies_before("before_report", dies_after("after_report", attempts.report))
sagas.apply_results = dies_after("after_apply", sagas.apply_results)
