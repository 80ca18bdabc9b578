"""Resend, requeue, retry, pause, disable, replay and move under load, with a fault during the request.

Each request goes to one instance. A fault starts when the database has committed the request's function and
the instance waits for the answer. Then the client repeats the request at another instance.
"""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from random import Random
from typing import Any, Literal

from tests.faults.bed import EVENT_TYPES, Bed
from tests.faults.plan import Action, Argument, Needs, Scenario, act, fault
from tests.faults.scenarios.connections import reset_wire
from tests.faults.scenarios.server import crash_server, restart_server
from tests.faults.support_client import Answer, Hold, Replay, Resend, utc_now
from tests.faults.verbs import database_recovers, heal
from tests.support.waiting import until_true

NO_FAULT = "nothing"
FAULTS = ("lost_answer", "reset", "kill", "crash")
# The type with the failing endpoint is published rarely.
TARGETS = EVENT_TYPES[1:]
FAILING_PATH = "/failing"
# More than the batch of a replay, which is 500: a fault leaves some batches to the repeated request.
REPLAY_EVENTS = 1100
# Retries wait this long, so that only a request can make them due earlier.
SETTINGS = {"retry.max_delay_seconds": 30.0}
ENOUGH_REQUESTS = 5
OK, CREATED, CONFLICT, INVALID = 200, 201, 409, 422

# The latest delivery of its event and subscription, so that requests can be told apart by their time.
FINISHED = """
    select array(select s.id from webhookd.webhook_delivery_sagas s
                 where s.status = $1::text::webhookd.saga_status
                     and not exists (select from webhookd.webhook_delivery_sagas r where r.resent_from = s.id)
                 order by s.id desc limit $2)
"""
NOT_REQUEUED = """
    select array(select d.id from webhookd.dead_letters d
                 where not exists (select from webhookd.webhook_delivery_sagas r
                                   where r.dead_letter_id = d.id)
                 order by d.id desc limit $1)
"""
REQUEUED = "select count(*) from webhookd.webhook_delivery_sagas where dead_letter_id is not null"
# A bulk requeue takes the dead letters of this time.
REQUEUE_SECONDS = 20
REQUEUEABLE = """
    select count(*) > 0 from webhookd.dead_letters d
    where d.subscription_id = $1 and d.failed_at > $2
        and not exists (select from webhookd.webhook_delivery_sagas r where r.dead_letter_id = d.id)
"""
WAITING_RETRIES = """
    select array(select id from webhookd.webhook_delivery_sagas
                 where subscription_id = $1 and status = 'PendingRetry'
                     and next_attempt_at > now() + interval '10 s')
"""
NOT_ADVANCED = f"select count(*) from unnest(({WAITING_RETRIES})) id where id = any($2::bigint[])"
RESENDS_ENDED = """
    select not exists (select from webhookd.webhook_delivery_sagas
                       where subscription_id = $1 and resent_from is not null
                           and status not in ('Completed', 'DeadLettered'))
"""
TIME_OF_EVENT = """
    select min(created_at) from (select created_at from webhookd.events order by id desc limit $1) e
"""


@heal
async def resend_deliveries(bed: Bed, *, status: str, count: int, instance: int, how: str) -> int:
    """Resend finished deliveries one after the other; the fault happens during the first request."""
    await bed.until(f"select cardinality(({FINISHED})) > 0", status, count)
    saga_ids = await bed.fetch_value(FINISHED, status, count)

    async def resend() -> None:
        for saga_id in saga_ids:
            await _resend(bed, instance, f"POST /v1/deliveries/{saga_id}/resend", saga_id)

    return await _under_fault(bed, how, instance, "resend_delivery", resend())


@heal
async def requeue_dead_letters(bed: Bed, *, count: int, instance: int, how: str) -> int:
    """Requeue dead letters one after the other; the fault happens during the first request."""
    await bed.until(f"select cardinality(({NOT_REQUEUED})) > 0", count)
    letter_ids = await bed.fetch_value(NOT_REQUEUED, count)
    query = "select saga_id from webhookd.dead_letters where id = $1"

    async def requeue() -> None:
        for letter_id in letter_ids:
            saga_id = await bed.fetch_value(query, letter_id)
            await _resend(bed, instance, f"POST /v1/dead-letters/{letter_id}/requeue", saga_id)

    return await _under_fault(bed, how, instance, "requeue_dead_letter", requeue())


async def _resend(bed: Bed, instance: int, call: str, saga_id: int) -> None:
    """Resend one delivery. A repeated request gets 409 while the resend of the first one is not finished."""
    answer = await _request(bed, instance, call, expected=(CREATED, CONFLICT))
    assert "saga_id" in answer.body, answer
    bed.support.resends.append(Resend(saga_id, answer.body["saga_id"]))
    if answer.status == CONFLICT:
        bed.effects["recognised_resends"] += 1


