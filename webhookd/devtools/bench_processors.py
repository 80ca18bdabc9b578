"""How much of the processors each part of a bench took. Reads /proc; without one nothing is known."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

_PROC = Path("/proc")
# Words of /proc/<id>/stat after the name, which may hold blanks and parentheses itself.
_USER_TICKS, _SYSTEM_TICKS = 14 - 3, 15 - 3
_IDLE_FIELDS = (3, 4)  # of /proc/stat: idle, and waiting for a disk


class Sample(NamedTuple):
    """Seconds of processor time, so far; of PostgreSQL by process."""

    at: float
    daemon: float
    receiver: float
    postgresql: dict[int, float]
    machine: float


class Processors(msgspec.Struct, frozen=True):
    """Processors that were busy, on average. PostgreSQL's is None where it runs elsewhere."""

    daemon: float
    receiver: float
    postgresql: float | None
    machine: float
    there_are: int

    @property
    def others(self) -> float:
        """What is none of ours."""
        return max(0.0, self.machine - self.daemon - self.receiver - (self.postgresql or 0.0))


def sample(at: float, daemon_id: int, receiver_id: int, postgresql_ids: Iterable[int]) -> Sample | None:
    """What /proc says now."""
    daemon, receiver, machine = _seconds(daemon_id), _seconds(receiver_id), _machine_seconds()
    if daemon is None or receiver is None or machine is None:
        return None
    postgresql = {it: taken for it in postgresql_ids if (taken := _seconds(it, "postgres")) is not None}
    return Sample(at, daemon, receiver, postgresql, machine)


def between(first: Sample | None, last: Sample | None) -> Processors | None:
    """Averages; None if there is nothing to make them of."""
    if first is None or last is None or last.at <= first.at:
        return None
    seconds = last.at - first.at
    # One that is new has done all of it since.
    postgresql = sum(taken - first.postgresql.get(it, 0.0) for it, taken in last.postgresql.items())
    return Processors(
        daemon=(last.daemon - first.daemon) / seconds,
        receiver=(last.receiver - first.receiver) / seconds,
        postgresql=postgresql / seconds if last.postgresql else None,
        machine=(last.machine - first.machine) / seconds,
        there_are=count(),
    )


def count() -> int:
    """Processors that we may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(process_id: int) -> int | None:
    """What of a process is in memory."""
    try:
        pages = int((_PROC / str(process_id) / "statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _seconds(process_id: int, name: str | None = None) -> float | None:
    """None for one that is not here, or is another's: a server elsewhere has numbers too."""
    try:
        head, _, tail = (_PROC / str(process_id) / "stat").read_text().rpartition(")")
    except OSError:
        return None
    if name is not None and head.partition("(")[2] != name:
        return None
    fields = tail.split()
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


def _machine_seconds() -> float | None:
    try:
        ticks = [int(it) for it in (_PROC / "stat").read_text().partition("\n")[0].split()[1:9]]
    except OSError:
        return None
    return (sum(ticks) - sum(ticks[it] for it in _IDLE_FIELDS)) / os.sysconf("SC_CLK_TCK")
