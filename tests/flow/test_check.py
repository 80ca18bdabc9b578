"""`webhookd check` reports what `serve` would report, and both print the same warnings."""

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.flow.conftest import MakeDaemon
from tests.support.command import Command
from tests.support.database import Database
from tests.support.postgres import free_port, readdress


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The command line, in a folder without configuration."""
    return Command(tmp_path)


def password_of(dsn: str) -> str:
    """The password, which must not be printed."""
    password = urlsplit(dsn).password
    assert password
    return password


async def test_everything_is_good(command: Command, database: Database) -> None:
    """It prints the source of the configuration, the server, schema and login, but no password; exit 0."""
    dsn = database.dsn("daemon")
    ended = await command.run("check", dsn=dsn)
    assert (ended.code, ended.err) == (0, [])
    lines = [line for line in ended.out if line.startswith("✓ ")]
    subjects = [line.split()[1] for line in lines]
    assert subjects == ["configuration", "retries", "retention", "database", "schema", "login"]
    assert "WEBHOOKD_DATABASE_DSN from the environment" in lines[0]
    assert "5 attempts over 7m 30s" in lines[1]
    assert f"PostgreSQL {database.server.major}." in lines[3]
    assert database.login_name("daemon") in lines[5]
    assert password_of(dsn) not in "".join(ended.out)


async def test_json_output(command: Command, database: Database) -> None:
    """--json prints one document with the same findings."""
    ended = await command.run("check", "--json", dsn=database.dsn("daemon"))
    [line] = ended.out
    document = json.loads(line)
    assert document["good"] is True
    assert {finding["subject"] for finding in document["findings"]} == {
        *("configuration", "retries", "retention", "database", "schema", "login")
    }


async def test_empty_database(command: Command, empty_database: Database) -> None:
    """Exit 1 with the command to run, or a warning if `serve` would migrate it; nothing is created."""
    dsn = empty_database.dsn("migrator")
    ended = await command.run("check", dsn=dsn)
    assert ended.code == 1
    assert any(line.startswith("✗ schema") and "webhookd migrate" in line for line in ended.out)
    allowed = await command.run("check", dsn=dsn, WEBHOOKD_DATABASE_AUTO_MIGRATE="true")
    assert allowed.code == 0
    assert any(line.startswith("! schema") for line in allowed.out)
    connection = await empty_database.connect("superuser")
    assert await connection.fetchval("select to_regnamespace('webhookd')") is None


async def test_login_without_privileges(command: Command, database: Database) -> None:
    """A login that may only read: exit 1, with the role to grant."""
    ended = await command.run("check", dsn=database.dsn("reader"))
    assert ended.code == 1
    output = "".join(ended.out + ended.err)
    assert "webhookd_app" in output


@pytest.mark.parametrize("as_json", [False, True])
async def test_unreachable_database(command: Command, as_json: bool) -> None:
    """Exit 69 and one line, after the findings so far."""
    dsn = f"postgresql://a:hunter2@127.0.0.1:{free_port()}/b"
    ended = await command.run("check", *(["--json"] if as_json else []), dsn=dsn)
    assert ended.code == 69
    assert len(ended.err) == 1
    assert "hunter2" not in "".join(ended.out + ended.err)
    if as_json:
        document = json.loads(ended.out[0])
        assert document["good"] is False
        assert document["findings"][-1]["state"] == "failed"
    else:
        assert ended.out[0].startswith("✓ configuration")


async def test_wrong_password(command: Command, database: Database) -> None:
    """Exit 69, like `serve`."""
    dsn = readdress(database.dsn("daemon"), database.name, database.login_name("daemon"), "hunter2")
    assert "refused this login" in (await command.run("check", dsn=dsn)).err[0]


async def test_invalid_configuration(command: Command) -> None:
    """Exit 78, also for a remote database without TLS, unless that is allowed explicitly."""
    assert "WEBHOOKD_RETRY_MAX_ATTEMPTS" in await command.refused(
        78, "check", WEBHOOKD_RETRY_MAX_ATTEMPTS="many"
    )
    open_dsn = "postgresql://a:hunter2@db.invalid/b?sslmode=disable"
    line = await command.refused(78, "check", dsn=open_dsn)
    assert "sslmode=disable for db.invalid" in line
    assert "hunter2" not in line
    allowed = await command.run("check", dsn=open_dsn, WEBHOOKD_DATABASE_ALLOW_UNENCRYPTED="true")
    assert allowed.code == 69  # the host does not exist


async def test_check_creates_no_embedded_database(command: Command) -> None:
    """Without a DSN it says what `serve` would create, and warns that no database is configured."""
    data_dir = command.folder / "data"
    ended = await command.run("check", WEBHOOKD_DATABASE_DATA_DIR=str(data_dir))
    assert ended.code == 0
    assert ended.out[-1].startswith("✓ database")
    assert str(data_dir) in ended.out[-1]
    assert any(line.startswith("! database") and "WEBHOOKD_DATABASE_DSN" in line for line in ended.out)
    assert not data_dir.exists()


async def test_check_and_serve_print_the_same_warnings(
    command: Command, database: Database, make_daemon: MakeDaemon
) -> None:
    """Too many connections, a configuration file that every user may read or change."""
    daemon = make_daemon(database={"pool_size": 1000})
    daemon.config_path.chmod(0o666)
    warnings = [
        "this instance may need 1001 connections",
        "contains the database password and all users can read it",
        "users other than the owner",
    ]
    if os.geteuid() == 0:
        os.chown(daemon.config_path, 65534, 65534)
        warnings.append("belongs to another user")
    ended = await command.run("--config", str(daemon.config_path), "check")
    assert ended.code == 0, ended
    await daemon.start()
    for words in warnings:
        assert any(line.startswith("! ") and words in line for line in ended.out), words
        assert any(line["level"] == "warning" for line in daemon.logged(words)), words
    daemon.config_path.chmod(0o600)
    again = await command.run("--config", str(daemon.config_path), "check")
    assert "all users can read it" not in "".join(again.out)
    assert password_of(database.dsn("daemon")) not in "".join(ended.out + daemon.output_lines())


async def test_console_settings_are_checked(command: Command, database: Database, tmp_path: Path) -> None:
    """A public address without TLS is a warning; a logo that cannot be shown has the exit code of `serve`."""
    variables = {"WEBHOOKD_API_PUBLIC_URL": "http://hooks.example.com"}
    ended = await command.run("check", dsn=database.dsn("daemon"), **variables)
    assert ended.code == 0
    assert any(line.startswith("! console") and "not https" in line for line in ended.out)
    logo = tmp_path / "logo.png"
    logo.write_text("no image")
    ended = await command.run("check", dsn=database.dsn("daemon"), WEBHOOKD_CONSOLE_LOGO=str(logo))
    assert ended.code == 78
    assert any("is not a PNG" in line for line in ended.err)
