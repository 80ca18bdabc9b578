"""A process that posts events to an API over plain HTTP, on a given number of connections.

A protocol without a client library, because the client must not be slower than the API. Each request starts a
run; the answer is the number of accepted events per second.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import uvloop

from webhookd.devtools.bench_load import payload
from webhookd.devtools.processes import answer_lines

HEAD_END = b"\r\n\r\n"
LENGTH = b"content-length:"
ACCEPTED = b"HTTP/1.1 202 "


class ApiConnection(asyncio.Protocol):
    """One connection: sends the next request when the answer to the last one is complete."""

    def __init__(self, next_request: Callable[[], bytes | None]) -> None:
        self.finished = asyncio.get_running_loop().create_future()
        self._next_request = next_request
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop do not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(HEAD_END)
        if not found or len(body) < int(head.lower().partition(LENGTH)[2].partition(b"\r\n")[0]):
            return
        if not head.startswith(ACCEPTED):
            self._fail(RuntimeError(f"the API answered {self._received[:300]!r}"))
            return
        self._received = b""
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the API closed the connection"))

    def _send(self) -> None:
        assert self._transport is not None
        request = self._next_request()
        if request is not None:
            self._transport.write(request)
        elif not self.finished.done():
            self.finished.set_result(None)
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)


class Load:
    """Builds requests in which every event is new."""

    def __init__(self) -> None:
        self._numbers = count()

    async def answer(self, request: dict[str, Any]) -> float:
        """Run the load. Returns the accepted events per second."""
        batch, ends_at = request["batch"], time.perf_counter() + request["seconds"]
        sent = 0

        def next_request() -> bytes | None:
            nonlocal sent
            if time.perf_counter() > ends_at:
                return None
            sent += batch or 1
            return self._request(batch)

        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        clients = [
            (await loop.create_connection(lambda: ApiConnection(next_request), "127.0.0.1", request["port"]))[
                1
            ]
            for _ in range(request["connections"])
        ]
        await asyncio.gather(*(client.finished for client in clients))
        return sent / (time.perf_counter() - started)

    def _request(self, batch: int) -> bytes:
        """A batch of this size, or a single event if it is 0."""
        if batch:
            members = ", ".join(self._event() for _ in range(batch))
            path, body = "/v1/events/batch", f'{{"events": [{members}]}}'
        else:
            path, body = "/v1/events", self._event()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def _event(self) -> str:
        number = next(self._numbers)
        head = f'"event_type": "ingest.n{number % 10}", "idempotency_key": "bench-{number}"'
        return f'{{{head}, "payload": {payload(number)}}}'


if __name__ == "__main__":
    uvloop.run(answer_lines(Load().answer))
