"""What is under way, in all and for each subscription: requests, and the payloads they hold. Pure."""

from collections import Counter

# Payloads in memory, in characters. Beside the slots' own bound, for 200 slots of 8 MiB each are too much.
MAX_HELD = 256 * 1024 * 1024
# Of one subscription, so that large events to an endpoint that hangs do not take the place of all others. A
# claim loads up to 32 MiB before this is looked at again.
MAX_HELD_BY_ONE = 32 * 1024 * 1024


class Slots:
    """A request holds a slot, and its payload, from its claim to its end."""

    def __init__(self) -> None:
        self._busy: Counter[int] = Counter()
        self._held: Counter[int] = Counter()
        self.in_flight = 0
        self._held_by_all = 0

    def free(self, concurrency: int) -> int:
        """How many more may be begun."""
        return 0 if self._held_by_all >= MAX_HELD else max(0, concurrency - self.in_flight)

    def busy(self, subscription_concurrency: int) -> dict[int, int]:
        """By subscription: what a claim must leave alone. One that holds too much counts as full."""
        return {
            subscription_id: count
            if self._held[subscription_id] < MAX_HELD_BY_ONE
            else subscription_concurrency
            for subscription_id, count in self._busy.items()
        }

    def take(self, subscription_id: int, size: int) -> None:
        """One more of this subscription."""
        self._busy[subscription_id] += 1
        self._held[subscription_id] += size
        self.in_flight += 1
        self._held_by_all += size

    def give_back(self, subscription_id: int, size: int) -> None:
        """One less; a subscription without any is forgotten, so that memory follows what is under way."""
        self._busy[subscription_id] -= 1
        self._held[subscription_id] -= size
        self.in_flight -= 1
        self._held_by_all -= size
        if not self._busy[subscription_id]:
            del self._busy[subscription_id], self._held[subscription_id]
