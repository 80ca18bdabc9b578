"""Supervision: a service is a coroutine that runs forever. If it fails, it alone restarts, after a delay."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from webhookd.core.errors import DatabaseBusy, DatabaseUnavailable
from webhookd.core.metrics import Metrics

log = logging.getLogger(__name__)

# Short, so that services resume within seconds of the database; random, so that they do not all reconnect at
# once.
FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 3.0
# A restarted service counts as running after this time: it may fail in its first step again.
PROBATION_SECONDS = 1.0
# After a run of this length the next failure starts again with the shortest delay.
GOOD_RUN_SECONDS = 30.0

State = Literal["running", "failing", "ended"]


@dataclass
class Service:
    """A service and its state, as shown in /status."""

    name: str
    run: Callable[[], Awaitable[None]] = field(repr=False)
    state: State = "running"
    restarts: int = 0
    last_error: str | None = None

    @property
    def healthy(self) -> bool:
        return self.state != "failing"


async def supervise(service: Service, metrics: Metrics) -> None:
    """Run the service until it returns. Cancellation passes through."""
    up = metrics.service_up.labels(service.name)
    restarts = metrics.service_restarts.labels(service.name)

    def enter(state: State) -> None:
        service.state = state
        up.set(state == "running")

    def note(retry: RetryCallState) -> None:
        error = retry.outcome.exception() if retry.outcome else None
        enter("failing")
        service.last_error = f"{type(error).__name__}: {error}"
        service.restarts += 1
        restarts.inc()
        if isinstance(error, DatabaseBusy):
            log.warning("%s: database busy; restarting: %s", service.name, error)
        elif isinstance(error, DatabaseUnavailable):
            # The pool logs once that the database is unavailable, and once that it is back.
            log.debug("%s is waiting for the database: %s", service.name, error)
        else:
            log.error("%s failed; restarting", service.name, exc_info=error)

    enter("running")
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(Exception),
        wait=wait_random_exponential(multiplier=FIRST_DELAY_SECONDS, max=LONGEST_DELAY_SECONDS),
        before_sleep=note,
    ):
        with attempt:
            loop = asyncio.get_running_loop()
            started = loop.time()
            proven = loop.call_later(PROBATION_SECONDS, enter, "running")
            try:
                await service.run()
            finally:
                proven.cancel()
                if loop.time() - started >= GOOD_RUN_SECONDS:
                    attempt.retry_state.attempt_number = 1
    enter("ended")
