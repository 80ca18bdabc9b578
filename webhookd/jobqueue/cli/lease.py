"""The lease of a claimed job: renewed while the command runs, ended by a report."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from webhookd.cli.client import Answer
from webhookd.core.errors import RequestRefused, ServiceUnavailable

# Posts a body to a path of the daemon.
Post: TypeAlias = Callable[[str, Mapping[str, object]], Awaitable[Answer]]

# A lease is renewed after each third of its length: two renewals may fail.
RENEWALS = 3
FIRST_DELAY_SECONDS = 0.25
MAX_DELAY_SECONDS = 10.0
# How long after the end of the lease a report is retried: it counts until another executor has the job.
REPORT_GRACE_SECONDS = 60.0


class LeaseLost(Exception):
    """Another executor may hold the job by now, or the result could not be reported."""


class Delays:
    """Growing random delays, so that workers do not all reconnect at once."""

    def __init__(self) -> None:
        self._next_seconds = FIRST_DELAY_SECONDS

    def next_seconds(self) -> float:
        delay_seconds, self._next_seconds = self._next_seconds, min(self._next_seconds * 2, MAX_DELAY_SECONDS)
        return delay_seconds * random.uniform(0.5, 1)  # noqa: S311  not used for security


class JobLease:
    """The lease of one claim."""

    def __init__(self, post: Post, claimed: Answer, lease_seconds: float) -> None:
        self._post = post
        self._lease_seconds = lease_seconds
        self.body: Final = claimed.body
        job: dict[str, Any] = claimed.value
        self.job_id: Final = str(job["job_id"])
        self.attempt: Final = int(job["attempt"])
        self.kind: Final = str(job["job_kind"])
        self._token = str(job["lease_token"])
        now = time.monotonic()
        self._ends_at = now + lease_seconds
        # From two times of the database: this machine's clock may be wrong.
        self._deadline_at = now + _seconds_between(job["claimed_at"], job["deadline_at"])

    async def renew(self) -> None:
        """Renew now, retrying while the daemon is unavailable; raises LeaseLost when the lease has ended."""
        delays = Delays()
        while True:
            requested_at = time.monotonic()
            try:
                # A daemon that accepts the request and does not answer must not outlast the lease.
                async with asyncio.timeout(self._ends_at - requested_at):
                    await self._post(f"/v1/jobs/{self.job_id}/progress", {"lease_token": self._token})
            except TimeoutError as error:
                raise LeaseLost("the lease could not be renewed: no answer in time") from error
            except RequestRefused as error:
                raise LeaseLost(str(error)) from error
            except ServiceUnavailable as error:
                delay_seconds = min(delays.next_seconds(), self._lease_seconds / RENEWALS)
                if time.monotonic() + delay_seconds >= self._ends_at:
                    raise LeaseLost(f"the lease could not be renewed: {error}") from error
                await asyncio.sleep(delay_seconds)
            else:
                # Counted from the request: the time of the renewal in the database is not known.
                self._ends_at = requested_at + self._lease_seconds
                return

    async def keep(self) -> None:
        """Renew until cancelled, or until LeaseLost is raised."""
        while True:
            await asyncio.sleep(self._lease_seconds / RENEWALS)
            await self.renew()

    async def wait_for_deadline(self) -> None:
        await asyncio.sleep(max(0.0, self._deadline_at - time.monotonic()))

    @property
    def has_deadline(self) -> bool:
        return self._deadline_at != float("inf")

    async def report(self, action: str, is_stopping: Callable[[], bool], **fields: object) -> None:
        """Report `succeed` or `fail`. Retrying is safe: a repeated report changes nothing."""
        delays = Delays()
        give_up_at = time.monotonic() + self._lease_seconds + REPORT_GRACE_SECONDS
        body = {"lease_token": self._token} | {
            name: value for name, value in fields.items() if value is not None
        }
        while True:
            try:
                await self._post(f"/v1/jobs/{self.job_id}/{action}", body)
            except RequestRefused as error:
                raise LeaseLost(str(error)) from error
            except ServiceUnavailable as error:
                if is_stopping() or time.monotonic() >= give_up_at:
                    raise LeaseLost(f"the result could not be reported: {error}") from error
                await asyncio.sleep(delays.next_seconds())
            else:
                return


def _seconds_between(start: object, end: object) -> float:
    if not isinstance(end, str):
        return float("inf")
    return (datetime.fromisoformat(end) - datetime.fromisoformat(str(start))).total_seconds()
