"""Explanations against the database: difficult histories and their reasons."""

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.flow import ADDRESS, EVENT_TYPE, POLICY, Flow
from webhookd.core.states import SagaStatus
from webhookd.deliveries import attempts, ingest, reads, router, subscriptions, tenants
from webhookd.deliveries.explain import Limits, Reason

if TYPE_CHECKING:
    from tests.support.database import Database

LIMITS = Limits(subscription_window=2, max_attempts=5)
LAST_CHANCE = POLICY._replace(max_attempts=1)
# The fields of an event's delivery in the API.
FIELDS = {
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
    "resent_from",
    "buried_as",
    "held",
}


async def event_deliveries(flow: Flow, event_id: int) -> dict[int, dict[str, Any]]:
    """Return the deliveries of an event, by subscription."""
    found = await reads.event(flow.daemon, event_id, LIMITS)
    assert all(set(row) == FIELDS for row in found["deliveries"])
    return {row["subscription_id"]: row for row in found["deliveries"]}


async def reasons(flow: Flow, event_id: int) -> dict[int, str]:
    """Return the reasons, by subscription."""
    return {
        subscription_id: row["reason"]
        for subscription_id, row in (await event_deliveries(flow, event_id)).items()
    }


async def set_active(flow: Flow, subscription_id: int, *, active: bool) -> None:
    """Make a subscription active or not."""
    await subscriptions.update(flow.daemon, subscription_id, {"active": active})


async def move(flow: Flow, subscription_id: int) -> None:
    """Change the address with SQL: it is not verified then. The API would keep the old one until it is."""
    await flow.superuser.execute(
        "update webhookd.subscriptions set callback_url = $2 where id = $1",
        subscription_id,
        f"{ADDRESS}/moved",
    )


async def test_unrouted_event_is_explained_by_the_state_at_routing(flow: Flow) -> None:
    """Inactive, unverified, moved, not created yet: the state when the event was routed counts."""
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


async def test_changes_between_publishing_and_routing_count(flow: Flow) -> None:
    """A subscription that became active before routing gets the event; one that was paused does not."""
    resumed, paused, both = [await flow.subscribe() for _ in range(3)]
    await set_active(flow, resumed, active=False)
    await set_active(flow, both, active=False)
    event_id = await flow.publish()
    await set_active(flow, resumed, active=True)
    await set_active(flow, paused, active=False)
    # Inactive when the event was published; active and unverified when it was routed.
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


async def test_event_without_deliveries_is_explained(flow: Flow) -> None:
    """The time of routing is unknown, so the first state after the event that explains it counts."""
    paused = await flow.subscribe()
    event_id = await flow.publish()
    await set_active(flow, paused, active=False)
    assert (await flow.route()).sagas == 0
    await set_active(flow, paused, active=True)
    assert await reasons(flow, event_id) == {paused: Reason.INACTIVE}


async def test_late_commit_is_explained(flow: Flow, database: "Database") -> None:
    """A change logged before the event but committed after routing was not visible to it."""
    late = await flow.subscribe()
    await set_active(flow, late, active=False)
    other = await database.connect("daemon")
    async with other.transaction():
        await subscriptions.update(other, late, {"active": True})
        event_id = await flow.publish()
        await flow.route()
    assert await reasons(flow, event_id) == {late: Reason.CHANGED_MEANWHILE}


async def test_replayed_delivery_does_not_hide_the_time_of_routing(flow: Flow) -> None:
    """A replay creates the only delivery of an event, long after it was routed to none."""
    unverified = await flow.subscribe(verified=False)
    disabled = await flow.subscribe()
    await set_active(flow, disabled, active=False)
    event_id = await flow.publish()
    assert (await flow.route()).sagas == 0
    await flow.verify(unverified)
    await set_active(flow, disabled, active=True)
    replayed, later = await flow.subscribe(), await flow.subscribe()
    before = {unverified: Reason.UNVERIFIED, disabled: Reason.INACTIVE, later: Reason.SUBSCRIBED_LATER}
    assert await reasons(flow, event_id) == before | {replayed: Reason.SUBSCRIBED_LATER}
    for subscription_id, others in ((replayed, before), (disabled, {later: Reason.SUBSCRIBED_LATER})):
        await replay(flow, subscription_id)
        found = await reasons(flow, event_id)
        assert found[subscription_id] == Reason.FIRST_ATTEMPT_DUE
        assert {each: found[each] for each in others} == others


async def replay(flow: Flow, subscription_id: int) -> None:
    """Deliver the past events that were never routed to a subscription."""
    now = await flow.daemon.fetchval("select clock_timestamp()")
    what = router.Replay(subscription_id, now - timedelta(days=1), now, None, False, now)
    assert (await router.replay(flow.daemon, what, 0, 100, dry_run=False)).created == 1


