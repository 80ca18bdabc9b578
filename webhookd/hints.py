"""What one stage of a process knows and another would like to: spares the database a search, decides nothing.

Bounded; what does not fit is found by looking.
"""

from collections import deque
from collections.abc import Iterable

MAX_REPORTED = 20_000
MAX_DUE = 100_000


class Hints:
    """Filled by routing, delivery and what applies results; used up by orchestration."""

    def __init__(self) -> None:
        self._reported: deque[int] = deque(maxlen=MAX_REPORTED)
        self._due: dict[int, None] = {}
        # More is due of somebody than has room in its window; and the worker here has slots for it.
        self.is_crowded = False
        self.is_hungry = False

    @property
    def is_short_of_room(self) -> bool:
        """Whether deliveries wait for nothing but the end of others: then nobody on that way may rest."""
        return self.is_crowded and self.is_hungry

    def were_reported(self, job_ids: Iterable[int]) -> None:
        """These jobs have results to apply."""
        self._reported.extend(job_ids)

    @property
    def reported(self) -> bool:
        return bool(self._reported)

    def take_reported(self, most: int) -> list[int]:
        """Up to so many of them, oldest first."""
        return [self._reported.popleft() for _ in range(min(most, len(self._reported)))]

    def have_due(self, subscription_ids: Iterable[int]) -> None:
        """These subscriptions have new sagas, due now, or room for what was due."""
        for subscription_id in subscription_ids:
            if len(self._due) < MAX_DUE:
                self._due[subscription_id] = None

    def take_due(self) -> list[int]:
        """All of them."""
        due, self._due = list(self._due), {}
        return due
