"""Which addresses may be dialled: rows A9 to A23 of the bad inputs, as addresses."""

from ipaddress import ip_address

import pytest

from webhookd.outbound.addresses import AddressPolicy

# By row; test_urls.py uses the same list as text, and test_client_addresses.py as dials.
BLOCKED = {
    "A9": ["127.0.0.1", "127.255.255.254", "0.0.0.0"],  # noqa: S104 - refused here, not bound
    "A10": ["10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1"],
    "A11": ["169.254.169.254", "100.64.0.1", "100.100.100.200", "100.127.255.255", "168.63.129.16"],
    "A13": [
        "192.0.0.1",
        "192.0.0.9",
        "192.0.0.192",
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "198.18.0.1",
        "198.19.255.255",
        "192.88.99.1",
        "192.31.196.1",
        "192.52.193.1",
        "192.175.48.1",
        "224.0.0.1",
        "233.252.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "0.1.2.3",
    ],
    "A15": ["::1", "::", "0:0:0:0:0:0:0:1", "::127.0.0.1", "::808:808"],
    "A16": ["::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"],
    "A18": ["64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1"],
    "A19": ["2002:7f00:1::1", "2002:808:808::1", "2001::1", "2001:0:53aa:64c:0:7fff:80ff:fffe"],
    "A21": ["fe80::1", "febf:ffff::1"],
    "A22": ["fc00::1", "fd00:ec2::254", "fd7a:115c:a1e0::1"],
    "A23": [
        "2001:db8::1",
        "3fff::1",
        "3fff:fff::1",
        "5f00::1",
        "100::1",
        "fec0::1",
        "ff02::1",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "4000::1",
        "ffff::1",
    ],
}
BLOCKED_ADDRESSES = [
    pytest.param(address, id=f"{row}-{address}")
    for row, addresses in BLOCKED.items()
    for address in addresses
]

# Public addresses next to blocked ranges.
PUBLIC = [
    "1.0.0.0",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "168.63.129.17",
    "169.253.255.255",
    "169.255.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.0.1.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "::ffff:8.8.8.8",
    "2000::1",
    "2001:200::1",
    "2001:4860:4860::8888",
    "2003::1",
    "2606:4700::1111",
    "3ffd:ffff::1",
]


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
def test_non_public_address_is_refused(address: str) -> None:
    """Every non-public range is blocked, including those that Python considers global."""
    assert not AddressPolicy().permits(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_permitted(address: str) -> None:
    """Neighbours of the blocked ranges are not blocked."""
    assert AddressPolicy().permits(ip_address(address))


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("127.0.0.1/32", "127.0.0.1", "127.0.0.2"),
        ("10.1.0.0/16", "::ffff:10.1.0.9", "10.2.0.1"),
        ("fd00::/8", "fd12::1", "fc00::1"),
        ("::1/128", "::1", "127.0.0.1"),
    ],
)
def test_allowed_network_permits_only_its_own_addresses(network: str, inside: str, outside: str) -> None:
    """An allowed network applies to its own IP version, and to IPv4-mapped addresses."""
    policy = AddressPolicy.of([network])
    assert policy.permits(ip_address(inside))
    assert not policy.permits(ip_address(outside))
    assert policy.permits(ip_address("8.8.8.8"))


def test_a21_an_address_with_a_zone_is_never_permitted() -> None:
    """An interface of this machine cannot be named, whatever networks are allowed."""
    assert not AddressPolicy.of(["fe80::/10"]).permits(ip_address("fe80::1%lo"))
    assert not AddressPolicy().permits(ip_address("2606:4700::1111%1"))


@pytest.mark.parametrize("network", ["10.0.0.1/8", "ten", "", "10.0.0.0/33"])
def test_invalid_network_is_rejected(network: str) -> None:
    """A network with host bits is an error, too."""
    with pytest.raises(ValueError, match=r"."):
        AddressPolicy.of([network])
