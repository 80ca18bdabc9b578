"""Which IP addresses may be dialled: the policy (pure), and the guard that applies it to every dial.

The lists are our own: `ipaddress.is_global` differs between Python versions, and treats multicast, NAT64,
6to4 and relay addresses as global in the versions we support.

A name is resolved once, the result is filtered, and only the remaining addresses are dialled. The guard's
socket factory checks every address that is really dialled, including literal addresses in URLs.
"""

import errno
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import chain, zip_longest
from typing import Any, Self, TypeAlias

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network
# The argument of a socket factory of aiohappyeyeballs.
AddressInfo: TypeAlias = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]

# A name may have five hundred unreachable addresses; it must not cost five hundred dials.
MAX_ADDRESSES_TRIED = 4

_BLOCKED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network; Linux connects 0.0.0.0 to the machine itself
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and Alibaba's metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host agent: a public address that every Azure machine reaches
        "169.254.0.0/16",  # link-local, and most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, and Oracle's metadata
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # multicast tunnels
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)

# Contains every public address, so ::, ::1, IPv4-compatible, NAT64 (64:ff9b::/96, 64:ff9b:1::/48), 100::/64,
# 5f00::/16, fc00::/7, fe80::/10, fec0::/10 and ff00::/8 need no entry below.
_GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
_BLOCKED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: the embedded address may be any
        "2620:4f:8000::/48",  # AS112
        "3ffe::/16",  # the former 6bone
        "3fff::/20",  # documentation
    )
)


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Permits public unicast addresses, and the networks that the operator allows."""

    allow_networks: tuple[IPNetwork, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str]) -> Self:
        """Build a policy from a list of CIDRs; ValueError if one is invalid."""
        return cls(tuple(ip_network(network) for network in networks))

    def permits(self, address: IPAddress) -> bool:
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return False
        address = unmapped(address)
        # `in` is False for a network of the other IP version.
        return any(address in network for network in self.allow_networks) or _is_public(address)


class AddressBlocked(OSError):
    """A dial was refused before it was made. An OSError, because aiohappyeyeballs passes on nothing else."""

    def __init__(self) -> None:
        # Always the same text: aiohappyeyeballs replaces errors that differ by an error of its own.
        super().__init__(errno.EACCES, "the address is not allowed")


@dataclass(slots=True)
class DialCounters:
    """Totals for the metrics."""

    dials: int = 0
    blocked: int = 0
    dns_mixed_answers: int = 0


@dataclass(frozen=True, slots=True)
class Guard:
    """Applies the policy, and blocks the daemon's own listening addresses even in an allowed network."""

    policy: AddressPolicy
    own_addresses: frozenset[tuple[IPAddress, int]]
    counters: DialCounters

    def permits(self, address: IPAddress, port: int) -> bool:
        return self.policy.permits(address) and not self._is_own(unmapped(address), port)

    def make_socket(self, info: AddressInfo) -> socket.socket:
        """Create the socket for an address to dial; AddressBlocked if the address is not permitted."""
        family, kind, protocol, _, address = info
        host, port = str(address[0]), int(address[1])
        if not _permits_text(self, host, port):
            self.counters.blocked += 1
            raise AddressBlocked
        self.counters.dials += 1
        return socket.socket(family, kind, protocol)

    def permitted(self, addresses: Sequence[str], port: int) -> list[str]:
        """Select the addresses of a name to try; AddressBlocked if none is permitted."""
        permitted = [address for address in addresses if _permits_text(self, address, port)]
        if not permitted:
            self.counters.blocked += 1
            raise AddressBlocked
        if len(permitted) < len(addresses):
            self.counters.dns_mixed_answers += 1
        return _first_of_both_families(permitted)

    def _is_own(self, address: IPAddress, port: int) -> bool:
        return any(
            port == own_port and (address == unmapped(own) or (own.is_unspecified and _is_local(address)))
            for own, own_port in self.own_addresses
        )


def unmapped(address: IPAddress) -> IPAddress:
    """Convert an IPv4-mapped IPv6 address to the IPv4 address that the kernel dials."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _BLOCKED_V4)
    return address in _GLOBAL_UNICAST_V6 and not any(address in network for network in _BLOCKED_V6)


def _permits_text(guard: Guard, host: str, port: int) -> bool:
    try:
        return guard.permits(ip_address(host), port)
    except ValueError:
        return False  # not an address, so no rule was applied to it


def _is_local(address: IPAddress) -> bool:
    """Whether an address belongs to this machine: only such addresses can be bound. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def _first_of_both_families(addresses: list[str]) -> list[str]:
    """Limit the number, and keep both IP versions if there are both: one of them may not work."""
    first_is_v6 = ":" in addresses[0]
    same = [address for address in addresses if (":" in address) == first_is_v6]
    other = [address for address in addresses if (":" in address) != first_is_v6]
    pairs = chain.from_iterable(zip_longest(same, other))
    return [address for address in pairs if address is not None][:MAX_ADDRESSES_TRIED]
