"""The sweep after a reload that lowered the limit of attempts: waiting sagas that have reached it end now."""

import asyncio
from collections.abc import Callable
from typing import Final

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.deliveries import sagas
from webhookd.deliveries.transitions import record


class Sweeper:
    """Sweeps when told to, until it is cancelled."""

    def __init__(self, pool: Pool, metrics: Metrics, settings: Callable[[], Settings]) -> None:
        self._pool = pool
        self._metrics = metrics
        self._settings = settings
        self._lowered: Final = asyncio.Event()

    def limit_lowered(self) -> None:
        """Have a sweep made."""
        self._lowered.set()

    async def run(self) -> None:
        """Sweep whenever the limit was lowered; one that fails is made again."""
        while True:
            await self._lowered.wait()
            self._lowered.clear()
            try:
                await self.sweep()
            except BaseException:
                self._lowered.set()
                raise

    async def sweep(self) -> int:
        """Dead-letter every waiting saga that has reached the limit."""
        after: int | None = 0
        buried = 0
        while after is not None:
            settings = self._settings()  # of now: the limit may be put back meanwhile
            async with self._pool.connection() as connection:
                swept = await sagas.dead_letter_exhausted(
                    connection, after, settings.orchestration.batch_size, settings.retry.max_attempts
                )
            record(swept.dead_lettered, self._metrics)
            buried += len(swept.dead_lettered)
            after = swept.last_saga_id
        return buried