@heal
async def requeue_many_dead_letters(bed: Bed, *, instance: int, how: str) -> int:
    """Requeue the latest dead letters in one request."""
    failing_id = bed.receiver.subscription_at(FAILING_PATH)
    failed_after = utc_now() - timedelta(seconds=REQUEUE_SECONDS)
    await bed.until(REQUEUEABLE, failing_id, failed_after)
    before = await bed.fetch_value(REQUEUED)
    chosen = {"subscription_id": failing_id, "failed_after": failed_after.isoformat()}
    body = {"filter": chosen, "dry_run": False}

    async def requeue() -> None:
        await _request(bed, instance, "POST /v1/dead-letters/requeue", body, expected=(OK,))

    affected = await _under_fault(bed, how, instance, "requeue_dead_letters", requeue())
    bed.effects["requeued_in_bulk"] += await bed.fetch_value(REQUEUED) - before
    return affected


@heal
async def retry_deliveries(bed: Bed, *, event_type: str, count: int, instance: int, how: str) -> int:
    """Let deliveries fail with a long Retry-After; then make each retry due now."""
    path, subscription_id = _current_path(bed, event_type), _subscription_id(bed, event_type)
    bed.receiver.refuse_next(path, count)
    await bed.until(f"select cardinality(({WAITING_RETRIES})) >= $2", subscription_id, count)
    saga_ids = await bed.fetch_value(WAITING_RETRIES, subscription_id)

    async def retry() -> None:
        for saga_id in saga_ids:
            # 409 for a repeated request: the attempt has started by now.
            call = f"POST /v1/deliveries/{saga_id}/retry"
            await _request(bed, instance, call, expected=(OK, CONFLICT))

    affected = await _under_fault(bed, how, instance, "retry_delivery", retry())
    if left := await bed.fetch_value(NOT_ADVANCED, subscription_id, saga_ids):
        bed.problems.append(f"{left} retries still wait after a request to retry them")
    bed.effects["advanced_retries"] += len(saga_ids) - left
    return affected


@heal
async def hold(bed: Bed, *, event_type: str, kind: str, instance: int, how: str) -> int:
    """Pause or disable a subscription."""
    subscription_id = _subscription_id(bed, event_type)

    async def change() -> None:
        await _patch(bed, instance, subscription_id, _held(kind, True))
        bed.support.holds.append(Hold(subscription_id, _kind(kind), utc_now()))

    return await _under_fault(bed, how, instance, "update_subscription", change())


@heal
async def release_hold(bed: Bed, *, event_type: str, kind: str, instance: int, how: str) -> int:
    """Resume or enable a subscription."""
    subscription_id = _subscription_id(bed, event_type)
    held = bed.support.hold_of(subscription_id, kind)
    held.until = held.until or utc_now()  # the first request counts

    async def change() -> None:
        await _patch(bed, instance, subscription_id, _held(kind, False))
        held.released_at = utc_now()

    return await _under_fault(bed, how, instance, "update_subscription", change())


@heal
async def replay_missing(bed: Bed, *, event_type: str, instance: int, how: str) -> int:
    """Replay the events that were not routed while the subscription was disabled."""
    since = bed.support.hold_of(_subscription_id(bed, event_type), "disabled").since
    return await _replay(bed, event_type, "missing", since, instance, how)


@heal
async def replay_all(bed: Bed, *, event_type: str, events: int, instance: int, how: str) -> int:
    """Replay the latest of all events, also those that were delivered."""
    since = await bed.fetch_value(TIME_OF_EVENT, events)
    return await _replay(bed, event_type, "all", since, instance, how)


async def _replay(bed: Bed, event_type: str, include: str, since: datetime, instance: int, how: str) -> int:
    """Replay, and do it again when the new deliveries have ended: the second time sends nothing twice.

    Count first: the answer has the two times that make it safe to repeat the request that follows.
    """
    subscription_id = _subscription_id(bed, event_type)
    call = f"POST /v1/subscriptions/{subscription_id}/replay"
    body: dict[str, Any] = {"since": since.isoformat(), "include": include}
    counted = await _request(bed, instance, call, body, expected=(OK,))
    if counted.body["created"] == 0:
        return 0
    body |= {name: counted.body[name] for name in ("until", "started_at")} | {"dry_run": False}

    async def replay() -> None:
        await _request(bed, instance, call, body, expected=(OK,))
        await bed.until(RESENDS_ENDED, subscription_id)
        answer = await _request(bed, instance, call, body, expected=(OK,))
        assert answer.body["last_event_id"] is None, answer
        until, started_at = (datetime.fromisoformat(answer.body[name]) for name in ("until", "started_at"))
        bed.support.replays.append(
            Replay(subscription_id, include == "all", since, until, started_at, utc_now())
        )
        effect = "replayed_deliveries" if include == "all" else "replayed_events"
        bed.effects[effect] += counted.body["created"]

    return await _under_fault(bed, how, instance, "replay_events", replay())


