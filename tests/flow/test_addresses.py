"""Which addresses a daemon dials, end to end: URLs stored without the API's checks, and hostile DNS.

The daemon runs with the tests' resolver and records its dials (tests/support/site) outside of the guard, with
Python's audit event for connects. The endpoint counts its connections.
"""

import asyncio
from pathlib import Path

from tests.flow.conftest import HELD, PATIENT, SHORT, MakeDaemon
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.names import Names
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from tests.unit.outbound.test_addresses import BLOCKED
from tests.unit.outbound.test_urls import REFUSED, literal

ADDRESSES = [address for addresses in BLOCKED.values() for address in addresses]
ONCE = {"max_attempts": 1}

ALL_SETTLED = """
    select count(*) = $1 from webhookd.webhook_delivery_sagas where status in ('Completed', 'DeadLettered')
"""
COMPLETED_OF = """
    select status = 'Completed' from webhookd.webhook_delivery_sagas where subscription_id = $1
"""
ATTEMPT_ENDED = """
    select exists (
        select from webhookd.webhook_delivery_jobs where subscription_id = $1 and finished_at is not null)
"""
ATTEMPTED_WITH = """
    select exists (select from webhookd.webhook_delivery_jobs where subscription_id = $1 and error_code = $2)
"""


def url_host(address: str) -> str:
    """Format an address for a URL."""
    return f"[{address}]" if ":" in address else address


async def deliver_to(flow: Flow, hosts: list[str], port: int) -> dict[str, str | None]:
    """Deliver one event to each host, stored without the API's checks; the error code of each attempt."""
    subscriptions = {host: await flow.subscribe(callback_url=f"https://{host}:{port}/hook") for host in hosts}
    await flow.publish()
    await until(flow.daemon, ALL_SETTLED, len(hosts))
    codes = {}
    for host, subscription_id in subscriptions.items():
        [attempt] = await flow.attempts(subscription_id)
        codes[host] = attempt["error_code"]
    return codes


