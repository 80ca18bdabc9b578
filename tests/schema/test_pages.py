"""Pages of lists among 200,000 finished deliveries: the rows they show and the blocks they read.

Each list is read with every combination of filters, first and last page. Some filters match many rows, others
three rows at the ends of the history. The session's own counters show what was read.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import pytest

from tests.support.database import Cluster, Database
from tests.support.flow import Flow
from tests.support.history import (
    RARE_ERROR,
    SAGAS_OF_EVENT,
    SUBSCRIPTION_OF_RARE_ERROR,
    SUBSCRIPTIONS,
    vacuum,
    watch,
    write_history,
)
from tests.support.nightly import first_in_gate
from tests.support.postgres import run_apart
from webhookd.core.errors import Refused
from webhookd.core.states import AttemptStatus, SagaStatus
from webhookd.db.paging import Page
from webhookd.deliveries import activity, dead_letters, delivery_lists, reads
from webhookd.deliveries.dead_letters import Filter
from webhookd.deliveries.delivery_lists import DeliveryFilter
from webhookd.deliveries.explain import Limits
from webhookd.deliveries.reads import EventFilter

if TYPE_CHECKING:
    from datetime import datetime

    from tests.support.database import Connection

    List: TypeAlias = Callable[[Connection, Page], Awaitable[list[dict[str, Any]]]]

Result = TypeVar("Result")

SIZE = 200_000
LIMIT = 20
# A page reads at most so many rows of one index, or of five, a block each, and makes a lookup for each row it
# shows: three levels and a row. The rest is index descents and the planner's probes of index ends.
BLOCKS_OF_ROW = 4
BLOCKS_OF_PAGE = 60 + LIMIT
BLOCKS_OF_FIVE_PIECES = 100 + 5 * LIMIT
# Deliveries that are not finished, the newest of the history: nearly all wait for their first attempt.
BACKLOG = 3000
EACH_IN_PROGRESS = 9
WINDOW = 500
# Three lists read more than their page, because an index for them costs each delivery more than these lists
# are worth. Completed follows the primary key and passes newer deliveries that are not finished, at least 20
# in a block. Pending takes two steps for each subscription that has some: to find it, and its newest. In
# progress reads all of them, a block each, which the windows limit.
BLOCKS_OF_LIST = {
    "deliveries, completed": BACKLOG // 20,
    "deliveries, pending": 5 * SUBSCRIPTIONS,
    "deliveries, in progress": BACKLOG // EACH_IN_PROGRESS,
    # Of each of four subscriptions, five pieces: first the newest row, then a page.
    "deliveries, tenant": 4 * BLOCKS_OF_FIVE_PIECES,
    "deliveries, rare tenant": BLOCKS_OF_FIVE_PIECES,
    "deliveries, tenant and status": 4 * BLOCKS_OF_PAGE,
    # All rows of the window are looked at, each with its event.
    "deliveries, type's end": WINDOW * (1 + BLOCKS_OF_ROW),
    # One row of each event.
    "deliveries, type and subscription": 2 * BLOCKS_OF_ROW * LIMIT,
}
# By time: two binary searches of 18 steps, each a descent and a row, and the rows of a minute at the end.
BLOCKS_OF_TIME = 2 * 18 * 4 + 60
# An explained delivery: its patterns, saga, last attempt, dead letter, endpoint, and other active attempts.
BLOCKS_OF_WHY = 26
LIMITS = Limits(subscription_window=64, max_attempts=5)

# Three deliveries in the whole history: the first, one in the middle, the last.
RARE_SUBSCRIPTION = 398
# A few successes at the start, then only failures, with thousands of dead letters.
DOWN_SUBSCRIPTION = 397
DOWN_ERROR = "TIMEOUT"
RARE_TYPE = "type.rare"
TENANT, TENANT_TYPE = "acme", "type.n4"
RARE_TENANT = "globex"
# It has a fifth of the events, of twenty types, and no subscription.
BUSY_TENANT = "initech"
SUBSCRIPTION_OF_RARE_TENANT = 396
EVENTS_OF_RARE_TENANT = f"(6, {SIZE // 8 + 6}, {SIZE // 4 - 94})"
FAR_APART = f"(100, {SIZE // 2}, {SIZE - 100})"
UNUSUAL = (
    f"""
    update webhookd.webhook_delivery_sagas set subscription_id = 1 where subscription_id = {RARE_SUBSCRIPTION}
    """,
    f"""
    update webhookd.webhook_delivery_sagas
    set subscription_id = {RARE_SUBSCRIPTION}, status = 'PendingRetry', final_error_code = '{DOWN_ERROR}'
    where id in {FAR_APART}
    """,
    f"""
    update webhookd.webhook_delivery_sagas set status = 'DeadLettered', final_error_code = '{DOWN_ERROR}'
    where subscription_id = {DOWN_SUBSCRIPTION} and id > 2000
    """,
    f"""
    update webhookd.webhook_delivery_sagas
    set status = case id % {EACH_IN_PROGRESS} when 0 then 'InProgress' else 'Pending' end
        ::webhookd.saga_status,
        attempt_count = 0
    where id > {SIZE - BACKLOG} and status = 'Completed'
    """,
    f"update webhookd.events set event_type = '{RARE_TYPE}' where id in (9, {SIZE // 8}, {SIZE // 4 - 9})",
    # A tenant with four subscriptions and their events, and one with three deliveries in the whole history.
    f"update webhookd.subscriptions set tenant = '{TENANT}' where event_type = '{TENANT_TYPE}'",
    f"update webhookd.events set tenant = '{TENANT}' where event_type = '{TENANT_TYPE}'",
    f"""
    update webhookd.webhook_delivery_sagas set subscription_id = 1
    where subscription_id = {SUBSCRIPTION_OF_RARE_TENANT}
    """,
    f"""
    update webhookd.webhook_delivery_sagas set subscription_id = {SUBSCRIPTION_OF_RARE_TENANT}
    where event_id in {EVENTS_OF_RARE_TENANT} and subscription_id = 6
    """,
    f"""
    update webhookd.subscriptions set tenant = '{RARE_TENANT}' where id = {SUBSCRIPTION_OF_RARE_TENANT}
    """,
    f"update webhookd.events set tenant = '{RARE_TENANT}' where id in {EVENTS_OF_RARE_TENANT}",
    f"update webhookd.events set tenant = '{BUSY_TENANT}' where event_type ~ '^type.n[12].$'",
    """
    update webhookd.dead_letters d set tenant = e.tenant
    from webhookd.events e where e.id = d.event_id and e.tenant <> ''
    """,
    f"update webhookd.dead_letters set tenant = '{TENANT}' where id % 10 = 3",
    """
    update webhookd.events set labels = '{"region": "eu"}' where event_type = 'type.n4' or id % 5 = 0
    """,
    """
    update webhookd.events
    set correlation_id = 'trace', labels = coalesce(labels, '{}') || '{"order": "7"}'
    where event_type = 'type.rare'
    """,
    """
    insert into webhookd.event_labels (event_id, tenant, name, value, created_at)
    select e.id, e.tenant, l.key, l.value, e.created_at
    from webhookd.events e cross join lateral jsonb_each_text(e.labels) l
    """,
    f"update webhookd.dead_letters set subscription_id = {DOWN_SUBSCRIPTION} where id between 3000 and 9000",
    # The common code, at the subscription that has the rare one; far from the others.
    f"""
    update webhookd.dead_letters set subscription_id = {SUBSCRIPTION_OF_RARE_ERROR}
    where id in (select id from webhookd.dead_letters where final_error_code = 'HTTP_500' order by id limit 3)
    """,
)


SAGAS = """
    select g.*, e.event_type, e.created_at as event_at, u.tenant
    from webhookd.webhook_delivery_sagas g
    join webhookd.events e on e.id = g.event_id join webhookd.subscriptions u on u.id = g.subscription_id"""


class Case(NamedTuple):
    """A list, and the same in SQL to compare with."""

    fetch: "List"
    filters: dict[str, Any]
    expected: str


def deliveries(where: str, order: str = "id desc", **filters: Any) -> Case:
    """Return a case of deliveries. Its times are given as ids of deliveries that were created then."""

    async def ask(connection: "Connection", page: Page) -> list[dict[str, Any]]:
        times = await times_of(connection, "webhook_delivery_sagas", filters)
        found = await delivery_lists.deliveries(connection, page, DeliveryFilter(**filters | times))
        assert found.cut_at is None
        return found.rows

    return Case(ask, filters, f"select id from ({SAGAS}) s where {where} order by {order}")


def deliveries_of_type(where: str, **filters: Any) -> Case:
    """Return a case of deliveries by event type, which follow their events."""
    return deliveries(where, "event_at desc, event_id desc, id desc", **filters)


def events(where: str, **filters: Any) -> Case:
    """Return a case of events. Its times are given as ids of events that were created then."""

    async def ask(connection: "Connection", page: Page) -> list[dict[str, Any]]:
        times = await times_of(connection, "events", filters)
        return await reads.events(connection, page, EventFilter(**filters | times))

    return Case(
        ask, filters, f"select id from webhookd.events where {where} order by created_at desc, id desc"
    )


async def times_of(connection: "Connection", table: str, filters: dict[str, Any]) -> "dict[str, datetime]":
    """Return the times of a filter, which are given as ids of rows that were created then."""
    return {
        name: await connection.fetchval(f"select created_at from webhookd.{table} where id = $1", value)
        for name, value in filters.items()
        if name.startswith("created")
    }


def dead_letter_case(where: str, **filters: Any) -> Case:
    """Return a case of dead letters."""

    async def ask(connection: "Connection", page: Page) -> list[dict[str, Any]]:
        return await reads.dead_letters(connection, page, await with_times(connection, filters))

    return Case(
        ask, filters, f"select id from webhookd.dead_letters where {where} order by failed_at desc, id desc"
    )


async def with_times(connection: "Connection", filters: dict[str, Any]) -> Filter:
    """Return a filter; its times are given as ids of dead letters that failed then."""
    times: dict[str, datetime] = {
        name: await connection.fetchval("select failed_at from webhookd.dead_letters where id = $1", value)
        for name, value in filters.items()
        if name.startswith("failed")
    }
    return Filter(**filters | times)


def created_at(table: str, row_id: int) -> str:
    """Return the time when a row was created, in SQL."""
    return f"(select created_at from webhookd.{table} where id = {row_id})"


def at(letter_id: int) -> str:
    """Return the time when a dead letter failed, in SQL."""
    return f"(select failed_at from webhookd.dead_letters where id = {letter_id})"


RARE, DOWN = RARE_SUBSCRIPTION, DOWN_SUBSCRIPTION
COMPLETED, DEAD = SagaStatus.COMPLETED, SagaStatus.DEAD_LETTERED
BOTH = f"subscription_id = {SUBSCRIPTION_OF_RARE_ERROR} and final_error_code = 'HTTP_500'"
CASES = {
    "deliveries": deliveries("true"),
    "deliveries, completed": deliveries("status = 'Completed'", status=COMPLETED),
    "deliveries, dead": deliveries("status = 'DeadLettered'", status=DEAD),
    "deliveries, rare status": deliveries("status = 'PendingRetry'", status=SagaStatus.PENDING_RETRY),
    "deliveries, pending": deliveries("status = 'Pending'", status=SagaStatus.PENDING),
    "deliveries, in progress": deliveries("status = 'InProgress'", status=SagaStatus.IN_PROGRESS),
    "deliveries, subscription": deliveries("subscription_id = 1", subscription_id=1),
    "deliveries, rare subscription": deliveries(f"subscription_id = {RARE}", subscription_id=RARE),
    "deliveries, no such subscription": deliveries("subscription_id = 9999", subscription_id=9999),
    "deliveries, subscription and status": deliveries(
        "subscription_id = 1 and status = 'Completed'", subscription_id=1, status=COMPLETED
    ),
    "deliveries, subscription and rare status": deliveries(
        f"subscription_id = {DOWN} and status = 'Completed'", subscription_id=DOWN, status=COMPLETED
    ),
    "deliveries, subscription and pending": deliveries(
        "subscription_id = 7 and status = 'Pending'", subscription_id=7, status=SagaStatus.PENDING
    ),
    "deliveries, subscription and in progress": deliveries(
        "subscription_id = 7 and status = 'InProgress'", subscription_id=7, status=SagaStatus.IN_PROGRESS
    ),
    "deliveries, subscription and no such status": deliveries(
        f"subscription_id = {RARE} and status = 'Pending'", subscription_id=RARE, status=SagaStatus.PENDING
    ),
    "deliveries, event": deliveries("event_id = 12", event_id=12),
    "deliveries, event and subscription": deliveries(
        "event_id = 2 and subscription_id = 2", event_id=2, subscription_id=2
    ),
    "deliveries, event and status": deliveries(
        "event_id = 30000 and status = 'DeadLettered'", event_id=30000, status=DEAD
    ),
    "deliveries, tenant": deliveries(f"tenant = '{TENANT}'", tenant=TENANT),
    "deliveries, rare tenant": deliveries(f"tenant = '{RARE_TENANT}'", tenant=RARE_TENANT),
    "deliveries, no such tenant": deliveries("false", tenant="none"),
    "deliveries, tenant and status": deliveries(
        f"tenant = '{TENANT}' and status = 'DeadLettered'", tenant=TENANT, status=DEAD
    ),
    "deliveries, type": deliveries_of_type("event_type = 'type.n7'", event_type="type.n7"),
    "deliveries, rare type": deliveries_of_type(f"event_type = '{RARE_TYPE}'", event_type=RARE_TYPE),
    "deliveries, no such type": deliveries("false", event_type="type.none"),
    "deliveries, tenant and type": deliveries_of_type(
        f"tenant = '{TENANT}' and event_type = '{TENANT_TYPE}'", tenant=TENANT, event_type=TENANT_TYPE
    ),
    "deliveries, tenant and no such type": deliveries("false", tenant=BUSY_TENANT, event_type="type.n7"),
    "deliveries, type and subscription": deliveries_of_type(
        "event_type = 'type.n7' and subscription_id = 8", event_type="type.n7", subscription_id=8
    ),
    "deliveries, type's beginning": deliveries_of_type(
        f"event_type = 'type.n7' and created_at < {created_at('webhook_delivery_sagas', 2000)}",
        event_type="type.n7",
        created_before=2000,
    ),
    "deliveries, type's end": deliveries(
        f"event_type = 'type.n7' and created_at >= {created_at('webhook_delivery_sagas', SIZE - WINDOW)}",
        event_type="type.n7",
        created_after=SIZE - WINDOW,
    ),
    "deliveries, error": deliveries("final_error_code = 'HTTP_500'", error_code="HTTP_500"),
    "deliveries, rare error": deliveries(f"final_error_code = '{RARE_ERROR}'", error_code=RARE_ERROR),
    "deliveries, no such error": deliveries("false", error_code="X"),
    "deliveries, error and status": deliveries(
        "final_error_code = 'HTTP_500' and status = 'DeadLettered'", error_code="HTTP_500", status=DEAD
    ),
    "deliveries, beginning": deliveries(
        f"created_at < {created_at('webhook_delivery_sagas', 30)}", created_before=30
    ),
    "deliveries, end": deliveries(
        f"created_at >= {created_at('webhook_delivery_sagas', SIZE - 30)}", created_after=SIZE - 30
    ),
    "deliveries, subscription's window": deliveries(
        f"subscription_id = 1 and created_at >= {created_at('webhook_delivery_sagas', 50_000)} "
        f"and created_at < {created_at('webhook_delivery_sagas', 60_000)}",
        subscription_id=1,
        created_after=50_000,
        created_before=60_000,
    ),
    "events": events("true"),
    "events, tenant": events(f"tenant = '{BUSY_TENANT}'", tenant=BUSY_TENANT),
    "events, rare tenant": events(f"tenant = '{RARE_TENANT}'", tenant=RARE_TENANT),
    "events, tenant and type": events(
        f"tenant = '{TENANT}' and event_type = '{TENANT_TYPE}'", tenant=TENANT, event_type=TENANT_TYPE
    ),
    "events, tenant and no such type": events("false", tenant=BUSY_TENANT, event_type="type.n7"),
    "events, correlation": events("correlation_id = 'trace'", correlation_id="trace"),
    "events, label": events('labels @> \'{"region": "eu"}\'', label={"region": "eu"}),
    "events, rare label": events('labels @> \'{"order": "7"}\'', label={"order": "7"}),
    "events, tenant and label": events(
        f"tenant = '{TENANT}' and labels @> '{{\"region\": \"eu\"}}'", tenant=TENANT, label={"region": "eu"}
    ),
    "events, tenant and no such label": events("false", tenant=RARE_TENANT, label={"region": "eu"}),
    "events, beginning": events(f"created_at < {created_at('events', 30)}", created_before=30),
    "events, window": events(
        f"created_at >= {created_at('events', 900)} and created_at < {created_at('events', 960)}",
        created_after=900,
        created_before=960,
    ),
    "events, type's beginning": events(
        f"event_type = 'type.n7' and created_at < {created_at('events', 9000)}",
        event_type="type.n7",
        created_before=9000,
    ),
    "events, type": events("event_type = 'type.n7'", event_type="type.n7"),
    "events, rare type": events(f"event_type = '{RARE_TYPE}'", event_type=RARE_TYPE),
    "events, no such type": events("event_type = 'type.none'", event_type="type.none"),
    "events, key": events("idempotency_key = 'past-4'", idempotency_key="past-4"),
    "events, key and another type": events("false", idempotency_key="past-4", event_type="type.n7"),
    "dead letters": dead_letter_case("true"),
    "dead letters, tenant": dead_letter_case(f"tenant = '{TENANT}'", tenant=TENANT),
    "dead letters, no such tenant": dead_letter_case("false", tenant="none"),
    "dead letters, tenant and code": dead_letter_case(
        f"tenant = '{TENANT}' and final_error_code = 'HTTP_500'", tenant=TENANT, error_code="HTTP_500"
    ),
    "dead letters, tenant and no such code": dead_letter_case("false", tenant=TENANT, error_code="X"),
    "dead letters, tenant's beginning": dead_letter_case(
        f"tenant = '{TENANT}' and failed_at < {at(9000)}", tenant=TENANT, failed_before=9000
    ),
    "dead letters, subscription": dead_letter_case("subscription_id = 1", subscription_id=1),
    "dead letters, code": dead_letter_case("final_error_code = 'HTTP_500'", error_code="HTTP_500"),
    "dead letters, rare code": dead_letter_case(f"final_error_code = '{RARE_ERROR}'", error_code=RARE_ERROR),
    "dead letters, no such code": dead_letter_case("final_error_code = 'X'", error_code="X"),
    "dead letters, subscription and code": dead_letter_case(
        BOTH, subscription_id=SUBSCRIPTION_OF_RARE_ERROR, error_code="HTTP_500"
    ),
    "dead letters, subscription and no such code": dead_letter_case(
        "false", subscription_id=DOWN, error_code="X"
    ),
    "dead letters, beginning": dead_letter_case(f"failed_at < {at(30)}", failed_before=30),
    "dead letters, before all": dead_letter_case(f"failed_at < {at(1)}", failed_before=1),
    "dead letters, end": dead_letter_case(f"failed_at >= {at(9000)}", failed_after=9000),
    "dead letters, window": dead_letter_case(
        f"failed_at >= {at(900)} and failed_at < {at(960)}", failed_after=900, failed_before=960
    ),
    "dead letters, subscription's beginning": dead_letter_case(
        f"subscription_id = 1 and failed_at < {at(9000)}", subscription_id=1, failed_before=9000
    ),
    "dead letters, subscription's end": dead_letter_case(
        f"subscription_id = {DOWN} and failed_at >= {at(8998)}", subscription_id=DOWN, failed_after=8998
    ),
    "dead letters, code's beginning": dead_letter_case(
        f"final_error_code = 'HTTP_500' and failed_at < {at(50)}", error_code="HTTP_500", failed_before=50
    ),
    "dead letters, all four": dead_letter_case(
        f"{BOTH} and failed_at >= {at(2)} and failed_at < {at(9000)}",
        subscription_id=SUBSCRIPTION_OF_RARE_ERROR,
        error_code="HTTP_500",
        failed_after=2,
        failed_before=9000,
    ),
}


LETTERS = {name: case.filters for name, case in CASES.items() if name.startswith("dead letters")}


@pytest.fixture(scope="module", params=["known", "unknown"])
def past(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Give a history, with statistics from before or after its unusual rows."""
    database = run_apart(write_past(cluster, known=request.param == "known"))
    yield database
    run_apart(cluster.drop_database(database))


