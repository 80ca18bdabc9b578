"""Probes every instance four times a second: does it answer, is it ready, how much memory does it use.

It knows when an instance has no database, and records every /readyz answer that was wrong meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from tests.faults.instance import Instance

INTERVAL_SECONDS = 0.25
# /healthz needs no database; a slower answer counts as no answer, even on a busy machine.
ANSWER_TIMEOUT_SECONDS = 5.0
OK, UNAVAILABLE = 200, 503
NO_DATABASE = "the database does not answer"


@dataclass(frozen=True)
class Probe:
    """One answer of /readyz. If there was no answer, the status is the name of the exception."""

    asked_at: float
    answered_at: float
    status: int | str
    because: tuple[str, ...] = ()  # the reasons why the instance is not ready

    @property
    def reports_no_database(self) -> bool:
        """An instance may be unready for another reason, such as a service that restarts."""
        return self.status == UNAVAILABLE and NO_DATABASE in self.because


@dataclass
class Observed:
    """The observations of one instance."""

    probes: list[Probe] = field(default_factory=list)
    health_failures: list[str] = field(default_factory=list)  # while the instance was up
    false_ready: list[str] = field(default_factory=list)
    database_lost_at: float | None = None
    max_resident_bytes: int = 0

    @property
    def unready(self) -> int:
        return sum(probe.status == UNAVAILABLE for probe in self.probes)

    def first_unready(self) -> Probe | None:
        """Return the first probe since the database was lost that reported this."""
        since = self.database_lost_at
        if since is None:
            return None
        return next(
            (probe for probe in self.probes if probe.asked_at >= since and probe.reports_no_database), None
        )

    def reported_unready(self) -> bool:
        """Return True if the instance has reported the loss of its database."""
        return self.first_unready() is not None

    def database_restored(self) -> None:
        """End the time without a database: after its first 503 an instance must not have answered 200."""
        if first := self.first_unready():
            wrong = [probe for probe in self.probes if probe.asked_at > first.asked_at and probe.status == OK]
            self.false_ready += [
                f"200 without a database, {probe.answered_at - first.answered_at:.1f} s after the first 503"
                for probe in wrong
            ]
        self.database_lost_at = None


class Watch:
    """Requests /healthz and /readyz from every instance that should be up."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances
        self.observed = {instance.number: Observed() for instance in instances}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator["Watch"]:
        """Probe during the block; an error of the watch itself is raised at the end."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(self._probe(session, instance)) for instance in self._instances]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    def database_lost(self, instances: Iterable[Instance]) -> None:
        """Record that from now on these instances have no database, or a database that stores nothing."""
        for instance in instances:
            self.observed[instance.number].database_lost_at = time.monotonic()

    def database_restored(self, instances: Iterable[Instance]) -> None:
        """Record that from now on these instances may have their database again."""
        for instance in instances:
            self.observed[instance.number].database_restored()

    @property
    def max_resident_bytes(self) -> int:
        return max(observed.max_resident_bytes for observed in self.observed.values())

    def health_failures(self) -> list[str]:
        """List the times when an instance that was up did not answer /healthz with 200."""
        return [
            f"instance {number}: {failure}"
            for number, observed in self.observed.items()
            for failure in observed.health_failures
        ]

    def false_ready(self) -> list[str]:
        """List the times when an instance without a database reported that it is ready."""
        return [
            f"instance {number}: {answer}"
            for number, observed in self.observed.items()
            for answer in observed.false_ready
        ]

    async def _probe(self, session: aiohttp.ClientSession, instance: Instance) -> None:
        observed, started = self.observed[instance.number], time.monotonic()
        while True:
            if instance.should_answer:
                changes = instance.changes
                healthz, _ = await _get(session, instance, "/healthz")
                asked_at = time.monotonic()
                readyz, because = await _get(session, instance, "/readyz")
                # Ignore the answers if the instance was stopped between request and answer.
                if instance.changes == changes:
                    if healthz != OK:
                        observed.health_failures.append(f"{healthz} after {time.monotonic() - started:.1f} s")
                    observed.probes.append(Probe(asked_at, time.monotonic(), readyz, because))
                    observed.max_resident_bytes = max(
                        observed.max_resident_bytes, instance.daemon.resident_bytes()
                    )
            await asyncio.sleep(INTERVAL_SECONDS)


async def _get(
    session: aiohttp.ClientSession, instance: Instance, path: str
) -> tuple[int | str, tuple[str, ...]]:
    """Return the status and the reasons; without an answer, the name of the exception instead of a status."""
    try:
        async with session.get(f"http://127.0.0.1:{instance.daemon.port}{path}") as answer:
            return answer.status, tuple((await answer.json()).get("because", ()))
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__, ()
