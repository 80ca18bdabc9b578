"""Fixtures for outbound: certificates, an endpoint, clients, and a fence around loopback.

The fence records every dialled address. It fails a dial outside of 127.0.0.0/8 and ::1, and any use of the
machine's resolver.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from ipaddress import ip_address
from typing import Any, Protocol

import pytest

from tests.support.certificates import Certificates
from tests.support.endpoint import Endpoint
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS
from webhookd.outbound import client as client_module
from webhookd.outbound.addresses import AddressPolicy, IPAddress
from webhookd.outbound.client import ClientOptions, GuardedClient, trusted_tls
from webhookd.outbound.exchange import Exchange
from webhookd.outbound.outcome import Outcome

LOOPBACK = ("127.0.0.0/8",)
# For requests that end earlier: it only ends a test that hangs.
DEADLINE_SECONDS = float(CONDITION_TIMEOUT_SECONDS)
# Longer than any test, so that no timeout but the tested one can end anything.
NEVER_SECONDS = 3600.0
Dialled = list[tuple[str, int]]


class Names:
    """A fake resolver. A name without an entry in `answers` does not exist."""

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[str]] = {}
        self.lookups: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:  # noqa: ARG002 - the lookup's signature
        self.lookups.append(host)
        await asyncio.sleep(0)  # like a real lookup, let other tasks run first
        if host not in self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.answers[host]


class MakeClient(Protocol):
    """Makes clients that are closed at the end of the test."""

    def __call__(
        self,
        allow: Sequence[str] = LOOPBACK,
        own: frozenset[tuple[IPAddress, int]] = frozenset(),
        max_response_bytes: int = 65536,
    ) -> GuardedClient:
        """Make a client that trusts the tests' authority."""


@pytest.fixture
def sockets() -> list[socket.socket]:
    """The sockets that the test dialled."""
    return []


@pytest.fixture(autouse=True)
def dialled(monkeypatch: pytest.MonkeyPatch, sockets: list[socket.socket]) -> Dialled:
    """The addresses that were really dialled, in order."""
    made: Dialled = []
    loop_class = asyncio.selector_events.BaseSelectorEventLoop
    connect = loop_class.sock_connect

    async def sock_connect(self: Any, sock: socket.socket, address: Any) -> None:
        assert ip_address(address[0]).is_loopback, f"dialled {address}"
        made.append((address[0], address[1]))
        sockets.append(sock)
        await connect(self, sock, address)

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"used the machine's resolver for {host}")

    monkeypatch.setattr(loop_class, "sock_connect", sock_connect)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return made


@pytest.fixture(autouse=True)
def no_default_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable keep-alive expiry and the loop's default TLS timeouts."""
    monkeypatch.setattr(client_module, "_KEEPALIVE_SECONDS", NEVER_SECONDS)
    monkeypatch.setattr("asyncio.constants.SSL_HANDSHAKE_TIMEOUT", NEVER_SECONDS)
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", NEVER_SECONDS)


class Signal:
    """An event of the test's loop that the endpoint can await in its own loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        waiting = asyncio.wait_for(self._event.wait(), CONDITION_TIMEOUT_SECONDS)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waiting, self._loop))


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> Signal:
    """Return a signal that is set when a method of any new Exchange has been called."""
    signal, method = Signal(), getattr(Exchange, name)

    def noticed(exchange: Exchange, *arguments: object) -> None:
        method(exchange, *arguments)
        signal.set()

    monkeypatch.setattr(Exchange, name, noticed)
    return signal


async def at_its_deadline(monkeypatch: pytest.MonkeyPatch, request: Awaitable[Outcome]) -> Outcome:
    """Let DEADLINE_SECONDS pass at once; returns the outcome of a request in flight."""
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + DEADLINE_SECONDS)
    return await asyncio.wait_for(request, CONDITION_TIMEOUT_SECONDS)


async def until_closed(sockets: list[socket.socket]) -> None:
    """Wait until all sockets are closed."""
    deadline = time.monotonic() + CONDITION_TIMEOUT_SECONDS
    while any(made.fileno() != -1 for made in sockets):
        if time.monotonic() > deadline:
            raise AssertionError(f"left open: {sockets}")
        await asyncio.sleep(POLL_INTERVAL_SECONDS)


@pytest.fixture
async def nothing_left_open(sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Fail a test that closes its clients but leaves connections open."""
    yield
    await until_closed(sockets)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The local authority and its certificates."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def tls(certificates: Certificates) -> ssl.SSLContext:
    """A context that trusts the local authority; made once, because reading the system's takes a while."""
    return trusted_tls(certificates.ca_file)


@pytest.fixture
def names() -> Names:
    """The resolver of the test's clients."""
    return Names()


@pytest.fixture
def endpoint(certificates: Certificates) -> Iterator[Endpoint]:
    """An endpoint with a valid certificate that answers 200 by default."""
    # The fence does not matter here: listening on a numeric address resolves nothing.
    with Endpoint(certificates.good) as endpoint:
        yield endpoint


@pytest.fixture
async def make_client(tls: ssl.SSLContext, names: Names) -> AsyncIterator[MakeClient]:
    """A factory of clients, which may dial loopback by default."""
    clients: list[GuardedClient] = []

    def make(
        allow: Sequence[str] = LOOPBACK,
        own: frozenset[tuple[IPAddress, int]] = frozenset(),
        max_response_bytes: int = 65536,
    ) -> GuardedClient:
        options = ClientOptions(
            AddressPolicy.of(allow),
            tls,
            own_addresses=own,
            max_response_bytes=max_response_bytes,
        )
        clients.append(GuardedClient(options, names))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
async def client(make_client: MakeClient) -> GuardedClient:
    """A client that may dial loopback."""
    return make_client()
