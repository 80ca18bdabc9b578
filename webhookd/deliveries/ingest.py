"""Ingest: stores published events; events that arrive at the same time share a commit. Wakes routing.

Calls schema/deliveries/ingest.sql. A group is whatever arrived during the last commit, so no delay is added
and a lone event is committed alone. (Tried: a window of 3 ms. In 4 alternating rounds on a durable server
with 2 cores a single client fell from 125 to 83 events a second, p50 from 7.5 to 11 ms; 16, 64 and 500
clients were the same.)
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import NamedTuple, Protocol

from webhookd.context import Context
from webhookd.core.errors import DatabaseBusy, DatabaseUnavailable
from webhookd.db.connection import Connection
from webhookd.wakeups import Work

# Bounds of one commit: hundreds of events share its cost, and none waits long for the bytes of the others.
MAX_GROUP_EVENTS = 500
MAX_GROUP_CHARACTERS = 4 * 1024 * 1024
# Bounds of what may wait. Past them the database is too slow, and an immediate 503 is better than a late one.
MAX_WAITING = 10_000
MAX_WAITING_CHARACTERS = 64 * 1024 * 1024
# An idempotency key in another open transaction delays its group for the first time, and then only its own
# event for the second.
GROUP_LOCK_TIMEOUT_SECONDS = 0.1
SINGLE_LOCK_TIMEOUT_SECONDS = 1.0
# Connections for events that are stored one by one; the stages need the rest of the pool.
SINGLE_CONCURRENCY = 3
# From call to answer. A client gets its 503 within two seconds, even if 500 clients call at once and the
# processor needs a third of a second for them. After a timeout the outcome is unknown; the client finds out
# by sending the event again with the same key.
ANSWER_TIMEOUT_SECONDS = 1.5


class NewEvent(NamedTuple):
    """An event to store. The payload is the JSON text that will be delivered, byte for byte."""

    event_type: str
    payload: str
    idempotency_key: str | None = None
    correlation_id: str | None = None
    tenant: str = ""
    labels: str | None = None  # a JSON object of strings


class Accepted(NamedTuple):
    """A stored event; a duplicate has the id of the first event with its key."""

    id: int
    created_at: datetime
    duplicate: bool


# The lock timeout is set in the same statement, which stays one round trip and one transaction. The CASE
# makes the function call depend on the setting, so that the setting is applied first.
_PUBLISH = """
    select p.id, p.created_at, p.duplicate
    from (select set_config('lock_timeout', $7, true) is not null as bounded) b
    cross join lateral webhookd.publish_many(case when b.bounded then $1::text[] end, $2, $3, $4, $5, $6) p
