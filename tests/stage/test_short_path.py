"""The short path in a process: when it is used, what it wakes, and that it shares slots with the worker."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.stage.conftest import Parts
from tests.support.flow import Flow
from tests.support.waiting import until_true
from webhookd.core.settings import DeliverySettings, Settings
from webhookd.deliveries import short_path
from webhookd.deliveries.ingest import GroupCommit, NewEvent
from webhookd.deliveries.reporter import Reporter
from webhookd.deliveries.router import Router
from webhookd.deliveries.short_path import MAX_CLAIM, MAX_EVENTS, REST_FACTOR, ShortPath
from webhookd.deliveries.slots import Room
from webhookd.deliveries.worker import Worker
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.wakeups import Work

EVENT = NewEvent("order.created", "{}")
BLOCKED = "https://127.0.0.1/"  # an attempt fails at once, and nothing is sent
STATUSES = "select array_agg(distinct status::text) from webhookd.webhook_delivery_jobs"


@pytest.fixture
async def worker(parts: Parts) -> AsyncIterator[Worker]:
    """Give a worker that is not running: it only sends what the short path claims."""
    async with GuardedClient(ClientOptions(AddressPolicy(), trusted_tls())) as client:
        yield Worker(parts.context, client, Reporter(parts.context))


async def test_lone_event_is_sent_without_any_stage(flow: Flow, parts: Parts, worker: Worker) -> None:
    """Ingest alone brings the event to its request, and wakes no stage."""
    await flow.subscribe(callback_url=BLOCKED)
    inboxes = {work: parts.wakeups.inbox(work) for work in (Work.EVENTS, Work.SAGAS)}
    ingest = GroupCommit(parts.context, ShortPath(parts.context, worker))
    await ingest.publish(EVENT)
    assert await flow.daemon.fetchval(STATUSES) == ["Leased"]
    await until_true(lambda: worker.in_flight == 0)
    assert [work for work, inbox in inboxes.items() if inbox._is_woken] == []
    assert parts.metrics.attempts_started._value.get() == 1


async def test_published_elsewhere_is_routed_and_sent(flow: Flow, parts: Parts, worker: Worker) -> None:
    """The router uses the short path for an event that SQL published."""
    await flow.subscribe(callback_url=BLOCKED)
    await flow.publish()
    routed = await Router(parts.context, ShortPath(parts.context, worker)).run_once()
    assert (routed.events, routed.sagas, routed.more) == (1, 1, False)
    assert await flow.daemon.fetchval(STATUSES) == ["Leased"]


async def test_ingest_does_not_wait_for_the_rest_after_a_call_but_routing_does(
    flow: Flow, parts: Parts, worker: Worker
) -> None:
    """So a client gets its answer at once, and a stream of events is routed a few at a time."""
    await flow.subscribe(callback_url=BLOCKED)
    path = ShortPath(parts.context, worker)
    assert await path.publish([EVENT], 1.0) is not None
    assert await path.publish([EVENT], 1.0) is None
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 1
    for _ in range(2):
        await flow.publish()
    routed = await path.route(100)
    assert routed is not None
    assert routed.events == 2


async def test_stages_take_over_after_a_call_that_left_events(
    flow: Flow, parts: Parts, worker: Worker
) -> None:
    """With many events the stages cost less for each, so the router does not wait for the short path."""
    await flow.subscribe(callback_url=BLOCKED)
    for _ in range(MAX_EVENTS + 1):
        await flow.publish()
    path = ShortPath(parts.context, worker)
    routed = await path.route(100)
    assert routed is not None
    assert routed.more
    assert await path.route(100) is None


async def test_stages_take_over_after_two_slow_calls(
    flow: Flow, parts: Parts, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow call may be the first of a new connection; a second one means that the path is slow."""
    await flow.subscribe(callback_url=BLOCKED)
    monkeypatch.setattr(short_path, "SLOW_SECONDS", 0.0)
    path = ShortPath(parts.context, worker)
    assert await path.route(100) is not None
    assert await path.route(100) is not None
    assert await path.route(100) is None


async def test_rest_is_as_long_as_fast_calls_need(parts: Parts, worker: Worker) -> None:
    """A call that waited for a processor or the disk does not delay the events after it."""
    path = ShortPath(parts.context, worker)
    now = time.monotonic()
    for seconds in (60, 1, 60):
        path._was_slow = False  # two slow calls in a row would close the path
        path._ended(now - seconds, has_more=False)
    assert REST_FACTOR - 1 < path._opens_at - now < 2 * REST_FACTOR


