"""A receiver that is faster than any sender here, as a process of its own: what `bench` sends to.

It answers 200 to everything, and keeps for each arrival how old its event was: a body begins with
`{"at":<nanoseconds of the monotonic clock>,`. On stdout it writes its URL, then an answer for each line of
stdin; it ends with stdin, and so with whoever started it, and ends the process that it was told to guard.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import uvloop

from webhookd.local_certificate import LocalCertificate

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
# Every place of a daemon may connect at the same moment.
BACKLOG = 1024
BODY_START = b'{"at":'
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_NANOSECONDS_PER_MILLISECOND = 1e6


class Arrivals:
    """How many there were in all, and the ages of those since it was last asked."""

    def __init__(self) -> None:
        self.count = 0
        self.guarded_id: int | None = None
        self._ages_ms = array("d")

    def note(self, body: bytes) -> None:
        sent_at = int(body[len(BODY_START) : body.index(b",")])
        self._ages_ms.append((time.monotonic_ns() - sent_at) / _NANOSECONDS_PER_MILLISECOND)
        self.count += 1

    def answer(self, question: str) -> dict[str, Any]:
        """`count`; `take`: the ages' percentiles too, which begin anew; `guard <process id>`."""
        if question.startswith("guard "):
            self.guarded_id = int(question.removeprefix("guard "))
        if question != "take":
            return {"count": self.count}
        ages = sorted(self._ages_ms)
        self._ages_ms = array("d")
        return {
            "count": self.count,
            "taken": len(ages),
            "p50": ages[len(ages) // 2] if ages else None,
            "p99": ages[len(ages) * 99 // 100] if ages else None,
        }


class Exchange(asyncio.Protocol):
    """One connection: as little of HTTP as webhookd's own requests need."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not by isinstance: uvloop's for TLS is none by inheritance.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head_end := self._received.find(_HEAD_END)) >= 0:
            head = self._received[:head_end].lower()
            at = head.find(_LENGTH)
            length = int(head[at + len(_LENGTH) :].partition(b"\r\n")[0]) if at >= 0 else 0
            begin = head_end + len(_HEAD_END)
            if len(self._received) < begin + length:
                return
            body = self._received[begin : begin + length]
            self._received = self._received[begin + length :]
            if body.startswith(BODY_START):
                self._arrivals.note(body)
            self._transport.write(ANSWER)


async def _receive(folder: Path) -> None:
    arrivals = Arrivals()
    loop = asyncio.get_running_loop()
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = await loop.create_server(
        lambda: Exchange(arrivals),
        sock=listening,
        ssl=LocalCertificate.in_folder(folder).server_tls(),
        backlog=BACKLOG,
    )
    questions = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    _say({"url": f"https://127.0.0.1:{listening.getsockname()[1]}/"})
    async for line in questions:
        _say(arrivals.answer(line.decode().strip()))
    server.close()
    if arrivals.guarded_id is not None:
        with suppress(ProcessLookupError):
            os.kill(arrivals.guarded_id, signal.SIGTERM)


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(document)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_receive(Path(sys.argv[1])))
