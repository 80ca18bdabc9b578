"""The executor's API: claim a job or wait for one, renew its lease, report its result."""

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import TypeAlias

import msgspec
from aiohttp import web

from webhookd.context import Context
from webhookd.http.auth import ACTOR
from webhookd.http.requests import read_json
from webhookd.http.responses import json_response, no_content, raw_json, unavailable
from webhookd.http.routes import UUID_ID, QueryRunner, route
from webhookd.http.server import connection_cap
from webhookd.jobqueue import queries
from webhookd.jobqueue.api import DISABLED, JobQueueResource, accepted
from webhookd.jobqueue.requests import ClaimJob, ReportFailure, ReportProgress, ReportSuccess
from webhookd.jobqueue.results import ClaimedJob, JobRefusal, RenewedLease, ReportedJob
from webhookd.wakeups import Work

STALE_LEASE = (409, "stale_lease")
ALREADY_REPORTED = (409, "already_reported")
NOTHING_TO_CLAIM = "nothing_to_claim"
# Each waiting claim holds a connection to the API; at most half of the allowed connections may wait.
MAX_WAITING = 500
# Between two claims of the first waiter, however many wake-ups arrive.
PAUSE_SECONDS = 0.05

ClaimResult: TypeAlias = ClaimedJob | JobRefusal | None


class _ClaimQueue(asyncio.Lock):
    """The waiting claims of one kind and executor. Asyncio locks are acquired in the order of requests."""

    length = 0


