"""Whether the machine was idle except for the run: what other processes used of its cores during a round.

Reads /proc: the time in which cores were not idle, minus the processor time of the run. Everything that a run
starts is below its process, and the time of an ended child moves to the parent that waited for it. So a child
that ends during a round is not taken for another process.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tests.bench.machine import running_processes, tree_ticks
from webhookd.devtools.processes import PROC, TICKS_PER_SECOND, ProcessStat

# A round is as long as its slowest side, so its mean would hide a disturbance of a single contender.
WINDOW_SECONDS = 5.0
# Measured on an idle machine with two cores: up to 0.02 cores for a round of the throughput measure and 0.03
# for its worst window. The rest is interrupts, other daemons, and the ticks of 10 ms in which processor time
# is counted. The limits leave room for that: a false mark would teach readers to ignore marks.
MEAN_LIMIT_CORES = 0.10
WINDOW_LIMIT_CORES = 0.25
# In a container, process 2 may be an ordinary one.
KERNEL_THREADS_ID, KERNEL_THREADS_NAME = 2, "kthreadd"


class Reading(NamedTuple):
    """The meters at one moment."""

    at: float  # seconds
    cores: int
    idle_seconds: float  # of all cores; waiting for a disk is idle
    own_seconds: float  # processor time of the run


@dataclass(frozen=True)
class OtherLoad:
    """Cores used by processes that do not belong to the run, or by other guests of the host."""

    mean_cores: float  # of the round
    peak_cores: float  # of the worst window

    @property
    def is_idle(self) -> bool:
        return self.mean_cores <= MEAN_LIMIT_CORES and self.peak_cores <= WINDOW_LIMIT_CORES

    def __str__(self) -> str:
        peak = f" ({self.peak_cores:.2f} for {WINDOW_SECONDS:.0f} s)"
        return f"{self.mean_cores:.2f} cores used by other processes{peak}"


def other_cores(first: Reading, last: Reading) -> float:
    """The average number of cores that other processes used between two readings."""
    seconds = last.at - first.at
    busy_seconds = last.cores * seconds - (last.idle_seconds - first.idle_seconds)
    # Below zero if a tick of our own was counted late.
    return max(0.0, (busy_seconds - (last.own_seconds - first.own_seconds)) / seconds)


def other_load(readings: Sequence[Reading]) -> OtherLoad:
    """The load between the first and the last of at least two readings."""
    mean = other_cores(readings[0], readings[-1])
    # The last window may be too short to judge: it extends the one before.
    ends = list(readings)
    while len(ends) > 2 and ends[-1].at - ends[-2].at < WINDOW_SECONDS / 2:
        del ends[-2]
    return OtherLoad(mean, max(other_cores(first, last) for first, last in pairwise(ends)))


def parse_idle(stat: str) -> tuple[int, float]:
    """The number of cores and their idle seconds in /proc/stat.

    Not its busy time: most kernels sample that once per tick, while they measure the idle time.
    """
    cores = [line.split() for line in stat.splitlines() if line.startswith("cpu")][1:]
    return len(cores), sum(int(core[4]) + int(core[5]) for core in cores) / TICKS_PER_SECOND


def own_ticks(own_id: int, processes: Mapping[int, ProcessStat]) -> int:
    """The ticks of the run: its own tree, and the kernel threads, which write to disk for PostgreSQL."""
    kernel = processes.get(KERNEL_THREADS_ID)
    is_kernel = kernel is not None and kernel.name == KERNEL_THREADS_NAME
    return tree_ticks(own_id, processes) + (tree_ticks(KERNEL_THREADS_ID, processes) if is_kernel else 0)


def read_now() -> Reading:
    """Read the meters."""
    # A child that ends while its parent has been read already is missing from one of the two counts. The
    # time of a run never decreases, so the larger one is right.
    first = own_ticks(os.getpid(), running_processes())
    at = time.monotonic()
    cores, idle_seconds = parse_idle((PROC / "stat").read_text())
    second = own_ticks(os.getpid(), running_processes())
    return Reading(at, cores, idle_seconds, max(first, second) / TICKS_PER_SECOND)


class Watch:
    """Reads the meters during a round: 10 ms in each window."""

    def __init__(self) -> None:
        self._readings = [read_now()]

    async def run(self) -> None:
        """Read until it is cancelled."""
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            self._readings.append(await asyncio.to_thread(read_now))

    def load(self) -> OtherLoad:
        """The load since the start."""
        self._readings.append(read_now())
        return other_load(self._readings)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[Watch]:
    """Watch during the block."""
    watch = Watch()
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
