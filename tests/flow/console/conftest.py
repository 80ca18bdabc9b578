"""Visitors of a daemon's pages."""

from collections.abc import Callable

import aiohttp
import pytest

from tests.support.api import Client
from tests.support.visitor import Visitor

MakeVisitor = Callable[[Client], Visitor]


@pytest.fixture
def make_visitor(session: aiohttp.ClientSession) -> MakeVisitor:
    """Return a function that makes visitors of the daemon of an API client."""

    def make(api: Client) -> Visitor:
        return Visitor(session, api.daemon)

    return make
