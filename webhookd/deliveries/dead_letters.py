"""Requeueing: calls schema/deliveries/dead_letters.sql."""

from datetime import datetime
from typing import NamedTuple

from webhookd.db.connection import Connection, fetch_one


class Requeued(NamedTuple):
    """The one saga a dead letter gives; `created` is false when it was there already."""

    saga_id: int
    subscription_id: int
    created: bool


class Filter(NamedTuple):
    """Which dead letters; None means any."""

    subscription_id: int | None = None
    error_code: str | None = None
    failed_after: datetime | None = None
    failed_before: datetime | None = None


class RequeuedMany(NamedTuple):
    """One batch of a bulk requeue."""

    matched: int
    requeued: int
    skipped: int
    last_id: int
    subscription_ids: list[int]


async def requeue(connection: Connection, dead_letter_id: int) -> Requeued:
    """Make the new saga of a dead letter, once."""
    row = await fetch_one(connection, "select * from webhookd.requeue_dead_letter($1)", dead_letter_id)
    return Requeued(*row)


async def requeue_many(
    connection: Connection, which: Filter, after_id: int, batch_size: int, *, dry_run: bool
) -> RequeuedMany:
    """One keyset batch; go on with `last_id` until `matched` is less than the batch."""
    row = await fetch_one(
        connection,
        "select * from webhookd.requeue_dead_letters($1, $2, $3, $4, $5, $6, $7)",
        *which,
        after_id,
        batch_size,
        dry_run,
    )
    return RequeuedMany(*row)
