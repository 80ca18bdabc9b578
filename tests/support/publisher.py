"""Applications that publish events over HTTP through all faults, and record which were accepted."""

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
# Per application: a load that leaves CPU time for the daemons on a small machine.
PACE_SECONDS = 0.04
RETRY_SECONDS = 0.1
BATCH_EVENTS = 20
ACCEPTED, UNAVAILABLE = 202, 503
# Longer than any response takes; only reached if a request hangs.
ANSWER_TIMEOUT_SECONDS = 20


class Publisher:
    """Applications that publish one event after another and retry each until it is accepted.

    Every `batch_every`th request is a batch. Accepted events are written to the log at once, if there is one.
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
        # The id and the sent payload of each accepted event, by idempotency key.
        self.accepted_events: dict[str, tuple[int, str]] = {}
        self.last_accepted_at = 0.0  # by time.monotonic()
        self.rejections: Counter[str] = Counter()
        self.duplicates = 0  # accepted by an earlier request whose response was lost

    @contextlib.asynccontextmanager
    async def publishing(self) -> "AsyncIterator[Publisher]":
        """Publish during the block; at its end, wait until every started request is accepted."""
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
        """Wait until `more` further events are accepted."""
        wanted = len(self.accepted_events) + more
        await until_true(lambda: len(self.accepted_events) >= wanted)

    async def refused(self, more: int) -> None:
        """Wait until `more` further requests got 503."""
        wanted = self.rejections["503"] + more
        await until_true(lambda: self.rejections["503"] >= wanted)

    def pause(self) -> None:
        """Stop sending requests."""
        self._going.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._going.set()

    async def _publish(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping:
            is_batch = self._batch_every is not None and next(self._requests) % self._batch_every == 0
            numbers = [next(self._numbers) for _ in range(BATCH_EVENTS if is_batch else 1)]
            attempt = count(numbers[0])
            while (accepted := await self._send(session, numbers, next(attempt))) is None:
                await asyncio.sleep(RETRY_SECONDS)
                await self._going.wait()
            self._record(numbers, accepted)
            await asyncio.sleep(self.pace_seconds)
            await self._going.wait()

    def _record(self, numbers: list[int], accepted: list[dict[str, Any]]) -> None:
        self.last_accepted_at = time.monotonic()
        fresh = {
            _key(number): (event["id"], _payload(number))
            for number, event in zip(numbers, accepted, strict=True)
        }
        self.accepted_events |= fresh
        self.duplicates += sum(event["duplicate"] for event in accepted)
        if self._log_path is not None:
            with self._log_path.open("a") as log:
                log.writelines(json.dumps([key, event_id]) + "\n" for key, (event_id, _) in fresh.items())

    async def _send(
        self, session: aiohttp.ClientSession, numbers: list[int], attempt: int
    ) -> list[dict[str, Any]] | None:
        """Return the accepted events, or None if the request must be retried, at the next instance if any.

        Any other response fails the test.
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
            async with session.post(url, data=body.encode(), headers=headers) as response:
                text = await response.text()
        except TimeoutError:
            self.rejections["no response"] += 1
            return None
        except aiohttp.ClientError:
            self.rejections["connection"] += 1
            return None
        if response.status == UNAVAILABLE:
            self.rejections["503"] += 1
            return None
        assert response.status == ACCEPTED, text
        document = json.loads(text)
        accepted: list[dict[str, Any]] = document.get("events", [document])
        return accepted

    def _event(self, number: int) -> str:
        event_type = self._event_types[number % len(self._event_types)]
        return f'"event_type": "{event_type}", "payload": {_payload(number)}'


def _key(number: int) -> str:
    return f"order-{number}"


def _payload(number: int) -> str:
    """Return JSON text that only an exact copy preserves."""
    return f'{{ "n":{number}.0, "name" : "é\\u0000" }}'
