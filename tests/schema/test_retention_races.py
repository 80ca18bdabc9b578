"""Retention and erasure against everything that can use an event at the same time.

Each race holds one transaction open until the other side skips or waits. The nightly run repeats each race
without each of its guards, and the race must then fail.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import pytest

from tests.support.database import Database
from tests.support.flow import Flow
from tests.support.guards import Weakened
from tests.support.nightly import first_in_gate
from tests.support.races import Contest
from tests.support.sweeps import MONTH, erase, let_pass, rows, sweep
from webhookd.core.settings import RetentionSettings
from webhookd.core.states import SagaStatus
from webhookd.deliveries import attempts, ingest, router, sagas, subscriptions
from webhookd.retention import queries

NOT_FOUND = "WH404"
NEW_JOB = {"p_kind": "report", "p_idempotency_key": "key", "p_executor": "DOT"}
HOLD = "select pg_advisory_xact_lock(7)"


class Race(Contest[Flow]):
    """Two daemons on one database."""


@pytest.fixture
async def race(database: Database) -> Race:
    """Connect both sides."""
    return Race(await Flow.open(database), await Flow.open(database))


async def refused_with(task: Awaitable[object]) -> str | None:
    """Return the SQLSTATE of a call that fails."""
    try:
        await task
    except asyncpg.PostgresError as error:
        return error.sqlstate
    raise AssertionError("it was not refused")


async def replay(flow: Flow, subscription_id: int) -> int:
    """Deliver past events to a subscription; returns the number of new deliveries."""
    now = await flow.daemon.fetchval("select now()")
    what = router.Replay(
        subscription_id, now - timedelta(days=365), now, None, include_all=False, started_at=now
    )
    return (await router.replay(flow.daemon, what, 0, 100, dry_run=False)).created


async def resend_during_a_sweep(race: Race) -> None:
    """The resend waits for the sweep, and then finds no delivery."""
    saga_id = await race.first.saga_in(SagaStatus.COMPLETED)
    await let_pass(race.first.superuser, 31)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert (await sweep(race.first))["events"] == 1
    task = await race.waits(sagas.resend(race.second.daemon, saga_id))
    await transaction.commit()
    assert await refused_with(task) == NOT_FOUND
    assert await rows(race.first.superuser) == {}


async def sweep_during_a_resend(race: Race) -> None:
    """The sweep leaves the event, which has a live delivery after the commit."""
    saga_id = await race.first.saga_in(SagaStatus.COMPLETED)
    await let_pass(race.first.superuser, 31)
    async with race.first.daemon.transaction():
        assert (await sagas.resend(race.first.daemon, saga_id)).created
        assert await race.skips(sweep(race.second)) == {}
    await let_pass(race.first.superuser, 1)
    assert await sweep(race.second) == {}
    assert (await race.first.attempt(200))[0].status is SagaStatus.COMPLETED
    await let_pass(race.first.superuser, 1)
    assert await sweep(race.second) == {"events": 1, "deliveries": 2, "attempts": 2}


async def resend_between_search_and_lock(race: Race) -> None:
    """A resend that commits after the sweep found the event, and before it locked it, keeps the event."""
    saga_id = await race.first.saga_in(SagaStatus.COMPLETED)
    await let_pass(race.first.superuser, 31)
    await Weakened(
        "lock_finished_events",
        "locked_ids := array(",
        "perform pg_advisory_xact_lock_shared(7); locked_ids := array(",
    ).take_away(race.first.superuser)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.daemon.execute(HOLD)
    task = await race.waits(sweep(race.second))
    resender = await Flow(race.first.superuser, race.first.superuser).daemon.fetchval(
        "select new_saga_id from webhookd.resend_delivery($1)", saga_id
    )
    await transaction.commit()
    assert await task == {}
    assert await race.first.saga_status(resender) is SagaStatus.PENDING
    assert await race.count("select count(*) from webhookd.events") == 1


async def requeue_during_a_sweep(race: Race) -> None:
    """The requeue waits for the sweep, and then finds no dead letter."""
    await race.first.saga_in(SagaStatus.DEAD_LETTERED)
    letter_id = await race.count("select id from webhookd.dead_letters")
    await let_pass(race.first.superuser, 91)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert (await sweep(race.first))["events"] == 1
    task = await race.waits(race.second.requeue(letter_id))
    await transaction.commit()
    assert await refused_with(task) == NOT_FOUND
    assert await rows(race.first.superuser) == {}


async def replay_during_a_sweep(race: Race) -> None:
    """The replay waits for the sweep, and then delivers nothing of the event."""
    await race.first.publish()
    await race.first.route()
    subscription_id = await race.first.subscribe()
    await let_pass(race.first.superuser, 31)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert await sweep(race.first) == {"events": 1}
    task = await race.waits(replay(race.second, subscription_id))
    await transaction.commit()
    assert await task == 0
    assert await rows(race.first.superuser) == {}


async def sweep_during_a_replay(race: Race) -> None:
    """The sweep leaves the event, which gets its first delivery."""
    await race.first.publish()
    await race.first.route()
    subscription_id = await race.first.subscribe()
    await let_pass(race.first.superuser, 31)
    async with race.first.daemon.transaction():
        assert await replay(race.first, subscription_id) == 1
        assert await race.skips(sweep(race.second)) == {}
    await let_pass(race.first.superuser, 1)
    assert await sweep(race.second) == {}
    assert len(await race.first.attempt(200)) == 1


async def sweep_during_routing(race: Race) -> None:
    """An event whose routing is not committed is in the queue, for the sweep."""
    await race.first.subscribe()
    await race.first.publish()
    await let_pass(race.first.superuser, 31)
    async with race.first.daemon.transaction():
        assert (await race.first.route()).sagas == 1
        assert await race.skips(sweep(race.second)) == {}
    assert len(await race.first.attempt(200)) == 1


async def two_sweeps(race: Race) -> None:
    """The second instance is refused at once."""
    await race.first.saga_in(SagaStatus.COMPLETED)
    await let_pass(race.first.superuser, 31)
    async with race.first.daemon.transaction():
        assert (await sweep(race.first))["events"] == 1
        second = await race.skips(queries.sweep_events(race.second.daemon, "other", "events", 10, MONTH))
        assert second.refused


async def explain_during_a_sweep(race: Race) -> None:
    """A reader sees the whole event or none of it, whatever the sweep does in between."""
    await race.first.saga_in(SagaStatus.COMPLETED)
    await let_pass(race.first.superuser, 31)
    query = """
        select (select count(*) from webhookd.events), (select count(*) from webhookd.webhook_delivery_sagas),
               (select count(*) from webhookd.webhook_delivery_jobs)"""
    async with race.first.daemon.transaction():
        await sweep(race.first)
        assert tuple(await race.second.daemon.fetchrow(query) or ()) == (1, 1, 1)
    assert tuple(await race.second.daemon.fetchrow(query) or ()) == (0, 0, 0)


async def acme(flow: Flow) -> int:
    """Subscribe the tenant acme, and publish an event for it; returns the subscription."""
    created = await subscriptions.create(
        flow.daemon, "order.created", "https://acme.example/hook", tenant="acme"
    )
    await flow.verify(created.subscription_id)
    await flow.daemon.execute("select webhookd.publish('order.created', '{}'::text, tenant => 'acme')")
    return created.subscription_id


async def erasure_during_routing(race: Race) -> None:
    """It leaves the event that is being routed, and removes its delivery later."""
    await acme(race.first)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    assert (await race.first.route()).sagas == 1
    await queries.request_tenant_erasure(race.second.daemon, "acme", "me")
    assert await race.skips(erase(race.second)) == []
    await transaction.commit()
    assert len(await erase(race.second)) == 1
    assert await rows(race.first.superuser) == {}


async def erasure_during_a_start(race: Race) -> None:
    """It leaves the delivery that gets an attempt, and removes both later."""
    subscription_id = await acme(race.first)
    await race.first.route()
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.start([subscription_id])
    await queries.request_tenant_erasure(race.second.daemon, "acme", "me")
    assert await race.skips(erase(race.second)) == []
    await transaction.commit()
    assert len(await erase(race.second)) == 1
    assert await rows(race.first.superuser) == {}


async def erasure_during_a_claim(race: Race) -> None:
    """It leaves the attempt that is being claimed; the request is sent, reported, and then removed."""
    subscription_id = await acme(race.first)
    await race.first.route()
    await race.first.start([subscription_id])
    transaction = race.first.daemon.transaction()
    await transaction.start()
    [lease] = await race.first.claim()
    await queries.request_tenant_erasure(race.second.daemon, "acme", "me")
    assert await race.skips(erase(race.second)) == []
    await transaction.commit()
    assert await erase(race.second) == []
    assert (await race.first.report(lease)).value == "accepted"
    await race.first.apply()
    assert len(await erase(race.second)) == 1
    assert await rows(race.first.superuser) == {}


async def new_subscription_during_an_erasure(race: Race) -> None:
    """It waits for the request of the erasure, and is then refused."""
    await acme(race.first)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await queries.request_tenant_erasure(race.first.daemon, "acme", "me")
    task = await race.waits(
        subscriptions.create(race.second.daemon, "a", "https://acme.example/hook", tenant="acme")
    )
    await transaction.commit()
    assert await refused_with(task) == "WH416"


async def erasure_of_a_leased_job(race: Race) -> None:
    """A lease that expires does not keep the erasure waiting for ever."""
    subscription_id = await acme(race.first)
    await race.first.route()
    await race.first.start([subscription_id])
    [lease] = await race.first.claim()
    await queries.request_tenant_erasure(race.second.daemon, "acme", "me")
    assert await erase(race.second) == []
    await race.first.expire_lease(lease.job_id)
    await attempts.reset_expired(race.first.daemon, 9, max_lease_resets=5)
    assert len(await erase(race.second)) == 1
    assert await rows(race.first.superuser) == {}


async def publish_again_during_a_sweep(race: Race) -> None:
    """A publish that met an old event, and waits for another key, is not lost if the old one is removed."""
    old_id = await race.first.publish(idempotency_key="old")
    await race.first.route()
    await let_pass(race.first.superuser, 31)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.publish(idempotency_key="open")
    both = [ingest.NewEvent("order.created", "{}", key) for key in ("old", "open")]
    task = await race.waits(ingest.publish(race.second.daemon, both))
    assert await sweep(Flow(race.first.superuser, race.first.superuser)) == {"events": 1}
    await transaction.commit()
    old, opened = await task
    assert (old.duplicate, opened.duplicate) == (False, True)
    assert old.id > old_id
    query = f"select count(*) from webhookd.events where id in ({old.id}, {opened.id})"
    assert await race.count(query) == 2


async def erasure_during_a_publish(race: Race) -> None:
    """It waits for an application that published before the request and has not committed yet."""
    await acme(race.first)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await race.first.daemon.execute("select webhookd.publish('a', '{}'::text, tenant => 'acme')")
    await queries.request_tenant_erasure(race.second.daemon, "acme", "me")
    assert await race.skips(erase(race.second)) == []
    await transaction.commit()
    assert len(await erase(race.second)) == 1
    assert await rows(race.first.superuser) == {}


async def erasure_during_a_delete(race: Race) -> None:
    """A subscription of the tenant that is just being deleted does not stop the request."""
    subscription_id = await acme(race.first)
    transaction = race.first.daemon.transaction()
    await transaction.start()
    await subscriptions.delete(race.first.daemon, subscription_id)
    task = await race.waits(queries.request_tenant_erasure(race.second.daemon, "acme", "me"))
    await transaction.commit()
    await task
    assert len(await erase(race.second)) == 1


async def start_during_an_erasure(race: Race) -> None:
    """The orchestrator does not wait for the rate of a subscription that is being removed."""
    subscription_id = await acme(race.first)
    await subscriptions.update(race.first.daemon, subscription_id, {"max_per_second": 5})
    await race.first.route()
    await race.first.start([subscription_id])
    await queries.request_tenant_erasure(race.first.daemon, "acme", "me")
    other = await race.first.subscribe("other.type")
    await race.first.publish("other.type")
    await race.first.route()
    async with race.first.daemon.transaction():
        assert len(await erase(race.first)) == 1
        started = await race.skips(race.second.start([subscription_id, other]))
        assert sum(each.started for each in started) == 1


async def call(flow: Flow, function: str, **arguments: object) -> dict[str, Any]:
    """Call a function of the job queue."""
    given = ", ".join(f"{name} => ${place}" for place, name in enumerate(arguments, 1))
    query = f"select webhookd.{function}({given}, p_actor => 'me')"
    answer: dict[str, Any] = msgspec.json.decode(await flow.daemon.fetchval(query, *arguments.values()))
    return answer


async def enqueue_refused(race: Race, **reference: object) -> None:
    """A job that refers to a row of the open sweep waits for its end, and is then refused."""
    transaction = race.first.daemon.transaction()
    await transaction.start()
    settings = RetentionSettings(events_days=30, jobs_days=30, job_workflows_days=30)
    await sweep(race.first, settings)
    await queries.sweep_jobs(race.first.daemon, "test", 1000, settings)
    task = await race.waits(call(race.second, "fn_job_enqueue", **NEW_JOB, **reference))
    await transaction.commit()
    assert await refused_with(task) == NOT_FOUND


async def enqueue_during_a_sweep_of_its_event(race: Race) -> None:
    """It finds no event, instead of an internal error."""
    await call(race.first, "fn_job_enable", p_enabled=True)
    event_id = await race.first.publish()
    await race.first.route()
    await let_pass(race.first.superuser, 365)
    await enqueue_refused(race, p_causation_event_id=event_id)


async def enqueue_during_a_sweep_of_its_parent(race: Race) -> None:
    """It finds no job."""
    await call(race.first, "fn_job_enable", p_enabled=True)
    parent_id = (await call(race.first, "fn_job_enqueue", **NEW_JOB))["job_id"]
    await call(race.first, "fn_job_cancel", p_job_id=parent_id, p_reason="old")
    await let_pass(race.first.superuser, 365)
    await enqueue_refused(race, p_parent_job_id=parent_id)


async def enqueue_during_a_sweep_of_its_workflow(race: Race) -> None:
    """It finds no workflow."""
    await call(race.first, "fn_job_enable", p_enabled=True)
    opened = await call(race.first, "fn_job_workflow_open", p_workflow_kind="report", p_generator="me")
    workflow_id = opened["workflow_id"]
    job = await call(race.first, "fn_job_enqueue", **NEW_JOB, p_workflow_id=workflow_id)
    await call(race.first, "fn_job_cancel", p_job_id=job["job_id"], p_reason="old")
    await let_pass(race.first.superuser, 365)
    settings = RetentionSettings(jobs_days=30)
    await queries.sweep_jobs(race.first.daemon, "test", 1000, settings)
    await enqueue_refused(race, p_workflow_id=workflow_id)


LOCK = "for update skip locked"
KEY_SHARE = Weakened("lock_events", "for key share")
LOCKED = Weakened("lock_finished_events", "order by e.id for update skip locked")
RECHECKED = Weakened("lock_finished_events", "locked_ids := finished_events(locked_ids);")
QUEUE = Weakened(
    "finished_events", "select from event_routing_queue q where q.event_id = e.id", "select where false"
)

# Each race, and the guards without which it must fail.
RACES: dict[Callable[[Race], Awaitable[None]], list[Weakened]] = {
    resend_during_a_sweep: [KEY_SHARE],
    sweep_during_a_resend: [KEY_SHARE, LOCKED],
    resend_between_search_and_lock: [RECHECKED],
    requeue_during_a_sweep: [KEY_SHARE],
    replay_during_a_sweep: [KEY_SHARE],
    sweep_during_a_replay: [KEY_SHARE, LOCKED],
    sweep_during_routing: [QUEUE],
    two_sweeps: [Weakened("take_retention_turn", LOCK, "for update")],
    explain_during_a_sweep: [],
    erasure_during_routing: [Weakened("erase_tenant_batch", LOCK)],
    erasure_during_a_start: [Weakened("lock_finished_events", LOCK)],
    erasure_during_a_claim: [Weakened("lock_finished_events", LOCK)],
    new_subscription_during_an_erasure: [Weakened("join_tenant", "perform refuse_if_erasing(new_tenant);")],
    erasure_of_a_leased_job: [],
    publish_again_during_a_sweep: [Weakened("publish_many", "exit when missing_ids = '{}';", "exit;")],
    erasure_during_a_publish: [Weakened("erase", "and erasure.is_settled", "")],
    erasure_during_a_delete: [
        Weakened("erase_tenant", "order by u.id for no key update;", "order by u.id;"),
    ],
    enqueue_during_a_sweep_of_its_event: [Weakened("lock_event", "for key share")],
    enqueue_during_a_sweep_of_its_parent: [Weakened("require_references", "for key share")],
    enqueue_during_a_sweep_of_its_workflow: [Weakened("require_references", "for key share")],
    start_during_an_erasure: [
        Weakened("limit_quotas", "and u.deleted_at is null"),
    ],
}
LOSSES = [
    pytest.param(run, guard, id=f"{run.__name__}: {guard}")
    for run, guards in RACES.items()
    for guard in guards
]


@pytest.mark.parametrize("run", RACES, ids=lambda run: run.__name__)
async def test_no_race_removes_a_live_row(race: Race, run: Callable[[Race], Awaitable[None]]) -> None:
    """Whatever is used at the same time is kept or removed as a whole."""
    await run(race)


@pytest.mark.parametrize(("run", "guard"), first_in_gate(LOSSES))
async def test_race_fails_without_its_guard(
    race: Race, run: Callable[[Race], Awaitable[None]], guard: Weakened
) -> None:
    """The test above depends on each of its guards."""
    await guard.take_away(race.first.superuser)
    with pytest.raises((AssertionError, asyncpg.PostgresError)) as lost:
        async with asyncio.timeout(30):
            await run(race)
    if isinstance(lost.value, asyncpg.PostgresError):
        # Refused by a second guard, not because the weakened function is invalid SQL.
        assert str(lost.value.sqlstate)[:2] in {"WH", "23", "55"}
