"""The short path: a lone event is published, routed, started and claimed in one transaction.

That is one commit before its request is sent instead of four. Calls schema/deliveries/short_path.sql, which
calls the function of each stage. Only while this instance is nearly idle: the stages handle many events at a
time, which costs the database a fraction for each. What the short path leaves over, the stages find.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
MAX_EVENTS = 16
MAX_CLAIM = 16
# After a call, rest for this many times as long as the shortest of the recent calls took, so that the next
# one handles several events: a call for one costs half as much as a call for eight. Router waits for the end
# of the rest. The shortest, because a call that waited for a processor or the disk does not cost more. At 350
# events a second, half of them arrived within 9 ms, 99 % within 19 ms, and each cost 0.98 ms of processor
# time. With a rest of four times the last call it was 10 and 27 ms, and 0.94; beside a sweep of retention
# 11 and 41 ms, instead of 10 and 22. Without a rest, an event costs twice as much.
REST_FACTOR = 5
RECENT_CALLS = 8
# The path stays closed for this many times as long as the call took, and the stages do the work: after a call
# that left events over, and after two slow calls in a row. Those meet dead index entries that an old snapshot
# keeps (half a millisecond for each thousand deliveries since), and an API client waits for them. The first
# call of a new connection is slow, too, because it plans its statements.
CLOSED_FACTOR = 50
SLOW_SECONDS = 0.02
# uvloop's clock has whole milliseconds, so a sleep may end this much too early.
LOOP_CLOCK_SECONDS = 0.001

_ROUTE = "select * from webhookd.deliver_now($1, 0, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
# Publishes as ingest does. Each step has a result of the one before as argument, so they run in this order.
_PUBLISH = """
    select p.*, d.*
    from (select array_agg(p.id), array_agg(p.created_at), array_agg(p.duplicate)
          from (select set_config('lock_timeout', $17, true) is not null as bounded) b
          cross join lateral webhookd.publish_many(
              case when b.bounded then $11::text[] end, $12, $13, $14, $15, $16) p) p (ids, times, duplicates)
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


@dataclass
class _Call:
    connection: Connection
    terms: Terms
    asked_at: float
    has_more: bool = False


class ShortPath:
    """Shared by ingest and routing of an instance that also starts and delivers."""

    def __init__(self, context: Context, worker: Worker) -> None:
        self._context = context
        self._worker = worker
        self._opens_at = 0.0  # by time.monotonic(), because the loop's own time has whole milliseconds
        self._is_closed = False
        self._was_slow = False
        self._durations: deque[float] = deque(maxlen=RECENT_CALLS)  # of the recent calls, in seconds

    async def publish(self, events: Sequence[NewEvent], lock_timeout_seconds: float) -> list[Accepted] | None:
        """Publish and deliver events in one commit. None: use the stages, nothing was done."""
        if len(events) > MAX_EVENTS:
            return None
        async with self._call(MAX_EVENTS) as call:
            if call is None:
                return None
            accepted, done = await publish(call.connection, events, lock_timeout_seconds, call.terms)
            self._finish(done, call)
        return accepted

    async def route(self, batch_size: int) -> Routed | None:
        """Route and deliver events in one commit, after a rest. None: use the stages, nothing was done."""
        rest_seconds = self._opens_at - time.monotonic()
        if rest_seconds > 0 and not self._is_closed:
            await asyncio.sleep(rest_seconds + LOOP_CLOCK_SECONDS)
        async with self._call(min(batch_size, MAX_EVENTS)) as call:
            if call is None:
                return None
            done = await route(call.connection, call.terms)
            self._finish(done, call)
        return Routed(done.events, done.sagas, done.subscription_ids, 0, done.more)

    @asynccontextmanager
    async def _call(self, batch_size: int) -> AsyncIterator[_Call | None]:
        """Prepare a call, or yield None: the path rests or is closed, or too few slots are free."""
        worker = self._worker
        if time.monotonic() < self._opens_at or not worker.may_claim:
            yield None
            return
        async with worker.claiming:
            room = worker.room()
            if room is None or room.wanted < MAX_CLAIM or room.only_reserved:
                yield None
                return
            asked_at, has_more = time.monotonic(), False
            try:
                async with self._context.pool.connection() as connection:
                    call = _Call(connection, self._terms(batch_size, room), asked_at)
                    yield call
                    has_more = call.has_more
            finally:
                self._ended(asked_at, has_more=has_more)

    def _ended(self, asked_at: float, *, has_more: bool) -> None:
        """Rest after a call, or close the path."""
        ended = time.monotonic()
        seconds = ended - asked_at
        self._durations.append(seconds)
        is_slow = seconds >= SLOW_SECONDS
        self._is_closed = has_more or (is_slow and self._was_slow)
        self._was_slow = is_slow
        rest_seconds = CLOSED_FACTOR * seconds if self._is_closed else REST_FACTOR * min(self._durations)
        self._opens_at = ended + rest_seconds

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

    def _finish(self, done: Done, call: _Call) -> None:
        """Send what was claimed, count, and wake the stages for what is left.

        The transaction is over: an error here must not look like one of the transaction, or ingest would
        store the events again.
        """
        call.has_more = done.more
        try:
            self._worker.accept(done.claims, call.asked_at)
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
