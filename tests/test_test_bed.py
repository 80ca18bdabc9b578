"""Tests of the test bed on a real server: accounts, logins, copies, and seeing a backend wait."""

import asyncio
import os
import pwd
from pathlib import Path

import asyncpg
import pytest

from tests.conftest import MakeDatabase
from tests.support.database import Cluster, Database, Login
from tests.support.postgres import LocalServer, Server, readdress
from tests.support.waiting import finished, until_blocked, until_finished
from webhookd.embedded.installation import Installation, can_run, server_account


def test_marker_follows_the_fixture(request: pytest.FixtureRequest, postgres: Server) -> None:
    """A test that uses the server is marked `postgres` and named after its major."""
    assert request.node.get_closest_marker("postgres") is not None
    assert request.node.name.endswith(f"[pg{postgres.major}]")


def test_no_marker_without_the_fixture(request: pytest.FixtureRequest) -> None:
    """A test that uses no server is not marked, and so runs with the first PostgreSQL only."""
    assert request.node.get_closest_marker("postgres") is None


async def test_server_has_the_major_it_says(database: Database) -> None:
    """The selected major is the one that answers."""
    connection = await database.connect("stranger")
    assert connection.get_server_version().major == database.server.major


def test_server_never_runs_as_root(postgres: Server) -> None:
    """The server's process belongs to the account that was chosen for it."""
    if not isinstance(postgres, LocalServer):
        pytest.skip("this server is not our child")
    account = server_account()
    expected = account.user_id if account else os.geteuid()
    assert expected != 0
    # The owner of the process's folder under /proc; macOS has none, and its ps would do.
    process_folder = Path(f"/proc/{postgres.process_id}")
    if process_folder.exists():
        assert process_folder.stat().st_uid == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another account to become")
def test_installation_closed_to_the_account_is_copied(tmp_path: Path) -> None:
    """Programs under a folder that the server's account cannot enter are run from a copy."""
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
    copy = installation.runnable_by(account, tmp_path / "copy")
    assert copy.bin_folder == tmp_path / "copy" / "closed" / "bin"
    assert can_run(copy, account)


def test_server_that_fails_to_start_shows_why_and_leaves_nothing(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error carries the end of the server's log, and its folder is gone."""
    if not isinstance(postgres, LocalServer):
        pytest.skip("this server is not our child")
    monkeypatch.setitem(postgres_settings(), "shared_buffers", "nonsense")
    broken = LocalServer(postgres._installation)
    with pytest.raises(Exception, match='invalid value for parameter "shared_buffers"'):
        broken.start()
    assert broken._folder is None


def postgres_settings() -> dict[str, str]:
    """Return the settings with which every server of ours starts."""
    from tests.support import postgres  # noqa: PLC0415 (the fixture has the same name)

    return postgres.SETTINGS


def test_readdress_keeps_the_host_and_escapes_the_rest() -> None:
    """Only database and login change, whatever characters they have."""
    dsn = "postgresql://root:secret@[::1]:5433/postgres?sslmode=disable&user=other"
    assert readdress(dsn, "a b", "c@d", "e/f") == (
        "postgresql://c%40d:e%2Ff@[::1]:5433/a%20b?sslmode=disable"
    )


@pytest.mark.parametrize("login", ["superuser", "migrator", "daemon", "application", "reader"])
async def test_logins_have_the_rights_of_their_kind(database: Database, login: Login) -> None:
    """Each login is who it says, and only the superuser is one."""
    connection = await database.connect(login)
    row = await connection.fetchrow(
        "SELECT rolsuper, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = current_user"
    )
    assert row is not None
    assert row["rolsuper"] == (login == "superuser")
    if login != "superuser":
        assert not row["rolcreatedb"]
        assert row["rolcreaterole"] == (login == "migrator")


async def test_a_wrong_password_is_refused(database: Database, postgres: Server) -> None:
    """The server checks passwords, so that a test of a login proves something."""
    if not isinstance(postgres, LocalServer):
        pytest.skip("how an existing server authenticates is its own affair")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(postgres.dsn(database.name, database.login_name("daemon"), "wrong"))


async def test_databases_are_apart(make_database: MakeDatabase) -> None:
    """What a test writes to its copy is in no other copy, and not in the template."""
    first = await make_database(migrated=True)
    writer = await first.connect("superuser")
    await writer.execute("CREATE TABLE trace ()")
    second = await make_database(migrated=True)
    reader = await second.connect("superuser")
    assert await reader.fetchval("SELECT to_regclass('trace')") is None


async def test_empty_database_belongs_to_the_migrator(empty_database: Database) -> None:
    """A database for migration tests has no table of ours, and the migrator may create some."""
    connection = await empty_database.connect("migrator")
    count = await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    assert count == 0
    await connection.execute("CREATE TABLE made_by_migrator ()")


async def test_encoding_can_be_chosen(make_database: MakeDatabase) -> None:
    """A migration test can have a database in another encoding."""
    database = await make_database(encoding="LATIN1")
    connection = await database.connect("migrator")
    assert await connection.fetchval("SHOW server_encoding") == "LATIN1"


async def test_drop_closes_what_the_test_left_open(cluster: Cluster) -> None:
    """A database goes away even while a connection of the test is in a transaction."""
    database = await cluster.create_database(migrated=True)
    connection = await database.connect()
    await connection.execute("BEGIN")
    await cluster.drop_database(database)
    assert connection.is_closed()
    async with cluster.superuser() as superuser:
        statement = "SELECT count(*) FROM pg_database WHERE datname = $1"
        assert await superuser.fetchval(statement, database.name) == 0


async def test_until_blocked_sees_a_waiting_backend(database: Database) -> None:
    """A backend that waits for another's lock is seen, and seen to end when the lock is freed."""
    holder, waiter, observer = [await database.connect("stranger") for _ in range(3)]
    await holder.execute("SELECT pg_advisory_lock(1)")
    task = asyncio.create_task(waiter.execute("SELECT pg_advisory_lock(1)"))
    await until_blocked(observer, waiter.get_server_pid(), holder.get_server_pid())
    assert not await finished(task)
    await holder.execute("SELECT pg_advisory_unlock(1)")
    await until_finished(task)
    assert task.exception() is None


async def test_until_blocked_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that never waits is an assertion error, not an endless test."""
    monkeypatch.setattr("tests.support.waiting.CONDITION_TIMEOUT_SECONDS", 0.05)
    idle, observer = await database.connect("stranger"), await database.connect("stranger")
    with pytest.raises(AssertionError, match="was not blocked by any other"):
        await until_blocked(observer, idle.get_server_pid())


def test_account_is_an_existing_one() -> None:
    """The account for servers is known to this machine, and is not root."""
    account = server_account()
    if account is None:
        assert os.geteuid() != 0
    else:
        assert pwd.getpwuid(account.user_id).pw_name == account.name
        assert account.user_id != 0
