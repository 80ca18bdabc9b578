"""The short path: a lone event is published, routed, started and claimed in one transaction.

That is one commit before its request is sent instead of four. Calls schema/deliveries/short_path.sql, which
calls the function of each stage. Only while this instance is nearly idle: the stages handle many events at a
time, which costs the database a fraction for each. What the short path leaves over, the stages find.
"""

import logging
import time
from collections.abc import AsyncIterator, Sequence
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
# After a call, the stages do the work for this many times as long as the call took, because they handle
# several events at a time. The factor is a guess: no other one was measured.
REST_FACTOR = 5
# A slow call has met dead index entries that an old snapshot keeps, and an API client has waited for it. Each
# thousand deliveries since that snapshot cost about half a millisecond.
SLOW_SECONDS = 0.02
SLOW_REST_FACTOR = 500

_ROUTE = "select * from webhookd.deliver_now($1, 0, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
# Publishes as ingest does. Each step has a result of the one before as argument, so they run in this order.
_PUBLISH = """
    select p.*, d.*
    from (select array_agg(p.id), array_agg(p.created_at), array_agg(p.duplicate)
          from (select set_config('lock_timeout', $15, true) is not null as bounded) b
          cross join lateral webhookd.publish_many(
              case when b.bounded then $11::text[] end, $12, $13, $14) p) p (ids, times, duplicates)
    cross join lateral webhookd.deliver_now(
        $1, p.ids[1], $2, $3, $4, $5, $6, $7, $8, $9, $10) d
"""
_PUBLISHED_COLUMNS = 3
_STAGE_COLUMNS = 8


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
    unstarted: bool  # due deliveries of these subscriptions may be left
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
    events, sagas, subscription_ids, more, started, unstarted, dead_lettered, problem, *_ = rows[0]
    claimed = [row[_STAGE_COLUMNS:] for row in rows if row[_STAGE_COLUMNS] is not None]
    return Done(
        events,
        sagas,
        subscription_ids,
        more,
        started,
        unstarted,
        [transition_of(dead) for dead in dead_lettered],
        problem,
        claims_of(claimed),
    )


class _Call(NamedTuple):
    connection: Connection
    terms: Terms
    asked_at: float


class ShortPath:
    """Shared by ingest and routing of an instance that also starts and delivers."""

    def __init__(self, context: Context, worker: Worker) -> None:
        self._context = context
        self._worker = worker
        self._next_at = 0.0  # by time.monotonic(), because the loop's own time has whole milliseconds

    async def publish(self, events: Sequence[NewEvent], lock_timeout_seconds: float) -> list[Accepted] | None:
        """Publish and deliver events in one commit. None: use the stages, nothing was done."""
        if len(events) > MAX_EVENTS:
            return None
        async with self._call(MAX_EVENTS) as call:
            if call is None:
                return None
            accepted, done = await publish(call.connection, events, lock_timeout_seconds, call.terms)
            self._finish(done, call.asked_at)
        return accepted

    async def route(self, batch_size: int) -> Routed | None:
        """Route and deliver events in one commit. None: use the stages, nothing was done."""
        async with self._call(min(batch_size, MAX_EVENTS)) as call:
            if call is None:
                return None
            done = await route(call.connection, call.terms)
            self._finish(done, call.asked_at)
        return Routed(done.events, done.sagas, done.subscription_ids, 0, done.more)

    @asynccontextmanager
    async def _call(self, batch_size: int) -> AsyncIterator[_Call | None]:
        """Prepare a call, or yield None: the path is closed, or the worker has too few free slots."""
        worker = self._worker
        if time.monotonic() < self._next_at or not worker.may_claim:
            yield None
            return
        async with worker.claiming:
            room = worker.room()
            if room is None or room.wanted < MAX_CLAIM or room.only_reserved:
                yield None
                return
            asked_at = time.monotonic()
            try:
                async with self._context.pool.connection() as connection:
                    yield _Call(connection, self._terms(batch_size, room), asked_at)
            finally:
                ended = time.monotonic()
                factor = REST_FACTOR if ended - asked_at < SLOW_SECONDS else SLOW_REST_FACTOR
                self._next_at = ended + factor * (ended - asked_at)

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
        """Send what was claimed, count, and wake the stages for what is left.

        The transaction is over: an error here must not look like one of the transaction, or ingest would
        store the events again.
        """
        try:
            self._worker.accept(done.claims, asked_at)
            self._record(done)
        except Exception:
            log.exception("cannot use the results of the short path, the stages take over")
            self._context.wakeups.wake_all()

    def _record(self, done: Done) -> None:
        metrics, wakeups = self._context.metrics, self._context.wakeups
        if done.problem:
            log.warning("the short path failed, the stages take over: %s", done.problem)
        metrics.events_routed.inc(done.events)
        metrics.sagas_routed.inc(done.sagas)
        metrics.attempts_started.inc(done.started)
        record(done.dead_lettered, metrics)
        if done.more:
            wakeups.wake(Work.EVENTS)
        if done.unstarted:
            wakeups.wake(Work.SAGAS, done.subscription_ids, notify=True)
        # A claim takes the oldest attempts, which may be those of other subscriptions.
        if sum(lease.subscription_id in done.subscription_ids for lease, _ in done.claims) < done.started:
            wakeups.wake(Work.ATTEMPTS, notify=True)
