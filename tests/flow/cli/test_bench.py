"""Tests of `webhookd bench` with small numbers: plausible results, and a complete cleanup."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.embedded import Home
from tests.support.processes import children, standing_in
from tests.support.shell import Shell
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from webhookd.db.connection import connected
from webhookd.devtools.bench_database import new_name

SMALL = ("bench", "--seconds", "1", "--events", "300", "--subscriptions", "3", "--yes")
# Everything that a run could change in another database: rows, sequences, objects.
FINGERPRINT = """
select (select count(*) from webhookd.events), (select count(*) from webhookd.subscriptions),
       (select count(*) from webhookd.webhook_delivery_sagas),
       (select last_value from webhookd.events_id_seq),
       (select max(oid) from pg_class), (select count(*) from pg_class)
"""
BENCHES = """
select d.datname::text
from pg_database d join pg_roles r on r.oid = d.datdba
where d.datname like 'webhookd\\_bench\\_%' and r.rolname = $1
"""


class Place:
    """A shell with a DSN, and what a run leaves behind there."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self.database = database
        self.shell = Shell(folder, {"WEBHOOKD_DATABASE_DSN": database.dsn("migrator"), "TMPDIR": str(folder)})

    async def remains(self) -> list[str]:
        """Files, processes and databases of a run."""
        files = [it.name for it in self.folder.iterdir()]
        return [*files, *map(str, standing_in(self.folder)), *await self.databases()]

    async def databases(self) -> list[str]:
        """The databases of runs with our login."""
        superuser = await self.database.connect("superuser")
        return [row[0] for row in await superuser.fetch(BENCHES, self.database.login_name("migrator"))]


@pytest.fixture
async def place(database: Database, tmp_path: Path) -> AsyncIterator[Place]:
    """A shell whose login may create databases and is not a superuser."""
    superuser = await database.connect("superuser")
    migrator = database.login_name("migrator")
    await superuser.execute(f"alter role {migrator} createdb")
    yield Place(tmp_path, database)
    await superuser.execute(f"alter role {migrator} nocreatedb")


async def wait_for_line(process: subprocess.Popen[bytes], words: bytes) -> None:
    """Wait for a line of stdout that contains these words."""
    assert process.stdout is not None
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while words not in (line := await asyncio.to_thread(process.stdout.readline)):
            assert line, process.communicate()


async def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """The exit code, and the rest of stdout and stderr."""
    out, err = await asyncio.to_thread(process.communicate, timeout=CONDITION_TIMEOUT_SECONDS)
    return process.returncode, out.decode(), err.decode()


async def test_results_and_unchanged_database(place: Place) -> None:
    """One JSON object with consistent numbers; the configured database is unchanged."""
    superuser = await place.database.connect("superuser")
    before = await superuser.fetchrow(FINGERPRINT)
    ran = await place.shell.done(*SMALL, "--json", "--payload-bytes", "500")
    assert ran.err == ""
    [report] = ran.documents
    assert (report["deliveries"], report["subscriptions"], report["payload_bytes"]) == (300, 3, 500)
    assert report["deliveries_per_second"] == pytest.approx(300 / report["seconds"])
    assert report["without_database_per_second"] > 0
    assert report["latency_idle"]["events"] == 6
    assert report["latency_busy"]["events"] > 0
    for latency in (report["latency_idle"], report["latency_busy"]):
        assert 0 < latency["p50_ms"] <= latency["p99_ms"]
    # Both contain the payload.
    assert report["wal_bytes_per_delivery"] > 500
    assert report["storage_bytes_per_delivery"] > 500
    assert report["round_trip_ms"] > 0
    assert report["limit"] in ("receiver", "daemon", "machine", "database", "unknown")
    assert report["embedded"] is False
    assert report["postgresql"].startswith(str(place.database.server.major))
    assert await superuser.fetchrow(FINGERPRINT) == before
    assert await place.remains() == []


