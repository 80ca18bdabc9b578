"""The command line as a process: its exit code and its lines."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DSN = "WEBHOOKD_DATABASE_DSN"
# As much as a process may take on a busy machine; nothing waits for it to pass.
PROCESS_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: list[str]
    err: list[str]


class Command:
    """The command line, in an empty folder and an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def start(self, *arguments: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Start a command."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "webhookd",
            *arguments,
            cwd=self.folder,
            # Nothing of the tester's own; only what lets Python find this checkout.
            env={"PYTHONPATH": str(ROOT), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, *arguments: str, dsn: str | None = None, **environment: str) -> Ended:
        """Run a command to its end."""
        if dsn is not None:
            environment[DSN] = dsn
        return await self.end(await self.start(*arguments, environment=environment))

    async def refused(self, code: int, *arguments: str, dsn: str | None = None, **environment: str) -> str:
        """Run a command that must fail with this code; the one line it says about it."""
        ended = await self.run(*arguments, dsn=dsn, **environment)
        assert not any("Traceback" in line for line in ended.err), ended.err
        assert ended.code == code, ended
        assert len(ended.err) == 1, ended.err
        return ended.err[0]

    async def end(self, process: asyncio.subprocess.Process) -> Ended:
        """Wait for a command's end."""
        try:
            out, err = await asyncio.wait_for(process.communicate(), PROCESS_TIMEOUT_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode().splitlines(), err.decode().splitlines())