@heal
async def move(bed: Bed, *, event_type: str, step: str, instance: int, how: str) -> int:
    """Move an endpoint. The new address gets nothing before it echoes the challenge.

    The fault happens while the address is changed (`change`) or while it is verified (`verify`).
    """
    subscription_id, old_path = _subscription_id(bed, event_type), _current_path(bed, event_type)
    new_path = f"/{event_type}/{len(bed.support.new_paths) + 1}"
    url = bed.receiver.add_path(old_path, new_path)
    bed.support.new_paths.append(new_path)
    verify = f"POST /v1/subscriptions/{subscription_id}/verify"
    how_of = {"change": NO_FAULT, "verify": NO_FAULT} | {step: how}

    async def change() -> None:
        answer = await _patch(bed, instance, subscription_id, {"callback_url": url})
        assert answer.body["pending_callback_url"] == url, answer

    affected = await _under_fault(bed, how_of["change"], instance, "update_subscription", change())
    refused = await _request(bed, instance, verify, expected=(INVALID,))
    assert refused.body["code"] == "verification_failed", refused
    await _until_requests(bed, old_path)
    bed.receiver.echo_challenges(new_path)

    async def finish() -> None:
        answer = await _request(bed, instance, verify, expected=(OK,))
        assert (answer.body["callback_url"], answer.body["pending_callback_url"]) == (url, None), answer
        bed.support.moved_paths[old_path] = utc_now().timestamp()

    affected = min(
        affected, await _under_fault(bed, how_of["verify"], instance, "complete_verification", finish())
    )
    bed.state.setdefault("paths", {})[event_type] = new_path
    await _until_requests(bed, new_path)
    return affected


async def _until_requests(bed: Bed, path: str) -> None:
    """Wait until some more deliveries have arrived at a path."""
    before = len(bed.receiver.receipts)

    def enough() -> bool:
        paths = [receipt.request.path for receipt in bed.receiver.receipts[before:]]
        return paths.count(path) >= ENOUGH_REQUESTS

    await until_true(enough)


async def _under_fault(
    bed: Bed, how: str, instance: int, function: str, action: Coroutine[Any, Any, None]
) -> int:
    """Run an action that calls a database function through an instance; returns 0 if the fault missed it.

    The fault starts when the function is committed and the instance does not have the answer.
    """
    if how == NO_FAULT:
        await action
        return 1
    victim = bed.instances[instance]
    await victim.until_ready()
    lost = victim.wire.answers_lost
    victim.wire.lose_answers(rf"webhookd\.{function}\b", 1, silently=how != "lost_answer")
    task = asyncio.create_task(action)
    try:
        await until_true(lambda: task.done() or victim.wire.answers_lost > lost)
        is_hit = victim.wire.answers_lost > lost
        if is_hit:
            await _break(bed, how, instance, task)
        await task
    finally:
        task.cancel()
        victim.wire.lose_answers(function, 0)
    if is_hit:
        bed.effects[f"actions_with_{how}"] += 1
    return int(is_hit)


async def _break(bed: Bed, how: str, instance: int, task: "asyncio.Task[None]") -> None:
    """Break something while the action waits for its answer, and repair it."""
    match how:
        case "reset":
            await reset_wire(bed, instance=instance)
        case "kill":
            bed.instances[instance].kill()
            await task
            await bed.instances[instance].start()
        case "crash":
            await crash_server(bed)
            await restart_server(bed)
            await task
            await database_recovers(bed)


async def _request(
    bed: Bed, instance: int, call: str, body: object = None, *, expected: tuple[int, ...]
) -> Answer:
    return await bed.support.request(bed.instances, instance, call, body, expected=expected)


async def _patch(bed: Bed, instance: int, subscription_id: int, changes: dict[str, object]) -> Answer:
    return await _request(
        bed, instance, f"PATCH /v1/subscriptions/{subscription_id}", changes, expected=(OK,)
    )


def _subscription_id(bed: Bed, event_type: str) -> int:
    return bed.receiver.subscription_at(f"/{event_type}")


def _current_path(bed: Bed, event_type: str) -> str:
    path: str = bed.state.get("paths", {}).get(event_type, f"/{event_type}")
    return path


def _kind(kind: str) -> Literal["paused", "disabled"]:
    return "paused" if kind == "paused" else "disabled"


def _held(kind: str, is_held: bool) -> dict[str, object]:
    return {"paused": is_held} if kind == "paused" else {"active": not is_held}


# Plans. Each step is one use of the API, with a fault or without.


def resend_completed(random: Random, how: str) -> list[Action]:
    """Resend deliveries that succeeded."""
    return [_call(random, "resend_deliveries", how, status="Completed", count=random.randint(3, 15))]