async def write_past(cluster: Cluster, *, known: bool) -> Database:
    """Write a long history with unusual rows; the planner's statistics know them or not."""
    database = await cluster.create_database(migrated=True)
    superuser = await database.connect("superuser")
    await write_history(superuser, SIZE)
    async with superuser.transaction():
        await superuser.execute("set local session_replication_role = replica")
        for statement in UNUSUAL:
            await superuser.execute(statement)
    await vacuum(superuser, analyze=known)
    await database.close()
    return database


@pytest.fixture
async def daemon(past: Database) -> "AsyncIterator[Connection]":
    """Give a session of the daemon."""
    yield await past.connect()
    await past.close()


async def blocks_touched(
    daemon: "Connection", call: "Callable[[Connection], Awaitable[Result]]"
) -> tuple[Result, int]:
    """Return the result of a call, and the number of blocks it read of growing tables."""
    result, touched = await watch(daemon, call, "repeatable_read")
    return result, sum(count for table, count in touched.blocks.items() if table != "subscriptions")


def allowed_blocks(name: str, rows: int) -> int:
    """Return how many blocks a page of so many rows may read."""
    of_page = BLOCKS_OF_FIVE_PIECES if name.endswith((" subscription", " error")) else BLOCKS_OF_PAGE
    if name.startswith("deliveries") and any(each.startswith("created") for each in CASES[name].filters):
        of_page += BLOCKS_OF_TIME
    if name.startswith("deliveries"):
        rows *= 2  # each shows its event's type
    return of_page + BLOCKS_OF_ROW * rows + BLOCKS_OF_LIST.get(name, 0)


