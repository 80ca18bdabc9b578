"""What /proc knows of a process: its children, whether it still is, and the time it took of a processor."""

import os
from pathlib import Path

PROC = Path("/proc")
# The words after the name, in parentheses and last to contain any, as proc(5) counts them from 3 on.
STATE, PARENT, USER_TICKS, SYSTEM_TICKS = (field - 3 for field in (3, 4, 14, 15))


def children(parent_id: int) -> list[int]:
    """The processes that this one started, or took over."""
    found = [int(folder.name) for folder in PROC.iterdir() if folder.name.isdigit()]
    return [process_id for process_id in found if _fields(process_id)[PARENT] == str(parent_id)]


def is_gone(process_id: int) -> bool:
    """Whether it has ended, be it that nobody has taken note."""
    return _fields(process_id)[STATE] in ("", "Z", "X")


def is_stopped(process_id: int) -> bool:
    """Whether a signal has stopped it, or it has ended."""
    return _fields(process_id)[STATE] == "T" or is_gone(process_id)


def standing_in(folder: Path) -> list[int]:
    """The processes whose working folder is this one, or inside of it."""
    found = []
    for process in PROC.iterdir():
        if process.name.isdigit():
            try:
                place = (process / "cwd").readlink()
            except OSError:
                continue  # it has ended, or is another user's
            if place.is_relative_to(folder):
                found.append(int(process.name))
    return found


def processor_seconds(process_id: int) -> float:
    """How long it has been at work, for itself and in the kernel."""
    fields = _fields(process_id)
    return (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


def _fields(process_id: int) -> list[str]:
    """The fields of its stat file; empty ones if there is no such process."""
    try:
        text = (PROC / str(process_id) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return [""] * (SYSTEM_TICKS + 1)
    return text.rpartition(")")[2].split()
