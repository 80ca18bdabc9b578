"""The keep-alive connections of one set of client options."""

import asyncio

from webhookd.outbound.dialling import Dialler
from webhookd.outbound.exchange import Exchange, Response
from webhookd.outbound.outcome import Failure, RequestFailed
from webhookd.outbound.urls import Origin

# Less than the 5 s after which Node and Apache close an idle connection. A request that meets the closing is
# a failed attempt, because nothing is sent twice.
_KEEPALIVE_SECONDS = 4.0


class Connections:
    """Sends requests, one at a time per connection.

    Callers bound the number of requests in flight. This class bounds the number of open connections, by
    closing the longest idle ones.
    """

    def __init__(self, dialler: Dialler, max_connections: int, max_response_bytes: int) -> None:
        self._dialler = dialler
        self._max_connections = max_connections
        self._max_response_bytes = max_response_bytes
        # Idle connections by origin, most recently used last. That one is reused first; a surplus grows old.
        self._idle: dict[Origin, list[tuple[float, Exchange]]] = {}
        self._idle_count = 0
        self._busy: set[Exchange] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._is_retired = False
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def request(self, origin: Origin, head: bytes, body: bytes, deadline: float) -> Response:
        """Send one request, once; RequestFailed or TimeoutError if no status arrives by the deadline."""
        if self._is_closed:
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
        is_late = asyncio.get_running_loop().time() >= deadline
        if is_late or self._is_closed:
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
        """Close every connection, including those with a request in flight."""
        self._is_closed = True
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
        oldest = asyncio.get_running_loop().time() - _KEEPALIVE_SECONDS
        while idle:
            idle_since, exchange = idle.pop()
            self._idle_count -= 1
            if idle_since > oldest and exchange.is_open:
                return exchange
            exchange.close()
        if self._in_flight + self._idle_count > self._max_connections and self._idle_count:
            self._close_oldest()
        return None

    def _close_oldest(self) -> None:
        origin = min((origin for origin, idle in self._idle.items() if idle), key=self._oldest)
        _, exchange = self._idle[origin].pop(0)
        self._idle_count -= 1
        exchange.close()

    def _oldest(self, origin: Origin) -> float:
        return self._idle[origin][0][0]

    def _give_back(self, origin: Origin, exchange: Exchange) -> None:
        if not exchange.is_reusable:
            exchange.abort()
        elif self._is_closed or self._is_retired:
            exchange.close()
        else:
            loop = asyncio.get_running_loop()
            self._idle.setdefault(origin, []).append((loop.time(), exchange))
            self._idle_count += 1
            if self._sweep is None:
                self._sweep = loop.call_later(_KEEPALIVE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - _KEEPALIVE_SECONDS
        for origin, idle in list(self._idle.items()):
            while idle and idle[0][0] <= oldest:
                idle.pop(0)[1].close()
                self._idle_count -= 1
            if not idle:
                del self._idle[origin]
        self._sweep = loop.call_later(_KEEPALIVE_SECONDS / 4, self._close_old) if self._idle else None
