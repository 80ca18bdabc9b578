"""Tests of the arithmetic that finds the load of other processes."""

import os
import subprocess
import sys

import pytest

from tests.bench.idleness import OtherLoad, Reading, other_cores, other_load, own_ticks, parse_idle, read_now
from webhookd.devtools.processes import TICKS_PER_SECOND, ProcessStat


def test_other_load_is_busy_time_that_is_not_our_own() -> None:
    """Of 20 core-seconds 6 were idle and the run used 10.5, so others used 3.5 in ten seconds."""
    first, last = Reading(100, 2, 1000, 50), Reading(110, 2, 1006, 60.5)
    assert other_cores(first, last) == pytest.approx(0.35)


def test_other_load_is_never_negative() -> None:
    """Ticks of the run may be counted later than the idle time of the cores."""
    assert other_cores(Reading(0, 2, 0, 0), Reading(10, 2, 19, 1.2)) == 0


def test_short_disturbance_shows_in_its_window() -> None:
    """A core for five of fifty seconds: the mean is at the limit, the window is far above."""
    own = [Reading(at, 2, 2 * at - max(0, min(at - 20, 5)), 0) for at in range(0, 55, 5)]
    load = other_load(own)
    assert (load.mean_cores, load.peak_cores) == pytest.approx((0.1, 1.0))
    assert not load.is_idle


def test_short_last_window_extends_the_one_before() -> None:
    """20 ms of other work in the last 50 ms of a round are not a load of 0.4 cores."""
    readings = [Reading(0, 2, 0, 0), Reading(5, 2, 10, 0), Reading(5.05, 2, 10.08, 0)]
    assert other_load(readings).peak_cores == pytest.approx(0.02 / 5.05)
    assert other_load([readings[0], readings[-1]]) == other_load(readings)


@pytest.mark.parametrize(
    ("mean", "peak", "is_idle"), [(0.1, 0.25, True), (0.11, 0.11, False), (0.05, 0.26, False)]
)
def test_limits(mean: float, peak: float, *, is_idle: bool) -> None:
    """Both must hold, for the round and for its worst window."""
    assert OtherLoad(mean, peak).is_idle is is_idle


def test_mark_says_how_much() -> None:
    """The text after `not idle`."""
    assert str(OtherLoad(0.35, 0.5)) == "0.35 cores used by other processes (0.50 for 5 s)"


def test_idle_time_of_all_cores() -> None:
    """Idle and waiting for a disk; the first line is the sum of the cores and not counted again."""
    stat = (
        "cpu  9 0 9 400 60 0 0 0 0 0\ncpu0 1 0 1 100 20 0 0 0 0 0\ncpu1 8 0 8 300 40 0 0 0 0 0\nintr 7 1 2\n"
    )
    assert parse_idle(stat) == (2, 460 / TICKS_PER_SECOND)


def test_kernel_threads_belong_to_the_run() -> None:
    """They write to disk for PostgreSQL. In a container, process 2 may be any program."""
    processes = {
        2: ProcessStat("kthreadd", 0, 1, 0),
        3: ProcessStat("kworker", 2, 20, 0),
        10: ProcessStat("bench", 1, 300, 4000),
        11: ProcessStat("another", 1, 50_000, 0),
    }
    assert own_ticks(10, processes) == 4321
    assert own_ticks(10, processes | {2: ProcessStat("cron", 1, 1, 0)}) == 4300


def test_time_of_an_ended_child_is_our_own() -> None:
    """Its time moves to this process when it is waited for: it is not taken for another process."""
    work = "import time\nwhile time.process_time() < 0.2: pass"
    first = read_now()
    subprocess.run([sys.executable, "-c", work], check=True)
    last = read_now()
    assert last.own_seconds - first.own_seconds >= 0.2 - 2 / TICKS_PER_SECOND
    assert last.cores == os.cpu_count()
    assert last.at > first.at
