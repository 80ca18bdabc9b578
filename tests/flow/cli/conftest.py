"""A daemon to ask, and the command line that asks it."""

from pathlib import Path

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.shell import Shell


@pytest.fixture
async def api(make_api: MakeApi) -> Client:
    """Give a client of an instance that never holds back an endpoint because it fails."""
    return await make_api(orchestration={"failing_after": 100_000})


@pytest.fixture
def cli(api: Client, tmp_path: Path) -> Shell:
    """Give the command line, which finds the daemon by its environment."""
    return Shell(tmp_path, {"WEBHOOKD_URL": f"http://127.0.0.1:{api.daemon.port}"})


@pytest.fixture
def lonely(tmp_path: Path) -> Shell:
    """Give a command line that finds no daemon."""
    return Shell(tmp_path, {"WEBHOOKD_URL": "http://127.0.0.1:1"})
