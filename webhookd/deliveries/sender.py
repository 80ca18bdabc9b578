"""One attempt as a signed request, and its outcome as a report."""

import logging
import time
from functools import lru_cache

import msgspec

from webhookd.context import Context
from webhookd.deliveries.attempts import Lease, Message, Report
from webhookd.outbound.endpoint import (
    EndpointProblem,
    Request,
    Target,
    check_headers,
    header_line,
    request_to,
    target_of,
)
from webhookd.outbound.outcome import Failure, Outcome
from webhookd.outbound.signatures import sign

log = logging.getLogger(__name__)


class Sender:
    """Builds the requests of one worker, and the reports of their outcomes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def request(self, lease: Lease, message: Message, timestamp: int) -> Request | None:
        """Build a request; None, and a log entry, if that is not possible."""
        try:
            return build_request(lease, message, timestamp)
        except Exception:
            log.exception("cannot build the request of an attempt", extra={"job_id": lease.job_id})
            return None

    def report(self, lease: Lease, message: Message, outcome: Outcome) -> Report:
        """Count and log an outcome, and make its report."""
        self._record(lease, message, outcome)
        return Report(
            lease.job_id,
            lease.lease_token,
            outcome.response_status,
            outcome.error_code,
            outcome.duration_ms,
            outcome.retry_after_seconds,
            outcome.response_excerpt,
        )

    def _record(self, lease: Lease, message: Message, outcome: Outcome) -> None:
        self._context.metrics.requests.add(_outcome_label(outcome), outcome.duration_ms / 1000)
        level = logging.DEBUG if outcome.delivered else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level,
                "attempt delivered" if outcome.delivered else "attempt failed",
                extra=self._fields(lease, message)
                | {
                    "error_code": outcome.error_code,
                    "detail": outcome.detail or None,
                    "response_status": outcome.response_status,
                    "duration_ms": outcome.duration_ms,
                },
            )

    def _fields(self, lease: Lease, message: Message) -> dict[str, object]:
        return {
            "saga_id": lease.saga_id,
            "job_id": lease.job_id,
            "event_id": lease.event_id,
            "subscription_id": lease.subscription_id,
            "attempt": lease.attempt,
            "worker_id": self._context.worker_id,
            "correlation_id": message.correlation_id,
            "lease_expiration": lease.lease_until.isoformat(),
        }


def build_request(lease: Lease, message: Message, timestamp: int) -> Request:
    """Sign the exact payload bytes (Standard Webhooks). Retries and requeues have the same id. Pure."""
    body = message.payload.encode()
    message_id = f"evt_{lease.event_id}"
    lines = (
        f"webhook-id: {message_id}\r\n"
        f"webhook-timestamp: {timestamp}\r\n"
        f"webhook-signature: {sign(lease.secrets, message_id, timestamp, body)}\r\n"
        f"webhook-attempt: {lease.attempt}\r\n"
        f"{header_line('webhook-event-type', message.event_type)}"
    )
    if message.correlation_id is not None:
        lines += header_line("webhook-correlation-id", message.correlation_id)
    return request_to(_target(lease.callback_url, lease.headers), lines, body)


@lru_cache(maxsize=1024)  # few subscriptions are active at a time
def _target(url: str, stored_headers: str) -> Target:
    headers = check_headers(msgspec.json.decode(stored_headers, type=dict[str, str]))
    if isinstance(headers, EndpointProblem):
        # The API stores none of these, but a row may come from elsewhere, and some headers frame the request.
        raise ValueError(f"the subscription's headers cannot be sent: {headers.detail}")  # noqa: TRY004
    return target_of(url, headers)


def unreadable(lease: Lease) -> Report:
    """Report an attempt whose message cannot be loaded: it counts as a failure, so that the delivery ends."""
    return Report(lease.job_id, lease.lease_token, None, Failure.INTERNAL.value, 0)


def is_too_late(lease: Lease, asked_at: float, timeout_seconds: float) -> bool:
    """Return whether a request that starts now might outlast its lease.

    `asked_at` is before the claim was sent, so the lease never looks longer here than in the database.
    """
    lease_seconds = (lease.lease_until - lease.claimed_at).total_seconds()
    return asked_at + lease_seconds - time.monotonic() < timeout_seconds


def database_time(lease: Lease, asked_at: float) -> int:
    """Return the database's Unix time, carried forward by the monotonic clock.

    A host with a wrong clock signs correctly.
    """
    return int(lease.claimed_at.timestamp() + (time.monotonic() - asked_at))


def _outcome_label(outcome: Outcome) -> str:
    """Return the class of a status, not the status: an endpoint must not be able to create time series."""
    if outcome.error_code is None:
        return "delivered"
    if outcome.response_status is not None:
        return f"HTTP_{outcome.response_status // 100}xx"
    return outcome.error_code
