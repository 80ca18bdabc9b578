"""Which IP addresses may be dialled. Pure: an address in, yes or no out.

By lists of our own: `ipaddress.is_global` differs between Python versions, and calls multicast, NAT64, 6to4
and relay addresses global in those we support.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Self, TypeAlias

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network

_BLOCKED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network; Linux connects 0.0.0.0 to itself
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and Alibaba's metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host agent: a public address that every machine there reaches
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

# Everything public is in here; so ::, ::1, IPv4-compatible, NAT64 (64:ff9b::/96, 64:ff9b:1::/48), 100::/64,
# 5f00::/16, fc00::/7, fe80::/10, fec0::/10 and ff00::/8 need no line of their own below.
_GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
_BLOCKED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: the address inside may be anything
        "2620:4f:8000::/48",  # AS112
        "3ffe::/16",  # the former 6bone
        "3fff::/20",  # documentation
    )
)


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Public unicast addresses, and what the operator allows beside them."""

    allow_networks: tuple[IPNetwork, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str]) -> Self:
        """The policy of a list of CIDRs; ValueError for what is none."""
        return cls(tuple(ip_network(network) for network in networks))

    @property
    def allows_private_names(self) -> bool:
        """Whoever opened a private network wants to reach it by its private names too."""
        return bool(self.allow_networks)

    def permits(self, address: IPAddress) -> bool:
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            return False
        address = unmapped(address)
        # A network of the other family contains nothing of this one.
        return any(address in network for network in self.allow_networks) or _is_public(address)


def unmapped(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv4-mapped one stands for: the kernel dials that."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _BLOCKED_V4)
    return address in _GLOBAL_UNICAST_V6 and not any(address in network for network in _BLOCKED_V6)
