"""The order in which subscriptions with due deliveries get their share of a batch. Pure, in memory.

The database decides on windows and due times; this is a hint. A subscription that is missing here is found by
the starter's next search. A subscription that has nothing due is removed after the next batch.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from webhookd.deliveries.sagas import Share, Started

if TYPE_CHECKING:
    from datetime import datetime


class Rotation:
    """Subscriptions in the order in which they are served, each with the marks of its last batch."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[datetime | None, int | None]] = {}
        self._with_full_window: set[int] = set()

    @property
    def window_is_full(self) -> bool:
        """Whether a subscription has more deliveries due than its window has room for."""
        return bool(self._with_full_window)

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, subscription_ids: Iterable[int]) -> None:
        """Append subscriptions; those already present keep their place."""
        for subscription_id in subscription_ids:
            self._marks.setdefault(subscription_id, (None, None))

    def next_shares(self, batch_size: int, window: int) -> list[Share]:
        """Give the next subscriptions equal shares of the batch, and move them to the end."""
        served = list(self._marks)[:batch_size]
        if not served:
            return []
        quota = min(window, -(-batch_size // len(served)))
        shares = []
        for subscription_id in served:
            marks = self._marks.pop(subscription_id)
            self._marks[subscription_id] = marks
            shares.append(Share(subscription_id, quota, *marks))
        return shares

    def update(self, started: Sequence[Started]) -> None:
        """Remove subscriptions that have nothing due or whose window is full; a result brings those back.

        A subscription whose whole share was dead-lettered stays: that frees no window, and more may be due.
        """
        for share in started:
            if share.drained or not (share.started or share.dead_lettered):
                self._marks.pop(share.subscription_id, None)
            elif share.subscription_id in self._marks:
                self._marks[share.subscription_id] = (share.next_saga_mark, share.next_job_mark)
            # A failing endpoint is probed with a single attempt at a time: that is not a full window.
            if share.drained or share.active <= 1:
                self._with_full_window.discard(share.subscription_id)
            else:
                self._with_full_window.add(share.subscription_id)

    def reset_marks(self) -> None:
        """Start from the beginning before a search: deliveries committed late lie before their mark."""
        self._marks = dict.fromkeys(self._marks, (None, None))
        self._with_full_window.clear()
