"""Applications that publish over HTTP, whatever happens to those they ask, and what they were told."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.daemon import DaemonProcess
from tests.support.flow import EVENT_TYPE
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until_true

APPLICATIONS = 8
# Of each application: a load that leaves room for the others on a small machine.
PACE_SECONDS = 0.04
RETRY_SECONDS = 0.1
BATCH_EVENTS = 20
ACCEPTED, UNAVAILABLE = 202, 503
# Longer than any answer may take, and than any answer takes: only to end a hang.
ANSWER_TIMEOUT_SECONDS = 20


class Publisher:
    """Applications that each publish one event after the other, and ask again until it is accepted.

    Every `batch_every`th request is a batch. What they are told is written down at once, if there is a log.
    """

    def __init__(
        self,
        daemons: Sequence[DaemonProcess],
        event_types: Sequence[str] = (EVENT_TYPE,),
        *,
        pace_seconds: float = PACE_SECONDS,
        answer_timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
        batch_every: int | None = None,
        token: str | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.daemons = list(daemons)
        self.pace_seconds = pace_seconds
        self._event_types = event_types
        self._answer_timeout_seconds = answer_timeout_seconds
        self._batch_every = batch_every
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._log_path = log_path
        self._numbers = count()
        self._requests = count(1)
        self._stopping = False
        self._going = asyncio.Event()
        self._going.set()
        self.told: dict[str, tuple[int, str]] = {}  # by key: the event's id, and the payload that was sent
        self.told_at = 0.0  # when one was last accepted, by time.monotonic()
        self.turned_away: Counter[str] = Counter()
        self.known_already = 0  # accepted before, and the answer lost

    @contextlib.asynccontextmanager
    async def publishing(self) -> "AsyncIterator[Publisher]":
        """Publish for the length of the block; at its end all that was begun is accepted."""
        self._stopping = False
        timeout = aiohttp.ClientTimeout(total=self._answer_timeout_seconds)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            applications = [asyncio.create_task(self._publish(session)) for _ in range(APPLICATIONS)]
            try:
                yield self
                self._stopping = True
                self._going.set()
                await asyncio.wait_for(asyncio.gather(*applications), CONDITION_TIMEOUT_SECONDS)
            finally:
                for application in applications:
                    application.cancel()

    async def accepted(self, more: int) -> None:
        """Wait until so many more were accepted."""
        wanted = len(self.told) + more
        await until_true(lambda: len(self.told) >= wanted)

    async def refused(self, more: int) -> None:
        """Wait until so many more were answered with 503."""
        wanted = self.turned_away["503"] + more
        await until_true(lambda: self.turned_away["503"] >= wanted)

    def pause(self) -> None:
        """Ask nothing."""
        self._going.clear()

    def go_on(self) -> None:
        """Publish again."""
        self._going.set()

    async def _publish(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping:
            is_batch = self._batch_every is not None and next(self._requests) % self._batch_every == 0
            numbers = [next(self._numbers) for _ in range(BATCH_EVENTS if is_batch else 1)]
            attempt = count(numbers[0])
            while (accepted := await self._ask(session, numbers, next(attempt))) is None:
                await asyncio.sleep(RETRY_SECONDS)
                await self._going.wait()
            self._note(numbers, accepted)
            await asyncio.sleep(self.pace_seconds)
            await self._going.wait()

    def _note(self, numbers: list[int], accepted: list[dict[str, Any]]) -> None:
        self.told_at = time.monotonic()
        fresh = {
            _key(number): (one["id"], _payload(number)) for number, one in zip(numbers, accepted, strict=True)
        }
        self.told |= fresh
        self.known_already += sum(one["duplicate"] for one in accepted)
        if self._log_path is not None:
            with self._log_path.open("a") as log:
                log.writelines(json.dumps([key, event_id]) + "\n" for key, (event_id, _) in fresh.items())

    async def _ask(
        self, session: aiohttp.ClientSession, numbers: list[int], attempt: int
    ) -> list[dict[str, Any]] | None:
        """What it was told of each, or None if it may be asked again, of another instance if there is one.

        Anything else is a failure of the test.
        """
        daemon = self.daemons[attempt % len(self.daemons)]
        url = f"http://127.0.0.1:{daemon.port}/v1/events"
        headers = dict(self._headers)
        if len(numbers) == 1:
            body = f"{{{self._event(numbers[0])}}}"
            headers["Idempotency-Key"] = _key(numbers[0])
        else:
            url += "/batch"
            members = (
                f'{{{self._event(number)}, "idempotency_key": "{_key(number)}"}}' for number in numbers
            )
            body = f'{{"events": [{", ".join(members)}]}}'
        try:
            async with session.post(url, data=body.encode(), headers=headers) as answer:
                text = await answer.text()
        except TimeoutError:
            self.turned_away["no answer"] += 1
            return None
        except aiohttp.ClientError:
            self.turned_away["connection"] += 1
            return None
        if answer.status == UNAVAILABLE:
            self.turned_away["503"] += 1
            return None
        assert answer.status == ACCEPTED, text
        told = json.loads(text)
        accepted: list[dict[str, Any]] = told.get("events", [told])
        return accepted

    def _event(self, number: int) -> str:
        event_type = self._event_types[number % len(self._event_types)]
        return f'"event_type": "{event_type}", "payload": {_payload(number)}'


def _key(number: int) -> str:
    return f"order-{number}"


def _payload(number: int) -> str:
    """Text that only a copy keeps."""
    return f'{{ "n":{number}.0, "name" : "é\\u0000" }}'
