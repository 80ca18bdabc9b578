"""Where a run took place: the machine, its system, and the version of everything that took part."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

from tests.bench.node import GRAPHILE, graphile_command
from tests.bench.receivers import nginx_program
from webhookd import __version__

PACKAGES = ("aiohttp", "asyncpg", "uvloop", "pgqueuer", "procrastinate", "psycopg")
PROGRAM_TIMEOUT_SECONDS = 20


def facts(postgres_version: str, receiver: str) -> dict[str, str | int]:
    """What somebody needs to judge the numbers."""
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
        found["nginx"] = _said([program, "-v"]).rpartition("/")[2]
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if command := graphile_command():
        found["node"] = _said([command[0], "--version"])
        for package in ("graphile-worker", "undici"):
            manifest = GRAPHILE / "node_modules" / package / "package.json"
            found[package] = json.loads(manifest.read_text())["version"]
    return found


def caption(found: dict[str, str | int]) -> str:
    """The facts in a sentence, for under the table."""
    versions = [
        f"{name} {found[name]}"
        for name in ("nginx", *PACKAGES, "graphile-worker", "undici", "node")
        if name in found
    ]
    return (
        f"{found['cores']} cores ({found['processor']}) for everything, {found['memory_gib']} GiB of memory, "
        f"{found['system']}; PostgreSQL {found['postgresql']}, durable; Python {found['python']}; "
        f"{', '.join(versions)}."
    )


def processor_model(cpuinfo: str) -> str:
    """The first model that /proc/cpuinfo names; empty where it names none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def system_name(os_release: str) -> str:
    """What the system calls itself in /etc/os-release."""
    for line in os_release.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip('"')
    return "an unnamed system"


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _said(command: list[str]) -> str:
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PROGRAM_TIMEOUT_SECONDS
    )
    return (answer.stdout or answer.stderr).strip()
