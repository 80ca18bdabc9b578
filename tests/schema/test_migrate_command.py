"""`webhookd migrate` as a process: exit codes and output, never a traceback."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.command import DSN, PROCESS_TIMEOUT_SECONDS, Command, Ended
from tests.support.database import Database
from tests.support.postgres import LocalServer, free_port
from tests.support.waiting import POLL_INTERVAL_SECONDS, until_blocked
from webhookd import __version__
from webhookd.db import migrations
from webhookd.db.connection import Connection

UP_TO_DATE = "The schema is up to date."


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The command line, in a folder without configuration."""
    return Command(tmp_path)


# Success


async def test_migrate_prints_what_it_applied(command: Command, empty_database: Database) -> None:
    """The first run prints everything that it applied, the second nothing; both exit with 0."""
    dsn = empty_database.dsn("migrator")
    applied = migrations.everything().describe()
    expected = [*(f"applied {name}" for name in applied), UP_TO_DATE]
    assert await command.run("migrate", dsn=dsn) == Ended(0, expected, [])
    assert await command.run("migrate", dsn=dsn) == Ended(0, [UP_TO_DATE], [])


async def test_check_prints_what_is_pending(command: Command, empty_database: Database) -> None:
    """`--check` exits with 1 and prints what is pending, later with 0, and changes nothing."""
    dsn = empty_database.dsn("migrator")
    pending = migrations.everything().describe()
    for _ in range(2):
        ended = await command.run("migrate", "--check", dsn=dsn)
        assert (ended.code, ended.out) == (1, [f"pending {name}" for name in pending])
        assert ended.err == ["The schema is not up to date: run `webhookd migrate`."]
    assert (await command.run("migrate", dsn=dsn)).code == 0
    assert await command.run("migrate", "--check", dsn=dsn) == Ended(0, [UP_TO_DATE], [])


async def test_daemon_login_can_check(command: Command, database: Database) -> None:
    """A login with only webhookd_app can check whether the schema is up to date."""
    ended = await command.run("migrate", "--check", dsn=database.dsn("daemon"))
    assert ended == Ended(0, [UP_TO_DATE], [])


async def test_dsn_in_a_configuration_file(command: Command, database: Database) -> None:
    """./webhookd.toml, $WEBHOOKD_CONFIG and --config all name the database; the environment's DSN wins."""
    good = f'[database]\ndsn = "{database.dsn("daemon")}"\n'
    closed = '[database]\ndsn = "postgresql://nobody@127.0.0.1:1/none"\n'
    (command.folder / "webhookd.toml").write_text(closed)
    (command.folder / "good.toml").write_text(good)
    assert (await command.run("migrate")).code == 69
    assert (await command.run("migrate", dsn=database.dsn("daemon"))).code == 0
    assert (await command.run("migrate", WEBHOOKD_CONFIG="good.toml")).code == 0
    assert (await command.run("--config", "good.toml", "migrate", WEBHOOKD_CONFIG="webhookd.toml")).code == 0


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["migrate", "--help"]])
async def test_help(command: Command, arguments: list[str]) -> None:
    """Help needs neither configuration nor database, and exits with 0."""
    ended = await command.run(*arguments)
    assert (ended.code, ended.err) == (0, [])
    assert ended.out[0].startswith("Usage: ")
    assert any(("--check" if "migrate" in arguments else "migrate") in line for line in ended.out)


async def test_version(command: Command) -> None:
    """`--version` prints program and version."""
    assert await command.run("--version") == Ended(0, [f"webhookd, version {__version__}"], [])


# Refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[database]\ndns = "x"\n', "webhookd.toml: unknown key database.dns: did you mean dsn?"),
        ("[databases]\n", "webhookd.toml: unknown section [databases]: did you mean database?"),
        ("[database]\ndsn = 5\n", "database.dsn"),
        ("[database]\ndsn = \n", "line 2,"),
    ],
    ids=["key", "section", "type", "syntax"],
)
async def test_bad_configuration_file(command: Command, text: str, expected: str) -> None:
    """The error names the file, the mistake and the probable correction."""
    (command.folder / "webhookd.toml").write_text(text)
    line = await command.refused(78, "migrate")
    assert "webhookd.toml" in line
    assert expected in line


async def test_missing_configuration_file(command: Command, database: Database) -> None:
    """A named file must exist, even if the environment has everything that is needed."""
    line = await command.refused(78, "--config", "no.toml", "migrate", dsn=database.dsn("daemon"))
    assert "no.toml" in line


@pytest.mark.parametrize(
    "dsn",
    [
        "nonsense",
        "mysql://u@127.0.0.1/x",
        "postgresql://u@127.0.0.1:port/x",
        "postgresql://u@127.0.0.1:99999/x",
        "postgresql://u@[::1/x",
        "postgresql://u@127.0.0.1/x?sslmode=perhaps",
    ],
)
async def test_malformed_dsn(command: Command, dsn: str) -> None:
    """A malformed DSN is an error of the configuration, not of the database."""
    assert "dsn" in await command.refused(78, "migrate", dsn=dsn)


