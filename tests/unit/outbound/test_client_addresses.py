"""The guard at dial time: part A of the bad inputs again, with real dials.

Each test of a blocked address checks that nothing was dialled. The fence in conftest.py fails any dial
outside of loopback.
"""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import pytest

from tests.support.endpoint import Endpoint
from tests.unit.outbound.conftest import DEADLINE_SECONDS, Dialled, MakeClient, Names
from tests.unit.outbound.test_addresses import BLOCKED_ADDRESSES
from tests.unit.outbound.test_urls import literal
from webhookd.outbound.addresses import AddressBlocked, AddressPolicy, DialCounters, Guard
from webhookd.outbound.client import ClientOptions, GuardedClient
from webhookd.outbound.dialling import SystemLookup

pytestmark = pytest.mark.usefixtures("nothing_left_open")

SHORT_DEADLINE_SECONDS = 0.3


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
async def test_a_blocked_literal_is_never_dialled(
    make_client: MakeClient, dialled: Dialled, names: Names, address: str
) -> None:
    """A literal address never reaches the resolver: the socket factory alone refuses it."""
    outcome = await make_client(allow=()).post(literal(address), {}, b"{}", DEADLINE_SECONDS)
    assert (outcome.response_status, outcome.error_code) == (None, "ADDRESS_BLOCKED")
    assert dialled == []
    assert names.lookups == []


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
async def test_a_name_with_a_blocked_address_is_never_dialled(
    make_client: MakeClient, dialled: Dialled, names: Names, address: str
) -> None:
    """A38, A40: the current addresses of the name decide, in both IP versions."""
    names.answers["hooks.example"] = [address]
    outcome = await make_client(allow=()).post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert dialled == []


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
def test_socket_factory_refuses_blocked_addresses(address: str) -> None:
    """Without any earlier check, no socket is created for a blocked address."""
    counters = DialCounters()
    guard = Guard(AddressPolicy(), frozenset(), counters)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(AddressBlocked):
        guard.make_socket((family, socket.SOCK_STREAM, 0, "", (address, 443)))
    assert (counters.dials, counters.blocked) == (0, 1)


@pytest.mark.parametrize("host", ["fe80::1%lo", "hooks.example", "", "127.1"])
def test_socket_factory_refuses_anything_but_an_address(host: str) -> None:
    """A21: text that is not an address is not dialled, whatever networks are allowed."""
    guard = Guard(AddressPolicy.of(["0.0.0.0/0", "::/0"]), frozenset(), DialCounters())
    with pytest.raises(AddressBlocked):
        guard.make_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 443)))


@pytest.mark.parametrize(
    "host",
    [
        pytest.param(host, id=f"A24-{host}")
        for host in ("2130706433", "127.1", "0177.0.0.1", "017700000001", "0", "127.0.0.1.")
    ],
)
async def test_a_number_for_a_host_is_never_dialled(
    client: GuardedClient, dialled: Dialled, host: str
) -> None:
    """Refused even where loopback is allowed: there is no legitimate use for such a host."""
    outcome = await client.post(f"https://{host}/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code in ("ADDRESS_BLOCKED", "DNS_FAILED")
    assert dialled == []


@pytest.mark.parametrize("host", ["0x7f000001", "0x7f.0.0.1"])
async def test_a25_hexadecimal_host_is_blocked_by_its_address(
    make_client: MakeClient, dialled: Dialled, names: Names, host: str
) -> None:
    """The machine's resolver returns the address of such a host; the guard checks that."""
    names.answers[host] = ["127.0.0.1"]
    outcome = await make_client(allow=()).post(f"https://{host}/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert dialled == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "https://",
        "https://a..b/",
        "https://127.0.0.1:99999/",
        "https://h/\r\nX: y",
        "https://h/ü",
        "https://[::1/",
        "",
        "file:///etc/passwd",
    ],
)
async def test_a31_invalid_stored_url_is_an_outcome(
    client: GuardedClient, dialled: Dialled, url: str
) -> None:
    """An invalid URL in the table fails one delivery; nothing is raised or dialled."""
    outcome = await client.post(url, {}, b"{}", DEADLINE_SECONDS)
    assert outcome.response_status is None
    assert outcome.error_code in ("INTERNAL", "DNS_FAILED", "ADDRESS_BLOCKED")
    assert dialled == []


