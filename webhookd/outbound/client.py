"""The guarded HTTPS client: one request in, one Outcome out, within one deadline.

Reads ClientOptions, which a reload replaces. Passes every dial to the guard. Cancellation is the only
exception that leaves it: a hostile endpoint, a bad URL and a bug in webhookd are outcomes of that request.

There is no code for proxies, cookies, redirects or decompression.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

from webhookd.core.errors import ConfigurationError
from webhookd.outbound.addresses import AddressPolicy, DialCounters, Guard, IPAddress
from webhookd.outbound.dialling import Dialler, Lookup, Names, SystemLookup
from webhookd.outbound.endpoint import Origin, Request, request_to, target_of
from webhookd.outbound.exchange import Exchange
from webhookd.outbound.outcome import SUCCESS, Failure, Outcome, RequestFailed, retry_after_seconds

log = logging.getLogger(__name__)

# In addition to those of deliveries, so that a subscription can be verified under full load.
VERIFICATION_CONNECTIONS = 16
# Less than the 5 s after which Node and Apache close an idle connection. A request that meets the closing is
# a failed attempt, because nothing is sent twice.
_KEEPALIVE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Everything a reload may change. The CA file is already read and the networks are already parsed."""

    policy: AddressPolicy
    tls: ssl.SSLContext
    own_addresses: frozenset[tuple[IPAddress, int]] = frozenset()
    # More than the excerpt: a connection can be reused only if its response was read to the end.
    max_response_bytes: int = 64 * 1024
    max_connections: int = 1000


