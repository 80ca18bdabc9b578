"""A daemon, and a command line that is configured to use it."""

from pathlib import Path

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.shell import Shell


@pytest.fixture
async def api(make_api: MakeApi) -> Client:
    """A client of a daemon that never slows down deliveries to a failing endpoint."""
    return await make_api(orchestration={"failing_after": 100_000})


@pytest.fixture
def cli(api: Client, tmp_path: Path) -> Shell:
    """The command line, which finds the daemon through WEBHOOKD_URL."""
    return Shell(tmp_path, {"WEBHOOKD_URL": f"http://127.0.0.1:{api.daemon.port}"})


@pytest.fixture
def lonely(tmp_path: Path) -> Shell:
    """A command line that finds no daemon."""
    return Shell(tmp_path, {"WEBHOOKD_URL": "http://127.0.0.1:1"})
