"""Both ends of a benchmark's load: a publisher with a fixed pace, and a receiver as a process of its own.

The correlation id of an event is the time at which it was due to be published, so the receiver's log holds
the latency of each event. Shared by `webhookd bench` and `make bench`; run as a program, it is the receiver.
"""

import asyncio
import os
import signal
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import uvloop

from webhookd.deliveries.ingest import NewEvent
from webhookd.devtools.processes import Child, answer_lines, child_options, python_module, start_child

PAYLOAD_BYTES = 400
BATCH_EVENTS = 1000
TICK_SECONDS = 0.005
# Longer than wake-ups are throttled (50 ms): each event meets an idle daemon.
IDLE_PAUSE_SECONDS = 0.06
LOG_POLL_SECONDS = 0.05
ANSWER_TIMEOUT_SECONDS = 30.0
# A daemon may open all its connections at the same moment.
BACKLOG = 1024

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"


def payload(number: int, size_bytes: int = PAYLOAD_BYTES) -> str:
    """A JSON text of exactly this size, different for each number."""
    head = f'{{"number": {number}, "padding": "'
    return f'{head}{"x" * (size_bytes - len(head) - 2)}"}}'


class Publisher:
    """Publishes events of some types in turn. `progress` is called with the number published so far."""

    def __init__(
        self,
        publish: Callable[[list[NewEvent]], Awaitable[object]],
        event_types: Sequence[str],
        payload_bytes: int = PAYLOAD_BYTES,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._publish = publish
        self._event_types = event_types
        self._payload_bytes = payload_bytes
        self._progress = progress
        self.published = 0

    async def backlog(self, count: int) -> None:
        """As fast as possible, in batches and without due times."""
        for start in range(0, count, BATCH_EVENTS):
            await self._commit([None] * min(BATCH_EVENTS, count - start))

    async def paced(self, rate: float, seconds: float) -> None:
        """At a fixed rate, however slow the daemon is: each tick commits what has become due."""
        due = deque(due_times(rate, seconds, time.time()))
        while due:
            now = time.time()
            ready: list[float] = []
            while due and due[0] <= now and len(ready) < BATCH_EVENTS:
                ready.append(due.popleft())
            if ready:
                await self._commit(ready)
            if due:
                await asyncio.sleep(max(0.0, due[0] - time.time()))

    async def one_by_one(self, count: int) -> None:
        """One event at a time, with a pause after each."""
        for _ in range(count):
            await self._commit([time.time()])
            await asyncio.sleep(IDLE_PAUSE_SECONDS)

    async def _commit(self, due: Sequence[float | None]) -> None:
        numbers = range(self.published, self.published + len(due))
        await self._publish(
            [
                NewEvent(
                    self._event_types[number % len(self._event_types)],
                    payload(number, self._payload_bytes),
                    correlation_id=None if moment is None else f"{moment:.6f}",
                )
                for number, moment in zip(numbers, due, strict=True)
            ]
        )
        self.published += len(due)
        self._progress(self.published)


def due_times(rate: float, seconds: float, started_at: float) -> list[float]:
    """When each event is due, rounded up to the end of its tick."""
    count = int(rate * seconds)
    return [started_at + ceil((number + 1) / rate / TICK_SECONDS) * TICK_SECONDS for number in range(count)]


# Receiving: the parent's side.


class LoggedArrival(NamedTuple):
    """When a request arrived, and its correlation id."""

    at: float
    stamp: str


class Receiver(ABC):
    """A running receiver. It answers at once, and logs the arrivals of requests to /timed."""

    name: str

    def __init__(self, port: int, log_path: Path) -> None:
        self._port = port
        self._log_path = log_path

    def url(self, path: str) -> str:
        return f"https://127.0.0.1:{self._port}{path}"

    @abstractmethod
    async def requests(self) -> int:
        """The number of requests so far."""

    async def log_position(self) -> int:
        """The end of the log now."""
        return self._log_path.stat().st_size if self._log_path.exists() else 0

    async def arrivals(self, position: int = 0) -> list[LoggedArrival]:
        """The arrivals at /timed since this position of the log."""
        with self._log_path.open() as log:
            log.seek(position)
            return parse_arrivals(log.read())

    async def until_arrived(self, count: int, position: int) -> list[LoggedArrival]:
        """Wait until there are this many arrivals since the position."""
        while len(arrivals := await self.arrivals(position)) < count:  # noqa: ASYNC110  another process writes
            await asyncio.sleep(LOG_POLL_SECONDS)
        return arrivals


class ReceiverProcess(Receiver):
    """This module as a process."""

    name = "webhookd's own receiver"

    def __init__(self, port: int, log_path: Path, child: Child) -> None:
        super().__init__(port, log_path)
        self._child = child

    @property
    def process_id(self) -> int:
        return self._child.process_id

    async def requests(self) -> int:
        return int(await self._child.request({}, ANSWER_TIMEOUT_SECONDS))

    async def log_position(self) -> int:
        await self.requests()  # which writes the log
        return await super().log_position()

    async def arrivals(self, position: int = 0) -> list[LoggedArrival]:
        await self.requests()
        return await super().arrivals(position)

    async def guard(self, process_id: int) -> None:
        """Have it end this process if we are killed and cannot do so."""
        await self._child.request({"guard": process_id}, ANSWER_TIMEOUT_SECONDS)


@asynccontextmanager
async def receiver_process(
    folder: Path, certificate_file: Path, key_file: Path | None = None
) -> AsyncIterator[ReceiverProcess]:
    """Start a receiver on a free port. The key may be in the certificate's file."""
    log_path = folder / "arrivals.log"
    options = [str(path) for path in (certificate_file, key_file or certificate_file, log_path)]
    async with start_child(python_module(__name__), folder, options) as child:
        try:
            yield ReceiverProcess(child.ready, log_path, child)
        finally:
            await child.kill()  # closing its input would make it end the guarded process


def parse_arrivals(log: str) -> list[LoggedArrival]:
    """Parse a log whose last line may be incomplete. A request may have no correlation id."""
    complete = log[: log.rfind("\n") + 1].splitlines()
    return [LoggedArrival(float(at), stamp) for at, _, stamp in (line.partition(" ") for line in complete)]


def latencies_ms(arrivals: Sequence[LoggedArrival], skipped_share: float = 0.0) -> list[float]:
    """Milliseconds from the due time of each event to its arrival, without the first share of events."""
    in_order = sorted((float(arrival.stamp), arrival.at) for arrival in arrivals)
    return [(at - due) * 1000 for due, at in in_order[int(len(in_order) * skipped_share) :]]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that this many per cent of the values do not exceed (nearest rank)."""
    if not values:
        raise ValueError("there are no values")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)  # rounded up
    return ordered[max(rank, 1) - 1]


# Receiving: the process. A protocol without a framework, because the receiver must not be the limit.


class _Requests:
    def __init__(self, log: TextIO) -> None:
        self.count = 0
        self.log = log
        self.guarded_id: int | None = None

    async def answer(self, request: dict[str, Any]) -> int:
        self.guarded_id = request.get("guard", self.guarded_id)
        self.log.flush()
        return self.count


class _Connection(asyncio.Protocol):
    """Answers by path: /slow/<milliseconds> after a delay, /hang never, every other path at once."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance: the TLS transport of uvloop does not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head_end := self._received.find(_HEAD_END)) >= 0:
            head = self._received[:head_end].lower()
            end = head_end + len(_HEAD_END) + int(header(head, b"content-length") or 0)
            if len(self._received) < end:
                return
            self._received = self._received[end:]
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        self._requests.count += 1
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/hang"):
            return
        if path.startswith(b"/slow/"):
            delay_seconds = int(path.split(b"/")[2]) / 1000
            asyncio.get_running_loop().call_later(delay_seconds, self._send)
            return
        if path.startswith(b"/timed"):
            stamp = header(head, b"webhook-correlation-id").decode()
            self._requests.log.write(f"{time.time():.6f} {stamp}\n")
        self._send()

    def _send(self) -> None:
        if self._transport is not None:
            self._transport.write(_ANSWER)


def header(head: bytes, name: bytes) -> bytes:
    """The value of a header in a lower-case head; empty if it is missing."""
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""


async def _receive() -> None:
    """Serve until the parent closes our input; then end the guarded process."""
    certificate_file, key_file, log_path = child_options()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate_file, key_file)
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    with Path(log_path).open("a") as log:  # noqa: ASYNC230  before there is anything to serve
        requests = _Requests(log)
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(requests), sock=listening, ssl=tls, backlog=BACKLOG
        )
        await answer_lines(requests.answer, ready=listening.getsockname()[1])
        server.close()
    if requests.guarded_id is not None:
        with suppress(ProcessLookupError):
            os.kill(requests.guarded_id, signal.SIGTERM)


if __name__ == "__main__":
    uvloop.run(_receive())
