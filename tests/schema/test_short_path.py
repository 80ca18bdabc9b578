"""The short path leaves the same rows as the stages, and what it cannot do is left to them."""

import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from tests.support.database import Cluster, Database
from tests.support.flow import POLICY, WINDOW, Flow
from tests.support.guards import Weakened
from tests.support.history import copy_database
from webhookd.core.states import ReportVerdict
from webhookd.deliveries import attempts, sagas, short_path
from webhookd.deliveries.ingest import NewEvent, publish

if TYPE_CHECKING:
    from tests.support.database import Connection

TYPES = ("order.created", "order.paid", "order.ignored")
ROUNDS = 6
TERMS = short_path.Terms(8, WINDOW, POLICY.max_attempts, "worker", 16, 60.0, 64, [], [], 0)

# Everything but the times, the lease tokens and the ids of the jobs, which are known by saga and attempt.
ROWS = (
    "select id, event_type, payload::text, idempotency_key from webhookd.events",
    "select event_id, event_type from webhookd.event_routing_queue",
    """select s.id, s.event_id, s.subscription_id, s.status, s.attempt_count, s.final_error_code, j.attempt
       from webhookd.webhook_delivery_sagas s
       left join webhookd.webhook_delivery_jobs j on j.id = s.job_id""",
    """select saga_id, attempt, subscription_id, event_id, status, lease_until is null, lease_token is null,
           worker_id, lease_resets, response_status, error_code, result_applied_at is null,
           finished_at is null
       from webhookd.webhook_delivery_jobs""",
    "select subscription_id, consecutive_failures, failing_since is null from webhookd.endpoint_health",
)


async def rows(connection: "Connection") -> list[set[tuple[object, ...]]]:
    """Return what the delivery of an event leaves in each table."""
    return [{tuple(row) for row in await connection.fetch(query)} for query in ROWS]


async def finish_by_stages(flow: Flow) -> None:
    """Let the stages do what is left."""
    while (await flow.route()).events:
        pass
    await flow.start()
    await flow.claim()


async def answer(flow: Flow, statuses: dict[int, int]) -> None:
    """Report an answer to every leased job, by its saga, and apply the results."""
    leased = await flow.superuser.fetch(
        "select id, saga_id, lease_token from webhookd.webhook_delivery_jobs"
        " where status = 'Leased' order by id"
    )
    for job in leased:
        report = attempts.Report(job["id"], job["lease_token"], statuses[job["saga_id"] % len(statuses)])
        if report.is_success:
            assert await sagas.complete(flow.daemon, [report])
        else:
            assert await attempts.report(flow.daemon, [report]) == {job["id"]: ReportVerdict.ACCEPTED}
    await flow.apply(failing_after=2)


@pytest.fixture
async def twins(cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Flow, Flow]]:
    """Give two copies of one database, in which some subscriptions are held, limited or failing."""
    choice = random.Random(request.node.callspec.params["seed"])  # noqa: S311  no secret
    original = await cluster.create_database(migrated=True)
    flow = await Flow.open(original)
    for _ in range(choice.randint(1, 5)):
        subscription_id = await flow.subscribe(
            choice.choice(TYPES[:2]),
            verified=choice.random() < 0.9,
            max_attempts=choice.choice([None, 1, 2]),
            base_delay_seconds=choice.choice([0, 3600]),
        )
        if choice.random() < 0.1:
            await flow.superuser.execute(
                "update webhookd.subscriptions set active = false where id = $1", subscription_id
            )
        if choice.random() < 0.2:
            await flow.superuser.execute(
                "insert into webhookd.endpoint_health (subscription_id, consecutive_failures, failing_since)"
                " values ($1, 20, now())",
                subscription_id,
            )
    await original.close()
    copies: list[Database] = [await copy_database(original), await copy_database(original)]
    yield await Flow.open(copies[0]), await Flow.open(copies[1])
    for database in (*copies, original):
        await cluster.drop_database(database)


@pytest.mark.parametrize("seed", range(12))
async def test_short_path_and_stages_leave_the_same_rows(twins: tuple[Flow, Flow], seed: int) -> None:
    """Rounds of events and answers, on one copy by the short path, on the other by the stages alone."""
    await compare(*twins, seed)


@pytest.mark.parametrize("seed", [5])
async def test_comparison_finds_a_planted_mistake(twins: tuple[Flow, Flow], seed: int) -> None:
    """A short path that ignores the attempt limit of the settings leaves other rows."""
    short, staged = twins
    mistake = Weakened("deliver_now", "subscription_window, max_attempts) s", "subscription_window, 1) s")
    await mistake.take_away(short.superuser)
    with pytest.raises(AssertionError):
        await compare(short, staged, seed)


