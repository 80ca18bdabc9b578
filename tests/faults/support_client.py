"""A support engineer: uses the HTTP API, repeats a request without an answer at the next instance.

Remembers the answers; `record` stores them in the database, where the invariants read them.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import aiohttp

from tests.faults.instance import Instance
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from tests.support.database import Connection

# Longer than a replay takes; an instance without a database answers within two seconds.
ANSWER_TIMEOUT_SECONDS = 10.0
REPEAT_SECONDS = 0.1
UNAVAILABLE = 503


class Answer(NamedTuple):
    """A status, and the document with it."""

    status: int
    body: Any


class Resend(NamedTuple):
    """A finished delivery, and the delivery that an answer named as its resend."""

    saga_id: int
    new_saga_id: int


@dataclass
class Hold:
    """A paused or disabled subscription. All times are those of the client."""

    subscription_id: int
    kind: Literal["paused", "disabled"]
    since: datetime  # the request to hold it was answered
    until: datetime | None = None  # before the request to release it
    released_at: datetime | None = None  # that request was answered


class Replay(NamedTuple):
    """A replay that was answered."""

    subscription_id: int
    include_all: bool
    since: datetime
    until: datetime
    started_at: datetime
    ended_at: datetime


@dataclass
class SupportClient:
    """The actions of a support engineer, one at a time."""

    resends: list[Resend] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    moved_paths: dict[str, float] = field(default_factory=dict)  # when the subscription left each old path
    new_paths: list[str] = field(default_factory=list)
    repeats: int = 0

    async def request(
        self,
        instances: Sequence[Instance],
        first: int,
        call: str,
        body: object = None,
        *,
        expected: Collection[int],
    ) -> Answer:
        """Send "METHOD /path" to one instance after another, until one answers with something but 503."""
        method, path = call.split(" ")
        deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
        number = first
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while time.monotonic() < deadline:
                url = f"http://127.0.0.1:{instances[number % len(instances)].daemon.port}{path}"
                try:
                    async with session.request(method, url, json=body) as response:
                        answer = Answer(response.status, await response.json(content_type=None))
                except (aiohttp.ClientError, TimeoutError):
                    answer = Answer(0, "no answer")
                if answer.status not in {0, UNAVAILABLE}:
                    assert answer.status in expected, f"{call}: {answer}"
                    return answer
                self.repeats += 1
                number += 1
                await asyncio.sleep(REPEAT_SECONDS)
        raise AssertionError(f"{call}: not answered within {CONDITION_TIMEOUT_SECONDS} s")

    def hold_of(self, subscription_id: int, kind: str) -> Hold:
        """Return the last hold of this kind."""
        return next(
            hold
            for hold in reversed(self.holds)
            if (hold.subscription_id, hold.kind) == (subscription_id, kind)
        )

    async def record(self, superuser: "Connection") -> None:
        """Store the answers in the tables of the invariants."""
        await superuser.executemany("insert into public.resends values ($1, $2)", self.resends)
        await superuser.executemany(
            "insert into public.holds values ($1, $2, $3, $4, $5)",
            [
                (hold.subscription_id, hold.kind, hold.since, hold.until, hold.released_at)
                for hold in self.holds
            ],
        )
        await superuser.executemany(
            "insert into public.replays values ($1, $2, $3, $4, $5, $6)", self.replays
        )


def utc_now() -> datetime:
    """Return the time of this machine, which is also the database's."""
    return datetime.now(UTC)
