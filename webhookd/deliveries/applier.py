"""Results to sagas: applies what workers reported, each once.

Wakes on RESULTS; rings SAGAS, for a result frees a place in its subscription's window. Beside the starter and
not in turns with it: on a busy loop each would wait for the other's round trip, and the workers for both.
"""

import asyncio
from collections.abc import Callable

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.deliveries import sagas
from webhookd.deliveries.transitions import record
from webhookd.hints import Hints
from webhookd.pacing import rest_seconds
from webhookd.wakeups import Bells, Work


class Applier:
    """Applies until it is cancelled."""

    def __init__(
        self, pool: Pool, bells: Bells, hints: Hints, metrics: Metrics, settings: Callable[[], Settings]
    ) -> None:
        self._pool = pool
        self._bells = bells
        self._hints = hints
        self._metrics = metrics
        self._settings = settings
        self._refused_job_ids: set[int] = set()

    async def run(self) -> None:
        """Apply what was reported here, at once while there is more; and look for others' now and then."""
        with self._bells.serving(Work.RESULTS):
            await self._run()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        look_at = loop.time()
        while True:
            if loop.time() >= look_at:
                await self.look()
                looked_at = loop.time()
            # By the settings of now: a shorter interval need not wait for the end of the longer.
            look_at = looked_at + self._settings().services.poll_interval_seconds
            began = loop.time()
            applied = await self.run_once()
            if not self._hints.is_short_of_room:
                await asyncio.sleep(rest_seconds(applied, loop.time() - began))
            wake_at = loop.time() if self._hints.reported else look_at
            # Rung by the reaper or another instance, who do not say which: those are looked for, also while
            # there is enough to do here.
            if await self._bells.wait(Work.RESULTS, timeout_seconds=max(0.0, wake_at - loop.time())):
                await self._apply_all()

    async def run_once(self) -> int:
        """One batch of what was reported here; how much was applied."""
        reported = self._hints.take_reported(self._settings().orchestration.batch_size)
        if not self._hints.reported:
            self._bells.taken(Work.RESULTS)
        return await self._apply(reported) if reported else 0

    async def look(self) -> None:
        """Find what no hint spoke of, and try once more what was refused."""
        self._refused_job_ids.clear()
        await self._apply_all()

    async def _apply_all(self) -> None:
        while await self._apply(None) >= self._settings().orchestration.batch_size:
            pass

    async def _apply(self, job_ids: list[int] | None) -> int:
        settings = self._settings()
        policy = sagas.RetryPolicy(
            settings.retry.max_attempts,
            settings.retry.base_delay_seconds,
            settings.retry.max_delay_seconds,
            settings.retry.jitter,
        )
        async with self._pool.connection() as connection:
            transitions = await sagas.apply_results(
                connection,
                settings.orchestration.batch_size,
                policy,
                settings.orchestration.failing_after,
                job_ids,
                list(self._refused_job_ids),
            )
        record(transitions, self._metrics)
        self._refused_job_ids.update(
            transition.job_id
            for transition in transitions
            if transition.status is None and transition.job_id is not None
        )
        if transitions:
            self._hints.have_due({transition.subscription_id for transition in transitions})
            self._bells.ring_here(Work.SAGAS, hinted=True)
        return len(transitions)
