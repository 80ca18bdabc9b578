"""Fixtures of the daemon tests: a trusted endpoint, daemon instances, API clients."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.api import Client
from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.invariants import AUDIT
from tests.support.names import Names
from tests.support.traffic import Receiver
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

MakeDaemon = Callable[..., DaemonProcess]
MakeApi = Callable[..., Awaitable[Client]]

# A lease is at least five seconds longer than the timeout.
SHORT = {"timeout_seconds": 1.0, "lease_seconds": 7.0}
# Longer than any test: a held request does not time out during a test.
HELD = {"timeout_seconds": 600.0, "lease_seconds": 605.0}
PATIENT = {"max_attempts": 1000}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return a local certificate authority and its certificates."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def database(fresh_database: Database) -> Database:
    """Use a database per test: a daemon has many sessions, and a test may kill it at any moment."""
    return fresh_database


@pytest.fixture
def endpoint(certificates: Certificates) -> Iterator[Endpoint]:
    """Return a webhook endpoint that answers 200."""
    with Endpoint(certificates.good) as endpoint:
        yield endpoint


@pytest.fixture
async def receiver(flow: Flow, endpoint: Endpoint) -> Receiver:
    """Return a receiver with a subscription, in a database that audits saga changes."""
    await flow.superuser.execute(AUDIT)
    receiver = Receiver(endpoint)
    await receiver.subscribe(flow)
    return receiver


@pytest.fixture
def make_daemon(database: Database, certificates: Certificates, tmp_path: Path) -> Iterator[MakeDaemon]:
    """Return a function that makes instances with short poll and retry intervals, stopped after the test."""
    made: list[DaemonProcess] = []

    def make(environment: Mapping[str, str] | None = None, **sections: dict[str, Any]) -> DaemonProcess:
        folder = tmp_path / f"instance{len(made)}"
        folder.mkdir()
        daemon = DaemonProcess(
            folder,
            database.dsn("daemon"),
            environment,
            delivery={"ca_file": str(certificates.ca_file), "allow_networks": ["127.0.0.0/8"]},
            retry={"base_delay_seconds": 0.05, "max_delay_seconds": 0.2},
            services={"poll_interval_seconds": 0.1},
            reaper={"interval_seconds": 0.2},
        )
        daemon.is_forked = True
        daemon.configure(**sections)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.stop()


@pytest.fixture
def names(tmp_path: Path) -> Names:
    """Return a DNS table for daemons that are started with its environment."""
    folder = tmp_path / "names"
    folder.mkdir()
    return Names(folder)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Return an HTTP session for API clients."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(CONDITION_TIMEOUT_SECONDS)
    ) as session:
        yield session


@pytest.fixture
def make_api(make_daemon: MakeDaemon, session: aiohttp.ClientSession) -> MakeApi:
    """Return a function that starts an instance and returns a client of its API."""

    async def make(**sections: dict[str, Any]) -> Client:
        return Client(session, await make_daemon(**sections).start())

    return make
