"""How a worker's slots are shared."""

import pytest

from webhookd.deliveries.slots import MAX_PAYLOADS, MAX_PAYLOADS_PER_SUBSCRIPTION, Slots


def claim(slots: Slots, wanting: list[int], concurrency: int = 200, of_one: int = 64) -> int:
    """Take what a claim would get, going round those who want without end; how much that was."""
    room = slots.room(concurrency, of_one)
    left = {one: max(0, room.subscription_limit - room.in_use.get(one, 0)) for one in wanting}
    taken = 0
    while taken < room.wanted and any(left.values()):
        for one in wanting:
            if left[one] and taken < room.wanted:
                slots.take(one)
                left[one] -= 1
                taken += 1
    return taken


def take(slots: Slots, subscription_id: int, size: int) -> None:
    """One more, with its payload."""
    slots.take(subscription_id)
    slots.hold_payload(subscription_id, size)


def fill(slots: Slots, wanting: list[int], concurrency: int = 200, of_one: int = 64) -> None:
    """Claim until there is no room."""
    while claim(slots, wanting, concurrency, of_one):
        pass


def in_flight(slots: Slots) -> dict[int, int]:
    """By subscription."""
    return slots.room(1_000_000, 1_000_000).in_use


def test_one_subscription_gets_its_bound() -> None:
    """Alone it is held back by nothing else."""
    slots = Slots()
    fill(slots, [1])
    assert in_flight(slots) == {1: 64}
    assert slots.room(200, 64).leaves_out


@pytest.mark.parametrize("together", [True, False])
def test_endpoints_that_hang_leave_room_for_others(together: bool) -> None:
    """At once, or one after another: a newcomer gets something."""
    slots = Slots()
    hanging = list(range(12))
    for wanting in [hanging] if together else [[one] for one in hanging]:
        fill(slots, wanting)
    assert slots.in_flight >= 150
    assert claim(slots, [100]) > 0


def test_many_use_all() -> None:
    """Where nobody has much, nothing is kept from them."""
    slots = Slots()
    fill(slots, list(range(100)))
    assert slots.in_flight == 200


def test_a_single_slot_is_used() -> None:
    """Also by one after another."""
    slots = Slots()
    fill(slots, [1, 2], concurrency=1)
    assert in_flight(slots) == {1: 1}
    assert slots.room(1, 64).wanted == 0
    slots.release(1)
    fill(slots, [2], concurrency=1)
    assert in_flight(slots) == {2: 1}


def test_a_subscription_of_large_payloads_is_full_before_its_slots_are() -> None:
    """Others go on."""
    slots = Slots()
    take(slots, 1, MAX_PAYLOADS_PER_SUBSCRIPTION - 1)
    take(slots, 2, 10)
    assert slots.room(200, 64).in_use == {1: 1, 2: 1}
    take(slots, 1, 1)
    assert slots.room(200, 64).in_use == {1: 64, 2: 1}
    slots.release(1, 1)
    assert slots.room(200, 64).in_use == {1: 1, 2: 1}


def test_payloads_of_all_are_bounded_too() -> None:
    """However many slots are free."""
    slots = Slots()
    take(slots, 1, MAX_PAYLOADS)
    assert slots.room(1000, 64).wanted == 0
    slots.release(1, MAX_PAYLOADS)
    assert slots.room(1000, 64).wanted == 750
    assert in_flight(slots) == {}
