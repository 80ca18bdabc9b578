"""The gate before every dial: aiohttp asks it for addresses and for sockets, and it may say no.

Reads an AddressPolicy and our own addresses. A name is looked up once, its answer filtered, and what is left
is dialled; the socket factory sees every address really dialled, also those that were never looked up.
"""

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain, zip_longest
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from webhookd.outbound.addresses import AddressPolicy, IPAddress, unmapped

# A name with five hundred addresses, each a black hole, must not be dialled five hundred times.
MAX_ADDRESSES_TRIED = 4

# getaddrinfo blocks a thread until it gives up, long after our deadline: a name that DNS never answers keeps
# one, so there are many. Lookups of one name are one (the connector's cache joins them).
_LOOKUP_THREADS = 512

# What aiohttp hands a socket factory, and aiohappyeyeballs' own name for it.
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class AddressBlocked(OSError):
    """A dial that was refused before it was made. An OSError, for only those come through aiohttp whole."""

    def __init__(self) -> None:
        # The same words each time: from unlike errors of several addresses aiohappyeyeballs makes a new one.
        super().__init__(errno.EACCES, "the address is not allowed")


@dataclass(slots=True)
class Counters:
    """What the guard has seen, for the metrics; only ever grows."""

    dials: int = 0
    blocked: int = 0
    dns_mixed_answers: int = 0


@dataclass(frozen=True, slots=True)
class Guard:
    """The policy, and the daemon's own listening addresses, which no allowed network opens."""

    policy: AddressPolicy
    own_addresses: frozenset[tuple[IPAddress, int]]
    counters: Counters

    def permits(self, address: IPAddress, port: int) -> bool:
        return self.policy.permits(address) and not self._is_own(unmapped(address), port)

    def make_socket(self, info: AddressInfo) -> socket.socket:
        """The socket for an address about to be dialled, or AddressBlocked."""
        family, kind, protocol, _, address = info
        host, port = str(address[0]), int(address[1])
        if not _permits_text(self, host, port):
            self.counters.blocked += 1
            raise AddressBlocked
        self.counters.dials += 1
        return socket.socket(family, kind, protocol)

    def _is_own(self, address: IPAddress, port: int) -> bool:
        return any(
            port == own_port and (address == unmapped(own) or (own.is_unspecified and _is_here(address)))
            for own, own_port in self.own_addresses
        )


class GuardedResolver(AbstractResolver):
    """Looks names up, and gives aiohttp only addresses that may be dialled."""

    def __init__(self, guard: Guard, lookup: Lookup) -> None:
        self._guard = guard
        self._lookup = lookup

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - aiohttp's signature
    ) -> list[ResolveResult]:
        try:
            answers = list(dict.fromkeys(await self._lookup(host, port)))
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, "no name that DNS could hold") from error
        if not answers:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        permitted = [answer for answer in answers if _permits_text(self._guard, answer, port)]
        if not permitted:
            self._guard.counters.blocked += 1
            raise AddressBlocked
        if len(permitted) < len(answers):
            self._guard.counters.dns_mixed_answers += 1
        return [_result(host, answer, port) for answer in _first_of_both_families(permitted)]

    async def close(self) -> None:
        """Nothing here is to be closed: the lookup belongs to the client."""


class SystemLookup:
    """The machine's own resolver: a thread for each name, for getaddrinfo cannot be told to give up."""

    def __init__(self) -> None:
        self._threads = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        if self._threads >= _LOOKUP_THREADS:
            raise socket.gaierror(socket.EAI_AGAIN, "too many names are being looked up")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()
        self._threads += 1

        def look_up() -> None:
            try:
                found: list[str] | Exception = _look_up(host, port)
            except Exception as error:  # it is whoever asked that is to see it
                found = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._hand_over, answer, found)

        # Not of a pool: the interpreter waits at its end for a pool's threads, also for one that hangs.
        threading.Thread(target=look_up, name="webhookd-dns", daemon=True).start()
        return await answer

    def _hand_over(self, answer: "asyncio.Future[list[str]]", found: list[str] | Exception) -> None:
        self._threads -= 1
        if answer.done():
            return
        if isinstance(found, Exception):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def _look_up(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [_with_zone(*address) for *_, address in infos]


def _with_zone(host: Any, _port: Any, _flow: Any = 0, scope: Any = 0) -> str:
    """An answer as text, with the interface that a link-local one is of: the policy is to see that."""
    return f"{host}%{scope}" if scope and "%" not in host else str(host)


def _permits_text(guard: Guard, host: str, port: int) -> bool:
    try:
        return guard.permits(ip_address(host), port)
    except ValueError:
        return False  # whatever it is, it is no address that was judged


def _is_here(address: IPAddress) -> bool:
    """Tell whether an address is this machine's: only those can be bound. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _first_of_both_families(answers: list[str]) -> list[str]:
    """Few enough to try, and never of one family alone: the other may be the one that works."""
    first_is_v6 = ":" in answers[0]
    same = [answer for answer in answers if (":" in answer) == first_is_v6]
    other = [answer for answer in answers if (":" in answer) != first_is_v6]
    pairs = chain.from_iterable(zip_longest(same, other))
    return [answer for answer in pairs if answer is not None][:MAX_ADDRESSES_TRIED]


def _result(host: str, answer: str, port: int) -> ResolveResult:
    family = socket.AF_INET6 if ":" in answer else socket.AF_INET
    return ResolveResult(
        hostname=host, host=answer, port=port, family=family, proto=0, flags=socket.AI_NUMERICHOST
    )
