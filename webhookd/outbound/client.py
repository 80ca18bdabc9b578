"""The guarded HTTPS client: one request in, one Outcome out, within one deadline.

Reads ClientOptions, which a reload replaces. Passes every dial to the guard. Cancellation is the only
exception that leaves it: a hostile endpoint, a bad URL and a bug in webhookd are outcomes of that request.

There is no code for proxies, cookies, redirects or decompression.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from webhookd.core.errors import ConfigurationError
from webhookd.outbound.addresses import AddressPolicy, DialCounters, Guard, IPAddress
from webhookd.outbound.dialling import Dialler, Lookup, Names, SystemLookup
from webhookd.outbound.endpoint import Origin, Request, request_to, target_of
from webhookd.outbound.exchange import Exchange, Response
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
        """Build and send one request, once."""
        try:
            request = request_to(target_of(url, headers), "", body)
        except Exception:
            log.exception("cannot build a request")
            return Outcome(None, Failure.INTERNAL.value, 0)
        return await self.send(request, deadline_seconds)

    async def send(self, request: Request, deadline_seconds: float) -> Outcome:
        """Send one request, once. The deadline covers everything from DNS lookup to the body's last byte."""
        started = time.monotonic()
        try:
            response = await self._connections.request(request, deadline_seconds)
        except TimeoutError:
            return _failed(Failure.TIMEOUT, started)
        except RequestFailed as failed:
            return _failed(failed.failure, started, failed.detail)
        except Exception:
            log.exception("internal error while sending a request")
            return _failed(Failure.INTERNAL, started)
        return _responded(response, _milliseconds_since(started))

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


def _responded(response: Response, duration_ms: int) -> Outcome:
    if response.status in SUCCESS:
        return Outcome(response.status, None, duration_ms, None, response.excerpt)
    retry_after = retry_after_seconds(
        response.header(b"retry-after"), response.header(b"date"), datetime.now(UTC)
    )
    return Outcome(response.status, f"HTTP_{response.status}", duration_ms, retry_after, response.excerpt)


def _failed(failure: Failure, started: float, detail: str = "") -> Outcome:
    return Outcome(None, failure.value, _milliseconds_since(started), detail=detail)


def _milliseconds_since(started: float) -> int:
    return int((time.monotonic() - started) * 1000)


class Connections:
    """Sends requests, one at a time per connection.

    Callers bound the number of requests in flight. This class bounds the number of open connections, by
    closing the longest idle ones.
    """

    def __init__(self, dialler: Dialler, max_connections: int, max_response_bytes: int) -> None:
        self._dialler = dialler
        self._max_connections = max_connections
        self._max_response_bytes = max_response_bytes
        # Kept: asyncio.get_running_loop() costs a system call in Python 3.11.
        self._loop = asyncio.get_running_loop()
        # Idle connections by origin, most recently used last. That one is reused first; a surplus grows old.
        self._idle: dict[Origin, list[tuple[float, Exchange]]] = {}
        self._idle_count = 0
        self._busy: set[Exchange] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._is_retired = False
        self.is_closed = False

    async def request(self, request: Request, deadline_seconds: float) -> Response:
        """Send one request, once; RequestFailed or TimeoutError if no status arrives by the deadline."""
        origin, head, body = request
        deadline = self._loop.time() + deadline_seconds
        if self.is_closed:
            raise RequestFailed(Failure.INTERNAL, "the client is closed")
        self._in_flight += 1
        try:
            exchange = self._take(origin)
            if exchange is None:
                exchange = await self._dial(origin, deadline)
            self._busy.add(exchange)
            try:
                return await exchange.request(head, body, deadline)
            finally:
                self._busy.discard(exchange)
                self._give_back(origin, exchange)
        finally:
            self._in_flight -= 1
            if self._is_retired and not self._in_flight:
                self.close()

    async def _dial(self, origin: Origin, deadline: float) -> Exchange:
        async with asyncio.timeout_at(deadline):
            exchange = await self._dialler.dial(origin, self._max_response_bytes, deadline)
        # aiohappyeyeballs may swallow a cancellation that arrives while it ends its other dials.
        is_late = self._loop.time() >= deadline
        if is_late or self.is_closed:
            exchange.abort()
            if is_late:
                raise TimeoutError
            raise RequestFailed(Failure.INTERNAL, "the client is closed")
        return exchange

    def retire(self) -> None:
        """Close as soon as no request is in flight."""
        self._is_retired = True
        if not self._in_flight:
            self.close()

    def close(self) -> None:
        self.is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for _, exchange in idle:
                exchange.close()
        self._idle.clear()
        for exchange in self._busy:
            exchange.abort()

    def _take(self, origin: Origin) -> Exchange | None:
        """Take an idle connection, or make room for a new one."""
        idle = self._idle.get(origin)
        oldest = self._loop.time() - _KEEPALIVE_SECONDS
        while idle:
            idle_since, exchange = idle.pop()
            self._idle_count -= 1
            if idle_since > oldest and exchange.is_open:
                return exchange
            exchange.close()
        if self._in_flight + self._idle_count > self._max_connections and self._idle_count:
            longest_idle = min((idle for idle in self._idle.values() if idle), key=lambda idle: idle[0][0])
            longest_idle.pop(0)[1].close()
            self._idle_count -= 1
        return None

    def _give_back(self, origin: Origin, exchange: Exchange) -> None:
        if not exchange.is_reusable:
            exchange.abort()
        elif self.is_closed or self._is_retired:
            exchange.close()
        else:
            self._idle.setdefault(origin, []).append((self._loop.time(), exchange))
            self._idle_count += 1
            if self._sweep is None:
                self._sweep = self._loop.call_later(_KEEPALIVE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        oldest = self._loop.time() - _KEEPALIVE_SECONDS
        for origin, idle in list(self._idle.items()):
            while idle and idle[0][0] <= oldest:
                idle.pop(0)[1].close()
                self._idle_count -= 1
            if not idle:
                del self._idle[origin]
        self._sweep = self._loop.call_later(_KEEPALIVE_SECONDS / 4, self._close_old) if self._idle else None
