"""A call for a batch reads every row a few times, not once for every other row.

Block and index counters, as in test_plans.py, cannot show this: compared rows are already in memory. So
auto_explain reports the plan of each statement inside a function with the real row counts of every node, for
plans from fresh statistics, from statistics of an idle system, and without statistics.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import FAILING_AFTER, POLICY, Flow
from tests.support.history import turn_autovacuum_off, vacuum
from webhookd.deliveries import attempts, ingest, sagas

if TYPE_CHECKING:
    from tests.support.database import Connection

BATCH = 500
# More than TIMES, so that reading the whole history is noticed too.
PAST_BATCHES = 6
# A node returns a row or filters it out; a row that is read twice counts twice.
TIMES = 4
LOG_PLANS = """
    set auto_explain.log_min_duration = 0;
    set auto_explain.log_nested_statements = on;
    set auto_explain.log_analyze = on;
    set auto_explain.log_timing = off;
    set auto_explain.log_format = json;
    set client_min_messages = log
"""
KEYED = [ingest.NewEvent("order.created", "{}", f"key-{number}") for number in range(BATCH)]


async def most_rows_of_a_node(superuser: "Connection", call: Callable[[], Awaitable[object]]) -> float:
    """Return the largest number of rows that one plan node processed in any statement of a call."""
    try:
        await superuser.execute("load 'auto_explain'")
    except asyncpg.UndefinedFileError:
        pytest.skip("this server came without auto_explain")
    logged: list[str] = []

    def listen(_: object, message: Any) -> None:
        logged.append(message.message)

    await superuser.execute(LOG_PLANS)
    superuser.add_log_listener(listen)
    await call()
    await superuser.execute("reset client_min_messages")
    superuser.remove_log_listener(listen)
    plans = [json.loads(text.partition("plan:\n")[2])["Plan"] for text in logged if "plan:\n" in text]
    assert plans, "auto_explain reported no plan"
    return max(rows for plan in plans for rows in rows_of_nodes(plan))


def rows_of_nodes(node: dict[str, Any]) -> Iterator[float]:
    """Return how many rows each node of a plan processed."""
    rows = sum(
        node.get(name, 0) for name in ("Actual Rows", "Rows Removed by Join Filter", "Rows Removed by Filter")
    )
    yield rows * node["Actual Loops"]
    for below in node.get("Plans", ()):
        yield from rows_of_nodes(below)


async def leased(flow: Flow, events_published: int = BATCH) -> list[attempts.Report]:
    """Publish, route, start and lease events; return their reports."""
    await ingest.publish(flow.daemon, [ingest.NewEvent("order.created", "{}")] * events_published)
    await flow.route()
    await flow.start(window=10 * BATCH)
    return [attempts.Report(lease.job_id, lease.lease_token, 200) for lease in await flow.claim(BATCH)]


async def deliver(flow: Flow, events_published: int = BATCH) -> None:
    """Deliver a batch."""
    await attempts.report(flow.daemon, await leased(flow, events_published))
    await flow.apply()


@pytest.mark.parametrize("statistics", ["quiet", "busy", "none"])
async def test_calls_are_linear_in_the_batch(fresh_database: Database, statistics: str) -> None:
    """Every stage, and a repeated report, processes each row of 500 a few times, with any statistics."""
    flow = await Flow.open(fresh_database)
    await turn_autovacuum_off(flow.superuser)
    await flow.subscribe("order.created")
    for _ in range(PAST_BATCHES):
        await deliver(flow)
    match statistics:
        case "quiet":
            await vacuum(flow.superuser)
        case "busy":
            under_way = await leased(flow)
            await vacuum(flow.superuser)
            await attempts.report(flow.daemon, under_way)
            await flow.apply()
    # Only a superuser may use auto_explain; the rights of a function do not change its plans.
    stages = Flow(flow.superuser, flow.superuser)
    leases: list[attempts.Lease] = []
    reports: list[attempts.Report] = []

    async def claim() -> None:
        leases.extend(await stages.claim(BATCH))
        reports.extend(attempts.Report(lease.job_id, lease.lease_token, 200) for lease in leases)

    async def complete() -> None:
        assert len(await sagas.complete(stages.daemon, others)) == BATCH

    others = await leased(flow)
    await ingest.publish(flow.daemon, [ingest.NewEvent("order.created", "{}")] * BATCH)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "route": stages.route,
        "start": lambda: stages.start(window=10 * BATCH),
        "claim": claim,
        "load": lambda: attempts.load(stages.daemon, leases),
        "report": lambda: attempts.report(stages.daemon, reports),
        "report again": lambda: attempts.report(stages.daemon, reports),
        "apply": stages.apply,
        "complete": complete,
    }
    touched = {name: await most_rows_of_a_node(flow.superuser, step) for name, step in steps.items()}
    assert len(reports) == BATCH
    assert {name: rows for name, rows in touched.items() if rows > TIMES * BATCH} == {}


async def test_apply_is_linear_with_unknown_subscriptions(fresh_database: Database) -> None:
    """Statistics know one subscription, the batch has fifty: it is not read once for each."""
    flow = await Flow.open(fresh_database)
    await turn_autovacuum_off(flow.superuser)
    await flow.subscribe("order.created")
    await deliver(flow)
    await vacuum(flow.superuser)
    await deliver(flow)
    for _ in range(49):
        await flow.subscribe("order.created")
    reports = await leased(flow, BATCH // 50)
    assert len(reports) == BATCH
    await attempts.report(flow.daemon, reports)

    async def apply() -> None:
        known = [report.job_id for report in reports]
        applied = await sagas.apply_results(flow.superuser, BATCH, POLICY, FAILING_AFTER, known)
        assert len(applied) == BATCH

    assert await most_rows_of_a_node(flow.superuser, apply) <= TIMES * BATCH


async def test_duplicate_events_are_found_by_key(fresh_database: Database) -> None:
    """This holds for a session that planned while the table was empty."""
    flow = await Flow.open(fresh_database)
    await turn_autovacuum_off(flow.superuser)
    superuser = flow.superuser
    await vacuum(superuser)
    await ingest.publish(superuser, KEYED[:1])
    await ingest.publish(superuser, KEYED[:1])
    await ingest.publish(flow.daemon, KEYED)
    for number in range(10):
        others = [event._replace(idempotency_key=f"{number}-{event.idempotency_key}") for event in KEYED]
        await ingest.publish(flow.daemon, others)

    async def publish_again() -> None:
        accepted = await ingest.publish(superuser, KEYED)
        assert all(one.duplicate for one in accepted)

    assert await most_rows_of_a_node(superuser, publish_again) <= TIMES * BATCH
