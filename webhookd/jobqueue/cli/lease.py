"""A job that is ours: kept by renewing its lease while a command runs, and ended by a report."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from webhookd.cli.client import Answer
from webhookd.core.errors import RequestRefused, ServiceUnavailable

# Posts a body to a path of the daemon.
Ask: TypeAlias = Callable[[str, Mapping[str, object]], Awaitable[Answer]]

# A lease is renewed when a third of it is over: two may be lost.
RENEWALS = 3
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 10.0
# How long after its lease a report is still tried: until others have the job, it counts.
REPORT_GRACE_SECONDS = 60.0


class Lost(Exception):
    """Others may have the job by now; or nobody knows."""


class Delays:
    """Growing, and random: so that not all come back at once."""

    def __init__(self) -> None:
        self._next_seconds = FIRST_DELAY_SECONDS

    def next_seconds(self) -> float:
        now, self._next_seconds = self._next_seconds, min(self._next_seconds * 2, LONGEST_DELAY_SECONDS)
        return now * random.uniform(0.5, 1)  # noqa: S311  nothing is kept secret by it


class Lease:
    """Of one claim."""

    def __init__(self, ask: Ask, claimed: Answer, lease_seconds: float) -> None:
        self._ask = ask
        self._lease_seconds = lease_seconds
        self.body: Final = claimed.body
        job: dict[str, Any] = claimed.value
        self.job_id: Final = str(job["job_id"])
        self.attempt: Final = int(job["attempt"])
        self.kind: Final = str(job["job_kind"])
        self._token = str(job["lease_token"])
        now = time.monotonic()
        self._ends_at = now + lease_seconds
        # By the difference of two times of the database: this machine's clock may be wrong.
        self._deadline_at = now + _seconds_between(job["claimed_at"], job["deadline_at"])

    async def renew(self) -> None:
        """Now, again and again while the daemon is away; Lost when it is too late."""
        delays = Delays()
        while True:
            asked_at = time.monotonic()
            try:
                # A daemon that takes the request and does not answer must not outlast the lease.
                async with asyncio.timeout(self._ends_at - asked_at):
                    await self._ask(f"/v1/jobs/{self.job_id}/progress", {"lease_token": self._token})
            except TimeoutError as error:
                raise Lost("it could not be renewed: no answer in time") from error
            except RequestRefused as error:
                raise Lost(str(error)) from error
            except ServiceUnavailable as error:
                delay_seconds = min(delays.next_seconds(), self._lease_seconds / RENEWALS)
                if time.monotonic() + delay_seconds >= self._ends_at:
                    raise Lost(f"it could not be renewed: {error}") from error
                await asyncio.sleep(delay_seconds)
            else:
                # From when it was asked for: when the database did it is not known.
                self._ends_at = asked_at + self._lease_seconds
                return

    async def keep(self) -> None:
        """For as long as it is ours: ends with Lost."""
        while True:
            await asyncio.sleep(self._lease_seconds / RENEWALS)
            await self.renew()

    async def deadline(self) -> None:
        """Until the job's deadline has passed."""
        await asyncio.sleep(max(0.0, self._deadline_at - time.monotonic()))

    @property
    def has_deadline(self) -> bool:
        return self._deadline_at != float("inf")

    async def report(self, how: str, in_a_hurry: Callable[[], bool], **told: object) -> None:
        """`succeed` or `fail`; the same again, should its answer be lost, changes nothing."""
        delays = Delays()
        give_up_at = time.monotonic() + self._lease_seconds + REPORT_GRACE_SECONDS
        body = {"lease_token": self._token} | {
            name: value for name, value in told.items() if value is not None
        }
        while True:
            try:
                await self._ask(f"/v1/jobs/{self.job_id}/{how}", body)
            except RequestRefused as error:
                raise Lost(str(error)) from error
            except ServiceUnavailable as error:
                if in_a_hurry() or time.monotonic() >= give_up_at:
                    raise Lost(f"it could not be reported: {error}") from error
                await asyncio.sleep(delays.next_seconds())
            else:
                return


def _seconds_between(start: object, end: object) -> float:
    if not isinstance(end, str):
        return float("inf")
    return (datetime.fromisoformat(end) - datetime.fromisoformat(str(start))).total_seconds()
