"""What a worker may still begin."""

from webhookd.delivery.slots import MAX_HELD, MAX_HELD_BY_ONE, Slots


def test_requests_and_payloads_are_counted_by_subscription() -> None:
    """What was taken is busy until it is given back, and then forgotten."""
    slots = Slots()
    slots.take(1, 10)
    slots.take(1, 10)
    slots.take(2, 10)
    assert slots.busy(64) == {1: 2, 2: 1}
    assert (slots.in_flight, slots.free(5), slots.free(3), slots.free(2)) == (3, 2, 0, 0)
    slots.give_back(1, 10)
    slots.give_back(2, 10)
    assert slots.busy(64) == {1: 1}


def test_a_subscription_of_large_payloads_is_full_before_its_slots_are() -> None:
    """Others go on."""
    slots = Slots()
    slots.take(1, MAX_HELD_BY_ONE - 1)
    slots.take(2, 10)
    assert slots.busy(64) == {1: 1, 2: 1}
    slots.take(1, 1)
    assert slots.busy(64) == {1: 64, 2: 1}
    slots.give_back(1, 1)
    assert slots.busy(64) == {1: 1, 2: 1}


def test_payloads_of_all_are_bounded_too() -> None:
    """However many slots are free."""
    slots = Slots()
    slots.take(1, MAX_HELD)
    assert slots.free(1000) == 0
    slots.give_back(1, MAX_HELD)
    assert slots.free(1000) == 1000
