"""Calls schema/deliveries/retention.sql and schema/jobqueue/retention.sql, and reads their progress."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

from webhookd.core.errors import Refusal, Refused
from webhookd.core.settings import RetentionSettings
from webhookd.db.connection import Connection, fetch_one
from webhookd.db.paging import Page, Row

Kind: TypeAlias = Literal["events", "payloads"]

_ERASURE = """
    select e.id, e.tenant, e.tenant_sha256, e.subscription_id, e.requested_by, e.requested_at, e.finished_at,
           e.events, e.deliveries, e.attempts, e.dead_letters, e.subscriptions, e.jobs,
           case when e.finished_at is not null or e.tried_at = '-infinity' then null
                when e.left_out then 'a request in flight, or a job that is not finished'
                when not e.is_settled then 'a transaction from before the request'
           end as waits_for
    from webhookd.erasures e
"""


class Batch(NamedTuple):
    """The result of one call: rows removed by kind, and whether there are more now."""

    refused: bool  # another instance has the turn
    examined: int
    removed: Mapping[str, int]
    more: bool


class Preview(NamedTuple):
    """One batch of a dry run."""

    examined: int
    expired: int
    last_id: int
    more: bool


class Progress(NamedTuple):
    """How far retention is, for all instances."""

    swept_before: datetime | None  # every event from before this time was examined
    lag_seconds: float | None  # how much longer than its period the oldest unexamined event was kept
    oldest_event_at: datetime | None
    kept: int  # expired events that are not finished, or have a dead letter; counted up to a bound
    erasures: int  # that are not finished


class ErasureFilter(NamedTuple):
    """Selects erasures; None matches all. `only_tenant`: the others do not exist."""

    status: Literal["running", "finished"] | None = None
    tenant: str | None = None
    subscription_id: int | None = None
    only_tenant: str | None = None


ALL = ErasureFilter()


async def take_turn(connection: Connection, holder: str, seconds: float) -> bool:
    """Take, extend or (with 0 seconds) give back the turn; False if another instance has it."""
    taken: bool = await connection.fetchval("select webhookd.take_retention_turn($1, $2)", holder, seconds)
    return taken


async def database_time(connection: Connection) -> datetime:
    """Return the database's time."""
    now: datetime = await connection.fetchval("select clock_timestamp()")
    return now


async def sweep_events(
    connection: Connection, holder: str, kind: Kind, batch_size: int, settings: RetentionSettings
) -> Batch:
    """Delete a batch of expired events, or remove their payloads."""
    row = await fetch_one(
        connection,
        "select * from webhookd.sweep_events($1, $2, $3, $4, $5)",
        holder,
        kind,
        batch_size,
        period_days(settings, kind),
        settings.dead_letters_days,
    )
    return _batch(row)


async def recheck_kept(connection: Connection) -> None:
    """Make the next sweeps look at all kept events, also at those that are not due."""
    await connection.execute("select webhookd.recheck_kept_events()")


async def preview(
    connection: Connection,
    kind: Kind,
    batch_size: int,
    settings: RetentionSettings,
    after_id: int,
    *,
    kept: bool,
) -> Preview:
    """Count a batch of expired events without removing anything."""
    row = await fetch_one(
        connection,
        "select * from webhookd.preview_sweep($1, $2, $3, $4, $5, $6)",
        kind,
        batch_size,
        period_days(settings, kind),
        settings.dead_letters_days,
        kept,
        after_id,
    )
    return Preview(*row)


async def sweep_subscriptions(
    connection: Connection, holder: str, batch_size: int, settings: RetentionSettings
) -> Batch:
    """Remove deleted subscriptions that have no deliveries any more."""
    query = "select * from webhookd.sweep_subscriptions($1, $2, $3)"
    return _batch(await fetch_one(connection, query, holder, batch_size, settings.events_days))


async def sweep_jobs(
    connection: Connection, holder: str, batch_size: int, settings: RetentionSettings
) -> Batch:
    """Delete a batch of finished jobs, ledger rows and workflows of the job queue."""
    row = await fetch_one(
        connection,
        "select * from webhookd.sweep_jobs($1, $2, $3, $4, $5)",
        holder,
        batch_size,
        settings.jobs_days,
        settings.job_ledger_days,
        settings.job_workflows_days,
    )
    return _batch(row)


async def sweep_stats(
    connection: Connection, holder: str, batch_size: int, settings: RetentionSettings
) -> Batch:
    """Add up a batch of statistics by minute into hours, and delete a batch of expired hours."""
    query = "select * from webhookd.sweep_stats($1, $2, $3)"
    row = await fetch_one(connection, query, holder, batch_size, settings.stats_days)
    examined = row["merged"] + row["stats"]
    return Batch(row["refused"], examined, {"stats": row["stats"]}, row["more"])


async def expired_stats(connection: Connection, settings: RetentionSettings) -> int:
    """Count the rows of statistics that a pass would delete now. Uses idx_delivery_stats_day."""
    number: int = await connection.fetchval(
        """
        select count(*) from webhookd.delivery_stats_hours t
        where $1 > 0 and date_bin('1 day', t.hour, '2000-01-01 00:00:00+00')
            <= now() - make_interval(secs => ($1 + 1) * 86400)
        """,
        settings.stats_days,
    )
    return number