async def test_patterns_filters_and_tenants_are_explained(flow: Flow) -> None:
    """Only subscriptions of the event's tenant with a pattern for its type are shown, each with a reason."""

    async def subscribe(*event_types: str, tenant: str = "acme", **fields: Any) -> int:
        created = await subscriptions.create(
            flow.daemon, None, ADDRESS, event_types=list(event_types), tenant=tenant, **fields
        )
        await flow.verify(created.subscription_id)
        return created.subscription_id

    async def publish(tenant: str, **labels: str) -> int:
        event = ingest.NewEvent("order.item.added", "{}", tenant=tenant, labels=json.dumps(labels))
        [accepted] = await ingest.publish(flow.daemon, [event])
        return accepted.id

    prefix, everything = await subscribe("order.*"), await subscribe("*")
    eu = await subscribe("order.item.added", filter={"region": "eu"})
    await subscribe("order.created", "orders.*")
    other, untenanted = await subscribe("*", tenant="globex"), await subscribe("*", tenant="")
    changed = await subscribe("order.item.*", filter={"region": "us"})
    ids = {tenant: await publish(tenant, region="us") for tenant in ("acme", "globex", "")}
    await flow.route()
    late = await subscribe("order.item.*")
    await subscriptions.update(flow.daemon, changed, {"event_types": ["invoice.*"]})
    await tenants.put(flow.daemon, "acme", {"active": False})
    held = Reason.HELD_TENANT
    assert await reasons(flow, ids["acme"]) == {
        prefix: held,
        everything: held,
        eu: Reason.FILTERED,
        changed: held,
        late: Reason.SUBSCRIBED_LATER,
    }
    due = Reason.FIRST_ATTEMPT_DUE
    assert await reasons(flow, ids["globex"]) == {other: due}
    assert await reasons(flow, ids[""]) == {untenanted: due}


async def test_event_without_a_subscription_of_its_tenant_is_explained(flow: Flow) -> None:
    """Others are counted, but not for a reader that is bound to the tenant."""
    for tenant in ("globex", ""):
        for pattern in ("order.*", "*", "invoice.paid"):
            await subscriptions.create(flow.daemon, pattern, ADDRESS, tenant=tenant)
    await subscriptions.delete(flow.daemon, 1)

    async def words(tenant: str, event_type: str, only_tenant: str | None = None) -> str | None:
        [event] = await ingest.publish(flow.daemon, [ingest.NewEvent(event_type, "{}", tenant=tenant)])
        found = await reads.event(flow.daemon, event.id, LIMITS, only_tenant)
        text: str | None = found["no_subscription"]
        return text

    none = "Tenant acme has no subscription to order.paid."
    others = "3 subscriptions of another tenant or of none match this type."
    assert await words("acme", "order.paid") == f"{none} {others}"
    assert await words("acme", "order.paid", "acme") == none
    assert await words("globex", "order.paid") is None
    await subscriptions.delete(flow.daemon, 4)
    await subscriptions.delete(flow.daemon, 5)
    none = "The event has no tenant, and no subscription without a tenant matches order.paid."
    assert await words("", "order.paid") == f"{none} 1 subscription of a tenant matches this type."


async def test_subscription_with_a_changed_type_is_explained(flow: Flow) -> None:
    """Its delivery stays, and it did not exist for events of its new type before."""
    subscription_id = await flow.subscribe()
    event_id = await flow.publish()
    await flow.route()
    later = await flow.publish("other.type")
    await flow.route()
    await flow.superuser.execute("update webhookd.subscriptions set event_type = 'other.type'")
    assert await reasons(flow, event_id) == {subscription_id: Reason.FIRST_ATTEMPT_DUE}
    assert await reasons(flow, later) == {subscription_id: Reason.SUBSCRIBED_LATER}


class DeliveryReader:
    """Reads a delivery by its event and by its own id: both must agree."""

    def __init__(self, flow: Flow, event_id: int, subscription_id: int) -> None:
        self._flow = flow
        self._event_id = event_id
        self._subscription_id = subscription_id

    async def row(self) -> dict[str, Any]:
        """Return the delivery's row."""
        found = (await event_deliveries(self._flow, self._event_id))[self._subscription_id]
        delivery = await reads.delivery(self._flow.daemon, found["saga_id"], LIMITS)
        for name in ("reason", "explanation", "buried_as", "held", "dead_letter_id"):
            assert delivery[name] == found[name]
        return found

    async def reason(self) -> str:
        """Return the reason for its status."""
        return str((await self.row())["reason"])