def resend_dead_letters(random: Random, how: str) -> list[Action]:
    """Resend deliveries that ended as dead letters."""
    return [_call(random, "resend_deliveries", how, status="DeadLettered", count=random.randint(1, 3))]


def requeue(random: Random, how: str) -> list[Action]:
    """Requeue dead letters."""
    return [_call(random, "requeue_dead_letters", how, count=random.randint(1, 3))]


def requeue_many(random: Random, how: str) -> list[Action]:
    """Requeue many dead letters with one request."""
    return [_call(random, "requeue_many_dead_letters", how)]


def retry(random: Random, how: str) -> list[Action]:
    """Make waiting retries due."""
    event_type = random.choice(TARGETS)
    return [_call(random, "retry_deliveries", how, event_type=event_type, count=random.randint(3, 8))]


def pause(random: Random, how: str) -> list[Action]:
    """Pause a subscription while events are published, with a fault; then resume it."""
    return hold_and_release(random, how, NO_FAULT, "paused", random.randint(50, 200))


def resume(random: Random, how: str) -> list[Action]:
    """Pause a subscription while events are published; then resume it, with a fault."""
    return hold_and_release(random, NO_FAULT, how, "paused", random.randint(50, 200))


def replay_missed(random: Random, how: str) -> list[Action]:
    """Disable a subscription while events are published, enable it, and replay what it missed."""
    held = hold_and_release(random, NO_FAULT, NO_FAULT, "disabled", REPLAY_EVENTS)
    event_type = held[0].arguments["event_type"]
    return [*held, _call(random, "replay_missing", how, event_type=event_type)]


def disable(random: Random, how: str) -> list[Action]:
    """Disable a subscription, with a fault; then enable it, and replay what it missed."""
    held = hold_and_release(random, how, NO_FAULT, "disabled", random.randint(50, 200))
    event_type = held[0].arguments["event_type"]
    return [*held, _call(random, "replay_missing", NO_FAULT, event_type=event_type)]


def replay_everything(random: Random, how: str) -> list[Action]:
    """Replay events that were delivered."""
    event_type = random.choice(TARGETS)
    return [_call(random, "replay_all", how, event_type=event_type, events=3 * REPLAY_EVENTS)]


def change_address(random: Random, how: str) -> list[Action]:
    """Move an endpoint, with a fault while its address is changed."""
    return [_call(random, "move", how, event_type=random.choice(TARGETS), step="change")]


def verify_address(random: Random, how: str) -> list[Action]:
    """Move an endpoint, with a fault while its new address is verified."""
    return [_call(random, "move", how, event_type=random.choice(TARGETS), step="verify")]


def hold_and_release(random: Random, hold_how: str, release_how: str, kind: str, events: int) -> list[Action]:
    """Hold a subscription while this many events are published."""
    event_type = random.choice(TARGETS)
    return [
        _call(random, "hold", hold_how, event_type=event_type, kind=kind),
        act("accepted", more=events),
        _call(random, "release_hold", release_how, event_type=event_type, kind=kind),
    ]


def _call(random: Random, verb: str, how: str, **arguments: Argument) -> Action:
    make = act if how == NO_FAULT else fault
    return make(verb, **arguments, instance=random.randrange(3), how=how)


STEPS: tuple[Callable[[Random, str], list[Action]], ...] = (
    resend_completed,
    resend_dead_letters,
    requeue,
    requeue_many,
    retry,
    pause,
    resume,
    disable,
    replay_missed,
    replay_everything,
    change_address,
    verify_address,
)
# Effects of the steps, whatever the fault.
EFFECTS = (
    "resent_deliveries",
    "requeued_dead_letters",
    "requeued_in_bulk",
    "advanced_retries",
    "events_while_paused",
    "replayed_events",
    "replayed_deliveries",
    "requests_after_move",
)


def use_support(random: Random, rounds: int) -> list[Action]:
    """Use every action with every fault, in random order."""
    actions: list[Action] = []
    for _ in range(rounds):
        pairs = [(step, how) for step in STEPS for how in FAULTS]
        for step, how in random.sample(pairs, len(pairs)):
            actions += [*step(random, how), act("accepted", more=random.randint(20, 80))]
    return actions


SCENARIOS = (
    Scenario(
        "support_actions",
        "resend, requeue, retry, pause, disable, replay and move: the answer of the database lost, its "
        "connections reset, the instance killed, or PostgreSQL killed, each during the request",
        "the repeated request is recognised; held deliveries wait, a new address gets nothing before its "
        "verification, a replay sends each event once",
        use_support,
        effects=(*EFFECTS, "repeated_requests", *(f"actions_with_{how}" for how in FAULTS)),
        rounds=1,
        needs=Needs(settings=SETTINGS),
    ),
)
