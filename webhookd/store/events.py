"""Events in: calls schema/functions/ingest.sql."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from webhookd.store.connection import Connection


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


async def publish(connection: Connection, events: Sequence[NewEvent]) -> list[Accepted]:
    """Store the events in one commit, all or none; answers in their order."""
    rows = await connection.fetch(
        "select id, created_at, duplicate from webhookd.publish_many($1, $2, $3, $4)",
        [event.event_type for event in events],
        [event.payload for event in events],
        [event.idempotency_key for event in events],
        [event.correlation_id for event in events],
    )
    return [Accepted(*row) for row in rows]
