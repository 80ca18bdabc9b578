"""Attempts: claim, load, report, release and reset. Calls schema/deliveries/delivery.sql and reaper.sql."""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg

from webhookd.core.errors import DatabaseUnavailable
from webhookd.core.states import AttemptStatus, ReportVerdict
from webhookd.db.connection import Connection
from webhookd.db.pool import Pool
from webhookd.outbound.outcome import SUCCESS

log = logging.getLogger(__name__)


class Lease(NamedTuple):
    """An attempt held by this worker until `lease_until`, and after that until the reaper resets it.

    The leases of one claim share the values from `lease_token` on, those of a subscription the ones before.
    """

    job_id: int
    saga_id: int
    subscription_id: int
    event_id: int
    attempt: int
    lease_resets: int
    callback_url: str  # empty: the subscription was held during the claim, so nothing may be sent
    secrets: list[str]
    headers: str  # a JSON object of strings
    lease_token: UUID
    lease_until: datetime
    claimed_at: datetime
    resume_from: int  # where the next claim continues


class Message(NamedTuple):
    """The content to send for a lease."""

    job_id: int
    event_type: str
    correlation_id: str | None
    payload: str


class Claimed(NamedTuple):
    """A lease, with its message if that is small."""

    lease: Lease
    message: Message | None


class Report(NamedTuple):
    """The outcome of an attempt. A 2xx without error code is a success, everything else a failure."""

    job_id: int
    lease_token: UUID
    response_status: int | None = None
    error_code: str | None = None
    duration_ms: int | None = None
    retry_after_seconds: float | None = None
    response_excerpt: bytes | None = None

    @property
    def is_success(self) -> bool:
        return (
            self.error_code is None and self.response_status is not None and self.response_status in SUCCESS
        )


class Reset(NamedTuple):
    """An expired lease: the attempt is Pending again, or Failed after too many resets."""

    job_id: int
    saga_id: int
    subscription_id: int
    worker_id: str
    lease_until: datetime
    lease_resets: int
    status: AttemptStatus


# Messages by job id: None for a row that cannot be read. A job without an entry has lost its lease, or did
# not fit into the size limit of one load.
Messages = dict[int, Message | None]

_CLAIM = "select * from webhookd.claim_jobs($1, $2, $3, $4, $5, $6, $7, $8)"


async def claim(
    connection: Connection,
    worker_id: str,
    wanted: int,
    lease_seconds: float,
    subscription_slots: int,
    slots_in_use: Mapping[int, int] | None = None,
    first_job_id: int = 0,
) -> list[Claimed]:
    """Lease up to `wanted` attempts, for each subscription at most its free slots in this worker.

    If an event cannot be read (a damaged page, say), the claim is repeated without payloads: otherwise it
    would fail forever. Loading them finds the damaged one.
    """
    in_use = slots_in_use or {}
    arguments = (
        worker_id,
        wanted,
        lease_seconds,
        subscription_slots,
        list(in_use.keys()),
        list(in_use.values()),
        first_job_id,
    )
    try:
        rows = await connection.fetch(_CLAIM, *arguments, True)
    except asyncpg.InternalServerError as error:  # also data_corrupted and index_corrupted
        log.warning("a claim with payloads failed, claiming without: %s", error)
        rows = await connection.fetch(_CLAIM, *arguments, False)
    return claims_of([tuple(row) for row in rows])


_NO_ENDPOINT: tuple[str, list[str], str] = ("", [], "{}")


def claims_of(rows: Sequence[tuple[Any, ...]]) -> list[Claimed]:
    """Read the rows of claim_jobs, in which one row has the values that several leases share.

    Not by its place: SQL promises no order.
    """
    if not rows:
        return []
    endpoints = {row[2]: row[9:12] for row in rows if row[9] is not None}
    shared = next(row[12:16] for row in rows if row[12] is not None)
    claims = []
    for row in rows:
        job_id, saga_id, subscription_id, event_id, attempt, lease_resets = row[:6]
        event_type, correlation_id, payload = row[6:9]
        callback_url, secrets, headers = endpoints.get(subscription_id, _NO_ENDPOINT)
        lease = Lease(
            job_id,
            saga_id,
            subscription_id,
            event_id,
            attempt,
            lease_resets,
            callback_url,
            secrets,
            headers,
            *shared,
        )
        message = None if payload is None else Message(job_id, event_type, correlation_id, payload)
        claims.append(Claimed(lease, message))
    return claims


async def load(connection: Connection, leases: Sequence[Lease]) -> list[Message]:
    """Return the messages of leases that are still held."""
    rows = await connection.fetch(
        "select * from webhookd.load_payloads($1, $2)",
        [lease.job_id for lease in leases],
        [lease.lease_token for lease in leases],
    )
    return [Message(*row) for row in rows]


async def load_messages(pool: Pool, leases: list[Lease]) -> Messages:
    """Load the messages together; if a row cannot be read (a damaged page, say), one by one.

    Changes nothing, so a failed call can be repeated.
    """
    try:
        return await _load_together(pool, leases)
    except DatabaseUnavailable:
        raise
    except Exception as error:
        log.warning("loading %d messages failed, loading them one by one: %s", len(leases), error)
    messages: Messages = {}
    for lease in leases:
        try:
            messages |= await _load_together(pool, [lease])
        except DatabaseUnavailable:
            raise
        except Exception:
            log.exception("cannot load the message of an attempt", extra={"job_id": lease.job_id})
            messages[lease.job_id] = None
    return messages


async def _load_together(pool: Pool, leases: list[Lease]) -> Messages:
    async with pool.connection() as connection:
        loaded = await load(connection, leases)
    return {message.job_id: message for message in loaded}


async def report(connection: Connection, reports: Sequence[Report]) -> dict[int, ReportVerdict]:
    """Store the outcomes; returns a verdict for each job."""
    columns = [list(column) for column in zip(*reports, strict=True)]
    rows = await connection.fetch(
        "select * from webhookd.report_results($1, $2, $3, $4, $5, $6, $7)", *columns
    )
    return {job_id: ReportVerdict(verdict) for job_id, verdict in rows}


async def release(connection: Connection, leases: Sequence[Lease]) -> list[int]:
    """Give back leases that were not used; returns the jobs whose lease was still held."""
    rows = await connection.fetch(
        "select * from webhookd.release_jobs($1, $2)",
        [lease.job_id for lease in leases],
        [lease.lease_token for lease in leases],
    )
    return [row[0] for row in rows]


async def reset_expired(
    connection: Connection,
    batch_size: int,
    max_lease_resets: int,
    first_lease_until: datetime | None = None,
) -> list[Reset]:
    """Reset expired leases, oldest first."""
    rows = await connection.fetch(
        "select * from webhookd.reset_expired_leases($1, $2, coalesce($3::timestamptz, '-infinity'))",
        batch_size,
        max_lease_resets,
        first_lease_until,
    )
    return [Reset(*row)._replace(status=AttemptStatus(row["status"])) for row in rows]
