"""Events in: calls schema/deliveries/ingest.sql."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from webhookd.db.connection import Connection


class NewEvent(NamedTuple):
    """What a producer gives. The payload is the JSON text that will be delivered, byte for byte."""

    event_type: str
    payload: str
    idempotency_key: str | None = None
    correlation_id: str | None = None


class Accepted(NamedTuple):
    """What it is told: the event's id, or that of the first with its key."""

    id: int
    created_at: datetime
    duplicate: bool


# The bound is set by the same statement, which stays one round trip and one transaction. The case makes the
# function's call depend on the setting, so that none runs before it.
_PUBLISH = """
    select p.id, p.created_at, p.duplicate
    from (select set_config('lock_timeout', $5, true) is not null as bounded) b
    cross join lateral webhookd.publish_many(case when b.bounded then $1::text[] end, $2, $3, $4) p
"""


async def publish(
    connection: Connection, events: Sequence[NewEvent], *, lock_timeout_seconds: float = 0
) -> list[Accepted]:
    """Store the events in one commit, all or none; answers in their order.

    A key of a transaction still open is waited for, up to the lock timeout (0: to its end).
    """
    rows = await connection.fetch(
        _PUBLISH,
        [event.event_type for event in events],
        [event.payload for event in events],
        [event.idempotency_key for event in events],
        [event.correlation_id for event in events],
        f"{int(lock_timeout_seconds * 1000)}ms",
    )
    return list(map(Accepted._make, rows))
