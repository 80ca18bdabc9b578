"""After a reload lowered `retry.max_attempts`: dead-letters waiting deliveries at the new limit."""

import asyncio
from typing import Final

from webhookd.context import Context
from webhookd.deliveries import sagas
from webhookd.deliveries.sagas import record


class LimitSweeper:
    """Sweeps on request, until it is cancelled."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requested: Final = asyncio.Event()

    def request(self) -> None:
        self._requested.set()

    async def run(self) -> None:
        """Sweep after each request. A sweep that fails is repeated."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                await self.sweep()
            except BaseException:
                self._requested.set()
                raise

    async def sweep(self) -> int:
        """Dead-letter waiting deliveries that have reached the limit, in keyset batches; returns how many."""
        after: int | None = 0
        dead_lettered = 0
        while after is not None:
            settings = self._context.settings()  # read again: a reload may raise the limit meanwhile
            async with self._context.pool.connection() as connection:
                swept = await sagas.dead_letter_exhausted(
                    connection, after, settings.orchestration.batch_size, settings.retry.max_attempts
                )
            record(swept.dead_lettered, self._context.metrics)
            dead_lettered += len(swept.dead_lettered)
            after = swept.last_saga_id
        return dead_lettered
