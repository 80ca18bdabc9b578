"""One connection, and on it one request at a time: bytes out, an Answer in, by one deadline.

Reads no more than it must: every answer is bounded in its head and in its body. What it is connected to, and
whether that may be, others have decided. llhttp parses (httptools); with aiohttp's client a POST took three
times the processor time of this one (300 µs against 91 in one run), and was most of a delivery.
"""

import asyncio
import ssl
from typing import Final, NamedTuple, cast

import httptools

from webhookd.outbound.outcome import Failure, Unanswered

EXCERPT_BYTES = 4096  # as the column's check

_MAX_HEADER_LINE_BYTES = 8190
_MAX_HEADER_LINES = 128
# Of a head that is not complete yet: by then it has lines enough, or one that is too long.
_MAX_HEAD_BYTES = 64 * 1024
# Larger bodies go in pieces of this: written in one, they would hold up the loop while they are encrypted.
_PIECE_BYTES = 64 * 1024

_SWITCHING_PROTOCOLS = 101
_INTERIM = frozenset(range(100, 200)) - {_SWITCHING_PROTOCOLS}
_STATUSES = range(100, 600)


class Answer(NamedTuple):
    """What an endpoint said; of the body its beginning."""

    status: int
    headers: list[tuple[bytes, bytes]]
    excerpt: bytes

    def header(self, name: bytes) -> str | None:
        """The first header of this name, which is given in lower case."""
        values = (value for given, value in self.headers if given.lower() == name)
        value = next(values, None)
        return None if value is None else value.decode("latin-1")


class Exchange(asyncio.Protocol):
    """A connection's end here. Its transport is TLS, verified; whoever made it closes it."""

    __slots__ = (
        "_body_bytes",
        "_error",
        "_excerpt",
        "_has_excess",
        "_headers",
        "_is_complete",
        "_is_new_status",
        "_loop",
        "_max_response_bytes",
        "_over",
        "_parser",
        "_received_bytes",
        "_status",
        "_transport",
        "_writable",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, max_response_bytes: int) -> None:
        self._loop: Final = loop
        self._max_response_bytes: Final = max_response_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._over: asyncio.Future[None] | None = None  # the request under way
        self._writable: asyncio.Future[None] | None = None  # while the other side does not read
        self._reset()

    def _reset(self) -> None:
        self._status: int | None = None
        self._is_new_status = False  # of the bytes that are being parsed
        self._error: Exception | None = None  # why there is none
        self._is_complete = False
        self._has_excess = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._received_bytes = 0
        self._body_bytes = 0
        self._excerpt = bytearray()

    # What the one who sends sees.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer was read to its very end, and the endpoint keeps the connection.

        And has read ours: one that answers without reading would have every further request wait in memory.
        """
        return (
            self._is_complete
            and not self._has_excess
            and self._transport is not None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    async def request(self, head: bytes, body: bytes, deadline: float) -> Answer:
        """Send one request; the answer, or Unanswered, or TimeoutError at the deadline (the loop's time)."""
        transport = self._transport
        if transport is None:
            raise Unanswered(Failure.CONNECT_FAILED)
        self._reset()
        over = self._over = self._loop.create_future()
        timer = self._loop.call_at(deadline, self._end, TimeoutError())
        is_sent = False
        try:
            if len(body) <= _PIECE_BYTES:
                transport.write(head + body)
                is_sent = True
            else:
                is_sent = await self._write_in_pieces(transport, over, head, body)
            await over
        finally:
            timer.cancel()
            self._over = None
            if not is_sent:
                self._has_excess = True  # of ours: the endpoint would take the next request for it
        return self._answer()

    async def _write_in_pieces(
        self, transport: asyncio.Transport, over: "asyncio.Future[None]", head: bytes, body: bytes
    ) -> bool:
        """As fast as the endpoint reads; whether all of it was written before the answer came."""
        transport.write(head)
        pieces = memoryview(body)
        for start in range(0, len(pieces), _PIECE_BYTES):
            if over.done():
                return False
            transport.write(pieces[start : start + _PIECE_BYTES])
            if self._writable is not None:
                await self._writable
            else:
                await asyncio.sleep(0)
        return True

    def _answer(self) -> Answer:
        if self._status is None:
            raise self._error or RuntimeError("an exchange ended with neither an answer nor an error")
        return Answer(self._status, self._headers, bytes(self._excerpt))

    def close(self) -> None:
        """Say goodbye, and close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once: with an answer half read there is nothing more to be had from it."""
        if self._transport is not None:
            self._transport.abort()

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        del self._parser  # it knows our methods, and we know it: let neither keep the other
        if isinstance(error, ssl.SSLError):
            # In TLS 1.3 a refusal may come after the handshake, as the end of the connection.
            self._end(Unanswered(Failure.TLS_FAILED, error.reason or ""))
        else:
            detail = error.strerror or "" if isinstance(error, OSError) else ""
            self._end(Unanswered(Failure.CONNECT_FAILED, detail))

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._has_excess = True
            self.abort()  # nobody asked
            return
        self._is_new_status = False
        self._received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._has_excess = True  # what comes next is not HTTP
            self._end(None)
        except httptools.HttpParserError:
            if self._is_new_status and not self._is_over:
                self._status = None  # what came with it was no answer
            self._end(Unanswered(Failure.PROTOCOL_ERROR))
        else:
            # Chunks have extensions that nobody tells us of.
            most = _MAX_HEAD_BYTES + (0 if self._status is None else 2 * self._max_response_bytes)
            if self._received_bytes > most:
                self._end(Unanswered(Failure.PROTOCOL_ERROR))

    @property
    def _is_over(self) -> bool:
        return self._over is None or self._over.done()

    def _end(self, error: Exception | None) -> None:
        """The exchange is over. Where there is a status it decides: whatever came after changes nothing."""
        if self._over is None or self._over.done():  # as _is_over; mypy sees it here
            return
        self._error = error
        self._over.set_result(None)
        self.resume_writing()

    # What the parser says.

    def on_message_begin(self) -> None:
        if self._is_over:
            self._has_excess = True
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        if len(self._headers) > _MAX_HEADER_LINES or len(name) + len(value) > _MAX_HEADER_LINE_BYTES:
            raise ValueError("a head beyond reason")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status not in _STATUSES:
            raise ValueError("no status")
        if status in _INTERIM:
            self._headers.clear()  # they are not of the answer
        else:
            self._status = status
            self._is_new_status = True

    def on_body(self, body: bytes) -> None:
        if len(self._excerpt) < EXCERPT_BYTES:
            self._excerpt += body[: EXCERPT_BYTES - len(self._excerpt)]
        self._body_bytes += len(body)
        if self._body_bytes > self._max_response_bytes:
            self._end(None)

    def on_message_complete(self) -> None:
        if self._status is None:
            return  # an interim one
        self._is_complete = (
            self._parser.should_keep_alive()
            and self._body_bytes <= self._max_response_bytes
            and self._status != _SWITCHING_PROTOCOLS  # to what it did not say
        )
        self._end(None)
