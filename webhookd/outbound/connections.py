"""The connections made under one set of options: kept alive, used again, and closed with their time."""

import asyncio

from webhookd.outbound.dialling import Dialler
from webhookd.outbound.exchange import Answer, Exchange
from webhookd.outbound.outcome import Failure, Unanswered
from webhookd.outbound.target import Origin

# Under the 5 s after which Node and Apache close an idle connection: a request that meets the closing is a
# failed attempt, for nothing is sent twice.
_KEEPALIVE_SECONDS = 4.0


class Connections:
    """Sends requests, each over a connection of its own for its time.

    Those who send bound how many are under way; here the open ones are bounded, by giving up those kept
    longest. `retire` lets what is under way end.
    """

    def __init__(self, dialler: Dialler, max_connections: int, max_response_bytes: int) -> None:
        self._dialler = dialler
        self._max_connections = max_connections
        self._max_response_bytes = max_response_bytes
        # By origin, the last used last: it is the next to be used, and those that are too many grow old.
        self._kept: dict[Origin, list[tuple[float, Exchange]]] = {}
        self._kept_count = 0
        self._used: set[Exchange] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._under_way = 0
        self._is_retired = False
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def request(self, origin: Origin, head: bytes, body: bytes, deadline: float) -> Answer:
        """One request, once; Unanswered or TimeoutError where there is no status by the deadline."""
        if self._is_closed:
            raise Unanswered(Failure.INTERNAL, "the client is closed")
        self._under_way += 1
        try:
            exchange = self._take(origin)
            if exchange is None:
                exchange = await self._dial(origin, deadline)
            self._used.add(exchange)
            try:
                return await exchange.request(head, body, deadline)
            finally:
                self._used.discard(exchange)
                self._give_back(origin, exchange)
        finally:
            self._under_way -= 1
            if self._is_retired and not self._under_way:
                self.close()

    async def _dial(self, origin: Origin, deadline: float) -> Exchange:
        async with asyncio.timeout_at(deadline):
            exchange = await self._dialler.dial(origin, self._max_response_bytes, deadline)
        # aiohappyeyeballs may swallow a cancellation that comes while it ends its other dials.
        is_late = asyncio.get_running_loop().time() >= deadline
        if is_late or self._is_closed:
            exchange.abort()
            if is_late:
                raise TimeoutError
            raise Unanswered(Failure.INTERNAL, "the client is closed")
        return exchange

    def retire(self) -> None:
        """Close when the last request has ended."""
        self._is_retired = True
        if not self._under_way:
            self.close()

    def close(self) -> None:
        """Close every connection, also under requests in flight."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for kept in self._kept.values():
            for _, exchange in kept:
                exchange.close()
        self._kept.clear()
        for exchange in self._used:
            exchange.abort()

    def _take(self, origin: Origin) -> Exchange | None:
        """A kept connection, or room for a new one."""
        kept = self._kept.get(origin)
        oldest = asyncio.get_running_loop().time() - _KEEPALIVE_SECONDS
        while kept:
            kept_at, exchange = kept.pop()
            self._kept_count -= 1
            if kept_at > oldest and exchange.is_open:
                return exchange
            exchange.close()
        if self._under_way + self._kept_count > self._max_connections and self._kept_count:
            self._give_up_oldest()
        return None

    def _give_up_oldest(self) -> None:
        origin = min((origin for origin, kept in self._kept.items() if kept), key=self._oldest)
        _, exchange = self._kept[origin].pop(0)
        self._kept_count -= 1
        exchange.close()

    def _oldest(self, origin: Origin) -> float:
        return self._kept[origin][0][0]

    def _give_back(self, origin: Origin, exchange: Exchange) -> None:
        if not exchange.is_reusable:
            exchange.abort()
        elif self._is_closed or self._is_retired:
            exchange.close()
        else:
            loop = asyncio.get_running_loop()
            self._kept.setdefault(origin, []).append((loop.time(), exchange))
            self._kept_count += 1
            if self._sweep is None:
                self._sweep = loop.call_later(_KEEPALIVE_SECONDS, self._close_old)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - _KEEPALIVE_SECONDS
        for origin, kept in list(self._kept.items()):
            while kept and kept[0][0] <= oldest:
                kept.pop(0)[1].close()
                self._kept_count -= 1
            if not kept:
                del self._kept[origin]
        self._sweep = loop.call_later(_KEEPALIVE_SECONDS / 4, self._close_old) if self._kept else None
