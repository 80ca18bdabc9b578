"""Fixtures of all tests: a server per PostgreSQL version, its databases, and the markers of tests/run.py.

Reads --postgres. A test that uses the fixture `postgres` runs once per selected version.
"""

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import settings

from tests.support.breakable import BreakableServer
from tests.support.database import Cluster, Database, SharedDatabase
from tests.support.flow import Flow
from tests.support.installations import installation_near
from tests.support.postgres import LocalServer, Server, run_apart
from tests.support.sources import Source, SourceError, select
from tests.support.wire import Wire

FLOW = Path(__file__).parent / "flow"
FAULTS = Path(__file__).parent / "faults"
BROWSER = Path(__file__).parent / "browser"
CONSOLE = (BROWSER, FLOW / "console")
INTERFACES = (FLOW / "api", FLOW / "cli", FLOW / "reload")
# PostgreSQL versions differ in the planner, in the rights that a role needs, and in what DDL accepts.
# Scenarios run every stage once. All other behaviour is the same on each version: the gate tests it on one.
DIFFERS_BY_VERSION = re.compile(r"test_(\w+_)?(migrations|pages|plans|roles|scenarios)\.py")
SELECTED = pytest.StashKey[list[Source]]()

# No deadline: the first example of a database test also fills caches. In CI the examples are the same in
# every run, so that a failure is caused by the change under test.
settings.register_profile("developer", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


class MakeDatabase(Protocol):
    """Makes more databases, which are dropped at the end of the test."""

    async def __call__(self, *, migrated: bool = False, encoding: str = "UTF8") -> Database: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --postgres."""
    parser.addoption(
        "--postgres",
        action="append",
        default=[],
        metavar="MAJOR",
        help="PostgreSQL majors to test with: 15, or 15,18, or all (default: the first found)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look for the versions of --postgres, so that a missing version fails before the first test."""
    # SIGTERM stops the servers in the same way as SIGINT.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell starts background jobs with SIGINT ignored, and children inherit that; tests interrupt children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = config.getoption("postgres")
    if wanted:
        try:
            config.stash[SELECTED] = select(wanted)
        except SourceError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that needs a database once per selected PostgreSQL version."""
    if "postgres" in metafunc.fixturenames:
        chosen = selected_sources(metafunc.config)
        names = [f"pg{source.major}" for source in chosen]
        metafunc.parametrize("postgres", chosen, indirect=True, ids=names, scope="session")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the markers by which tests/run.py splits the tests into parts."""
    uses_postgres = "postgres" in getattr(item, "fixturenames", ())
    is_interface = any(item.path.is_relative_to(folder) for folder in INTERFACES)
    if uses_postgres:
        item.add_marker(pytest.mark.postgres)
    if item.path.is_relative_to(BROWSER):
        item.add_marker(pytest.mark.once)
    if any(item.path.is_relative_to(folder) for folder in CONSOLE):
        item.add_marker(pytest.mark.console)
    elif is_interface:
        item.add_marker(pytest.mark.interfaces)
    elif item.path.is_relative_to(FLOW) or (item.path.is_relative_to(FAULTS) and uses_postgres):
        item.add_marker(pytest.mark.daemon)
    if uses_postgres and not is_interface and DIFFERS_BY_VERSION.fullmatch(item.path.name):
        item.add_marker(pytest.mark.each_version)


def selected_sources(config: pytest.Config) -> list[Source]:
    """Return the sources that --postgres selected, or the first source found."""
    if SELECTED not in config.stash:
        try:
            config.stash[SELECTED] = select([])
        except SourceError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    return config.stash[SELECTED]


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Start a server of the PostgreSQL version for which the test runs."""
    source: Source = request.param
    server = source.make_server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def cluster(postgres: Server) -> Iterator[Cluster]:
    """Create the logins and the migrated template database on the server."""
    cluster = Cluster(postgres)
    try:
        run_apart(cluster.prepare())
        yield cluster
    finally:
        run_apart(cluster.remove())


@pytest.fixture(scope="module")
def breakable_server(postgres: Server) -> Iterator[BreakableServer]:
    """Start a durable server of the same version that only the tests of one module use and break."""
    server = BreakableServer(installation_near(postgres.major))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def breakable_cluster(breakable_server: BreakableServer) -> Cluster:
    """Create the logins and the template on it. A module that names it `cluster` moves its fixtures there."""
    cluster = Cluster(breakable_server)
    run_apart(cluster.prepare())
    return cluster


@pytest.fixture
async def make_database(cluster: Cluster) -> AsyncIterator[MakeDatabase]:
    """Return a function that makes databases: migrated or empty, and of any encoding."""
    made: list[Database] = []

    async def make(*, migrated: bool = False, encoding: str = "UTF8") -> Database:
        database = await cluster.create_database(migrated=migrated, encoding=encoding)
        made.append(database)
        return database

    yield make
    for database in made:
        await cluster.drop_database(database)


@pytest.fixture(scope="module")
async def shared_database(cluster: Cluster) -> AsyncIterator[SharedDatabase]:
    """Keep the database that the tests of a module use one after the other."""
    shared = SharedDatabase(cluster)
    yield shared
    await shared.drop()


@pytest.fixture
async def database(shared_database: SharedDatabase) -> AsyncIterator[Database]:
    """Return the migrated database of the module, without rows."""
    yield await shared_database.take()
    await shared_database.give_back()


@pytest.fixture
async def fresh_database(make_database: MakeDatabase) -> Database:
    """Make a migrated database that no test used before, for tests of first plans or many sessions."""
    return await make_database(migrated=True)


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    """Open a TCP proxy to the database that the test can cut."""
    if not isinstance(database.server, LocalServer):
        pytest.skip("needs a server that listens on TCP on this machine")
    wire = Wire(database.dsn("daemon"))
    await wire.open()
    yield wire
    await wire.close()


@pytest.fixture
async def empty_database(make_database: MakeDatabase) -> Database:
    """Make a database without the schema, owned by the migrator."""
    return await make_database()


@pytest.fixture
async def flow(database: Database) -> Flow:
    """Return the steps of the daemon, for a test to call one by one."""
    return await Flow.open(database)
