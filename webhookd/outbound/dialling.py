"""From an origin to a verified TLS connection: DNS lookup, guard, dial, TLS handshake.

Each step maps its errors to a Failure. Names are resolved by the machine's resolver, without address rules:
the guard applies them each time a result is used.
"""

import asyncio
import contextlib
import errno
import logging
import re
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any

import aiohappyeyeballs

from webhookd.outbound.addresses import AddressBlocked, AddressInfo, Guard
from webhookd.outbound.endpoint import Origin
from webhookd.outbound.exchange import Exchange
from webhookd.outbound.outcome import Failure, RequestFailed

log = logging.getLogger(__name__)

# An orderly TLS shutdown waits for the peer's close_notify, by default 30 s: an endpoint that answers garbage
# and then stays silent could hold thousands of our sockets.
_TLS_SHUTDOWN_SECONDS = 0.1
_MIN_HANDSHAKE_SECONDS = 0.001  # asyncio rejects 0
# The first address gets this long before the next is dialled in parallel (RFC 8305).
_NEXT_ADDRESS_SECONDS = 0.25
# The resolver reads such a name as an address: 127.1, 2130706433. There is no legitimate use for it.
_NUMERIC_HOST = re.compile(r"(?:.*\.)?[0-9]+\.?")
# This machine has no file descriptors, memory or ports left: not the endpoint's fault.
_LOCAL_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)

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
                self._lookups.clear()  # lookups in progress still answer their callers
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


class Dialler:
    """Dials under one address policy and one set of trusted authorities."""

    def __init__(self, guard: Guard, names: Names, tls: ssl.SSLContext) -> None:
        self._guard = guard
        self._names = names
        self._tls = tls

    async def dial(self, origin: Origin, max_response_bytes: int, deadline: float) -> Exchange:
        """Connect to an origin; RequestFailed if that is not possible. The caller bounds the time.

        The deadline (loop time) replaces the handshake's own default timeout. If the caller gives up earlier,
        the handshake continues in the background, and its connection is closed when it ends.
        """
        loop = asyncio.get_running_loop()
        try:
            dialled = await self._connect(await self._addresses(origin))
        except AddressBlocked as error:
            raise RequestFailed(Failure.ADDRESS_BLOCKED, error.strerror or "") from None
        handshake = loop.create_task(
            loop.create_connection(
                lambda: Exchange(loop, max_response_bytes),
                sock=dialled,
                ssl=self._tls,
                server_hostname=origin.host.rstrip("."),
                ssl_handshake_timeout=max(_MIN_HANDSHAKE_SECONDS, deadline - loop.time()),
                ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS,
            )
        )
        try:
            # Not cancelled with the caller: if the endpoint answers in the same loop iteration (for example
            # after the process was stopped), uvloop closes the socket under TLS and logs a fatal error.
            await asyncio.wait({handshake})
            _, exchange = handshake.result()
        except asyncio.CancelledError:
            handshake.add_done_callback(_abort)
            raise
        except ConnectionAbortedError:  # asyncio's handshake timeout
            raise TimeoutError from None
        except ssl.SSLCertVerificationError as error:
            raise RequestFailed(Failure.TLS_FAILED, error.verify_message) from None
        except ssl.SSLError as error:
            raise RequestFailed(Failure.TLS_FAILED, error.reason or "") from None
        except OSError as error:  # the connection was lost during the handshake
            raise RequestFailed(Failure.TLS_FAILED, error.strerror or "") from None
        return exchange

    async def _addresses(self, origin: Origin) -> list[AddressInfo]:
        try:
            ip_address(origin.host)
        except ValueError:
            pass
        else:
            return [_info(origin.host, origin.port)]  # make_socket checks it
        if _NUMERIC_HOST.fullmatch(origin.host):
            raise RequestFailed(Failure.ADDRESS_BLOCKED, "a number as a host")
        resolved = await self._names.addresses(*origin)
        return [_info(address, origin.port) for address in self._guard.permitted(resolved, origin.port)]

    async def _connect(self, addresses: list[AddressInfo]) -> socket.socket:
        try:
            dialled = await aiohappyeyeballs.start_connection(
                addresses,
                happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS,
                interleave=1,
                socket_factory=self._guard.make_socket,
            )
        except AddressBlocked:
            raise
        except OSError as error:
            if error.errno in _LOCAL_SHORTAGE:
                log.exception("this machine cannot open a connection")
                raise RequestFailed(Failure.INTERNAL, error.strerror or "") from None
            raise RequestFailed(Failure.CONNECT_FAILED, error.strerror or "") from None
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return dialled


def _abort(handshake: "asyncio.Task[tuple[asyncio.Transport, Exchange]]") -> None:
    if not handshake.cancelled() and handshake.exception() is None:
        handshake.result()[0].abort()


def _info(address: str, port: int) -> AddressInfo:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    rest = (0, 0) if family == socket.AF_INET6 else ()
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, *rest)
