"""Recorded load: events that were accepted, requests that endpoints received, health of instances.

A Publisher and a Receiver run while a test breaks something; `record` stores their records in the database,
where the invariants compare them with its content.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from standardwebhooks import Webhook, WebhookVerificationError

from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Connection, Endpoint, Request
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.invariants import broken_invariants, with_removed
from tests.support.publisher import Publisher
from tests.support.waiting import until, until_true
from webhookd.deliveries import subscriptions

if TYPE_CHECKING:
    from tests.support.database import Connection as DatabaseConnection

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
OK_AND_CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
HEALTH_INTERVAL_SECONDS = 0.05
# Longer than any retry of a test may wait, so that retry.max_delay_seconds is the limit.
RETRY_AFTER_SECONDS = 3600
CHALLENGE_PREFIX = "ver_"  # of the webhook-id of a verification
# The attempt of a request. Several sagas can have the same event, subscription and attempt number: a resent
# one is newer than the one that it repeats. An attempt is created before its request arrives.
RECORD_RECEIPTS = """
    insert into public.receipts (saga_id, job_id, response_status, received_at, body, verifies, address)
    select distinct on (a.place)
        j.saga_id, j.id, a.response_status, a.received_at, a.body, a.verifies, a.address
    from unnest($1::bigint[], $2::bigint[], $3::integer[], $4::integer[], $5::timestamptz[], $6::bytea[],
                $7::boolean[], $8::text[])
        with ordinality as a (event_id, subscription_id, attempt, response_status, received_at, body,
                              verifies, address, place)
    left join webhookd.webhook_delivery_jobs j
        on j.event_id = a.event_id and j.subscription_id = a.subscription_id and j.attempt = a.attempt
            and j.created_at <= a.received_at
    order by a.place, j.id desc
"""
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
        self._urls: dict[str, str] = {}  # by path
        self._failing: dict[str, int] = {}  # response status by path
        self._to_refuse: Counter[str] = Counter()  # by path
        self._silent_paths: set[str] = set()  # those that do not echo a challenge
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
        self._urls[path] = self._endpoint.url(path, host)
        created = await subscriptions.create(
            flow.daemon, event_type, self._urls[path], max_attempts=max_attempts
        )
        self._created[path] = created
        if fails_with is not None:
            self._failing[path] = fails_with
        if verified:
            await flow.verify(created.subscription_id)

    def subscription_at(self, path: str) -> int:
        """Return the id of the subscription that uses, used or will use a path."""
        return self._created[path].subscription_id

    def add_path(self, path: str, new_path: str) -> str:
        """Accept deliveries of the same subscription at a second path, and return its URL.

        It does not echo challenges before `echo_challenges`.
        """
        self._created[new_path] = self._created[path]
        self._urls[new_path] = self._urls[path].removesuffix(path) + new_path
        self._silent_paths.add(new_path)
        return self._urls[new_path]

    def echo_challenges(self, path: str) -> None:
        """Answer the verifications of this path correctly from now on."""
        self._silent_paths.discard(path)

    def refuse_next(self, path: str, count: int) -> None:
        """Answer the next requests at a path with 503 and a long Retry-After."""
        self._to_refuse[path] = count

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
        """Return each delivery request as a row for `record`."""
        rows: list[tuple[object, ...]] = []
        for receipt in self.receipts:
            request = receipt.request
            rows.append(
                (
                    int(request.headers["webhook-id"].removeprefix("evt_")),
                    self._created[request.path].subscription_id,
                    int(request.headers["webhook-attempt"]),
                    receipt.response_status,
                    datetime.fromtimestamp(request.received_at, UTC),
                    request.body,
                    receipt.verifies,
                    self._urls[request.path],
                )
            )
        return rows

    async def _answer(self, request: Request, connection: Connection) -> bool:
        if request.headers["webhook-id"].startswith(CHALLENGE_PREFIX):
            return await self._answer_challenge(request, connection)
        # Verify now: the library rejects signatures older than five minutes, and a run may last longer.
        receipt = Receipt(request, verifies(request, self._created[request.path].signing_secret))
        self.receipts.append(receipt)
        await asyncio.sleep(self.moment_seconds)
        await until_true(lambda: not self._held)
        status = self._failing.get(request.path, 200)
        response = OK if self._keeps_connections else OK_AND_CLOSE
        if self._to_refuse[request.path] > 0:
            self._to_refuse[request.path] -= 1
            status = 503
            response = response.replace(b"\r\n", b"\r\nRetry-After: %d\r\n" % RETRY_AFTER_SECONDS, 1)
        receipt.response_status = status  # set before the client can receive and store it
        try:
            if status != 200:
                response = response.replace(b"200 OK", b"%d Chosen" % status)
            await connection.send(response)
        except BaseException:
            receipt.response_status = None
            raise
        return self._keeps_connections

    async def _answer_challenge(self, request: Request, connection: Connection) -> bool:
        challenge = json.loads(request.body)["challenge"]
        body = b"" if request.path in self._silent_paths else json.dumps({"challenge": challenge}).encode()
        response = OK if self._keeps_connections else OK_AND_CLOSE
        await connection.send(response.replace(b"Length: 0", b"Length: %d" % len(body)) + body)
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
    if receipts:
        await superuser.execute(
            await with_removed(superuser, RECORD_RECEIPTS), *map(list, zip(*receipts, strict=True))
        )
