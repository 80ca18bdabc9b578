"""The steps of the daemon, called one by one through the daemon's own functions.

Uses the login `daemon`, which only has webhookd_app, and a superuser session to move time.
"""

import secrets
from typing import TYPE_CHECKING

from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus
from webhookd.deliveries import attempts, dead_letters, ingest, router, sagas, subscriptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Record

    from tests.support.database import Connection, Database

# No delay: a retry is due at once.
POLICY = sagas.RetryPolicy(max_attempts=5, base_delay_seconds=0, max_delay_seconds=3600, jitter=0)
EVENT_TYPE = "order.created"
ADDRESS = "https://receiver.example/hook"
# Too large for a claim to return it, even compressed.
LARGE = f'"{secrets.token_hex(2000)}"'
WINDOW = 64
FAILING_AFTER = 10


class Flow:
    """The stages that an event passes, one step at a time."""

    def __init__(self, daemon: "Connection", superuser: "Connection") -> None:
        self.daemon = daemon
        self.superuser = superuser

    @classmethod
    async def open(cls, database: "Database") -> "Flow":
        """Connect as the daemon and as a superuser."""
        return cls(await database.connect("daemon"), await database.connect("superuser"))

    async def subscribe(
        self,
        event_type: str = EVENT_TYPE,
        callback_url: str = ADDRESS,
        *,
        verified: bool = True,
        max_attempts: int | None = None,
        base_delay_seconds: float | None = None,
        headers: "Mapping[str, str] | None" = None,
    ) -> int:
        """Create a subscription, by default verified, and return its id."""
        created = await subscriptions.create(
            self.daemon,
            event_type,
            callback_url,
            max_attempts=max_attempts,
            base_delay_seconds=base_delay_seconds,
            headers=headers,
        )
        if verified:
            await self.verify(created.subscription_id)
        return created.subscription_id

    async def verify(self, subscription_id: int) -> None:
        """Answer the challenge."""
        verification = await subscriptions.begin_verification(self.daemon, subscription_id)
        await subscriptions.complete_verification(self.daemon, subscription_id, verification.challenge)

    async def unverify(self, subscription_id: int) -> None:
        """Set `verified` to false, as only an operator with SQL can."""
        await self.superuser.execute(
            "update webhookd.subscriptions set verified = false where id = $1", subscription_id
        )

    async def publish(
        self, event_type: str = EVENT_TYPE, payload: str = "{}", idempotency_key: str | None = None
    ) -> int:
        """Publish an event and return its id."""
        [accepted] = await ingest.publish(
            self.daemon, [ingest.NewEvent(event_type, payload, idempotency_key)]
        )
        return accepted.id

    async def route(self, batch_size: int = 1000) -> router.Routed:
        """Create the sagas of the events in the routing queue."""
        return await router.route(self.daemon, batch_size)

    async def start(
        self,
        subscription_ids: "Sequence[int] | None" = None,
        *,
        quota: int = 1000,
        window: int = WINDOW,
        max_attempts: int = POLICY.max_attempts,
    ) -> list[sagas.Started]:
        """Start due attempts, of the given subscriptions or of all with due work."""
        if subscription_ids is None:
            waiting = await sagas.due_subscriptions(self.daemon, 0, 10_000)
            subscription_ids = [subscription_id for subscription_id, due_at in waiting if due_at is not None]
        if not subscription_ids:
            return []
        shares = [sagas.Share(subscription_id, quota) for subscription_id in subscription_ids]
        return await sagas.start(self.daemon, shares, window, max_attempts)

    async def claim(
        self, wanted: int = 1000, *, worker_id: str = "worker", lease_seconds: float = 60, slots: int = 1000
    ) -> list[attempts.Lease]:
        """Lease pending attempts."""
        claims = await attempts.claim(self.daemon, worker_id, wanted, lease_seconds, slots)
        return [claim.lease for claim in claims]

    async def report(self, lease: attempts.Lease, response_status: int = 200) -> ReportVerdict:
        """Report the answer of an endpoint."""
        verdicts = await attempts.report(
            self.daemon, [attempts.Report(lease.job_id, lease.lease_token, response_status)]
        )
        return verdicts[lease.job_id]

    async def apply(
        self,
        policy: sagas.RetryPolicy = POLICY,
        *,
        failing_after: int = FAILING_AFTER,
        batch_size: int = 1000,
    ) -> list[sagas.Transition]:
        """Apply the reported results."""
        return await sagas.apply_results(self.daemon, batch_size, policy, failing_after)

    async def attempt(
        self, response_status: int, policy: sagas.RetryPolicy = POLICY
    ) -> list[sagas.Transition]:
        """Start, claim, report and apply everything that is due."""
        await self.start(max_attempts=policy.max_attempts)
        for lease in await self.claim():
            await self.report(lease, response_status)
        return await self.apply(policy)

    async def requeue(self, dead_letter_id: int) -> dead_letters.Requeued:
        """Requeue a dead letter."""
        return await dead_letters.requeue(self.daemon, dead_letter_id)

    async def expire_lease(self, job_id: int) -> None:
        """Move the end of a lease into the past."""
        await self.superuser.execute(
            "update webhookd.webhook_delivery_jobs set lease_until = now() - interval '1 s' where id = $1",
            job_id,
        )

    async def saga_in(self, status: SagaStatus, *, subscription_id: int | None = None) -> int:
        """Create a saga and bring it to this status by legal steps; no other saga may be due."""
        if subscription_id is None:
            await self.subscribe()
        event_id = await self.publish()
        await self.route()
        match status:
            case SagaStatus.PENDING:
                pass
            case SagaStatus.IN_PROGRESS:
                await self.start()
            case SagaStatus.PENDING_RETRY:
                await self.attempt(500)
            case SagaStatus.COMPLETED:
                await self.attempt(200)
            case SagaStatus.DEAD_LETTERED:
                await self.attempt(500, POLICY._replace(max_attempts=1))
        saga_id: int = await self.daemon.fetchval(
            "select id from webhookd.webhook_delivery_sagas where event_id = $1 order by id limit 1", event_id
        )
        assert await self.saga_status(saga_id) == status
        return saga_id

    async def job_in(self, status: AttemptStatus, *, applied: bool = False) -> int:
        """Create an attempt and bring it to this status by legal steps."""
        await self.saga_in(SagaStatus.IN_PROGRESS)
        if status is not AttemptStatus.PENDING:
            [lease] = await self.claim()
            if status is not AttemptStatus.LEASED:
                await self.report(lease, 200 if status is AttemptStatus.COMPLETED else 500)
        if applied:
            await self.apply()
        job_id: int = await self.daemon.fetchval("select max(id) from webhookd.webhook_delivery_jobs")
        return job_id

    async def attempts(self, subscription_id: int) -> "list[Record]":
        """Return the attempts of a subscription in the order of their creation."""
        return await self.daemon.fetch(
            "select * from webhookd.webhook_delivery_jobs where subscription_id = $1 order by id",
            subscription_id,
        )

    async def saga_status(self, saga_id: int) -> SagaStatus:
        """Return the status of a saga."""
        return SagaStatus(
            await self.daemon.fetchval(
                "select status from webhookd.webhook_delivery_sagas where id = $1", saga_id
            )
        )

    async def job_status(self, job_id: int) -> AttemptStatus:
        """Return the status of an attempt."""
        return AttemptStatus(
            await self.daemon.fetchval(
                "select status from webhookd.webhook_delivery_jobs where id = $1", job_id
            )
        )
