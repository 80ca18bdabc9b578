"""Reports outcomes to the database in batches: all that finished since the last report started.

Successes are recorded and applied in one call, which wakes SAGAS. All others are only recorded, and RESULTS
is woken with them: failures, lost leases, and successes that cannot be applied in one call. A report that
fails is repeated; the lease token makes that harmless.
"""

import asyncio
import logging
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from webhookd.context import Context
from webhookd.core.errors import DatabaseFault, Refused, WebhookdError
from webhookd.core.states import ReportVerdict, SagaStatus
from webhookd.deliveries import attempts, sagas
from webhookd.deliveries.attempts import Lease, Report
from webhookd.deliveries.pacing import rest_seconds
from webhookd.wakeups import Work

log = logging.getLogger(__name__)

MAX_BATCH = 500

NOT_ACCEPTED = {
    ReportVerdict.DUPLICATE: "duplicate (the same report was stored before)",
    ReportVerdict.STALE: "stale (the lease was taken back; another worker may have the attempt)",
    ReportVerdict.UNKNOWN: "unknown (the attempt does not exist)",
}


class Finished(NamedTuple):
    """A lease and the report of its outcome."""

    lease: Lease
    report: Report
    correlation_id: str | None = None


class Reporter:
    """Reports until it is cancelled. `drained` waits until nothing is left to report."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: dict[int, Finished] = {}  # by job id
        self._has_reports: Final = asyncio.Event()
        self._is_empty: Final = asyncio.Event()
        self._is_empty.set()
        self._draining: Final = asyncio.Event()

    def put(self, finished: Finished) -> None:
        """Add a report to the next batch. The worker stops claiming while too many wait.

        It replaces the report of an earlier lease of the same job: if reports fail for longer than a lease
        lasts, the reaper resets the job and this worker may get it again. The earlier token is stale by then.
        """
        self._waiting[finished.lease.job_id] = finished
        self._is_empty.clear()
        self._has_reports.set()

    @property
    def is_behind(self) -> bool:
        """Whether too many reports wait; then the worker stops claiming."""
        return len(self._waiting) > self._context.settings().delivery.concurrency

    async def drained(self) -> None:
        """Wait until everything is reported, without further rests: a shutdown is short of time."""
        self._draining.set()
        await self._is_empty.wait()

    async def run(self) -> None:
        """Report batch after batch, forever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_reports.wait()
            batch = list(islice(self._waiting.values(), MAX_BATCH))
            began = loop.time()
            await self._report_all(batch)
            took_seconds = loop.time() - began
            was_behind = self.is_behind
            for finished in batch:
                # Keep the report of a later lease that replaced this one meanwhile.
                if self._waiting[finished.lease.job_id] is finished:
                    del self._waiting[finished.lease.job_id]
            if was_behind:
                # The worker waited for reports to be sent before it claims again.
                self._context.wakeups.wake(Work.ATTEMPTS)
            if not self._waiting:
                self._has_reports.clear()
                self._is_empty.set()
            urgent = self._context.wakeups.results_are_urgent
            seconds = 0.0 if urgent else rest_seconds(len(batch), took_seconds)
            if seconds:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._draining.wait()

    async def _report_all(self, batch: list[Finished]) -> None:
        """Report a batch; if the database rejects it, report one by one and drop those that cannot be stored.

        If it rejects every single report, the reports are not at fault, and all are tried again.
        """
        try:
            await self.report(batch)
        except (DatabaseFault, Refused):
            rejected = await self._report_each(batch)
            if len(rejected) == len(batch):
                raise
            # Once more: some may have been tried before a fault of the database passed.
            for finished, error in await self._report_each([finished for finished, _ in rejected]):
                self._context.metrics.reports.labels("unstorable").inc()
                log.exception(
                    "a report cannot be stored, its lease will expire",
                    exc_info=error,
                    extra=self._fields(finished),
                )

    async def _report_each(self, batch: list[Finished]) -> list[tuple[Finished, WebhookdError]]:
        """Report one by one; returns the rejected reports and the errors."""
        rejected: list[tuple[Finished, WebhookdError]] = []
        for finished in batch:
            try:
                await self.report([finished])
            except (DatabaseFault, Refused) as error:
                rejected.append((finished, error))
        return rejected

    async def report(self, batch: list[Finished]) -> None:
        """Store one batch: complete the successes, record the others and pass them on to the applier."""
        completed = await self._complete([finished for finished in batch if finished.report.is_success])
        if rest := [finished for finished in batch if finished.lease.job_id not in completed]:
            await self._record(rest)

    async def _complete(self, successes: list[Finished]) -> dict[int, int]:
        """Record and apply successes; returns those that were, each with its subscription."""
        if not successes:
            return {}
        try:
            async with self._context.pool.connection() as connection:
                completed = await sagas.complete(connection, [finished.report for finished in successes])
        except (DatabaseFault, Refused) as error:
            log.warning("cannot complete %d deliveries in one call: %s", len(successes), error)
            return {}
        metrics = self._context.metrics
        metrics.reports.labels(ReportVerdict.ACCEPTED.value).inc(len(completed))
        metrics.transitions.labels(SagaStatus.COMPLETED.value).inc(len(completed))
        if completed:
            self._context.wakeups.freed(set(completed.values()))
        return completed

    async def _record(self, batch: list[Finished]) -> None:
        metrics = self._context.metrics
        async with self._context.pool.connection() as connection:
            verdicts = await attempts.report(connection, [finished.report for finished in batch])
        accepted = [job_id for job_id, verdict in verdicts.items() if verdict is ReportVerdict.ACCEPTED]
        metrics.reports.labels(ReportVerdict.ACCEPTED.value).inc(len(accepted))
        # A duplicate was stored before and its acknowledgement lost: it may not have been applied yet.
        stored = accepted + [
            job_id for job_id, verdict in verdicts.items() if verdict is ReportVerdict.DUPLICATE
        ]
        for finished in batch:
            verdict = verdicts[finished.lease.job_id]
            if verdict is not ReportVerdict.ACCEPTED:
                metrics.reports.labels(verdict.value).inc()
                log.warning("report not accepted: %s", NOT_ACCEPTED[verdict], extra=self._fields(finished))
        if stored:
            self._context.wakeups.wake(Work.RESULTS, stored, notify=True)
        # A success that was applied before: its acknowledgement, and with it the wake-up, was lost.
        freed = {
            finished.lease.subscription_id
            for finished in batch
            if verdicts[finished.lease.job_id] is ReportVerdict.DUPLICATE
        }
        if freed:
            self._context.wakeups.freed(freed)

    def _fields(self, finished: Finished) -> dict[str, object]:
        return {
            "job_id": finished.lease.job_id,
            "saga_id": finished.lease.saga_id,
            "event_id": finished.lease.event_id,
            "subscription_id": finished.lease.subscription_id,
            "error_code": finished.report.error_code,
            "lease_expiration": finished.lease.lease_until.isoformat(),
            "worker_id": self._context.worker_id,
            "correlation_id": finished.correlation_id,
        }