async def compare(short: Flow, staged: Flow, seed: int) -> None:
    """Deliver the same events in two ways, and compare all rows after each step."""
    choice = random.Random(seed)  # noqa: S311  no secret
    claimed = 0
    for number in range(ROUNDS):
        events = [
            NewEvent(
                choice.choice(TYPES), f'{{"n": {number}}}', choice.choice([None, f"key-{number}-{place}"])
            )
            for place in range(choice.randint(1, 4))
        ]
        terms = TERMS._replace(wanted=choice.choice([1, 2, 16]), batch_size=choice.choice([1, 8]))
        if choice.random() < 0.5:
            accepted, done = await short_path.publish(short.daemon, events, 1.0, terms)
            assert [event.duplicate for event in accepted] == [False] * len(events)
        else:
            await publish(short.daemon, events)
            done = await short_path.route(short.daemon, terms)
        assert done.problem is None
        claimed += len(done.claims)
        await publish(staged.daemon, events)
        await finish_by_stages(short)
        await finish_by_stages(staged)
        assert await rows(short.daemon) == await rows(staged.daemon)
        statuses = dict(enumerate(choice.choices([200, 204, 500], k=5)))
        await answer(short, statuses)
        await answer(staged, statuses)
        assert await rows(short.daemon) == await rows(staged.daemon)
    # The comparison proves nothing if the short path never claimed.
    delivered = await short.daemon.fetchval("select count(*) from webhookd.webhook_delivery_jobs")
    assert claimed or not delivered


async def test_published_event_is_claimed_in_its_own_transaction(flow: Flow) -> None:
    """Event, saga and job carry the time of one transaction, and the claim has all that a request needs."""
    await flow.subscribe()
    [accepted], done = await short_path.publish(
        flow.daemon, [NewEvent("order.created", '{"n": 1.10}', None, "c-1")], 1.0, TERMS
    )
    assert (done.events, done.sagas, done.started, done.more) == (1, 1, 1, False)
    [(lease, message)] = done.claims
    assert message is not None
    assert (message.event_type, message.payload, message.correlation_id) == (
        "order.created",
        '{"n": 1.10}',
        "c-1",
    )
    assert (lease.event_id, lease.attempt, lease.claimed_at) == (accepted.id, 1, accepted.created_at)
    times = await flow.daemon.fetchrow(
        "select distinct e.created_at, s.created_at, j.created_at from webhookd.events e"
        " join webhookd.webhook_delivery_sagas s on s.event_id = e.id"
        " join webhookd.webhook_delivery_jobs j on j.saga_id = s.id"
    )
    assert set(times or ()) == {accepted.created_at}


async def test_error_undoes_the_steps_but_not_the_event(flow: Flow) -> None:
    """A claim that fails leaves the event in the routing queue, and the stages deliver it."""
    await flow.subscribe()
    await flow.superuser.execute("revoke execute on function webhookd.claim_jobs from webhookd_app")
    [accepted], done = await short_path.publish(flow.daemon, [NewEvent("order.created", "{}")], 1.0, TERMS)
    assert done.problem == "42501: permission denied for function claim_jobs"
    assert (done.events, done.sagas, done.started, done.claims, done.more) == (0, 0, 0, [], True)
    assert await flow.daemon.fetchval("select array_agg(event_id) from webhookd.event_routing_queue") == [
        accepted.id
    ]
    assert await flow.daemon.fetchval("select count(*) from webhookd.webhook_delivery_sagas") == 0
    await flow.superuser.execute("grant execute on function webhookd.claim_jobs to webhookd_app")
    await flow.route()
    await flow.start()
    assert [lease.event_id for lease in await flow.claim()] == [accepted.id]


async def test_wide_fan_out_is_only_routed(flow: Flow) -> None:
    """More subscriptions than the call may claim: the stages share the work fairly."""
    for _ in range(3):
        await flow.subscribe()
    _, done = await short_path.publish(
        flow.daemon, [NewEvent("order.created", "{}")], 1.0, TERMS._replace(wanted=2)
    )
    assert (done.sagas, done.started, done.claims) == (3, 0, [])


async def test_dead_letter_of_a_retry_is_returned(flow: Flow) -> None:
    """A retry of the same subscription that has no attempt left is dead-lettered by the way, and returned."""
    await flow.subscribe()
    await flow.publish()
    await flow.route()
    await flow.attempt(500)
    _, done = await short_path.publish(
        flow.daemon, [NewEvent("order.created", "{}")], 1.0, TERMS._replace(max_attempts=1)
    )
    [dead] = done.dead_lettered
    assert dead.dead_letter_id is not None
    assert len(done.claims) == 1


async def test_turn_of_another_orchestrator_leaves_the_saga(flow: Flow) -> None:
    """While another orchestrator starts sagas, the event is only routed, and nothing waits."""
    await flow.subscribe()
    async with flow.superuser.transaction():
        await flow.superuser.execute("select from webhookd.orchestration_turn for update")
        _, done = await short_path.publish(flow.daemon, [NewEvent("order.created", "{}")], 1.0, TERMS)
    assert (done.sagas, done.started, done.problem) == (1, 0, None)
