"""One attempt: builds the request of a lease, sends it in time or not at all, and tells what happened."""

import logging
import time
from collections.abc import Callable

from webhookd.core.metrics import Metrics
from webhookd.core.settings import Settings
from webhookd.deliveries.attempts import Delivery, Lease, Report
from webhookd.deliveries.request import build_request
from webhookd.outbound.client import GuardedClient
from webhookd.outbound.outcome import Failure, Outcome

log = logging.getLogger(__name__)


class Sender:
    """Sends for one worker."""

    def __init__(
        self, client: GuardedClient, metrics: Metrics, settings: Callable[[], Settings], worker_id: str
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._settings = settings
        self._worker_id = worker_id

    async def send(self, lease: Lease, delivery: Delivery, asked_at: float) -> Report | None:
        """One request, and what is to be reported of it; nothing if the lease might end first."""
        settings = self._settings().delivery
        # Asked once more, for this process may have been stopped meanwhile.
        if too_late(lease, asked_at, settings.timeout_seconds):
            log.warning("too late to send: the lease may end first", extra=self._fields(lease, delivery))
            return None
        try:
            # The database's time carried forward: a host with a wrong clock signs rightly.
            now = lease.claimed_at.timestamp() + (time.monotonic() - asked_at)
            request = build_request(lease, delivery, int(now))
        except Exception:
            log.exception("a request could not be built", extra={"job_id": lease.job_id})
            outcome = Outcome(None, Failure.INTERNAL.value, 0)
        else:
            outcome = await self._client.post(
                request.url, request.headers, request.body, settings.timeout_seconds
            )
        self._record(lease, delivery, outcome)
        return Report(
            lease.job_id,
            lease.lease_token,
            outcome.response_status,
            outcome.error_code,
            outcome.duration_ms,
            outcome.retry_after_seconds,
            outcome.response_excerpt,
        )

    def _record(self, lease: Lease, delivery: Delivery, outcome: Outcome) -> None:
        self._metrics.attempts.labels(_error_class(outcome)).inc()
        self._metrics.duration.observe(outcome.duration_ms / 1000)
        level = logging.DEBUG if outcome.delivered else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level,
                "attempt delivered" if outcome.delivered else "attempt failed",
                extra=self._fields(lease, delivery)
                | {
                    "error_code": outcome.error_code,
                    "detail": outcome.detail or None,
                    "response_status": outcome.response_status,
                    "duration_ms": outcome.duration_ms,
                },
            )

    def _fields(self, lease: Lease, delivery: Delivery) -> dict[str, object]:
        return {
            "saga_id": lease.saga_id,
            "job_id": lease.job_id,
            "event_id": lease.event_id,
            "subscription_id": lease.subscription_id,
            "attempt": lease.attempt,
            "worker_id": self._worker_id,
            "correlation_id": delivery.correlation_id,
            "lease_expiration": lease.lease_until.isoformat(),
        }


def unreadable(lease: Lease) -> Report:
    """Of a delivery that could not be loaded: an attempt like any other, so that it ends."""
    return Report(lease.job_id, lease.lease_token, None, Failure.INTERNAL.value, 0)


def too_late(lease: Lease, asked_at: float, timeout_seconds: float) -> bool:
    """Whether a request begun now might outlast its lease.

    Counted from before the claim was sent, so never longer than the database counts.
    """
    lease_seconds = (lease.lease_until - lease.claimed_at).total_seconds()
    return asked_at + lease_seconds - time.monotonic() < timeout_seconds


def _error_class(outcome: Outcome) -> str:
    """The outcome as a label: an endpoint that thinks of new statuses must not make new time series."""
    if outcome.error_code is None:
        return "delivered"
    if outcome.response_status is not None:
        return f"HTTP_{outcome.response_status // 100}xx"
    return outcome.error_code
