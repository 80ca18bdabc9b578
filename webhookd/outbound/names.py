"""DNS: resolves names with the machine's resolver, one lookup at a time per name.

Applies no address rules: the guard does that each time a result is used.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from webhookd.outbound.outcome import Failure, RequestFailed

# getaddrinfo blocks a thread until it gives up, long after our deadline. A name that DNS never answers keeps
# a thread busy, so the limit is high. Concurrent lookups of one name share a thread.
_LOOKUP_THREADS = 512
# Long enough for a burst of new connections to one name, too short to matter when DNS changes.
_CACHE_SECONDS = 5.0
_MAX_CACHED = 4096

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class Names:
    """Shares concurrent lookups of the same name, and caches results for a few seconds."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._lookups: dict[tuple[str, int], asyncio.Task[list[str]]] = {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Resolve a name to at least one address. A cancelled caller does not cancel a shared lookup."""
        key = (host, port)
        lookup = self._lookups.get(key)
        if lookup is None:
            if len(self._lookups) >= _MAX_CACHED:
                self.forget()
            lookup = asyncio.get_running_loop().create_task(self._resolve(host, port))
            self._lookups[key] = lookup
            lookup.add_done_callback(lambda done: self._resolved(key, done))
        try:
            return await asyncio.shield(lookup)
        except asyncio.CancelledError:
            if not lookup.cancelled():
                raise
            # close() cancelled the lookup; the caller was not cancelled.
            raise RequestFailed(Failure.INTERNAL, "the client is closed") from None
        except UnicodeError:
            raise RequestFailed(Failure.DNS_FAILED, "not a valid DNS name") from None
        except OSError as error:  # socket.gaierror is one
            raise RequestFailed(Failure.DNS_FAILED, error.strerror or "") from None

    def forget(self) -> None:
        """Drop the cache. Lookups in progress still answer their callers."""
        self._lookups.clear()

    def close(self) -> None:
        """Cancel every lookup."""
        for lookup in self._lookups.values():
            lookup.cancel()
        self._lookups.clear()

    async def _resolve(self, host: str, port: int) -> list[str]:
        addresses = list(dict.fromkeys(await self._lookup(host, port)))  # without duplicates
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return addresses

    def _resolved(self, key: tuple[str, int], done: "asyncio.Task[list[str]]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._drop(key, done)
        else:
            asyncio.get_running_loop().call_later(_CACHE_SECONDS, self._drop, key, done)

    def _drop(self, key: tuple[str, int], done: "asyncio.Task[list[str]]") -> None:
        if self._lookups.get(key) is done:
            del self._lookups[key]


class SystemLookup:
    """The machine's own resolver, in one thread per lookup: getaddrinfo cannot be cancelled."""

    def __init__(self) -> None:
        self._threads = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        if self._threads >= _LOOKUP_THREADS:
            raise socket.gaierror(socket.EAI_AGAIN, "too many DNS lookups in progress")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[str]] = loop.create_future()

        def look_up() -> None:
            try:
                found: list[str] | Exception = _look_up(host, port)
            except Exception as error:  # raised in the caller
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller is left
                loop.call_soon_threadsafe(self._hand_over, result, found)

        # No thread pool: at exit the interpreter waits for a pool's threads, even if one hangs.
        threading.Thread(target=look_up, name="webhookd-dns", daemon=True).start()
        self._threads += 1  # only after a successful start; _hand_over counts it down
        return await result

    def _hand_over(self, result: "asyncio.Future[list[str]]", found: list[str] | Exception) -> None:
        self._threads -= 1
        if result.done():
            return
        if isinstance(found, Exception):
            result.set_exception(found)
        else:
            result.set_result(found)


def _look_up(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [_with_zone(*address) for *_, address in infos]


def _with_zone(host: Any, _port: Any, _flow: Any = 0, scope: Any = 0) -> str:
    """Format an address, with the interface of a link-local one: the policy blocks those."""
    return f"{host}%{scope}" if scope and "%" not in host else str(host)