def trusted_tls(*ca_files: Path) -> ssl.SSLContext:
    """Make a context for TLS 1.2 or newer that trusts the system's authorities and those in the files."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for ca_file in ca_files:
        try:
            context.load_verify_locations(cafile=ca_file)
        except ValueError as error:
            raise ConfigurationError(f"delivery.ca_file {str(ca_file)!r} is not a file name") from error
        except OSError as error:  # ssl.SSLError is one
            reason = "it contains no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigurationError(f"delivery.ca_file {ca_file} cannot be used: {reason}") from error
    return context


class GuardedClient:
    """Sends requests over keep-alive connections. Create, use and close it in one event loop."""

    def __init__(self, options: ClientOptions, lookup: Lookup | None = None) -> None:
        self.counters = DialCounters()
        self._names = Names(lookup or SystemLookup())
        self._connections = self._connections_for(options)
        self._retired: list[Connections] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def reconfigure(self, options: ClientOptions) -> None:
        """Use these options, and new connections, for every further request.

        Requests in flight keep the old options; the old connections are closed after the last of them.
        """
        self._connections.retire()
        self._retired = [old for old in (*self._retired, self._connections) if not old.is_closed]
        self._connections = self._connections_for(options)

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, deadline_seconds: float
    ) -> Outcome:
        """Build and send one request, once, and wait for its outcome."""
        try:
            request = request_to(target_of(url, headers), "", body)
        except Exception:
            log.exception("cannot build a request")
            return Outcome(None, Failure.INTERNAL.value, 0)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def on_outcome(_: Sending, outcome: Outcome) -> None:
            if not ended.cancelled():
                ended.set_result(outcome)

        sending = self.send(request, deadline_seconds, on_outcome)
        try:
            return await ended
        finally:
            sending.cancel()

    def send(self, request: Request, deadline_seconds: float, on_outcome: "OnOutcome") -> "Sending":
        """Send one request, once. `on_outcome` is called later, in this event loop, unless it is cancelled.

        The deadline covers everything from DNS lookup to the body's last byte.
        """
        sending = Sending(self._connections, request, deadline_seconds, on_outcome)
        sending.start()
        return sending

    def close(self) -> None:
        """Close every connection, including those with a request in flight."""
        for connections in (*self._retired, self._connections):
            connections.close()
        self._names.close()

    def _connections_for(self, options: ClientOptions) -> "Connections":
        """Each set of options has its own connections, so none was made under an older policy."""
        guard = Guard(options.policy, options.own_addresses, self.counters)
        dialler = Dialler(guard, self._names, options.tls)
        return Connections(dialler, options.max_connections, options.max_response_bytes)


class Sending:
    """One request, from its start to its outcome."""

    __slots__ = ("_connections", "_deadline", "_dial", "_exchange", "_on_outcome", "_request", "_started")

    def __init__(
        self, connections: "Connections", request: Request, deadline_seconds: float, on_outcome: "OnOutcome"
    ) -> None:
        self._connections = connections
        self._request = request
        self._on_outcome: OnOutcome | None = on_outcome  # None after the end
        self._started = time.monotonic()
        self._deadline = connections.loop.time() + deadline_seconds
        self._exchange: Exchange | None = None
        self._dial: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Use an idle connection, or dial a new one in a task."""
        connections = self._connections
        connections.in_flight.add(self)
        try:
            exchange = connections.take(self._request.origin)
            if exchange is None:
                self._dial = connections.loop.create_task(self._dial_and_start())
            else:
                self._start(exchange)
        except Exception as error:
            connections.loop.call_soon(self._fail, error)

    def cancel(self) -> None:
        """Stop without an outcome. Does nothing after the end."""
        if self._on_outcome is None:
            return
        if self._exchange is None and self._dial is not None:
            self._dial.cancel()
        self._end()

    def abort(self) -> None:
        """Close the connection. That is the outcome, if it has no status yet."""
        if self._exchange is not None:
            self._exchange.abort()

    async def _dial_and_start(self) -> None:
        try:
            exchange = await self._connections.dial(self._request.origin, self._deadline)
            self._start(exchange)
        except Exception as error:
            self._fail(error)

    def _start(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.start(self._request.head, self._request.body, self._deadline, self._responded)

    def _responded(self, exchange: Exchange) -> None:
        status = exchange.status
        if status is None:
            self._fail(exchange.error)
        elif status in SUCCESS:
            self._end(Outcome(status, None, self._duration_ms(), None, exchange.excerpt))
        else:
            retry_after = retry_after_seconds(
                exchange.header(b"retry-after"), exchange.header(b"date"), datetime.now(UTC)
            )
            code = f"HTTP_{status}"
            self._end(Outcome(status, code, self._duration_ms(), retry_after, exchange.excerpt))

    def _fail(self, error: Exception | None) -> None:
        failure, detail = Failure.INTERNAL, ""
        if isinstance(error, TimeoutError):
            failure = Failure.TIMEOUT
        elif isinstance(error, RequestFailed):
            failure, detail = error.failure, error.detail
        else:
            log.error("internal error while sending a request", exc_info=error)
        self._end(Outcome(None, failure.value, self._duration_ms(), detail=detail))

    def _end(self, outcome: Outcome | None = None) -> None:
        on_outcome, self._on_outcome = self._on_outcome, None
        if on_outcome is None:  # cancelled
            return
        self._connections.ended(self, self._request.origin, self._exchange)
        if outcome is not None:
            on_outcome(self, outcome)

    def _duration_ms(self) -> int:
        return int((time.monotonic() - self._started) * 1000)


OnOutcome = Callable[[Sending, Outcome], None]


class Connections:
    """Idle connections, and the requests in flight, one at a time per connection.

    Callers bound the number of requests in flight. This class bounds the number of open connections, by
    closing the longest idle ones.
    """

    def __init__(self, dialler: Dialler, max_connections: int, max_response_bytes: int) -> None:
        self._dialler = dialler
        self._max_connections = max_connections
        self._max_response_bytes = max_response_bytes
        # Kept: asyncio.get_running_loop() is a system call in Python 3.11.
        self.loop: Final = asyncio.get_running_loop()
        # Idle connections by origin, most recently used last. That one is reused first; a surplus grows old.
        self._idle: dict[Origin, list[tuple[float, Exchange]]] = {}
        self._idle_count = 0
        self.in_flight: Final[set[Sending]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_retired = False
        self.is_closed = False

    async def dial(self, origin: Origin, deadline: float) -> Exchange:
        """Open a connection by the deadline, unless this object is closed."""
        if not self.is_closed:
            async with asyncio.timeout_at(deadline):
                exchange = await self._dialler.dial(origin, self._max_response_bytes, deadline)
            # aiohappyeyeballs may swallow a cancellation that arrives while it ends its other dials.
            is_late = self.loop.time() >= deadline
            if not is_late and not self.is_closed:
                return exchange
            exchange.abort()
            if is_late:
                raise TimeoutError
        raise RequestFailed(Failure.INTERNAL, "the client is closed")

    def retire(self) -> None:
        """Close as soon as no request is in flight."""
        self._is_retired = True
        if not self.in_flight:
            self.close()

    def close(self) -> None:
        self.is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for _, exchange in idle:
                exchange.close()
        self._idle.clear()
        for sending in tuple(self.in_flight):
            sending.abort()

    def take(self, origin: Origin) -> Exchange | None:
        """Take an idle connection, or make room for a new one."""
        idle = self._idle.get(origin)
        oldest = self.loop.time() - _KEEPALIVE_SECONDS
        while idle:
            idle_since, exchange = idle.pop()
            self._idle_count -= 1
            if idle_since > oldest and exchange.is_open:
                return exchange
            exchange.close()
        if len(self.in_flight) + self._idle_count > self._max_connections and self._idle_count:
            longest_idle = min((idle for idle in self._idle.values() if idle), key=lambda idle: idle[0][0])
            longest_idle.pop(0)[1].close()
            self._idle_count -= 1
        return None

    def ended(self, sending: Sending, origin: Origin, exchange: Exchange | None) -> None:
        """Keep the connection of a request that has ended, or close it."""
        self.in_flight.discard(sending)
        if exchange is not None:
            if not exchange.is_reusable:
                exchange.abort()
            elif self.is_closed or self._is_retired:
                exchange.close()
            else:
                self._idle.setdefault(origin, []).append((self.loop.time(), exchange))
                self._idle_count += 1
                if self._sweep is None:
                    self._sweep = self.loop.call_later(_KEEPALIVE_SECONDS, self._close_old)
        if self._is_retired and not self.in_flight:
            self.close()

    def _close_old(self) -> None:
        oldest = self.loop.time() - _KEEPALIVE_SECONDS
        for origin, idle in list(self._idle.items()):
            while idle and idle[0][0] <= oldest:
                idle.pop(0)[1].close()
                self._idle_count -= 1
            if not idle:
                del self._idle[origin]
        self._sweep = self.loop.call_later(_KEEPALIVE_SECONDS / 4, self._close_old) if self._idle else None
