"""When a stage rests, and when the worker claims next: tables of inputs and times."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from webhookd.deliveries.pacing import (
    LARGE_BATCH,
    MAX_REST_SECONDS,
    NEVER,
    SEARCH_REST_FACTOR,
    ClaimPacing,
    rest_seconds,
)

POLL = 1.0
LARGEST = 100


@pytest.mark.parametrize(
    ("handled", "took_seconds", "rest"),
    [
        (1, 0.004, 0.004),
        (LARGE_BATCH - 1, 0.004, 0.004),
        (LARGE_BATCH, 0.004, 0.0),  # a full batch: continue at once
        (0, 0.004, 0.0),  # nothing to do: the stage waits for a wake-up anyway
        (1, 10.0, MAX_REST_SECONDS),  # a stalled database does not make the stage sleep
    ],
)
def test_rest_follows_a_small_batch_and_is_bounded(handled: int, took_seconds: float, rest: float) -> None:
    """The rest is as long as the call, if it handled few rows but not none."""
    assert rest_seconds(handled, took_seconds) == pytest.approx(rest)


class Claim(NamedTuple):
    """A claim that begins at 10 s, and the earliest time of the next one."""

    attempts: int
    seconds: float
    next_at: float
    next_reserved_at: float


@pytest.mark.parametrize(
    "claim",
    [
        Claim(LARGEST, 0.01, 10.01, 10.01),  # full: at once
        Claim(LARGEST // 2, 0.01, 10.01, 10.01),  # half full is enough
        Claim(LARGEST // 2 - 1, 0.01, 10.02, 10.01),  # small: rest as long as it took
        Claim(0, 0.01, 10.02, 10.01 + SEARCH_REST_FACTOR * 0.01),  # empty: the reserved slots rest longer
        Claim(1, 30.0, 40.0 + POLL, 40.0),  # a stall: never longer than the poll interval
        Claim(0, 30.0, 40.0 + POLL, 40.0 + POLL),
    ],
    ids=["full", "half", "small", "empty", "stalled", "stalled and empty"],
)
def test_next_claim_depends_on_size_and_duration(claim: Claim) -> None:
    """A small claim costs as much as a large one, so the next waits for more attempts to collect."""
    pacing = ClaimPacing()
    ended = 10.0 + claim.seconds
    pacing.claimed(claim.attempts, 10.0, ended, largest_claim=LARGEST, poll_interval_seconds=POLL)
    assert pacing.next_claim_at(only_reserved=False) == pytest.approx(claim.next_at)
    assert pacing.next_claim_at(only_reserved=True) == pytest.approx(claim.next_reserved_at)


def test_longer_pause_stays() -> None:
    """A claim whose leases were useless pauses the worker; its end does not shorten the pause."""
    pacing = ClaimPacing()
    pacing.pause(11.0)
    pacing.claimed(LARGEST, 10.0, 10.01, largest_claim=LARGEST, poll_interval_seconds=POLL)
    assert pacing.next_claim_at(only_reserved=False) == 11.0
    assert pacing.next_claim_at(only_reserved=True) == 11.0


def restarted_at_ten() -> ClaimPacing:
    """Return the pacing of a worker that restarted at 10 s, which took 0.02 s."""
    pacing = ClaimPacing()
    assert pacing.restart_due(10.0, POLL), "the first claim starts from the first job"
    pacing.restarted(10.0, 10.02)
    return pacing


def requested(pacing: ClaimPacing) -> ClaimPacing:
    """Ask for a restart."""
    pacing.request_restart()
    return pacing


@pytest.mark.parametrize(
    ("make", "now", "due"),
    [
        (restarted_at_ten, 10.99, False),
        (restarted_at_ten, 11.0, True),  # once per poll interval
        (lambda: requested(restarted_at_ten()), 10.1, False),  # not before ten times what the last one took
        (lambda: requested(restarted_at_ten()), 10.22, True),
    ],
    ids=["too early", "poll interval", "request too early", "request"],
)
def test_restart_is_due_by_poll_interval_or_request(
    make: Callable[[], ClaimPacing], now: float, *, due: bool
) -> None:
    """Other instances cannot make the worker restart all the time."""
    pacing = make()
    assert pacing.restart_due(now, POLL) is due
    if due:
        assert not pacing.restart_due(now, POLL), "a restart clears the request"


def test_service_that_starts_again_restarts_from_the_first_job() -> None:
    """A failure may have lost what lies before the mark; the pause after a claim stays."""
    pacing = restarted_at_ten()
    pacing.pause(10.5)
    pacing.start()
    assert pacing.restart_due(10.1, POLL)
    assert pacing.next_claim_at(only_reserved=False) == 10.5


@pytest.mark.parametrize(
    ("make", "next_claim_at", "wake_at"),
    [
        (restarted_at_ten, NEVER, 11.0),
        (restarted_at_ten, 10.5, 10.5),
        (lambda: requested(restarted_at_ten()), NEVER, 10.22),
        (lambda: requested(restarted_at_ten()), 10.1, 10.1),
    ],
    ids=["poll", "claim", "request", "claim before request"],
)
def test_worker_wakes_for_whatever_is_due_first(
    make: Callable[[], ClaimPacing], next_claim_at: float, wake_at: float
) -> None:
    """The next claim, the poll interval, or a requested restart."""
    assert make().wake_at(next_claim_at, POLL) == pytest.approx(wake_at)
