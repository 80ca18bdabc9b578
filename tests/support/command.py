"""Runs `webhookd` commands as processes; returns exit code and output lines."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DSN = "WEBHOOKD_DATABASE_DSN"
# Enough for a busy machine; only reached if a process hangs.
PROCESS_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: list[str]
    err: list[str]


class Command:
    """Runs commands in an empty folder with a minimal environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def start(self, *arguments: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "webhookd",
            *arguments,
            cwd=self.folder,
            # Not the environment of the tests; only the path that Python needs to find this checkout.
            env={"PYTHONPATH": str(ROOT), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, dsn: str | None = None, **environment: str) -> Ended:
        """Run a command until it exits."""
        if dsn is not None:
            environment[DSN] = dsn
        return await self.end(await self.start(*arguments, environment=environment))

    async def refused(self, code: int, *arguments: str, dsn: str | None = None, **environment: str) -> str:
        """Run a command that must fail with this code, and return its one-line error."""
        ended = await self.run(*arguments, dsn=dsn, **environment)
        assert not any("Traceback" in line for line in ended.err), ended.err
        assert ended.code == code, ended
        assert len(ended.err) == 1, ended.err
        return ended.err[0]

    async def end(self, process: asyncio.subprocess.Process) -> Ended:
        """Wait until a command exits."""
        try:
            out, err = await asyncio.wait_for(process.communicate(), PROCESS_TIMEOUT_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode().splitlines(), err.decode().splitlines())
