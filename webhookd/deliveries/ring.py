"""Whose turn it is: subscriptions that have something due, taken in a circle. Pure, in memory, a hint.

The database is the judge of windows and due times. Who is missing here is found by the next look; who is here
in vain is dropped by the next tick.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from webhookd.deliveries.sagas import Share, Started

if TYPE_CHECKING:
    from datetime import datetime


class Ring:
    """Subscriptions in the order in which they are served, with the marks of their last tick."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[datetime | None, int | None]] = {}
        self._crowded: set[int] = set()

    @property
    def is_crowded(self) -> bool:
        """Whether somebody has more due than its window has room for."""
        return bool(self._crowded)

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, subscription_ids: Iterable[int]) -> None:
        """Take in who has something due; who is in already keeps its place."""
        for subscription_id in subscription_ids:
            self._marks.setdefault(subscription_id, (None, None))

    def next_shares(self, batch_size: int, window: int) -> list[Share]:
        """The next in turn, each with an equal part of the batch; they go to the end of the circle."""
        taken = list(self._marks)[:batch_size]
        if not taken:
            return []
        quota = min(window, -(-batch_size // len(taken)))
        shares = []
        for subscription_id in taken:
            marks = self._marks.pop(subscription_id)
            self._marks[subscription_id] = marks
            shares.append(Share(subscription_id, quota, *marks))
        return shares

    def learn(self, started: Sequence[Started]) -> None:
        """Drop who had nothing more, or has its window full: a result that frees it brings it back.

        Not who had its share dead-lettered: that frees no window, and more may be behind it.
        """
        for one in started:
            if one.drained or not (one.started or one.dead_lettered):
                self._marks.pop(one.subscription_id, None)
            elif one.subscription_id in self._marks:
                self._marks[one.subscription_id] = (one.next_saga_mark, one.next_job_mark)
            # One job at a time is how a failing endpoint is probed: that has to wait.
            if one.drained or one.active <= 1:
                self._crowded.discard(one.subscription_id)
            else:
                self._crowded.add(one.subscription_id)

    def forget(self) -> None:
        """Before a look at everything: what committed late lies behind a mark; who is crowded, it tells."""
        self._marks = dict.fromkeys(self._marks, (None, None))
        self._crowded.clear()
