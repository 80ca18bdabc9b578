"""The short path: a lone event is published, routed, started and claimed in one transaction.

That is one commit before its request is sent instead of four. Calls schema/deliveries/short_path.sql, which
calls the function of each stage. Only while this instance is nearly idle: the stages handle many events at a
time, which costs the database a fraction for each. What the short path leaves over, the stages find.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from webhookd.context import Context
from webhookd.db.connection import Connection
from webhookd.deliveries import ingest
from webhookd.deliveries.attempts import Claimed, claims_of
from webhookd.deliveries.ingest import Accepted, NewEvent
from webhookd.deliveries.router import Routed
from webhookd.deliveries.sagas import Transition, record, transition_of
from webhookd.deliveries.slots import Room
from webhookd.deliveries.worker import Worker
from webhookd.wakeups import Work

log = logging.getLogger(__name__)

# Events and attempts of one call. More is work for the stages.
MAX_EVENTS = 8
MAX_CLAIM = 16
# After a call, the stages do the work for this many times as long as the call took. At 350 events a second
# a call for each took twice the processor time of the stages.
REST_FACTOR = 5

_ROUTE = "select * from webhookd.deliver_now($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
# Publishes as ingest does. The CASE makes each step depend on the one before, so that they run in this order.
_PUBLISH = """
    select p.*, d.*
    from (select array_agg(p.id), array_agg(p.created_at), array_agg(p.duplicate)
          from (select set_config('lock_timeout', $15, true) is not null as bounded) b
          cross join lateral webhookd.publish_many(
              case when b.bounded then $11::text[] end, $12, $13, $14) p) p (ids, times, duplicates)
    cross join lateral webhookd.deliver_now(
        case when p.ids is not null then $1::integer end, $2, $3, $4, $5, $6, $7, $8, $9, $10) d
"""
_PUBLISHED_COLUMNS = 3
_STAGE_COLUMNS = 7


class Terms(NamedTuple):
    """What limits the stages in one call, as arguments of deliver_now."""

    batch_size: int
    subscription_window: int
    max_attempts: int
    worker_id: str
    wanted: int
    lease_seconds: float
    subscription_slots: int
    busy_subscription_ids: list[int]
    busy_slots: list[int]
    first_job_id: int


class Done(NamedTuple):
    """What one call did: the results of routing and starting, and the claimed attempts."""

    events: int
    sagas: int
    subscription_ids: list[int]  # those that got a delivery
    more: bool  # events may be left
    started: int
    dead_lettered: list[Transition]
    problem: str | None  # why nothing was done
    claims: list[Claimed]


async def route(connection: Connection, terms: Terms) -> Done:
    """Route the oldest events, start their deliveries and claim the attempts, in one commit."""
    return _done([tuple(row) for row in await connection.fetch(_ROUTE, *terms)])


async def publish(
    connection: Connection, events: Sequence[NewEvent], lock_timeout_seconds: float, terms: Terms
) -> tuple[list[Accepted], Done]:
    """Store the events, all or none, and then do the same as `route` in the same commit."""
    rows = await connection.fetch(_PUBLISH, *terms, *ingest.arguments(events, lock_timeout_seconds))
    ids, times, duplicates, *_ = rows[0]
    accepted = list(map(Accepted, ids, times, duplicates))
    return accepted, _done([tuple(row)[_PUBLISHED_COLUMNS:] for row in rows])


def _done(rows: list[tuple[Any, ...]]) -> Done:
    events, sagas, subscription_ids, more, started, dead_lettered, problem, first_job_id, *_ = rows[0]
    claims = [] if first_job_id is None else claims_of([row[_STAGE_COLUMNS:] for row in rows])
    transitions = [transition_of(dead) for dead in dead_lettered]
    return Done(events, sagas, subscription_ids, more, started, transitions, problem, claims)


class ShortPath:
    """Shared by ingest and routing of an instance that also starts and delivers."""

    def __init__(self, context: Context, worker: Worker) -> None:
        self._context = context
        self._worker = worker
        self._next_at = 0.0

    async def publish(self, events: Sequence[NewEvent], lock_timeout_seconds: float) -> list[Accepted] | None:
        """Publish and deliver events in one commit. None: use the stages, nothing was done."""
        if len(events) > MAX_EVENTS or not self._is_open:
            return None
        async with self._call(MAX_EVENTS) as (connection, terms, finish):
            accepted, done = await publish(connection, events, lock_timeout_seconds, terms)
            finish(done)
        return accepted

    async def route(self, batch_size: int) -> Routed | None:
        """Route and deliver events in one commit. None: use the stages, nothing was done."""
        if not self._is_open:
            return None
        async with self._call(min(batch_size, MAX_EVENTS)) as (connection, terms, finish):
            done = await route(connection, terms)
            finish(done)
        return Routed(done.events, done.sagas, done.subscription_ids, 0, done.more)

    @property
    def _is_open(self) -> bool:
        if asyncio.get_running_loop().time() < self._next_at or self._worker.claiming.locked():
            return False
        room = self._worker.room()
        return room is not None and room.wanted >= MAX_CLAIM and not room.only_reserved

    @asynccontextmanager
    async def _call(self, batch_size: int) -> AsyncIterator[tuple[Connection, Terms, Callable[[Done], None]]]:
        """Prepare a call. The lock is free, so nothing changes between the check and this."""
        loop = asyncio.get_running_loop()
        async with self._worker.claiming:
            room = self._worker.room()
            if room is None:
                raise RuntimeError("the short path was used without a check")
            began, asked_at = loop.time(), time.monotonic()
            try:
                async with self._context.pool.connection() as connection:
                    yield (
                        connection,
                        self._terms(batch_size, room),
                        lambda done: self._finish(done, asked_at),
                    )
            finally:
                self._next_at = loop.time() + REST_FACTOR * (loop.time() - began)

    def _terms(self, batch_size: int, room: Room) -> Terms:
        settings = self._context.settings()
        return Terms(
            batch_size,
            settings.orchestration.subscription_window,
            settings.retry.max_attempts,
            self._context.worker_id,
            min(room.wanted, MAX_CLAIM),
            settings.delivery.lease_seconds,
            room.subscription_limit,
            list(room.in_use.keys()),
            list(room.in_use.values()),
            self._worker.next_job_id,
        )

    def _finish(self, done: Done, asked_at: float) -> None:
        """Send what was claimed, count, and wake the stages for what is left. The transaction is over."""
        self._worker.accept(done.claims, asked_at)
        metrics, wakeups = self._context.metrics, self._context.wakeups
        if done.problem:
            log.warning("the short path failed, the stages take over: %s", done.problem)
        metrics.events_routed.inc(done.events)
        metrics.sagas_routed.inc(done.sagas)
        metrics.attempts_started.inc(done.started)
        record(done.dead_lettered, metrics)
        if done.more:
            wakeups.wake(Work.EVENTS)
        if done.started < done.sagas:
            wakeups.wake(Work.SAGAS, done.subscription_ids, notify=True)
        if len(done.claims) < done.started:
            wakeups.wake(Work.ATTEMPTS, notify=True)
