"""State changes of deliveries (sagas). Calls schema/deliveries/orchestration.sql."""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

import asyncpg

from webhookd.core.metrics import Metrics
from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection, fetch_one
from webhookd.deliveries.attempts import Report

log = logging.getLogger(__name__)


class RetryPolicy(NamedTuple):
    """The instance's retry settings; a subscription's own settings override them."""

    max_attempts: int
    base_delay_seconds: float
    max_delay_seconds: float
    jitter: float


class Transition(NamedTuple):
    """A delivery that changed its status; with a problem and no status, a result that cannot be applied."""

    saga_id: int
    subscription_id: int
    event_id: int
    job_id: int | None
    status: SagaStatus | None
    attempt_count: int
    next_attempt_at: datetime
    error_code: str | None
    dead_letter_id: int | None
    correlation_id: str | None  # only after a failure
    problem: str | None


class Share(NamedTuple):
    """What one subscription may start in a batch, and the marks where its last batch ended."""

    subscription_id: int
    quota: int
    saga_mark: int | None = None
    job_mark: int | None = None


class Started(NamedTuple):
    """What one subscription started in a batch."""

    subscription_id: int
    started: int
    active: int
    drained: bool
    dead_lettered: list[Transition]
    next_saga_mark: int | None
    next_job_mark: int | None


class SweptSagas(NamedTuple):
    """One batch of a sweep; without a last id the sweep is complete."""

    last_saga_id: int | None
    dead_lettered: list[Transition]


async def due_subscriptions(
    connection: Connection, after_subscription_id: int, max_subscriptions: int
) -> list[tuple[int, datetime | None]]:
    """Return the next subscriptions with waiting deliveries, and since when the oldest is due (or None)."""
    rows = await connection.fetch(
        "select * from webhookd.due_subscriptions($1, $2)", after_subscription_id, max_subscriptions
    )
    return [(subscription_id, oldest_due_at) for subscription_id, oldest_due_at in rows]


async def start(
    connection: Connection, shares: Sequence[Share], subscription_window: int, max_attempts: int
) -> list[Started]:
    """Create attempts for due deliveries. Returns nothing if another orchestrator holds the lock."""
    rows = await connection.fetch(
        "select * from webhookd.start_due_sagas($1, $2, $3, $4, $5, $6)",
        [share.subscription_id for share in shares],
        [share.quota for share in shares],
        [share.saga_mark for share in shares],
        [share.job_mark for share in shares],
        subscription_window,
        max_attempts,
    )
    return [
        Started(*row)._replace(dead_lettered=[transition_of(dead) for dead in row["dead_lettered"]])
        for row in rows
    ]


async def rate_limits(connection: Connection, subscription_ids: Collection[int]) -> dict[int, float]:
    """Return max_per_second of those subscriptions that have one."""
    rows = await connection.fetch(
        "select s.id, s.max_per_second from webhookd.subscriptions s "
        "where s.id = any($1) and s.max_per_second is not null",
        list(subscription_ids),
    )
    return dict(rows)  # type: ignore[arg-type]


async def apply_results(
    connection: Connection,
    batch_size: int,
    policy: RetryPolicy,
    failing_after: int,
    reported_job_ids: Sequence[int] | None = None,
    excluded_job_ids: Sequence[int] = (),
) -> list[Transition]:
    """Apply results, each once: those of the given attempts, or the oldest ones."""
    rows = await connection.fetch(
        "select * from webhookd.apply_results($1, $2, $3, $4, $5, $6, $7, $8)",
        batch_size,
        *policy,
        failing_after,
        None if reported_job_ids is None else list(reported_job_ids),
        list(excluded_job_ids),
    )
    return [transition_of(row) for row in rows]


async def complete(connection: Connection, reports: Sequence[Report]) -> dict[int, int]:
    """Record and apply successes in one pass; returns the subscription of each attempt that was completed.

    Attempts whose lease was lost are left out. Refused as a whole if a delivery is not in progress. In the
    order of the jobs, so that a repeated call cannot deadlock with the first.
    """
    reports = sorted(reports, key=attrgetter("job_id"))
    rows = await connection.fetch(
        "select * from webhookd.complete_deliveries($1, $2, $3, $4, $5)",
        [report.job_id for report in reports],
        [report.lease_token for report in reports],
        [report.response_status for report in reports],
        [report.duration_ms for report in reports],
        [report.response_excerpt for report in reports],
    )
    return dict(rows)  # type: ignore[arg-type]


async def dead_letter_exhausted(
    connection: Connection, after_saga_id: int, batch_size: int, max_attempts: int
) -> SweptSagas:
    """Check the next `batch_size` waiting deliveries, and dead-letter those that have reached the limit."""
    row = await fetch_one(
        connection,
        "select * from webhookd.dead_letter_exhausted($1, $2, $3)",
        after_saga_id,
        batch_size,
        max_attempts,
    )
    return SweptSagas(row["last_saga_id"], [transition_of(dead) for dead in row["dead_lettered"]])


class Resent(NamedTuple):
    """The delivery that repeats a finished one; `created` is false if it existed already."""

    saga_id: int
    subscription_id: int
    created: bool


async def resend(connection: Connection, saga_id: int, tenant: str | None = None) -> Resent:
    """Create a delivery that repeats a finished one. With a tenant, those of others do not exist."""
    query = "select * from webhookd.resend_delivery($1, $2)"
    return Resent(*await fetch_one(connection, query, saga_id, tenant))


async def retry(connection: Connection, saga_id: int, tenant: str | None = None) -> int:
    """Make a waiting retry due now; returns its subscription."""
    query = "select subscription_id from webhookd.retry_delivery($1, $2)"
    subscription_id: int = (await fetch_one(connection, query, saga_id, tenant))[0]
    return subscription_id


def transition_of(row: asyncpg.Record) -> Transition:
    """Read a webhookd.saga_transition."""
    status = row["status"]
    return Transition(*row)._replace(status=None if status is None else SagaStatus(status))


def record(transitions: Sequence[Transition], metrics: Metrics) -> None:
    """Count transitions, and log those that are not a success."""
    for status, count in Counter(transition.status for transition in transitions).items():
        if status is None:
            metrics.results_refused.inc(count)
        else:
            metrics.transitions.labels(status.value).inc(count)
    for transition in transitions:
        if transition.status is None:
            log.error("cannot apply a result: %s", transition.problem, extra=_fields(transition))
        elif transition.status is SagaStatus.DEAD_LETTERED:
            log.warning("delivery dead-lettered", extra=_fields(transition))
        elif transition.status is SagaStatus.PENDING_RETRY:
            log.info("delivery will be retried", extra=_fields(transition))


def _fields(transition: Transition) -> dict[str, object]:
    return {
        "saga_id": transition.saga_id,
        "job_id": transition.job_id,
        "event_id": transition.event_id,
        "subscription_id": transition.subscription_id,
        "error_code": transition.error_code,
        "attempt_count": transition.attempt_count,
        "next_attempt_at": transition.next_attempt_at.isoformat()
        if transition.status is SagaStatus.PENDING_RETRY
        else None,
        "buried_as": transition.dead_letter_id,  # the dead letter that it became, named as in the API
        "correlation_id": transition.correlation_id,
    }
