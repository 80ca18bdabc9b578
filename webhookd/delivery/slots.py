"""How much is under way, in all and for each subscription. Pure counting."""

from collections import Counter


class Slots:
    """A request holds a slot from its claim to the end of its report."""

    def __init__(self) -> None:
        self._busy: Counter[int] = Counter()

    @property
    def busy(self) -> dict[int, int]:
        """By subscription: what a claim must leave alone."""
        return dict(self._busy)

    @property
    def in_flight(self) -> int:
        return self._busy.total()

    def take(self, subscription_id: int) -> None:
        """One more of this subscription."""
        self._busy[subscription_id] += 1

    def give_back(self, subscription_id: int) -> None:
        """One less; a subscription without any is forgotten, so that memory follows what is under way."""
        self._busy[subscription_id] -= 1
        if self._busy[subscription_id] <= 0:
            del self._busy[subscription_id]
