"""Load that keeps its books: what applications were told, what endpoints got, and how instances felt.

A Publisher and a Receiver run while a test breaks something; `record` puts what they saw beside what the
database says, for the invariants to compare.
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
# Whatever was committed is in the queue, or has its sagas: what is in neither is lost, for I1 to tell.
ALL_DELIVERED = """
    select not exists (select from webhookd.event_routing_queue)
        and not exists (select from webhookd.webhook_delivery_sagas where status <> 'Completed')
"""


@dataclass(eq=False)
class Receipt:
    """A request, whether it verified when it came, and what was answered, if that could be sent."""

    request: Request
    verifies: bool
    response_status: int | None = None


class Receiver:
    """Subscriptions at an endpoint, which takes a moment for each request and answers 200, or as told."""

    def __init__(
        self, endpoint: Endpoint, moment_seconds: float = 0.05, *, keeps_connections: bool = True
    ) -> None:
        self._endpoint = endpoint
        self.moment_seconds = moment_seconds
        self._keeps_connections = keeps_connections
        self._held = False
        self._created: dict[str, subscriptions.Created] = {}
        self._failing: dict[str, int] = {}  # what is answered there instead
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
        """A subscription, at a path of its own, by a name that leads here."""
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
        # Now: to the library a signature of five minutes ago is worth nothing, and a long run lasts longer.
        receipt = Receipt(request, verifies(request, self._created[request.path].signing_secret))
        self.receipts.append(receipt)
        await asyncio.sleep(self.moment_seconds)
        await until_true(lambda: not self._held)
        status = self._failing.get(request.path, 200)
        answer = OK if self._keeps_connections else OK_AND_CLOSE
        receipt.response_status = status  # before the client can have it, and have it written down
        try:
            await connection.send(answer.replace(b"200 OK", b"%d Told" % status) if status != 200 else answer)
        except BaseException:
            receipt.response_status = None
            raise
        return self._keeps_connections


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


def verifies(request: Request, secret: str) -> bool:
    """Whether the reference library takes the signature."""
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


async def broken_promises(
    superuser: "DatabaseConnection", publisher: Publisher, receiver: Receiver, quiet: str = ALL_DELIVERED
) -> list[str]:
    """Wait until all that is there is delivered; then name every promise that was not kept."""
    await until(superuser, quiet)
    await record(superuser, publisher, receiver.rows())
    return await broken_invariants(superuser)


async def record(
    superuser: "DatabaseConnection", publisher: Publisher, receipts: Sequence[tuple[object, ...]]
) -> None:
    """Put what both saw beside what the database says."""
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
        receipts,
    )
