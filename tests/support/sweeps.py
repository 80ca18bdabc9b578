"""Retention and erasure, one call at a time, and time that has passed."""

from typing import TYPE_CHECKING, Any

from webhookd.core.settings import RetentionSettings
from webhookd.retention import queries

if TYPE_CHECKING:
    from tests.support.database import Connection
    from tests.support.flow import Flow

HOLDER = "test"
MONTH = RetentionSettings(events_days=30, dead_letters_days=90)
# The tables whose rows belong to events.
OF_EVENTS = (
    "events",
    "event_labels",
    "event_routing_queue",
    "job_event_queue",
    "webhook_delivery_sagas",
    "webhook_delivery_jobs",
    "dead_letters",
    "retention_kept",
)


async def let_pass(superuser: "Connection", days: float) -> None:
    """Move the rows of events into the past, as only a superuser without triggers can."""
    async with superuser.transaction():
        await superuser.execute("set local session_replication_role = replica")
        for table, columns in {
            "events": ["created_at"],
            "event_labels": ["created_at"],
            "webhook_delivery_sagas": ["created_at", "updated_at"],
            "webhook_delivery_jobs": ["created_at"],
            "dead_letters": ["failed_at"],
            "retention_kept": ["look_again_at"],
            "subscriptions": ["created_at", "deleted_at"],
            "job_queue": ["enqueued_at", "finished_at"],
            "job_command_run": ["run_at"],
            "job_workflow": ["enqueued_at", "finished_at"],
        }.items():
            moved = ", ".join(f"{column} = {column} - make_interval(secs => $1)" for column in columns)
            await superuser.execute(f"update webhookd.{table} set {moved}", days * 86_400)


async def sweep(
    flow: "Flow", settings: RetentionSettings = MONTH, kind: queries.Kind = "events", batch_size: int = 1000
) -> dict[str, int]:
    """Sweep until there is no more; return the removed rows."""
    total: dict[str, int] = {}
    while True:
        batch = await queries.sweep_events(flow.daemon, HOLDER, kind, batch_size, settings)
        assert not batch.refused
        for name, count in batch.removed.items():
            total[name] = total.get(name, 0) + count
        if not batch.more:
            return {name: count for name, count in total.items() if count}


async def erase(flow: "Flow", batch_size: int = 1000) -> list[int]:
    """Continue erasures until there is nothing to do now; return those that finished."""
    finished = []
    since = await queries.database_time(flow.daemon)
    while True:
        batch, _, finished_id = await queries.erase(flow.daemon, HOLDER, batch_size, since)
        assert not batch.refused
        if finished_id is not None:
            finished.append(finished_id)
        if not batch.more:
            return finished


async def rows(connection: "Connection") -> dict[str, int]:
    """Count the rows of each table that belongs to events."""
    counts = {
        table: await connection.fetchval(f"select count(*) from webhookd.{table}") for table in OF_EVENTS
    }
    return {table: count for table, count in counts.items() if count}


async def containing(superuser: "Connection", needles: "list[str]") -> list[tuple[str, str]]:
    """Return every table and needle where a row of the schema contains the needle in any column."""
    tables: list[Any] = await superuser.fetch(
        "select c.relname from pg_class c where c.relnamespace = 'webhookd'::regnamespace"
        " and c.relkind in ('r', 'v', 'p')"
    )
    found = []
    for table in tables:
        for needle in needles:
            # A bytea column prints as hexadecimal digits.
            hexadecimal = needle.encode().hex()
            if await superuser.fetchval(
                f"""select exists (select from webhookd."{table["relname"]}" t
                    where position($1 in t::text) > 0 or position($2 in t::text) > 0)""",
                needle,
                hexadecimal,
            ):
                found.append((table["relname"], needle))
    return found