async def test_terminal_with_embedded_server() -> None:
    """A progress bar, then the report as text; the server created for the run is removed."""
    home = Home()
    try:
        shell = Shell(home.folder, {"WEBHOOKD_DATABASE_DATA_DIR": str(home.data), "TMPDIR": str(home.folder)})
        with shell.on_terminal(*SMALL) as terminal:
            await terminal.shows("4/6")
            await terminal.shows(", embedded")
            assert await terminal.ended() == 0
            assert re.search(r"[0-9,]+ deliveries/s", terminal.written)
            assert re.search(r"1 million deliveries take .* of WAL\s+and .* of database", terminal.written)
        assert list(home.folder.iterdir()) == []
        assert standing_in(home.folder) == []
    finally:
        home.remove()


async def test_interrupted_run_leaves_nothing(place: Place) -> None:
    """Ctrl-C while the daemon starts: exit code 130, plain lines, complete cleanup."""
    process = place.shell.start(*SMALL, "--events", "2000")
    await wait_for_line(process, b"4/6 Delivering 2,000 events")
    assert len(await place.remains()) > 2
    process.send_signal(signal.SIGINT)
    exit_code, out, err = await ended(process)
    assert (exit_code, out.splitlines()[-1], err) == (130, "Interrupted: cleaning up", "")
    assert await place.remains() == []


async def test_failed_run_leaves_nothing(place: Place) -> None:
    """When its receiver is killed, it prints one error line and cleans up."""
    # Long enough to be running when the receiver is killed.
    process = place.shell.start(*SMALL, "--seconds", "60")
    await wait_for_line(process, b"2/6 ")
    [receiver] = children(process.pid)
    os.kill(receiver, signal.SIGKILL)
    exit_code, out, err = await ended(process)
    assert (exit_code, out) == (1, "")
    assert err.startswith("webhookd: "), err
    assert len(err.splitlines()) == 1, err
    assert await place.remains() == []


async def test_refusals_create_nothing(place: Place) -> None:
    """Each refusal is one line with its exit code; no database is created."""
    daemon = place.database.login_name("daemon")
    async with connected(place.database.dsn("daemon")):  # like a running `serve`
        rights, served, away, setting = await asyncio.gather(
            place.shell.having(WEBHOOKD_DATABASE_DSN=place.database.dsn("daemon")).run(*SMALL),
            place.shell.run("bench"),
            place.shell.having(WEBHOOKD_DATABASE_DSN="postgresql://u@127.0.0.1:1/app").run("bench"),
            place.shell.having(WEBHOOKD_DELIVERY_CONCURRENCY="0").run("bench"),
        )
    assert [it.exit_code for it in (rights, served, away, setting)] == [1, 1, 69, 78]
    assert f"ALTER ROLE {daemon} CREATEDB CREATEROLE" in rights.error
    assert re.search(rf"\(in .*\b{place.database.name}\b.*\).* --yes", served.error)
    assert "127.0.0.1:1" in away.error
    assert "WEBHOOKD_DELIVERY_CONCURRENCY" in setting.error
    assert await place.remains() == []


async def test_clean_removes_the_database_of_a_killed_run(place: Place) -> None:
    """Its daemon ends by itself. --clean spares databases that are in use or have another name."""
    process = place.shell.start(*SMALL, "--seconds", "5")
    await wait_for_line(process, b"5/6 ")
    process.kill()
    await ended(process)
    [left] = await place.databases()
    superuser = await place.database.connect("superuser")
    await until(superuser, "select not exists (select from pg_stat_activity where datname = $1)", left)

    others = [new_name(), f"{new_name()}_mine"]
    try:
        for name in others:
            await superuser.execute(
                f"create database {name} owner {place.database.login_name('migrator')} template template0"
            )
        async with connected(place.database.server.dsn(others[0])):
            ran = await place.shell.done("bench", "--clean")
            assert ran.out == f"removed {left}\n"
        assert sorted(await place.databases()) == sorted(others)
    finally:
        for name in (left, *others):
            await superuser.execute(f"drop database if exists {name} with (force)")
