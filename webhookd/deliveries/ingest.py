"""The ingest stage: single events that come at the same time are stored in one commit.

Collects what came while the last commit was under way: no delay is added, and alone an event goes alone. (A
window of 3 ms beside it, 4 alternating rounds on a durable server and 2 cores: a single client has 83 instead
of 125 events a second, p50 11 instead of 7.5 ms; 16, 64 and 500 clients have the same rates and times.)
Each caller is answered after the commit of its own event. Rings EVENTS.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count

from webhookd.core.errors import DatabaseBusy, DatabaseUnavailable
from webhookd.core.metrics import Metrics
from webhookd.db.pool import Pool
from webhookd.deliveries import events
from webhookd.deliveries.events import Accepted, NewEvent
from webhookd.wakeups import Bells, Work

# Bounds of one commit: hundreds share its cost, and none waits long for the others' bytes.
MAX_GROUP_EVENTS = 500
MAX_GROUP_CHARACTERS = 4 * 1024 * 1024
# What may wait. Past it the database does not keep up, and saying so at once is kinder.
MAX_WAITING = 10_000
MAX_WAITING_CHARACTERS = 64 * 1024 * 1024
# A key of a transaction still open holds its group up for the first, and then itself alone for the second.
GROUP_LOCK_TIMEOUT_SECONDS = 0.1
ALONE_LOCK_TIMEOUT_SECONDS = 1.0
# Of the pool's connections; the stages need the others.
ALONE_CONCURRENCY = 3
# From the call to the answer, so that a client hears 503 within two seconds, also when 500 ask at once and
# the processor needs a third of a second for them. After it nobody knows whether the event is stored; asking
# again with the same key is how to find out.
ANSWER_TIMEOUT_SECONDS = 1.5


@dataclass(eq=False)
class _Member:
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
    """Stores events. Commits follow each other in a task that lives while there is something to store."""

    def __init__(self, pool: Pool, bells: Bells, metrics: Metrics) -> None:
        self._pool = pool
        self._bells = bells
        self._metrics = metrics
        self._places = count()
        self._waiting: dict[int, _Member] = {}
        self._waiting_characters = 0
        self._alone = asyncio.Semaphore(ALONE_CONCURRENCY)
        self._committing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def publish(self, event: NewEvent) -> Accepted:
        """Store one event; returns after its commit."""
        if len(self._waiting) >= MAX_WAITING or self._waiting_characters >= MAX_WAITING_CHARACTERS:
            raise DatabaseUnavailable("too many events wait to be stored")
        place = next(self._places)
        self._waiting_characters += len(event.payload)
        self._waiting[place] = member = _Member(event)
        if self._committing is None or self._committing.done():
            self._committing = self._start(self._commit_all())
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
                return await member.answer
        except TimeoutError as error:
            raise DatabaseUnavailable("the database did not answer in time") from error
        finally:
            self._waiting.pop(place, None)
            self._waiting_characters -= len(event.payload)

    async def close(self) -> None:
        """End what is under way; callers were answered, or are gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _commit_all(self) -> None:
        while self._waiting:
            await self._commit(self._take())

    def _take(self) -> list[_Member]:
        """The next group: in the order they came, up to the bounds, but one at least."""
        group: list[_Member] = []
        characters = 0
        for place, member in list(self._waiting.items())[:MAX_GROUP_EVENTS]:
            characters += len(member.event.payload)
            if group and characters > MAX_GROUP_CHARACTERS:
                break
            group.append(self._waiting.pop(place))
        return group

    async def _commit(self, group: list[_Member]) -> None:
        try:
            accepted = await self._store([member.event for member in group], GROUP_LOCK_TIMEOUT_SECONDS)
        except DatabaseBusy:
            self._start_each(group)
        except DatabaseUnavailable as error:
            # What became of the commit is not known: a second try could store an event without key twice.
            for member in group:
                member.fail(error)
        except Exception as error:  # refused, and nothing is stored: each hears it for itself
            if len(group) == 1:
                group[0].fail(error)
            else:
                self._start_each(group)
        else:
            for member, one in zip(group, accepted, strict=True):
                member.succeed(one)

    def _start_each(self, group: list[_Member]) -> None:
        """One of them spoils it for all: each by itself, beside the groups that follow."""
        for member in group:
            _ = self._start(self._commit_alone(member))

    async def _commit_alone(self, member: _Member) -> None:
        async with self._alone:
            if member.answer.done():
                return
            try:
                [accepted] = await self._store([member.event], ALONE_LOCK_TIMEOUT_SECONDS)
            except Exception as error:  # its caller's to judge
                member.fail(error)
            else:
                member.succeed(accepted)

    async def _store(self, batch: Sequence[NewEvent], lock_timeout_seconds: float) -> list[Accepted]:
        async with self._pool.connection() as connection:
            accepted = await events.publish(connection, batch, lock_timeout_seconds=lock_timeout_seconds)
            self.stored(accepted)
        return accepted

    def stored(self, accepted: Sequence[Accepted]) -> None:
        """Events were committed: count them, and wake routing. Other processes are told by the database."""
        self._metrics.events_accepted.inc(sum(not one.duplicate for one in accepted))
        self._bells.ring_here(Work.EVENTS)

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
