"""What systemd is told: ready, reloading, stopping, alive; and that nothing depends on its listening."""

import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.flow.conftest import MakeDaemon
from tests.support.daemon import DaemonProcess
from tests.support.systemd import NotifySocket
from tests.support.wire import Wire

FORMS = [
    "path",
    pytest.param("abstract", marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux's")),
]


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give an address for a socket: a path, short, for it may have a hundred characters; or a name."""
    if getattr(request, "param", "path") == "abstract":
        yield f"@webhookd-test-{secrets.token_hex(8)}"
        return
    with tempfile.TemporaryDirectory(prefix="webhookd-") as folder:
        yield str(Path(folder) / "notify")


@pytest.fixture
async def systemd(address: str) -> AsyncIterator[NotifySocket]:
    """Give a systemd that listens there."""
    systemd = NotifySocket(address)
    await systemd.open()
    yield systemd
    systemd.close()


@pytest.fixture
def daemon(make_daemon: MakeDaemon, address: str) -> DaemonProcess:
    """Give an instance, not started yet, that is to speak to that address."""
    daemon = make_daemon()
    daemon.environment["NOTIFY_SOCKET"] = address
    return daemon


@pytest.mark.parametrize("address", FORMS, indirect=True)
async def test_its_life_is_told(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """Ready, each reload with its beginning by the monotonic clock, refused or not, and the stop; no more."""
    await daemon.start()
    await systemd.received(1)
    begun: list[str] = []
    for max_attempts in (7, 0):
        daemon.configure(retry={"max_attempts": max_attempts})
        before = time.monotonic_ns() // 1000
        assert await daemon.reload() == (max_attempts > 0)
        *_, reloading, _ = await systemd.received(2 * len(begun) + 3)
        told, usec = reloading.split("\n")
        name, number = usec.split("=")
        assert (told, name) == ("RELOADING=1", "MONOTONIC_USEC")
        assert before <= int(number) <= time.monotonic_ns() // 1000
        begun.append(reloading)
    daemon.sigterm()
    assert await daemon.ended() == 0
    await systemd.received(6)
    assert systemd.messages == ["READY=1", begun[0], "READY=1", begun[1], "READY=1", "STOPPING=1"]


async def test_not_ready_before_the_services_run(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """While the API cannot listen, whether this ends the daemon or is tried again, it is not ready."""
    with socket.create_server(("127.0.0.1", daemon.port)):
        daemon.launch()
        await daemon.until(lambda: daemon.process.poll() is not None or daemon.logged("api failed"), "ended")
        assert "READY=1" not in systemd.messages


async def test_a_reload_at_the_moment_it_is_ready(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """From READY on SIGHUP is a reload: before it, it would be the end."""
    systemd.heard = lambda message: (
        daemon.sighup() if message == "READY=1" and len(systemd.messages) == 1 else None
    )
    await daemon.start()
    await daemon.until(lambda: daemon.logged("was reloaded"), "reloaded")


async def test_the_watchdog_is_fed(make_daemon: MakeDaemon, systemd: NotifySocket, wire: Wire) -> None:
    """As long as the loop turns, with the database or without it."""
    daemon = make_daemon(database={"dsn": wire.dsn})
    daemon.environment |= {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "100000"}
    await daemon.start()
    await systemd.received(3, "WATCHDOG=1")
    wire.cut()
    await daemon.until(lambda: daemon.get("/readyz")[0] == 503, "without its database")
    fed = len(await systemd.received(0, "WATCHDOG=1"))
    await systemd.received(fed + 3, "WATCHDOG=1")


async def test_no_watchdog_unless_asked_for(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """Without WATCHDOG_USEC nothing is said of it, and nothing is restarted for it."""
    await daemon.start()
    await daemon.reload()
    assert not await systemd.received(0, "WATCHDOG")
    assert daemon.metric("webhookd_service_restarts_total") == 0


async def test_no_watchdog_of_another_process(daemon: DaemonProcess, systemd: NotifySocket) -> None:
    """WATCHDOG_PID names who is asked to feed it: here, not us."""
    daemon.environment |= {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}
    await daemon.start()
    await daemon.reload()
    assert not await systemd.received(0, "WATCHDOG")


@pytest.mark.parametrize("address", FORMS, indirect=True)
async def test_nobody_listens(daemon: DaemonProcess, address: str) -> None:
    """A socket that nobody reads any more, or no such name: told to nobody, and nothing else happens."""
    if not address.startswith("@"):
        gone = NotifySocket(address)
        await gone.open()
        gone.close()
    await daemon.start()
    assert await daemon.reload()
    daemon.sigterm()
    assert await daemon.ended() == 0


async def test_nothing_is_there(daemon: DaemonProcess) -> None:
    """A path that is none, as in a container that has systemd's environment and not its files."""
    await daemon.start()
    assert await daemon.reload()
