"""How the slots of a worker are shared between subscriptions."""

import pytest

from webhookd.deliveries.slots import MAX_PAYLOADS, MAX_PAYLOADS_PER_SUBSCRIPTION, Slots


def claim(
    slots: Slots, waiting: list[int], concurrency: int = 200, subscription_concurrency: int = 64
) -> int:
    """Take what a claim would get, with these subscriptions in turn, and return the number of attempts."""
    room = slots.room(concurrency, subscription_concurrency)
    left = {
        subscription_id: max(0, room.subscription_limit - room.in_use.get(subscription_id, 0))
        for subscription_id in waiting
    }
    taken = 0
    while taken < room.wanted and any(left.values()):
        for subscription_id in waiting:
            if left[subscription_id] and taken < room.wanted:
                slots.take(subscription_id)
                left[subscription_id] -= 1
                taken += 1
    return taken


def take(slots: Slots, subscription_id: int, size: int) -> None:
    """Take a slot, with a payload of this size."""
    slots.take(subscription_id)
    slots.hold_payload(subscription_id, size)


def fill(
    slots: Slots, waiting: list[int], concurrency: int = 200, subscription_concurrency: int = 64
) -> None:
    """Claim until no slot is left."""
    while claim(slots, waiting, concurrency, subscription_concurrency):
        pass


def in_flight(slots: Slots) -> dict[int, int]:
    """Return the slots in use by subscription."""
    return slots.room(1_000_000, 1_000_000).in_use


def test_single_subscription_gets_its_limit() -> None:
    """No other limit applies to it."""
    slots = Slots()
    fill(slots, [1])
    assert in_flight(slots) == {1: 64}
    assert slots.room(200, 64).leaves_out


@pytest.mark.parametrize("together", [True, False])
def test_hanging_endpoints_leave_slots_for_other_subscriptions(together: bool) -> None:
    """Whether they fill the slots together or in turn, a new subscription gets some."""
    slots = Slots()
    hanging = list(range(12))
    for waiting in [hanging] if together else [[subscription_id] for subscription_id in hanging]:
        fill(slots, waiting)
    assert slots.in_flight >= 150
    assert claim(slots, [100]) > 0


def test_many_subscriptions_use_all_slots() -> None:
    """No slot is reserved if each subscription uses few."""
    slots = Slots()
    fill(slots, list(range(100)))
    assert slots.in_flight == 200


def test_only_slot_is_used() -> None:
    """Also by different subscriptions in turn."""
    slots = Slots()
    fill(slots, [1, 2], concurrency=1)
    assert in_flight(slots) == {1: 1}
    assert slots.room(1, 64).wanted == 0
    slots.release(1)
    fill(slots, [2], concurrency=1)
    assert in_flight(slots) == {2: 1}


def test_large_payloads_fill_a_subscription_before_its_slots() -> None:
    """Other subscriptions are not affected."""
    slots = Slots()
    take(slots, 1, MAX_PAYLOADS_PER_SUBSCRIPTION - 1)
    take(slots, 2, 10)
    assert slots.room(200, 64).in_use == {1: 1, 2: 1}
    take(slots, 1, 1)
    assert slots.room(200, 64).in_use == {1: 64, 2: 1}
    slots.release(1, 1)
    assert slots.room(200, 64).in_use == {1: 1, 2: 1}


def test_total_size_of_payloads_is_limited() -> None:
    """Even if slots are free."""
    slots = Slots()
    take(slots, 1, MAX_PAYLOADS)
    assert slots.room(1000, 64).wanted == 0
    slots.release(1, MAX_PAYLOADS)
    assert slots.room(1000, 64).wanted == 750
    assert in_flight(slots) == {}
