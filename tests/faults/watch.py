"""Looks at every instance all the time: does it answer, is it ready, how large is it.

Knows from when to when an instance has no database, and holds against it what it says meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.faults.instance import Instance

INTERVAL_SECONDS = 0.25
# For an answer that needs no database, on a machine with too much to do: longer is no answer.
ANSWER_TIMEOUT_SECONDS = 5.0
OK, UNAVAILABLE = 200, 503
NO_DATABASE = "the database does not answer"


@dataclass(frozen=True)
class Look:
    """What /readyz said, when it was asked and when it answered; a name instead of a status is no answer."""

    asked_at: float
    answered_at: float
    status: int | str
    because: tuple[str, ...] = ()  # it is not ready

    @property
    def says_away(self) -> bool:
        """That its database is. For less it may be unready, too: a service that begins anew."""
        return self.status == UNAVAILABLE and NO_DATABASE in self.because


@dataclass
class Seen:
    """What one instance showed."""

    looks: list[Look] = field(default_factory=list)
    silences: list[str] = field(default_factory=list)  # while it was to answer
    untruths: list[str] = field(default_factory=list)
    away_since: float | None = None  # its database
    most_resident_bytes: int = 0

    @property
    def unready(self) -> int:
        return sum(look.status == UNAVAILABLE for look in self.looks)

    def first_unready(self) -> Look | None:
        """The first look since its database went away that found it saying so."""
        since = self.away_since
        if since is None:
            return None
        return next((look for look in self.looks if look.asked_at >= since and look.says_away), None)

    def said_unready(self) -> bool:
        """Whether there is such a look by now."""
        return self.first_unready() is not None

    def judge(self) -> None:
        """The database comes back: once it had said that it is away, it may not have said otherwise."""
        if first := self.first_unready():
            late = [look for look in self.looks if look.asked_at > first.asked_at and look.status == OK]
            self.untruths += [
                f"200 after {look.answered_at - first.answered_at:.1f} s of 503, without a database"
                for look in late
            ]
        self.away_since = None


class Watch:
    """Asks /healthz and /readyz of those that are to answer."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances
        self.seen = {instance.number: Seen() for instance in instances}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["Watch"]:
        """For the length of the block; what went wrong with the watching itself is raised at its end."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(self._look(session, instance)) for instance in self._instances]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    def away(self, instances: Iterable[Instance]) -> None:
        """These have no database, as of now, or one that stores nothing."""
        for instance in instances:
            self.seen[instance.number].away_since = time.monotonic()

    def back(self, instances: Iterable[Instance]) -> None:
        """They may have it again, as of now."""
        for instance in instances:
            self.seen[instance.number].judge()

    @property
    def most_resident_bytes(self) -> int:
        return max(seen.most_resident_bytes for seen in self.seen.values())

    def silences(self) -> list[str]:
        """Where an instance that was up did not say that it lives."""
        return [
            f"instance {number}: {silence}" for number, seen in self.seen.items() for silence in seen.silences
        ]

    def untruths(self) -> list[str]:
        """Where an instance said that it was ready, and could not be."""
        return [
            f"instance {number}: {untruth}" for number, seen in self.seen.items() for untruth in seen.untruths
        ]

    async def _look(self, session: aiohttp.ClientSession, instance: Instance) -> None:
        seen, began = self.seen[instance.number], time.monotonic()
        while True:
            if instance.answers:
                changes = instance.changes
                healthz, _ = await _ask(session, instance, "/healthz")
                asked_at = time.monotonic()
                readyz, because = await _ask(session, instance, "/readyz")
                # Not held against it that it was ended between the question and its answer.
                if instance.changes == changes:
                    if healthz != OK:
                        seen.silences.append(f"{healthz} after {time.monotonic() - began:.1f} s")
                    seen.looks.append(Look(asked_at, time.monotonic(), readyz, because))
                    seen.most_resident_bytes = max(seen.most_resident_bytes, instance.daemon.resident_bytes())
            await asyncio.sleep(INTERVAL_SECONDS)


async def _ask(
    session: aiohttp.ClientSession, instance: Instance, path: str
) -> tuple[int | str, tuple[str, ...]]:
    """The status, and why it is not well; a name instead of a status is no answer."""
    try:
        async with session.get(f"http://127.0.0.1:{instance.daemon.port}{path}") as answer:
            return answer.status, tuple((await answer.json()).get("because", ()))
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__, ()
