"""The routing stage: takes events from the routing queue and has their sagas made.

Wakes on EVENTS; rings SAGAS, and tells the orchestrator whose.
"""

from collections.abc import Callable

from webhookd.config.settings import Settings
from webhookd.observe.metrics import Metrics
from webhookd.store import routing
from webhookd.store.bells import Bells, Work
from webhookd.store.hints import Hints
from webhookd.store.pool import Pool


class Router:
    """Routes until it is cancelled."""

    def __init__(
        self, pool: Pool, bells: Bells, hints: Hints, metrics: Metrics, settings: Callable[[], Settings]
    ) -> None:
        self._pool = pool
        self._bells = bells
        self._hints = hints
        self._metrics = metrics
        self._settings = settings
        self._mark = 0

    async def run(self) -> None:
        """Route what there is, again at once while batches are full, else when woken."""
        while True:
            batch_size = self._settings().routing.batch_size
            routed = await self.run_once()
            if routed.events < batch_size:
                # Before the wait, so that what committed behind the mark is found after it.
                self._mark = 0
                await self._bells.wait(
                    Work.EVENTS, timeout_seconds=self._settings().services.poll_interval_seconds
                )

    async def run_once(self) -> routing.Routed:
        """One batch."""
        async with self._pool.connection() as connection:
            routed = await routing.route(connection, self._settings().routing.batch_size, self._mark)
            # Before the connection is given back, which takes a turn of the loop: it is committed.
            if routed.subscription_ids:
                self._hints.have_due(routed.subscription_ids)
                self._bells.ring(Work.SAGAS)
        self._mark = routed.next_event_id
        self._metrics.events_routed.inc(routed.events)
        self._metrics.sagas_routed.inc(routed.sagas)
        return routed
