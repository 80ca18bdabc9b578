"""Tests of the test bed on a real server: accounts, logins, shared and copied databases, waiting backends."""

import asyncio
import os
import pwd
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from tests.conftest import MakeDatabase
from tests.support.database import Cluster, Database, Login, SharedDatabase
from tests.support.flow import Flow
from tests.support.postgres import LocalServer, Server, readdress
from tests.support.waiting import finished, until_blocked, until_finished
from webhookd.embedded.installation import Installation, can_run, server_account


@pytest.fixture
async def shared(cluster: Cluster) -> AsyncIterator[SharedDatabase]:
    """Make a shared database that no other test uses."""
    shared = SharedDatabase(cluster)
    yield shared
    await shared.drop()


def test_server_fixture_adds_the_marker(request: pytest.FixtureRequest, postgres: Server) -> None:
    """A test that uses the server is marked `postgres` and named after its version."""
    assert request.node.get_closest_marker("postgres") is not None
    assert request.node.name.endswith(f"[pg{postgres.major}]")


def test_no_marker_without_the_fixture(request: pytest.FixtureRequest) -> None:
    """A test without a server is not marked, and runs with the first version only."""
    assert request.node.get_closest_marker("postgres") is None


async def test_server_has_the_selected_version(database: Database) -> None:
    """The server reports the selected version."""
    connection = await database.connect("stranger")
    assert connection.get_server_version().major == database.server.major


def test_server_never_runs_as_root(postgres: Server) -> None:
    """The server process belongs to the account that was chosen for it."""
    if not isinstance(postgres, LocalServer):
        pytest.skip("needs a server that the tests started")
    account = server_account()
    expected = account.user_id if account else os.geteuid()
    assert expected != 0
    # /proc names the owner of a process; macOS has no /proc.
    process_folder = Path(f"/proc/{postgres.process_id}")
    if process_folder.exists():
        assert process_folder.stat().st_uid == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another account")
def test_inaccessible_installation_is_copied(tmp_path: Path) -> None:
    """Programs in a folder that the server account cannot enter run from a copy."""
    account = server_account()
    assert account is not None
    closed = tmp_path / "closed"
    program = closed / "bin" / "postgres"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    closed.chmod(0o700)
    installation = Installation("18.0", program.parent, closed.parent, (closed,))
    assert not can_run(installation, account)

    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    umask = os.umask(0)
    try:
        copy = installation.copied_to(tmp_path / "copy")
    finally:
        os.umask(umask)
    assert copy.bin_folder == tmp_path / "copy" / "closed" / "bin"
    assert can_run(copy, account)
    for path in ((tmp_path / "copy"), *(tmp_path / "copy").rglob("*")):
        assert not path.stat().st_mode & 0o022, f"{path} is writable by other users"


