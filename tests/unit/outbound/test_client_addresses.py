"""Tests of the connect rule: part A of the bad inputs again, where the address is dialled or is not.

A test that blocks shows that nothing was dialled; the fence of conftest.py fails any dial beyond loopback.
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
from webhookd.outbound.names import SystemLookup

pytestmark = pytest.mark.usefixtures("nothing_left_open")

SHORT_DEADLINE_SECONDS = 0.3


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
async def test_a_blocked_literal_is_never_dialled(
    make_client: MakeClient, dialled: Dialled, names: Names, address: str
) -> None:
    """A literal never reaches a resolver: the socket factory alone stands between, and refuses."""
    outcome = await make_client(allow=()).post(literal(address), {}, b"{}", DEADLINE_SECONDS)
    assert (outcome.response_status, outcome.error_code) == (None, "ADDRESS_BLOCKED")
    assert dialled == []
    assert names.asked == []


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
async def test_a_name_with_a_blocked_address_is_never_dialled(
    make_client: MakeClient, dialled: Dialled, names: Names, address: str
) -> None:
    """A38, A40: what the name says now is what counts, in both families."""
    names.answers["hooks.example"] = [address]
    outcome = await make_client(allow=()).post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert dialled == []


@pytest.mark.parametrize("address", BLOCKED_ADDRESSES)
def test_the_socket_factory_alone_refuses(address: str) -> None:
    """Without any other check before it, no socket is made for a blocked address."""
    counters = DialCounters()
    guard = Guard(AddressPolicy(), frozenset(), counters)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(AddressBlocked):
        guard.make_socket((family, socket.SOCK_STREAM, 0, "", (address, 443)))
    assert (counters.dials, counters.blocked) == (0, 1)


@pytest.mark.parametrize("host", ["fe80::1%lo", "hooks.example", "", "127.1"])
def test_the_socket_factory_refuses_what_is_no_address(host: str) -> None:
    """A21: what cannot be judged is not dialled, whatever is allowed."""
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
    """Even where loopback is allowed: nobody who means it well writes it so."""
    outcome = await client.post(f"https://{host}/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code in ("ADDRESS_BLOCKED", "DNS_FAILED")
    assert dialled == []


@pytest.mark.parametrize("host", ["0x7f000001", "0x7f.0.0.1"])
async def test_a25_a_hexadecimal_host_is_blocked_by_what_it_resolves_to(
    make_client: MakeClient, dialled: Dialled, names: Names, host: str
) -> None:
    """The machine's resolver answers such a host with the address; the answer is judged."""
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
async def test_a31_a_url_that_no_rule_would_let_in_is_an_outcome(
    client: GuardedClient, dialled: Dialled, url: str
) -> None:
    """Whatever a row of the table holds, one delivery fails, and nothing is raised or dialled."""
    outcome = await client.post(url, {}, b"{}", DEADLINE_SECONDS)
    assert outcome.response_status is None
    assert outcome.error_code in ("INTERNAL", "DNS_FAILED", "ADDRESS_BLOCKED")
    assert dialled == []


