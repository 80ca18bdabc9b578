"""The tests' fixtures: a server for each selected PostgreSQL, and a database for each test.

Reads --postgres; parametrizes each test that needs a database, and marks it `postgres`.
"""

import os
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
# The commands, which ask a daemon; and what is decided by a file, a socket or a request before any database.
SAME_WITH_EVERY_DATABASE = (
    FLOW / "cli",
    FLOW / "test_addresses.py",
    FLOW / "test_endpoints.py",
    FLOW / "test_systemd.py",
    FLOW / "api" / "test_bodies.py",
    FLOW / "api" / "test_protocol.py",
    FLOW / "api" / "test_tokens.py",
    FLOW / "reload" / "test_access.py",
    FLOW / "reload" / "test_bad_files.py",
    FLOW / "reload" / "test_keys.py",
)
SELECTED = pytest.StashKey[list[Source]]()

# A database test's first example pays for caches, so no deadline can be right. In CI the examples
# are the same each time: a change is blamed only for what it broke.
settings.register_profile("developer", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


class MakeDatabase(Protocol):
    """Makes further databases, which the end of the test drops."""

    async def __call__(self, *, migrated: bool = False, encoding: str = "UTF8") -> Database:
        """Make one."""


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
    """Look for the PostgreSQL that was asked for, to complain before any test."""
    # A terminated run stops its servers just as an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Whoever runs us in the background of a script ignores SIGINT, and so would every program that we start:
    # those which a test interrupts must hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = config.getoption("postgres")
    if wanted:
        try:
            config.stash[SELECTED] = select(wanted)
        except SourceError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that needs a database once for each selected PostgreSQL."""
    if "postgres" in metafunc.fixturenames:
        chosen = selected_sources(metafunc.config)
        names = [f"pg{source.major}" for source in chosen]
        metafunc.parametrize("postgres", chosen, indirect=True, ids=names, scope="session")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that need a database, and those of the daemon: tests/run.py selects by these."""
    if "postgres" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.postgres)
    if item.path.is_relative_to(FLOW) or (
        item.path.is_relative_to(FAULTS) and "postgres" in getattr(item, "fixturenames", ())
    ):
        item.add_marker(pytest.mark.daemon)
    if any(item.path.is_relative_to(path) for path in SAME_WITH_EVERY_DATABASE):
        item.add_marker(pytest.mark.once)


def selected_sources(config: pytest.Config) -> list[Source]:
    """Return what --postgres selected, or the first source found."""
    if SELECTED not in config.stash:
        try:
            config.stash[SELECTED] = select([])
        except SourceError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    return config.stash[SELECTED]


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Give a running server of the PostgreSQL for which the test runs."""
    source: Source = request.param
    server = source.make_server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def cluster(postgres: Server) -> Iterator[Cluster]:
    """Give the server's logins and migrated template."""
    cluster = Cluster(postgres)
    try:
        run_apart(cluster.prepare())
        yield cluster
    finally:
        run_apart(cluster.remove())


@pytest.fixture(scope="module")
def breakable_server(postgres: Server) -> Iterator[BreakableServer]:
    """Give a durable server like the selected one, for the tests of one module alone."""
    server = BreakableServer(installation_near(postgres.major))
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def breakable_cluster(breakable_server: BreakableServer) -> Cluster:
    """Give its logins and template. Where it is the module's `cluster`, every fixture builds on it."""
    cluster = Cluster(breakable_server)
    run_apart(cluster.prepare())
    return cluster


@pytest.fixture
async def make_database(cluster: Cluster) -> AsyncIterator[MakeDatabase]:
    """Give a way to make databases: migrated or empty, and of any encoding."""
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
    """Give the database that the tests of a module use one after the other."""
    shared = SharedDatabase(cluster)
    yield shared
    await shared.drop()


@pytest.fixture
async def database(shared_database: SharedDatabase) -> AsyncIterator[Database]:
    """Give a migrated database without rows."""
    yield await shared_database.take()
    await shared_database.give_back()


@pytest.fixture
async def fresh_database(make_database: MakeDatabase) -> Database:
    """Give a migrated database of the test's own, for tests of what a session or table never used before does."""
    return await make_database(migrated=True)


@pytest.fixture
async def wire(database: Database) -> AsyncIterator[Wire]:
    """Give a way to the database that can be cut."""
    if not isinstance(database.server, LocalServer):
        pytest.skip("the way to this server is not known to be TCP on this machine")
    wire = Wire(database.dsn("daemon"))
    await wire.open()
    yield wire
    await wire.close()


@pytest.fixture
async def empty_database(make_database: MakeDatabase) -> Database:
    """Give a database without the schema, owned by the migrator."""
    return await make_database()


@pytest.fixture
async def flow(database: Database) -> Flow:
    """Give the daemon's steps, to be taken by hand."""
    return await Flow.open(database)