def test_failed_start_shows_the_log_and_leaves_nothing(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the end of the server log, and the folder is removed."""
    if not isinstance(postgres, LocalServer):
        pytest.skip("needs a server that the tests started")
    monkeypatch.setitem(postgres_settings(), "shared_buffers", "nonsense")
    broken = LocalServer(postgres._installation)
    with pytest.raises(Exception, match='invalid value for parameter "shared_buffers"'):
        broken.start()
    assert broken._folder is None


def postgres_settings() -> dict[str, str]:
    """Return the settings with which every test server starts."""
    from tests.support import postgres  # noqa: PLC0415 (the fixture has the same name)

    return postgres.SETTINGS


def test_readdress_keeps_the_host_and_escapes_the_rest() -> None:
    """Only database and login change, and any characters are escaped."""
    dsn = "postgresql://root:secret@[::1]:5433/postgres?sslmode=disable&user=other"
    assert readdress(dsn, "a b", "c@d", "e/f") == (
        "postgresql://c%40d:e%2Ff@[::1]:5433/a%20b?sslmode=disable"
    )


@pytest.mark.parametrize("login", ["superuser", "migrator", "daemon", "application", "reader"])
async def test_logins_have_their_attributes(database: Database, login: Login) -> None:
    """Only the superuser is a superuser, and only the migrator may create roles."""
    connection = await database.connect(login)
    row = await connection.fetchrow(
        "SELECT rolsuper, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = current_user"
    )
    assert row is not None
    assert row["rolsuper"] == (login == "superuser")
    if login != "superuser":
        assert not row["rolcreatedb"]
        assert row["rolcreaterole"] == (login == "migrator")


async def test_wrong_password_is_refused(database: Database, postgres: Server) -> None:
    """The server checks passwords, so that tests of a login prove something."""
    if not isinstance(postgres, LocalServer):
        pytest.skip("an existing server may use another authentication")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(postgres.dsn(database.name, database.login_name("daemon"), "wrong"))


async def test_databases_are_isolated(make_database: MakeDatabase) -> None:
    """A change in one copy is in no other copy and not in the template."""
    first = await make_database(migrated=True)
    writer = await first.connect("superuser")
    await writer.execute("CREATE TABLE trace ()")
    second = await make_database(migrated=True)
    reader = await second.connect("superuser")
    assert await reader.fetchval("SELECT to_regclass('trace')") is None


async def test_shared_database_is_emptied_between_tests(shared: SharedDatabase) -> None:
    """The next test finds the rows, sequences and session settings of a new copy."""
    first = await shared.take()
    flow = await Flow.open(first)
    tables = "select count(*) from webhookd.events", "select count(*) from webhookd.subscriptions"
    subscription_id = await flow.subscribe()
    await flow.publish()
    await flow.superuser.execute("set timezone = 'Asia/Taipei'; set role webhookd_reader")
    await flow.daemon.execute("begin")
    await shared.give_back()
    second = await shared.take()
    assert second is first
    superuser = await second.connect("superuser")
    assert superuser is flow.superuser
    assert [await superuser.fetchval(table) for table in tables] == [0, 0]
    assert await superuser.fetchval("select current_user = session_user")
    assert await superuser.fetchval("show timezone") != "Asia/Taipei"
    assert flow.daemon.is_closed()
    assert await (await Flow.open(second)).subscribe() == subscription_id
    await shared.give_back()


@pytest.mark.parametrize(
    "change",
    [
        "create table trace ()",
        "drop index webhookd.idx_dead_saga",
        "revoke select on webhookd.events from webhookd_app",
        "alter database {name} set work_mem = '1MB'",
    ],
)
async def test_changed_schema_gives_the_next_test_a_new_copy(shared: SharedDatabase, change: str) -> None:
    """DDL, grants and settings of a database never reach the next test."""
    first = await shared.take()
    superuser = await first.connect("superuser")
    await superuser.execute(change.format(name=first.name))
    await shared.give_back()
    assert await shared.take() is not first
    await shared.give_back()


async def test_rolled_back_ddl_keeps_the_shared_database(shared: SharedDatabase) -> None:
    """Only committed DDL costs a new copy."""
    first = await shared.take()
    superuser = await first.connect("superuser")
    await superuser.execute("begin; create table trace (); rollback")
    await shared.give_back()
    assert await shared.take() is first
    await shared.give_back()


async def test_empty_database_belongs_to_the_migrator(empty_database: Database) -> None:
    """A database for migration tests has no table, and the migrator may create tables."""
    connection = await empty_database.connect("migrator")
    count = await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    assert count == 0
    await connection.execute("CREATE TABLE made_by_migrator ()")


async def test_encoding_can_be_chosen(make_database: MakeDatabase) -> None:
    """A migration test can use a database with another encoding."""
    database = await make_database(encoding="LATIN1")
    connection = await database.connect("migrator")
    assert await connection.fetchval("SHOW server_encoding") == "LATIN1"


async def test_drop_closes_open_connections(cluster: Cluster) -> None:
    """A database is dropped even if a connection of the test is in a transaction."""
    database = await cluster.create_database(migrated=True)
    connection = await database.connect()
    await connection.execute("BEGIN")
    await cluster.drop_database(database)
    assert connection.is_closed()
    async with cluster.superuser() as superuser:
        statement = "SELECT count(*) FROM pg_database WHERE datname = $1"
        assert await superuser.fetchval(statement, database.name) == 0


async def test_until_blocked_sees_a_waiting_backend(database: Database) -> None:
    """A waiting backend is seen, and its end when the lock is released."""
    holder, waiter, observer = [await database.connect("stranger") for _ in range(3)]
    await holder.execute("SELECT pg_advisory_lock(1)")
    task = asyncio.create_task(waiter.execute("SELECT pg_advisory_lock(1)"))
    await until_blocked(observer, waiter.get_server_pid(), holder.get_server_pid())
    assert not await finished(task)
    await holder.execute("SELECT pg_advisory_unlock(1)")
    await until_finished(task)
    assert task.exception() is None


async def test_until_blocked_has_a_time_limit(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that never waits is an assertion error, not an endless test."""
    monkeypatch.setattr("tests.support.waiting.CONDITION_TIMEOUT_SECONDS", 0.05)
    idle, observer = await database.connect("stranger"), await database.connect("stranger")
    with pytest.raises(AssertionError, match="was not blocked by any other"):
        await until_blocked(observer, idle.get_server_pid())


def test_server_account_exists() -> None:
    """The account for servers exists on this machine and is not root."""
    account = server_account()
    if account is None:
        assert os.geteuid() != 0
    else:
        assert pwd.getpwuid(account.user_id).pw_name == account.name
        assert account.user_id != 0