async def test_a38_a_name_is_looked_up_once_and_what_was_judged_is_dialled(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """Between the check and the connection nobody asks again, so no second answer can slip in."""
    names.answers["hooks.example"] = ["127.0.0.1"]
    outcome = await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.response_status == 200
    assert names.asked == ["hooks.example"]
    assert dialled == [("127.0.0.1", endpoint.port)]
    assert endpoint.requests[0].headers["host"] == f"hooks.example:{endpoint.port}"


async def test_a38_a_name_that_changes_is_blocked_from_then_on(
    make_client: MakeClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """Good at first and private later: the later answer is refused when it comes to be dialled."""
    client = make_client(allow=["127.0.0.1/32"])
    names.answers["hooks.example"] = ["127.0.0.1"]
    endpoint.answer(200, headers={"Connection": "close"})
    url = endpoint.url("/", "hooks.example")
    assert (await client.post(url, {}, b"{}", DEADLINE_SECONDS)).delivered
    client._names.forget()
    names.answers["hooks.example"] = ["127.0.0.2"]
    assert (await client.post(url, {}, b"{}", DEADLINE_SECONDS)).error_code == "ADDRESS_BLOCKED"
    assert dialled == [("127.0.0.1", endpoint.port)]


@pytest.mark.parametrize(
    "answers",
    [["10.0.0.1", "127.0.0.1"], ["127.0.0.1", "::1", "169.254.169.254"], ["fe80::1%2", "127.0.0.1"]],
)
async def test_a39_of_a_mixed_answer_only_the_good_are_dialled(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, names: Names, answers: Sequence[str]
) -> None:
    """The blocked are dropped, the rest is used, and the mixture is counted."""
    names.answers["hooks.example"] = answers
    outcome = await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.delivered
    assert dialled == [("127.0.0.1", endpoint.port)]
    assert client.counters.dns_mixed_answers == 1


async def test_a41_of_many_addresses_few_are_tried(
    client: GuardedClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """Five hundred answers cost four addresses' dials."""
    endpoint.stop_listening()
    names.answers["hooks.example"] = [f"127.0.{number // 250}.{number % 250 + 1}" for number in range(500)]
    outcome = await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "CONNECT_FAILED"
    assert len(set(dialled)) == 4


async def test_a41_both_families_are_among_the_few(
    make_client: MakeClient, endpoint: Endpoint, dialled: Dialled, names: Names
) -> None:
    """Many addresses of one family do not hide the only one of the other."""
    client = make_client(allow=["127.0.0.0/8", "::1/128"])
    names.answers["hooks.example"] = [*(f"127.0.1.{number}" for number in range(1, 9)), "::1"]
    endpoint.stop_listening()
    await client.post(endpoint.url("/", "hooks.example"), {}, b"{}", DEADLINE_SECONDS)
    assert len(set(dialled)) == 4
    assert ("::1", endpoint.port) in dialled


async def test_a41_the_lookup_is_inside_the_deadline(tls: ssl.SSLContext, dialled: Dialled) -> None:
    """DNS that never answers is a timeout, not a hang."""

    async def never(_: str, __: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    options = ClientOptions(AddressPolicy(), tls)
    async with GuardedClient(options, never) as client:
        outcome = await client.post("https://hooks.example/", {}, b"{}", SHORT_DEADLINE_SECONDS)
    assert (outcome.response_status, outcome.error_code) == (None, "TIMEOUT")
    assert dialled == []


async def test_a41_lookups_of_one_name_are_one(
    make_client: MakeClient, dialled: Dialled, names: Names
) -> None:
    """Many deliveries to a slow name wait for one thread; and its refusal is the outcome of each."""
    client = make_client(allow=())
    names.answers["hooks.example"] = ["10.0.0.1"]
    posts = (client.post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS) for _ in range(10))
    outcomes = await asyncio.gather(*posts)
    assert {outcome.error_code for outcome in outcomes} == {"ADDRESS_BLOCKED"}
    assert names.asked == ["hooks.example"]
    assert dialled == []


@pytest.mark.parametrize("answers", [None, []], ids=["A42-NXDOMAIN", "A42-no address"])
async def test_a_name_without_an_address_fails_as_dns(
    client: GuardedClient, names: Names, answers: Sequence[str] | None
) -> None:
    """A failure of the name, told apart from one of the endpoint."""
    if answers is not None:
        names.answers["hooks.example"] = answers
    outcome = await client.post("https://hooks.example/", {}, b"{}", DEADLINE_SECONDS)
    assert (outcome.response_status, outcome.error_code) == (None, "DNS_FAILED")


@pytest.mark.parametrize("host", ["127.0.0.1", "hooks.example", "[::ffff:127.0.0.1]"])
@pytest.mark.parametrize("own", ["127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"])  # noqa: S104 - refused, not bound
async def test_a43_the_daemons_own_address_is_blocked_even_where_its_network_is_allowed(
    make_client: MakeClient, endpoint: Endpoint, dialled: Dialled, names: Names, own: str, host: str
) -> None:
    """No way back into the API: by address, by name, mapped, or when it listens on every address."""
    client = make_client(own=frozenset({(ip_address(own), endpoint.port)}))
    names.answers["hooks.example"] = ["127.0.0.1"]
    outcome = await client.post(endpoint.url("/", host), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert dialled == []


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.0.9"])
async def test_a43_another_port_or_address_is_not_our_own(
    make_client: MakeClient, endpoint: Endpoint, own: str
) -> None:
    """Only the pair of both is blocked."""
    port = endpoint.port + (own == "127.0.0.1")
    client = make_client(own=frozenset({(ip_address(own), port)}))
    assert (await client.post(endpoint.url(), {}, b"{}", DEADLINE_SECONDS)).delivered


def test_a43_an_address_of_others_is_not_this_machines() -> None:
    """Listening everywhere blocks the port here, and nowhere else. Asked of the kernel; nothing is sent."""
    own = frozenset({(ip_address("0.0.0.0"), 8470)})  # noqa: S104 - refused, not bound
    guard = Guard(AddressPolicy(), own, DialCounters())
    assert guard.permits(ip_address("8.8.8.8"), 8470)


async def test_reload_a_connection_from_before_does_not_bypass_a_narrower_policy(
    make_client: MakeClient, endpoint: Endpoint, tls: ssl.SSLContext, dialled: Dialled
) -> None:
    """A kept connection is of the policy that it was dialled under, and goes with it."""
    client = make_client()
    assert (await client.post(endpoint.url(), {}, b"{}", DEADLINE_SECONDS)).delivered
    client.reconfigure(ClientOptions(AddressPolicy(), tls))
    outcome = await client.post(endpoint.url(), {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "ADDRESS_BLOCKED"
    assert len(dialled) == len(endpoint.requests) == 1


async def test_the_machines_resolver_is_asked_in_a_thread_and_keeps_zones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Link-local answers come with their interface, so that the policy refuses them; names too odd raise."""

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        host.encode("idna")
        v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", port, 0, 2))
        return [v6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    lookup = SystemLookup()
    assert await lookup("hooks.example", 443) == ["fe80::1%2", "127.0.0.1"]
    with pytest.raises(UnicodeError):
        await lookup("a..b", 443)


async def test_a31_a_name_that_cannot_be_asked_for_fails_as_dns(
    tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's resolver raises a bare UnicodeError; with the machine's resolver, too, that is an outcome."""

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        host.encode("idna")
        raise AssertionError("not to be reached")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    options = ClientOptions(AddressPolicy(), tls)
    async with GuardedClient(options) as client:
        outcome = await client.post(f"https://{'a' * 64}.example/", {}, b"{}", DEADLINE_SECONDS)
    assert outcome.error_code == "DNS_FAILED"
