"""A call for many takes each of them in hand a few times, and not once for each of the others.

Neither blocks nor index entries tell, as in test_plans.py: what is compared has been read already. So each
statement inside a function tells its plan with what every node of it really did (auto_explain), by plans of
fresh statistics, of a quiet time's, and of when there was nothing.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from tests.support.database import Database
from tests.support.flow import FAILING_AFTER, POLICY, Flow
from tests.support.history import turn_autovacuum_off, vacuum
from webhookd.deliveries import attempts as jobs
from webhookd.deliveries import ingest as events
from webhookd.deliveries import sagas

if TYPE_CHECKING:
    from tests.support.database import Connection

BATCH = 500
# More than the times below: to read all that there was is seen, too.
PAST_BATCHES = 6
# A node hands on each row, or takes it in hand and throws it away; what is read twice counts twice.
TIMES = 4
TELL_PLANS = """
    set auto_explain.log_min_duration = 0;
    set auto_explain.log_nested_statements = on;
    set auto_explain.log_analyze = on;
    set auto_explain.log_timing = off;
    set auto_explain.log_format = json;
    set client_min_messages = log
"""
KEYED = [events.NewEvent("order.created", "{}", f"key-{number}") for number in range(BATCH)]


async def most_rows_of_a_node(superuser: "Connection", call: Callable[[], Awaitable[object]]) -> float:
    """Of all statements that a call of this session runs: the most rows that one node took in hand."""
    try:
        await superuser.execute("load 'auto_explain'")
    except asyncpg.UndefinedFileError:
        pytest.skip("this server came without auto_explain")
    told: list[str] = []

    def listen(_: object, message: Any) -> None:
        told.append(message.message)

    await superuser.execute(TELL_PLANS)
    superuser.add_log_listener(listen)
    await call()
    await superuser.execute("reset client_min_messages")
    superuser.remove_log_listener(listen)
    plans = [json.loads(text.partition("plan:\n")[2])["Plan"] for text in told if "plan:\n" in text]
    assert plans, "no statement told its plan"
    return max(rows for plan in plans for rows in rows_of_nodes(plan))


def rows_of_nodes(node: dict[str, Any]) -> Iterator[float]:
    """How many rows each node of a plan took in hand."""
    rows = sum(
        node.get(name, 0) for name in ("Actual Rows", "Rows Removed by Join Filter", "Rows Removed by Filter")
    )
    yield rows * node["Actual Loops"]
    for below in node.get("Plans", ()):
        yield from rows_of_nodes(below)


async def leased(flow: Flow, events_published: int = BATCH) -> list[jobs.Report]:
    """So many events more, up to their leases; and what to report of them."""
    await events.publish(flow.daemon, [events.NewEvent("order.created", "{}")] * events_published)
    await flow.route()
    await flow.start(window=10 * BATCH)
    return [jobs.Report(lease.job_id, lease.lease_token, 200) for lease in await flow.claim(BATCH)]


async def deliver(flow: Flow, events_published: int = BATCH) -> None:
    """All the way."""
    await jobs.report(flow.daemon, await leased(flow, events_published))
    await flow.apply()


@pytest.mark.parametrize("statistics", ["quiet", "busy", "none"])
async def test_a_batch_is_taken_in_hand_one_by_one(fresh_database: Database, statistics: str) -> None:
    """Each stage, and a report sent again: 500 are 500, whatever the planner knows of the tables."""
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
            await jobs.report(flow.daemon, under_way)
            await flow.apply()
    # The superuser's are the plans that are told: a function's rights do not change them.
    stages = Flow(flow.superuser, flow.superuser)
    leases: list[jobs.Lease] = []
    reports: list[jobs.Report] = []

    async def claim() -> None:
        leases.extend(await stages.claim(BATCH))
        reports.extend(jobs.Report(lease.job_id, lease.lease_token, 200) for lease in leases)

    await events.publish(flow.daemon, [events.NewEvent("order.created", "{}")] * BATCH)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "route": stages.route,
        "start": lambda: stages.start(window=10 * BATCH),
        "claim": claim,
        "load": lambda: jobs.load(stages.daemon, leases),
        "report": lambda: jobs.report(stages.daemon, reports),
        "report again": lambda: jobs.report(stages.daemon, reports),
        "apply": stages.apply,
    }
    touched = {name: await most_rows_of_a_node(flow.superuser, step) for name, step in steps.items()}
    assert len(reports) == BATCH
    assert {name: rows for name, rows in touched.items() if rows > TIMES * BATCH} == {}


async def test_results_of_more_subscriptions_than_the_statistics_know(fresh_database: Database) -> None:
    """Statistics of one subscription, and fifty by now: the batch is not walked through for each of them."""
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
    await jobs.report(flow.daemon, reports)

    async def apply() -> None:
        known = [report.job_id for report in reports]
        applied = await sagas.apply_results(flow.superuser, BATCH, POLICY, FAILING_AFTER, known)
        assert len(applied) == BATCH

    assert await most_rows_of_a_node(flow.superuser, apply) <= TIMES * BATCH


async def test_events_published_again_are_looked_for_by_their_keys(fresh_database: Database) -> None:
    """By a session that planned when there was none of them."""
    flow = await Flow.open(fresh_database)
    await turn_autovacuum_off(flow.superuser)
    superuser = flow.superuser
    await vacuum(superuser)
    await events.publish(superuser, KEYED[:1])
    await events.publish(superuser, KEYED[:1])
    await events.publish(flow.daemon, KEYED)
    for number in range(10):
        others = [event._replace(idempotency_key=f"{number}-{event.idempotency_key}") for event in KEYED]
        await events.publish(flow.daemon, others)

    async def publish_again() -> None:
        accepted = await events.publish(superuser, KEYED)
        assert all(one.duplicate for one in accepted)

    assert await most_rows_of_a_node(superuser, publish_again) <= TIMES * BATCH