class WaitingClaims:
    """Claims a job now, or waits until one can be claimed.

    Only the first waiter per kind and executor queries the database: every event wakes the waiters, and if
    all of them claimed, each event would cost as many claims as there are waiters.
    """

    def __init__(self, context: Context, database: QueryRunner) -> None:
        self._database = database
        self._wakeups = context.wakeups
        context.metrics.job_queue_claims_waiting.set_function(lambda: self.waiting)
        self._settings = context.settings
        self._queues: dict[tuple[str, str], _ClaimQueue] = {}
        self._closed = False

    async def claim(self, wanted: ClaimJob, actor: str, is_gone: Callable[[], bool]) -> ClaimResult:
        """A job, a refusal, or None if no job came within `wanted.wait_seconds`.

        A client that has disconnected claims nothing: the job would have to wait for the end of the lease. A
        client that disconnects between the claim and the answer cannot be detected, and does cost a lease.
        """
        claimed = await self._claim_now(wanted, actor)
        if claimed is not None or not wanted.wait_seconds:
            return claimed
        if self.waiting >= self._max_waiting:
            raise unavailable("too many waiting claims: try again later, or on another instance")
        deadline = asyncio.get_running_loop().time() + wanted.wait_seconds
        key = (wanted.kind, wanted.executor)
        queue = self._queues.setdefault(key, _ClaimQueue())
        queue.length += 1
        try:
            async with asyncio.timeout_at(deadline):
                await queue.acquire()
        except TimeoutError:
            return None
        else:
            try:
                return await self._wait(wanted, actor, deadline, is_gone)
            finally:
                queue.release()
        finally:
            queue.length -= 1
            if not queue.length:
                self._queues.pop(key, None)

    def open(self) -> None:
        """Allow waiting again: the API may have been restarted."""
        self._closed = False

    def close(self) -> None:
        """End all waiting claims."""
        self._closed = True
        self._wakeups.wake(Work.EVENTS)

    @property
    def waiting(self) -> int:
        """Number of waiting claims."""
        return sum(queue.length for queue in self._queues.values())

    @property
    def _max_waiting(self) -> int:
        return min(MAX_WAITING, connection_cap(self._settings()) // 2)

    async def _wait(
        self, wanted: ClaimJob, actor: str, deadline: float, is_gone: Callable[[], bool]
    ) -> ClaimResult:
        """As the first waiter: claim after every wake-up and every poll interval, until the deadline."""
        loop = asyncio.get_running_loop()
        with closing(self._wakeups.inbox(Work.EVENTS)) as inbox:
            while not (self._closed or is_gone()):
                # Not cancelled by the deadline: that could lose a job that was just claimed.
                claimed = await self._claim_now(wanted, actor)
                left_seconds = deadline - loop.time()
                if claimed is not None or left_seconds <= 0:
                    return claimed
                poll_interval_seconds = self._settings().services.poll_interval_seconds
                pause_seconds = min(PAUSE_SECONDS, left_seconds)
                await inbox.rest(pause_seconds, min(poll_interval_seconds, left_seconds))
        return None

    async def _claim_now(self, wanted: ClaimJob, actor: str) -> ClaimResult:
        claimed = await self._database.run(
            lambda connection: queries.call(
                connection,
                "fn_job_claim",
                ClaimedJob,
                kind=wanted.kind,
                executor=wanted.executor,
                lease_name=wanted.lease_name or wanted.kind,
                lease_holder=wanted.lease_holder,
                lease_ttl_seconds=wanted.lease_seconds,
                actor=actor,
            )
        )
        if isinstance(claimed, JobRefusal) and claimed.reason == NOTHING_TO_CLAIM:
            return None
        return claimed


class JobLeases(JobQueueResource):
    """The routes that an executor uses."""

    def __init__(self, context: Context, database: QueryRunner, claims: WaitingClaims) -> None:
        super().__init__(context, database)
        self._claims = claims

    @route(
        "POST /v1/jobs/claim",
        "jobs",
        "Claim a job, or wait for one",
        ClaimedJob,
        description="Returns the next job of a kind for an executor: by priority, then by age. With "
        "`wait_seconds` the answer comes as soon as there is a job, or 204 if there was none. Renew "
        "the lease with `progress` and end it with `succeed` or `fail`. If the lease expires, "
        "another executor can claim the job.",
        body=ClaimJob,
        empty_responses={204: "No job could be claimed"},
        own_problems=(DISABLED,),
    )
    async def _claim(self, request: web.Request) -> web.Response:
        claimed = await self._claims.claim(
            await read_json(request, ClaimJob, self._max_bytes),
            request[ACTOR],
            lambda: request.transport is None or request.transport.is_closing(),
        )
        if claimed is None:
            return no_content()
        job = accepted(claimed)
        self._wakeups.wake(Work.EVENTS)
        fields = msgspec.structs.asdict(job)
        return json_response(fields | {"safe_payload": raw_json(bytes(job.safe_payload).decode())})

    @route(
        f"POST /v1/jobs/{UUID_ID}/progress",
        "jobs",
        "Report progress and renew the lease",
        RenewedLease,
        description="The first report moves the job to `in_progress`.",
        body=ReportProgress,
        own_problems=(STALE_LEASE,),
    )
    async def _progress(self, request: web.Request) -> web.Response:
        report = await self._job_arguments(request, ReportProgress)
        report["status_signal_only"] = report.pop("status_signal")
        renewed = await self._call(request, "fn_job_progress", RenewedLease, **report)
        if renewed.started:
            return self._moved(renewed)
        return json_response(msgspec.structs.asdict(renewed))  # later renewals emit no event

    @route(
        f"POST /v1/jobs/{UUID_ID}/succeed",
        "jobs",
        "Report success",
        ReportedJob,
        description="Safe to repeat. A repeated report with another `result_ref` is refused.",
        body=ReportSuccess,
        own_problems=(STALE_LEASE, ALREADY_REPORTED),
    )
    async def _succeed(self, request: web.Request) -> web.Response:
        report = await self._job_arguments(request, ReportSuccess)
        return self._moved(await self._call(request, "fn_job_succeed", ReportedJob, **report))

    @route(
        f"POST /v1/jobs/{UUID_ID}/fail",
        "jobs",
        "Report a failure",
        ReportedJob,
        description="The job is retried later, up to its maximum number of attempts. With "
        "`permanent` it becomes a dead letter at once. Safe to repeat. A repeated report with "
        "another `permanent` is refused.",
        body=ReportFailure,
        own_problems=(STALE_LEASE, ALREADY_REPORTED),
    )
    async def _fail(self, request: web.Request) -> web.Response:
        report = await self._job_arguments(request, ReportFailure)
        function = "fn_job_fail_permanent" if report.pop("permanent") else "fn_job_fail_transient"
        return self._moved(await self._call(request, function, ReportedJob, **report))
