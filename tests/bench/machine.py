"""The environment of a run: the machine, the versions of all programs, and the processor time they use."""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.bench.node import GRAPHILE, graphile_command
from tests.bench.receivers import nginx_program
from webhookd import __version__
from webhookd.devtools.processes import PROC, TICKS_PER_SECOND, ProcessStat, parse_stat

PACKAGES = ("aiohttp", "asyncpg", "uvloop", "pgqueuer", "procrastinate", "psycopg")
PROGRAM_TIMEOUT_SECONDS = 20


def facts(postgres_version: str, receiver: str) -> dict[str, str | int]:
    """What a reader needs to know to judge the numbers."""
    found: dict[str, str | int] = {
        "cores": os.cpu_count() or 0,
        "processor": processor_model(_read(Path("/proc/cpuinfo"))) or platform.processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{system_name(_read(Path('/etc/os-release')))}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgresql": postgres_version,
        "receiver": receiver,
        "webhookd": __version__,
    }
    if program := nginx_program():
        found["nginx"] = _output_of([program, "-v"]).rpartition("/")[2]
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if command := graphile_command():
        found["node"] = _output_of([command[0], "--version"])
        for package in ("graphile-worker", "undici"):
            manifest = GRAPHILE / "node_modules" / package / "package.json"
            found[package] = json.loads(manifest.read_text())["version"]
    return found


def caption(found: dict[str, str | int]) -> str:
    """The facts as a sentence for the caption of the table."""
    versions = [
        f"{name} {found[name]}"
        for name in ("nginx", *PACKAGES, "graphile-worker", "undici", "node")
        if name in found
    ]
    return (
        f"{found['cores']} cores ({found['processor']}) shared by all parts, "
        f"{found['memory_gib']} GiB of memory, {found['system']}; receiver: {found['receiver']}; "
        f"PostgreSQL {found['postgresql']}, durable; Python {found['python']}; "
        f"{', '.join(versions)}."
    )


def processor_model(cpuinfo: str) -> str:
    """The first model name in /proc/cpuinfo; empty if there is none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def system_name(os_release: str) -> str:
    """The name of the system in /etc/os-release."""
    for line in os_release.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    return "an unknown system"


def tree_processor_seconds(root_id: int) -> float:
    """Processor time of a process, its children, and the ended children of all of them."""
    return tree_ticks(root_id, running_processes()) / TICKS_PER_SECOND


def running_processes() -> dict[int, ProcessStat]:
    """All processes by their ids, including ended ones that their parents have not waited for yet."""
    processes: dict[int, ProcessStat] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                processes[int(folder.name)] = parse_stat((folder / "stat").read_text())
    return processes


def tree_ticks(root_id: int, processes: Mapping[int, ProcessStat]) -> int:
    """The ticks of a process and of everything below it; 0 if it does not exist."""
    if root_id not in processes:
        return 0
    root = processes[root_id]
    below = [process_id for process_id, stat in processes.items() if stat.parent_id == root_id]
    return root.own_ticks + root.ended_children_ticks + sum(tree_ticks(it, processes) for it in below)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _output_of(command: list[str]) -> str:
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PROGRAM_TIMEOUT_SECONDS
    )
    return (answer.stdout or answer.stderr).strip()