@pytest.mark.parametrize("name", CASES)
async def test_page_reads_a_bounded_number_of_blocks(daemon: "Connection", name: str) -> None:
    """The first and the last page have the right rows, and read a bounded number of blocks per row."""
    case = CASES[name]
    expected = [row["id"] for row in await daemon.fetch(case.expected)]
    last = expected[-LIMIT - 1] if len(expected) > LIMIT else None
    for page, shown in ((Page(LIMIT), expected[:LIMIT]), (Page(LIMIT, last), expected[-LIMIT:])):
        rows, blocks = await blocks_touched(daemon, lambda c, page=page: case.fetch(c, page))  # type: ignore[misc]
        assert [row["id"] for row in rows] == shown
        assert blocks <= allowed_blocks(name, len(rows))


# By index: a list that needs it.
IN_NEED_OF = {
    "idx_event_type": "deliveries, rare type",
    "idx_event_tenant": "events, tenant",
    "idx_event_tenant_type": "deliveries, tenant and no such type",
    "idx_event_correlation": "events, correlation",
    "idx_event_label_tenant": "events, tenant and no such label",
    "uniq_saga_event_subscription": "deliveries, rare type",
    "idx_saga_error": "deliveries, rare error",
    "idx_dead_tenant": "dead letters, tenant",
    "idx_dead_tenant_error": "dead letters, tenant and no such code",
    "idx_saga_pending": "deliveries, pending",
    "idx_saga_in_progress": "deliveries, in progress",
    "idx_saga_status": "deliveries, rare status",
    "idx_saga_subscription_status": "deliveries, rare subscription",
    "idx_dead_failed": "dead letters",
    "idx_dead_subscription": "dead letters, subscription's end",
    "idx_dead_error": "dead letters, rare code",
    "idx_dead_subscription_error": "dead letters, subscription and no such code",
}