async def test_closed_without_room_or_during_a_claim(flow: Flow, parts: Parts, worker: Worker) -> None:
    """A claim in progress, a drain, many events or few free slots close it; nothing is stored then."""
    await flow.subscribe(callback_url=BLOCKED)
    path = ShortPath(parts.context, worker)
    assert await path.publish([EVENT] * (MAX_EVENTS + 1), 1.0) is None
    async with worker.claiming:
        assert await path.publish([EVENT], 1.0) is None
    parts.settings = Settings(delivery=DeliverySettings(concurrency=MAX_CLAIM))
    assert await path.publish([EVENT], 1.0) is None
    parts.settings = Settings()
    await worker.drain(0.01)
    assert await path.publish([EVENT], 1.0) is None
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 0


async def test_claim_that_waited_for_the_short_path_counts_its_slots(
    flow: Flow, parts: Parts, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker reads its free slots after the short path has taken some, not before."""
    await flow.subscribe(callback_url=BLOCKED)
    for _ in range(40):
        await flow.publish()
    parts.settings = Settings(delivery=DeliverySettings(concurrency=40))
    publish, entered, go_on = short_path.publish, asyncio.Event(), asyncio.Event()

    async def held(*arguments: object) -> object:
        result = await publish(*arguments)  # type: ignore[arg-type]
        entered.set()
        await go_on.wait()
        return result

    monkeypatch.setattr(short_path, "publish", held)
    monkeypatch.setattr(worker, "_send", lambda *_: None)  # the slots stay in use
    seen: list[int] = []
    room = worker._slots.room

    def watched(concurrency: int, subscription_concurrency: int) -> Room:
        seen.append(worker.in_flight)
        return room(concurrency, subscription_concurrency)

    monkeypatch.setattr(worker._slots, "room", watched)
    publishing = asyncio.create_task(ShortPath(parts.context, worker).publish([EVENT], 1.0))
    await entered.wait()
    claiming = asyncio.create_task(worker.run_once())
    await until_true(lambda: bool(worker.claiming._waiters))
    seen.clear()
    go_on.set()
    await publishing
    await claiming
    assert seen[0] == 1


async def test_error_after_the_commit_stores_nothing_twice(
    flow: Flow, parts: Parts, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events are stored, whatever happens to the claimed attempts, and the stages are woken."""
    await flow.subscribe(callback_url=BLOCKED)

    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(worker, "accept", broken)
    inbox = parts.wakeups.inbox(Work.SAGAS)
    ingest = GroupCommit(parts.context, ShortPath(parts.context, worker))
    await asyncio.gather(ingest.publish(EVENT), ingest.publish(EVENT))
    assert await flow.daemon.fetchval("select count(*) from webhookd.events") == 2
    assert inbox._is_woken


async def test_attempt_that_others_kept_from_the_claim_wakes_the_worker(
    flow: Flow, parts: Parts, worker: Worker
) -> None:
    """Older attempts fill the claim, so the new one is left, and the worker is woken for it."""
    await flow.subscribe("order.paid", BLOCKED)
    for _ in range(MAX_CLAIM):
        await flow.publish("order.paid")
    await flow.route()
    await flow.start()
    await flow.subscribe(callback_url=BLOCKED)
    inbox = parts.wakeups.inbox(Work.ATTEMPTS)
    await ShortPath(parts.context, worker).publish([EVENT], 1.0)
    assert inbox._is_woken


async def test_restart_of_the_claims_survives_the_short_path(flow: Flow, worker: Worker) -> None:
    """A claim from the first job on, which waited for the short path, is not moved by its mark."""
    await flow.subscribe(callback_url=BLOCKED)
    await flow.publish()
    await flow.route()
    await flow.start()
    worker.next_job_id = 1000
    async with worker.claiming:
        claiming = asyncio.create_task(worker.run_once(restarts=True))
        await until_true(lambda: bool(worker.claiming._waiters))
        worker.next_job_id = 1000
    await claiming
    assert await flow.daemon.fetchval(STATUSES) == ["Leased"]


async def test_failure_wakes_the_router(
    flow: Flow, parts: Parts, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in the short path costs the event nothing but time."""
    await flow.subscribe(callback_url=BLOCKED)
    await flow.superuser.execute("revoke execute on function webhookd.claim_jobs from webhookd_app")
    inbox = parts.wakeups.inbox(Work.EVENTS)
    accepted = await ShortPath(parts.context, worker).publish([EVENT], 1.0)
    assert accepted is not None
    assert inbox._is_woken
    assert "the short path failed, the stages take over: 42501" in caplog.text


async def test_rest_of_a_fan_out_wakes_the_starter(flow: Flow, parts: Parts, worker: Worker) -> None:
    """Deliveries that were not started are named to the starter."""
    subscriptions = [await flow.subscribe(callback_url=BLOCKED) for _ in range(MAX_CLAIM + 1)]
    inbox = parts.wakeups.inbox(Work.SAGAS)
    await ShortPath(parts.context, worker).publish([EVENT], 1.0)
    assert sorted(inbox.take()) == sorted(subscriptions)
