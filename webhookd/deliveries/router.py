"""The routing stage: takes events from the routing queue and has their sagas made.

Wakes on EVENTS; rings SAGAS, and tells the orchestrator whose.
"""

import asyncio
from collections.abc import Callable

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.db.pool import Pool
from webhookd.deliveries import routing
from webhookd.hints import Hints
from webhookd.wakeups import Bells, Work


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
        """Route what there is, again at once while there is more, else when woken."""
        loop = asyncio.get_running_loop()
        forgot_at = loop.time()
        while True:
            poll_interval_seconds = self._settings().services.poll_interval_seconds
            routed = await self.run_once()
            if not routed.more:
                self._mark, forgot_at = 0, loop.time()
                await self._bells.wait(Work.EVENTS, timeout_seconds=poll_interval_seconds)
            elif loop.time() >= forgot_at + poll_interval_seconds:
                # What committed late lies behind the mark, and a backlog may last.
                self._mark, forgot_at = 0, loop.time()

    async def run_once(self) -> routing.Routed:
        """One batch."""
        async with self._pool.connection() as connection:
            routed = await routing.route(connection, self._settings().routing.batch_size, self._mark)
            # Before the connection is given back, which takes a turn of the loop: it is committed.
            if routed.subscription_ids:
                self._hints.have_due(routed.subscription_ids)
                self._bells.ring(Work.SAGAS, hinted=True)
        self._mark = routed.next_event_id
        self._metrics.events_routed.inc(routed.events)
        self._metrics.sagas_routed.inc(routed.sagas)
        return routed
