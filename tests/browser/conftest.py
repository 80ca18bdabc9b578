"""Fixtures of the browser tests: Chromium, visitors whose problems fail the test, and daemons to visit.

A test takes `visitor`, parametrized by VIEWS where every view matters, or `visit` for several visitors or
another daemon. Without Chromium on this machine, all of them are skipped.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from playwright.async_api import Browser

from tests.browser.chromium import MISSING, find_chromium, running_chromium
from tests.browser.sites import Site, demo_site, hostile_site
from tests.browser.visitor import View, Visitor, visiting
from tests.flow.conftest import (  # noqa: F401  fixtures of the daemon tests
    MakeDaemon,
    certificates,
    database,
    endpoint,
    make_api,
    make_daemon,
    names,
    session,
)
from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster

Visit = Callable[..., Awaitable[Visitor]]


@pytest.fixture(scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Start Chromium once for all tests."""
    program = find_chromium()
    if program is None:
        pytest.skip(MISSING)
    async with running_chromium(program) as browser:
        yield browser


@pytest.fixture
def daemons_of_the_test(request: pytest.FixtureRequest) -> None:
    """Set up the daemons of a test before its windows, so that they stop after them.

    A page may still load something when a test ends, such as its icon.
    """
    if "make_daemon" in request.fixturenames:
        request.getfixturevalue("make_daemon")


@pytest.fixture
async def visit(browser: Browser, daemons_of_the_test: None) -> AsyncIterator[Visit]:  # noqa: ARG001
    """Return a function that opens a window for a daemon or an address.

    After the test, it asserts that no window had an unexpected problem.
    """
    visitors: list[Visitor] = []
    async with AsyncExitStack() as windows:

        async def open_window(at: DaemonProcess | str, view: View | None = None) -> Visitor:
            base_url = at if isinstance(at, str) else f"http://127.0.0.1:{at.port}"
            visitor = await windows.enter_async_context(visiting(browser, base_url, view or View()))
            visitors.append(visitor)
            return visitor

        yield open_window
        problems = [problem for visitor in visitors for problem in await visitor.unexpected()]
    assert not problems, "\n".join(problems)


@pytest.fixture
def view() -> View:
    """Return the view of `visitor`; `@pytest.mark.parametrize("view", VIEWS, ids=str)` replaces it."""
    return View()


@pytest.fixture
async def console(make_daemon: MakeDaemon) -> DaemonProcess:  # noqa: F811
    """Start an instance without tokens on an empty database."""
    return await make_daemon().start()


@pytest.fixture
async def visitor(visit: Visit, console: DaemonProcess, view: View) -> Visitor:
    """Open a window for `console`."""
    return await visit(console, view)


@pytest.fixture(scope="session")
async def demo(
    cluster: Cluster,
    certificates: Certificates,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """Start an instance with the demo data. All tests share it, so none may change it."""
    async with demo_site(cluster, certificates, tmp_path_factory.mktemp("demo")) as site:
        yield site


@pytest.fixture(scope="session")
async def hostile(
    cluster: Cluster,
    certificates: Certificates,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """Start an instance with the hostile data. All tests share it, so none may change it."""
    async with hostile_site(cluster, certificates, tmp_path_factory.mktemp("hostile")) as site:
        yield site
