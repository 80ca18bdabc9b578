"""What waits, stage by stage: calls schema/deliveries/monitoring.sql."""

from datetime import datetime
from typing import NamedTuple

from webhookd.db.connection import Connection


class Waiting(NamedTuple):
    """What waits for one stage; `oldest_at` is when the oldest of it could have been taken."""

    stage: str
    waiting: int
    oldest_at: datetime | None
    age_seconds: float | None  # by the database's clock


class FailingEndpoint(NamedTuple):
    """An endpoint that is probed, one request at a time."""

    subscription_id: int
    failing_since: datetime
    consecutive_failures: int
    last_error_code: str | None


async def waiting(connection: Connection, counted_up_to: int) -> list[Waiting]:
    """Every stage's backlog, counted no further than that."""
    rows = await connection.fetch(
        """
        select b.stage, b.waiting, b.oldest_at, extract(epoch from now() - b.oldest_at)::double precision
        from webhookd.backlog($1) b
        """,
        counted_up_to,
    )
    return [Waiting(*row) for row in rows]


async def dead_letters_of_a_day(connection: Connection, counted_up_to: int) -> int:
    """How many were given up in the last 24 hours, requeued or not, counted no further than that.

    By idx_dead_failed.
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


async def failing_endpoints(connection: Connection, limit: int) -> list[FailingEndpoint]:
    """Those that have been failing for the longest."""
    rows = await connection.fetch(
        """
        select h.subscription_id, h.failing_since, h.consecutive_failures, h.last_error_code
        from webhookd.endpoint_health h where h.failing_since is not null order by h.failing_since limit $1
        """,
        limit,
    )
    return [FailingEndpoint(*row) for row in rows]
