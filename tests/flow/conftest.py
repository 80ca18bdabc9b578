"""Fixtures of the daemon's tests: an endpoint with a certificate that the daemon trusts, and instances."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.endpoint import Endpoint

MakeDaemon = Callable[..., DaemonProcess]

# A lease is at least five seconds longer than the timeout.
SHORT = {"timeout_seconds": 1.0, "lease_seconds": 7.0}
# Longer than any test: what is held open is still open when the test looks.
HELD = {"timeout_seconds": 600.0, "lease_seconds": 605.0}
PATIENT = {"max_attempts": 1000}


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
def make_daemon(database: Database, certificates: Certificates, tmp_path: Path) -> Iterator[MakeDaemon]:
    """Give a way to make instances that are quick to look and to retry; the end of the test stops them."""
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
        daemon.configure(**sections)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.stop()
