"""A client of a running instance with a small body limit."""

import pytest

from tests.flow.conftest import MakeApi
from tests.support.api import Client
from tests.support.daemon import DaemonProcess

MAX_BYTES = 4096


@pytest.fixture
async def api(make_api: MakeApi) -> Client:
    """Give a client of an instance without tokens, which takes small bodies."""
    return await make_api(api={"max_payload_bytes": MAX_BYTES})


@pytest.fixture
def daemon(api: Client) -> DaemonProcess:
    """Give the instance itself."""
    return api.daemon