@pytest.fixture
async def delivery(flow: Flow) -> DeliveryReader:
    """Give a delivery that waits for its first attempt."""
    subscription_id = await flow.subscribe(base_delay_seconds=3600)
    event_id = await flow.publish()
    await flow.route()
    return DeliveryReader(flow, event_id, subscription_id)


async def test_attempt_is_explained_at_every_step(flow: Flow, delivery: DeliveryReader) -> None:
    """Due, started, held, leased, expired and reported, one after the other."""
    assert await delivery.reason() == Reason.FIRST_ATTEMPT_DUE
    await flow.start()
    assert await delivery.reason() == Reason.WAITS_FOR_WORKER
    await set_active(flow, 1, active=False)
    assert (await delivery.reason(), (await delivery.row())["held"]) == (Reason.HELD_INACTIVE, True)
    await set_active(flow, 1, active=True)
    [lease] = await flow.claim(worker_id="host-7")
    assert await delivery.reason() == Reason.IN_FLIGHT
    assert "worker host-7" in (await delivery.row())["explanation"]
    await set_active(flow, 1, active=False)
    assert (await delivery.reason(), (await delivery.row())["held"]) == (Reason.IN_FLIGHT, False)
    await flow.expire_lease(lease.job_id)
    assert await delivery.reason() == Reason.LEASE_EXPIRED
    await flow.report(lease, 503)
    assert await delivery.reason() == Reason.RESULT_REPORTED


async def test_retry_is_explained_until_it_is_dead_lettered(flow: Flow, delivery: DeliveryReader) -> None:
    """Later, held, due, without an attempt left after the limit was lowered, and dead-lettered."""
    await flow.attempt(503)
    assert await delivery.reason() == Reason.RETRY_LATER
    await move(flow, 1)
    assert await delivery.reason() == Reason.HELD_UNVERIFIED
    await flow.verify(1)
    await flow.superuser.execute(
        "update webhookd.webhook_delivery_sagas set next_attempt_at = clock_timestamp()"
    )
    assert await delivery.reason() == Reason.RETRY_DUE
    await subscriptions.update(flow.daemon, 1, {"max_attempts": 1})
    assert await delivery.reason() == Reason.EXHAUSTED
    await flow.start()
    dead = await delivery.row()
    assert (dead["reason"], dead["final_error_code"]) == (Reason.DEAD_LETTERED, "HTTP_503")
    assert (dead["buried_as"] is not None, dead["dead_letter_id"]) == (True, None)


async def test_requeued_delivery_is_explained_by_the_latest(flow: Flow, delivery: DeliveryReader) -> None:
    """The event shows the newest delivery; the old one names the delivery it was requeued as."""
    await flow.attempt(503, LAST_CHANCE)
    first = await delivery.row()
    requeued = await flow.requeue(first["buried_as"])
    again = await delivery.row()
    assert (again["saga_id"], again["reason"]) == (requeued.saga_id, Reason.FIRST_ATTEMPT_DUE)
    assert (again["dead_letter_id"], again["buried_as"]) == (first["buried_as"], None)
    old = await reads.delivery(flow.daemon, first["saga_id"], LIMITS)
    assert old["reason"] == Reason.REQUEUED
    assert f"requeued as delivery {requeued.saga_id}" in old["explanation"]
    await flow.attempt(500, LAST_CHANCE)
    twice = await flow.requeue((await delivery.row())["buried_as"])
    await flow.attempt(200)
    last = await delivery.row()
    assert (last["saga_id"], last["status"]) == (twice.saga_id, SagaStatus.COMPLETED)
    assert last["reason"] == Reason.DELIVERED
    assert last["explanation"].endswith("after 1 attempt.")


async def test_rate_limit_is_explained(flow: Flow) -> None:
    """A delivery that is due for long waits for the rate limit of its subscription, if it has one."""
    limited, other = await flow.subscribe(), await flow.subscribe()
    await subscriptions.update(flow.daemon, limited, {"max_per_second": 0.5})
    event_id = await flow.publish()
    await flow.route()
    assert set((await reasons(flow, event_id)).values()) == {Reason.FIRST_ATTEMPT_DUE}
    async with flow.superuser.transaction():
        await flow.superuser.execute("set local session_replication_role = replica")
        await flow.superuser.execute(
            "update webhookd.webhook_delivery_sagas set next_attempt_at = now() - interval '1 minute'"
        )
    assert await reasons(flow, event_id) == {limited: Reason.RATE_LIMITED, other: Reason.FIRST_ATTEMPT_DUE}