@pytest.mark.parametrize("index", first_in_gate(IN_NEED_OF))
async def test_missing_index_exceeds_the_bound(past: Database, index: str) -> None:
    """Without an index, a page that it serves reads more blocks than the other tests allow."""
    superuser = await past.connect("superuser")
    name = IN_NEED_OF[index]
    transaction = superuser.transaction(isolation="repeatable_read")
    await transaction.start()
    await superuser.execute(f"drop index webhookd.{index}")
    rows, blocks = await blocks_touched(superuser, lambda c: CASES[name].fetch(c, Page(LIMIT)))
    await transaction.rollback()
    await past.close()
    assert blocks > allowed_blocks(name, len(rows))


@pytest.mark.parametrize("name", LETTERS)
async def test_requeue_batch_reads_only_its_matches(daemon: "Connection", name: str) -> None:
    """The first and the last batch, oldest first: each matches the list and reads only that."""
    which = await with_times(daemon, LETTERS[name])
    expected = [row["id"] for row in await daemon.fetch(CASES[name].expected)][::-1]
    whole = len(expected) // LIMIT * LIMIT
    for start in {0, whole}:
        after_id = expected[start - 1] if start else 0

        def requeue(c: "Connection", after_id: int = after_id) -> Awaitable[dead_letters.RequeuedMany]:
            return dead_letters.requeue_many(c, which, after_id, LIMIT, dry_run=True)

        batch, blocks = await blocks_touched(daemon, requeue)
        matching = expected[start : start + LIMIT]
        assert (batch.matched, batch.last_id) == (len(matching), [after_id, *matching][-1])
        # Of each dead letter it also reads the event, whose payload may be gone.
        assert blocks <= BLOCKS_OF_PAGE + 2 * BLOCKS_OF_ROW * batch.matched


