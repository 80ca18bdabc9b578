"""What is under way, in all and for each subscription: requests, and the payloads they hold. Pure."""

from collections import Counter
from typing import NamedTuple

# The last quarter of the slots is for those who have few: of it one subscription gets a sixteenth of its own
# bound. Without it four endpoints that hang, at 64 of 200 slots each, held up all others for a whole timeout;
# with it others' events were seen to arrive in 0.3 s beside twelve of them.
KEPT_PART = 4
FEW_PART = 16

# Payloads in memory, in characters: 400 slots of 8 MiB each would be too much.
MAX_HELD = 128 * 1024 * 1024
# Of one subscription, so that large events to an endpoint that hangs do not take the place of all others. Two
# claims may load 32 MiB each before this is looked at again.
MAX_HELD_BY_ONE = 32 * 1024 * 1024


class Room(NamedTuple):
    """What the next claim may take: in all, and of one subscription, less what some have in use."""

    wanted: int
    limit_of_one: int
    busy: dict[int, int]
    is_last: bool  # of the slots that are kept for those who have few

    @property
    def leaves_out(self) -> bool:
        """Whether somebody gets nothing, who may get something when a slot is given back."""
        return not self.wanted or any(used >= self.limit_of_one for used in self.busy.values())


class Slots:
    """A request holds a slot from its claim to its end, and its payload from when it was loaded."""

    def __init__(self) -> None:
        self._busy: Counter[int] = Counter()
        self._held: Counter[int] = Counter()
        self._held_by_all = 0
        self.in_flight = 0

    def room(self, concurrency: int, subscription_concurrency: int) -> Room:
        """What may be begun now. A subscription that holds too much counts as full."""
        free = 0 if self._held_by_all >= MAX_HELD else max(0, concurrency - self.in_flight)
        kept = concurrency // KEPT_PART
        is_last = free <= kept
        if is_last:
            wanted, limit_of_one = free, max(1, subscription_concurrency // FEW_PART)
        else:
            wanted, limit_of_one = free - kept, subscription_concurrency
        busy = {
            subscription_id: count if self._held[subscription_id] < MAX_HELD_BY_ONE else limit_of_one
            for subscription_id, count in self._busy.items()
        }
        return Room(wanted, limit_of_one, busy, is_last)

    def take(self, subscription_id: int) -> None:
        """One more of this subscription."""
        self._busy[subscription_id] += 1
        self.in_flight += 1

    def hold(self, subscription_id: int, size: int) -> None:
        """Its payload has come."""
        self._held[subscription_id] += size
        self._held_by_all += size

    def give_back(self, subscription_id: int, size: int = 0) -> None:
        """One less; a subscription without any is forgotten, so that memory follows what is under way."""
        self._busy[subscription_id] -= 1
        self._held[subscription_id] -= size
        self._held_by_all -= size
        self.in_flight -= 1
        if not self._busy[subscription_id]:
            del self._busy[subscription_id]
            self._held.pop(subscription_id, None)
