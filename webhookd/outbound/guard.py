"""The gate before every dial: it is asked for addresses and for sockets, and may say no.

Reads an AddressPolicy and our own addresses. A name is looked up once, its answer filtered, and what is left
is dialled; the socket factory sees every address really dialled, also those that were never looked up.
"""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain, zip_longest
from typing import Any

from webhookd.outbound.addresses import AddressPolicy, IPAddress, unmapped

# A name with five hundred addresses, each a black hole, must not be dialled five hundred times.
MAX_ADDRESSES_TRIED = 4

# What aiohappyeyeballs hands a socket factory.
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


class AddressBlocked(OSError):
    """A dial that was refused before it was made. An OSError: aiohappyeyeballs lets only those through."""

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

    def permitted(self, answers: Sequence[str], port: int) -> list[str]:
        """Of a name's addresses the few that may be dialled, and are to be tried; AddressBlocked for none."""
        permitted = [answer for answer in answers if _permits_text(self, answer, port)]
        if not permitted:
            self.counters.blocked += 1
            raise AddressBlocked
        if len(permitted) < len(answers):
            self.counters.dns_mixed_answers += 1
        return _first_of_both_families(permitted)

    def _is_own(self, address: IPAddress, port: int) -> bool:
        return any(
            port == own_port and (address == unmapped(own) or (own.is_unspecified and _is_here(address)))
            for own, own_port in self.own_addresses
        )


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
