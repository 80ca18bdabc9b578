"""What the orchestrator does to sagas: calls schema/deliveries/orchestration.sql."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg

from webhookd.core.states import SagaStatus
from webhookd.db.connection import Connection, fetch_one


class RetryPolicy(NamedTuple):
    """How often and how long; a subscription's own settings come before it."""

    max_attempts: int
    base_delay_seconds: float
    max_delay_seconds: float
    jitter: float


class Transition(NamedTuple):
    """A saga that was moved; or, with a problem and no status, a result that could not be applied."""

    saga_id: int
    subscription_id: int
    event_id: int
    job_id: int | None
    status: SagaStatus | None
    attempt_count: int
    next_attempt_at: datetime
    error_code: str | None
    dead_letter_id: int | None
    correlation_id: str | None  # of one that ends in a dead letter
    problem: str | None


class Share(NamedTuple):
    """What one subscription may have in a tick, and the marks of the last one."""

    subscription_id: int
    quota: int
    saga_mark: datetime | None = None
    job_mark: int | None = None


class Started(NamedTuple):
    """What it got."""

    subscription_id: int
    started: int
    active: int
    drained: bool
    dead_lettered: list[Transition]
    next_saga_mark: datetime | None
    next_job_mark: int | None


class Swept(NamedTuple):
    """One batch of a sweep; no last id means that it is over."""

    last_saga_id: int | None
    dead_lettered: list[Transition]


async def due_subscriptions(
    connection: Connection, after_subscription_id: int, max_subscriptions: int
) -> list[tuple[int, datetime | None]]:
    """The next subscriptions with waiting sagas, by id; and since when something is due, if it is."""
    rows = await connection.fetch(
        "select * from webhookd.due_subscriptions($1, $2)", after_subscription_id, max_subscriptions
    )
    return [(subscription_id, oldest_due_at) for subscription_id, oldest_due_at in rows]


async def start(
    connection: Connection, shares: Sequence[Share], subscription_window: int, max_attempts: int
) -> list[Started]:
    """Make jobs for what is due. Empty when another orchestrator is at it."""
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
        Started(*row)._replace(dead_lettered=[_transition(dead) for dead in row["dead_lettered"]])
        for row in rows
    ]


async def apply_results(
    connection: Connection,
    batch_size: int,
    policy: RetryPolicy,
    failing_after: int,
    reported_job_ids: Sequence[int] | None = None,
    excluded_job_ids: Sequence[int] = (),
) -> list[Transition]:
    """Apply results, each once: those the caller knows of, or the oldest there are."""
    rows = await connection.fetch(
        "select * from webhookd.apply_results($1, $2, $3, $4, $5, $6, $7, $8)",
        batch_size,
        *policy,
        failing_after,
        None if reported_job_ids is None else list(reported_job_ids),
        list(excluded_job_ids),
    )
    return [_transition(row) for row in rows]


async def dead_letter_exhausted(
    connection: Connection, after_saga_id: int, batch_size: int, max_attempts: int
) -> Swept:
    """Look at the next `batch_size` waiting sagas, and dead-letter those that have reached the limit."""
    row = await fetch_one(
        connection,
        "select * from webhookd.dead_letter_exhausted($1, $2, $3)",
        after_saga_id,
        batch_size,
        max_attempts,
    )
    return Swept(row["last_saga_id"], [_transition(dead) for dead in row["dead_lettered"]])


def _transition(row: asyncpg.Record) -> Transition:
    status = row["status"]
    return Transition(*row)._replace(status=None if status is None else SagaStatus(status))
