"""One connection with one request at a time: bytes out, a response in, by one deadline.

Bounds the head and the body of every response. The dialler and the guard have already decided about the peer.
llhttp parses (httptools): a POST with aiohttp's client took three times the processor time (300 µs against
91 µs in one run) and was most of the cost of a delivery.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, cast

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

OnEnd = Callable[["Exchange"], None]


class Exchange(asyncio.Protocol):
    """Our end of a verified TLS connection. The creator closes it.

    An exchange ends with a callback. A task for each request, and a future for its end, took 5 µs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_response_bytes: int) -> None:
        self._loop: Final = loop
        self._max_response_bytes: Final = max_response_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_end: OnEnd | None = None  # set from the start of an exchange to its callback
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None  # kept from one exchange to the next
        self._timer_at = 0.0
        self._is_paused = False  # the peer does not read
        self._reset()
        self._is_over = True

    def _reset(self) -> None:
        self._is_over = False
        self.status: int | None = None
        self.error: Exception | None = None  # why there is no status
        self.excerpt = b""  # the start of the body
        self._is_new_status = False  # the status is in the bytes being parsed
        self._is_complete = False
        self._has_excess = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._received_bytes = 0
        self._body_bytes = 0
        self._unsent: memoryview | None = None

    # For the caller.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the last response was read to its end and the endpoint keeps the connection open.

        The endpoint must also have read the request: otherwise every further request would wait in memory,
        or the endpoint would read the next request as the rest of this one.
        """
        return (
            self._is_complete
            and not self._has_excess
            and self._unsent is None
            and self._transport is not None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def header(self, name: bytes) -> str | None:
        """Return the first header of the response with this name, which is in lower case."""
        values = (value.decode("latin-1") for given, value in self._headers if given.lower() == name)
        return next(values, None)

    def start(self, head: bytes, body: bytes, deadline: float, on_end: OnEnd) -> None:
        """Send one request over an open connection.

        `on_end` is called later, by the deadline: there is a status, or the error that explains its absence.
        """
        if self._transport is None:
            raise RequestFailed(Failure.CONNECT_FAILED)
        self._reset()
        self._on_end = on_end
        self._set_deadline(deadline)
        if len(body) <= _PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._write_piece()

    def _write_piece(self) -> None:
        """Write as fast as the endpoint reads, one piece in each turn of the event loop."""
        if self._unsent is None or self._is_paused or self._is_over or self._transport is None:
            return
        self._transport.write(self._unsent[:_PIECE_BYTES])
        self._unsent = self._unsent[_PIECE_BYTES:] or None
        if not self._is_paused:  # which the write may have changed; resume_writing() then goes on
            self._loop.call_soon(self._write_piece)

    def _set_deadline(self, deadline: float) -> None:
        """Make sure that the timer fires at the deadline or before it.

        A timer for each request took 1.1 µs. This one stays when its request ends; if it fires before the
        deadline of a later request, it starts again.
        """
        self._deadline = deadline
        if self._timer is None or deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._loop.call_at(deadline, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._is_over:
            return
        if self._deadline > self._timer_at:
            self._set_deadline(self._deadline)
        else:
            self._end(TimeoutError())
            self._call_back()

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
        self._call_back()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write_piece()

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
                self.status = None  # the bytes that brought it are not a valid response
            self._end(RequestFailed(Failure.PROTOCOL_ERROR))
        else:
            # The parser does not report chunk extensions, so count all received bytes.
            most = _MAX_HEAD_BYTES + (0 if self.status is None else 2 * self._max_response_bytes)
            if self._received_bytes > most:
                self._end(RequestFailed(Failure.PROTOCOL_ERROR))
        self._call_back()

    def _end(self, error: Exception | None) -> None:
        """End the exchange. If there is a status, it decides the outcome, whatever came after it."""
        if not self._is_over:
            self._is_over = True
            self.error = error

    def _call_back(self) -> None:
        """Call back if the exchange has ended. Never inside the parser, which would hide exceptions."""
        if self._is_over and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self)

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
            self.status = status
            self._is_new_status = True

    def on_body(self, body: bytes) -> None:
        if len(self.excerpt) < MAX_RESPONSE_EXCERPT_BYTES:
            self.excerpt += body[: MAX_RESPONSE_EXCERPT_BYTES - len(self.excerpt)]
        self._body_bytes += len(body)
        if self._body_bytes > self._max_response_bytes:
            self._end(None)

    def on_message_complete(self) -> None:
        if self.status is None:
            return  # an interim response
        self._is_complete = (
            self._parser.should_keep_alive()
            and self._body_bytes <= self._max_response_bytes
            and self.status != _SWITCHING_PROTOCOLS  # the rest is in an unknown protocol
        )
        self._end(None)
