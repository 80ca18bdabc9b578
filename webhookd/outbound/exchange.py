"""One connection with one request at a time: bytes out, a Response in, by one deadline.

Bounds the head and the body of every response. The dialler and the guard have already decided about the peer.
llhttp parses (httptools): a POST with aiohttp's client took three times the processor time (300 µs against
91 µs in one run) and was most of the cost of a delivery.
"""

import asyncio
import ssl
from typing import Final, NamedTuple, cast

import httptools

from webhookd.core.limits import MAX_RESPONSE_EXCERPT_BYTES
from webhookd.outbound.outcome import Failure, RequestFailed

_MAX_HEADER_LINE_BYTES = 8190
_MAX_HEADER_LINES = 128
# For an incomplete head: at this size it has too many lines or one that is too long.
_MAX_HEAD_BYTES = 64 * 1024
# Larger bodies are written in pieces of this size: encrypting one in a single write would block the loop.
_PIECE_BYTES = 64 * 1024

_SWITCHING_PROTOCOLS = 101
_INTERIM = frozenset(range(100, 200)) - {_SWITCHING_PROTOCOLS}
_STATUSES = range(100, 600)


class Response(NamedTuple):
    """The response of an endpoint, with the start of its body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    excerpt: bytes

    def header(self, name: bytes) -> str | None:
        """Return the first header with this name, which is in lower case."""
        values = (value.decode("latin-1") for given, value in self.headers if given.lower() == name)
        return next(values, None)


class Exchange(asyncio.Protocol):
    """Our end of a verified TLS connection. The creator closes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_response_bytes: int) -> None:
        self._loop: Final = loop
        self._max_response_bytes: Final = max_response_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._over: asyncio.Future[None] | None = None  # done when the current exchange has ended
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None  # ends at `_timer_at`; one exchange after another uses it
        self._timer_at = 0.0
        self._writable: asyncio.Future[None] | None = None  # set while the peer does not read
        self._reset()

    def _reset(self) -> None:
        self._status: int | None = None
        self._is_new_status = False  # the status is in the bytes being parsed
        self._error: Exception | None = None  # why there is no status
        self._is_complete = False
        self._has_excess = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._received_bytes = 0
        self._body_bytes = 0
        self._excerpt = bytearray()

    # For the caller.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the last response was read to its end and the endpoint keeps the connection open.

        The endpoint must also have read the request: otherwise every further request would wait in memory.
        """
        return (
            self._is_complete
            and not self._has_excess
            and self._transport is not None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    async def request(self, head: bytes, body: bytes, deadline: float) -> Response:
        """Send one request; RequestFailed or TimeoutError if no status arrives by the deadline."""
        transport = self._transport
        if transport is None:
            raise RequestFailed(Failure.CONNECT_FAILED)
        self._reset()
        over = self._over = self._loop.create_future()
        self._set_deadline(deadline)
        is_sent = False
        try:
            if len(body) <= _PIECE_BYTES:
                transport.write(head + body)
                is_sent = True
            else:
                is_sent = await self._write_in_pieces(transport, over, head, body)
            await over
        finally:
            self._over = None
            if not is_sent:
                self._has_excess = True  # the endpoint would read the next request as the rest of this one
        if self._status is None:
            raise self._error or RuntimeError("an exchange ended with neither a response nor an error")
        return Response(self._status, self._headers, bytes(self._excerpt))

    async def _write_in_pieces(
        self, transport: asyncio.Transport, over: "asyncio.Future[None]", head: bytes, body: bytes
    ) -> bool:
        """Write as fast as the endpoint reads; False if the response arrived before the body was written."""
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

    def _set_deadline(self, deadline: float) -> None:
        """Make sure that the timer ends at the deadline or before it.

        A timer per request took 1.1 µs. This one stays when its request ends, and starts again at its end.
        """
        self._deadline = deadline
        if self._timer is None or deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._timer_ended)

    def _timer_ended(self) -> None:
        self._timer = None
        if self._over is not None and self._deadline > self._timer_at:
            self._set_deadline(self._deadline)
        else:
            self._end(TimeoutError())

    def close(self) -> None:
        """Close with an orderly TLS shutdown."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once: a connection with a half-read response cannot be reused."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        del self._parser  # breaks the reference cycle between parser and protocol
        if isinstance(error, ssl.SSLError):
            # In TLS 1.3 the peer may reject the handshake after it has ended on our side.
            self._end(RequestFailed(Failure.TLS_FAILED, error.reason or ""))
        else:
            detail = error.strerror or "" if isinstance(error, OSError) else ""
            self._end(RequestFailed(Failure.CONNECT_FAILED, detail))

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._has_excess = True
            self.abort()  # unsolicited data
            return
        self._is_new_status = False
        self._received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._has_excess = True  # the following bytes are not HTTP
            self._end(None)
        except httptools.HttpParserError:
            if self._is_new_status and not self._is_over:
                self._status = None  # the bytes that brought it are not a valid response
            self._end(RequestFailed(Failure.PROTOCOL_ERROR))
        else:
            # The parser does not report chunk extensions, so count all received bytes.
            most = _MAX_HEAD_BYTES + (0 if self._status is None else 2 * self._max_response_bytes)
            if self._received_bytes > most:
                self._end(RequestFailed(Failure.PROTOCOL_ERROR))

    @property
    def _is_over(self) -> bool:
        return self._over is None or self._over.done()

    def _end(self, error: Exception | None) -> None:
        """End the exchange. If there is a status, it decides the outcome, whatever came after it."""
        if self._over is None or self._over.done():  # same as _is_over, but mypy understands it
            return
        self._error = error
        self._over.set_result(None)
        self.resume_writing()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._is_over:
            self._has_excess = True
            raise ValueError("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        if len(self._headers) > _MAX_HEADER_LINES or len(name) + len(value) > _MAX_HEADER_LINE_BYTES:
            raise ValueError("the head is too large")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status not in _STATUSES:
            raise ValueError("invalid status")
        if status in _INTERIM:
            self._headers.clear()  # they do not belong to the final response
        else:
            self._status = status
            self._is_new_status = True

    def on_body(self, body: bytes) -> None:
        if len(self._excerpt) < MAX_RESPONSE_EXCERPT_BYTES:
            self._excerpt += body[: MAX_RESPONSE_EXCERPT_BYTES - len(self._excerpt)]
        self._body_bytes += len(body)
        if self._body_bytes > self._max_response_bytes:
            self._end(None)

    def on_message_complete(self) -> None:
        if self._status is None:
            return  # an interim response
        self._is_complete = (
            self._parser.should_keep_alive()
            and self._body_bytes <= self._max_response_bytes
            and self._status != _SWITCHING_PROTOCOLS  # the rest is in an unknown protocol
        )
        self._end(None)
