"""The other end of devtools.sink: the process that receives what `bench` sends, and what it tells."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import anyio
import msgspec

from webhookd.core.errors import WebhookdError
from webhookd.devtools.temporary_daemon import last_line

ANSWER_TIMEOUT_SECONDS = 30.0


class Ages(NamedTuple):
    """How long events took from publish to arrival, in milliseconds."""

    arrivals: int
    p50_ms: float | None
    p99_ms: float | None


class _Told(msgspec.Struct):
    url: str = ""
    count: int = 0
    taken: int = 0
    p50: float | None = None
    p99: float | None = None


class BenchReceiver:
    """Listens at the beginning of a `with`, and is gone at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log_path = folder / "receiver.log"
        self.url = ""

    async def __aenter__(self) -> Self:
        with self._log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "webhookd.devtools.sink", str(self._folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.url = (await self._answer()).url
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True), suppress(ProcessLookupError):
            self._process.kill()  # it keeps nothing
            await self._process.wait()

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def guard(self, process_id: int) -> None:
        """Have it end this process, should we be killed and not be able to."""
        await self._ask(f"guard {process_id}")

    async def count(self) -> int:
        """Of all arrivals."""
        return (await self._ask("count")).count

    async def take(self) -> Ages:
        """Of the arrivals since it was last asked."""
        told = await self._ask("take")
        return Ages(told.taken, told.p50, told.p99)

    async def _ask(self, question: str) -> _Told:
        if self._process.stdin is None:
            raise RuntimeError("the receiver has no stdin")
        with suppress(ConnectionError):  # its answer, which does not come, tells
            self._process.stdin.write(f"{question}\n".encode())
            await self._process.stdin.drain()
        return await self._answer()

    async def _answer(self) -> _Told:
        if self._process.stdout is None:
            raise RuntimeError("the receiver has no stdout")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            raise WebhookdError(f"the bench's receiver does not answer: {last_line(self._log_path)}")
        return msgspec.json.decode(line, type=_Told)
