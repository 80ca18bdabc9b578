"""Recorded load: events that were accepted, requests that endpoints received, health of instances.

A Publisher and a Receiver run while a test breaks something; `record` stores their records in the database,
where the invariants compare them with its content.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from standardwebhooks import Webhook, WebhookVerificationError

from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.invariants import broken_invariants
from tests.support.publisher import Publisher
from tests.support.waiting import until, until_true
from webhookd.deliveries import subscriptions

if TYPE_CHECKING:
    from tests.support.database import Connection as DatabaseConnection

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
OK_AND_CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
HEALTH_INTERVAL_SECONDS = 0.05
# A committed event is in the queue or has its sagas. An event in neither is lost, which I1 reports.
ALL_DELIVERED = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (select from webhookd.webhook_delivery_sagas where status <> 'Completed')
"""


@dataclass(eq=False)
class Receipt:
    """A request, whether its signature verified on arrival, and the status of the sent response."""

    request: Request
    verifies: bool
    response_status: int | None = None


class Receiver:
    """Subscriptions at an endpoint that answers each request after a moment, with 200 or a chosen status."""

    def __init__(
        self, endpoint: Endpoint, moment_seconds: float = 0.05, *, keeps_connections: bool = True
    ) -> None:
        self._endpoint = endpoint
        self.moment_seconds = moment_seconds
        self._keeps_connections = keeps_connections
        self._held = False
        self._created: dict[str, subscriptions.Created] = {}
        self._failing: dict[str, int] = {}  # response status by path
        self.receipts: list[Receipt] = []
        endpoint.behave(self._answer)

    async def subscribe(
        self,
        flow: Flow,
        event_type: str = EVENT_TYPE,
        host: str = "127.0.0.1",
        *,
        path: str | None = None,
        verified: bool = True,
        fails_with: int | None = None,
        max_attempts: int | None = None,
    ) -> None:
        """Create a subscription with its own path, at a host name of this endpoint."""
        path = path or f"/{event_type}"
        created = await subscriptions.create(
            flow.daemon, event_type, self._endpoint.url(path, host), max_attempts=max_attempts
        )
        self._created[path] = created
        if fails_with is not None:
            self._failing[path] = fails_with
        if verified:
            await flow.verify(created.subscription_id)

    def hold(self) -> None:
        """Hold all responses."""
        self._held = True

    def release(self) -> None:
        """Send responses again, including the held ones."""
        self._held = False

    async def received(self, more: int) -> None:
        """Wait until `more` further requests have arrived."""
        await self._endpoint.received(len(self._endpoint.requests) + more)

    def rows(self) -> list[tuple[object, ...]]:
        """Return each request as a row for the invariants."""
        rows: list[tuple[object, ...]] = []
        for receipt in self.receipts:
            request = receipt.request
            rows.append(
                (
                    int(request.headers["webhook-id"].removeprefix("evt_")),
                    self._created[request.path].subscription_id,
                    receipt.response_status,
                    datetime.fromtimestamp(request.received_at, UTC),
                    request.body,
                    receipt.verifies,
                )
            )
        return rows

    async def _answer(self, request: Request, connection: Connection) -> bool:
        # Verify now: the library rejects signatures older than five minutes, and a run may last longer.
        receipt = Receipt(request, verifies(request, self._created[request.path].signing_secret))
        self.receipts.append(receipt)
        await asyncio.sleep(self.moment_seconds)
        await until_true(lambda: not self._held)
        status = self._failing.get(request.path, 200)
        response = OK if self._keeps_connections else OK_AND_CLOSE
        receipt.response_status = status  # set before the client can receive and store it
        try:
            if status != 200:
                response = response.replace(b"200 OK", b"%d Chosen" % status)
            await connection.send(response)
        except BaseException:
            receipt.response_status = None
            raise
        return self._keeps_connections


class HealthWatch:
    """Polls an instance: counts the statuses of /healthz, lists the changes of /readyz."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self.healthz: Counter[int] = Counter()
        self.readyz: list[int] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> "AsyncIterator[HealthWatch]":
        """Poll during the block."""
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


def verifies(request: Request, secret: str) -> bool:
    """Return whether the reference library accepts the signature."""
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


async def broken_promises(
    superuser: "DatabaseConnection", publisher: Publisher, receiver: Receiver, quiet: str = ALL_DELIVERED
) -> list[str]:
    """Wait until every event is delivered, then return the names of all broken invariants."""
    await until(superuser, quiet)
    await record(superuser, publisher, receiver.rows())
    return await broken_invariants(superuser)


async def record(
    superuser: "DatabaseConnection", publisher: Publisher, receipts: Sequence[tuple[object, ...]]
) -> None:
    """Store the records of publisher and receiver in tables next to the database's own."""
    await superuser.executemany(
        "insert into public.client values ($1, $2, $3)",
        [(event_id, key, payload) for key, (event_id, payload) in publisher.accepted_events.items()],
    )
    await superuser.executemany(
        """
        insert into public.receipts (saga_id, response_status, received_at, body, verifies)
        select s.id, g.* from (select $3::integer, $4::timestamptz, $5::bytea, $6::boolean) g
        left join webhookd.webhook_delivery_sagas s
            on s.event_id = $1 and s.subscription_id = $2 and s.resent_from is null
        """,
        receipts,
    )
