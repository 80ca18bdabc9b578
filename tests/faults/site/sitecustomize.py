"""Failpoints, loaded into a daemon under test: kill the process with SIGKILL at a named point.

A file with the point's name in $TEST_FAILPOINTS_FOLDER arms the point once. The functions are patched from
outside: the daemon's own code has no failpoints.
"""

import functools
import math
import os
import signal
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

from webhookd.deliveries import attempts, router, sagas, short_path, worker

FOLDER = Path(os.environ["TEST_FAILPOINTS_FOLDER"])

Call = Callable[..., Coroutine[Any, Any, Any]]


def die_at(point: str) -> None:
    """Kill this process if the point is armed; removing the file disarms it."""
    try:
        (FOLDER / point).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before(point: str, call: Call) -> Call:
    """Die before the call: its work is not in the database."""

    @functools.wraps(call)
    async def around(*arguments: Any, **options: Any) -> Any:
        die_at(point)
        return await call(*arguments, **options)

    return around


def dies_after(point: str, call: Call, did_something: Callable[[Any], object] = bool) -> Call:
    """Die after the call: its work is committed, but this process does not use the result."""

    @functools.wraps(call)
    async def around(*arguments: Any, **options: Any) -> Any:
        result = await call(*arguments, **options)
        if did_something(result):
            die_at(point)
        return result

    return around


def every_third_in_two_steps(complete: Call) -> Call:
    """Complete nothing in every third call, so that faults also meet the two steps of a success."""
    calls = count()

    @functools.wraps(complete)
    async def around(*arguments: Any) -> Any:
        return await complete(*arguments) if next(calls) % 3 else {}

    return around


router.route = dies_after("after_route", router.route, lambda routed: routed.sagas)
sagas.start = dies_after("after_start", sagas.start, lambda started: any(share.started for share in started))
attempts.claim = dies_after("after_claim", attempts.claim)
attempts.report = dies_before("before_report", dies_after("after_report", attempts.report))
sagas.complete = every_third_in_two_steps(
    dies_before("before_complete", dies_after("after_complete", sagas.complete))
)
# Under load the stages do the work, and the short path would be closed for up to a minute at a time.
short_path.SLOW_SECONDS = math.inf
short_path.REST_FACTOR = 0
worker.Worker.may_claim = property(lambda self: not self.claiming.locked())  # type: ignore[assignment,method-assign]
short_path.route = dies_after("after_short_path", short_path.route, lambda done: done.claims)
short_path.publish = dies_after("after_short_path", short_path.publish, lambda result: result[1].claims)
sagas.apply_results = dies_after("after_apply", sagas.apply_results)
