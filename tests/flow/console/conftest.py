"""Visitors of a daemon's pages."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from tests.support.api import Client
from tests.support.visitor import HttpVisitor

MakeVisitor = Callable[[Client], HttpVisitor]


@pytest.fixture
async def make_visitor() -> AsyncIterator[MakeVisitor]:
    """Return a function that makes visitors of the daemon of an API client."""
    async with AsyncExitStack() as stack:
        made: list[HttpVisitor] = []

        def make(api: Client) -> HttpVisitor:
            made.append(HttpVisitor(api.daemon))
            return made[-1]

        yield make
        for visitor in made:
            await stack.enter_async_context(visitor)
