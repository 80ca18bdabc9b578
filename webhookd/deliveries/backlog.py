"""Waiting work by stage, failing endpoints and recent dead letters, for gauges and /status."""

from datetime import datetime
from typing import NamedTuple, cast

from webhookd.db.connection import Connection
from webhookd.http.health import FailingEndpointStatus


class Waiting(NamedTuple):
    """The work that waits for a stage. The oldest item could be processed since `oldest_at`."""

    stage: str
    waiting: int
    oldest_at: datetime | None
    age_seconds: float | None  # by the database's clock


# Stages of webhookd.backlog() that are no waiting work: leased attempts and failing endpoints.
NOT_WAITING = frozenset({"in_flight", "failing"})


async def waiting(connection: Connection, counted_up_to: int) -> list[Waiting]:
    """Return every stage's backlog. Counting stops at `counted_up_to`."""
    rows = await connection.fetch(
        """
        select b.stage, b.waiting, b.oldest_at, extract(epoch from now() - b.oldest_at)::double precision
        from webhookd.backlog($1) b
        """,
        counted_up_to,
    )
    return [Waiting(*row) for row in rows]


async def dead_letters_of_a_day(connection: Connection, counted_up_to: int) -> int:
    """Return the number of dead letters of the last 24 hours, requeued or not.

    Counting stops at `counted_up_to`. Uses idx_dead_failed.
    """
    count: int = await connection.fetchval(
        """
        select count(*) from (
            select from webhookd.dead_letters d where d.failed_at > now() - interval '24 hours'
            order by d.failed_at desc limit $1) w
        """,
        counted_up_to,
    )
    return count


async def failing_endpoints(connection: Connection, limit: int) -> list[FailingEndpointStatus]:
    """Return the endpoints that have been failing for longest."""
    rows = await connection.fetch(
        """
        select h.subscription_id, h.failing_since, h.consecutive_failures, h.last_error_code
        from webhookd.endpoint_health h where h.failing_since is not null order by h.failing_since limit $1
        """,
        limit,
    )
    return [cast("FailingEndpointStatus", dict(row)) for row in rows]
