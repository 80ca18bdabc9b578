"""When a stage calls the database next. Pure: the clock is an argument.

A call for one row costs the database nearly as much as a call for ten (1.0 ms against 1.6, measured for
apply). While a stage rests, more work collects: at 350 deliveries a second, a tenth of what this machine can
do, every stage called for two or three rows at a time and kept half of the machine busy.
"""

import math
from dataclasses import dataclass, field

# A call that handled at least this many rows is followed by no rest.
LARGE_BATCH = 100
# The longest rest after a small call, however long the database stalled.
MAX_REST_SECONDS = 0.05
# A search that may find nothing is followed by a rest this many times as long as the search.
SEARCH_REST_FACTOR = 10

NEVER = math.inf


def rest_seconds(handled: int, took_seconds: float) -> float:
    """Return how long to rest after a call: as long as it took, if it handled few rows but not none.

    The first call after a quiet time is never delayed. Do not rest while WakeUps.results_are_urgent. Where
    orchestration and delivery run in different instances, neither knows that, and both rest.
    """
    return min(took_seconds, MAX_REST_SECONDS) if 0 < handled < LARGE_BATCH else 0.0


@dataclass
class ClaimPacing:
    """Decides when the worker claims next, and when it claims from the first job again.

    A claim continues at the oldest job that was pending in the last claim. A job that was reset, released or
    committed late lies before that mark, so the worker restarts from the first job once per poll interval,
    and on request.
    """

    _restart_requested: bool = False
    _restarted_at: float = -math.inf
    _next_requested_restart_at: float = -math.inf
    # By whether only the reserved slots are free (see Slots).
    _next_claim_at: dict[bool, float] = field(default_factory=lambda: {False: -math.inf, True: -math.inf})

    def start(self) -> None:
        """Start a run: the first claim starts from the first job, also after a failure of the service."""
        self._restarted_at = self._next_requested_restart_at = -math.inf
        self._restart_requested = False

    def request_restart(self) -> None:
        """Restart soon: a job before the mark may be waiting."""
        self._restart_requested = True

    def restart_due(self, now: float, poll_interval_seconds: float) -> bool:
        """Return whether to claim from the first job; if so, count this as the restart."""
        is_due = now >= self._restarted_at + poll_interval_seconds or (
            self._restart_requested and now >= self._next_requested_restart_at
        )
        if is_due:
            self._restarted_at = now
            self._restart_requested = False
        return is_due

    def restarted(self, began: float, ended: float) -> None:
        """Limit how often other instances can cause a restart: it may walk past many jobs without a slot."""
        self._next_requested_restart_at = ended + SEARCH_REST_FACTOR * (ended - began)

    def next_claim_at(self, *, only_reserved: bool) -> float:
        return self._next_claim_at[only_reserved]

    def claimed(
        self, count: int, began: float, ended: float, *, largest_claim: int, poll_interval_seconds: float
    ) -> None:
        """Set the earliest time of the next claim after one that returned `count` jobs.

        A small claim costs as much as a large one, so rest as long as it took: the next may be larger. A
        claim for the reserved slots finds nothing unless some subscription has few requests, so after an
        empty one rest longer. No rest exceeds the poll interval, however long the database stalled.
        """
        took_seconds = min(ended - began, poll_interval_seconds)
        reserved_rest = min(SEARCH_REST_FACTOR * (ended - began), poll_interval_seconds)
        self.pause(
            ended + (took_seconds if 2 * count < largest_claim else 0),
            ended + (0 if count else reserved_rest),
        )

    def pause(self, until: float, reserved_until: float | None = None) -> None:
        """Make no claim before these times; an earlier, longer pause stays."""
        self._next_claim_at[False] = max(self._next_claim_at[False], until)
        self._next_claim_at[True] = max(
            self._next_claim_at[True], until if reserved_until is None else reserved_until
        )

    def wake_at(self, next_claim_at: float, poll_interval_seconds: float) -> float:
        """Return when to look again if no wake-up comes before."""
        times = [next_claim_at, self._restarted_at + poll_interval_seconds]
        if self._restart_requested:
            times.append(self._next_requested_restart_at)
        return min(times)
