"""An HTTPS receiver of our own: answers at once, after a delay, or never, by the path.

/now answers, /timed answers and writes the time of arrival, /slow/<milliseconds> waits first, /hang waits for
ever. A protocol and no framework: where nginx is not installed it must not be what is measured.
"""

import asyncio
import ssl
import time
from pathlib import Path
from typing import TextIO, cast

import uvloop

from tests.bench.lines import answer_lines, options

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
HEAD_END = b"\r\n\r\n"


class Tally:
    """What arrived."""

    def __init__(self, log: TextIO) -> None:
        self.requests = 0
        self.log = log


class Receiver(asyncio.Protocol):
    """One connection, on which requests follow each other."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none of asyncio's, but do the same.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head_end := self._received.find(HEAD_END)) >= 0:
            head = self._received[:head_end]
            end = head_end + len(HEAD_END) + int(header(head, b"content-length") or 0)
            if len(self._received) < end:
                return
            self._received = self._received[end:]
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        self._tally.requests += 1
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/hang"):
            return
        if path.startswith(b"/slow/"):
            delay_seconds = int(path.split(b"/")[2]) / 1000
            asyncio.get_running_loop().call_later(delay_seconds, self._send)
            return
        if path.startswith(b"/timed"):
            stamp = header(head, b"webhook-correlation-id").decode()
            self._tally.log.write(f"{time.time():.6f} {stamp}\n")
        self._send()

    def _send(self) -> None:
        if self._transport is not None:
            self._transport.write(ANSWER)


def header(head: bytes, name: bytes) -> bytes:
    """A header's value; empty if it is not there."""
    _, found, rest = head.lower().partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""


async def main() -> None:
    """Serve until the input ends; any line is answered with the number of requests so far."""
    given = options()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(given["certificate"])
    with Path(given["log"]).open("a", buffering=1) as log:  # noqa: ASYNC230  before there is anything to serve
        tally = Tally(log)
        server = await asyncio.get_running_loop().create_server(
            lambda: Receiver(tally), "127.0.0.1", given["port"], ssl=tls, backlog=1024
        )

        async def count(_: object) -> int:
            return tally.requests

        async with server:
            await answer_lines(count)


if __name__ == "__main__":
    uvloop.run(main())
