"""Events to sagas: calls schema/deliveries/routing.sql."""

from typing import NamedTuple

from webhookd.db.connection import Connection, fetch_one


class Routed(NamedTuple):
    """One batch taken from the routing queue."""

    events: int
    sagas: int
    subscription_ids: list[int]  # who got some: a hint for the orchestrator's ring
    next_event_id: int  # the mark for the next call
    more: bool  # a full batch, or one cut short by its fan-out


async def route(
    connection: Connection, batch_size: int, first_event_id: int = 0, max_sagas: int = 10_000
) -> Routed:
    """Make the sagas of up to `batch_size` events, or of fewer that have a wide fan-out."""
    row = await fetch_one(
        connection, "select * from webhookd.route_events($1, $2, $3)", batch_size, first_event_id, max_sagas
    )
    return Routed(*row)
