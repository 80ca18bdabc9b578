"""Fixtures of the daemon's tests: an endpoint with a certificate that the daemon trusts, and instances."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.invariants import AUDIT
from tests.support.traffic import Receiver

MakeDaemon = Callable[..., DaemonProcess]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Give a local authority and its certificates."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def endpoint(certificates: Certificates) -> Iterator[Endpoint]:
    """Give a customer's endpoint, which answers 200."""
    with Endpoint(certificates.good) as endpoint:
        yield endpoint


@pytest.fixture
async def receiver(flow: Flow, endpoint: Endpoint) -> Receiver:
    """Give a subscription in a database whose changes are audited."""
    await flow.superuser.execute(AUDIT)
    receiver = Receiver(endpoint)
    await receiver.subscribe(flow)
    return receiver


@pytest.fixture
def make_daemon(database: Database, certificates: Certificates, tmp_path: Path) -> Iterator[MakeDaemon]:
    """Give a way to make instances that are quick to look and to retry; the end of the test stops them."""
    made: list[DaemonProcess] = []

    def make(**sections: dict[str, Any]) -> DaemonProcess:
        folder = tmp_path / f"instance{len(made)}"
        folder.mkdir()
        daemon = DaemonProcess(
            folder,
            database.dsn("daemon"),
            delivery={"ca_file": str(certificates.ca_file), "allow_networks": ["127.0.0.0/8"]},
            retry={"base_delay_seconds": 0.05, "max_delay_seconds": 0.2},
            services={"poll_interval_seconds": 0.1},
            reaper={"interval_seconds": 0.2},
        )
        daemon.configure(**sections)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.stop()