async def test_explanation_reads_a_bounded_number_of_blocks(daemon: "Connection") -> None:
    """An event of four subscriptions, at the start and at the end of the history."""
    for event_id in (1, SIZE // 4):

        def tell(c: "Connection", event_id: int = event_id) -> "Awaitable[dict[str, Any] | None]":
            return reads.event(c, event_id, LIMITS)

        found, blocks = await blocks_touched(daemon, tell)
        assert found is not None
        assert len(found["deliveries"]) == SAGAS_OF_EVENT
        assert blocks <= BLOCKS_OF_PAGE + BLOCKS_OF_WHY * SAGAS_OF_EVENT


async def test_newest_attempts_read_a_bounded_number_of_blocks(daemon: "Connection") -> None:
    """A page of all attempts, a page that examines as many as it may, and a tick of the live page."""
    newest = await daemon.fetchval("select max(id) from webhookd.webhook_delivery_jobs")
    page = Page(LIMIT)
    found, blocks = await blocks_touched(
        daemon, lambda c: activity.attempts(c, page, activity.AttemptFilter())
    )
    assert [row["id"] for row in found.rows] == list(range(newest, newest - LIMIT, -1))
    assert blocks <= BLOCKS_OF_PAGE + 3 * BLOCKS_OF_ROW * LIMIT
    none = activity.AttemptFilter(status=AttemptStatus.LEASED, tenant="none")
    found, blocks = await blocks_touched(daemon, lambda c: activity.attempts(c, page, none))
    assert found == activity.Found([], newest - activity.MAX_EXAMINED + 1)
    # The attempts twice, and the saga and the event of each.
    assert blocks <= BLOCKS_OF_PAGE + 2 * BLOCKS_OF_ROW * activity.MAX_EXAMINED
    watched, seen = [1, SIZE // 2, newest - 3], [newest, newest - 1, newest - 3]
    rows, blocks = await blocks_touched(
        daemon,
        lambda c: activity.newest_attempts(c, newest - 10, 5, watched, seen),
    )
    expected = [newest - 2, *range(newest - 4, newest - 8, -1), *watched]
    assert [row["id"] for row in rows] == sorted(expected, reverse=True)
    assert blocks <= BLOCKS_OF_PAGE + 4 * BLOCKS_OF_ROW * len(rows)


async def test_cursor_without_a_row_is_rejected(flow: Flow) -> None:
    """In a list by time a cursor is the id of a row, and an id above all others cannot be one."""
    with pytest.raises(Refused, match="cursor: dead letter 7 does not exist"):
        await reads.dead_letters(flow.daemon, Page(LIMIT, 7), Filter())
    with pytest.raises(Refused, match="cursor: event 7 does not exist"):
        await reads.events(flow.daemon, Page(LIMIT, 7), EventFilter(event_type="type.n7"))


@pytest.mark.parametrize("name", ["events", "dead letters"])
async def test_list_goes_on_behind_a_removed_row(flow: Flow, name: str) -> None:
    """Each row in turn is the last one of a page and then removed: no later row is left out.

    Row 1 began before rows 3 and 4 and is older, but row 2 got its id long after it began: it is the oldest.
    """
    table, time = {"events": ("events", "created_at"), "dead letters": ("dead_letters", "failed_at")}[name]
    seconds = {1: 30, 2: 10, 3: 50, 4: 50, 5: 3600, 6: 7200}
    subscription_id = await flow.subscribe()
    for _ in seconds:
        await flow.saga_in(SagaStatus.DEAD_LETTERED, subscription_id=subscription_id)
    await flow.superuser.execute("set session_replication_role = replica")
    for row_id, second in seconds.items():
        await flow.superuser.execute(
            f"update webhookd.{table} set {time} = '2026-01-01'::timestamptz + make_interval(secs => $2)"
            " where id = $1",
            row_id,
            second,
        )

    async def listed(after_id: int | None) -> list[int]:
        page = Page(LIMIT, after_id)
        if name == "events":
            found = await reads.events(flow.daemon, page, EventFilter(event_type="order.created"))
        else:
            found = await reads.dead_letters(flow.daemon, page, Filter(error_code="HTTP_500"))
        return [row["id"] for row in found]

    assert await listed(None) == [6, 5, 4, 3, 1, 2]
    left = [6, 5, 4, 3, 1, 2]
    for removed in (5, 3, 1):
        behind = left[left.index(removed) + 1 :]
        left.remove(removed)
        await flow.superuser.execute(f"delete from webhookd.{table} where id = $1", removed)
        found = await listed(removed)
        assert found[len(found) - len(behind) :] == behind
        # What it repeats is not more than a minute later than the next row by id.
        assert found == [
            row for row in left if seconds[row] < seconds[min(i for i in left if i > removed)] + 60
        ]


async def test_requeue_begins_again_without_its_row(flow: Flow) -> None:
    """Retention may remove the last dead letter of a batch; what was requeued is skipped the second time."""
    await flow.saga_in(SagaStatus.DEAD_LETTERED)
    batch = await dead_letters.requeue_many(flow.daemon, Filter(), 7, LIMIT, dry_run=False)
    assert (batch.matched, batch.requeued) == (1, 1)
    batch = await dead_letters.requeue_many(flow.daemon, Filter(), 7, LIMIT, dry_run=False)
    assert (batch.matched, batch.requeued) == (1, 0)
