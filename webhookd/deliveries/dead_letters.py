"""Requeues dead letters. Calls schema/deliveries/dead_letters.sql."""

from datetime import datetime
from typing import NamedTuple

from webhookd.db.connection import Connection, fetch_one


class Requeued(NamedTuple):
    """The delivery that a dead letter was requeued as; `created` is false if it existed already."""

    saga_id: int
    subscription_id: int
    created: bool


class Filter(NamedTuple):
    """Selects dead letters; None matches all."""

    subscription_id: int | None = None
    error_code: str | None = None
    failed_after: datetime | None = None
    failed_before: datetime | None = None
    tenant: str | None = None


class RequeuedMany(NamedTuple):
    """One batch of a bulk requeue."""

    matched: int
    requeued: int
    skipped: int
    payload_removed: int  # of those: never requeued, and not possible any more
    last_id: int
    subscription_ids: list[int]


async def requeue(connection: Connection, dead_letter_id: int, tenant: str | None = None) -> Requeued:
    """Create the new delivery of a dead letter, at most once. With a tenant, others' do not exist."""
    query = "select * from webhookd.requeue_dead_letter($1, $2)"
    return Requeued(*await fetch_one(connection, query, dead_letter_id, tenant))


async def requeue_many(
    connection: Connection, which: Filter, after_id: int, batch_size: int, *, dry_run: bool
) -> RequeuedMany:
    """Requeue one keyset batch; continue after `last_id` until `matched` is less than the batch size."""
    row = await fetch_one(
        connection,
        "select * from webhookd.requeue_dead_letters($1, $2, $3, $4, $5, $6, $7, $8)",
        *which[:-1],
        after_id,
        batch_size,
        dry_run,
        which.tenant,
    )
    return RequeuedMany(*row)
