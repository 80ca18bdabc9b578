"""What a process and all that it started took of the machine: processor time and memory, from /proc."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes import PROC

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# The words after the name, as proc(5) counts them from 3 on. The last two are of children that ended and
# were waited for: a backend's time is not lost when it disconnects.
PARENT, USER, SYSTEM, CHILDREN_USER, CHILDREN_SYSTEM = (field - 3 for field in (4, 14, 15, 16, 17))


def parse_stat(text: str) -> tuple[int, int]:
    """The parent's id, and the ticks of a process with its ended children, of the text of a stat file."""
    # The name is in parentheses, and may contain any.
    fields = text.rpartition(")")[2].split()
    times = (USER, SYSTEM, CHILDREN_USER, CHILDREN_SYSTEM)
    return int(fields[PARENT]), sum(int(fields[field]) for field in times)


def tree_ticks(root: int, processes: Mapping[int, tuple[int, int]]) -> int:
    """The ticks of a process and of all below it, of what parse_stat said of each."""
    if root not in processes:
        return 0
    below = [process_id for process_id, (parent, _) in processes.items() if parent == root]
    return processes[root][1] + sum(tree_ticks(process_id, processes) for process_id in below)


def parse_memory(status: str, field: str) -> int:
    """Bytes of a field such as VmRSS, of the text of a status file."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise ValueError(f"there is no {field}")
    return int(found[1]) * 1024


def processor_seconds(root: int) -> float:
    """How long a process and all below it were at work until now."""
    processes: dict[int, tuple[int, int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                processes[int(folder.name)] = parse_stat((folder / "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
    return tree_ticks(root, processes) / TICKS_PER_SECOND


def peak_memory_bytes(process_id: int) -> int:
    """The most memory that a process ever had resident."""
    return parse_memory((Path(PROC) / str(process_id) / "status").read_text(), "VmHWM")


def memory_bytes(process_id: int) -> int:
    """The memory that a process has resident now."""
    return parse_memory((Path(PROC) / str(process_id) / "status").read_text(), "VmRSS")
