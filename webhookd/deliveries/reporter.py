"""Reports in batches: whatever came together while the last report was under way, and in a rest after it.

Takes outcomes; rings RESULTS, and tells the orchestrator which. A report that fails is kept and tried again:
the token makes a second one harmless.
"""

import asyncio
import logging
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from webhookd.core.errors import DatabaseFault, Refused, WebhookdError
from webhookd.core.metrics import Metrics
from webhookd.core.states import ReportVerdict
from webhookd.db.pool import Pool
from webhookd.deliveries import attempts as jobs
from webhookd.deliveries.attempts import Lease, Report
from webhookd.hints import Hints
from webhookd.pacing import rest_seconds
from webhookd.wakeups import Bells, Work

log = logging.getLogger(__name__)

MAX_BATCH = 500


class Finished(NamedTuple):
    """A lease and what is to be said of it."""

    lease: Lease
    report: Report
    correlation_id: str | None = None


class Reporter:
    """Reports until it is cancelled; `drained` when nothing is left to report."""

    def __init__(self, pool: Pool, bells: Bells, hints: Hints, metrics: Metrics, worker_id: str) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._bells = bells
        self._hints = hints
        self._metrics = metrics
        self._waiting: dict[int, Finished] = {}  # by job
        self._something: Final = asyncio.Event()
        self._nothing: Final = asyncio.Event()
        self._nothing.set()
        self._hurry: Final = asyncio.Event()

    def put(self, finished: Finished) -> None:
        """Report this with the next batch. The worker claims no more while too many wait.

        In place of what an earlier lease of the job left here: when reports fail for longer than a lease, the
        reaper takes the job back, and this worker may get it again. The earlier token is stale by then.
        """
        self._waiting[finished.lease.job_id] = finished
        self._nothing.clear()
        self._something.set()

    @property
    def waiting(self) -> int:
        """How many have not been reported yet."""
        return len(self._waiting)

    async def drained(self) -> None:
        """Until everything that was put is reported, without any further rest: the time is short."""
        self._hurry.set()
        await self._nothing.wait()

    async def run(self) -> None:
        """Report what there is, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._something.wait()
            batch = list(islice(self._waiting.values(), MAX_BATCH))
            began = loop.time()
            await self._report_all(batch)
            took_seconds = loop.time() - began
            for finished in batch:
                # Not what a later lease has put in its place meanwhile.
                if self._waiting[finished.lease.job_id] is finished:
                    del self._waiting[finished.lease.job_id]
            # A worker that waits for reports to go out may claim again.
            self._bells.ring_here(Work.JOBS, hinted=True)
            if not self._waiting:
                self._something.clear()
                self._nothing.set()
            seconds = 0.0 if self._hints.is_short_of_room else rest_seconds(len(batch), took_seconds)
            if seconds:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._hurry.wait()

    async def _report_all(self, batch: list[Finished]) -> None:
        """One that the database cannot store, which should not exist, must not hold up the others.

        It is known by the others: where none can be stored the fault is not theirs, and all are tried again.
        """
        try:
            await self.report(batch)
        except (DatabaseFault, Refused):
            refused = await self._report_each(batch)
            if len(refused) == len(batch):
                raise
            # Once more: some may have been tried before a fault of the database's passed.
            for finished, error in await self._report_each([finished for finished, _ in refused]):
                self._metrics.reports.labels("unstorable").inc()
                log.exception(
                    "a report cannot be stored: its lease will expire",
                    exc_info=error,
                    extra=self._fields(finished),
                )

    async def _report_each(self, batch: list[Finished]) -> list[tuple[Finished, WebhookdError]]:
        """One by one; those that were refused, and why."""
        refused: list[tuple[Finished, WebhookdError]] = []
        for finished in batch:
            try:
                await self.report([finished])
            except (DatabaseFault, Refused) as error:
                refused.append((finished, error))
        return refused

    async def report(self, batch: list[Finished]) -> None:
        """One batch: its verdicts are counted, and what was accepted is the orchestrator's."""
        async with self._pool.connection() as connection:
            verdicts = await jobs.report(connection, [finished.report for finished in batch])
        accepted = [job_id for job_id, verdict in verdicts.items() if verdict is ReportVerdict.ACCEPTED]
        self._metrics.reports.labels(ReportVerdict.ACCEPTED.value).inc(len(accepted))
        # Stored before, and the acknowledgement lost: perhaps not applied yet, and nobody else knows of it.
        stored = accepted + [
            job_id for job_id, verdict in verdicts.items() if verdict is ReportVerdict.DUPLICATE
        ]
        for finished in batch:
            verdict = verdicts[finished.lease.job_id]
            if verdict is not ReportVerdict.ACCEPTED:
                self._metrics.reports.labels(verdict.value).inc()
                log.warning("report not accepted: %s", verdict.value, extra=self._fields(finished))
        if stored:
            self._hints.were_reported(stored)
            self._bells.ring(Work.RESULTS, hinted=True)

    def _fields(self, finished: Finished) -> dict[str, object]:
        return {
            "job_id": finished.lease.job_id,
            "saga_id": finished.lease.saga_id,
            "event_id": finished.lease.event_id,
            "subscription_id": finished.lease.subscription_id,
            "error_code": finished.report.error_code,
            "lease_expiration": finished.lease.lease_until.isoformat(),
            "worker_id": self._worker_id,
            "correlation_id": finished.correlation_id,
        }