async def test_closed_port_is_unavailable(command: Command) -> None:
    """A closed port exits with 69: the database is unavailable."""
    dsn = f"postgresql://nobody@127.0.0.1:{free_port()}/none"
    for arguments in (["migrate"], ["migrate", "--check"]):
        assert "database unavailable" in await command.refused(69, *arguments, dsn=dsn)


async def test_wrong_password_is_unavailable(command: Command, database: Database) -> None:
    """A refused login exits with 69 and the server's message, without the password."""
    if not isinstance(database.server, LocalServer):
        pytest.skip("the authentication of an existing server is not ours")
    dsn = database.server.dsn(database.name, database.login_name("migrator"), "wrong-password")
    line = await command.refused(69, "migrate", dsn=dsn)
    assert "password authentication failed" in line
    assert "wrong-password" not in line


async def test_missing_database_is_unavailable(command: Command, database: Database) -> None:
    """A missing database exits with 69."""
    dsn = database.dsn("migrator").replace(database.name, f"{database.name}_no")
    assert "does not exist" in await command.refused(69, "migrate", dsn=dsn)


@pytest.mark.parametrize("arguments", [["migrate", "--nonsense"], ["nonsense"], ["--nonsense"]])
async def test_unknown_word_is_a_usage_error(command: Command, arguments: list[str]) -> None:
    """An unknown option or command exits with 2, and is named."""
    assert "nonsense" in await command.refused(2, *arguments)


async def test_newer_schema_is_refused(command: Command, database: Database) -> None:
    """A newer schema exits with 1 and says what to do."""
    superuser = await database.connect("superuser")
    await superuser.execute(
        "insert into webhookd.schema_migrations (version, name, checksum, webhookd_version)"
        " values (9999, '9999_future', 'x', '99.0.0')"
    )
    for arguments in (["migrate"], ["migrate", "--check"]):
        line = await command.refused(1, *arguments, dsn=database.dsn("migrator"))
        assert "newer than this webhookd" in line
        assert "Upgrade webhookd" in line


async def test_login_without_privileges_is_refused(
    command: Command, empty_database: Database, database: Database
) -> None:
    """A login that can neither migrate nor read the schema exits with 1 and one line."""
    for each in (empty_database, database):
        assert "this login cannot" in await command.refused(1, "migrate", dsn=each.dsn("stranger"))


async def test_read_only_database_gives_one_line(command: Command, empty_database: Database) -> None:
    """A read-only database, as on a standby, gives a documented exit code and one line."""
    superuser = await empty_database.connect("superuser")
    await superuser.execute(f"alter database {empty_database.name} set default_transaction_read_only = on")
    ended = await command.run("migrate", dsn=empty_database.dsn("migrator"))
    assert ended.code in {1, 69}
    assert len(ended.err) == 1, ended.err
    assert "read-only" in ended.err[0]


async def test_lock_timeout_gives_one_line(command: Command, empty_database: Database) -> None:
    """A lock timeout behind another migration gives a documented exit code and one line."""
    superuser = await empty_database.connect("superuser")
    await superuser.execute(f"alter database {empty_database.name} set lock_timeout = '1ms'")
    async with superuser.transaction():
        await superuser.execute("select pg_advisory_xact_lock($1)", migrations._LOCK_KEY)
        ended = await command.run("migrate", dsn=empty_database.dsn("migrator"))
    assert ended.code in {1, 69}
    assert len(ended.err) == 1, ended.err
    assert "lock" in ended.err[0]


async def test_interrupted_migration_changes_nothing(command: Command, empty_database: Database) -> None:
    """Ctrl-C while it waits exits with 130, without a traceback and without a change in the database."""
    superuser = await empty_database.connect("superuser")
    async with superuser.transaction():
        await superuser.execute("select pg_advisory_xact_lock($1)", migrations._LOCK_KEY)
        process = await command.start("migrate", environment={DSN: empty_database.dsn("migrator")})
        await until_blocked(await empty_database.connect("superuser"), await until_connected(superuser))
        process.send_signal(signal.SIGINT)
        ended = await command.end(process)
    assert ended.code == 130
    assert "".join(ended.err) == ""
    assert await superuser.fetchval("select to_regnamespace('webhookd')") is None
    assert (await command.run("migrate", dsn=empty_database.dsn("migrator"))).code == 0


async def until_connected(superuser: Connection) -> int:
    """Return the backend pid of the command, as soon as it is connected to this database."""
    deadline = asyncio.get_running_loop().time() + PROCESS_TIMEOUT_SECONDS
    while asyncio.get_running_loop().time() < deadline:
        await superuser.execute("select pg_stat_clear_snapshot()")
        pid: int | None = await superuser.fetchval(
            "select pid from pg_stat_activity"
            " where application_name = 'webhookd' and datname = current_database()"
        )
        if pid is not None:
            return pid
        await asyncio.sleep(POLL_INTERVAL_SECONDS)
    raise AssertionError("the command did not connect")