async def test_a38_checked_address_is_the_dialled_address(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """There is one lookup per connection, so a second DNS answer cannot replace the checked one."""
    names.answers["hooks.example"] = ["127.0.0.1"]
    outcome = await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.response_status == 200
    assert names.lookups == ["hooks.example"]
    assert dialled == [("127.0.0.1", endpoint.port)]
    assert endpoint.requests[0].headers["host"] == f"hooks.example:{endpoint.port}"


async def test_a38_name_is_blocked_once_it_resolves_to_a_blocked_address(
    make_client: MakeClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """A name that was public and becomes private is refused at the next dial."""
    client = make_client(allow=["127.0.0.1/32"])
    names.answers["hooks.example"] = ["127.0.0.1"]
    endpoint.answer(200, headers={"Connection": "close"})
    url = endpoint.url("/", "hooks.example")
    assert (await client.post(url, {}, b"{}", DEADLINE_SECONDS)).delivered
    client._names._lookups.clear()
    names.answers["hooks.example"] = ["127.0.0.2"]
    assert (await client.post(url, {}, b"{}", DEADLINE_SECONDS)).error_code == "ADDRESS_BLOCKED"
    assert dialled == [("127.0.0.1", endpoint.port)]


@pytest.mark.parametrize(
    "answers",
    [["10.0.0.1", "127.0.0.1"], ["127.0.0.1", "::1", "169.254.169.254"], ["fe80::1%2", "127.0.0.1"]],
)
async def test_a39_only_permitted_addresses_of_a_mixed_answer_are_dialled(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, names: Names, answers: Sequence[str]
) -> None:
    """Blocked addresses are dropped, the others are used, and the mixed answer is counted."""
    names.answers["hooks.example"] = answers
    outcome = await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.delivered
    assert dialled == [("127.0.0.1", endpoint.port)]
    assert client.counters.dns_mixed_answers == 1


async def test_a41_at_most_four_addresses_are_tried(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """Five hundred addresses cost four dials."""
    endpoint.stop_listening()
    names.answers["hooks.example"] = [f"127.0.{number // 250}.{number % 250 + 1}" for number in range(500)]
    outcome = await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "CONNECT_FAILED"
    assert len(set(dialled)) == 4


async def test_a41_both_ip_versions_are_tried(
    make_client: MakeClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """Many addresses of one IP version do not displace the only address of the other."""
    client = make_client(allow=["127.0.0.0/8", "::1/128"])
    names.answers["hooks.example"] = [*(f"127.0.1.{number}" for number in range(1, 9)), "::1"]
    endpoint.stop_listening()
    await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert len(set(dialled)) == 4
    assert ("::1", endpoint.port) in dialled


async def test_a41_the_lookup_is_inside_the_deadline(tls: ssl.SSLContext, dialled: Dialled) -> None:
    """A DNS server that never answers leads to a timeout."""

    async def never(_: str, __: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    options = ClientOptions(AddressPolicy(), tls)
    async with GuardedClient(options, never) as client:
        outcome = await client.post("https://hooks.example/", {}, b"{}", SHORT_DEADLINE_SECONDS)
    assert (outcome.response_status, outcome.error_code) == (None, "TIMEOUT")
    assert dialled == []


async def test_a41_concurrent_lookups_of_one_name_are_shared(
    make_client: MakeClient, dialled: Dialled, names: Names
) -> None:
    """Many deliveries to a slow name use one thread, and all get its result."""
    client = make_client(allow=())
    names.answers["hooks.example"] = ["10.0.0.1"]
    posts = (client.post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS) for _ in range(10))
    outcomes = await asyncio.gather(*posts)
    assert {outcome.error_code for outcome in outcomes} == {"ADDRESS_BLOCKED"}
    assert names.lookups == ["hooks.example"]
    assert dialled == []


@pytest.mark.parametrize("answers", [None, []], ids=["A42-NXDOMAIN", "A42-no address"])
async def test_a_name_without_an_address_fails_as_dns(
    client: GuardedClient, names: Names, answers: Sequence[str] | None
) -> None:
    """A DNS failure is reported as such, and not as a failure of the endpoint."""
    if answers is not None:
        names.answers["hooks.example"] = answers
    outcome = await client.post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS)
    assert (outcome.response_status, outcome.error_code) == (None, "DNS_FAILED")


@pytest.mark.parametrize("host", ["127.0.0.1", "hooks.example", "[::ffff:127.0.0.1]"])
@pytest.mark.parametrize("own", ["127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"])  # noqa: S104 - refused, not bound
async def test_a43_own_address_is_blocked_even_in_an_allowed_network(
    make_client: MakeClient, endpoint: Endpoint, dialled: Dialled, names: Names, own: str, host: str
) -> None:
    """The API cannot be reached by address, name, mapped address, or when it listens on all addresses."""
    client = make_client(own=frozenset({(ip_address(own), endpoint.port)}))
    names.answers["hooks.example"] = ["127.0.0.1"]
    outcome = await client.post(endpoint.url("/", host), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert dialled == []


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.0.9"])
async def test_a43_other_port_or_address_is_not_blocked(
    make_client: MakeClient, endpoint: Endpoint, own: str
) -> None:
    """Only the combination of address and port is blocked."""
    port = endpoint.port + (own == "127.0.0.1")
    client = make_client(own=frozenset({(ip_address(own), port)}))
    assert (await client.post(endpoint.url(), {}, b"{}", DEADLINE_SECONDS)).delivered


def test_a43_listening_everywhere_blocks_local_addresses_only() -> None:
    """Listening on all addresses blocks the port on this machine only. Sends nothing."""
    own = frozenset({(ip_address("0.0.0.0"), 8470)})  # noqa: S104 - refused, not bound
    guard = Guard(AddressPolicy(), own, DialCounters())
    assert guard.permits(ip_address("8.8.8.8"), 8470)


async def test_old_connection_does_not_bypass_a_narrower_policy(
    make_client: MakeClient, endpoint: Endpoint, tls: ssl.SSLContext, dialled: Dialled
) -> None:
    """A reload closes connections that were made under the old policy."""
    client = make_client()
    assert (await client.post(endpoint.url(), {}, b"{}", DEADLINE_SECONDS)).delivered
    client.reconfigure(ClientOptions(AddressPolicy(), tls))
    outcome = await client.post(endpoint.url(), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert len(dialled) == len(endpoint.requests) == 1


async def test_system_lookup_keeps_zones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Link-local addresses keep their interface, so the policy refuses them; invalid names raise."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        host.encode("idna")
        v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", port, 0, 2))
        return [v6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    lookup = SystemLookup()
    assert await lookup("hooks.example", 443) == ["fe80::1%2", "127.0.0.1"]
    with pytest.raises(UnicodeError):
        await lookup("a..b", 443)


async def test_a31_unencodable_name_fails_as_dns(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's resolver raises a bare UnicodeError, which becomes an outcome."""

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        host.encode("idna")
        raise AssertionError("not to be reached")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    options = ClientOptions(AddressPolicy(), tls)
    async with GuardedClient(options) as client:
        outcome = await client.post(f"https://{'a' * 64}.example/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "DNS_FAILED"