async def test_full_window_and_failing_endpoint_are_explained(flow: Flow) -> None:
    """A full window, and a failing endpoint with and without an active attempt."""
    subscription_id = await flow.subscribe()
    events = [await flow.publish() for _ in range(4)]
    await flow.route()

    async def current() -> list[str]:
        return [(await reasons(flow, event_id))[subscription_id] for event_id in events]

    await flow.start(window=LIMITS.subscription_window)
    due, waits, full = Reason.FIRST_ATTEMPT_DUE, Reason.WAITS_FOR_WORKER, Reason.WINDOW_FULL
    assert await current() == [waits, waits, full, full]
    await flow.superuser.execute(
        "insert into webhookd.endpoint_health (subscription_id, consecutive_failures, failing_since) "
        "values ($1, 10, now())",
        subscription_id,
    )
    failing = Reason.ENDPOINT_FAILING
    assert await current() == [waits, waits, failing, failing]
    [probe] = await flow.claim()
    assert sorted(await current()) == sorted([Reason.IN_FLIGHT, failing, failing, failing])
    await flow.report(probe, 200)
    [other] = await flow.claim()
    await flow.report(other, 200)
    # A reported attempt is in the window until its result is applied.
    assert (await current())[2:] == [failing, failing]
    await flow.apply()
    await flow.superuser.execute("update webhookd.endpoint_health set failing_since = now()")
    assert (await current())[2:] == [due, due]


@pytest.mark.parametrize("number", [reads.MAX_DELIVERIES_OF_EVENT, reads.MAX_DELIVERIES_OF_EVENT + 1])
async def test_event_shows_at_most_1000_deliveries(flow: Flow, number: int) -> None:
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
    assert len(found["deliveries"]) == reads.MAX_DELIVERIES_OF_EVENT
    assert found["more_deliveries"] is (number > reads.MAX_DELIVERIES_OF_EVENT)


async def test_attempt_shows_the_address_that_it_was_sent_to(flow: Flow) -> None:
    """Before a move the old one, after it the new one; also after the subscription is deleted."""
    new_address = "https://new.example/hook"
    subscription_id = await flow.subscribe()
    delivered = await flow.publish()
    await flow.route()
    await flow.attempt(200)
    moved = await flow.publish()
    await flow.route()
    await flow.attempt(500)
    await subscriptions.update(flow.daemon, subscription_id, {"callback_url": new_address})
    await flow.attempt(500)
    assert await sent_to(flow, moved) == [ADDRESS, ADDRESS]
    await flow.verify(subscription_id)
    assert await sent_to(flow, moved) == [ADDRESS, ADDRESS]
    assert await shown_address(flow, moved) == new_address, "of the next attempt"
    await flow.start()
    assert await sent_to(flow, moved) == [ADDRESS, ADDRESS, None]
    [lease] = await flow.claim()
    assert await sent_to(flow, moved) == [ADDRESS, ADDRESS, new_address]
    await flow.report(lease)
    await flow.apply()
    for is_deleted in (False, True):
        if is_deleted:
            await subscriptions.delete(flow.daemon, subscription_id)
        assert await sent_to(flow, moved) == [ADDRESS, ADDRESS, new_address]
        assert await shown_address(flow, moved) == new_address
        assert await sent_to(flow, delivered) == [ADDRESS]
        assert await shown_address(flow, delivered) == ADDRESS


async def test_request_that_was_in_flight_during_a_move_shows_the_old_address(flow: Flow) -> None:
    """The address counts from when the request began, and not from when it ended."""
    subscription_id = await flow.subscribe()
    event_id = await flow.publish()
    await flow.route()
    await flow.start()
    [lease] = await flow.claim()
    await flow.superuser.execute("select pg_sleep(0.2)")
    await subscriptions.update(flow.daemon, subscription_id, {"callback_url": "https://new.example/hook"})
    await flow.verify(subscription_id)
    report = attempts.Report(lease.job_id, lease.lease_token, 200, duration_ms=150)
    await attempts.report(flow.daemon, [report])
    await flow.apply()
    assert await sent_to(flow, event_id) == [ADDRESS]


async def sent_to(flow: Flow, event_id: int) -> list[str | None]:
    """Return the addresses of the attempts of an event's delivery."""
    saga_id = await flow.daemon.fetchval(
        "select id from webhookd.webhook_delivery_sagas where event_id = $1", event_id
    )
    found = await reads.delivery(flow.daemon, saga_id, LIMITS)
    return [attempt["callback_url"] for attempt in found["attempts"]]


async def shown_address(flow: Flow, event_id: int) -> str:
    """Return the address of an event's only delivery."""
    [row] = (await event_deliveries(flow, event_id)).values()
    address: str = row["callback_url"]
    return address