async def test_without_allowed_networks_nothing_private_is_dialled(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """Every address of part A, as a literal and behind a name, including this machine's own."""
    named = [f"n{number}.hooks.example" for number in range(len(ADDRESSES))]
    for name, address in zip(named, ADDRESSES, strict=True):
        names.answer(name, address)
    daemon = make_daemon(names.environment, delivery=HELD | {"allow_networks": []}, retry=ONCE)
    await daemon.start()
    hosts = [*map(url_host, ADDRESSES), *named]
    assert await deliver_to(flow, hosts, endpoint.port) == dict.fromkeys(hosts, "ADDRESS_BLOCKED")
    assert names.dials == set()
    assert endpoint.connections == []
    assert set(names.lookups) == set(named)
    assert daemon.metric("webhookd_service_restarts_total") == 0


async def test_only_the_allowed_address_is_dialled(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """With 127.0.0.1 allowed: neighbours, numeric hosts, and mixed, empty and invalid names."""
    names.answer("hooks.example", "127.0.0.1")
    names.answer("mixed.hooks.example", "10.0.0.1", "127.0.0.1", "169.254.169.254", "::1")
    names.answer("neighbour.hooks.example", "127.0.0.2")
    names.answer("six.hooks.example", "::1")
    names.answer("all-bad.hooks.example", "10.0.0.1", "fe80::1", "192.168.0.1")
    names.answer("0x7f000002", "127.0.0.2")  # like the machine's resolver
    names.answer("0x7f.0.0.2", "127.0.0.2")
    expected: dict[str, str | None] = {
        "127.0.0.1": None,
        "hooks.example": None,
        "mixed.hooks.example": None,
        "127.0.0.2": "ADDRESS_BLOCKED",
        "127.255.255.254": "ADDRESS_BLOCKED",
        "[::1]": "ADDRESS_BLOCKED",
        "[::ffff:127.0.0.2]": "ADDRESS_BLOCKED",
        "10.0.0.1": "ADDRESS_BLOCKED",
        "neighbour.hooks.example": "ADDRESS_BLOCKED",
        "six.hooks.example": "ADDRESS_BLOCKED",
        "all-bad.hooks.example": "ADDRESS_BLOCKED",
        "0x7f000002": "ADDRESS_BLOCKED",
        "0x7f.0.0.2": "ADDRESS_BLOCKED",
        "2130706433": "ADDRESS_BLOCKED",
        "127.1": "ADDRESS_BLOCKED",
        "0177.0.0.1": "ADDRESS_BLOCKED",
        "017700000001": "ADDRESS_BLOCKED",
        "0": "ADDRESS_BLOCKED",
        "nowhere.hooks.example": "DNS_FAILED",
        "a..b": "DNS_FAILED",
        f"{'a' * 64}.example": "DNS_FAILED",
    }
    allowed = {"allow_networks": ["127.0.0.1/32"]}
    await make_daemon(names.environment, delivery=HELD | allowed, retry=ONCE).start()
    assert await deliver_to(flow, list(expected), endpoint.port) == expected
    assert names.dials == {("127.0.0.1", endpoint.port)}
    assert len(endpoint.requests) == 3


async def test_dns_rebinding_is_blocked(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """The first attempts are dialled and fail; then the name resolves to a private address."""
    moves = {"a.hooks.example": "127.0.0.2", "b.hooks.example": "10.0.0.1", "c.hooks.example": "::1"}
    endpoint.answer(500, headers={"Connection": "close"})  # a new connection for each attempt
    subscriptions = {}
    for name in moves:
        names.answer(name, "127.0.0.1")
        subscriptions[name] = await flow.subscribe(callback_url=endpoint.url(f"/{name}", name))
    allowed = {"allow_networks": ["127.0.0.1/32"]}
    await make_daemon(names.environment, delivery=HELD | allowed, retry=PATIENT).start()
    await flow.publish()
    for name, address in moves.items():
        await endpoint.received(1, f"/{name}")
        names.answer(name, address)
    for name, subscription_id in subscriptions.items():
        await until(flow.daemon, ATTEMPTED_WITH, subscription_id, "ADDRESS_BLOCKED")
        codes = [attempt["error_code"] for attempt in await flow.attempts(subscription_id)]
        assert codes[0] == "HTTP_500"
        assert "HTTP_500" not in codes[codes.index("ADDRESS_BLOCKED") :], name
    assert names.dials == {("127.0.0.1", endpoint.port)}


async def test_at_most_four_of_five_hundred_addresses_are_dialled(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """A name with many addresses does not cost many dials."""
    names.answer("hooks.example", *(f"127.1.{n // 250}.{n % 250 + 1}" for n in range(500)))
    await make_daemon(names.environment, delivery=HELD, retry=ONCE).start()
    codes = await deliver_to(flow, ["hooks.example"], endpoint.port)
    assert codes == {"hooks.example": "CONNECT_FAILED"}
    assert len(names.dials) == 4


async def test_unanswered_dns_lookup_times_out(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """The deadline covers DNS: nothing is dialled, and another name is delivered to."""
    names.stay_silent("silent.hooks.example")
    names.answer("hooks.example", "127.0.0.1")
    silent = await flow.subscribe(callback_url=endpoint.url("/silent", "silent.hooks.example"))
    good = await flow.subscribe(callback_url=endpoint.url("/good", "hooks.example"))
    await make_daemon(names.environment, delivery=SHORT, retry=PATIENT).start()
    await flow.publish()
    await until(flow.daemon, ATTEMPTED_WITH, silent, "TIMEOUT")
    await until(flow.daemon, COMPLETED_OF, good)  # the first attempt with enough time for a handshake
    assert {attempt["error_code"] for attempt in await flow.attempts(silent)} <= {"TIMEOUT", None}
    assert names.dials == {("127.0.0.1", endpoint.port)}


async def test_unanswered_dns_lookups_do_not_delay_other_names(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """With forty lookups pending, an event for another name arrives."""
    silent = [f"s{number}.hooks.example" for number in range(40)]
    names.stay_silent(*silent)
    names.answer("hooks.example", "127.0.0.1")
    for name in silent:
        await flow.subscribe("silent", endpoint.url("/silent", name))
    good = await flow.subscribe("good", endpoint.url("/good", "hooks.example"))
    daemon = await make_daemon(names.environment, delivery=HELD, retry=PATIENT).start()
    await flow.publish("silent")
    await daemon.until(lambda: sorted(names.lookups) == sorted(silent), "looking up")
    await flow.publish("good")
    await until(flow.daemon, ATTEMPT_ENDED, good)
    assert [attempt["error_code"] for attempt in await flow.attempts(good)] == [None]


async def test_unanswered_dns_lookup_does_not_delay_shutdown(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon
) -> None:
    """After SIGTERM during a pending lookup the daemon stops."""
    names.stay_silent("silent.hooks.example")
    await flow.subscribe(callback_url=endpoint.url("/hook", "silent.hooks.example"))
    daemon = await make_daemon(names.environment, delivery=SHORT).start()
    await flow.publish()
    await daemon.until(lambda: names.lookups == ["silent.hooks.example"], "looking up")
    daemon.sigterm()
    await daemon.until(lambda: daemon.logged("stopped"), "ended")
    assert await asyncio.wait_for(daemon.ended(), CONDITION_TIMEOUT_SECONDS) == 0


async def test_daemon_does_not_dial_its_own_api(flow: Flow, names: Names, make_daemon: MakeDaemon) -> None:
    """A43: even in an allowed network, by address and by name."""
    names.answer("hooks.example", "127.0.0.1")
    daemon = await make_daemon(names.environment, delivery=HELD, retry=ONCE).start()
    codes = await deliver_to(flow, ["127.0.0.1", "[::ffff:127.0.0.1]", "hooks.example"], daemon.port)
    assert set(codes.values()) == {"ADDRESS_BLOCKED"}
    assert names.dials == set()


async def test_proxy_and_netrc_of_the_environment_are_ignored(
    flow: Flow, endpoint: Endpoint, names: Names, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """F11: the request goes directly to the endpoint, and nothing is added to it."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    proxy = "http://127.0.0.9:9"
    variables = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    environment = {
        **names.environment,
        **dict.fromkeys(variables, proxy),
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / ".netrc"),
    }
    await make_daemon(environment, delivery=HELD, retry=ONCE).start()
    assert await deliver_to(flow, ["127.0.0.1"], endpoint.port) == {"127.0.0.1": None}
    [request] = endpoint.requests
    assert "authorization" not in request.headers
    assert names.dials == {("127.0.0.1", endpoint.port)}


async def test_api_rejects_every_bad_url(flow: Flow, make_daemon: MakeDaemon) -> None:
    """Part A as text: 422 with the code of the problem, and nothing is stored."""
    daemon = await make_daemon(delivery={"allow_networks": []}).start()
    refused = {url: code for cases in REFUSED.values() for url, code in cases}
    refused |= dict.fromkeys(map(literal, ADDRESSES), "blocked_address")
    responses = {}
    for url in refused:
        status, problem = daemon.post_json("/v1/subscriptions", {"event_type": "a", "callback_url": url})
        responses[url] = (status, problem["code"])
    expected = {url: (422, code) for url, code in refused.items()}
    expected["https://example.com/\ud800"] = (400, "malformed_json")  # half a surrogate pair: not valid JSON
    assert responses == expected
    assert await flow.daemon.fetchval("select count(*) from webhookd.subscriptions") == 0
