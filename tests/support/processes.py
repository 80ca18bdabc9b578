"""Process information from /proc: children, state, and processor time."""

import os
from pathlib import Path

PROC = Path("/proc")
# Fields after the process name, which is in parentheses; proc(5) counts them from 3.
STATE, PARENT, USER_TICKS, SYSTEM_TICKS = (field - 3 for field in (3, 4, 14, 15))


def children(parent_id: int) -> list[int]:
    """List the child processes."""
    found = [int(folder.name) for folder in PROC.iterdir() if folder.name.isdigit()]
    return [process_id for process_id in found if _fields(process_id)[PARENT] == str(parent_id)]


def is_gone(process_id: int) -> bool:
    """Whether the process has ended, even if it is still a zombie."""
    return _fields(process_id)[STATE] in ("", "Z", "X")


def is_stopped(process_id: int) -> bool:
    """Whether a signal has stopped the process, or it has ended."""
    return _fields(process_id)[STATE] == "T" or is_gone(process_id)


def standing_in(folder: Path) -> list[int]:
    """List the processes whose working folder is in this folder."""
    found = []
    for process in PROC.iterdir():
        if process.name.isdigit():
            try:
                working_folder = (process / "cwd").readlink()
            except OSError:
                continue  # it has ended, or belongs to another user
            if working_folder.is_relative_to(folder):
                found.append(int(process.name))
    return found


def processor_seconds(process_id: int) -> float:
    """User and system time of the process."""
    fields = _fields(process_id)
    return (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


def _fields(process_id: int) -> list[str]:
    """Read the fields of /proc/<id>/stat; empty strings if there is no such process."""
    try:
        text = (PROC / str(process_id) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return [""] * (SYSTEM_TICKS + 1)
    return text.rpartition(")")[2].split()
