"""A service is a coroutine that should run for ever. One that fails is begun anew, alone, after a delay."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from webhookd.model.errors import DatabaseUnavailable
from webhookd.observe.metrics import Metrics

log = logging.getLogger(__name__)

# Short, so that the database's return is used within seconds; random, so that not all come back at once.
FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 3.0

State = Literal["starting", "running", "waiting", "ended"]


@dataclass
class Service:
    """A service and how it does, as /status shows it."""

    name: str
    run: Callable[[], Awaitable[None]] = field(repr=False)
    state: State = "starting"
    restarts: int = 0
    last_error: str | None = None

    @property
    def healthy(self) -> bool:
        return self.state != "waiting"


async def supervise(service: Service, metrics: Metrics) -> None:
    """Run the service until it ends by itself. Cancellation passes through."""
    up = metrics.service_up.labels(service.name)

    def note(retry: RetryCallState) -> None:
        error = retry.outcome.exception() if retry.outcome else None
        service.state = "waiting"
        service.last_error = f"{type(error).__name__}: {error}"
        service.restarts += 1
        up.set(0)
        metrics.service_restarts.labels(service.name).inc()
        if isinstance(error, DatabaseUnavailable):
            log.warning("%s waits for the database: %s", service.name, error)
        else:
            log.error("%s failed and is begun anew", service.name, exc_info=error)

    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(Exception),
        wait=wait_random_exponential(multiplier=FIRST_DELAY_SECONDS, max=LONGEST_DELAY_SECONDS),
        before_sleep=note,
    ):
        with attempt:
            service.state = "running"
            up.set(1)
            await service.run()
    service.state = "ended"
    up.set(0)
