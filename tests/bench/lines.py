"""The other end of a Child: reads questions from standard input, writes answers, until the input ends."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any


def options() -> Any:
    """What the parent gave as last argument."""
    return json.loads(sys.argv[-1])


async def answer_lines(answer: Callable[[Any], Awaitable[object]]) -> None:
    """Say that we are ready; then answer one question after the other."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say("ready")
    while line := await reader.readline():
        say(await answer(json.loads(line)))


def say(value: object) -> None:
    """One line, at once."""
    print(json.dumps(value), flush=True)
