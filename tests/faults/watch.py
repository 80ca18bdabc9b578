"""Looks at every instance all the time: does it answer, is it ready, how large is it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.faults.instance import Instance

INTERVAL_SECONDS = 0.25
# For an answer that needs no database, on a machine with too much to do: longer is no answer.
ANSWER_TIMEOUT_SECONDS = 5.0
OK = 200


@dataclass
class Seen:
    """What one instance showed."""

    answers: int = 0
    silences: list[str] = field(default_factory=list)  # while it was to answer
    unready: int = 0
    most_resident_bytes: int = 0


class Watch:
    """Asks /healthz and /readyz of those that are to answer."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances
        self.seen = {instance.number: Seen() for instance in instances}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["Watch"]:
        """For the length of the block."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(self._look(session, instance)) for instance in self._instances]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def most_resident_bytes(self) -> int:
        return max(seen.most_resident_bytes for seen in self.seen.values())

    def silences(self) -> list[str]:
        """Where an instance that was up did not say that it lives."""
        return [
            f"instance {number}: {silence}" for number, seen in self.seen.items() for silence in seen.silences
        ]

    async def _look(self, session: aiohttp.ClientSession, instance: Instance) -> None:
        seen, began = self.seen[instance.number], time.monotonic()
        while True:
            if instance.answers:
                changes = instance.changes
                healthz = await _status(session, instance, "/healthz")
                readyz = await _status(session, instance, "/readyz")
                # Not held against it that it was ended between the question and its answer.
                if instance.changes == changes:
                    seen.answers += 1
                    if healthz != OK:
                        seen.silences.append(f"{healthz} after {time.monotonic() - began:.1f} s")
                    seen.unready += readyz != OK
                    seen.most_resident_bytes = max(seen.most_resident_bytes, instance.daemon.resident_bytes())
            await asyncio.sleep(INTERVAL_SECONDS)


async def _status(session: aiohttp.ClientSession, instance: Instance, path: str) -> int | str:
    try:
        async with session.get(f"http://127.0.0.1:{instance.daemon.port}{path}") as answer:
            return answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__
