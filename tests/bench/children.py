"""A child process that is asked by lines, a JSON value in and one out. It ends with its block."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Nothing that a child is asked takes longer, unless it hangs.
ANSWER_TIMEOUT_SECONDS = 300
END_TIMEOUT_SECONDS = 10


class ChildFailed(Exception):
    """A child ended, or did not answer; the message is one line."""


class Child:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def ask(self, question: object, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """Send a line, and return what the answer's line says."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            raise ChildFailed(self._last_words()) from error
        return await self.hear(timeout_seconds)

    async def hear(self, timeout_seconds: float = ANSWER_TIMEOUT_SECONDS) -> Any:
        """Return what the next line says."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise ChildFailed(f"no answer within {timeout_seconds:.0f} s; {self._last_words()}") from error
        if not line:
            raise ChildFailed(self._last_words())
        return json.loads(line)

    async def end(self) -> None:
        """Let it end by itself, for its input has ended; or else by force."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it now."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return f"it ended: {lines[-1]}" if lines else "it ended without a word"


@contextlib.asynccontextmanager
async def child(command: Sequence[str], folder: Path, options: object = None) -> AsyncIterator[Child]:
    """Start a program with its options as JSON for last argument; its first line says that it is ready."""
    log_path = folder / f"{Path(command[-1]).name}.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            # Ctrl-C is the parent's to hear, which ends its children in order.
            start_new_session=True,
        )
    started = Child(process, log_path)
    try:
        await started.hear(timeout_seconds=60)
        yield started
        await started.end()
    except BaseException:
        started.kill()
        await process.wait()
        raise


def python(module: str) -> list[str]:
    """The command of a module of ours, in this environment."""
    return [sys.executable, "-m", module]
