"""The routing stage: takes events from the routing queue, creates a delivery per matching subscription.

Calls schema/deliveries/routing.sql. Woken by EVENTS; wakes SAGAS with the subscriptions that got deliveries.
"""

import asyncio
from datetime import datetime
from typing import NamedTuple, Protocol

from webhookd.context import Context
from webhookd.db.connection import Connection, fetch_one
from webhookd.wakeups import Work

# A batch ends early at this many new deliveries, so that a wide fan-out does not make one long transaction.
MAX_SAGAS = 10_000


class Routed(NamedTuple):
    """The result of one batch."""

    events: int
    sagas: int
    subscription_ids: list[int]  # those that got a delivery
    next_event_id: int  # where the next batch starts
    more: bool  # the batch was full, or cut short by its fan-out


async def route(
    connection: Connection, batch_size: int, first_event_id: int = 0, max_sagas: int = MAX_SAGAS
) -> Routed:
    """Create the deliveries of up to `batch_size` events."""
    row = await fetch_one(
        connection,
        "select events, sagas, subscription_ids, next_event_id, more from webhookd.route_events($1, $2, $3)",
        batch_size,
        first_event_id,
        max_sagas,
    )
    return Routed(*row)


class Replay(NamedTuple):
    """Which past events a subscription gets, and since when the replay runs."""

    subscription_id: int
    since: datetime
    until: datetime
    event_types: list[str] | None
    include_all: bool
    started_at: datetime


class Replayed(NamedTuple):
    """One batch of a replay."""

    examined: int
    matched: int
    created: int
    payload_removed: int  # would match, but cannot be sent any more
    last_event_id: int


async def replay(
    connection: Connection,
    what: Replay,
    after_event_id: int,
    batch_size: int,
    *,
    dry_run: bool,
    tenant: str | None = None,
) -> Replayed:
    """Replay one batch; continue after `last_event_id` until `examined` is less than the batch size."""
    row = await fetch_one(
        connection,
        "select * from webhookd.replay_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        *what,
        after_event_id,
        batch_size,
        dry_run,
        tenant,
    )
    return Replayed(*row)


class ShortPath(Protocol):
    """Routes a few events and delivers them at once; see short_path.py."""

    async def route(self, batch_size: int) -> Routed | None:
        """Route the oldest events, or return None without doing anything."""


class Router:
    """Routes events until it is cancelled."""

    def __init__(self, context: Context, short_path: ShortPath | None = None) -> None:
        self._context = context
        self._short_path = short_path
        self._inbox = context.wakeups.inbox(Work.EVENTS)
        self._next_event_id = 0

    async def run(self) -> None:
        """Route batch after batch while there is more, then wait for a wake-up."""
        loop = asyncio.get_running_loop()
        restarted_at = loop.time()
        while True:
            poll_interval_seconds = self._context.settings().services.poll_interval_seconds
            routed = await self.run_once()
            if not routed.more:
                self._next_event_id, restarted_at = 0, loop.time()
                await self._inbox.wait(poll_interval_seconds)
            elif loop.time() >= restarted_at + poll_interval_seconds:
                # An event that was committed late has a lower id; a long backlog must not hide it.
                self._next_event_id, restarted_at = 0, loop.time()

    async def run_once(self) -> Routed:
        """Route one batch; while little happens, also start and claim it."""
        if self._short_path is not None and not self._next_event_id:
            routed = await self._short_path.route(self._context.settings().routing.batch_size)
            if routed is not None:
                return routed
        settings, metrics = self._context.settings(), self._context.metrics
        async with self._context.pool.connection() as connection:
            routed = await route(connection, settings.routing.batch_size, self._next_event_id)
            # It is committed. Wake now: giving the connection back takes a turn of the event loop.
            if routed.subscription_ids:
                self._context.wakeups.wake(Work.SAGAS, routed.subscription_ids, notify=True)
        self._next_event_id = routed.next_event_id
        metrics.events_routed.inc(routed.events)
        metrics.sagas_routed.inc(routed.sagas)
        return routed
