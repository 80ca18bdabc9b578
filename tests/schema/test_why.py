"""Asking why, against the database: awkward histories, told as they were."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.flow import ADDRESS, EVENT_TYPE, POLICY, Flow
from webhookd.core.states import SagaStatus
from webhookd.deliveries import reads, subscriptions
from webhookd.deliveries.explain import Limits, Reason

if TYPE_CHECKING:
    from tests.support.database import Database

LIMITS = Limits(subscription_window=2, max_attempts=5)
LAST_CHANCE = POLICY._replace(max_attempts=1)
# The answer's names, which are the API's.
SHARE = {
    "subscription_id",
    "callback_url",
    "status",
    "reason",
    "explanation",
    "saga_id",
    "attempt_count",
    "next_attempt_at",
    "final_error_code",
    "dead_letter_id",
    "buried_as",
    "held",
}


async def shares(flow: Flow, event_id: int) -> dict[int, dict[str, Any]]:
    """What became of an event, by subscription."""
    found = await reads.event(flow.daemon, event_id, LIMITS)
    assert found is not None
    assert all(set(share) == SHARE for share in found["deliveries"])
    return {share["subscription_id"]: share for share in found["deliveries"]}


async def reasons(flow: Flow, event_id: int) -> dict[int, str]:
    """Why, by subscription."""
    return {
        subscription_id: share["reason"] for subscription_id, share in (await shares(flow, event_id)).items()
    }


async def set_active(flow: Flow, subscription_id: int, *, active: bool) -> None:
    """Pause or resume."""
    await subscriptions.update(flow.daemon, subscription_id, {"active": active})


async def move(flow: Flow, subscription_id: int) -> None:
    """Change the address, which is not verified then."""
    await subscriptions.update(flow.daemon, subscription_id, {"callback_url": f"{ADDRESS}/moved"})


async def test_not_routed_is_told_by_the_state_at_the_time(flow: Flow) -> None:
    """Paused, unverified, moved away, not there yet: as it was when the event was routed, not as it is."""
    paused, moved, unverified = [await flow.subscribe(verified=number < 2) for number in range(3)]
    well = await flow.subscribe()
    await set_active(flow, paused, active=False)
    await move(flow, moved)
    event_id = await flow.publish()
    assert set((await reasons(flow, event_id)).values()) == {Reason.WAITS_FOR_ROUTING}
    await flow.route()
    await set_active(flow, paused, active=True)
    await flow.verify(moved)
    await flow.verify(unverified)
    late = await flow.subscribe()
    await set_active(flow, late, active=False)
    assert await reasons(flow, event_id) == {
        paused: Reason.INACTIVE,
        moved: Reason.UNVERIFIED,
        unverified: Reason.UNVERIFIED,
        well: Reason.FIRST_ATTEMPT_DUE,
        late: Reason.SUBSCRIBED_LATER,
    }
    other = await flow.publish("other.type")
    assert await reasons(flow, other) == {}


async def test_what_changed_between_event_and_routing_counts(flow: Flow) -> None:
    """Routing decides: who resumed in time gets it, who was paused in time does not, and that is told."""
    resumed, paused, both = [await flow.subscribe() for _ in range(3)]
    await set_active(flow, resumed, active=False)
    await set_active(flow, both, active=False)
    event_id = await flow.publish()
    await set_active(flow, resumed, active=True)
    await set_active(flow, paused, active=False)
    # Paused when the event came, and by the time it was routed resumed and moved to an unverified address.
    await set_active(flow, both, active=True)
    await move(flow, both)
    made = await flow.subscribe()
    made_unverified = await flow.subscribe(verified=False)
    await flow.route()
    await set_active(flow, paused, active=True)
    assert await reasons(flow, event_id) == {
        resumed: Reason.FIRST_ATTEMPT_DUE,
        paused: Reason.INACTIVE,
        both: Reason.UNVERIFIED,
        made: Reason.FIRST_ATTEMPT_DUE,
        made_unverified: Reason.UNVERIFIED,
    }


async def test_an_event_that_nobody_got_is_told_too(flow: Flow) -> None:
    """Nobody knows when it was routed: the first state after the event that explains it does."""
    paused = await flow.subscribe()
    event_id = await flow.publish()
    await set_active(flow, paused, active=False)
    assert (await flow.route()).sagas == 0
    await set_active(flow, paused, active=True)
    assert await reasons(flow, event_id) == {paused: Reason.INACTIVE}


async def test_a_change_that_was_committed_too_late_is_told(flow: Flow, database: "Database") -> None:
    """Logged as active before the event, committed after it was routed: routing could not see it."""
    late = await flow.subscribe()
    await set_active(flow, late, active=False)
    other = await database.connect("daemon")
    async with other.transaction():
        await subscriptions.update(other, late, {"active": True})
        event_id = await flow.publish()
        await flow.route()
    assert await reasons(flow, event_id) == {late: Reason.CHANGED_MEANWHILE}


async def test_a_subscription_of_another_type_by_now_is_still_told_of(flow: Flow) -> None:
    """Somebody with rights on the table changed it: its delivery stays, and it was not there for others."""
    subscription_id = await flow.subscribe()
    event_id = await flow.publish()
    await flow.route()
    later = await flow.publish("other.type")
    await flow.route()
    await flow.superuser.execute("update webhookd.subscriptions set event_type = 'other.type'")
    assert await reasons(flow, event_id) == {subscription_id: Reason.FIRST_ATTEMPT_DUE}
    assert await reasons(flow, later) == {subscription_id: Reason.SUBSCRIBED_LATER}


class Asked:
    """One delivery, asked for by its event and by its own id: both must say the same."""

    def __init__(self, flow: Flow, event_id: int, subscription_id: int) -> None:
        self._flow = flow
        self._event_id = event_id
        self._subscription_id = subscription_id

    async def share(self) -> dict[str, Any]:
        """All that is told."""
        told = (await shares(self._flow, self._event_id))[self._subscription_id]
        delivery = await reads.delivery(self._flow.daemon, told["saga_id"], LIMITS)
        assert delivery is not None
        for name in ("reason", "explanation", "buried_as", "held", "dead_letter_id"):
            assert delivery[name] == told[name]
        return told

    async def reason(self) -> str:
        """Why it is where it is."""
        return str((await self.share())["reason"])


@pytest.fixture
async def asked(flow: Flow) -> Asked:
    """Give a delivery that waits for its first attempt."""
    subscription_id = await flow.subscribe(base_delay_seconds=3600)
    event_id = await flow.publish()
    await flow.route()
    return Asked(flow, event_id, subscription_id)


async def test_an_attempt_is_told_at_every_step(flow: Flow, asked: Asked) -> None:
    """Due, made a job of, held, leased, lost, reported: one after the other."""
    assert await asked.reason() == Reason.FIRST_ATTEMPT_DUE
    await flow.start()
    assert await asked.reason() == Reason.WAITS_FOR_WORKER
    await set_active(flow, 1, active=False)
    assert (await asked.reason(), (await asked.share())["held"]) == (Reason.HELD_INACTIVE, True)
    await set_active(flow, 1, active=True)
    [lease] = await flow.claim(worker_id="host-7")
    assert await asked.reason() == Reason.IN_FLIGHT
    assert "worker host-7" in (await asked.share())["explanation"]
    await set_active(flow, 1, active=False)
    assert (await asked.reason(), (await asked.share())["held"]) == (Reason.IN_FLIGHT, False)
    await flow.expire_lease(lease.job_id)
    assert await asked.reason() == Reason.LEASE_EXPIRED
    await flow.report(lease, 503)
    assert await asked.reason() == Reason.RESULT_REPORTED


async def test_a_retry_is_told_until_it_is_given_up(flow: Flow, asked: Asked) -> None:
    """Later, held, due, without an attempt left since the limit was lowered, and dead."""
    await flow.attempt(503)
    assert await asked.reason() == Reason.RETRY_LATER
    await move(flow, 1)
    assert await asked.reason() == Reason.HELD_UNVERIFIED
    await flow.verify(1)
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_sagas set next_attempt_at = clock_timestamp()"
    )
    assert await asked.reason() == Reason.RETRY_DUE
    await subscriptions.update(flow.daemon, 1, {"max_attempts": 1})
    assert await asked.reason() == Reason.EXHAUSTED
    await flow.start()
    dead = await asked.share()
    assert (dead["reason"], dead["final_error_code"]) == (Reason.DEAD_LETTERED, "HTTP_503")
    assert (dead["buried_as"] is not None, dead["dead_letter_id"]) == (True, None)


async def test_a_chain_of_requeues_is_told_by_its_last(flow: Flow, asked: Asked) -> None:
    """The event tells of the newest delivery; an old one, asked for itself, of what it was requeued as."""
    await flow.attempt(503, LAST_CHANCE)
    first = await asked.share()
    requeued = await flow.requeue(first["buried_as"])
    again = await asked.share()
    assert (again["saga_id"], again["reason"]) == (requeued.saga_id, Reason.FIRST_ATTEMPT_DUE)
    assert (again["dead_letter_id"], again["buried_as"]) == (first["buried_as"], None)
    old = await reads.delivery(flow.daemon, first["saga_id"], LIMITS)
    assert old is not None
    assert old["reason"] == Reason.REQUEUED
    assert f"requeued as delivery {requeued.saga_id}" in old["explanation"]
    await flow.attempt(500, LAST_CHANCE)
    twice = await flow.requeue((await asked.share())["buried_as"])
    await flow.attempt(200)
    last = await asked.share()
    assert (last["saga_id"], last["status"]) == (twice.saga_id, SagaStatus.COMPLETED)
    assert last["reason"] == Reason.DELIVERED
    assert last["explanation"].endswith("after 1 attempt.")


async def test_what_stands_in_the_way_is_told(flow: Flow) -> None:
    """A full window; and an endpoint that keeps failing, with its one probe under way or not."""
    subscription_id = await flow.subscribe()
    events = [await flow.publish() for _ in range(4)]
    await flow.route()

    async def told() -> list[str]:
        return [(await reasons(flow, event_id))[subscription_id] for event_id in events]

    await flow.start(window=LIMITS.subscription_window)
    due, waits, full = Reason.FIRST_ATTEMPT_DUE, Reason.WAITS_FOR_WORKER, Reason.WINDOW_FULL
    assert await told() == [waits, waits, full, full]
    await flow.superuser.execute(
        "insert into webhookd.endpoint_health (subscription_id, consecutive_failures, failing_since) "
        "values ($1, 10, now())",
        subscription_id,
    )
    failing = Reason.ENDPOINT_FAILING
    assert await told() == [waits, waits, failing, failing]
    [probe] = await flow.claim()
    assert sorted(await told()) == sorted([Reason.IN_FLIGHT, failing, failing, failing])
    await flow.report(probe, 200)
    [other] = await flow.claim()
    await flow.report(other, 200)
    await flow.superuser.execute("update webhookd.endpoint_health set failing_since = now()")
    assert (await told())[2:] == [due, due]


@pytest.mark.parametrize("number", [reads.MAX_DELIVERIES_OF_EVENT, reads.MAX_DELIVERIES_OF_EVENT + 1])
async def test_many_subscriptions_are_told_up_to_a_bound(flow: Flow, number: int) -> None:
    """The first thousand, and whether there are more."""
    await flow.superuser.execute(
        "insert into webhookd.subscriptions (event_type, callback_url, active, verified) "
        "select $1, 'https://receiver.example/' || i, i % 2 = 0, true from generate_series(1, $2::int) i",
        EVENT_TYPE,
        number,
    )
    event_id = await flow.publish()
    await flow.route()
    found = await reads.event(flow.daemon, event_id, LIMITS)
    assert found is not None
    assert len(found["deliveries"]) == reads.MAX_DELIVERIES_OF_EVENT
    assert found["more_deliveries"] is (number > reads.MAX_DELIVERIES_OF_EVENT)