async def erase(
    connection: Connection, holder: str, batch_size: int, since: datetime
) -> tuple[Batch, int | None, int | None]:
    """Continue an erasure that was not tried since then. Also returns its id, and again if it is finished."""
    row = await fetch_one(connection, "select * from webhookd.erase($1, $2, $3)", holder, batch_size, since)
    batch = Batch(row["refused"], row["removed"], {"erased": row["removed"]}, row["more"])
    return batch, row["erasure_id"], row["erasure_id"] if row["finished"] else None


def period_days(settings: RetentionSettings, kind: Kind) -> float:
    """Return the period of a sweep over events."""
    return settings.events_days if kind == "events" else settings.payloads_days


def _batch(row: Any) -> Batch:
    found = dict(row)
    refused, more = found.pop("refused"), found.pop("more")
    examined = found.pop("examined", 0)
    return Batch(refused, examined or sum(found.values()), found, more)


async def progress(connection: Connection, settings: RetentionSettings, counted_up_to: int) -> Progress:
    """Return how far retention is. Reads a few rows, whatever the size of the tables.

    The oldest event is the oldest that a sweep has kept, or the first after the sweep's position: a search
    from the first id would walk past deleted ones.
    """
    row = await fetch_one(
        connection,
        """
        select p.swept_before,
               case when $1 > 0 then coalesce(greatest(0, extract(epoch from
                   now() - make_interval(secs => $1 * 86400) - next_event.created_at)), 0)::float8 end,
               least(next_event.created_at, kept_event.created_at),
               (select count(*) from (
                   select from webhookd.retention_kept k where k.kind = 'events' limit $2) k),
               (select count(*) from webhookd.erasures e where e.finished_at is null)
        from webhookd.retention_progress p
        left join lateral (
            select e.created_at from webhookd.events e where e.id > p.after_event_id order by e.id limit 1
        ) next_event on true
        left join lateral (
            select e.created_at from webhookd.events e
            where e.id = (select min(k.event_id) from webhookd.retention_kept k where k.kind = 'events')
        ) kept_event on true
        where p.kind = 'events'
        """,
        settings.events_days,
        counted_up_to,
    )
    return Progress(*row)


async def to_examine(connection: Connection, kind: Kind, settings: RetentionSettings) -> int:
    """Return about how many events a pass has to examine, by their ids: for a progress bar."""
    number: int = await connection.fetchval(
        """
        select greatest(0, coalesce((
            select e.id from webhookd.events e where e.created_at < now() - make_interval(secs => $2 * 86400)
            order by e.created_at desc, e.id desc limit 1), 0) - p.after_event_id)
        from webhookd.retention_progress p where p.kind = $1
        """,
        kind,
        period_days(settings, kind),
    )
    return number


async def request_tenant_erasure(connection: Connection, tenant: str, requested_by: str) -> Row:
    """Begin to erase a tenant, and return the erasure."""
    erasure_id = await connection.fetchval("select webhookd.erase_tenant($1, $2)", tenant, requested_by)
    return await erasure(connection, erasure_id)


async def request_subscription_erasure(
    connection: Connection, subscription_id: int, requested_by: str, tenant: str | None
) -> Row:
    """Delete a subscription and begin to erase it; return the erasure."""
    erasure_id = await connection.fetchval(
        "select webhookd.erase_subscription($1, $2, $3)", subscription_id, requested_by, tenant
    )
    return await erasure(connection, erasure_id)


async def erasure(connection: Connection, erasure_id: int, tenant: str | None = None) -> Row:
    """Return an erasure; with a tenant, only one of its subscriptions."""
    query = f"{_ERASURE} where e.id = $1 and ($2::text is null or e.tenant = $2)"
    row = await connection.fetchrow(query, erasure_id, tenant)
    if row is None:
        raise Refused(Refusal.NOT_FOUND, f"erasure {erasure_id} does not exist")
    return dict(row)


async def erasures(connection: Connection, page: Page, selection: ErasureFilter = ALL) -> list[Row]:
    """Return erasures, newest first. There are few: the filters need no index."""
    tests = ["e.id < coalesce($1, 9223372036854775807)"]
    arguments: list[object] = [page.after_id, page.limit]

    def test(condition: str, value: object) -> None:
        if value is not None:
            arguments.append(value)
            tests.append(condition.format(f"${len(arguments)}"))

    test("(e.finished_at is not null) = {0}", selection.status and selection.status == "finished")
    # A finished erasure names its tenant only by the SHA-256.
    test(
        "(e.tenant = {0} or e.tenant_sha256 = encode(sha256(convert_to({0}, 'UTF8')), 'hex'))",
        selection.tenant,
    )
    test("e.tenant = {0}", selection.only_tenant)
    test("e.subscription_id = {0}", selection.subscription_id)
    rows = await connection.fetch(
        f"{_ERASURE} where {' and '.join(tests)} order by e.id desc limit $2", *arguments
    )
    return [dict(row) for row in rows]
