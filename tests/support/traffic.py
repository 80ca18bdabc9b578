"""Load that keeps its books: applications that publish over HTTP, endpoints that take, and what both saw.

Publisher and Receiver run while a test breaks something; `record` puts what they saw beside what the database
says, for the invariants to compare.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING

import aiohttp
from standardwebhooks import Webhook, WebhookVerificationError

from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.invariants import broken_invariants
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS, until
from webhookd.store import subscriptions

if TYPE_CHECKING:
    from tests.support.database import Connection as DatabaseConnection

APPLICATIONS = 8
# Of each application: a load that leaves room for the others on a small machine.
PACE_SECONDS = 0.04
RETRY_SECONDS = 0.1
ACCEPTED, UNAVAILABLE = 202, 503
# Longer than any answer may take, and than any answer takes: only to end a hang.
ANSWER_TIMEOUT_SECONDS = 20
HEALTH_INTERVAL_SECONDS = 0.05
# Whatever was committed is in the queue, or has its sagas: what is in neither is lost, for I1 to tell.
ALL_DELIVERED = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (select from webhookd.webhook_delivery_sagas where status <> 'Completed')
"""


class Publisher:
    """Applications that each publish one event after the other, and ask again until it is accepted."""

    def __init__(self, daemons: Sequence[DaemonProcess], event_types: Sequence[str] = (EVENT_TYPE,)) -> None:
        self.daemons = list(daemons)
        self._event_types = event_types
        self._numbers = count()
        self._stopping = False
        self.told: dict[str, tuple[int, str]] = {}  # by key: the event's id, and the payload that was sent
        self.turned_away: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def publishing(self) -> "AsyncIterator[Publisher]":
        """Publish for the length of the block; at its end all that was begun is accepted."""
        self._stopping = False
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            applications = [asyncio.create_task(self._publish(session)) for _ in range(APPLICATIONS)]
            try:
                yield self
                self._stopping = True
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

    async def _publish(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping:
            number = next(self._numbers)
            event_type = self._event_types[number % len(self._event_types)]
            key, payload = f"order-{number}", f'{{ "n":{number}.0, "name" : "é\\u0000" }}'
            body = f'{{"event_type": "{event_type}", "payload": {payload}}}'.encode()
            while (event_id := await self._ask(session, key, body)) is None:  # noqa: ASYNC110  over HTTP
                await asyncio.sleep(RETRY_SECONDS)
            self.told[key] = (event_id, payload)
            await asyncio.sleep(PACE_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, key: str, body: bytes) -> int | None:
        """The id it was given, or None if it may be asked again; anything else is a failure of the test."""
        daemon = self.daemons[hash(key) % len(self.daemons)]
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        url = f"http://127.0.0.1:{daemon.port}/v1/events"
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                text = await answer.text()
        except aiohttp.ClientConnectionError:
            self.turned_away["connection"] += 1
            return None
        if answer.status == UNAVAILABLE:
            self.turned_away["503"] += 1
            return None
        assert answer.status == ACCEPTED, text
        event_id: int = json.loads(text)["id"]
        return event_id


@dataclass(eq=False)
class Receipt:
    """A request, and what was answered, if that could be sent."""

    request: Request
    response_status: int | None = None


class Receiver:
    """Subscriptions at an endpoint, which takes a moment for each request and answers 200."""

    def __init__(self, endpoint: Endpoint, moment_seconds: float = 0.05) -> None:
        self._endpoint = endpoint
        self._moment_seconds = moment_seconds
        self._held = False
        self._created: dict[str, subscriptions.Created] = {}
        self.receipts: list[Receipt] = []
        endpoint.behave(self._answer)

    async def subscribe(self, flow: Flow, event_type: str = EVENT_TYPE) -> None:
        """A verified subscription, at a path of its own."""
        path = f"/{event_type}"
        created = await subscriptions.create(flow.daemon, event_type, self._endpoint.url(path))
        await flow.verify(created.subscription_id)
        self._created[path] = created

    def hold(self) -> None:
        """Answer nothing for now."""
        self._held = True

    def release(self) -> None:
        """Answer again, also what was held."""
        self._held = False

    async def received(self, more: int) -> None:
        """Wait until so many more requests came."""
        await self._endpoint.received(len(self._endpoint.requests) + more)

    def rows(self) -> list[tuple[object, ...]]:
        """Each request as the invariants want it: whose, when, which bytes, and whether it verifies."""
        rows: list[tuple[object, ...]] = []
        for receipt in self.receipts:
            request = receipt.request
            created = self._created[request.path]
            rows.append(
                (
                    int(request.headers["webhook-id"].removeprefix("evt_")),
                    created.subscription_id,
                    receipt.response_status,
                    datetime.fromtimestamp(request.received_at, UTC),
                    request.body,
                    verifies(request, created.signing_secret),
                )
            )
        return rows

    async def _answer(self, request: Request, connection: Connection) -> bool:
        receipt = Receipt(request)
        self.receipts.append(receipt)
        await asyncio.sleep(self._moment_seconds)
        await until_true(lambda: not self._held)
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        receipt.response_status = 200
        return True


class HealthWatch:
    """Asks an instance for its health, all the time: every answer of /healthz, each change of /readyz."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self.healthz: Counter[int] = Counter()
        self.readyz: list[int] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> "AsyncIterator[HealthWatch]":
        """For the length of the block."""
        task = asyncio.create_task(self._watch())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            healthz, _ = await asyncio.to_thread(self._daemon.get, "/healthz")
            readyz, _ = await asyncio.to_thread(self._daemon.get, "/readyz")
            self.healthz[healthz] += 1
            if self.readyz[-1:] != [readyz]:
                self.readyz.append(readyz)
            await asyncio.sleep(HEALTH_INTERVAL_SECONDS)


async def until_true(condition: Callable[[], bool]) -> None:
    """Return when something came true, be it in another thread."""
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110  an event of this loop would not hear the endpoint's thread
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


def verifies(request: Request, secret: str) -> bool:
    """Whether the reference library takes the signature."""
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


async def broken_promises(
    superuser: "DatabaseConnection", publisher: Publisher, receiver: Receiver
) -> list[str]:
    """Wait until all that is there is delivered; then name every promise that was not kept."""
    await until(superuser, ALL_DELIVERED)
    await superuser.executemany(
        "insert into public.client values ($1, $2, $3)",
        [(event_id, key, payload) for key, (event_id, payload) in publisher.told.items()],
    )
    await superuser.executemany(
        """
        insert into public.receipts (saga_id, response_status, received_at, body, verifies)
        select s.id, g.* from (select $3::integer, $4::timestamptz, $5::bytea, $6::boolean) g
        left join webhookd.webhook_delivery_sagas s
            on s.event_id = $1 and s.subscription_id = $2 and s.dead_letter_id is null
        """,
        receiver.rows(),
    )
    return await broken_invariants(superuser)