"""


async def publish(
    connection: Connection, events: Sequence[NewEvent], *, lock_timeout_seconds: float = 0
) -> list[Accepted]:
    """Store the events in one commit, all or none; the results are in the same order.

    Waits for a key that is in another open transaction, up to the lock timeout (0: until that one ends).
    """
    rows = await connection.fetch(_PUBLISH, *arguments(events, lock_timeout_seconds))
    return list(map(Accepted._make, rows))


def arguments(events: Sequence[NewEvent], lock_timeout_seconds: float) -> tuple[object, ...]:
    """Return the arguments of publish_many, and the lock timeout."""
    return (
        [event.event_type for event in events],
        [event.payload for event in events],
        [event.idempotency_key for event in events],
        [event.correlation_id for event in events],
        [event.tenant for event in events],
        [event.labels for event in events],
        f"{int(lock_timeout_seconds * 1000)}ms",
    )


class ShortPath(Protocol):
    """Publishes a few events and delivers them at once; see short_path.py."""

    async def publish(self, events: Sequence[NewEvent], lock_timeout_seconds: float) -> list[Accepted] | None:
        """Store the events, or return None without doing anything."""


@dataclass(eq=False)
class _Waiting:
    event: NewEvent
    answer: asyncio.Future[Accepted] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def succeed(self, accepted: Accepted) -> None:
        if not self.answer.done():
            self.answer.set_result(accepted)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class GroupCommit:
    """Stores events in groups. One task commits group after group while events are waiting."""

    def __init__(self, context: Context, short_path: ShortPath | None = None) -> None:
        self._context = context
        self._short_path = short_path
        self._numbers = count()
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_characters = 0
        self._single = asyncio.Semaphore(SINGLE_CONCURRENCY)
        self._committing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, event: NewEvent) -> Accepted:
        """Store one event; returns after its commit."""
        if len(self._waiting) >= MAX_WAITING or self._waiting_characters >= MAX_WAITING_CHARACTERS:
            raise DatabaseUnavailable("too many events are waiting to be stored")
        number = next(self._numbers)
        self._waiting_characters += len(event.payload)
        self._waiting[number] = waiting = _Waiting(event)
        if self._committing is None or self._committing.done():
            self._committing = self._start(self._commit_all())
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
                return await waiting.answer
        except TimeoutError as error:
            raise DatabaseUnavailable("the database did not answer in time") from error
        finally:
            self._waiting.pop(number, None)
            self._waiting_characters -= len(event.payload)

    async def close(self) -> None:
        """Cancel running commits. Their callers have been answered or are gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _commit_all(self) -> None:
        while self._waiting:
            await self._commit(self._next_group())

    def _next_group(self) -> list[_Waiting]:
        """Take at least one event, in order of arrival, up to the bounds of a commit."""
        group: list[_Waiting] = []
        characters = 0
        for number, waiting in list(self._waiting.items())[:MAX_GROUP_EVENTS]:
            characters += len(waiting.event.payload)
            if group and characters > MAX_GROUP_CHARACTERS:
                break
            group.append(self._waiting.pop(number))
        return group

    async def _commit(self, group: list[_Waiting]) -> None:
        try:
            accepted = await self._store_group([waiting.event for waiting in group])
        except DatabaseBusy:
            self._commit_each(group)
        except DatabaseUnavailable as error:
            # The outcome of the commit is unknown: a second try could store an event without key twice.
            for waiting in group:
                waiting.fail(error)
        except Exception as error:  # rejected, and nothing is stored: find out which event is at fault
            if len(group) == 1:
                group[0].fail(error)
            else:
                self._commit_each(group)
        else:
            for waiting, result in zip(group, accepted, strict=True):
                waiting.succeed(result)

    def _commit_each(self, group: list[_Waiting]) -> None:
        """Store the events one by one, next to the following groups: one of them failed its group."""
        for waiting in group:
            _ = self._start(self._commit_single(waiting))

    async def _commit_single(self, waiting: _Waiting) -> None:
        async with self._single:
            if waiting.answer.done():
                return
            try:
                [accepted] = await self._store([waiting.event], SINGLE_LOCK_TIMEOUT_SECONDS)
            except Exception as error:  # the caller gets it
                waiting.fail(error)
            else:
                waiting.succeed(accepted)

    async def _store_group(self, events: Sequence[NewEvent]) -> list[Accepted]:
        if self._short_path is not None:
            accepted = await self._short_path.publish(events, GROUP_LOCK_TIMEOUT_SECONDS)
            if accepted is not None:
                self._count(accepted)
                return accepted
        return await self._store(events, GROUP_LOCK_TIMEOUT_SECONDS)

    async def _store(self, events: Sequence[NewEvent], lock_timeout_seconds: float) -> list[Accepted]:
        async with self._context.pool.connection() as connection:
            accepted = await publish(connection, events, lock_timeout_seconds=lock_timeout_seconds)
            self.stored(accepted)
        return accepted

    def stored(self, accepted: Sequence[Accepted]) -> None:
        """Count committed events and wake routing. The database notifies other processes."""
        self._count(accepted)
        self._context.wakeups.wake(Work.EVENTS)

    def _count(self, accepted: Sequence[Accepted]) -> None:
        self._context.metrics.events_accepted.inc(sum(not event.duplicate for event in accepted))

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
