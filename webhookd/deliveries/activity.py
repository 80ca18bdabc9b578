"""The newest attempts, for GET /v1/attempts and for the live page of the console.

SELECTs by the primary keys of attempts, sagas, subscriptions and events: the newest attempts need no index of
their own, because their ids only grow. Every query looks at a bounded number of attempts.
"""

from collections.abc import Collection
from typing import NamedTuple

from webhookd.core.states import AttemptStatus
from webhookd.db.connection import Connection
from webhookd.db.paging import Arguments, Page, Range, Row, fetch_by_index, piece

# The most attempts that a page looks at to find those that match its filters: about 20 ms.
MAX_EXAMINED = 2000

_JOBS = "webhookd.webhook_delivery_jobs j"
_NEWEST = Range(("j.id",))
_ATTEMPTS = """
    select j.id, j.saga_id, j.event_id, j.subscription_id, e.event_type, s.tenant, s.callback_url, j.attempt,
        j.status, j.created_at, j.finished_at, j.response_status, j.error_code, j.duration_ms,
        g.status as delivery_status, j.id = g.job_id as is_latest, j.result_applied_at
    from ({0}) j
    join webhookd.webhook_delivery_sagas g on g.id = j.saga_id
    join webhookd.subscriptions s on s.id = j.subscription_id
    join webhookd.events e on e.id = j.event_id
    where {1} order by j.id desc limit {2}"""
_LAST = "select j.id from ({0}) j order by j.id desc offset {1} limit 1"
_CHOSEN = "select * from webhookd.webhook_delivery_jobs j where j.id = any({0}::bigint[])"
_LATER = """
    select * from webhookd.webhook_delivery_jobs j where j.id > {0} and j.id <> all({1}::bigint[])
    order by j.id desc limit {2}"""
_LATER_OR_CHOSEN = "(select * from ({0}) j) union all ({1})"


class AttemptFilter(NamedTuple):
    """Selects attempts; None matches all."""

    tenant: str | None = None
    subscription_id: int | None = None
    event_type: str | None = None
    status: AttemptStatus | None = None


class Found(NamedTuple):
    """A page of attempts. If it ended before it was full, the next page starts at the cursor `cut_at`."""

    rows: list[Row]
    cut_at: int | None = None


async def attempts(connection: Connection, page: Page, selection: AttemptFilter) -> Found:
    """Return the attempts of all deliveries, newest first.

    No index serves the filters: the rows of MAX_EXAMINED attempts are compared with them.
    """
    arguments = Arguments()
    columns = {
        "tenant": "s.tenant",
        "subscription_id": "j.subscription_id",
        "event_type": "e.event_type",
        "status": "j.status",
    }
    tests = [
        f"{columns[name]} = {arguments.add(value)}"
        for name, value in selection._asdict().items()
        if value is not None
    ]
    # Without a filter, every attempt that is looked at is shown.
    examined = MAX_EXAMINED if tests else page.limit
    mark = None if page.after_id is None else (page.after_id,)
    newest = piece(_JOBS, _NEWEST, mark, examined, arguments)
    query = _ATTEMPTS.format(newest, " and ".join(tests) or "true", arguments.add(page.limit))
    rows = await fetch_by_index(connection, query, arguments)
    if len(rows) == page.limit or not tests:
        return Found(rows)
    arguments = Arguments()
    newest = piece(_JOBS, _NEWEST, mark, examined, arguments, shown="j.id")
    last = await fetch_by_index(connection, _LAST.format(newest, arguments.add(examined - 1)), arguments)
    return Found(rows, cut_at=last[0]["id"] if last else None)


async def newest_attempts(
    connection: Connection, after_id: int, limit: int, watched_ids: Collection[int], seen_ids: Collection[int]
) -> list[Row]:
    """Return the newest attempts after an id that were not seen, and those that are watched; newest first."""
    arguments = Arguments()
    later = _LATER.format(arguments.add(after_id), arguments.add(list(seen_ids)), arguments.add(limit))
    chosen = _CHOSEN.format(arguments.add(list(watched_ids)))
    jobs = _LATER_OR_CHOSEN.format(later, chosen)
    query = _ATTEMPTS.format(jobs, "true", arguments.add(limit + len(watched_ids)))
    return await fetch_by_index(connection, query, arguments)
